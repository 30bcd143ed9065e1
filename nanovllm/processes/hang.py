"""Finds out whether a thread of this process hangs: it is in the middle of a step, waits for no
other process, and uses no processor time. Only the process itself can tell, since its heartbeats go
on."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import traceback

import psutil

from nanovllm.processes.activity import HEARTBEAT_SECONDS, SILENCE_SECONDS, here
from nanovllm.processes.starvation import RunDelay

# A thread that uses no more processor time than this rests, ...
REST_SECONDS = 0.001
# ... unless other threads (of OpenMP, for example) compute for it: then the process uses more than
# this share of a core. (Heartbeats and the threads of gloo use 1 to 2 %.)
COMPUTING_SHARE = 0.1


def has_children_since(seconds: float) -> bool:
    """Whether this process has a living child that it has started in the last `seconds`."""
    # By psutil's clock, which is the wall clock in whole seconds plus the ticks since the machine
    # was started.
    start = psutil.boot_time() + time.clock_gettime(time.CLOCK_BOOTTIME) - seconds - 0.1
    with contextlib.suppress(psutil.Error):  # a child may end meanwhile
        children = psutil.Process().children()
        return any(
            each.create_time() > start and each.status() != psutil.STATUS_ZOMBIE
            for each in children
        )
    return False


class HangDetector:
    """Detects that the thread that creates it hangs: the thread is in a step, waits for no other
    process, not even for a compiler that it has started in this step, and has used no processor
    time for SILENCE_SECONDS, and the process's other threads have used almost none. Slow
    computation is no hang, nor is waiting for a processor. Only Linux reports a thread's time;
    elsewhere no hang is detected."""

    def __init__(self) -> None:
        self._step = here.step
        self._wait = here.wait
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread) if sys.platform == "linux" else None
        self._state: tuple[float, ...] = ()  # when the thread last made progress
        self._used = self._used_by_all = self._moved = self._looked = 0.0
        # Of this process, while the thread makes no progress.
        self._run_delay: RunDelay | None = None

    def look(self) -> str:
        """How long the thread has hung, and where; "" if it does not. Another thread calls this
        every LOOK_SECONDS."""
        now = time.monotonic()
        before = self._looked
        self._looked = now
        if self._clock is None or not self._step.depth or self._wait.depth:
            self._state = ()
            return ""
        state = self._step.since, self._wait.since
        used = time.clock_gettime(self._clock)
        used_by_all = time.process_time()
        is_helped = used_by_all - self._used_by_all > COMPUTING_SHARE * SILENCE_SECONDS
        # If the last look is long ago, the whole process was stopped.
        was_stopped = now - before > HEARTBEAT_SECONDS
        if state != self._state or used - self._used > REST_SECONDS or is_helped or was_stopped:
            self._state = state
            self._used = used
            self._used_by_all = used_by_all
            self._moved = now
        if now - self._moved < SILENCE_SECONDS / 4:
            self._run_delay = None
            return ""
        if self._run_delay is None:
            self._run_delay = RunDelay(os.getpid())
        # This thread gets its processor.
        starved = self._run_delay.look(besides=threading.get_native_id())
        if now - self._moved - starved < SILENCE_SECONDS:
            return ""
        has_child = has_children_since(now - self._step.since)
        # If a child for which it has waited ended just now, the thread goes on. If this look took
        # long, the whole process was stopped, and the child may have ended since.
        if (
            has_child
            or time.monotonic() - now > HEARTBEAT_SECONDS
            or (self._step.since, self._wait.since) != state
            or time.clock_gettime(self._clock) > used
        ):
            self._moved = now
            return ""
        return f"for {SILENCE_SECONDS:g} seconds it has been at {self._place()}"

    def _place(self) -> str:
        # The innermost frames: mostly those of a library, and of its caller.
        frames = itertools.islice(traceback.walk_stack(sys._current_frames().get(self._thread)), 4)
        places = [
            (frame.f_code.co_filename.split("/")[-2:], line, frame.f_code.co_name)
            for frame, line in frames
        ]
        return ", called from ".join(
            f"{'/'.join(path)}:{line} in {name}" for path, line, name in places
        )
