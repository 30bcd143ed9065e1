"""How KV blocks get from one rank's cache into another's: what all transports have in common.

A rank asks the ranks of another engine for blocks (`read`), or pushes its own into their caches (`write`) where they expect
them (`expect`). Every pair of ranks that has something in common has an authenticated connection, opened by the one that
reads or writes; a thread serves each end, and the engine's own thread never waits: it asks (`poll`) what has ended.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from nanovllm.device import zeros
from nanovllm.kv_transfer.handshake import Connection, CorruptFrame, Listener, PeerLost, connect
from nanovllm.kv_transfer.layout import KVLayout, Piece, common_piece, pieces_from, pieces_to
from nanovllm.kv_transfer.messages import (
    Address,
    Answer,
    Fetch,
    Finish,
    Hello,
    Push,
    Pushed,
    decode_request,
    encode,
)
from nanovllm.kv_transfer.peer import Peer, Reach, Refused
from nanovllm.kv_transfer.transfers import Ended, Transfers

logger = logging.getLogger(__name__)

_GRACE = 5.0  # seconds that a writer may be ahead of what the reader's engine tells this rank


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
        _check_host(host)
        self.layout, self.kv_caches, self.timeout, self._secret = layout, kv_caches, timeout, secret
        self.id = os.urandom(8).hex()
        self.transfers = Transfers()
        self._peers: dict[str, Peer] = {}
        self._writes: dict[str, list[Peer]] = {}  # who has to be told how each push ends
        self._prepare(host)
        self._memory = self.memory()
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
        self,
        transfer_id: str,
        peers: Sequence[dict[str, Any]],
        block_ids: Sequence[int],
        timeout: float | None = None,
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
                peer.put(self._write_piece, transfer_id, piece, layer, local, remote, mark)

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

    def poll(self, wait_seconds: float = 0.0) -> list[Ended]:
        """What has ended since the last call.

        Args:
            wait_seconds: if nothing has, wait so long for it.
        """
        return self.transfers.poll(wait_seconds)

    def close(self) -> None:
        """End everything, and listen no more. Transfers that are under way fail."""
        self.transfers.fail_all("this engine has closed its transport")
        self._listener.close()
        for peer in self._peers.values():
            peer.close()

    # -------------------------------------------------------------- what each kind of transport brings

    def _prepare(self, host: str) -> None:
        """Make the caches reachable."""

    def memory(self) -> bytes:
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

    def _plan(
        self, pieces: Any, peers: Sequence[dict[str, Any]], remote: Iterable[int]
    ) -> list[tuple[Peer, Piece]]:
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
        if address.id not in self._peers:
            self._peers = {id: peer for id, peer in self._peers.items() if not peer.is_gone}
            self._peers[address.id] = Peer(address, self._introduce)
        return self._peers[address.id]

    def _introduce(self, address: Address) -> tuple[Connection, Reach]:
        """Connect to a peer, and find the way to its cache."""
        connection = connect(
            address.host,
            address.port,
            self._secret,
            self.fingerprint,
            min(10.0, self.timeout),
            "kv-data",
            self.timeout,
        )
        try:
            connection.send(encode(Hello(self.id, self.layout)))
            theirs = msgspec.msgpack.decode(connection.receive(self.timeout), type=Hello)
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

    def _read_piece(
        self, peer: Peer, transfer_id: str, piece: Piece, local: list[int], remote: list[int]
    ) -> None:
        if self.transfers.enter(transfer_id, peer.id):
            return
        error = "the thread that reads has failed"
        try:
            error = peer.attempt(lambda reach: reach.read(piece, local, remote))
        finally:
            arrived = [] if error else [(layer, local) for layer in piece.layers]
            num_bytes = 0 if error else len(piece.layers) * len(local) * self._bytes_of(piece)
            self.transfers.leave(transfer_id, peer.id, arrived, num_bytes, error, finished=True)

    def _bytes_of(self, piece: Piece) -> int:
        return self.layout.block_bytes * piece.num_heads // len(self.layout.heads)

    def _write_piece(
        self,
        peer: Peer,
        transfer_id: str,
        piece: Piece,
        layer: int,
        local: list[int],
        remote: list[int],
        mark: Any,
    ) -> None:
        if self.transfers.enter(transfer_id, peer.id):
            return

        def push(reach: Reach) -> None:
            request = Push(transfer_id, layer, piece.remote_head, piece.num_heads, remote)
            peer.ask(encode(request), self.timeout)
            peer.send(encode(Pushed()), reach.write(piece, layer, local, remote, mark))

        error = "the thread that writes has failed"
        try:
            error = peer.attempt(push)
        finally:
            num_bytes = 0 if error else len(local) * self._bytes_of(piece)
            if failed := self.transfers.leave(transfer_id, peer.id, num_bytes=num_bytes, error=error):
                self._abandon(transfer_id, failed)

    def _finish(self, peer: Peer, transfer_id: str) -> None:
        if error := self.transfers.enter(transfer_id, peer.id):
            self._tell(peer, Finish(transfer_id, error))
            return
        error = "the thread that writes has failed"
        try:
            error = self._tell(peer, Finish(transfer_id))
        finally:
            self.transfers.leave(transfer_id, peer.id, error=error, finished=True)

    def _tell(self, peer: Peer, finish: Finish) -> str:
        return peer.attempt(lambda reach: peer.ask(encode(finish), self.timeout))

    # -------------------------------------------------------------- the end that is asked

    def _serve(self, connection: Connection) -> None:
        """Answer a peer's requests until it leaves."""
        theirs = msgspec.msgpack.decode(connection.receive(self.timeout), type=Hello)
        self.layout.check_fits(theirs.layout)
        connection.send(encode(Hello(self.id, self.layout, self._memory)))
        allowed: Push | None = None  # what the peer may be writing just now
        try:
            while True:
                request = decode_request(connection.receive())
                if isinstance(request, Pushed):
                    if allowed is None:
                        raise CorruptFrame(f"{connection.peer} wrote what it was not allowed to")
                    self._take_push(connection, theirs.id, allowed)
                    allowed = None
                    continue
                if allowed:
                    raise CorruptFrame(f"{connection.peer} asks for something else in the middle of a push")
                try:
                    if isinstance(request, Fetch):
                        self.serve_fetch(connection, request)
                        continue
                    # The peer may be ahead of what this rank's engine says.
                    self.transfers.is_known(request.transfer_id, min(_GRACE, self.timeout))
                    if isinstance(request, Push):
                        self._allow_push(theirs, request)
                        allowed = request
                    else:
                        self._take_finish(theirs, request)
                    connection.send(encode(Answer()))
                except (Refused, ValueError) as error:
                    connection.send(encode(Answer(str(error))))
        finally:
            gone = f"the peer at {connection.peer} is gone"
            if allowed:
                self.transfers.leave(allowed.transfer_id, theirs.id, error=gone)
            self.transfers.fail_all(gone, writer=theirs.id)

    def _allow_push(self, theirs: Hello, push: Push) -> None:
        piece = common_piece(self.layout, theirs.layout)
        if piece is None or (push.head, push.num_heads) != (piece.local_head, piece.num_heads):
            raise Refused(f"heads {push.head} + {push.num_heads} are not what these two ranks have in common")
        if error := self.transfers.enter(push.transfer_id, theirs.id, push.layer, push.block_ids):
            raise Refused(error)

    def _take_push(self, connection: Connection, peer_id: str, push: Push) -> None:
        if connection.payload_bytes:
            self.receive_blocks(connection, push)
        elif not self._memory:
            raise CorruptFrame(f"{connection.peer} says that it wrote into memory that it cannot reach")
        num_bytes = len(push.block_ids) * self.layout.block_bytes * push.num_heads // len(self.layout.heads)
        self.transfers.leave(push.transfer_id, peer_id, [(push.layer, push.block_ids)], num_bytes)

    def _take_finish(self, theirs: Hello, finish: Finish) -> None:
        error = self.transfers.enter(finish.transfer_id, theirs.id)
        if not error:
            failure = finish.error and f"the peer has given up: {finish.error}"
            error = self.transfers.leave(finish.transfer_id, theirs.id, error=failure, finished=True)
        if error and not finish.error:
            raise Refused(error)


def _check_caches(layout: KVLayout, kv_caches: dict[int, Tensor]) -> None:
    if set(kv_caches) != set(layout.layers):
        raise ValueError(f"caches of the layers {sorted(kv_caches)} for a rank that has {layout.layers}")
    for layer, cache in kv_caches.items():
        found = (tuple(cache.shape), str(cache.dtype).removeprefix("torch."))
        if found != (layout.cache_shape, layout.dtype) or not cache.is_contiguous():
            raise ValueError(
                f"the cache of layer {layer} is not what the layout says, {layout.cache_shape}: {found}"
            )


def _check_host(host: str) -> None:
    try:
        if not host or ipaddress.ip_address(host).is_unspecified:
            raise ValueError(
                f"kv_ip={host!r} is no address that a peer can connect to: name one of this machine"
            )
    except ValueError as error:
        if "kv_ip" in str(error):
            raise
