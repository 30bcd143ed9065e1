"""What a thread does: it must make progress in a step, waits for other processes, or rests.
`HangDetector` watches this, and heartbeats tell it to the parent."""

import threading
import time

# Time between two looks at what other threads and processes do.
LOOK_SECONDS = 0.25
# Time between two heartbeats.
HEARTBEAT_SECONDS = 1.0
# A process hangs that has sent nothing for this long, or whose thread has used no processor time in
# a step for this long.
SILENCE_SECONDS = 4.0
# How long a rank without a batch waits for a KV transfer to end before it reports that none has.
IDLE_SECONDS = 0.001


class Block:
    """A context manager that notes whether a thread is inside (`depth` above 0), and when it last
    entered."""

    depth = 0
    since = 0.0

    def __enter__(self) -> None:
        self.depth += 1
        self.since = time.monotonic()

    def __exit__(self, *details: object) -> None:
        self.depth -= 1


class _Here(threading.local):
    """The blocks of the calling thread."""

    def __init__(self) -> None:
        self.step = Block()
        self.wait = Block()
        self.rest = Block()


here = _Here()


def in_step() -> Block:
    """`with in_step():` this thread must make progress; see `HangDetector`. Costs less than a
    microsecond."""
    return here.step


def waiting_for_others() -> Block:
    """`with waiting_for_others():` this thread waits for another process or a disk. Costs less than
    a microsecond."""
    return here.wait


def at_rest() -> Block:
    """`with at_rest():` this thread waits for an order."""
    return here.rest
