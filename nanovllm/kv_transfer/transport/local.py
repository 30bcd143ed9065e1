"""The transport that needs nothing: shared memory between processes of one machine, TCP between machines.

On one machine a rank maps the other's cache and copies blocks from one into the other: every byte is touched once, and the
other process does nothing. Elsewhere the owner sends them straight out of its cache, and they are received straight into the
other one, with a checksum. Caches on a GPU go through pinned host memory, on a stream of their own, and always by TCP.
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
from nanovllm.kv.layout import KVLayout, Strip
from nanovllm.kv_transfer.transport.base import Transport
from nanovllm.kv_transfer.transport.connection import Connection
from nanovllm.kv_transfer.transport.messages import Answer, Fetch, Hello, Push, encode
from nanovllm.kv_transfer.transport.peer import Reach, receive_answer
from nanovllm.kv_transfer.transport.pieces import Piece
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


def _copy_one_by_one(
    to: int,
    to_ids: Sequence[int],
    to_block: int,
    to_plane: int,
    source: int,
    from_ids: Sequence[int],
    from_block: int,
    from_plane: int,
    count: int,
    planes: int,
    run: int,
) -> None:
    for here, there in zip(to_ids, from_ids, strict=True):
        for plane in range(planes):
            ctypes.memmove(
                to + here * to_block + plane * to_plane, source + there * from_block + plane * from_plane, run
            )


# ------------------------------------------------------------------------------------------ a rank's own cache


class CacheRows:
    """The bytes of a rank's blocks, as host memory that can be sent and received.

    Args:
        kv_caches: by layer.
    """

    def __init__(self, layout: KVLayout, kv_caches: dict[int, Tensor]) -> None:
        self.layout, self._caches = layout, kv_caches
        self.device = next(iter(kv_caches.values())).device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if self._stream is None:
            self._bytes = {layer: _as_bytes(tensor) for layer, tensor in kv_caches.items()}

    def _views(self, layer: int, strip: Strip, block_ids: Sequence[int]) -> list[memoryview]:
        data, size = self._bytes[layer], self.layout.block_bytes
        starts = (
            block * size + strip.offset + plane * strip.plane_stride
            for block in block_ids
            for plane in range(strip.planes)
        )
        return [data[start : start + strip.run] for start in starts]

    def outgoing(
        self, layer: int, head: int, num_heads: int, block_ids: Sequence[int], mark: Any = None
    ) -> list[memoryview]:
        """What these heads of these blocks contain.

        Args:
            mark: an event after which they can be read, on a GPU.
        """
        strip = self.layout.strip(head, num_heads)
        if self._stream is None:
            return self._views(layer, strip, block_ids)
        with torch.cuda.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            blocks = self._select(self._caches[layer][self._index(block_ids)], head, num_heads)
            host = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=True)
            host.copy_(blocks, non_blocking=True)
        self._stream.synchronize()
        return [_as_bytes(host)]

    @contextmanager
    def incoming(self, layer: int, head: int, num_heads: int, block_ids: Sequence[int]) -> Iterator[list[memoryview]]:
        """Where to put what these heads of these blocks shall contain, inside a `with`."""
        strip = self.layout.strip(head, num_heads)
        if self._stream is None:
            yield self._views(layer, strip, block_ids)
            return
        cache = self._caches[layer]
        shape = self._select(cache[:1], head, num_heads).shape[1:]
        host = torch.empty(len(block_ids), *shape, dtype=cache.dtype, pin_memory=True)
        yield [_as_bytes(host)]
        with torch.cuda.stream(self._stream):
            index = self._index(block_ids)
            self._select(cache, head, num_heads)[index] = host.to(self.device, non_blocking=True)
        self._stream.synchronize()

    def _select(self, blocks: Tensor, head: int, num_heads: int) -> Tensor:
        return blocks if self.layout.is_latent else blocks[:, :, head : head + num_heads]

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids, device=self.device)


def _as_bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


# ------------------------------------------------------------------------------------------ ways to another cache


class SharedReach:
    """A peer's cache, mapped into this process.

    Args:
        theirs: the peer's layout.
        bases: where its layers begin, here.
        maps: what has to stay mapped.
    """

    def __init__(
        self, rows: dict[int, int], mine: KVLayout, theirs: KVLayout, bases: dict[int, int], maps: list[mmap.mmap]
    ) -> None:
        self._rows, self._mine, self._theirs, self._bases, self._maps = rows, mine, theirs, bases, maps

    def read(self, piece: Piece, local_ids: Sequence[int], remote_ids: Sequence[int]) -> None:
        for layer in piece.layers:
            self._copy(piece, layer, local_ids, remote_ids, inward=True)

    def write(
        self, piece: Piece, layers: range, local_ids: Sequence[int], remote_ids: Sequence[int], mark: Any
    ) -> Sequence[memoryview]:
        for layer in layers:
            self._copy(piece, layer, local_ids, remote_ids, inward=False)
        return ()

    def _copy(
        self, piece: Piece, layer: int, local_ids: Sequence[int], remote_ids: Sequence[int], inward: bool
    ) -> None:
        mine = self._mine.strip(piece.local_head, piece.num_heads)
        theirs = self._theirs.strip(piece.remote_head, piece.num_heads)
        # One side may have nothing between keys and values, and the other something: then both go plane by plane.
        count, planes = len(local_ids), max(mine.planes, theirs.planes)
        run = min(mine.run, theirs.run)
        here = (
            self._rows[layer] + mine.offset,
            (ctypes.c_int64 * count)(*local_ids),
            self._mine.block_bytes,
            mine.plane_stride or run,
        )
        there = (
            self._bases[layer] + theirs.offset,
            (ctypes.c_int64 * count)(*remote_ids),
            self._theirs.block_bytes,
            theirs.plane_stride or run,
        )
        to, source = (here, there) if inward else (there, here)
        _copy_function()(*to, *source, count, planes, run)

    def close(self) -> None:
        self._bases, self._maps = {}, []


class StreamReach:
    """A peer's cache at the other end of a connection.

    Args:
        timeout: seconds to wait for an answer.
    """

    def __init__(self, connection: Connection, rows: CacheRows, timeout: float) -> None:
        self._connection, self._rows, self._timeout = connection, rows, timeout

    def read(self, piece: Piece, local_ids: Sequence[int], remote_ids: Sequence[int]) -> None:
        layers = piece.layers
        fetch = Fetch(layers.start, layers.stop, piece.remote_head, piece.num_heads, list(remote_ids))
        self._connection.send(encode(fetch))
        for layer in layers:
            receive_answer(self._connection, self._timeout)
            with self._rows.incoming(layer, piece.local_head, piece.num_heads, local_ids) as buffers:
                self._connection.receive_payload(buffers)

    def write(
        self, piece: Piece, layers: range, local_ids: Sequence[int], remote_ids: Sequence[int], mark: Any
    ) -> Sequence[memoryview]:
        heads = (piece.local_head, piece.num_heads)
        return [view for layer in layers for view in self._rows.outgoing(layer, *heads, local_ids, mark)]

    def close(self) -> None:
        pass


# ------------------------------------------------------------------------------------------ the transport


class _Place(msgspec.Struct):
    """Where the cache of a layer is: a segment, and the offset of its data there."""

    path: str
    num_bytes: int
    token: bytes
    offset: int


class LocalTransport(Transport):
    """Shared memory where both ranks live on one machine, TCP elsewhere.

    Args:
        share_memory: False: TCP everywhere.
    """

    kind = "local"

    def __init__(
        self,
        layout: KVLayout,
        kv_caches: dict[int, Tensor],
        host: str,
        secret: bytes,
        port: int = 0,
        timeout: float = 30.0,
        share_memory: bool = True,
    ) -> None:
        self._share_memory = share_memory
        Transport.__init__(self, layout, kv_caches, host, secret, port, timeout)

    @classmethod
    def empty_cache(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Zeros; in host memory, they are in a segment that others can map. It takes memory only as it fills, see `device.zeros`."""
        if torch.device(device).type != "cpu":
            return Transport.empty_cache(shape, dtype, device)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        segment = Segment.create(1, num_bytes, is_lazy=True)
        data = (ctypes.c_char * num_bytes).from_buffer(segment._map, segment.payload)
        data.segment = segment  # type: ignore[attr-defined]  # which lives as long as the tensor
        tensor = torch.frombuffer(data, dtype=dtype).view(tuple(shape))
        _segments[tensor.data_ptr()] = segment
        return tensor

    def _prepare(self, host: str) -> None:
        self._rows = CacheRows(self.layout, self.kv_caches)
        self._addresses = {layer: tensor.data_ptr() for layer, tensor in self.kv_caches.items()}
        if self._rows.device.type == "cuda":
            self._share_memory = False
        _copy_function()  # compiled now, not while the first request waits

    def describe_memory(self) -> bytes:
        """The segments of all layers; nothing, if a layer has none."""
        segments = [_segments.get(self._addresses[layer]) for layer in self.layout.layers]
        if not self._share_memory or not all(segments):
            return b""
        handles = [(segment.handle, segment.payload) for segment in segments if segment]
        return encode([_Place(handle.path, handle.num_bytes, handle.token, offset) for handle, offset in handles])

    def reach(self, connection: Connection, theirs: Hello) -> Reach:
        """Its memory, if it is on this machine and can be mapped; else the connection."""
        if theirs.memory and self._share_memory:
            places = msgspec.msgpack.decode(theirs.memory, type=list[_Place])
            try:
                maps, bases = _map_all(places, theirs.layout)
                return SharedReach(self._addresses, self.layout, theirs.layout, bases, maps)
            except OSError as error:
                logger.info("KV blocks of %s come by TCP: %s", connection.peer, error)
        return StreamReach(connection, self._rows, self.timeout)

    def mark(self) -> Any:
        """An event on the stream that computes; on a CPU everything is computed when it has been called."""
        if self._rows.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._rows.device))
        return event

    def serve_fetch(self, connection: Connection, fetch: Fetch) -> None:
        """Send blocks straight out of the cache."""
        for layer in range(fetch.first_layer, fetch.end_layer):
            data = self._rows.outgoing(layer, fetch.head, fetch.num_heads, fetch.block_ids)
            connection.send_with_payload(encode(Answer()), data)

    def receive_blocks(self, connection: Connection, push: Push) -> None:
        """Receive blocks straight into the cache."""
        with ExitStack() as stack:
            rows = [self._rows.incoming(layer, push.head, push.num_heads, push.block_ids) for layer in push.layers]
            connection.receive_payload([view for row in rows for view in stack.enter_context(row)])


