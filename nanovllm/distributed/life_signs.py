"""Signs of life: how a process shows that all is well, and how whoever has started it finds out which one is to blame
when something is not.

A rank can be lost in three ways. One that has died leaves a closed connection. One that is stopped, or keeps the interpreter
to itself, falls silent. And one whose thread waits for something that never comes goes on beating its heart: that one tells on
itself, for only there can it be seen that a thread is in the middle of a step, waits for nobody else, and yet uses no processor
time, and where it stands.

A rank that loops for ever is only found by the length of its step, after STEP_SECONDS. An engine by itself has no such limit: the
length of a step does not tell a loop from a slow machine. Ranks that wait for one another in collectives are found by whoever
hears them all: see `standstill`.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import pathlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from nanovllm.distributed.process_status import has_children_since, is_debugged_or_dumps_core
from nanovllm.distributed.standstill import Activity, StandstillDetector, latest_calls

logger = logging.getLogger(__name__)

# A process says so often that it lives, ...
HEARTBEAT_SECONDS = 1.0
# ... and one that has not for so long is taken to hang. So is one that has rested for so long in mid-step, ...
SILENCE_SECONDS = 4.0
# ... which its heart looks for so often.
LOOK_SECONDS = 0.25
# A thread that uses no more processor time than this rests, ...
REST_SECONDS = 0.001
# ... unless others compute for it, as those of OpenMP do: then the process uses a core for more than this share of the time.
# (Hearts and the threads of gloo use 1 to 2 %.)
COMPUTING_SHARE = 0.1
# A step of a rank that lasts for so long, and not because of others, does not end.
STEP_SECONDS = 300.0
# Who loses a peer reports it, too: for so long, look for who was first.
BLAME_SECONDS = 0.5


@dataclass
class Complaint:
    """Last words.

    Attributes:
        is_users: the user has asked for what cannot be; else something has failed.
        text: what it is; unless it is the user's, what can follow the name of who says it.
        time: seconds of the clock that machines share: who was first is to blame, for the others only miss it.
        is_certain: it is not because of others, whatever they say and whoever was first.
    """

    is_users: bool
    text: str
    time: float = field(default_factory=time.time)
    is_certain: bool = False

    @classmethod
    def of_error(cls) -> Complaint:
        """That the exception at hand has put an end to everything."""
        return cls(False, f"failed:\n{traceback.format_exc()}")


# What a rank says, unasked, when one of its KV transfers has ended.
TRANSFER_ENDED = "a KV transfer has ended"


# ---------------------------------------------------------------- what a thread does


class Block:
    """A context manager: whether a thread is in the middle of something (`depth` above 0), and when it last began."""

    depth, since = 0, 0.0

    def __enter__(self) -> None:
        self.depth += 1
        self.since = time.monotonic()

    def __exit__(self, *details: object) -> None:
        self.depth -= 1


class _Here(threading.local):
    """The blocks of the thread that asks."""

    def __init__(self) -> None:
        self.step, self.wait, self.rest = Block(), Block(), Block()


_here = _Here()


def in_step() -> Block:
    """`with in_step():` this thread is expected to move: see `HangDetector`. Costs less than a microsecond."""
    return _here.step


def waiting_for_others() -> Block:
    """`with waiting_for_others():` another process, or a disk, may be the reason if nothing moves here. Costs less than a
    microsecond."""
    return _here.wait


def at_rest() -> Block:
    """`with at_rest():` this thread waits for an order."""
    return _here.rest


def activity_of_this_thread(rank: int) -> Callable[[], dict[int, Activity]]:
    """A function that tells any thread what the calling thread does, which is that of a rank."""
    step, rest = _here.step, _here.rest
    return lambda: {rank: Activity(rest.depth > 0, step.since, latest_calls())}


# What the ranks do that this process watches.
_heard: dict[int, Activity] = {}


def heard_activities() -> dict[int, Activity]:
    """What the ranks do that this process watches, for whoever watches this process."""
    return dict(_heard)


class HangDetector:
    """Tells whether the thread that makes it hangs: it is in a step, waits for no other process, not even for a compiler
    that it has started in this step, and has used no processor time for SILENCE_SECONDS; the process's other threads have used
    next to none. Slow computing is no hang. Only Linux tells what a thread uses; elsewhere it never complains.

    Args:
        step_seconds: a thread whose step lasts for longer hangs, too, even if it computes.
    """

    def __init__(self, step_seconds: float = math.inf) -> None:
        self._step_seconds = step_seconds
        self._step, self._wait, self._thread = _here.step, _here.wait, threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread) if sys.platform == "linux" else None
        self._state: tuple[float, ...] = ()  # as of when it was last seen to move
        self._used = self._used_by_all = self._moved = self._looked = 0.0

    def look(self) -> str:
        """To be called every LOOK_SECONDS, by another thread. How long it has hung, and where; "" if it does not."""
        now, before = time.monotonic(), self._looked
        self._looked = now
        if self._clock is None or not self._step.depth or self._wait.depth:
            self._state = ()
            return ""
        state = self._step.since, self._wait.since
        used, used_by_all = time.clock_gettime(self._clock), time.process_time()
        is_helped = used_by_all - self._used_by_all > COMPUTING_SHARE * SILENCE_SECONDS
        # If nobody has looked for a while, the whole process was stopped, and the thread could not move.
        was_stopped = now - before > HEARTBEAT_SECONDS
        if state != self._state or used - self._used > REST_SECONDS or is_helped or was_stopped:
            self._state, self._used, self._used_by_all, self._moved = state, used, used_by_all, now
        if now - self._step.since > self._step_seconds:
            return f"a step has lasted for {self._step_seconds:g} seconds, and is at {self._place()}"
        if now - self._moved < SILENCE_SECONDS:
            return ""
        if has_children_since(now - self._step.since):
            self._moved = now  # when the child has ended, the thread has as much time again
            return ""
        if (self._step.since, self._wait.since) != state or time.clock_gettime(self._clock) > used:
            return ""  # it has moved meanwhile: it had waited for a child that has just ended
        return f"for {SILENCE_SECONDS:g} seconds it has been at {self._place()}"

    def _place(self) -> str:
        frame = sys._current_frames().get(self._thread)
        # The innermost frames: of a library, mostly, and who has called it.
        stack = itertools.islice(traceback.walk_stack(frame), 4) if frame is not None else ()
        return ", called from ".join(
            f"{'/'.join(pathlib.Path(frame.f_code.co_filename).parts[-2:])}:{line} in {frame.f_code.co_name}"
            for frame, line in stack
        )


# ---------------------------------------------------------------- who speaks


class Mouth(threading.Thread):
    """Says what there is to say, in order (an answer is a pair of the order's number and a value), and besides, every second,
    that this process lives, and what its ranks do: also while it waits for a GPU. When nobody listens any more, the process ends: it has lost
    its parent.

    Args:
        send: sends a message (a sign of life is a dict of what ranks do), or raises OSError.
        on_lost: called once nobody listens.
    """

    def __init__(self, send: Callable[[Any], None], on_lost: Callable[[], None] = lambda: os._exit(1)) -> None:
        super().__init__(name="mouth", daemon=True)
        self._send, self._on_lost = send, on_lost
        self._messages: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._detector: HangDetector | None = None
        self._activities: Callable[[], dict[int, Activity]] = dict

    def watch_this_thread(
        self, activities: Callable[[], dict[int, Activity]] = dict, step_seconds: float = math.inf
    ) -> None:
        """From now on, tell if the calling thread hangs (see `HangDetector`); and with every sign of life, what ranks do."""
        self._detector, self._activities = HangDetector(step_seconds), activities

    def say(self, message: Callable[[], Any]) -> None:
        """Queue a message, which the function returns once it is there."""
        self._messages.put(message)

    def answer(self, order: int, wait: Callable[[], Any]) -> None:
        """Queue the answer to an order, which `wait` returns once it is there."""

        def message() -> tuple[int, Any] | Complaint:
            try:
                return order, wait()
            except Exception:
                return Complaint.of_error()

        self.say(message)

    def complain(self, complaint: Complaint) -> None:
        """Queue the last message."""
        self.say(lambda: complaint)

    def close(self) -> None:
        """Say what is left, then end."""
        self._messages.put(None)
        self.join()

    def run(self) -> None:
        """The thread."""
        heart = threading.Thread(target=self._beat, name="heart", daemon=True)
        heart.start()
        while (message := self._messages.get()) is not None:
            if not self._speak(message()):
                break
        self._closed.set()
        heart.join(SILENCE_SECONDS)  # the interpreter must not end while a thread of it is in a library

    def _beat(self) -> None:
        """The thread that gives signs of life, and that cannot wait for what the mouth may wait for."""
        beaten, is_heard = time.monotonic(), True
        while is_heard and not self._closed.wait(LOOK_SECONDS):
            if hang := self._look():
                self._detector = None  # once is enough
                when = time.time() - SILENCE_SECONDS
                is_heard = self._speak(Complaint(False, f"hangs: {hang}", when, is_certain=True))
            elif time.monotonic() - beaten >= HEARTBEAT_SECONDS - LOOK_SECONDS / 2:
                beaten, is_heard = time.monotonic(), self._speak(self._activities())

    def _look(self) -> str:
        try:
            return self._detector.look() if self._detector is not None else ""
        except Exception:  # a process that cannot look after its thread shall not be taken for dead
            logger.exception("hangs will not be noticed")
            self._detector = None
            return ""

    def _speak(self, message: Any) -> bool:
        """Send; False if nobody listens."""
        try:
            with self._lock:
                self._send(message)
            return True
        except OSError:
            self._on_lost()
            return False


# ---------------------------------------------------------------- who listens


class Peer:
    """Another process, as whoever has started it knows it.

    Attributes:
        name, where: "rank 1" and "process 77", for messages.
        complaint: its last words, if it had to say why it ends.
        heard: when something came from it, in seconds of the monotonic clock.
        activities: what the ranks in it do, as of its latest sign of life.
        is_ready: it has loaded all that it needs.
        is_gone: nothing will come any more.
        pid: of its process, if that runs on this machine.
    """

    pid: int | None = None

    def __init__(self, name: str, where: str = "") -> None:
        self.name, self.where = name, where
        self.complaint: Complaint | None = None
        self.heard = time.monotonic()
        self.activities: dict[int, Activity] = {}
        self.is_ready = self.is_gone = False

    def take(self, message: Any) -> None:
        """Take in a message."""
        self.heard = time.monotonic()
        if isinstance(message, Complaint):
            self.complaint = message
        elif isinstance(message, dict):
            self.activities = message
            _heard.update(message)

    def drain(self, connection: Connection) -> None:
        """Take in every message that has arrived on a connection, without waiting for more."""
        try:
            while connection.poll(0):
                self.take(connection.recv())
        except (EOFError, OSError):
            self.is_gone = True

    def expect_heartbeats(self) -> None:
        """Count its silence from now on: it is ready. (While it loads, a library may keep the interpreter to itself for long, and
        its last heartbeat may be old.)"""
        self.is_ready = True
        self.heard = time.monotonic()

    def excuse(self) -> None:
        """Count its silence from now on. What its ranks did when they were last heard is out of date."""
        self.heard = time.monotonic()
        for rank in self.activities:
            _heard.pop(rank, None)
        self.activities = {}

    def end(self) -> str:
        """How it ended, in words; "" if it lives as far as one knows."""
        return "has ended, or cannot be reached" if self.is_gone else ""


class Watch:
    """Looks after processes that belong together: the first that is in trouble is the end of all."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.peers = peers
        self._looked = time.monotonic()
        self._standstill, self._compared = StandstillDetector(), 0.0

    def look(
        self, listen: Callable[[float], None], timeout: float = 0.0, last_words: Callable[[float], None] | None = None
    ) -> Complaint | None:
        """See how everybody is.

        Args:
            listen: waits up to so many seconds for something, and notes who has given signs of life, complains or is gone.
            timeout: seconds that this may take while all is well.
            last_words: as `listen`, once all is over, when nothing but complaints matters any more.

        Returns:
            Why all is over, with the name of who is to blame; None while all is well.
        """
        now = time.monotonic()
        if now - self._looked > 2 * HEARTBEAT_SECONDS:  # nobody was listening before
            self._standstill = StandstillDetector()
            for peer in self.peers:
                peer.heard = now
        listen(timeout)
        self._looked = now = time.monotonic()
        for peer in self.peers:
            if peer.complaint is not None or peer.is_gone:
                return self._blame(peer, last_words or listen)
            # Until it is ready, one may keep the interpreter to itself while it imports its libraries.
            if peer.is_ready and now - peer.heard > SILENCE_SECONDS:
                if peer.pid is not None and is_debugged_or_dumps_core(peer.pid):
                    peer.excuse()
                    continue
                text = f"hangs: nothing was heard of it for {SILENCE_SECONDS:g} seconds"
                return Complaint(False, f"{peer.name}, {peer.where}, {text}")
        # Heartbeats come every second, while this is called in every step.
        return self._compare(now) if now - self._compared > LOOK_SECONDS else None

    def _compare(self, now: float) -> Complaint | None:
        """Whether ranks wait for one another in vain."""
        self._compared = now
        peers = {rank: peer for peer in self.peers for rank in peer.activities}
        activities = {rank: peer.activities[rank] for rank, peer in peers.items()}
        heard = {rank: peer.heard for rank, peer in peers.items()}
        waiting = self._standstill.look(activities, heard, SILENCE_SECONDS)
        if waiting is None:
            return None
        names = {rank: _name_of(rank, peer) for rank, peer in peers.items()}
        return Complaint(False, waiting.describe(names, SILENCE_SECONDS))

    def _blame(self, suspect: Peer, listen: Callable[[float], None]) -> Complaint:
        """Something is wrong with this one, or with another that it works with: find out whose fault it is."""
        deadline = time.monotonic() + BLAME_SECONDS
        while time.monotonic() < deadline and not (self._fallen() or self._certain()):
            listen(0.01)
        listen(0.01)  # what was said just before the end
        complaints = [(peer.complaint, peer) for peer in self.peers if peer.complaint is not None]
        for complaint, _ in complaints:
            if complaint.is_users:
                return complaint
        if (fallen := self._fallen()) is not None:
            return Complaint(False, f"{fallen.name}, {fallen.where}, {fallen.end()}")
        if complaints:
            complaint, peer = min(complaints, key=lambda pair: (not pair[0].is_certain, pair[0].time))
            return Complaint(False, f"{peer.name}, {peer.where}, {complaint.text}")
        return Complaint(False, f"{suspect.name}, {suspect.where}, has closed its connection")

    def _fallen(self) -> Peer | None:
        """One that was killed says nothing; all who speak may only miss it."""
        return next((peer for peer in self.peers if peer.complaint is None and peer.end()), None)

    def _certain(self) -> bool:
        return any(peer.complaint is not None and peer.complaint.is_certain for peer in self.peers)


def _name_of(rank: int, peer: Peer) -> str:
    """What to call a rank. The ranks of an engine are several."""
    name = f"{peer.name}, {peer.where}"
    return name if len(peer.activities) == 1 else f"rank {rank} of {name}"
