"""Serves the peers of a rank, which read from its cache or write into it."""

from __future__ import annotations

from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.transport import messages
from nanovllm.kv_transfer.transport.connection import Connection, CorruptFrame
from nanovllm.kv_transfer.transport.messages import Answer, Fetch, Finish, Hello, Moved, Push, Refused, Request
from nanovllm.kv_transfer.transport.pieces import common_piece
from nanovllm.kv_transfer.transport.transfers import Transfers

_GRACE = 5.0  # seconds that a writer may be ahead


class BlockServer:
    """The half of a transport that answers the peers' requests; subclasses say how blocks move.

    Attributes:
        kind: name of the transport.
        memory: how peers can access the cache directly; empty if they cannot.
    """

    kind = ""
    id: str
    layout: KVLayout
    timeout: float
    memory: bytes
    transfers: Transfers

    def describe_memory(self) -> bytes:
        """What a peer must know to access the caches directly; empty if it cannot."""
        return b""

    def serve_fetch(self, connection: Connection, fetch: Fetch) -> None:
        """Send the blocks that a peer asks for."""
        raise NotImplementedError

    def assist(self, connection: Connection) -> None:
        """Do what a peer needs while it accesses the caches directly; returns when it sends a message."""

    def receive_blocks(self, connection: Connection, push: Push) -> None:
        """Put the payload of a push into its blocks."""
        raise CorruptFrame(f"{connection.peer} sent blocks, which the {self.kind} transport does not take")

    def _serve(self, connection: Connection) -> None:
        """Answer one peer's requests until it leaves.

        Raises:
            PeerLost: it has left, or its messages make no sense.
        """
        theirs = messages.receive(connection, messages.decode_hello, self.timeout)
        connection.send(messages.encode(Hello(self.id, self.layout, self.memory)))
        try:
            while True:
                self._answer(connection, theirs, messages.receive(connection, messages.decode_request))
        finally:
            self.transfers.fail_all(f"the peer at {connection.peer} is gone", writer=theirs.id)

    def _answer(self, connection: Connection, theirs: Hello, request: Request) -> None:
        if isinstance(request, Moved):
            raise CorruptFrame(f"{connection.peer} wrote what it was not allowed to")
        try:
            if isinstance(request, Push | Finish):  # a writer may be ahead of what this rank's engine has been told
                self.transfers.is_known(request.transfer_id, min(_GRACE, self.timeout))
            if isinstance(request, Push):
                self._check_push(theirs, request)
            elif isinstance(request, Finish):
                self._finish(theirs, request)
                connection.send(messages.encode(Answer()))
            else:
                self._check_fetch(request)
                self.serve_fetch(connection, request)
        except (Refused, ValueError) as error:
            connection.send(messages.encode(Answer(str(error))))
            return
        if isinstance(request, Push):
            self._receive_push(connection, theirs, request)

    def _check_fetch(self, fetch: Fetch) -> None:
        self.layout.check_blocks(fetch.block_ids)
        self.layout.strip(fetch.head, fetch.num_heads)
        if not self.layout.first_layer <= fetch.first_layer < fetch.end_layer <= self.layout.end_layer:
            raise Refused(f"layers {fetch.first_layer} to {fetch.end_layer - 1} of {self.layout.layers}")

    def _check_push(self, theirs: Hello, push: Push) -> None:
        """Allow a push, for which threads then count as touching the blocks."""
        piece = common_piece(self.layout, theirs.layout)
        if piece is None or (push.head, push.num_heads) != (piece.local_head, piece.num_heads):
            raise Refused(f"heads {push.head} + {push.num_heads} are not what these two ranks have in common")
        if not piece.layers.start <= push.first_layer < push.end_layer <= piece.layers.stop:
            raise Refused(f"layers {push.first_layer} to {push.end_layer - 1} of {piece.layers} in common")
        if error := self.transfers.enter(push.transfer_id, theirs.id, push.layers, push.block_ids):
            raise Refused(error)

    def _receive_push(self, connection: Connection, theirs: Hello, push: Push) -> None:
        """Tell a peer that it may write, and wait until it has."""
        error, arrived = f"the peer at {connection.peer} is gone", [(layer, push.block_ids) for layer in push.layers]
        try:
            connection.send(messages.encode(Answer()))
            self.assist(connection)
            # A peer with direct access is waited for as long as it lives, since this rank could not stop its writes.
            moved = messages.receive(connection, messages.decode_request, None if self.memory else self.timeout)
            if not isinstance(moved, Moved) or not (connection.payload_bytes or self.memory):
                raise CorruptFrame(f"{connection.peer} does not send what it has announced")
            if connection.payload_bytes:
                self.receive_blocks(connection, push)
            error = ""
        finally:
            self.transfers.leave(push.transfer_id, theirs.id, arrived, error)

    def _finish(self, theirs: Hello, finish: Finish) -> None:
        error = self.transfers.enter(finish.transfer_id, theirs.id)
        if not error:
            failure = finish.error and f"the peer has given up: {finish.error}"
            error = self.transfers.leave(finish.transfer_id, theirs.id, error=failure, finished=True)
        if error and not finish.error:
            raise Refused(error)
