"""Heartbeats: how a process shows that it works, and how its parent finds out which process is to
blame for a failure.

A rank can be lost in three ways. If it has died, its connection is closed. If it is stopped, or a
library holds the interpreter's lock, its heartbeats stop. If its thread waits for something that
never comes, it still sends heartbeats, so it must detect its own hang: its thread is in the middle
of a step, waits for no other process, and uses no processor time.

A rank that loops for ever is found by the other ranks, whose collectives wait for it in vain. The
parent, which hears all ranks, finds those that wait for one another in collectives: see
`standstill`.

Under load a process may get no processor for seconds. The time for which it waits for one does not
count: see `starvation`."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import cast

import psutil

from nanovllm.distributed.activity import LOOK_SECONDS, here
from nanovllm.distributed.processes import how_it_ended
from nanovllm.distributed.standstill import Activity, explain_standstill, latest_calls
from nanovllm.distributed.starvation import RunDelay

# Time between two heartbeats.
HEARTBEAT_SECONDS = 1.0
# A process hangs that has sent nothing for this long, or whose thread has used no processor time in
# a step for this long.
SILENCE_SECONDS = 4.0
# A thread that uses no more processor time than this rests, ...
REST_SECONDS = 0.001
# ... unless other threads (of OpenMP, for example) compute for it: then the process uses more than
# this share of a core. (Heartbeats and the threads of gloo use 1 to 2 %.)
COMPUTING_SHARE = 0.1
# Processes that lose a peer report that, too: how long to look for the first failure.
BLAME_SECONDS = 0.5


class PeerLost(ConnectionError):
    """The process at the other end has died or left; the message says which."""


@dataclass
class Complaint:
    """The reason why a process ends; its last message.

    Attributes:
        is_users: the user has asked for something impossible; otherwise something has failed.
        text: the reason; unless it is the user's, the rest of a sentence that begins with the
            process's name.
        time: on the wall clock, which machines share: the first complaint counts, since later ones
            may result from it.
        is_certain: the reason is in this process, even if another complaint was earlier.
    """

    is_users: bool
    text: str
    time: float = field(default_factory=time.time)
    is_certain: bool = False

    @classmethod
    def of_error(cls) -> Complaint:
        """A complaint about the exception that is being handled."""
        return cls(False, f"failed:\n{traceback.format_exc()}")


# A rank's notification that one of its KV transfers has ended is an answer with this number, which
# no order has.
TRANSFER_ENDED = sys.maxsize


# ------------------------------------------------------------ what the system tells about processes


def is_debugged_or_dumps_core(pid: int) -> bool:
    """Whether a debugger has stopped a process, or it has crashed and writes its core dump. Only
    Linux tells."""
    with contextlib.suppress(OSError):
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        return any(line.startswith("State:\tt") or line == "CoreDumping:\t1" for line in lines)
    return False


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


# ---------------------------------------------------------------- what a thread does


def activity_of_this_thread(rank: int) -> Callable[[], dict[int, Activity]]:
    """A function with which any thread can ask what the calling thread, that of a rank, does."""
    step = here.step
    rest = here.rest
    return lambda: {rank: Activity(rest.depth > 0, step.since, latest_calls())}


# What the ranks that this process watches do: a process reports it to its own parent.
heard_activities: dict[int, Activity] = {}


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
        # If a child for which it has waited ended just now, the thread goes on.
        if (
            has_child
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


# ---------------------------------------------------------------- the sender


class Mouth(threading.Thread):
    """Sends a process's messages to its parent in order (an answer is a pair of the order's number
    and a value), and a heartbeat every second, even while the next message waits for a GPU. If the
    parent is gone, a timer ends the process.

    It starts at once, and reports if the thread that creates it hangs (see `HangDetector`).

    Args:
        send: sends a message, or raises OSError.
        activities: what the ranks do, which is a heartbeat.
        patience: seconds that a process without a parent has to end by itself.
    """

    def __init__(
        self,
        send: Callable[[object], None],
        activities: Callable[[], dict[int, Activity]] = dict,
        patience: float = 0.0,
    ) -> None:
        super().__init__(name="mouth", daemon=True)
        self._send = send
        self._activities = activities
        self._patience = patience
        self._messages: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._detector: HangDetector | None = HangDetector()
        self.start()

    def say(self, message: Callable[[], object]) -> None:
        """Queue a message; the function waits for it and returns it. If it fails, the message is a
        `Complaint`."""
        self._messages.put(message)

    def answer(self, order: int, wait: Callable[[], object]) -> None:
        """Queue the answer to an order; `wait` waits for it and returns it."""
        self.say(lambda: (order, wait()))

    def close(self) -> None:
        """Send what is queued, then end."""
        self._messages.put(None)
        self.join()

    def run(self) -> None:
        """Send the queued messages."""
        heart = threading.Thread(target=self._beat, name="heart", daemon=True)
        heart.start()
        while (message := self._messages.get()) is not None:
            try:
                words = message()
            except Exception:
                words = Complaint.of_error()
            if not self._speak(words):
                break
        self._closed.set()
        # The interpreter must not end while one of its threads is in a library.
        heart.join(SILENCE_SECONDS)

    def _beat(self) -> None:
        """Send heartbeats, in a thread of its own: the next message may take long."""
        beaten = time.monotonic()
        is_heard = True
        while is_heard and not self._closed.wait(LOOK_SECONDS):
            if self._detector is not None and (hang := self._detector.look()):
                self._detector = None  # once is enough
                when = time.time() - SILENCE_SECONDS
                is_heard = self._speak(Complaint(False, f"hangs: {hang}", when, is_certain=True))
            elif time.monotonic() - beaten >= HEARTBEAT_SECONDS - LOOK_SECONDS / 2:
                beaten = time.monotonic()
                is_heard = self._speak(self._activities())

    def _speak(self, message: object) -> bool:
        """Send a message; False if the parent is gone."""
        try:
            with self._lock:
                self._send(message)
            return True
        except OSError:
            timer = threading.Timer(self._patience, os._exit, (1,))
            timer.daemon = True
            timer.start()
            return False


# ---------------------------------------------------------------- the receiver


class Peer:
    """Another process, as its parent knows it.

    Attributes:
        name, where: "rank 1" and "process 77", for messages.
        complaint: the reason why it ends, if it has sent one.
        heard: when its latest message arrived, in seconds of the monotonic clock.
        activities: what the ranks in it do, as of its latest heartbeat.
        is_ready: it has loaded everything.
        is_gone: its connection is closed.
        connection: to it.
        process: that this process has started (a `Popen`); None if another program has.
        pid: of its process, if that runs on this machine.
    """

    def __init__(
        self,
        name: str,
        where: str = "",
        connection: Connection | None = None,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.name = name
        self.where = where if process is None else f"process {process.pid}"
        self.connection = cast(Connection, connection)  # None in tests that send nothing
        self.process = process
        self.pid = process.pid if process is not None else None
        self.complaint: Complaint | None = None
        self.heard = time.monotonic()
        self.activities: dict[int, Activity] = {}
        self.is_ready = self.is_gone = False
        self._run_delay: RunDelay | None = None

    def __str__(self) -> str:
        return f"{self.name}, {self.where}"

    def take(self, message: object) -> None:
        """Take in a message."""
        self.heard = time.monotonic()
        self._run_delay = None
        if isinstance(message, Complaint):
            self.complaint = message
        elif isinstance(message, dict):
            self.activities = message
            heard_activities.update(message)

    def fileno(self) -> int:
        """The connection's file descriptor, to wait for messages."""
        return self.connection.fileno()

    def drain(self) -> None:
        """Take in every message that has arrived, without waiting for more."""
        try:
            while self.connection.poll(0):
                self.take(self.connection.recv())
        except (EOFError, OSError):
            self.is_gone = True

    def unexplained_silence(self, now: float) -> float:
        """Seconds for which nothing was heard of it, without those in which it waited for a
        processor. Only Linux tells the latter, and only about a process of this machine; otherwise
        all of the silence."""
        silence = now - self.heard
        if silence < SILENCE_SECONDS / 4:
            self._run_delay = None
            return silence
        if self._run_delay is None:
            self._run_delay = RunDelay(self.pid)
        return silence - self._run_delay.look()

    def expect_heartbeats(self) -> None:
        """From now on, its silence counts: it is ready. (While it loads, a library may hold the
        interpreter's lock for long.)"""
        self.is_ready = True
        self.heard = time.monotonic()

    def end(self) -> str:
        """How it ended, in words; "" while it seems to live."""
        if self.process is None:
            return "has ended, or cannot be reached" if self.is_gone else ""
        return how_it_ended(self.process)

    def failure(self) -> Complaint | None:
        """Its complaint, or how it ended without one, as when it was killed: complaints of others
        may result from that."""
        if self.complaint is None and (end := self.end()):
            return Complaint(False, end, time=0.0, is_certain=True)
        return self.complaint


