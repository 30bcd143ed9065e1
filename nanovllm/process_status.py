"""What the system tells about a process of this machine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time

import psutil


def has_children_since(seconds: float) -> bool:
    """Whether a process lives that this one has started in the last so many seconds. (The wall clock may be set, and
    psutil goes by it; what /proc says is in ticks since the machine was started.)"""
    # A child may end meanwhile; and some systems show nobody the processes of others.
    with contextlib.suppress(OSError, psutil.Error):
        for child in psutil.Process().children():
            fields = pathlib.Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
            if fields[0] != "Z" and age < seconds + 0.1:
                return True
    return False
