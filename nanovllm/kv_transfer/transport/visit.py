"""A peer that has connected to this rank, to read from its cache or to write into it: what it says, and what it may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from nanovllm.kv_transfer.transport.connection import Connection, CorruptFrame, PeerLost
from nanovllm.kv_transfer.transport.messages import Answer, Fetch, Finish, Hello, Moved, Push, decode_request, encode
from nanovllm.kv_transfer.transport.peer import Refused
from nanovllm.kv_transfer.transport.pieces import common_piece

if TYPE_CHECKING:
    from nanovllm.kv_transfer.transport.base import Transport

T = TypeVar("T")

_GRACE = 5.0  # seconds that a writer may be ahead of what the engine of this rank tells it


def understand(connection: Connection, data: bytes, decode: Callable[[bytes], T]) -> T:
    """A message of a peer.

    Raises:
        CorruptFrame: it is none.
    """
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        raise CorruptFrame(f"{connection.peer} says what makes no sense: {error}") from error


class Visit:
    """Serves one connection, in a thread of its own.

    Args:
        transport: of this rank.
    """

    def __init__(self, transport: Transport, connection: Connection, theirs: Hello) -> None:
        self._transport, self._connection, self._theirs = transport, connection, theirs
        self._transfers, self._layout = transport.transfers, transport.layout
        self._allowed: Push | None = None  # what the peer may be writing just now

    def serve(self) -> None:
        """Answer requests until the peer leaves.

        Raises:
            PeerLost: it has left, or talks nonsense.
        """
        try:
            while True:
                if self._allowed:
                    self._transport.assist(self._connection)
                request = understand(self._connection, self._receive(), decode_request)
                if isinstance(request, Moved):
                    self._take(request)
                    continue
                if self._allowed:
                    raise CorruptFrame(f"{self._connection.peer} asks for something in the middle of a push")
                try:
                    self._answer(request)
                except (Refused, ValueError) as error:
                    self._connection.send(encode(Answer(str(error))))
        finally:
            gone = f"the peer at {self._connection.peer} is gone"
            if self._allowed:
                self._transfers.leave(self._allowed.transfer_id, self._theirs.id, error=gone)
            self._transfers.fail_all(gone, writer=self._theirs.id)

    def _receive(self) -> bytes:
        """What the peer says next. One that may write by itself is waited for as long as it lives, since nobody could stop it; but
        where blocks come by this connection alone, they come in time or never."""
        must_hurry = self._allowed is not None and not self._transport.memory
        try:
            return self._connection.receive(self._transport.timeout if must_hurry else None)
        except TimeoutError as error:
            raise PeerLost(f"{self._connection.peer} does not send what it has announced") from error

    def _answer(self, request: Fetch | Push | Finish) -> None:
        if isinstance(request, Fetch):
            self._layout.check_blocks(request.block_ids)
            self._layout.strip(request.head, request.num_heads)
            if not self._layout.first_layer <= request.first_layer < request.end_layer <= self._layout.end_layer:
                raise Refused(f"layers {request.first_layer} to {request.end_layer - 1} are not this rank's")
            self._transport.serve_fetch(self._connection, request)
            return
        # The peer may be ahead of what this rank's engine says.
        self._transfers.is_known(request.transfer_id, min(_GRACE, self._transport.timeout))
        if isinstance(request, Push):
            self._allow(request)
        else:
            self._finish(request)
        self._connection.send(encode(Answer()))

    def _allow(self, push: Push) -> None:
        piece = common_piece(self._layout, self._theirs.layout)
        if piece is None or (push.head, push.num_heads) != (piece.local_head, piece.num_heads):
            raise Refused(f"heads {push.head} + {push.num_heads} are not what these two ranks have in common")
        if not piece.layers.start <= push.first_layer < push.end_layer <= piece.layers.stop:
            raise Refused(
                f"layers {push.first_layer} to {push.end_layer - 1} are not what these two ranks have in common"
            )
        if error := self._transfers.enter(push.transfer_id, self._theirs.id, push.layers, push.block_ids):
            raise Refused(error)
        self._allowed = push

    def _take(self, moved: Moved) -> None:
        if (push := self._allowed) is None:
            raise CorruptFrame(f"{self._connection.peer} wrote what it was not allowed to")
        if self._connection.payload_bytes:
            self._transport.receive_blocks(self._connection, push)
        elif not self._transport.memory:
            raise CorruptFrame(f"{self._connection.peer} says that it wrote where it cannot reach")
        self._allowed = None
        arrived = [(layer, push.block_ids) for layer in push.layers]
        block_bytes = self._layout.block_bytes * push.num_heads // len(self._layout.heads)
        num_bytes = len(arrived) * len(push.block_ids) * block_bytes
        self._transfers.leave(push.transfer_id, self._theirs.id, arrived, num_bytes)

    def _finish(self, finish: Finish) -> None:
        error = self._transfers.enter(finish.transfer_id, self._theirs.id)
        if not error:
            failure = finish.error and f"the peer has given up: {finish.error}"
            error = self._transfers.leave(finish.transfer_id, self._theirs.id, error=failure, finished=True)
        if error and not finish.error:
            raise Refused(error)
