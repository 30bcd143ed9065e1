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
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from nanovllm.distributed import shared_memory
from nanovllm.distributed.shared_memory import Segment, SegmentHandle
from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.transport.base import Transport
from nanovllm.kv_transfer.transport.connection import Connection
from nanovllm.kv_transfer.transport.messages import Answer, Fetch, Hello, Push, encode, receive_answer
from nanovllm.kv_transfer.transport.peer import Reach
from nanovllm.kv_transfer.transport.pieces import BlockIds, Piece
from nanovllm.ops.native_library import BuildError, load_library

logger = logging.getLogger(__name__)

# The segment behind each cache that `empty_cache` has made, by the address of its data.
_segments: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()


@cache
def _copy_function() -> Callable[..., None]:
    """`copy_blocks` of blocks.cpp, or the same in Python where there is no compiler."""
    source = Path(__file__).with_name("blocks.cpp")
    try:
        if os.environ.get("NANOVLLM_NATIVE") == "0":
            raise BuildError("NANOVLLM_NATIVE=0")
        copy = load_library([source], flags=("-O3", "-std=c++17", "-fPIC"), what=source.name).copy_blocks
    except BuildError as error:
        logger.warning("KV blocks are copied one by one: %s", error)
        return _copy_one_by_one
    place, number = ctypes.c_void_p, ctypes.c_int64
    copy.argtypes = [place, place, number, number, place, place, number, number, number, number, number]
    copy.restype = None
    return copy


def _copy_one_by_one(*arguments: Any) -> None:
    to, to_ids, to_block, to_plane, source, from_ids, from_block, from_plane, _, planes, run = arguments
    for here, there in zip(to_ids, from_ids, strict=True):
        for plane in range(planes):
            start = source + there * from_block + plane * from_plane
            ctypes.memmove(to + here * to_block + plane * to_plane, start, run)


# ------------------------------------------------------------------------------------------ a rank's own cache


class CacheRows:
    """The bytes of a rank's blocks, as host memory that can be sent and received.

    Args:
        kv_caches: by layer.
    """

    def __init__(self, layout: KVLayout, kv_caches: dict[int, Tensor]) -> None:
        self._layout, self._caches = layout, kv_caches
        self._device = next(iter(kv_caches.values())).device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if self._stream is None:
            self._bytes = {layer: _as_bytes(tensor) for layer, tensor in kv_caches.items()}

    def _views(self, layer: int, head: int, num_heads: int, block_ids: BlockIds) -> list[memoryview]:
        data, size, strip = self._bytes[layer], self._layout.block_bytes, self._layout.strip(head, num_heads)
        planes = [strip.offset + plane * strip.plane_stride for plane in range(strip.planes)]
        starts = (block * size + plane for block in block_ids for plane in planes)
        return [data[start : start + strip.run] for start in starts]

    def outgoing(
        self, layer: int, head: int, num_heads: int, block_ids: BlockIds, mark: torch.cuda.Event | None = None
    ) -> list[memoryview]:
        """The content of some heads of some blocks.

        Args:
            mark: on a GPU, an event after which they can be read.
        """
        if self._stream is None:
            return self._views(layer, head, num_heads, block_ids)
        with torch.cuda.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            blocks = self._heads(layer, head, num_heads)[self._index(block_ids)]
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
            heads[self._index(block_ids)] = host.to(self._device, non_blocking=True)
        self._stream.synchronize()

    def _heads(self, layer: int, head: int, num_heads: int) -> Tensor:
        cache = self._caches[layer]
        return cache if self._layout.is_latent else cache[:, :, head : head + num_heads]

    def _index(self, block_ids: BlockIds) -> Tensor:
        return torch.tensor(block_ids, device=self._device)


def _as_bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


# ------------------------------------------------------------------------------------------ ways to another cache


class SharedReach:
    """A peer's cache, mapped into this process.

    Args:
        caches: address of each layer's cache of this rank.
        bases: address of each layer's cache of the peer, in this process.
        maps: what must stay mapped.
    """

    def __init__(
        self, caches: dict[int, int], mine: KVLayout, theirs: KVLayout, bases: dict[int, int], maps: list[mmap.mmap]
    ) -> None:
        self._caches, self._mine, self._theirs, self._bases, self._maps = caches, mine, theirs, bases, maps

    def read(self, piece: Piece, local_ids: BlockIds, remote_ids: BlockIds) -> None:
        self._copy(piece, piece.layers, local_ids, remote_ids, inward=True)

    def write(
        self, piece: Piece, layers: range, local_ids: BlockIds, remote_ids: BlockIds, mark: Any
    ) -> Sequence[memoryview]:
        self._copy(piece, layers, local_ids, remote_ids, inward=False)
        return ()

    def _copy(self, piece: Piece, layers: range, local_ids: BlockIds, remote_ids: BlockIds, inward: bool) -> None:
        copy, count = _copy_function(), len(local_ids)
        mine, theirs = piece.strips(self._mine, self._theirs)
        local, remote = ((ctypes.c_int64 * count)(*ids) for ids in (local_ids, remote_ids))
        for layer in layers:
            here = (self._caches[layer] + mine.offset, local, self._mine.block_bytes, mine.plane_stride)
            there = (self._bases[layer] + theirs.offset, remote, self._theirs.block_bytes, theirs.plane_stride)
            copy(*(here + there if inward else there + here), count, mine.planes, mine.run)

    def close(self) -> None:
        self._bases, self._maps = {}, []


