"""What the system tells about a process of this machine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time

import psutil


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
