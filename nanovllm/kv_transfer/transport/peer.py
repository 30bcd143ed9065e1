"""A rank of another engine, as the one that reads from it or writes to it sees it: a connection, and a thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from nanovllm.kv_transfer.transport.connection import Connection, CorruptFrame, PeerLost
from nanovllm.kv_transfer.transport.messages import Address, Answer
from nanovllm.kv_transfer.transport.pieces import Piece

logger = logging.getLogger(__name__)

_LOOK = 1.0  # seconds after which an idle thread looks whether its peer still lives


class Refused(Exception):
    """A peer cannot or must not have what it asks for; the message says why, and the connection goes on."""


class Reach(Protocol):
    """A way to another rank's cache, used by one thread."""

    def read(self, piece: Piece, local_ids: Sequence[int], remote_ids: Sequence[int]) -> None:
        """Copy blocks of all layers of a piece from there to here."""

    def write(
        self, piece: Piece, layers: range, local_ids: Sequence[int], remote_ids: Sequence[int], mark: Any
    ) -> Sequence[memoryview]:
        """Copy blocks of some layers from here to there; or return what has to be sent there instead.

        Args:
            mark: of the moment from which the blocks can be read (`Transport.mark`).
        """

    def close(self) -> None:
        """It will not be used any more."""


@dataclass
class Write:
    """Blocks of some layers that are to be pushed."""

    transfer_id: str
    piece: Piece
    layers: range
    local: list[int]
    remote: list[int]
    mark: Any

    def goes_on_with(self, other: Write) -> bool:
        """Whether another one is the same for the next layers."""
        mine, others = ((w.transfer_id, w.piece, w.local, w.remote) for w in (self, other))
        return mine == others and self.layers.stop == other.layers.start


class Peer:
    """Does what has to be done with one rank of another engine, one thing after another, in a thread of its own.

    The connection is made when it is needed. The thread ends when the peer is gone: what was mapped of it is given back.

    Args:
        address: of the peer.
        introduce: makes the connection, and finds a way to the peer's cache.

    Attributes:
        writes: what has to be pushed, in the order in which it was computed.
    """

    def __init__(self, address: Address, introduce: Callable[[Address], tuple[Connection, Reach]]) -> None:
        self.id, self.address, self._introduce = address.id, address, introduce
        self._jobs: queue.SimpleQueue[tuple[float, Callable[..., object], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self.writes: deque[Write] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._connection: Connection | None = None
        self._reach: Reach | None = None
        self._job_time = 0.0
        self._failure, self._failure_time = "", float("-inf")
        self.is_closed = self._is_introducing = False

    @property
    def is_gone(self) -> bool:
        """Whether it could not be reached when it was last tried, and nobody tries it just now."""
        return self._thread is None and bool(self._failure)

    def put(self, job: Callable[..., object], *arguments: Any) -> None:
        """Have `job(self, *arguments)` done after everything that was put before."""
        with self._lock:
            self._jobs.put((time.monotonic(), job, arguments))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name=f"kv-{self.address.host}:{self.address.port}", daemon=True
                )
                self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_LOOK)
            except queue.Empty:
                if self._connection and self._connection.is_lost():
                    self._drop("it has left")
                if self._connection or not self._may_stop():
                    continue
                return
            if job is None:
                self._drop("closed")
                return
            try:
                self._job_time, work, arguments = job
                work(self, *arguments)
            except Exception:
                logger.exception("an error in a transfer with the rank at %s", self._name)

    def _may_stop(self) -> bool:
        with self._lock:
            if self._jobs.empty():
                self._thread = None
                return True
            return False

    @property
    def _name(self) -> str:
        return f"{self.address.host}:{self.address.port}"

    def ready(self) -> str:
        """Make the connection, from within a job, if it is not there.

        Returns:
            Why it cannot be made.
        """
        return self.attempt(lambda reach: None)

    def attempt(self, work: Callable[[Reach], object]) -> str:
        """Do something with the peer's cache, from within a job.

        Returns:
            Why it could not be done; empty if it was.
        """
        try:
            work(self._connected())
            if self._connection is None or self._connection.is_lost():
                raise PeerLost(f"the rank at {self._name} is gone")
        except Refused as error:
            return f"the rank at {self._name} refuses: {error}"
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._drop(str(error))
            return str(error)
        return ""

    def _connected(self) -> Reach:
        if self._connection and self._connection.is_lost():
            self._drop("it has left")
        if self._reach is None:
            # What was put before the last attempt failed need not wait for another one.
            if self._job_time <= self._failure_time or self.is_closed:
                raise PeerLost(self._failure or "this transport is closed")
            self._is_introducing = True
            try:
                self._connection, self._reach = self._introduce(self.address)
                self._failure = ""
            finally:
                self._is_introducing = False
                self._failure_time = time.monotonic() if self._reach is None else float("-inf")
            if self.is_closed:
                raise PeerLost("this transport is closed")
        return self._reach

    def _drop(self, why: str) -> None:
        """Give up the connection, and the way to the peer's cache."""
        if self._connection:
            self._connection.close()
        if self._reach:
            self._reach.close()
        self._connection = self._reach = None
        self._failure = why

    def ask(self, message: bytes, timeout: float) -> None:
        """Ask for something, within `attempt`, and wait for the answer.

        Raises:
            Refused: the answer is no.
            PeerLost: there is none.
        """
        self.send(message)
        assert self._connection
        receive_answer(self._connection, timeout)

    def send(self, message: bytes, buffers: Sequence[memoryview] = ()) -> None:
        """Send something, within `attempt`."""
        assert self._connection
        self._connection.send_with_payload(message, buffers)

    def close(self) -> None:
        """End the thread. What is under way fails, what waits is forgotten."""
        self.is_closed = True
        if connection := self._connection:
            connection.close()
        self._jobs.put(None)
        # Who waits for a silent peer's handshake touches nothing, and will find that all is closed.
        while (thread := self._thread) and thread.is_alive() and not self._is_introducing:
            thread.join(0.1)


def receive_answer(connection: Connection, timeout: float) -> None:
    """Wait for a peer's answer; its payload, if it has one, has still to be received.

    Raises:
        Refused: the answer is no.
        PeerLost: none has come in time, or nonsense.
    """
    try:
        answer = msgspec.msgpack.decode(connection.receive(timeout), type=Answer)
    except TimeoutError:
        raise PeerLost(f"no answer from {connection.peer} within {timeout:g} s") from None
    except msgspec.MsgspecError as error:
        raise CorruptFrame(f"{connection.peer}: {error}") from error
    if answer.error:
        raise Refused(answer.error)
