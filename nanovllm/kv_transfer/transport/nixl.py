"""The transport by NIXL, which vLLM and Dynamo use too: over UCX, hence whatever the network can do, to and from GPUs as well.

The engine that reads or writes does everything; the other one only gives it the keys of its memory, on a connection that has
been authenticated before. NIXL itself lets who has them touch everything that is registered: which blocks, is checked by the
end that moves them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from nanovllm.kv.layout import KVLayout
from nanovllm.kv_transfer.transport.base import Transport, is_address
from nanovllm.kv_transfer.transport.connection import Connection, CorruptFrame, PeerLost
from nanovllm.kv_transfer.transport.messages import Answer, Fetch, Hello, Moved, decode_request, encode
from nanovllm.kv_transfer.transport.peer import Reach, receive_answer
from nanovllm.kv_transfer.transport.pieces import Piece

logger = logging.getLogger(__name__)

_SHORTEST_SLEEP, _LONGEST_SLEEP = 0.00002, 0.001  # seconds between two looks at a transfer


class _Memory(msgspec.Struct):
    """What NIXL says of an agent, and where each of the rank's layers begins."""

    agent: bytes
    addresses: list[int]
    device: int
    kind: str


def _load(host: str, device: torch.device) -> Any:
    """The module, told to stay on this machine if nobody has told it otherwise.

    Raises:
        ValueError: it is not installed.
    """
    # Of its own accord UCX would listen on every network that the machine has.
    if is_address(host, "loopback"):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        if device.type == "cpu":  # a GPU's memory needs more ways
            os.environ.setdefault("UCX_TLS", "sm,tcp")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        from nixl_cu12 import _api
    except ImportError as error:
        raise ValueError(f"kv_connector='nixl' needs NIXL ({error}): pip install 'nanovllm[nixl]'") from error
    return _api


class NixlReach:
    """A peer's cache, which NIXL reaches."""

    def __init__(self, transport: NixlTransport, connection: Connection, theirs: Hello) -> None:
        self._transport, self._connection = transport, connection
        self._layout = theirs.layout
        self._memory = msgspec.msgpack.decode(theirs.memory, type=_Memory)
        if len(self._memory.addresses) != len(theirs.layout.layers) or self._memory.kind not in ("DRAM", "VRAM"):
            raise ValueError(f"{connection.peer} says that it has {self._memory.addresses} as caches")
        try:
            with transport.agent_lock:
                self._name = transport.agent.add_remote_agent(self._memory.agent)
        except transport.errors as error:
            raise PeerLost(f"NIXL does not understand what {connection.peer} says of its cache: {error}") from error

    def read(self, piece: Piece, local_ids: Sequence[int], remote_ids: Sequence[int]) -> None:
        layers = piece.layers
        fetch = Fetch(layers.start, layers.stop, piece.remote_head, piece.num_heads, list(remote_ids))
        self._connection.send(encode(fetch))
        receive_answer(self._connection, self._transport.timeout)
        self._move("READ", piece, layers, local_ids, remote_ids)
        self._connection.send(encode(Moved()))

    def write(
        self, piece: Piece, layers: range, local_ids: Sequence[int], remote_ids: Sequence[int], mark: Any
    ) -> Sequence[memoryview]:
        if mark is not None:
            mark.synchronize()
        self._move("WRITE", piece, layers, local_ids, remote_ids)
        return ()

    def _move(
        self, operation: str, piece: Piece, layers: range, local_ids: Sequence[int], remote_ids: Sequence[int]
    ) -> None:
        transport, agent, lock = self._transport, self._transport.agent, self._transport.agent_lock
        mine = transport.layout.strip(piece.local_head, piece.num_heads)
        theirs = self._layout.strip(piece.remote_head, piece.num_heads)
        planes, run = max(mine.planes, theirs.planes), min(mine.run, theirs.run)

        def places(
            layout: KVLayout, addresses: dict[int, int], offset: int, stride: int, ids: Sequence[int], device: int
        ) -> np.ndarray:
            bases = np.array([addresses[layer] for layer in layers], dtype=np.uint64)
            blocks = np.array(ids, dtype=np.uint64) * np.uint64(layout.block_bytes)
            inner = np.uint64(offset) + np.arange(planes, dtype=np.uint64) * np.uint64(stride or run)
            starts = bases[:, None, None] + blocks[:, None] + inner
            table = np.empty((starts.size, 3), dtype=np.uint64)
            table[:, 0], table[:, 1], table[:, 2] = starts.ravel(), run, device
            return table

        here = places(
            transport.layout, transport.addresses, mine.offset, mine.plane_stride, local_ids, transport.device_index
        )
        remote = dict(zip(self._layout.layers, self._memory.addresses, strict=True))
        there = places(self._layout, remote, theirs.offset, theirs.plane_stride, remote_ids, self._memory.device)
        try:
            with lock:
                sides = (
                    agent.get_xfer_descs(here, transport.memory_kind),
                    agent.get_xfer_descs(there, self._memory.kind),
                )
                handle = agent.initialize_xfer(operation, *sides, self._name)
        except transport.errors as error:
            raise PeerLost(f"NIXL cannot reach the cache of {self._connection.peer}: {error}") from error
        try:
            self._wait(handle)
        except transport.errors as error:
            raise PeerLost(f"NIXL has lost {self._connection.peer}: {error}") from error
        finally:
            self._release(handle)

    def _wait(self, handle: Any) -> None:
        """Begin a transfer, and wait until it is complete."""
        transport, agent = self._transport, self._transport.agent
        deadline, pause = time.monotonic() + transport.timeout, _SHORTEST_SLEEP
        with transport.agent_lock:
            state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(pause)
            pause = min(1.02 * pause, _LONGEST_SLEEP)
            with transport.agent_lock:
                state = agent.check_xfer_state(handle)
            if state == "PROC" and (self._connection.is_lost() or time.monotonic() > deadline):
                raise PeerLost(f"{self._connection.peer} is gone, in the middle of a transfer")
        if state != "DONE":
            raise PeerLost(f"NIXL could not reach the cache of {self._connection.peer}")

    def _release(self, handle: Any) -> None:
        """Give a transfer back. One that has failed is not over before NIXL lets go of it: until then it may write."""
        transport = self._transport
        while not transport.is_closed:
            try:
                with transport.agent_lock:
                    transport.agent.release_xfer_handle(handle)
                return
            except transport.errors as error:
                logger.debug("NIXL does not let go of a transfer yet: %s", error)
                with transport.agent_lock:
                    transport.agent.update_notifs()  # so that UCX comes to know that its peer is gone
                time.sleep(_LONGEST_SLEEP)

    def close(self) -> None:
        try:
            with self._transport.agent_lock:
                self._transport.agent.remove_remote_agent(self._name)
        except self._transport.errors as error:
            logger.info("NIXL had forgotten a peer already: %s", error)


