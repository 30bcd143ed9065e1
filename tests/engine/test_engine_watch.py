"""The process of an engine is not taken for dead while it computes for long, or while a debugger
holds it."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from nanovllm.data.config import EngineConfig
from nanovllm.engine.client import EngineClient
from nanovllm.processes import supervisor
from nanovllm.processes.activity import in_step
from nanovllm.processes.channel import Failure
from nanovllm.processes.supervisor import is_debugged_or_dumps_core
from tests.server_process import wait_until
from tests.stand_ins import set_constants, set_program
from tests.supervision.silence import set_silence

SILENCE = 2.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what threads do")

# Stops every thread of a process, as `gdb -p` and `gcore` do, until a line comes.
DEBUGGER = """
import ctypes, os, sys
ATTACH, DETACH, ANY_THREAD = 16, 17, 0x40000000
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
threads = [int(name) for name in os.listdir(f"/proc/{sys.argv[1]}/task")]
for thread in threads:
    if ptrace(ATTACH, thread, None, None):
        sys.exit(print("refused", flush=True))
    os.waitpid(thread, ANY_THREAD)
print("held", flush=True)
input()
for thread in threads:
    ptrace(DETACH, thread, None, None)
"""


PROGRAM = (
    "from nanovllm.engine import client; from tests.engine.test_engine_watch import {0}; "
    "client.run_engine = {0}; client.main()"
)


def compute_for_long(*arguments: Any) -> None:
    """An engine with a step that takes longer than a hang."""
    set_silence(SILENCE / 4)
    end = time.thread_time() + SILENCE
    with in_step():
        while time.thread_time() < end:
            pass


def rest_until_told(config: EngineConfig, command_address: str, *arguments: Any) -> None:
    """An engine without requests."""
    commands = zmq.Context.instance().socket(zmq.PULL)
    commands.connect(command_address)
    commands.recv()


def started(monkeypatch: pytest.MonkeyPatch, engine: Callable[..., None]) -> EngineClient:
    set_program(monkeypatch, EngineClient, PROGRAM.format(engine.__name__))
    return EngineClient(EngineConfig(), {})


def test_a_step_of_an_engine_may_compute_for_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    client = started(monkeypatch, compute_for_long)
    client.expect_heartbeats()
    try:
        reasons: list[Failure | None] = []
        wait_until(lambda: reasons.append(client.look()) or reasons[-1])
        assert str(reasons[-1]).endswith("ended with exit code 0")
    finally:
        client.shutdown(0)


def test_an_engine_that_a_debugger_holds_goes_on_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_constants(monkeypatch, supervisor, SILENCE_SECONDS=SILENCE)
    client = started(monkeypatch, rest_until_told)
    born = client.heard
    try:
        wait_until(lambda: client.look() or client.heard > born)  # its heart beats
        client.expect_heartbeats()
        command = [sys.executable, "-c", DEBUGGER, str(client.pid)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as debugger:
            assert debugger.stdout is not None
            if debugger.stdout.readline() != "held\n":
                pytest.skip("a process may not trace another one here")
            held = time.monotonic()
            # Nothing is sent now. What was sent before has been taken in a second later.
            wait_until(lambda: client.look() or client.heard > held + 1)
            debugger.communicate("\n")
        resumed = client.heard
        wait_until(lambda: client.look() or client.heard > resumed)
        assert not client.look()
        client.shutdown(30)
        assert client.process.returncode == 0
    finally:
        client.shutdown(0)


@pytest.mark.parametrize(
    ("status", "counts"),
    [
        ("State:\tt (tracing stop)\nCoreDumping:\t0\n", True),
        ("State:\tD (disk sleep)\nCoreDumping:\t1\n", True),
        ("State:\tT (stopped)\nCoreDumping:\t0\n", False),
    ],
)
def test_debuggers_and_core_dumps_are_told_from_a_stop(
    monkeypatch: pytest.MonkeyPatch, status: str, counts: bool
) -> None:
    monkeypatch.setattr(pathlib.Path, "read_text", lambda path: status)
    assert is_debugged_or_dumps_core(1) is counts
