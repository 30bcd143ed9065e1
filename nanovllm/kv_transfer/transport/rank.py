"""Reads from, and pushes to, a rank of another engine, in a thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from nanovllm.kv_transfer.transport import messages
from nanovllm.kv_transfer.transport.connection import Connection
from nanovllm.kv_transfer.transport.handshake import connect
from nanovllm.kv_transfer.transport.link import Link
from nanovllm.kv_transfer.transport.pieces import Piece
from nanovllm.processes.channel import PeerLost

if TYPE_CHECKING:
    from nanovllm.kv_transfer.transport.base import Transport

logger = logging.getLogger(__name__)

_MAX_LAYERS = 16  # per push, so that the peer can reject a transfer between two pushes
_LOOK = 1.0  # seconds after which an idle thread checks the connection
_JOIN = 30.0  # most seconds until a thread ends after its connection was closed


@dataclass(frozen=True)
class ComputedLayer:
    """Blocks of one layer to push.

    Attributes:
        local, remote: the blocks of this rank and of the other one.
        wait: returns once the layer has been computed.
        is_last: the last push of this transfer to this rank.
    """

    transfer_id: str
    local: list[int]
    remote: list[int]
    layer: int
    wait: Callable[[], object]
    is_last: bool

    def continues(self, before: ComputedLayer) -> bool:
        """True if this is the next layer of the same blocks, so that one push can contain both."""
        return self.layer == before.layer + 1 and (self.transfer_id, self.local, self.remote) == (
            before.transfer_id,
            before.local,
            before.remote,
        )


class Rank:
    """A rank of another engine, from which this rank reads, and to which it pushes.

    The object's thread connects to the rank, and then runs jobs until one fails or the connection
    is lost. The object cannot connect again.

    Attributes:
        error: why the connection is lost; empty until then.
        pushes: layers to push, in the order in which they are computed; see `Transport.push`.
    """

    link: Link  # set while there is a connection

    def __init__(self, transport: Transport, address: messages.Address) -> None:
        self.transport = transport
        self.address = address
        self.error = ""
        self.pushes: deque[ComputedLayer] = deque()
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._thread = threading.Thread(
            target=self._work, name=f"kv-{address.host}:{address.port}", daemon=True
        )
        self._thread.start()

    def put(self, job: Callable[[], object]) -> None:
        """Queue a job. Once the connection is lost, jobs are dropped."""
        self._jobs.put(job)
        if self.error:
            self.transport.lost(self.error, self)

    @property
    def is_lost(self) -> bool:
        """Return whether the connection is lost, as far as is known without waiting."""
        connection = self._connection
        return bool(self.error) or (connection is not None and connection.is_lost())

    def _check(self) -> None:
        if self.is_lost:
            raise PeerLost("it has left")

    def _work(self) -> None:
        host = self.address.host
        port = self.address.port
        transport = self.transport
        try:
            connection = connect(host, port, transport.credentials)
            with (
                closing(connection),
                closing(transport.link_class(transport, connection)) as self.link,
            ):
                if (self.link.theirs.id, self.link.theirs.layout) != (
                    self.address.id,
                    self.address.layout,
                ):
                    raise PeerLost(
                        "another rank now has this address, or the rank has a different cache"
                    )
                self._connection = connection
                while not self.error:
                    try:
                        job = self._jobs.get(timeout=_LOOK)
                    except queue.Empty:
                        self._check()
                    else:
                        job()
        except Exception as error:
            if not isinstance(error, OSError | ValueError | msgspec.MsgspecError):
                logger.exception("an error in a transfer with the rank at %s:%d", host, port)
            self.error = self.error or f"the rank at {host}:{port}: {error}"
        self._connection = None
        vars(self).pop("link", None)
        transport.lost(self.error, self)

    def close(self) -> None:
        """End the thread. A running job fails, and queued jobs are dropped."""
        self.error = self.error or "this end is closed"
        if connection := self._connection:
            # A thread that still connects will find the object closed, and run no job.
            connection.close()
            self._jobs.put(lambda: None)
            self._thread.join(_JOIN)

    def _move(
        self,
        transfer_id: str,
        work: Callable[[], object],
        *,
        layers: Iterable[int] = (),
        blocks: Collection[int] = (),
        is_last: bool,
    ) -> None:
        """Run a part of a transfer in this rank's thread. If the other rank rejects it, cancel the
        transfer.

        Args:
            layers, blocks, is_last: see `Transfers.moving`.
        """
        moving = self.transport.transfers.moving
        try:
            with moving(transfer_id, self, layers=layers, blocks=blocks, is_last=is_last):
                work()
                self._check()
        except messages.Refused as error:
            self.transport.cancel(transfer_id, str(error))

    def read(self, transfer_id: str, piece: Piece, local: list[int], remote: list[int]) -> None:
        """Read blocks of all layers of a piece."""

        def work() -> None:
            self.link.read(piece, local, remote)
            self.transport.after_read(transfer_id, piece, len(local))

        self._move(transfer_id, work, layers=piece.layers, blocks=local, is_last=True)

    def push(self) -> None:
        """Push the next layers: all that have been computed since the last push."""
        if not self.pushes:
            return
        first = last = self.pushes.popleft()
        while (
            self.pushes
            and last.layer + 1 - first.layer < _MAX_LAYERS
            and self.pushes[0].continues(last)
        ):
            last = self.pushes.popleft()

        def offer() -> None:
            last.wait()
            self.link.ask(
                messages.Push(
                    transfer_id=first.transfer_id,
                    first_layer=first.layer,
                    end_layer=last.layer + 1,
                    block_ids=first.remote,
                    source_ids=first.local,
                    is_last=last.is_last,
                )
            )

        self._move(first.transfer_id, offer, is_last=last.is_last)

    def give_up(self, transfer_id: str, reason: str) -> None:
        """Tell the other rank that a transfer's pushes have ended with an error."""
        with suppress(messages.Refused):
            self.link.ask(messages.GiveUp(transfer_id, reason))
