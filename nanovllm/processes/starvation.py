"""Run delay: how long the threads of a process have waited for a processor. A process that is
stopped or hangs has none.

Linux counts it per thread, in /proc/PID/task/TID/schedstat. Elsewhere, and where a kernel does not
count, no delay is found, so that every silence counts as a hang."""

from __future__ import annotations

import contextlib
import pathlib
import time
from dataclasses import dataclass
from typing import NamedTuple

from nanovllm.processes.activity import LOOK_SECONDS

# A thread that waits for a lock or for an event wakes often, for some microseconds each time, and
# waits for a processor each time. It is not starved: it has run more often than this, ...
MANY_SLICES = 10
# ... and for less than this time per slice. (A thread that computes runs until the kernel preempts
# it, after some milliseconds.)
LONG_SLICE_SECONDS = 0.0005


class ThreadTimes(NamedTuple):
    """Scheduling statistics of a thread since it began.

    Attributes:
        used: seconds on a processor.
        delay: seconds on a run queue. The kernel adds a wait to it when the wait ends.
        num_slices: how often it got a processor.
        is_runnable: it is on a processor or on a run queue now.
    """

    used: float
    delay: float
    num_slices: int
    is_runnable: bool


def thread_times(pid: int) -> dict[int, ThreadTimes]:
    """Times of a process's threads, by the kernel's number of the thread; empty where the kernel
    does not tell."""
    times = {}
    for folder in pathlib.Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has just ended, or belongs to another user
            used, delay, num_slices = map(int, (folder / "schedstat").read_text().split())
            # The state follows the name, which is in parentheses and may contain some itself.
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if num_slices:  # 0: the kernel does not count
                times[int(folder.name)] = ThreadTimes(
                    used / 1e9, delay / 1e9, num_slices, state == "R"
                )
    return times


@dataclass
class _Thread:
    """A thread since the first look.

    Attributes:
        first, last: its times at the first look and at the latest one.
        queued: when the wait for a processor was first seen that lasts still; otherwise the time of
            the latest look.
    """

    first: ThreadTimes
    last: ThreadTimes
    queued: float

    def look(self, times: ThreadTimes, now: float) -> None:
        """Take in its times."""
        has_run = (times.used, times.num_slices) != (self.last.used, self.last.num_slices)
        if has_run or not times.is_runnable:
            self.queued = now
        self.last = times

    def starved(self, now: float) -> float:
        """Seconds for which it has waited for a processor, if that is what keeps it from its work;
        otherwise 0."""
        used = self.last.used - self.first.used
        num_slices = self.last.num_slices - self.first.num_slices
        if num_slices > MANY_SLICES and used < LONG_SLICE_SECONDS * num_slices:
            return 0.0
        return self.last.delay - self.first.delay + now - self.queued


class RunDelay:
    """Run delay of a process since this object was created.

    Args:
        pid: of a process on this machine; without one, no delay is found.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._threads: dict[int, _Thread] = {}
        self._looked = self._seconds = 0.0
        self.look()

    def look(self, besides: int = 0) -> float:
        """Seconds for which a thread of the process has waited for a processor: the thread that has
        waited longest.

        Call this every LOOK_SECONDS: the wait that lasts still is known only as far as it was
        looked at.

        Args:
            besides: the kernel's number of a thread that does not count.
        """
        now = time.monotonic()
        if self._pid is None or now - self._looked < LOOK_SECONDS / 2:
            return self._seconds
        self._looked = now
        for number, times in thread_times(self._pid).items():
            thread = self._threads.setdefault(number, _Thread(times, times, now))
            thread.look(times, now)
        delays = [
            thread.starved(now) for number, thread in self._threads.items() if number != besides
        ]
        self._seconds = max(delays, default=0.0)
        return self._seconds
