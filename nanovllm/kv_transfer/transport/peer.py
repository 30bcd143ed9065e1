"""Runs the thread that connects to another process, and then does what concerns that process, in order."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from nanovllm.kv_transfer.transport.connection import Connection, PeerLost

logger = logging.getLogger(__name__)

_LOOK = 1.0  # seconds after which an idle thread checks whether its peer is still there
_JOIN = 30.0  # seconds in which a thread whose connection is closed ends


class Peer:
    """Another process: a thread of this object connects to it, and then does jobs, until one fails or the connection is lost.

    A peer that is lost stays lost: to try again, make a new one.

    Args:
        name: for error messages.

    Attributes:
        error: why the peer is lost; empty while it is not.
    """

    def __init__(self, name: str) -> None:
        self.name, self.error = name, ""
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=f"kv-{name}", daemon=True)
        self._thread.start()

    def open(self, stack: ExitStack) -> Connection:
        """Connect; called by the thread before any job.

        Args:
            stack: what is entered there is left when the peer is lost.

        Raises:
            OSError, ValueError, msgspec.MsgspecError: the peer cannot be reached, or does not fit.
        """
        raise NotImplementedError

    def lost(self) -> None:
        """Called when the peer is lost, and again for each job that is put later."""

    def put(self, job: Callable[[], object]) -> None:
        """Run a job after all that were put before. None runs once the peer is lost."""
        self._jobs.put(job)
        if self.error:
            self.lost()

    def send(self, message: bytes) -> None:
        """Send a message; called by the thread."""
        assert self._connection is not None, "open has returned"
        self._connection.send(message)

    @property
    def is_lost(self) -> bool:
        """Whether the peer is gone, as far as this can be known without waiting."""
        connection = self._connection
        return bool(self.error) or (connection is not None and connection.is_lost())

    def check(self) -> None:
        """Raise PeerLost if the peer is gone."""
        if self.is_lost:
            raise PeerLost("it has left")

    def _work(self) -> None:
        try:
            with ExitStack() as stack:
                self._connection = self.open(stack)
                while not self._is_closed:
                    try:
                        job = self._jobs.get(timeout=_LOOK)
                    except queue.Empty:
                        self.check()
                    else:
                        job()
            self.error = "this end is closed"
        except Exception as error:
            if not isinstance(error, OSError | ValueError | msgspec.MsgspecError):
                logger.exception("an error in a transfer with %s", self.name)
            self.error = f"{self.name}: {error}"
        self._connection = None  # the last reference to a connection closes its socket
        self.lost()

    def close(self) -> None:
        """End the thread. A running job fails, waiting jobs are dropped."""
        self._is_closed = True
        if connection := self._connection:  # a thread that still connects runs no job, and will find that it is closed
            connection.close()
            self._jobs.put(lambda: None)
            self._thread.join(_JOIN)
