"""Moves KV blocks between the caches of two ranks: what all transports have in common.

A rank reads blocks of ranks of another engine when they are complete (`read`), or expects them (`expect`) and reads each layer when
its owner offers it (`push`). Only the rank itself writes to its cache: a peer that was stopped in mid-transfer cannot damage it later.

Each pair of ranks that has something in common uses an authenticated connection, opened by the rank that reads or pushes. A
thread serves each end. The engine's own thread never waits: it asks with `poll` which transfers have ended.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.transport import messages
from nanovllm.kv_transfer.transport.connection import Connection, CorruptFrame, PeerLost
from nanovllm.kv_transfer.transport.handshake import Credentials, Listener, connect
from nanovllm.kv_transfer.transport.peer import Peer
from nanovllm.kv_transfer.transport.pieces import BlockIds, Piece, common_piece, pieces_from, pieces_to
from nanovllm.kv_transfer.transport.transfers import Ended, Transfers
from nanovllm.ops.device import zeros

Caches = dict[int, Tensor]  # by layer
Peers = Sequence[dict[str, Any]]  # the addresses of all ranks of an engine

_MAX_LAYERS = 16  # per push: between two pushes a peer can refuse
_GRACE = 5.0  # seconds that a push may be ahead


class Link:
    """A connection to a rank of another engine, used by one thread at each end: the end that has opened it reads and pushes.

    Attributes:
        theirs: what the other rank has said of itself and its cache.
    """

    def __init__(self, transport: Transport, connection: Connection) -> None:
        self.transport, self.connection = transport, connection
        self.theirs = messages.decode_hello(connection.hello)

    def read(self, piece: Piece, local_ids: BlockIds, remote_ids: BlockIds) -> None:
        """Copy blocks of a piece from there to here.

        Raises:
            Refused: the other rank does not let us.
            OSError, ValueError, msgspec.MsgspecError: it is gone, or breaks the protocol.
        """
        raise NotImplementedError

    def serve_fetch(self, fetch: messages.Fetch) -> None:
        """Let the other rank read blocks."""
        raise NotImplementedError

    def receive(self, timeout: float | None = None) -> messages.Message:
        """The other rank's next message."""
        return messages.decode(self.connection.receive(timeout))

    def receive_answer(self) -> None:
        """Wait until the other rank grants a request, and answer what it asks meanwhile. A payload has still to be received."""
        while not isinstance(message := self.receive(self.transport.timeout), messages.Answer):
            self.answer(message)
        if message.error:
            raise messages.Refused(f"{self.connection.peer} refuses: {message.error}")

    def ask(self, request: messages.Message) -> None:
        """Send a request, and wait until the other rank grants it."""
        self.connection.send(messages.encode(request))
        self.receive_answer()

    def answer(self, request: messages.Message) -> None:
        """Grant or refuse a request."""
        try:
            if isinstance(request, messages.Fetch):
                layout = self.transport.layout
                layout.check_blocks(request.block_ids)
                layout.strip(request.head, request.num_heads)
                _check_layers(request, layout.layers)
                return self.serve_fetch(request)
            if not isinstance(request, messages.Push | messages.Finish):
                raise CorruptFrame(f"{self.connection.peer} says what it was not asked for")
            transfers = self.transport.transfers
            if (
                isinstance(request, messages.Push) or not request.error
            ):  # it may be ahead of what our engine has been told
                transfers.is_known(request.transfer_id, min(_GRACE, self.transport.timeout / 2))
            if isinstance(request, messages.Push):
                self._take(request)
            else:
                with transfers.moving(request.transfer_id, self.theirs.id, finished=True):
                    if request.error:
                        raise messages.Refused(f"the peer has given up: {request.error}")
            error = ""
        except (messages.Refused, ValueError) as refusal:
            error = str(refusal)
        self.connection.send(messages.encode(messages.Answer(error)))

    def _take(self, push: messages.Push) -> None:
        """Read what the other rank offers."""
        piece = common_piece(self.transport.layout, self.theirs.layout)
        if piece is None or len(push.block_ids) != len(push.source_ids):
            raise messages.Refused("these two ranks have nothing in common, or not so many blocks")
        _check_layers(push, piece.layers)
        self.theirs.layout.check_blocks(push.source_ids)
        with self.transport.transfers.moving(push.transfer_id, self.theirs.id, push.layers, push.block_ids):
            self.read(dataclasses.replace(piece, layers=push.layers), push.block_ids, push.source_ids)

    def close(self) -> None:
        """Release what the link holds; the connection is closed already."""


