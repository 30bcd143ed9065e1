"""Moves KV blocks between the caches of two ranks: what all transports have in common.

A rank reads blocks of ranks of another engine when they are complete (`read`), or expects them
(`expect`) and reads each layer when its owner offers it (`push`). Only the rank itself writes to
its cache: a peer that was stopped in mid-transfer cannot damage it later.

Each pair of ranks that has something in common uses an authenticated connection, opened by the rank
that reads or pushes. A thread serves each end. The engine's own thread never waits: it asks with
`poll` which transfers have ended."""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.transport import messages
from nanovllm.kv_transfer.transport.connection import Connection, CorruptFrame, PeerLost
from nanovllm.kv_transfer.transport.handshake import Credentials, Listener, connect
from nanovllm.kv_transfer.transport.pieces import (
    BlockIds,
    Piece,
    check_same,
    common_piece,
    pieces_from,
    pieces_to,
)
from nanovllm.kv_transfer.transport.transfers import Ended, Transfers
from nanovllm.ops.device import zeros

logger = logging.getLogger(__name__)

Caches = dict[int, Tensor]  # by layer
Peers = Sequence[dict[str, Any]]  # the addresses of all ranks of an engine

_MAX_LAYERS = 16  # per push: between two pushes a peer can refuse
_GRACE = 5.0  # seconds that a push may be ahead
_LOOK = 1.0  # seconds after which an idle thread checks whether its peer is still there
_JOIN = 30.0  # seconds in which a thread whose connection is closed ends


class Link:
    """A connection to a rank of another engine, used by one thread at each end: the end that has
    opened it reads and pushes.

    Attributes:
        theirs: what the other rank has said of itself and its cache.
    """

    def __init__(self, transport: Transport, connection: Connection) -> None:
        self.transport = transport
        self.connection = connection
        self.theirs = messages.decode_hello(connection.hello)
        check_same(transport.layout.fingerprint, self.theirs.layout.fingerprint)

    def read(self, piece: Piece, local_ids: BlockIds, remote_ids: BlockIds) -> None:
        """Copy blocks of a piece from there to here.

        Raises:
            Refused: the other rank does not let us.
            OSError, ValueError, msgspec.MsgspecError: it is gone, or breaks the protocol.
        """

    def serve_fetch(self, fetch: messages.Fetch, layers: range) -> None:
        """Let the other rank read blocks of these layers."""

    def receive(self, timeout: float | None = None) -> messages.Message:
        """The other rank's next message."""
        return messages.decode(self.connection.receive(timeout))

    def receive_answer(self) -> None:
        """Wait until the other rank grants a request, and answer what it asks meanwhile. A payload
        has still to be received."""
        while not isinstance(message := self.receive(self.transport.timeout), messages.Answer):
            self.answer(message)
        if message.error:
            raise messages.Refused(f"{self.connection.peer} rejected the request: {message.error}")

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
        """Read what the other rank offers."""
        piece = common_piece(self.transport.layout, self.theirs.layout)
        if piece is None or len(push.block_ids) != len(push.source_ids):
            raise messages.Refused(
                "these two ranks share no KV heads and layers, or do not have that many blocks"
            )
        piece = dataclasses.replace(piece, layers=_layers(push, piece.layers))
        self.theirs.layout.check_blocks(push.source_ids)
        transfers = self.transport.transfers
        part = (piece.layers, push.block_ids, push.is_last)
        transfers.is_known(
            push.transfer_id, min(_GRACE, self.transport.timeout / 2)
        )  # before our engine has been told
        with transfers.moving(push.transfer_id, self.theirs.id, *part):
            if push.block_ids:
                self.read(piece, push.block_ids, push.source_ids)

    def close(self) -> None:
        """Release what the link holds; the connection is closed already."""


def _layers(request: messages.Fetch | messages.Push, known: range) -> range:
    """The layers that a peer asks for."""
    if not known.start <= request.first_layer < request.end_layer <= known.stop:
        raise messages.Refused(
            f"layers {request.first_layer} to {request.end_layer - 1} of {known}"
        )
    return range(request.first_layer, request.end_layer)


