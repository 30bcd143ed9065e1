"""Processes of this machine: starting them, ending them, and what the system tells about them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

import psutil


def start_process(words: Sequence[str], environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start Python with these arguments, and a connection to it. The number of its socket is the last argument.

    Args:
        environment: variables that differ from those of this process.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *words, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | dict(environment),
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in a terminal is for the parent alone
        )
    return process, Connection(ours.detach())


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """How a process ended, in words; "" while it lives."""
    code = process.poll()
    if code is None:
        return ""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def end_processes(processes: Sequence[subprocess.Popen[bytes]], folder: str) -> None:
    """Kill processes and remove a folder."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def is_debugged_or_dumps_core(pid: int) -> bool:
    """Whether a debugger has stopped a process, or it has crashed and writes its core dump. Only Linux tells."""
    with contextlib.suppress(OSError):
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        return any(line.startswith("State:\tt") or line == "CoreDumping:\t1" for line in lines)
    return False


def has_children_since(seconds: float) -> bool:
    """Whether this process has a living child that it has started in the last `seconds`. (psutil goes by the wall clock, which
    can be set; /proc counts ticks since the machine was started.)"""
    # A child may end meanwhile, and some systems hide the processes of other users.
    with contextlib.suppress(OSError, psutil.Error):
        for child in psutil.Process().children():
            fields = pathlib.Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
            if fields[0] != "Z" and age < seconds + 0.1:
                return True
    return False