def _check_layers(request: messages.Fetch | messages.Push, layers: range) -> None:
    if not layers.start <= request.first_layer < request.end_layer <= layers.stop:
        raise messages.Refused(f"layers {request.first_layer} to {request.end_layer - 1} of {layers}")


class Rank(Peer):
    """A rank of another engine, from which this rank reads, and to which it pushes.

    Attributes:
        pushes: layers to be pushed, in the order in which they were computed; see `Transport.push`.
    """

    def __init__(self, transport: Transport, address: messages.Address) -> None:
        self.transport, self.address = transport, address
        self.pushes: deque[tuple[tuple[str, list[int], list[int]], int, Any]] = deque()
        super().__init__(f"the rank at {address.host}:{address.port}")

    def open(self, stack: ExitStack) -> Connection:
        """Connect to the rank."""
        connection = connect(self.address.host, self.address.port, self.transport.credentials)
        stack.callback(connection.close)
        self.link = self.transport.link_class(self.transport, connection)
        stack.callback(self.link.close)
        if (self.link.theirs.id, self.link.theirs.layout) != (self.address.id, self.address.layout):
            raise PeerLost("another rank is there now, or one with another cache")
        return connection

    def lost(self) -> None:
        """Cancel all transfers that this object serves."""
        vars(self).pop("link", None)
        self.transport.lost(self.error, self)

    def _move(self, transfer_id: str, work: Callable[[], object], *part: Any) -> None:
        """Do a part of a transfer, in this rank's thread; if it is refused, the transfer is cancelled.

        Args:
            part: see `Transfers.moving`.
        """
        try:
            with self.transport.transfers.moving(transfer_id, self, *part):
                work()
                self.check()
        except messages.Refused as error:
            self.transport.cancel(transfer_id, str(error))

    def read(self, transfer_id: str, piece: Piece, local: list[int], remote: list[int]) -> None:
        """Read blocks of all layers of a piece."""
        self._move(transfer_id, lambda: self.link.read(piece, local, remote), piece.layers, local, True)

    def push(self) -> None:
        """Push the next layers: those that were computed meanwhile go together."""
        if not self.pushes:
            return
        parts, first, mark = self.pushes.popleft()
        end = first + 1
        while self.pushes and end - first < _MAX_LAYERS and self.pushes[0][:2] == (parts, end):
            _, _, mark = self.pushes.popleft()
            end += 1
        transfer_id, local, remote = parts

        def offer() -> None:
            if mark is not None:
                mark.synchronize()
            self.link.ask(messages.Push(transfer_id, first, end, remote, local))

        self._move(transfer_id, offer)

    def finish(self, transfer_id: str) -> None:
        """Say that all is pushed."""
        self._move(transfer_id, lambda: self.link.ask(messages.Finish(transfer_id)), (), (), True)

    def give_up(self, transfer_id: str, reason: str) -> None:
        """Say that no more will be pushed."""
        with suppress(messages.Refused):
            self.link.ask(messages.Finish(transfer_id, reason))