def _map_all(places: list[_Place], layout: KVLayout) -> tuple[list[mmap.mmap], dict[int, int]]:
    """Map the segments of a peer's layers; returns the maps, and the address at which each layer's data begin.

    Raises:
        OSError: one of them is not there: the peer lives on another machine, or is gone.
        ValueError: a segment is not what the layout says.
    """
    if len(places) != len(layout.layers):
        raise ValueError(f"{len(places)} segments for {len(layout.layers)} layers")
    maps, bases = [], {}
    allowed = re.compile(rf"/proc/\d+/fd/\d+|{re.escape(tempfile.gettempdir())}/nanovllm-\w+")
    for layer, place in zip(layout.layers, places, strict=True):
        if not allowed.fullmatch(place.path):
            raise ValueError(f"{place.path!r} is no segment of shared memory")
        descriptor = shared_memory._open(SegmentHandle(place.path, 1, place.num_bytes, place.token))
        try:
            needed = layout.num_blocks * layout.block_bytes
            size = min(os.fstat(descriptor).st_size, place.num_bytes)
            if place.offset < 0 or place.offset + needed > size or len(place.token) != 16:
                raise ValueError(f"the segment of layer {layer} has {size} bytes: too few for the cache")
            maps.append(mmap.mmap(descriptor, place.num_bytes, mmap.MAP_SHARED))
        finally:
            os.close(descriptor)
        bases[layer] = ctypes.addressof(ctypes.c_char.from_buffer(maps[-1], place.offset))
    return maps, bases