class Watch:
    """Watches processes that belong together: if one fails, all must end."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = peers
        self._looked = time.monotonic()
        self._compared = 0.0
        self._since = 0.0
        self._activities: dict[int, Activity] = {}  # of all ranks, the same since then
        self._run_delays: list[RunDelay] = []  # of all ranks, while they seem to stand still

    def look(self, listen: Callable[[float], None], timeout: float = 0.0) -> Complaint | None:
        """Check all processes.

        Args:
            listen: waits up to this many seconds for messages, and has the peers take them in.
            timeout: for `listen`, while all is well.

        Returns:
            What has failed, with the name of the process that is to blame; None while all is well.
        """
        now = time.monotonic()
        if now - self._looked > 2 * HEARTBEAT_SECONDS:  # the caller has not listened meanwhile
            self._activities = {}
            for peer in self.peers:
                peer.heard = now
        listen(timeout)
        self._looked = now = time.monotonic()
        for peer in self.peers:
            if peer.complaint is not None or peer.is_gone:
                return self._blame(peer, listen)
            # Until it is ready, a process may hold the interpreter's lock while it imports
            # libraries.
            if peer.is_ready and peer.unexplained_silence(now) > SILENCE_SECONDS:
                if peer.pid is not None and is_debugged_or_dumps_core(peer.pid):
                    for rank in peer.activities:  # they may be outdated
                        heard_activities.pop(rank, None)
                    peer.heard = now
                    peer.activities = {}
                    continue
                return Complaint(
                    False, f"{peer}, hangs: nothing was heard of it for {SILENCE_SECONDS:g} seconds"
                )
        # Heartbeats arrive every second, while this is called in every step.
        return self._compare(now) if now - self._compared > LOOK_SECONDS else None

    def _compare(self, now: float) -> Complaint | None:
        """Find ranks that wait for one another for ever: the heartbeats of all ranks have said the
        same for long."""
        self._compared = now
        peers = {rank: peer for peer in self.peers for rank in peer.activities}
        activities = {rank: peer.activities[rank] for rank, peer in peers.items()}
        heard = min((peer.heard for peer in peers.values()), default=0.0)
        if activities != self._activities:
            self._activities = activities
            self._since = heard
        # An engine may have several ranks.
        names = {
            r: str(peer) if len(peer.activities) == 1 else f"rank {r} of {peer}"
            for r, peer in peers.items()
        }
        silence = heard - self._since
        text = ""
        if silence > SILENCE_SECONDS / 4:
            text = explain_standstill(activities, names, SILENCE_SECONDS)
        if not text:
            self._run_delays = []
            return None
        if not self._run_delays:
            self._run_delays = [RunDelay(peer.pid) for peer in set(peers.values())]
        # A rank may seem idle because it gets no processor to take its order.
        starved = max(run_delay.look() for run_delay in self._run_delays)
        return Complaint(False, text) if silence - starved > SILENCE_SECONDS else None

    def _blame(self, suspect: Peer, listen: Callable[[float], None]) -> Complaint:
        """Find out which process has failed first: the suspect, or another one that it works
        with."""
        deadline = time.monotonic() + BLAME_SECONDS
        is_known = False
        failures: list[tuple[Complaint, Peer]] = []
        while not is_known:
            # What was sent just before the end arrives with the last look.
            is_known = time.monotonic() > deadline or any(
                failure.is_certain for failure, _ in failures
            )
            listen(0.01)
            failures = [
                (failure, peer) for peer in self.peers if (failure := peer.failure()) is not None
            ]
        if not failures:
            return Complaint(False, f"{suspect}, has closed its connection")
        first, peer = min(
            failures, key=lambda pair: (not pair[0].is_users, not pair[0].is_certain, pair[0].time)
        )
        return first if first.is_users else Complaint(False, f"{peer}, {first.text}")