class Rank:
    """A rank of another engine, from which this rank reads, and to which it pushes.

    A thread of this object connects to the rank, and then does jobs, until one fails or the
    connection is lost. A rank that is lost stays lost: to try again, make a new object.

    Attributes:
        error: why the rank is lost; empty while it is not.
        pushes: layers to be pushed, in the order in which they were computed; see `Transport.push`.
    """

    link: Link  # while there is a connection

    def __init__(self, transport: Transport, address: messages.Address) -> None:
        self.transport = transport
        self.address = address
        self.error = ""
        self.pushes: deque[
            tuple[tuple[str, list[int], list[int]], int, Callable[[], object], bool]
        ] = deque()
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._connection: Connection | None = None
        self._thread = threading.Thread(
            target=self._work, name=f"kv-{address.host}:{address.port}", daemon=True
        )
        self._thread.start()

    def put(self, job: Callable[[], object]) -> None:
        """Run a job after all that were put before. None runs once the rank is lost."""
        self._jobs.put(job)
        if self.error:
            self.transport.lost(self.error, self)

    @property
    def is_lost(self) -> bool:
        """Whether the rank is gone, as far as this can be known without waiting."""
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
        """End the thread. A running job fails, waiting jobs are dropped."""
        self.error = self.error or "this end is closed"
        if (
            connection := self._connection
        ):  # a thread that still connects runs no job, and will find that it is closed
            connection.close()
            self._jobs.put(lambda: None)
            self._thread.join(_JOIN)

    def _move(self, transfer_id: str, work: Callable[[], object], *part: Any) -> None:
        """Do a part of a transfer, in this rank's thread; if it is refused, the transfer is
        cancelled.

        Args:
            part: see `Transfers.moving`.
        """
        try:
            with self.transport.transfers.moving(transfer_id, self, *part):
                work()
                self._check()
        except messages.Refused as error:
            self.transport.cancel(transfer_id, str(error))

    def read(self, transfer_id: str, piece: Piece, local: list[int], remote: list[int]) -> None:
        """Read blocks of all layers of a piece."""
        self._move(
            transfer_id, lambda: self.link.read(piece, local, remote), piece.layers, local, True
        )

    def push(self) -> None:
        """Push the next layers: those that were computed meanwhile go together."""
        if not self.pushes:
            return
        parts, first, wait, is_last = self.pushes.popleft()
        end = first + 1
        while self.pushes and end - first < _MAX_LAYERS and self.pushes[0][:2] == (parts, end):
            _, _, wait, is_last = self.pushes.popleft()
            end += 1
        transfer_id, local, remote = parts

        def offer() -> None:
            wait()
            self.link.ask(messages.Push(transfer_id, first, end, remote, local, is_last))

        self._move(transfer_id, offer, (), (), is_last)

    def give_up(self, transfer_id: str, reason: str) -> None:
        """Say that no more will be pushed."""
        with suppress(messages.Refused):
            self.link.ask(messages.GiveUp(transfer_id, reason))


