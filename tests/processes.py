"""Processes that tests start: forked from one server process that has imported torch and the
engine.

A new interpreter takes two seconds of a core to import them, and most tests of ranks need less than
that."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from nanovllm.lab.processes import CONTEXT, PRELOADED

# Takes effect when the first process starts, hence after pytest has collected the tests.
PRELOADED_BY_TESTS = [
    "nanovllm",
    "nanovllm.executor.worker",
    "tests.kv_engines",
    "nanovllm.kv_transfer.pd.disaggregated",
]
CONTEXT.set_forkserver_preload([*PRELOADED, *PRELOADED_BY_TESTS])


class ForkedProgram:
    """What `subprocess.Popen` makes of `python -c CODE FD`, forked from the server."""

    def __init__(
        self, command: list[str], env: dict[str, str], pass_fds: list[int], **_: Any
    ) -> None:
        (descriptor,) = pass_fds
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            self._process = CONTEXT.Process(target=_run, args=(command[2], connection, env))
            self._process.start()
        self.args, self.pid = command, self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends; returns the exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # It has just ended, and the server is about to say so.
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)


class StartedOrForked(subprocess.Popen[Any]):
    """In the place of `subprocess.Popen`: programs of Python that get one descriptor are forked,
    all others started."""

    def __new__(cls, command: Any, *_: Any, **options: Any) -> Any:
        is_ours = len(command) == 4 and command[0] == sys.executable and command[1] == "-c"
        if is_ours and options.get("pass_fds") == [int(command[3])]:
            return ForkedProgram(command, **options)
        return super().__new__(cls)


def _run(program: str, connection: socket.socket, environment: dict[str, str]) -> None:
    os.setpgid(0, 0)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # type: ignore[assignment] # a test's may be captured
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", str(connection.detach())]
    exec(program, {"__name__": "__main__"})