class Transport:
    """One rank's end of all transfers: it serves its own blocks and moves those of its peers.

    All methods return at once. Each transfer has its own id and is reported once by `poll`, when its blocks are no longer
    touched. A peer that dies or breaks the protocol ends the transfer with an error, and never raises here.

    Args:
        layout: of this rank.
        kv_caches: by layer, `layout.cache_shape` each, made with `empty_cache`.
        host: the address to listen on, to which peers connect.
        secret: which the peers must know.
        port: 0: any free one.
        timeout: seconds without progress after which a transfer fails.

    Raises:
        ValueError: the caches do not match the layout, or peers cannot connect to such a host.
        OSError: the address cannot be used.

    Attributes:
        kind: name of the transport.
        link_class: how blocks move.
    """

    kind = ""
    link_class: type[Link]

    def __init__(
        self, layout: KVLayout, kv_caches: Caches, host: str, secret: bytes, port: int = 0, timeout: float = 30.0
    ) -> None:
        caches = {i: (cache.shape, cache.dtype, cache.is_contiguous()) for i, cache in kv_caches.items()}
        expected = torch.Size(layout.cache_shape), getattr(torch, layout.dtype), True
        if caches != dict.fromkeys(layout.layers, expected):
            raise ValueError(f"the caches are not what the layout says, {expected} for {layout.layers}: {caches}")
        if not host or is_address(host, "unspecified"):
            raise ValueError(f"peers cannot connect to kv_ip={host!r}: name an address of this machine")
        self.layout, self.kv_caches, self.timeout = layout, kv_caches, timeout
        self.device = next(iter(kv_caches.values())).device
        self.addresses = {layer: cache.data_ptr() for layer, cache in kv_caches.items()}
        self.id, self.is_closed = os.urandom(8).hex(), False
        self.transfers = Transfers()
        self._peers: dict[messages.Address, Rank] = {}
        self._pushes: dict[str, list[tuple[Rank, Piece]]] = {}  # open pushes, and to where they go
        self._prepare(host)
        hello = messages.encode(messages.Hello(self.id, layout, self.describe_memory()))
        fingerprint = {"kv_connector": self.kind, **layout.fingerprint}
        self.credentials = Credentials(secret, fingerprint, hello, min(10.0, timeout), timeout)
        self._listener = Listener(host, port, self.credentials, self._serve)

    @classmethod
    def empty_cache(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Zeros in memory that peers can reach."""
        return zeros(tuple(shape), dtype, torch.device(device))

    @property
    def address(self) -> dict[str, Any]:
        """How other ranks reach this one: plain data."""
        host, port = self._listener.address
        return msgspec.to_builtins(messages.Address(host, port, self.id, self.layout))

    # -------------------------------------------------------------- what the engine asks for

    def read(self, transfer_id: str, peers: Peers, local_block_ids: list[int], remote_block_ids: list[int]) -> None:
        """Begin to fill this rank's blocks with those of another engine.

        Args:
            peers: addresses of all ranks of the other engine.

        Raises:
            ValueError: the id was used before, or the blocks cannot be this rank's.
        """
        self.layout.check_blocks(local_block_ids)
        if len(local_block_ids) != len(remote_block_ids):
            raise ValueError(f"{len(local_block_ids)} blocks of this rank, but {len(remote_block_ids)} of the peer")
        for peer, piece in self._begin(transfer_id, pieces_from, peers, local_block_ids, remote_block_ids):
            peer.put(partial(peer.read, transfer_id, piece, local_block_ids, remote_block_ids))

    def expect(self, transfer_id: str, peers: Peers, block_ids: list[int]) -> None:
        """Read into these blocks what the ranks of another engine offer; ends when all of them say that this was all.

        Raises:
            ValueError: as in `read`.
        """
        self.layout.check_blocks(block_ids)
        self._begin(transfer_id, pieces_from, peers, block_ids)

    def push(
        self, transfer_id: str, peers: Peers, layer: int, local_block_ids: list[int], remote_block_ids: list[int]
    ) -> None:
        """Begin to push blocks of a layer that has just been computed. May be called again, also for the same blocks.

        Raises:
            ValueError: the blocks cannot be this rank's.
        """
        self.layout.check_blocks(local_block_ids)
        pushes = [(peer, piece) for peer, piece in self._targets(transfer_id, peers) if layer in piece.layers]
        mark = self.mark() if pushes and local_block_ids else None
        for peer, _ in pushes if local_block_ids else ():
            peer.pushes.append(((transfer_id, local_block_ids, remote_block_ids), layer, mark))
            peer.put(peer.push)

    def finish_push(self, transfer_id: str, peers: Peers) -> None:
        """Tell the peers, after everything that has begun, that this transfer is complete."""
        for peer, _ in self._targets(transfer_id, peers):
            peer.put(partial(peer.finish, transfer_id))
        with suppress(messages.Refused), self.transfers.moving(transfer_id, self.id, finished=True):
            pass

    def cancel(self, transfer_id: str, reason: str = "cancelled") -> None:
        """Begin nothing more for a transfer, and tell the peers that wait for its pushes. `poll` still reports its end."""
        self.transfers.fail(transfer_id, reason)
        for peer, _ in self._pushes.pop(transfer_id, ()):
            if not peer.error:
                peer.put(partial(peer.give_up, transfer_id, reason))

    def lost(self, error: str, peer: Hashable = None) -> None:
        """A peer is gone: cancel all transfers in which it takes part. Without a peer: cancel all."""
        for transfer_id in self.transfers.of(peer):
            self.cancel(transfer_id, error)

    def poll(self, wait_seconds: float = 0.0) -> list[Ended]:
        """Transfers that have ended since the last call.

        Args:
            wait_seconds: how long to wait for one if there is none.
        """
        ended = self.transfers.poll(wait_seconds)
        for end in ended:
            self._pushes.pop(end.transfer_id, None)
        return ended

    def reset(self, reason: str) -> None:
        """Cancel all transfers and end all connections. When this returns, no thread touches a block."""
        self.lost(reason)
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()
        self._listener.hang_up()

    def close(self) -> None:
        """Fail all open transfers, and close all connections."""
        self.is_closed = True
        self.reset("this engine has closed its transport")
        self._listener.close()

    # -------------------------------------------------------------- what each kind of transport brings

    def _prepare(self, host: str) -> None:
        """Make the caches reachable."""

    def describe_memory(self) -> bytes:
        """What a peer must know to access the caches directly; empty if it cannot."""
        return b""

    def mark(self) -> torch.cuda.Event | None:
        """On a GPU, the event after which everything that was computed so far can be read. On a CPU it already can."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.current_stream(self.device).record_event()

    # -------------------------------------------------------------- plans

    def _begin(
        self,
        transfer_id: str,
        pieces: Callable[[KVLayout, tuple[KVLayout, ...]], tuple[Piece, ...]],
        peers: Peers,
        local: BlockIds,
        remote: BlockIds | None = None,
    ) -> list[tuple[Rank, Piece]]:
        """Begin a transfer; returns which peers have something in common with this rank, and what: none if the peers push, or do
        not fit, in which case the transfer has failed.

        Args:
            local: this rank's blocks that are filled.
            remote: those that are read; None: the peers push, or are pushed to.
        """
        try:
            addresses = msgspec.convert(peers, list[messages.Address])
            found = pieces(self.layout, tuple(address.layout for address in addresses))
            plan = [(addresses[piece.peer], piece) for piece in found if remote != []]
            for address, _ in plan:
                address.layout.check_blocks(remote or ())
        except (ValueError, msgspec.MsgspecError) as error:
            self.transfers.begin(transfer_id, [("none", ())])
            self.transfers.fail(transfer_id, str(error))
            return []
        if remote is None and pieces is pieces_from:
            self.transfers.begin(transfer_id, [(address.id, piece.layers) for address, piece in plan], local)
            return []
        targets = [(self._peer(address), piece) for address, piece in plan]
        parts: list[tuple[Hashable, range]] = [(peer, piece.layers) for peer, piece in targets]
        if pieces is pieces_to:  # until `finish_push`, a push also waits for this rank
            parts.append((self.id, range(0)))
        self.transfers.begin(transfer_id, parts, local)
        return targets

    def _serve(self, connection: Connection) -> None:
        """Answer one peer's requests until it leaves, or sends what makes no sense; then raise an error."""
        link = self.link_class(self, connection)
        try:
            while True:
                link.answer(link.receive())
        finally:
            link.close()
            self.lost(f"the peer at {connection.peer} is gone", link.theirs.id)

    def _peer(self, address: messages.Address) -> Rank:
        if address in self._peers and self._peers[address].is_lost:
            self._peers.pop(address).close()
        if address not in self._peers:
            self._peers = {place: peer for place, peer in self._peers.items() if not peer.error}
            self._peers[address] = Rank(self, address)
        return self._peers[address]

    def _targets(self, transfer_id: str, peers: Peers) -> list[tuple[Rank, Piece]]:
        """Where a push goes, which begins if it has not begun; to no peer once it has ended."""
        if not self.transfers.is_known(transfer_id):
            self._pushes[transfer_id] = self._begin(transfer_id, pieces_to, peers, ())
        return self._pushes.get(transfer_id, [])


def is_address(host: str, kind: str) -> bool:
    """Whether a host is a number that is "loopback" or "unspecified"; "localhost" is on loopback, too."""
    try:
        return getattr(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host), f"is_{kind}")
    except ValueError:
        return False  # a name
