"""Moves KV blocks by NIXL, which vLLM and Dynamo use too: over UCX, on whatever the network offers,
to and from GPUs as well.

The engine that reads does all the work; the other one only gives it the keys of its memory, over a
connection that has been authenticated before. With these keys NIXL allows access to everything that
is registered, so the end that reads must check which blocks it may touch."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from functools import cached_property, partial
from types import ModuleType
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.transport import messages
from nanovllm.kv_transfer.transport.base import Transport
from nanovllm.kv_transfer.transport.connection import CorruptFrame
from nanovllm.kv_transfer.transport.link import Link
from nanovllm.kv_transfer.transport.pieces import BlockIds, Piece
from nanovllm.processes.channel import PeerLost

logger = logging.getLogger(__name__)


_PAUSE = 0.00005  # seconds between two looks at a transfer


class _Memory(msgspec.Struct):
    """NIXL's description of an agent, and the address of each layer's cache."""

    agent: bytes
    addresses: list[int]
    device: int
    kind: Literal["DRAM", "VRAM"]


def _load(host: str, device: torch.device) -> ModuleType:
    """Import NIXL, told to stay on this machine if the environment does not say otherwise.

    Raises:
        ValueError: it is not installed.
    """
    # By default UCX listens on every network that the machine has.
    if host in ("localhost", "::1") or host.startswith("127."):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        if device.type == "cpu":  # a GPU's memory needs more ways
            os.environ.setdefault("UCX_TLS", "sm,tcp")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        from nixl_cu12 import _api
    except ImportError as error:
        raise ValueError(
            f"kv_connector='nixl' needs NIXL ({error}): pip install 'nanovllm[nixl]'"
        ) from error
    return _api


class NixlLink(Link):
    """Reads from a peer's cache over NIXL."""

    transport: NixlTransport

    @cached_property
    def _agent(self) -> tuple[_Memory, str]:
        """The peer's memory, and the name of its agent."""
        memory = msgspec.msgpack.decode(self.theirs.memory, type=_Memory)
        name = self.transport.call("add_remote_agent", memory.agent)
        self.transport.num_links[name] += 1
        return memory, name

    def read(self, piece: Piece, local_ids: BlockIds, remote_ids: BlockIds) -> None:
        """See `Link.read`."""
        self.ask(piece.fetch(remote_ids))
        memory, name = self._agent
        mine = self.transport.layout
        theirs = self.theirs.layout
        descriptors = partial(self._descriptors, layers=piece.layers, runs=piece.runs(mine, theirs))
        local = descriptors(
            memory=self.transport.memory, layout=mine, head=piece.local_head, ids=local_ids
        )
        remote = descriptors(memory=memory, layout=theirs, head=piece.remote_head, ids=remote_ids)
        handle = self.transport.call("initialize_xfer", "READ", local, remote, name)
        try:
            self._wait(handle)
        finally:
            self._release(handle)
        self.connection.send(messages.encode(messages.Moved()))

    def _descriptors(
        self,
        *,
        memory: _Memory,
        layout: KVLayout,
        layers: range,
        head: int,
        runs: tuple[int, int],
        ids: BlockIds,
    ) -> object:
        """Address, bytes and device of each run of some blocks, in all layers.

        Args:
            head: the first, counted from the rank's first one.
            runs: see `Piece.runs`.
        """
        caches = np.array(memory.addresses, dtype=np.uint64)
        blocks = np.array(ids, dtype=np.uint64)
        inner = [head * layout.head_bytes + i * layout.block_bytes // 2 for i in range(runs[0])]
        starts = caches[[layer - layout.first_layer for layer in layers], None, None]
        starts = (
            starts
            + blocks[:, None] * np.uint64(layout.block_bytes)
            + np.array(inner, dtype=np.uint64)
        )
        table = np.empty((starts.size, 3), dtype=np.uint64)
        table[:, 0] = starts.ravel()
        table[:, 1] = runs[1]
        table[:, 2] = memory.device
        return self.transport.call("get_xfer_descs", table, memory.kind)

    def _wait(self, handle: object) -> None:
        """Start a transfer, and wait until it is complete."""
        deadline = time.monotonic() + self.transport.timeout
        state = self.transport.call("transfer", handle)
        while state == "PROC":
            time.sleep(_PAUSE)
            state = self.transport.call("check_xfer_state", handle)
            if state == "PROC" and (self.connection.is_lost() or time.monotonic() > deadline):
                raise PeerLost(f"{self.connection.peer} disconnected during a transfer")
        if state != "DONE":
            raise PeerLost(f"NIXL could not reach the cache of {self.connection.peer}")

    def _release(self, handle: object) -> None:
        """Release a transfer. NIXL may write for one that has failed until it accepts the
        release."""
        while not self.transport.is_closed:
            try:
                self.transport.call("release_xfer_handle", handle)
                return
            except PeerLost as error:
                logger.debug("NIXL does not release a transfer yet: %s", error)
                self.transport.call("update_notifs")  # lets UCX notice that its peer is gone
                time.sleep(0.001)

    def serve_fetch(self, fetch: messages.Fetch, layers: range) -> None:
        """Let a peer read. On most networks UCX needs both ends to keep it going."""
        self.connection.send(messages.encode(messages.Answer()))
        while not self.connection.is_ready():
            self.transport.call("update_notifs")
            time.sleep(_PAUSE)
        if not isinstance(self.receive(), messages.Moved):
            raise CorruptFrame(f"{self.connection.peer} sent another request during a read")

    def close(self) -> None:
        """Forget the peer."""
        if "_agent" not in vars(self):
            return
        _, name = self._agent
        self.transport.num_links[name] -= 1
        if self.transport.num_links[name]:  # the peer reads from here, too
            return
        try:
            self.transport.call("remove_remote_agent", name)
        except PeerLost as error:
            logger.info("NIXL had already removed a peer: %s", error)


class NixlTransport(Transport):
    """One NIXL agent, in which all caches of the rank are registered."""

    kind = "nixl"
    link_class = NixlLink

    def _prepare(self, host: str) -> bytes:
        """The agent's keys, and the addresses of the layers' caches."""
        api = _load(host, self.device)
        self._lock = threading.Lock()
        self.num_links: Counter[str] = Counter()  # by agent
        known = vars(api.nixlBind).values()
        self._errors = tuple(
            kind for kind in known if isinstance(kind, type) and issubclass(kind, Exception)
        )
        # NIXL's own thread would use a whole core, also when there is nothing to do: see
        # `serve_fetch`.
        self._agent = api.nixl_agent(
            self.id, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        )
        self._registered = self._agent.register_memory(
            [self.kv_caches[layer] for layer in self.layout.layers]
        )
        kind: Literal["DRAM", "VRAM"] = "VRAM" if self.device.type == "cuda" else "DRAM"
        keys = self.call("get_agent_metadata")
        addresses = [*self.addresses.values()]
        self.memory = _Memory(keys, addresses, self.device.index or 0, kind)
        return messages.encode(self.memory)

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the agent, which only one thread at a time may do.

        Raises:
            PeerLost: NIXL has met an error.
        """
        try:
            with self._lock:
                return getattr(self._agent, method)(*arguments)
        except self._errors as error:
            raise PeerLost(f"NIXL cannot {method}: {error}") from error

    def close(self) -> None:
        """End everything, and unregister the memory."""
        super().close()
        with self._lock:
            self._agent.deregister_memory(self._registered)
