"""Processes that get no processor for seconds, or that hang: `PROGRAM` starts one, whose parent
sends the number of a busy core."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from multiprocessing.connection import Connection

from nanovllm.processes.activity import in_step
from nanovllm.processes.channel import Channel
from tests.supervision.silence import set_silence

# Shorter than the time between two of a thread's slices of a busy core.
SILENCE_SECONDS = 0.6
LOWEST_PRIORITY = 19
PROGRAM = "from tests.supervision.starved import start; start('{}')"


def start(what: str) -> None:
    """What a process does: it gets the number of a core, and sends heartbeats."""
    set_silence(SILENCE_SECONDS)
    connection = Connection(int(sys.argv[1]))
    globals()[what](connection, connection.recv())


def lower(core: int) -> None:
    """Have this thread, and those that it starts, get the core rarely."""
    os.sched_setaffinity(0, {core})
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)


def compute() -> None:
    """One call into a library, which does not hold the interpreter's lock."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)


def beat(connection: Connection, core: int) -> None:
    """A thread that waits, and one that sends heartbeats."""
    lower(core)
    Channel(connection)
    threading.Event().wait()


def hold_the_lock(connection: Connection, core: int) -> None:
    """A library that sleeps."""
    os.sched_setaffinity(0, {core})
    Channel(connection)
    connection.recv()
    ctypes.PyDLL(None).sleep(60)


def compute_in_a_step(connection: Connection, core: int) -> None:
    """The thread of the heartbeats has its usual priority, here and below."""
    Channel(connection)
    lower(core)
    with in_step():
        compute()


def have_a_thread_compute_in_a_step(connection: Connection, core: int) -> None:
    """A step that waits for a thread."""
    Channel(connection)

    def help_out() -> None:
        lower(core)
        compute()

    with in_step():
        thread = threading.Thread(target=help_out)
        thread.start()
        thread.join()


def hang_in_a_step(connection: Connection, core: int) -> None:
    """A step that waits for ever."""
    Channel(connection)
    lower(core)
    with in_step():
        threading.Event().wait()
