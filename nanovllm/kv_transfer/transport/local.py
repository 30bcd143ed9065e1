"""Moves KV blocks by shared memory between processes of one machine, and by TCP between machines.

On one machine a rank maps the other's cache and copies blocks from one into the other: every byte is touched once, and the
other process does nothing. Elsewhere the owner sends blocks straight out of its cache, and the other rank receives them straight
into its own, with a checksum. Caches on a GPU go through pinned host memory, on their own stream, and always by TCP.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from nanovllm.distributed import shared_memory
from nanovllm.distributed.shared_memory import Segment, SegmentHandle
from nanovllm.kv_transfer.transport.base import Link, Transport
from nanovllm.kv_transfer.transport.messages import Answer, Fetch, encode
from nanovllm.kv_transfer.transport.pieces import BlockIds, Piece
from nanovllm.ops.native_library import BuildError, load_library

logger = logging.getLogger(__name__)

# The segment behind each cache that `empty_cache` has made, by the address of its data.
_segments: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()


@cache
def _copy_function() -> Callable[..., None] | None:
    """`copy_blocks` of blocks.cpp; None where there is no compiler."""
    source = Path(__file__).with_name("blocks.cpp")
    try:
        copy = load_library([source], flags=("-O3", "-std=c++17", "-fPIC"), what=source.name).copy_blocks
    except BuildError as error:
        logger.warning("KV blocks move by TCP on this machine, too: %s", error)
        return None
    place, number = ctypes.c_void_p, ctypes.c_int64
    copy.argtypes = [place, place, number, number, place, place, number, number, number, number, number]
    copy.restype = None
    return copy


def _as_bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


# ------------------------------------------------------------------------------------------ ways to another cache


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
            return [_map(handle, offset, layout.num_blocks * layout.block_bytes) for handle, offset in places]
        except OSError as error:
            logger.info("KV blocks of %s come by TCP: %s", self.connection.peer, error)
            return []

    def read(self, piece: Piece, local_ids: BlockIds, remote_ids: BlockIds) -> None:
        """See `Link.read`."""
        if self._caches:
            return self._copy(piece, local_ids, remote_ids)
        self.connection.send(encode(Fetch(*piece.remote_part, list(remote_ids))))
        for layer in piece.layers:
            self.receive_answer()
            with self.transport.incoming(layer, piece.local_head, piece.num_heads, local_ids) as buffers:
                self.connection.receive_payload(buffers)

    def _copy(self, piece: Piece, local_ids: BlockIds, remote_ids: BlockIds) -> None:
        copy, count, here, there = _copy_function(), len(local_ids), self.transport.layout, self.theirs.layout
        assert copy is not None, "else no memory is shared"
        mine, theirs = piece.strips(here, there)
        local, remote = ((ctypes.c_int64 * count)(*ids) for ids in (local_ids, remote_ids))
        for layer in piece.layers:
            to = self.transport.addresses[layer] + mine.offset
            source = self._caches[layer - there.first_layer].ctypes.data + theirs.offset
            far = (source, remote, there.block_bytes, theirs.plane_stride)
            copy(to, local, here.block_bytes, mine.plane_stride, *far, count, mine.planes, mine.run)

    def serve_fetch(self, fetch: Fetch) -> None:
        """Send blocks straight out of the cache, with an answer per layer."""
        for layer in fetch.layers:
            data = self.transport.outgoing(layer, fetch.head, fetch.num_heads, fetch.block_ids)
            self.connection.send(encode(Answer()), data)

    def close(self) -> None:
        """Unmap the peer's memory."""
        self.__dict__.pop("_caches", None)


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


# ------------------------------------------------------------------------------------------ the transport


class LocalTransport(Transport):
    """Shared memory where both ranks are on one machine, TCP elsewhere.

    Attributes:
        share_memory: False: TCP everywhere, as for a cache on a GPU.
    """

    kind, link_class = "local", LocalLink
    share_memory = True

    @classmethod
    def empty_cache(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Zeros, in host memory in a segment that others can map. The segment takes memory only as it fills, see `device.zeros`."""
        if torch.device(device).type != "cpu":
            return super().empty_cache(shape, dtype, device)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        segment = Segment.create(1, num_bytes, is_lazy=True)
        data = (ctypes.c_char * num_bytes).from_buffer(segment._map, segment.payload)
        data.segment = segment  # type: ignore[attr-defined]  # it lives as long as the tensor
        tensor = torch.frombuffer(data, dtype=dtype).view(tuple(shape))
        _segments[tensor.data_ptr()] = segment
        return tensor

    def _prepare(self, host: str) -> None:
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self._stream is None:
            self._bytes = {layer: _as_bytes(cache) for layer, cache in self.kv_caches.items()}
        # The function is compiled now, not while the first request waits.
        self.share_memory = self.share_memory and self._stream is None and _copy_function() is not None

    def describe_memory(self) -> bytes:
        """Each layer's segment and the offset of its data there; empty if a layer has no segment."""
        segments = [_segments.get(self.addresses[layer]) for layer in self.layout.layers]
        if not self.share_memory or not all(segments):
            return b""
        return encode([(segment.handle, segment.payload) for segment in segments if segment])

    def _views(self, layer: int, head: int, num_heads: int, block_ids: BlockIds) -> list[memoryview]:
        data, size, strip = self._bytes[layer], self.layout.block_bytes, self.layout.strip(head, num_heads)
        planes = [strip.offset + plane * strip.plane_stride for plane in range(strip.planes)]
        starts = (block * size + plane for block in block_ids for plane in planes)
        return [data[start : start + strip.run] for start in starts]

    def outgoing(self, layer: int, head: int, num_heads: int, block_ids: BlockIds) -> list[memoryview]:
        """The content of some heads of some blocks."""
        if self._stream is None:
            return self._views(layer, head, num_heads, block_ids)
        with torch.cuda.stream(self._stream):
            blocks = self._heads(layer, head, num_heads)[torch.tensor(block_ids, device=self.device)]
            host = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=True)
            host.copy_(blocks, non_blocking=True)
        self._stream.synchronize()
        return [_as_bytes(host)]

    @contextmanager
    def incoming(self, layer: int, head: int, num_heads: int, block_ids: BlockIds) -> Iterator[list[memoryview]]:
        """Memory to be filled inside a `with` with the content of some heads of some blocks."""
        if self._stream is None:
            yield self._views(layer, head, num_heads, block_ids)
            return
        heads = self._heads(layer, head, num_heads)
        host = torch.empty(len(block_ids), *heads.shape[1:], dtype=heads.dtype, pin_memory=True)
        yield [_as_bytes(host)]
        with torch.cuda.stream(self._stream):
            heads[torch.tensor(block_ids, device=self.device)] = host.to(self.device, non_blocking=True)
        self._stream.synchronize()

    def _heads(self, layer: int, head: int, num_heads: int) -> Tensor:
        cache = self.kv_caches[layer]
        return cache if self.layout.is_latent else cache[:, :, head : head + num_heads]
