"""Prepares a run of pytest: signals have their usual effect, and no process outlives the run, even
if it is killed.

`python -m tests.run_guard MARK` is the reaper, which ends what the run with this mark has started.
"""

from __future__ import annotations

import os
import pathlib
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil

from tests import forking

# A variable in the environment of all processes that a run starts, directly or not: its value names
# the run.
VARIABLE = "NANOVLLM_TEST_RUN"
GRACE_SECONDS = 3.0
ROOT = pathlib.Path(__file__).parents[1]

_reapers: list[subprocess.Popen[bytes]] = []  # keeps their pipes open


def pytest_configure() -> None:
    """Restore SIGINT and SIGTERM if they are ignored, as in `make test &` (child processes inherit
    that), and start a reaper."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in {
            signal.SIGINT: signal.default_int_handler,
            signal.SIGTERM: signal.SIG_DFL,
        }.items():
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, handler)
    mark = secrets.token_hex(8)
    # Only this process holds the other end of the reaper's stdin, so the pipe closes however this
    # process ends. The reaper has a session of its own, which the terminal's Ctrl-C does not reach,
    # and no mark: another run may have started this one.
    command = [sys.executable, "-m", "tests.run_guard", mark]
    unmarked = {name: value for name, value in os.environ.items() if name != VARIABLE}
    _reapers.append(
        forking.Started(
            command, stdin=subprocess.PIPE, cwd=ROOT, env=unmarked, start_new_session=True
        )
    )
    os.environ[VARIABLE] = mark


def processes_of(mark: str) -> list[psutil.Process]:
    """The processes that the run has started and that have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(VARIABLE) == mark:
                found.append(process)
        except psutil.Error:  # it has just ended, is a zombie, or belongs to another user
            continue
    return found


def main() -> None:
    """Wait until the run ends, let the processes that it started end by themselves, and kill those
    that do not."""
    sys.stdin.read()
    deadline = time.monotonic() + GRACE_SECONDS
    while left := processes_of(sys.argv[1]):
        if time.monotonic() > deadline:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(0.1)


if __name__ == "__main__":
    main()
