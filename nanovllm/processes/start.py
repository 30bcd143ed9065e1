"""Processes of this machine: how to start one with a connection to it, and how to end it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import IO

import psutil

# Bytes; then come "/nanovllm-", eight letters, and the name of the socket.
MAX_SOCKET_FOLDER = 70


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block: after half a message, a connection could not be used
    any more."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])


def make_socket_folder() -> str:
    """Make a temporary folder that this user alone can read, for sockets. A socket's path may have
    107 bytes on Linux, and 103 on macOS, so that a long TMPDIR is passed over for /tmp."""
    is_short = len(os.fsencode(tempfile.gettempdir())) <= MAX_SOCKET_FOLDER
    return tempfile.mkdtemp(prefix="nanovllm-", dir=None if is_short else "/tmp")


def start_process(
    words: Sequence[str],
    environment: Mapping[str, str],
    wrapper: Sequence[str] = (),
    log: IO[bytes] | IO[str] | None = None,
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start Python with these arguments, and a connection to it. The number of its socket is the
    last argument.

    Args:
        environment: variables that differ from those of this process.
        wrapper: a command that the process's own is appended to.
        log: gets what the process prints; by default, this process's output does.
    """
    ours, theirs = socket.socketpair()
    command = [*wrapper, sys.executable, *words, str(theirs.fileno())]
    variables = os.environ | dict(environment)
    # In a process group of its own, because Ctrl-C in a terminal is for the parent alone.
    with theirs:
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )
    return process, Connection(ours.detach())


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, in words; "" while it lives."""
    code = process.poll()
    if code is None:
        return ""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill processes, and wait for their end."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process of this machine, such as SIGSTOP or Ctrl-Z. A
    debugger's stop does not count."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants. SIGKILL also ends processes that are stopped or
    hang."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                each.kill()
