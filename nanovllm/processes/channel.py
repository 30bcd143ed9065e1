"""The channel from a process to the parent that watches it.

Both talk over one socket. The parent's first message holds the settings, and orders may follow.
Answers to orders, heartbeats and, at the end, the reason of a failure go back, all of them through
the process's `Channel`. The parent's end is a `Child`, see `supervisor`."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from nanovllm.processes.activity import HEARTBEAT_SECONDS, LOOK_SECONDS, SILENCE_SECONDS, here
from nanovllm.processes.hang import HangDetector
from nanovllm.processes.standstill import Activity, latest_calls

# A rank's notification that one of its KV transfers has ended is an answer with this number, which
# no order has.
TRANSFER_ENDED = sys.maxsize


class PeerLost(ConnectionError):
    """The process at the other end has died or left; the message says which."""


@dataclass
class Failure:
    """Why a process ends or must be ended: its last message, or what its supervisor has found.

    Attributes:
        is_users: the user has asked for something impossible; otherwise something has failed.
        text: the reason.
        time: on the wall clock, which machines share: the first failure counts, since later ones
            may result from it.
        is_certain: the reason is in this process, even if another failure was earlier. Otherwise it
            is an exception, which may result from the loss of another process.
        process: which one; its supervisor knows.
    """

    is_users: bool
    text: str
    time: float = field(default_factory=time.time)
    is_certain: bool = False
    process: str = ""

    @classmethod
    def of_exception(cls) -> Failure:
        """The exception that is being handled."""
        return cls(False, traceback.format_exc())

    def __str__(self) -> str:
        if self.is_users or not self.process:
            return self.text
        return f"{self.process}, {self.text if self.is_certain else f'failed: {self.text}'}"


def activity_of_this_thread(rank: int) -> Callable[[], dict[int, Activity]]:
    """A function with which any thread can ask what the calling thread, that of a rank, does."""
    step = here.step
    rest = here.rest
    return lambda: {rank: Activity(rest.depth > 0, step.since, latest_calls())}


class Channel(threading.Thread):
    """A process's end of the socket to its parent: sends messages in order (an answer is a pair of
    the order's number and a value), and a heartbeat every second, even while the next message waits
    for a GPU. No caller ever waits for the parent. If the parent is gone, a timer ends the process.

    It starts at once, and reports if the thread that creates it hangs (see `HangDetector`).

    Args:
        connection: to the parent.
        activities: what the ranks do, which is a heartbeat.
        patience: seconds that a process without a parent has to end by itself.
    """

    def __init__(
        self,
        connection: Connection,
        activities: Callable[[], dict[int, Activity]] = dict,
        patience: float = 0.0,
    ) -> None:
        super().__init__(name="channel", daemon=True)
        self._connection = connection
        self._activities = activities
        self._patience = patience
        self._messages: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._detector: HangDetector | None = HangDetector()
        self.start()

    def fileno(self) -> int:
        """The socket's file descriptor, which becomes readable when the parent is gone."""
        return self._connection.fileno()

    def answer(self, order: int, wait: Callable[[], object]) -> None:
        """Queue the answer to an order; `wait` waits for it and returns it. If that fails, the
        message is a `Failure`."""
        self._messages.put(lambda: (order, wait()))

    def fail(self, failure: Failure) -> None:
        """Queue the reason why this process ends."""
        self._messages.put(lambda: failure)

    def close(self) -> None:
        """Send what is queued, then end."""
        self._messages.put(None)
        self.join()

    def run(self) -> None:
        """Send the queued messages."""
        heart = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        heart.start()
        while (message := self._messages.get()) is not None:
            try:
                words = message()
            except Exception:
                words = Failure.of_exception()
            if not self._send(words):
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
                is_heard = self._send(Failure(False, f"hangs: {hang}", when, is_certain=True))
            elif time.monotonic() - beaten >= HEARTBEAT_SECONDS - LOOK_SECONDS / 2:
                beaten = time.monotonic()
                is_heard = self._send(self._activities())

    def _send(self, message: object) -> bool:
        """Send a message; False if the parent is gone."""
        try:
            with self._lock:
                self._connection.send(message)
            return True
        except OSError:
            timer = threading.Timer(self._patience, os._exit, (1,))
            timer.daemon = True
            timer.start()
            return False
