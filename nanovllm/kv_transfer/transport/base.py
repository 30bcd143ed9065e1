"""Moves KV blocks between the caches of two ranks: what all transports have in common.

A rank reads blocks of ranks of another engine when they are complete (`read`), or expects them
(`expect`) and reads each layer when its owner offers it (`push`). Only the rank itself writes to
its cache: a peer that was stopped in mid-transfer cannot damage it later.

Each pair of ranks that has something in common uses an authenticated connection, opened by the rank
that reads or pushes. A thread serves each end. The engine's own thread never waits: it asks with
`poll` which transfers have ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor

from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.transport import messages
from nanovllm.kv_transfer.transport.connection import Connection
from nanovllm.kv_transfer.transport.handshake import Credentials, Listener
from nanovllm.kv_transfer.transport.link import Link
from nanovllm.kv_transfer.transport.pieces import BlockIds, Piece, pieces_from, pieces_to
from nanovllm.kv_transfer.transport.rank import ComputedLayer, Rank
from nanovllm.kv_transfer.transport.transfers import Ended, Transfers
from nanovllm.ops.device import zeros

Caches = dict[int, Tensor]  # by layer
Peers = Sequence[msgspec.Raw]  # of each rank of an engine, its `messages.Address`, encoded


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
        after_read: called, by any thread, with the transfer's id, the piece and the number of
            blocks, when these blocks have been read. The transfer continues when it returns.
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
        self.after_read: Callable[[str, Piece, int], None] = lambda *read: None
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
    def address(self) -> msgspec.Raw:
        """How other ranks reach this one: a `messages.Address`, encoded."""
        host, port = self._listener.address
        return msgspec.Raw(messages.encode(messages.Address(host, port, self.id, self.layout)))

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
                    ComputedLayer(
                        transfer_id=transfer_id,
                        local=local,
                        remote=remote,
                        layer=layer,
                        wait=wait,
                        is_last=is_last and layer == layers[-1],
                    )
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
        event: torch.cuda.Event = torch.cuda.current_stream(self.device).record_event()
        return event.synchronize

    # -------------------------------------------------------------- plans

    def _plan(
        self, pieces: Callable[..., tuple[Piece, ...]], peers: Peers, remote: BlockIds = ()
    ) -> tuple[list[tuple[messages.Address, Piece]], str]:
        """Which peers have something in common with this rank, and what; or why they do not fit."""
        try:
            addresses = [messages.decode_address(peer) for peer in peers]
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