class StreamReach:
    """A peer's cache at the other end of a connection.

    Args:
        timeout: seconds to wait for an answer.
    """

    def __init__(self, connection: Connection, rows: CacheRows, timeout: float) -> None:
        self._connection, self._rows, self._timeout = connection, rows, timeout

    def read(self, piece: Piece, local_ids: BlockIds, remote_ids: BlockIds) -> None:
        self._connection.send(encode(Fetch(*piece.remote_part, list(remote_ids))))
        for layer in piece.layers:
            receive_answer(self._connection, self._timeout)
            with self._rows.incoming(layer, piece.local_head, piece.num_heads, local_ids) as buffers:
                self._connection.receive_payload(buffers)

    def write(
        self, piece: Piece, layers: range, local_ids: BlockIds, remote_ids: BlockIds, mark: Any
    ) -> Sequence[memoryview]:
        heads = (piece.local_head, piece.num_heads)
        return [view for layer in layers for view in self._rows.outgoing(layer, *heads, local_ids, mark)]

    def close(self) -> None:
        pass


# ------------------------------------------------------------------------------------------ the transport


class LocalTransport(Transport):
    """Shared memory where both ranks are on one machine, TCP elsewhere.

    Attributes:
        share_memory: False: TCP everywhere, as for a cache on a GPU.
    """

    kind = "local"
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
        self._rows = CacheRows(self.layout, self.kv_caches)
        self.share_memory = self.share_memory and self.device.type != "cuda"
        _copy_function()  # compiled now, not while the first request waits

    def describe_memory(self) -> bytes:
        """Each layer's segment and the offset of its data there; empty if a layer has no segment."""
        segments = [_segments.get(self.addresses[layer]) for layer in self.layout.layers]
        if not self.share_memory or not all(segments):
            return b""
        return encode([(segment.handle, segment.payload) for segment in segments if segment])

    def reach(self, connection: Connection, theirs: Hello) -> Reach:
        """The peer's memory, if it is on this machine and can be mapped; else the connection."""
        if theirs.memory and self.share_memory:
            places = msgspec.msgpack.decode(theirs.memory, type=list[tuple[SegmentHandle, int]])
            try:
                return SharedReach(self.addresses, self.layout, theirs.layout, *_map_all(places, theirs.layout))
            except OSError as error:
                logger.info("KV blocks of %s come by TCP: %s", connection.peer, error)
        return StreamReach(connection, self._rows, self.timeout)

    def serve_fetch(self, connection: Connection, fetch: Fetch) -> None:
        """Send blocks straight out of the cache."""
        for layer in fetch.layers:
            data = self._rows.outgoing(layer, fetch.head, fetch.num_heads, fetch.block_ids)
            connection.send(encode(Answer()), data)

    def receive_blocks(self, connection: Connection, push: Push) -> None:
        """Receive blocks straight into the cache."""
        with ExitStack() as stack:
            rows = [self._rows.incoming(layer, push.head, push.num_heads, push.block_ids) for layer in push.layers]
            connection.receive_payload([view for row in rows for view in stack.enter_context(row)])


def _map_all(places: list[tuple[SegmentHandle, int]], layout: KVLayout) -> tuple[dict[int, int], list[mmap.mmap]]:
    """Map the segments of a peer's layers; returns the address at which each layer's data begin, and the maps.

    Raises:
        OSError: a segment is not there: the peer is on another machine, or gone.
        ValueError: a segment is not what the layout says.
    """
    maps, bases = [], {}
    allowed = re.compile(rf"/proc/\d+/fd/\d+|{re.escape(tempfile.gettempdir())}/nanovllm-\w+")
    for layer, (handle, offset) in zip(layout.layers, places, strict=True):
        if not allowed.fullmatch(handle.path):
            raise ValueError(f"{handle.path!r} is not a segment of shared memory")
        descriptor = shared_memory._open(handle)
        try:
            size = min(os.fstat(descriptor).st_size, handle.num_bytes)
            if not 0 <= offset <= size - layout.num_blocks * layout.block_bytes or len(handle.token) != 16:
                raise ValueError(f"the segment of layer {layer} has {size} bytes: too few for the cache")
            maps.append(mmap.mmap(descriptor, handle.num_bytes, mmap.MAP_SHARED))
        finally:
            os.close(descriptor)
        bases[layer] = ctypes.addressof(ctypes.c_char.from_buffer(maps[-1], offset))
    return bases, maps
