"""Moves KV blocks between the caches of two ranks: what all transports have in common.

A rank reads blocks from ranks of another engine (`read`), or writes its own into their caches (`write`) where they expect them
(`expect`). Each pair of ranks that has something in common uses an authenticated connection, opened by the rank that reads or
writes. A thread serves each end. The engine's own thread never waits: it asks with `poll` which transfers have ended.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.transport import messages
from nanovllm.kv_transfer.transport.connection import Connection, PeerLost
from nanovllm.kv_transfer.transport.handshake import Listener, connect
from nanovllm.kv_transfer.transport.peer import Peer, Reach
from nanovllm.kv_transfer.transport.pieces import BlockIds, Piece, pieces_from, pieces_to
from nanovllm.kv_transfer.transport.server import BlockServer
from nanovllm.kv_transfer.transport.transfers import Ended, Transfers
from nanovllm.ops.device import zeros

logger = logging.getLogger(__name__)

Caches = dict[int, Tensor]  # by layer
Peers = Sequence[dict[str, Any]]  # the addresses of all ranks of an engine

_MAX_LAYERS = 16  # per push: between two pushes a peer can refuse


class Transport(BlockServer):
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
    """

    def __init__(
        self, layout: KVLayout, kv_caches: Caches, host: str, secret: bytes, port: int = 0, timeout: float = 30.0
    ) -> None:
        _check_caches(layout, kv_caches)
        if not host or is_address(host, "unspecified"):
            raise ValueError(f"peers cannot connect to kv_ip={host!r}: name an address of this machine")
        self.layout, self.kv_caches, self.timeout, self._secret = layout, kv_caches, timeout, secret
        self.device = next(iter(kv_caches.values())).device
        self.addresses = {layer: cache.data_ptr() for layer, cache in kv_caches.items()}
        self.id, self.is_closed = os.urandom(8).hex(), False
        self.transfers = Transfers()
        self._peers: dict[messages.Address, Peer] = {}
        self._writes: dict[str, list[Peer]] = {}  # the peers that must be told how a push ends
        self._prepare(host)
        self.memory = self.describe_memory()
        limit = min(10.0, timeout)
        self._listener = Listener(host, port, secret, self.fingerprint, self._serve, "kv-data", limit, timeout)

    @classmethod
    def empty_cache(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Zeros in memory that peers can reach."""
        return zeros(tuple(shape), dtype, torch.device(device))

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """What must be equal at both ends of a connection."""
        return {"kv_connector": self.kind, **self.layout.fingerprint}

    @property
    def address(self) -> dict[str, Any]:
        """How other ranks reach this one: plain data."""
        host, port = self._listener.address
        return msgspec.to_builtins(messages.Address(host, port, self.id, self.layout))

    # -------------------------------------------------------------- what the engine asks for

    def read(self, transfer_id: str, peers: Peers, local_block_ids: BlockIds, remote_block_ids: BlockIds) -> None:
        """Begin to fill this rank's blocks with those of another engine.

        Args:
            peers: addresses of all ranks of the other engine.

        Raises:
            ValueError: the id was used before, or the blocks cannot be this rank's.
        """
        local, remote = list(local_block_ids), list(remote_block_ids)
        self._check_local(local, remote, "read into")
        for peer, piece in self._begin_fill(transfer_id, peers, local, remote, float("inf")):
            peer.put(self._read_piece, transfer_id, piece, local, remote)

    def expect(self, transfer_id: str, peers: Peers, block_ids: BlockIds, timeout: float | None = None) -> None:
        """Allow the ranks of another engine to fill these blocks; ends when all that write to this rank say that they have.

        Args:
            timeout: seconds without progress after which the transfer fails; None: those of this transport.

        Raises:
            ValueError: as in `read`.
        """
        self._check_local(list(block_ids), list(block_ids), "fill")
        self._begin_fill(transfer_id, peers, block_ids, None, self.timeout if timeout is None else timeout)

    def write(
        self, transfer_id: str, peers: Peers, layer: int, local_block_ids: BlockIds, remote_block_ids: BlockIds
    ) -> None:
        """Begin to push blocks of a layer that has just been computed. May be called again, also for the same blocks.

        Raises:
            ValueError: the blocks cannot be this rank's, or it does not have the layer.
        """
        local, remote = list(local_block_ids), list(remote_block_ids)
        self._check_local(local, remote, "push")
        if layer not in self.layout.layers:
            raise ValueError(f"layer {layer} of a rank that has {self.layout.layers}")
        plan = self._begin_write(transfer_id, peers, remote)
        mark = self.mark() if plan and local else None
        for peer, piece in plan:
            if local and layer in piece.layers:
                peer.writes.append(((transfer_id, piece, local, remote), layer, mark))
                peer.put(self._write_layers)

    def finish_writes(self, transfer_id: str, peers: Peers) -> None:
        """Tell the peers, after everything that has begun, that this transfer is complete."""
        self._begin_write(transfer_id, peers, ())
        if not self.transfers.enter(transfer_id, self.id):
            self.transfers.leave(transfer_id, self.id, finished=True)
        for peer in self._writes.pop(transfer_id, ()):
            peer.put(self._finish_peer, transfer_id)

    def cancel(self, transfer_id: str, reason: str = "cancelled") -> None:
        """Begin nothing more for a transfer, and tell the peers that wait for its writes. `poll` still reports its end."""
        self.transfers.fail(transfer_id, reason)
        for peer in self._writes.pop(transfer_id, ()):
            peer.put(self._tell, transfer_id, reason)

    def cancel_all(self, reason: str) -> None:
        """Cancel all transfers."""
        for transfer_id in list(self._writes):
            self.cancel(transfer_id, reason)
        self.transfers.fail_all(reason)

    def poll(self, wait_seconds: float = 0.0) -> list[Ended]:
        """Transfers that have ended since the last call.

        Args:
            wait_seconds: how long to wait for one if there is none.
        """
        return self.transfers.poll(wait_seconds)

    def close(self) -> None:
        """Fail all open transfers, and close all connections."""
        self.is_closed = True
        self.transfers.fail_all("this engine has closed its transport")
        self._listener.close()
        for peer in self._peers.values():
            peer.close()

    # -------------------------------------------------------------- what each kind of transport brings

    def _prepare(self, host: str) -> None:
        """Make the caches reachable."""

    def reach(self, connection: Connection, theirs: messages.Hello) -> Reach:
        """The way to a peer's cache.

        Raises:
            OSError, ValueError: there is none.
        """
        raise NotImplementedError

    def mark(self) -> torch.cuda.Event | None:
        """On a GPU, the event after which everything that was computed so far can be read. On a CPU it already can."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.current_stream(self.device).record_event()

    # -------------------------------------------------------------- plans

    def _check_local(self, local: list[int], remote: list[int], what: str) -> None:
        self.layout.check_blocks(local)
        if len(local) != len(remote):
            raise ValueError(f"{len(local)} blocks to {what}, but {len(remote)} of the peer")
        if what != "push" and len(set(local)) != len(local):
            raise ValueError(f"the same block twice among those to {what}")

    def _plan(
        self, transfer_id: str, pieces: Any, peers: Peers, local: BlockIds, remote: BlockIds
    ) -> list[tuple[Peer, Piece]] | None:
        """Which peers have something in common with this rank, and what; None if they do not fit: the transfer has failed."""
        try:
            addresses = msgspec.convert(peers, list[messages.Address])
            plan = []
            for piece in pieces(self.layout, tuple(address.layout for address in addresses)):
                address = addresses[piece.peer]
                address.layout.check_blocks(remote)
                plan.append((self._peer(address), piece))
            return plan
        except (ValueError, msgspec.MsgspecError) as error:
            if not self.transfers.is_known(transfer_id):
                self.transfers.begin(transfer_id, [""], local, [("", -1)])
            self.cancel(transfer_id, str(error))
            return None

    def _peer(self, address: messages.Address) -> Peer:
        if address not in self._peers:
            self._peers = {place: peer for place, peer in self._peers.items() if not peer.is_gone}
            self._peers[address] = Peer(address, self._introduce)
        return self._peers[address]

    def _introduce(self, address: messages.Address) -> tuple[Connection, Reach]:
        """Connect to a peer, and find the way to its cache."""
        limit = min(10.0, self.timeout)
        connection = connect(address.host, address.port, self._secret, self.fingerprint, limit, "kv-data", self.timeout)
        try:
            connection.send(messages.encode(messages.Hello(self.id, self.layout)))
            theirs = messages.receive(connection, messages.decode_hello, self.timeout)
            if (theirs.id, theirs.layout) != (address.id, address.layout):
                raise PeerLost(f"at {connection.peer} there is another rank now, or one with another cache")
            return connection, self.reach(connection, theirs)
        except BaseException:
            connection.close()
            raise

    def _begin_fill(
        self, transfer_id: str, peers: Peers, local: BlockIds, remote: BlockIds | None, patience: float
    ) -> list[tuple[Peer, Piece]]:
        """Begin a transfer into this rank's blocks; returns the peers that fill them.

        Args:
            remote: the blocks to be read; None: the peers write.
        """
        plan = self._plan(transfer_id, pieces_from, peers, local, remote or ())
        if plan is None:
            return []
        if remote == []:
            plan = []
        parts = [(peer.id, layer) for peer, piece in plan for layer in piece.layers]
        self.transfers.begin(transfer_id, [peer.id for peer, _ in plan], local, parts, patience)
        return plan

    def _begin_write(self, transfer_id: str, peers: Peers, remote: BlockIds) -> list[tuple[Peer, Piece]]:
        """Begin a push if it has not begun; returns its peers, none if it has ended."""
        plan = self._plan(transfer_id, pieces_to, peers, (), remote) or []
        if not self.transfers.is_known(transfer_id):
            # Until finish_writes, the transfer also waits for this rank.
            self._writes[transfer_id] = [peer for peer, _ in plan]
            self.transfers.begin(transfer_id, [self.id, *(peer.id for peer, _ in plan)])
        return plan if transfer_id in self._writes else []

    # -------------------------------------------------------------- jobs, in the peers' threads

    def _read_piece(self, peer: Peer, transfer_id: str, piece: Piece, local: list[int], remote: list[int]) -> None:
        arrived = [(layer, local) for layer in piece.layers]
        self._do(peer, transfer_id, lambda connection, reach: reach.read(piece, local, remote), arrived, finished=True)

    def _write_layers(self, peer: Peer) -> None:
        """Push the next layers of a peer: those that were computed meanwhile go together."""
        if not peer.writes:
            return
        parts, first, mark = peer.writes.popleft()
        end = first + 1
        while peer.writes and end - first < _MAX_LAYERS and peer.writes[0][:2] == (parts, end):
            _, _, mark = peer.writes.popleft()
            end += 1
        transfer_id, piece, local, remote = parts
        request = messages.Push(first, end, piece.remote_head, piece.num_heads, remote, transfer_id)

        def push(connection: Connection, reach: Reach) -> None:
            messages.ask(connection, request, self.timeout)
            payload = reach.write(piece, request.layers, local, remote, mark)
            connection.send(messages.encode(messages.Moved()), payload)

        self._do(peer, transfer_id, push, [(layer, local) for layer in request.layers])

    def _finish_peer(self, peer: Peer, transfer_id: str) -> None:
        if error := self._do(peer, transfer_id, self._telling(transfer_id), finished=True):
            self._tell(peer, transfer_id, error)

    def _tell(self, peer: Peer, transfer_id: str, error: str) -> None:
        peer.attempt(self._telling(transfer_id, error))

    def _telling(self, transfer_id: str, error: str = "") -> Callable[[Connection, Reach], None]:
        finish = messages.Finish(transfer_id, error)
        return lambda connection, reach: messages.ask(connection, finish, self.timeout)

    def _do(
        self,
        peer: Peer,
        transfer_id: str,
        work: Callable[[Connection, Reach], object],
        arrived: Sequence[tuple[int, list[int]]] = (),
        finished: bool = False,
    ) -> str:
        """Do a part of a transfer, unless it has ended or the peer cannot be reached.

        Args:
            arrived: layers, and the blocks that `work` moves there.
            finished: it is the last part with this peer.

        Returns:
            Why it could not be done.
        """
        # Connecting may take seconds, during which the transfer can still be cancelled: no block is touched yet.
        if not (error := peer.attempt(lambda connection, reach: None)):
            if refused := self.transfers.enter(transfer_id, peer.id):
                return refused
            error = "the thread that moves blocks has met an error; see the log"
            try:
                error = peer.attempt(work)
            finally:
                self.transfers.leave(transfer_id, peer.id, arrived, error, finished)
        if error:
            self.cancel(transfer_id, error)
        return error


def _check_caches(layout: KVLayout, kv_caches: Caches) -> None:
    if set(kv_caches) != set(layout.layers):
        raise ValueError(f"caches of the layers {sorted(kv_caches)} for a rank that has {layout.layers}")
    for layer, cache in kv_caches.items():
        found = (tuple(cache.shape), str(cache.dtype).removeprefix("torch."))
        if found != (layout.cache_shape, layout.dtype) or not cache.is_contiguous():
            raise ValueError(f"the cache of layer {layer} is not what the layout says, {layout.cache_shape}: {found}")


def is_address(host: str, kind: str) -> bool:
    """Whether a host is a number that is "loopback" or "unspecified"; "localhost" is on loopback, too."""
    try:
        return getattr(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host), f"is_{kind}")
    except ValueError:
        return False  # a name