class Transport:
    """One rank's end of all transfers: it serves its own blocks and moves those of its peers.

    All methods return at once. Each transfer has its own id and is reported once by `poll`, when
    its blocks are no longer touched. A peer that dies or breaks the protocol ends the transfer with
    an error, and never raises here.

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
        self,
        layout: KVLayout,
        kv_caches: Caches,
        host: str,
        secret: bytes,
        port: int = 0,
        timeout: float = 30.0,
    ) -> None:
        caches = {
            i: (cache.shape, cache.dtype, cache.is_contiguous()) for i, cache in kv_caches.items()
        }
        expected = torch.Size(layout.cache_shape), getattr(torch, layout.dtype), True
        if caches != dict.fromkeys(layout.layers, expected):
            raise ValueError(
                f"the caches do not match the layout, {expected} for {layout.layers}: {caches}"
            )
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(
                f"peers cannot connect to kv_ip={host!r}: name an address of this machine"
            )
        self.layout = layout
        self.kv_caches = kv_caches
        self.timeout = timeout
        self.device = next(iter(kv_caches.values())).device
        self.addresses = {layer: kv_caches[layer].data_ptr() for layer in layout.layers}
        self.id = os.urandom(8).hex()
        self.is_closed = False
        self.transfers = Transfers()
        self._peers: dict[messages.Address, Rank] = {}
        self._pushes: dict[str, dict[Rank, range]] = {}  # open pushes, and to where they go
        hello = messages.encode(messages.Hello(self.id, layout, self._prepare(host)))
        fingerprint = {"kv_connector": self.kind, **layout.fingerprint}
        self.credentials = Credentials(secret, fingerprint, hello, min(10.0, timeout), timeout)
        self._listener = Listener(host, port, self.credentials, self._serve)

    @classmethod
    def empty_cache(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Zeros in memory that peers can reach."""
        return zeros(tuple(shape), dtype, torch.device(device))

    @property
    def address(self) -> dict[str, Any]:
        """How other ranks reach this one: plain data."""
        host, port = self._listener.address
        return msgspec.to_builtins(messages.Address(host, port, self.id, self.layout))

    # -------------------------------------------------------------- what the engine asks for

    def read(
        self,
        transfer_id: str,
        peers: Peers,
        local_block_ids: list[int],
        remote_block_ids: list[int],
    ) -> None:
        """Begin to fill this rank's blocks with those of another engine.

        Args:
            peers: addresses of all ranks of the other engine.

        Raises:
            ValueError: the id was used before, or the blocks cannot be this rank's.
        """
        self.layout.check_blocks(local_block_ids)
        if len(local_block_ids) != len(remote_block_ids):
            raise ValueError(
                f"{len(local_block_ids)} blocks of this rank, but {len(remote_block_ids)} of the "
                "peer"
            )
        plan, error = self._plan(pieces_from, peers, remote_block_ids)
        ranks = {self._rank(address): piece for address, piece in plan if remote_block_ids}
        layers: dict[Hashable, range] = {rank: piece.layers for rank, piece in ranks.items()}
        self.transfers.begin(transfer_id, layers, local_block_ids, error)
        for rank, piece in ranks.items():
            rank.put(partial(rank.read, transfer_id, piece, local_block_ids, remote_block_ids))

    def expect(self, transfer_id: str, peers: Peers, block_ids: list[int]) -> None:
        """Read into these blocks what the ranks of another engine offer; ends when all of them say
        that this was all. Raises a ValueError as `read` does."""
        self.layout.check_blocks(block_ids)
        plan, error = self._plan(pieces_from, peers)
        self.transfers.begin(
            transfer_id, {address.id: piece.layers for address, piece in plan}, block_ids, error
        )

    def push(
        self,
        transfer_id: str,
        peers: Peers,
        layer: int,
        local: list[int],
        remote: list[int],
        is_last: bool = False,
    ) -> None:
        """Begin to push blocks of a layer that has just been computed. May be called again, also
        for the same blocks.

        Args:
            is_last: no more blocks are pushed; the transfer is complete after the last layer.

        Raises:
            ValueError: the blocks cannot be this rank's.
        """
        self.layout.check_blocks(local)
        if not self.transfers.is_known(transfer_id):
            plan, error = self._plan(pieces_to, peers)
            self._pushes[transfer_id] = {
                self._rank(address): piece.layers for address, piece in plan
            }
            self.transfers.begin(
                transfer_id, dict.fromkeys(self._pushes[transfer_id], ()), error=error
            )
        wait = self.mark()
        for rank, layers in self._pushes.get(transfer_id, {}).items():
            if layer in layers:
                rank.pushes.append(
                    ((transfer_id, local, remote), layer, wait, is_last and layer == layers[-1])
                )
                rank.put(rank.push)

    def cancel(self, transfer_id: str, reason: str = "cancelled") -> None:
        """Begin nothing more for a transfer, and tell the peers that wait for its pushes. `poll`
        still reports its end."""
        self.transfers.fail(transfer_id, reason)
        for peer in self._pushes.pop(transfer_id, {}):
            if not peer.error:
                peer.put(partial(peer.give_up, transfer_id, reason))

    def lost(self, error: str, peer: Hashable = None) -> None:
        """A peer is gone: cancel all transfers in which it takes part. Without a peer: cancel
        all."""
        for transfer_id in self.transfers.of(peer):
            self.cancel(transfer_id, error)

    def poll(self, wait_seconds: float = 0.0) -> list[Ended]:
        """Transfers that have ended since the last call; waits so long for one if there is none."""
        ended = self.transfers.poll(wait_seconds)
        for end in ended:
            self._pushes.pop(end.transfer_id, None)
        return ended

    def reset(self, reason: str) -> None:
        """Cancel all transfers and end all connections. When this returns, no thread touches a
        block."""
        self.lost(reason)
        peers = self._peers
        self._peers = {}
        for peer in peers.values():
            peer.close()
        self._listener.hang_up()

    def close(self) -> None:
        """Fail all open transfers, and close all connections."""
        self.is_closed = True
        self.reset("this engine has closed its transport")
        self._listener.close()

    # ----------------------------------------------------------- what each kind of transport brings

    def _prepare(self, host: str) -> bytes:
        """Make the caches reachable; returns what a peer must know to access them directly, nothing
        if it cannot."""
        raise NotImplementedError

    def mark(self) -> Callable[[], object]:
        """A function that waits until everything that was computed so far can be read. On a CPU it
        already can."""
        if self.device.type != "cuda":
            return lambda: None
        return torch.cuda.current_stream(self.device).record_event().synchronize

    # -------------------------------------------------------------- plans

    def _plan(
        self, pieces: Callable[..., tuple[Piece, ...]], peers: Peers, remote: BlockIds = ()
    ) -> tuple[list[tuple[messages.Address, Piece]], str]:
        """Which peers have something in common with this rank, and what; or why they do not fit."""
        try:
            addresses = msgspec.convert(peers, list[messages.Address])
            found = pieces(self.layout, tuple(address.layout for address in addresses))
            for piece in found:
                addresses[piece.peer].layout.check_blocks(remote)
        except (ValueError, msgspec.MsgspecError) as error:
            return [], str(error)
        return [(addresses[piece.peer], piece) for piece in found], ""

    def _serve(self, connection: Connection) -> None:
        """Answer one peer's requests until it leaves, or sends what makes no sense; then raise an
        error."""
        link = self.link_class(self, connection)
        try:
            while True:
                link.answer(link.receive())
        finally:
            link.close()
            self.lost(f"the peer at {connection.peer} is gone", link.theirs.id)

    def _rank(self, address: messages.Address) -> Rank:
        if address in self._peers and self._peers[address].is_lost:
            self._peers.pop(address).close()
        if address not in self._peers:
            self._peers = {place: peer for place, peer in self._peers.items() if not peer.error}
            self._peers[address] = Rank(self, address)
        return self._peers[address]
