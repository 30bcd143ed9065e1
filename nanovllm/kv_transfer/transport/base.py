"""How KV blocks get from one rank's cache into another's: what all transports have in common.

A rank asks the ranks of another engine for blocks (`read`), or pushes its own into their caches (`write`) where they expect
them (`expect`). Every pair of ranks that has something in common has an authenticated connection, opened by the one that
reads or writes; a thread serves each end, and the engine's own thread never waits: it asks (`poll`) what has ended.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from nanovllm.kv.layout import KVLayout
from nanovllm.kv_transfer.transport.connection import Connection, CorruptFrame, PeerLost
from nanovllm.kv_transfer.transport.handshake import Listener, connect
from nanovllm.kv_transfer.transport.messages import Address, Fetch, Finish, Hello, Moved, Push, decode_hello, encode
from nanovllm.kv_transfer.transport.peer import Peer, Reach, Refused, Write
from nanovllm.kv_transfer.transport.pieces import Piece, pieces_from, pieces_to
from nanovllm.kv_transfer.transport.transfers import Ended, Transfers
from nanovllm.kv_transfer.transport.visit import Visit, understand
from nanovllm.ops.device import zeros

logger = logging.getLogger(__name__)


_MOST_LAYERS = 16  # that are pushed at once: then the peer may say that it does not want any more


class Transport:
    """The end of one rank: it serves its own blocks and moves others'.

    All methods return at once. Every transfer has an id of its own and is reported once by `poll`, when nobody touches its
    blocks any more; what a peer says wrong, or that it dies, ends the transfer with an error and never raises here.

    Args:
        layout: of this rank.
        kv_caches: of its layers, `layout.cache_shape` each, made with `empty_cache`.
        host: the address to listen on, which is also the one that peers connect to.
        secret: what the peers have to know.
        port: 0: any that is free.
        timeout: seconds without progress after which a transfer fails.

    Raises:
        ValueError: the caches are not what the layout says, or nobody can connect to such a host.
        OSError: the address cannot be had.
    """

    kind = ""

    def __init__(
        self,
        layout: KVLayout,
        kv_caches: dict[int, Tensor],
        host: str,
        secret: bytes,
        port: int = 0,
        timeout: float = 30.0,
    ) -> None:
        _check_caches(layout, kv_caches)
        if not host or is_address(host, "unspecified"):
            raise ValueError(f"kv_ip={host!r} is nothing that a peer can connect to: name an address of this machine")
        self.layout, self.kv_caches, self.timeout, self._secret = layout, kv_caches, timeout, secret
        self.id, self.is_closed = os.urandom(8).hex(), False
        self.transfers = Transfers()
        self._peers: dict[Address, Peer] = {}
        self._writes: dict[str, list[Peer]] = {}  # who has to be told how each push ends
        self._prepare(host)
        self.memory = self.describe_memory()
        self._listener = Listener(
            host, port, secret, self.fingerprint, self._serve, "kv-data", min(10.0, timeout), timeout
        )

    @classmethod
    def empty_cache(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Zeros that peers can reach."""
        return zeros(tuple(shape), dtype, torch.device(device))

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """What has to be the same at both ends of a connection."""
        return {"kv_connector": self.kind, **self.layout.fingerprint}

    @property
    def address(self) -> dict[str, Any]:
        """How other ranks reach this one: plain data."""
        host, port = self._listener.address
        return msgspec.to_builtins(Address(self.kind, host, port, self.id, self.layout))

    # -------------------------------------------------------------- what the engine asks for

    def read(
        self,
        transfer_id: str,
        peers: Sequence[dict[str, Any]],
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
    ) -> None:
        """Begin to fill blocks with those of another engine.

        Args:
            peers: addresses of all ranks of the other engine.
            remote_block_ids: as many.

        Raises:
            ValueError: the id was used before, or these cannot be this rank's blocks.
        """
        local, remote = list(local_block_ids), list(remote_block_ids)
        self._check_local(local, remote, "read into")
        try:
            plan = self._plan(pieces_from, peers, remote)
        except (ValueError, msgspec.MsgspecError) as error:
            self._begin_failed(transfer_id, local, str(error))
            return
        plan = plan if local else []
        parts = [(peer.id, layer) for peer, piece in plan for layer in piece.layers]
        self.transfers.begin(transfer_id, [peer.id for peer, _ in plan], local, parts)
        for peer, piece in plan:
            peer.put(self._read_piece, transfer_id, piece, local, remote)

    def expect(
        self, transfer_id: str, peers: Sequence[dict[str, Any]], block_ids: Sequence[int], timeout: float | None = None
    ) -> None:
        """Allow the ranks of another engine to fill these blocks. It has ended when all who have something for this rank
        have said so.

        Args:
            timeout: seconds without progress after which it is given up, if not those of this transport.

        Raises:
            ValueError: as in `read`.
        """
        self._check_local(list(block_ids), list(block_ids), "fill")
        try:
            plan = self._plan(pieces_from, peers, ())
        except (ValueError, msgspec.MsgspecError) as error:
            self._begin_failed(transfer_id, block_ids, str(error))
            return
        parts = [(peer.id, layer) for peer, piece in plan for layer in piece.layers]
        patience = self.timeout if timeout is None else timeout
        self.transfers.begin(transfer_id, [peer.id for peer, _ in plan], block_ids, parts, patience)

    def write(
        self,
        transfer_id: str,
        peers: Sequence[dict[str, Any]],
        layer: int,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
    ) -> None:
        """Begin to push blocks of one layer, which has just been computed. May be called again, also for the same blocks.

        Raises:
            ValueError: these cannot be this rank's blocks, or it does not have the layer.
        """
        local, remote = list(local_block_ids), list(remote_block_ids)
        self._check_local(local, remote, "push")
        if layer not in self.layout.layers:
            raise ValueError(f"layer {layer} of a rank that has {self.layout.layers}")
        plan = self._begin_write(transfer_id, peers, remote)
        mark = self.mark() if plan and local else None
        for peer, piece in plan:
            if local and layer in piece.layers:
                peer.writes.append(Write(transfer_id, piece, range(layer, layer + 1), local, remote, mark))
                peer.put(self._write_piece)

    def finish_writes(self, transfer_id: str, peers: Sequence[dict[str, Any]]) -> None:
        """Tell the peers, after everything that has begun, that this transfer is complete."""
        self._begin_write(transfer_id, peers, ())
        if not self.transfers.enter(transfer_id, self.id):
            self.transfers.leave(transfer_id, self.id, finished=True)
        for peer in self._writes.pop(transfer_id, ()):
            peer.put(self._finish, transfer_id)

    def cancel(self, transfer_id: str) -> None:
        """Begin nothing more for a transfer. It will still be reported as ended."""
        self._abandon(transfer_id, "cancelled")

    def cancel_all(self, reason: str) -> None:
        """The same for all that are under way, on both sides of them."""
        for transfer_id in list(self._writes):
            self._abandon(transfer_id, reason)
        self.transfers.fail_all(reason)

    def poll(self, wait_seconds: float = 0.0) -> list[Ended]:
        """What has ended since the last call.

        Args:
            wait_seconds: if nothing has, wait so long for it.
        """
        return self.transfers.poll(wait_seconds)

    def close(self) -> None:
        """End everything, and listen no more. Transfers that are under way fail."""
        self.is_closed = True
        self.transfers.fail_all("this engine has closed its transport")
        self._listener.close()
        for peer in self._peers.values():
            peer.close()

    # -------------------------------------------------------------- what each kind of transport brings

    def _prepare(self, host: str) -> None:
        """Make the caches reachable."""

    def describe_memory(self) -> bytes:
        """What a peer needs to know to reach the caches by itself."""
        return b""

    def reach(self, connection: Connection, theirs: Hello) -> Reach:
        """The way to a peer's cache.

        Raises:
            OSError, ValueError: there is none.
        """
        raise NotImplementedError

    def mark(self) -> Any:
        """The moment from which what has been computed so far can be read."""
        return None

    def serve_fetch(self, connection: Connection, fetch: Fetch) -> None:
        """Send what a peer asks for."""
        raise Refused(f"the {self.kind} transport sends no blocks by itself")

    def assist(self, connection: Connection) -> None:
        """Do what a peer needs while it reaches the caches by itself; returns when it says something."""

    def receive_blocks(self, connection: Connection, push: Push) -> None:
        """Put the payload of a push into its blocks."""
        raise CorruptFrame(f"{connection.peer} sent blocks, which the {self.kind} transport does not take")

    # -------------------------------------------------------------- the end that asks

    def _check_local(self, local: list[int], remote: list[int], what: str) -> None:
        self.layout.check_blocks(local)
        if len(local) != len(remote):
            raise ValueError(f"{len(local)} blocks to {what}, but {len(remote)} of the peer")
        if what != "push" and len(set(local)) != len(local):
            raise ValueError(f"the same block twice among those to {what}")

    def _plan(self, pieces: Any, peers: Sequence[dict[str, Any]], remote: Iterable[int]) -> list[tuple[Peer, Piece]]:
        """Which peers have something in common with this rank, and what.

        Raises:
            ValueError, msgspec.MsgspecError: they do not fit, or are no addresses at all.
        """
        addresses = [msgspec.convert(peer, Address) for peer in peers]
        for address in addresses:
            if address.kind != self.kind:
                raise ValueError(f"kv_connector is {self.kind!r} here and {address.kind!r} there")
        plan = []
        for piece in pieces(self.layout, tuple(address.layout for address in addresses)):
            address = addresses[piece.peer]
            address.layout.check_blocks(list(remote))
            plan.append((self._peer(address), piece))
        return plan

    def _peer(self, address: Address) -> Peer:
        if address not in self._peers:
            self._peers = {place: peer for place, peer in self._peers.items() if not peer.is_gone}
            self._peers[address] = Peer(address, self._introduce)
        return self._peers[address]

    def _introduce(self, address: Address) -> tuple[Connection, Reach]:
        """Connect to a peer, and find the way to its cache."""
        connection = connect(
            address.host, address.port, self._secret, self.fingerprint, min(10.0, self.timeout), "kv-data", self.timeout
        )
        try:
            connection.send(encode(Hello(self.id, self.layout)))
            theirs = understand(connection, connection.receive(self.timeout), decode_hello)
            if (theirs.id, theirs.layout) != (address.id, address.layout):
                raise PeerLost(f"at {connection.peer} there is another rank now, or one with another cache")
            return connection, self.reach(connection, theirs)
        except BaseException:
            connection.close()
            raise

    def _begin_failed(self, transfer_id: str, blocks: Iterable[int], error: str) -> None:
        self.transfers.begin(transfer_id, [""], blocks, [("", -1)])
        self.transfers.fail(transfer_id, error)

    def _begin_write(
        self, transfer_id: str, peers: Sequence[dict[str, Any]], remote: Sequence[int]
    ) -> list[tuple[Peer, Piece]]:
        """The peers of a push that may go on; nobody, if it has ended."""
        try:
            plan = self._plan(pieces_to, peers, remote)
        except (ValueError, msgspec.MsgspecError) as error:
            if not self.transfers.is_known(transfer_id):
                self._begin_failed(transfer_id, (), str(error))
            self._abandon(transfer_id, str(error))
            return []
        if not self.transfers.is_known(transfer_id):
            # This rank is one of those that are waited for, until finish_writes.
            self._writes[transfer_id] = [peer for peer, _ in plan]
            self.transfers.begin(transfer_id, [self.id, *(peer.id for peer, _ in plan)])
        return plan if transfer_id in self._writes else []

    def _abandon(self, transfer_id: str, error: str) -> None:
        """Fail a transfer, and if it is a push, tell all who wait for it."""
        self.transfers.fail(transfer_id, error)
        for peer in self._writes.pop(transfer_id, ()):
            peer.put(self._tell, Finish(transfer_id, error))

    def _read_piece(self, peer: Peer, transfer_id: str, piece: Piece, local: list[int], remote: list[int]) -> None:
        arrived = [(layer, local) for layer in piece.layers]
        self._do(peer, transfer_id, lambda reach: reach.read(piece, local, remote), piece, arrived, finished=True)

    def _write_piece(self, peer: Peer) -> None:
        """Push what has been put for a peer: layers that have come together go together."""
        if not peer.writes:
            return
        write = peer.writes.popleft()
        while peer.writes and len(write.layers) < _MOST_LAYERS and write.goes_on_with(peer.writes[0]):
            following = peer.writes.popleft()
            write.layers, write.mark = range(write.layers.start, following.layers.stop), following.mark
        piece, layers = write.piece, write.layers
        parts = (layers.start, layers.stop, piece.remote_head, piece.num_heads, write.remote)

        def push(reach: Reach) -> None:
            peer.ask(encode(Push(write.transfer_id, *parts)), self.timeout)
            peer.send(encode(Moved()), reach.write(piece, layers, write.local, write.remote, write.mark))

        self._do(peer, write.transfer_id, push, piece, [(layer, write.local) for layer in layers])

    def _finish(self, peer: Peer, transfer_id: str) -> None:
        message = encode(Finish(transfer_id))
        if error := self._do(peer, transfer_id, lambda reach: peer.ask(message, self.timeout), finished=True):
            self._tell(peer, Finish(transfer_id, error))

    def _tell(self, peer: Peer, finish: Finish) -> None:
        peer.attempt(lambda reach: peer.ask(encode(finish), self.timeout))

    def _do(
        self,
        peer: Peer,
        transfer_id: str,
        work: Callable[[Reach], object],
        piece: Piece | None = None,
        arrived: Sequence[tuple[int, list[int]]] = (),
        finished: bool = False,
    ) -> str:
        """Do some of a transfer; nothing, if it has ended or the peer cannot be reached.

        Args:
            arrived: layers, and the blocks that are moved in each, of `piece`.
            finished: nothing else is to be done with this peer.

        Returns:
            Why it could not be done.
        """
        if not (error := peer.ready()) and (refused := self.transfers.enter(transfer_id, peer.id)):
            return refused
        if not error:
            failed = "the thread that moves blocks has met an error, which stands in the log"
            try:
                failed = error = peer.attempt(work)
            finally:
                moved = [] if failed else arrived
                num_bytes = sum(len(blocks) * self._bytes_of(piece) for _, blocks in moved if piece)
                self.transfers.leave(transfer_id, peer.id, moved, num_bytes, failed, finished)
        if error:
            self._abandon(transfer_id, error)
        return error

    def _bytes_of(self, piece: Piece) -> int:
        return self.layout.block_bytes * piece.num_heads // len(self.layout.heads)

    # -------------------------------------------------------------- the end that is asked

    def _serve(self, connection: Connection) -> None:
        """Answer a peer's requests until it leaves."""
        hello = understand(connection, connection.receive(self.timeout), decode_hello)
        connection.send(encode(Hello(self.id, self.layout, self.memory)))
        Visit(self, connection, hello).serve()


def _check_caches(layout: KVLayout, kv_caches: dict[int, Tensor]) -> None:
    if set(kv_caches) != set(layout.layers):
        raise ValueError(f"caches of the layers {sorted(kv_caches)} for a rank that has {layout.layers}")
    for layer, cache in kv_caches.items():
        found = (tuple(cache.shape), str(cache.dtype).removeprefix("torch."))
        if found != (layout.cache_shape, layout.dtype) or not cache.is_contiguous():
            raise ValueError(f"the cache of layer {layer} is not what the layout says, {layout.cache_shape}: {found}")


def is_address(host: str, kind: str) -> bool:
    """Whether a host is given by its number, and that is "loopback" or "unspecified"; "localhost" is on loopback, too."""
    try:
        return getattr(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host), f"is_{kind}")
    except ValueError:
        return False  # a name
