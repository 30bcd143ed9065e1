"""Moves KV blocks by shared memory between processes of one machine, and by TCP between machines.

On one machine a rank maps the other's cache and copies blocks from one into the other: every byte
is touched once, and the other process does nothing. Elsewhere the owner gathers the blocks of a
layer and sends them in one piece, and the other rank spreads them over its cache if their checksum
is right. Caches on a GPU go through pinned host memory, on their own stream, and always by TCP."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from nanovllm.distributed import shared_memory
from nanovllm.distributed.shared_memory import Segment, SegmentHandle
from nanovllm.kv_transfer.transport.base import Transport
from nanovllm.kv_transfer.transport.link import Link
from nanovllm.kv_transfer.transport.messages import Answer, Fetch, encode
from nanovllm.kv_transfer.transport.pieces import BlockIds, Piece
from nanovllm.ops.native_library import BuildError, load_library

logger = logging.getLogger(__name__)

# The segment behind each cache that `empty_cache` has made, by the address of its data.
_segments: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()


class _Blocks(ctypes.Structure):
    """`Blocks` of blocks.cpp."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        ("ids", ctypes.POINTER(ctypes.c_int64)),
        ("block_bytes", ctypes.c_int64),
        ("plane_bytes", ctypes.c_int64),
    )


@cache
def _copy_function() -> Callable[..., None] | None:
    """`copy_blocks` of blocks.cpp; None where there is no compiler."""
    source = Path(__file__).with_name("blocks.cpp")
    try:
        copy = load_library(
            [source], flags=("-O3", "-std=c++17", "-fPIC"), what=source.name
        ).copy_blocks
    except BuildError as error:
        logger.warning("using TCP for KV blocks on this machine, too: %s", error)
        return None
    copy.argtypes = [_Blocks, _Blocks, *[ctypes.c_int64] * 3]
    copy.restype = None
    return copy