class NixlTransport(Transport):
    """One NIXL agent, in which all caches of the rank are registered."""

    kind = "nixl"

    def _prepare(self, host: str) -> None:
        device = next(iter(self.kv_caches.values())).device
        api = _load(host, device)
        self.device_index, self.memory_kind = (device.index or 0, "VRAM") if device.type == "cuda" else (0, "DRAM")
        self.addresses = {layer: cache.data_ptr() for layer, cache in self.kv_caches.items()}
        self.agent_lock = threading.Lock()
        known = vars(api.nixlBind).values()
        self.errors = tuple(kind for kind in known if isinstance(kind, type) and issubclass(kind, Exception))
        # NIXL's own thread would take a whole core, also when nothing is to be done: see `assist`.
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.agent = api.nixl_agent(self.id, config)
        self._registered = self.agent.register_memory([self.kv_caches[layer] for layer in self.layout.layers])

    def describe_memory(self) -> bytes:
        """The agent's keys, and where the layers begin."""
        addresses = [self.addresses[layer] for layer in self.layout.layers]
        with self.agent_lock:
            metadata = self.agent.get_agent_metadata()
        return encode(_Memory(metadata, addresses, self.device_index, self.memory_kind))

    def reach(self, connection: Connection, theirs: Hello) -> Reach:
        """Its memory, by NIXL."""
        return NixlReach(self, connection, theirs)

    def serve_fetch(self, connection: Connection, fetch: Fetch) -> None:
        """Let a peer read."""
        connection.send(encode(Answer()))
        self.assist(connection)
        if not isinstance(decode_request(connection.receive()), Moved):
            raise CorruptFrame(f"{connection.peer} asks for something else in the middle of a read")

    def assist(self, connection: Connection) -> None:
        """Keep UCX going while a peer reads or writes: on most networks it needs both ends."""
        pause = _SHORTEST_SLEEP
        while not connection.is_readable():
            with self.agent_lock:
                self.agent.update_notifs()
            time.sleep(pause)
            pause = min(1.02 * pause, _LONGEST_SLEEP)

    def mark(self) -> Any:
        """An event on the stream that computes, on a GPU."""
        if self.memory_kind == "DRAM":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def close(self) -> None:
        """End everything, and give the memory back."""
        Transport.close(self)
        with self.agent_lock:
            self.agent.deregister_memory(self._registered)
