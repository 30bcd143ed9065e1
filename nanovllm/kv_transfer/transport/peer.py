"""Holds the connection to one rank of another engine, and the thread that reads from that rank and writes to it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from nanovllm.kv_transfer.transport.connection import Connection, PeerLost
from nanovllm.kv_transfer.transport.messages import Address, Refused
from nanovllm.kv_transfer.transport.pieces import BlockIds, Piece

logger = logging.getLogger(__name__)

_LOOK = 1.0  # seconds after which an idle thread checks whether its peer is still there


class Reach(Protocol):
    """A way to another rank's cache, used by one thread."""

    def read(self, piece: Piece, local_ids: BlockIds, remote_ids: BlockIds) -> None:
        """Copy blocks of all layers of a piece from there to here."""

    def write(
        self, piece: Piece, layers: range, local_ids: BlockIds, remote_ids: BlockIds, mark: Any
    ) -> Sequence[memoryview]:
        """Copy blocks of some layers from here to there, or return the bytes that must be sent instead.

        Args:
            mark: see `Transport.mark`.
        """

    def close(self) -> None:
        """Release what the way holds."""


class Peer:
    """Runs the jobs that concern one rank of another engine, in order, in its own thread.

    The connection is made when a job needs it. The thread ends when the peer is gone, and a later job starts it again.

    Args:
        address: of the peer.
        introduce: makes the connection, and finds a way to the peer's cache.

    Attributes:
        writes: layers to be pushed, in the order in which they were computed; see `Transport.write`.
    """

    def __init__(self, address: Address, introduce: Callable[[Address], tuple[Connection, Reach]]) -> None:
        self.id, self.name, self._address = address.id, f"{address.host}:{address.port}", address
        self.writes: deque[tuple[tuple[str, Piece, list[int], list[int]], int, Any]] = deque()
        self._introduce = introduce
        self._jobs: queue.SimpleQueue[tuple[float, Callable[..., object], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._way: tuple[Connection, Reach] | None = None
        self._job_time, self._failure, self._failure_time = 0.0, "", float("-inf")
        self._is_closed = self._is_introducing = False

    @property
    def is_gone(self) -> bool:
        """Whether the last attempt to reach the peer failed, and no job is waiting to try again."""
        return self._thread is None and bool(self._failure)

    def put(self, job: Callable[..., object], *arguments: Any) -> None:
        """Run `job(self, *arguments)` after all jobs that were put before."""
        with self._lock:
            self._jobs.put((time.monotonic(), job, arguments))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"kv-{self.name}", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_LOOK)
            except queue.Empty:
                if self._way and self._way[0].is_lost():
                    self._drop("it has left")
                with self._lock:
                    if self._way is None and self._jobs.empty():
                        self._thread = None
                        return
                continue
            if job is None:
                return self._drop("closed")
            try:
                self._job_time, work, arguments = job
                work(self, *arguments)
            except Exception:
                logger.exception("an error in a transfer with the rank at %s", self.name)

    def attempt(self, work: Callable[[Connection, Reach], object]) -> str:
        """Do something with the peer's cache, from within a job, over a connection that is made if there is none.

        Returns:
            Why it could not be done; empty if it was.
        """
        try:
            if self._way and self._way[0].is_lost():
                self._drop("it has left")
            connection, reach = self._way or self._connect()
            work(connection, reach)
            if connection.is_lost():
                raise PeerLost(f"the rank at {self.name} is gone")
        except Refused as error:
            return f"the rank at {self.name} refuses: {error}"
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._drop(str(error))
            return str(error)
        return ""

    def _connect(self) -> tuple[Connection, Reach]:
        # Each attempt may take seconds: jobs that were put before the last one failed do not try again.
        if self._job_time <= self._failure_time or self._is_closed:
            raise PeerLost(self._failure or "this transport is closed")
        self._is_introducing = True
        try:
            self._way = way = self._introduce(self._address)
            self._failure = ""
        finally:
            self._is_introducing = False
            if self._way is None:
                self._failure_time = time.monotonic()
        if self._is_closed:
            raise PeerLost("this transport is closed")
        return way

    def _drop(self, why: str) -> None:
        """Give up the connection and the way to the peer's cache."""
        if self._way:
            for part in self._way:
                part.close()
        self._way, self._failure = None, why

    def close(self) -> None:
        """End the thread. A running job fails, waiting jobs are dropped."""
        self._is_closed = True
        if way := self._way:
            way[0].close()
        self._jobs.put(None)
        # A thread that waits for a silent peer's handshake touches no block, and will find the transport closed.
        while (thread := self._thread) and thread.is_alive() and not self._is_introducing:
            thread.join(0.1)
