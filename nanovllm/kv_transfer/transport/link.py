"""Moves KV blocks over a connection between two ranks: the common part of all transports.

The rank that opened the connection requests blocks (`Fetch`) or offers them (`Push`). The other
rank answers each request."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from nanovllm.kv_transfer.transport import messages
from nanovllm.kv_transfer.transport.connection import Connection, CorruptFrame
from nanovllm.kv_transfer.transport.pieces import BlockIds, Piece, check_same, common_piece

if TYPE_CHECKING:
    from nanovllm.kv_transfer.transport.base import Transport

GRACE_SECONDS = 5.0  # seconds that an early push waits for its transfer


class Link:
    """A connection to a rank of another engine, used by one thread at each end. The end that opened
    it reads and pushes.

    Attributes:
        theirs: the other rank's description of itself and its cache.
    """

    def __init__(self, transport: Transport, connection: Connection) -> None:
        self.transport = transport
        self.connection = connection
        self.theirs = messages.decode_hello(connection.hello)
        check_same(transport.layout.fingerprint, self.theirs.layout.fingerprint)

    def read(self, piece: Piece, local_ids: BlockIds, remote_ids: BlockIds) -> None:
        """Copy blocks of a piece from the other rank to this one.

        Raises:
            Refused: the other rank has rejected the request.
            OSError, ValueError, msgspec.MsgspecError: it has disconnected, or breaks the protocol.
        """

    def serve_fetch(self, fetch: messages.Fetch, layers: range) -> None:
        """Give the other rank access to blocks of these layers."""

    def receive(self, timeout: float | None = None) -> messages.Message:
        """Receive the other rank's next message."""
        return messages.decode(self.connection.receive(timeout))

    def receive_answer(self) -> None:
        """Wait until the other rank grants a request. Answer its own requests while waiting. This
        does not receive the payload."""
        while not isinstance(message := self.receive(self.transport.timeout), messages.Answer):
            self.answer(message)
        if message.error:
            raise messages.Refused(f"{self.connection.peer} rejected the request: {message.error}")

    def ask(self, request: messages.Message) -> None:
        """Send a request, and wait until the other rank grants it."""
        self.connection.send(messages.encode(request))
        self.receive_answer()

    def answer(self, request: messages.Message) -> None:
        """Grant or reject a request of the other rank."""
        try:
            if isinstance(request, messages.Fetch):
                layout = self.transport.layout
                layout.check_blocks(request.block_ids)
                if not 0 <= request.head < request.head + request.num_heads <= len(layout.heads):
                    last = request.head + request.num_heads - 1
                    raise messages.Refused(
                        f"heads {request.head} to {last}, but this rank has {len(layout.heads)}"
                    )
                return self.serve_fetch(request, _layers(request, layout.layers))
            if isinstance(request, messages.Push):
                self._take(request)
            elif isinstance(request, messages.GiveUp):
                with self.transport.transfers.moving(request.transfer_id, self.theirs.id):
                    raise messages.Refused(f"the peer has aborted the transfer: {request.error}")
            else:
                raise CorruptFrame(f"{self.connection.peer} sent a message that was not requested")
            error = ""
        except (messages.Refused, ValueError) as refusal:
            error = str(refusal)
        self.connection.send(messages.encode(messages.Answer(error)))

    def _take(self, push: messages.Push) -> None:
        """Read the blocks that the other rank offers."""
        piece = common_piece(self.transport.layout, self.theirs.layout)
        if piece is None or len(push.block_ids) != len(push.source_ids):
            raise messages.Refused(
                "these two ranks share no KV heads and layers, or do not have that many blocks"
            )
        piece = dataclasses.replace(piece, layers=_layers(push, piece.layers))
        self.theirs.layout.check_blocks(push.source_ids)
        transfers = self.transport.transfers
        # The offer may arrive before this rank has been told to expect the transfer.
        transfers.is_known(push.transfer_id, min(GRACE_SECONDS, self.transport.timeout / 2))
        with transfers.moving(
            push.transfer_id,
            self.theirs.id,
            layers=piece.layers,
            blocks=push.block_ids,
            is_last=push.is_last,
        ):
            if push.block_ids:
                self.read(piece, push.block_ids, push.source_ids)
                self.transport.after_read(push.transfer_id, piece, len(push.block_ids))

    def close(self) -> None:
        """Free the link's resources. The connection is closed already."""


def _layers(request: messages.Fetch | messages.Push, known: range) -> range:
    """Return the layers that a peer requests or offers."""
    if not known.start <= request.first_layer < request.end_layer <= known.stop:
        raise messages.Refused(
            f"layers {request.first_layer} to {request.end_layer - 1} of {known}"
        )
    return range(request.first_layer, request.end_layer)