def _as_numpy(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor. Its own operators would start threads that compete with those that
    compute."""
    return tensor.view(torch.uint8).numpy()


# ---------------------------------------------------------------------------- ways to another cache


class LocalLink(Link):
    """Reads from a peer's memory where it can be mapped, and over the connection elsewhere."""

    transport: LocalTransport

    @cached_property
    def _caches(self) -> list[np.ndarray]:
        """The peer's caches, by layer, to be read only; empty if they cannot be mapped.

        Raises:
            ValueError: it is not what the peer's layout says.
        """
        layout = self.theirs.layout
        if not self.theirs.memory or not self.transport.share_memory:
            return []
        places = msgspec.msgpack.decode(self.theirs.memory, type=list[tuple[SegmentHandle, int]])
        if len(places) != len(layout.layers):
            raise ValueError(f"{len(places)} segments for {layout.layers}")
        try:
            return [
                _map(handle, offset, layout.num_blocks * layout.block_bytes)
                for handle, offset in places
            ]
        except OSError as error:
            logger.info("receiving KV blocks of %s by TCP: %s", self.connection.peer, error)
            return []

    def read(self, piece: Piece, local_ids: BlockIds, remote_ids: BlockIds) -> None:
        """See `Link.read`."""
        if self._caches:
            return self._copy(piece, local_ids, remote_ids)
        self.connection.send(encode(piece.fetch(remote_ids)))
        for layer in piece.layers:
            self.receive_answer()
            heads = self.transport.heads(layer, piece.local_head, piece.num_heads)
            self.transport.fill(heads, local_ids, self.connection.receive_payload)

    def _copy(self, piece: Piece, local_ids: BlockIds, remote_ids: BlockIds) -> None:
        """Copy blocks from the peer's mapped memory."""
        copy = _copy_function()
        here = self.transport.layout
        there = self.theirs.layout
        assert copy is not None, "else no memory is shared"
        local, remote = ((ctypes.c_int64 * len(ids))(*ids) for ids in (local_ids, remote_ids))
        num_runs, run_bytes = piece.runs(here, there)
        for layer in piece.layers:
            to = self.transport.addresses[layer] + piece.local_head * here.head_bytes
            source = (
                self._caches[layer - there.first_layer].ctypes.data
                + piece.remote_head * there.head_bytes
            )
            copy(
                _Blocks(to, local, here.block_bytes, here.block_bytes // 2),
                _Blocks(source, remote, there.block_bytes, there.block_bytes // 2),
                len(local_ids),
                num_runs,
                run_bytes,
            )

    def serve_fetch(self, fetch: Fetch, layers: range) -> None:
        """Send the blocks, with an answer per layer."""
        for layer in layers:
            heads = self.transport.heads(layer, fetch.head, fetch.num_heads)
            self.connection.send(encode(Answer()), self.transport.content(heads, fetch.block_ids))


def _map(handle: SegmentHandle, offset: int, num_bytes: int) -> np.ndarray:
    """Map some bytes of a peer's segment. A ValueError says that it has no such bytes."""
    allowed = rf"/proc/\d+/fd/\d+|{re.escape(tempfile.gettempdir())}/nanovllm-\w+"
    if not re.fullmatch(allowed, handle.path) or len(handle.token) != 16:
        raise ValueError(f"{handle.path!r} is not a segment of shared memory")
    descriptor = shared_memory._open(handle)
    try:
        data = mmap.mmap(descriptor, handle.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(descriptor)
    return np.frombuffer(data, np.uint8, num_bytes, offset)


# ------------------------------------------------------------------------------------ the transport


class LocalTransport(Transport):
    """Shared memory where both ranks are on one machine, TCP elsewhere.

    Attributes:
        share_memory: False: TCP everywhere, as for a cache on a GPU.
    """

    kind = "local"
    link_class = LocalLink
    share_memory = True

    @classmethod
    def empty_cache(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """Zeros, in host memory in a segment that others can map. The segment takes memory only as
        it fills, see `device.zeros`."""
        if torch.device(device).type != "cpu":
            return super().empty_cache(shape, dtype, device)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        segment = Segment.create(1, num_bytes, is_lazy=True)
        data = (ctypes.c_char * num_bytes).from_buffer(segment._map, segment.payload)
        data.segment = segment  # type: ignore[attr-defined]  # it lives as long as the tensor
        tensor = torch.frombuffer(data, dtype=dtype).view(tuple(shape))
        _segments[tensor.data_ptr()] = segment
        return tensor

    def _prepare(self, host: str) -> bytes:
        """Each layer's segment and the offset of its data there; nothing if a layer has no
        segment."""
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # The function is compiled now, not while the first request waits.
        self.share_memory = (
            self.share_memory and self._stream is None and _copy_function() is not None
        )
        segments = [_segments.get(address) for address in self.addresses.values()]
        if not self.share_memory or not all(segments):
            return b""
        return encode([(segment.handle, segment.payload) for segment in segments if segment])

    def heads(self, layer: int, head: int, num_heads: int) -> Tensor:
        """Some heads of a layer's cache."""
        cache = self.kv_caches[layer]
        return cache if self.layout.is_latent else cache[:, :, head : head + num_heads]

    def content(self, heads: Tensor, block_ids: BlockIds) -> memoryview:
        """The content of some blocks of `heads`."""
        if self._stream is None:
            return _as_numpy(heads)[block_ids].reshape(-1).data
        with torch.cuda.stream(self._stream):
            blocks = heads[torch.tensor(block_ids, device=self.device)].to("cpu", non_blocking=True)
        self._stream.synchronize()
        return _as_numpy(blocks).reshape(-1).data

    def fill(
        self, heads: Tensor, block_ids: BlockIds, receive: Callable[[memoryview], None]
    ) -> None:
        """Receive the content of some blocks of `heads`."""
        shape = len(block_ids), *heads.shape[1:]
        blocks = torch.empty(shape, dtype=heads.dtype, pin_memory=self._stream is not None)
        receive(_as_numpy(blocks).reshape(-1).data)
        if self._stream is None:
            _as_numpy(heads)[block_ids] = _as_numpy(blocks)
            return
        with torch.cuda.stream(self._stream):
            heads[torch.tensor(block_ids, device=self.device)] = blocks.to(
                self.device, non_blocking=True
            )
        self._stream.synchronize()
