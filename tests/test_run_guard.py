"""How a run of the tests ends: with a verdict when a test hangs or its worker dies, and with no
process left when it is killed."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import psutil
import pytest

from tests.run_guard import ROOT
from tests.server_process import are_gone, wait_until

pytestmark = pytest.mark.started

# A program that runs the command in its arguments as a shell does for `command &`.
IGNORING = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "os.execv(sys.executable, sys.argv[1:])"
)


def command_of(folder: pathlib.Path, code: str, *options: str) -> list[str]:
    """A command that runs pytest over one file, with this project's settings and fixtures."""
    (folder / "test_it.py").write_text(code)
    plugins = ["-p", "tests.run_guard", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-q", *plugins]
    return [sys.executable, "-m", "pytest", *settings, *options, str(folder / "test_it.py")]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


HANGS = """
import pytest
import threading

def waits_too():
    threading.Event().wait()

@pytest.mark.timeout(3)
def test_waits():
    threading.Thread(target=waits_too, daemon=True).start()
    threading.Event().wait()

def test_after_it():
    pass
"""


def test_a_test_that_hangs_fails_with_all_stacks_and_the_next_one_runs(
    tmp_path: pathlib.Path,
) -> None:
    ended = run(command_of(tmp_path, HANGS))
    assert ended.returncode == 1 and "1 failed, 1 passed" in ended.stdout, (
        ended.stdout + ended.stderr
    )
    assert "Timeout (>3.0s)" in ended.stdout and "in waits_too" in ended.stdout


# A call that keeps the interpreter's lock: no thread of Python can end it.
HANGS_IN_C = """
import ctypes

def test_waits():
    ctypes.PyDLL(None).sleep(600)

def test_after_it():
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="calls the C library")
def test_a_worker_that_dies_is_a_verdict_and_names_its_test(tmp_path: pathlib.Path) -> None:
    limits = ["-o", "timeout=0", "-o", "faulthandler_timeout=5"]
    ended = run(command_of(tmp_path, HANGS_IN_C, *limits, "-n", "1", "--dist", "loadfile"))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "crashed while running 'test_it.py::test_waits'" in ended.stdout
    assert "Timeout (0:00:05)!" in ended.stderr and "in test_waits" in ended.stderr


SIGNALS = """
import pytest, signal, subprocess, sys

def test_here():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

@pytest.mark.started
def test_in_a_child():
    code = "import signal; print(signal.getsignal(signal.SIGINT).__name__)"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed == "default_int_handler\\n"
"""


def test_sigint_works_in_a_run_that_was_started_with_it_ignored(tmp_path: pathlib.Path) -> None:
    ended = run([sys.executable, "-c", IGNORING, *command_of(tmp_path, SIGNALS)])
    assert ended.returncode == 0, ended.stdout


# A server with its engine, and a child of a child in a session of its own, whose parent has ended.
STARTS = """
import json, pathlib, pytest, subprocess, sys, threading

@pytest.fixture(scope="session")
def tiny_model():
    return pathlib.Path({model!r})

ORPHAN = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()']).pid)"

def test_starts_processes(server):
    pipes = {{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}}
    child = subprocess.Popen([sys.executable, "-c", ORPHAN], start_new_session=True, **pipes)
    pids = [server.process.pid, server.engine.pid, int(child.stdout.readline())]
    file = pathlib.Path(__file__).with_name("pids")
    file.write_text(json.dumps(pids) + "\\n")
    threading.Event().wait()
"""


def test_nothing_is_left_of_a_run_that_is_killed(
    tmp_path: pathlib.Path, tiny_model: pathlib.Path
) -> None:
    pids = tmp_path / "pids"
    command = command_of(tmp_path, STARTS.format(model=str(tiny_model)), "-n", "1")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as pytest_run:
        try:
            wait_until(
                lambda: pids.exists() and pids.read_text().endswith("\n"),
                200,
                "the test has started",
            )
            processes = [psutil.Process(pid) for pid in json.loads(pids.read_text())]
        finally:
            pytest_run.kill()
    wait_until(lambda: are_gone(processes), 60, f"all processes have ended: {processes}")
