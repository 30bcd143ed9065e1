"""The speed of KV transfers from one rank's cache into another's, beside a plain copy of the same
bytes."""

import ctypes
import importlib.util
import itertools
import mmap
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from nanovllm.data.config import EngineConfig
from nanovllm.distributed.groups import Grid, get_world_group
from nanovllm.kv_transfer.layout import KVLayout
from nanovllm.kv_transfer.transport.base import Transport
from nanovllm.kv_transfer.transport.local import LocalTransport
from nanovllm.lab.bench.metrics import alternate, timed
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, goal, number, paired
from nanovllm.lab.processes import run_ranks
from nanovllm.ops.device import choose_dtype

COPY = "plain copy"
READ = "local, read"
WRITE = "local, write"
TCP = "TCP, read"
NIXL = "nixl, read"
GOAL = 0.6
NUM_BYTES = 64 << 20
_SECRET = b"both ranks are children of this benchmark"

Seconds = dict[str, list[float]]


def cache_layout(setting: Setting) -> KVLayout:
    """The cache that is measured: of a rank that has the whole model, with room for twice the bytes
    that are moved."""
    model = setting.model
    dtype = choose_dtype(setting.dtype, torch.device("cpu"))
    is_latent = bool(model.kv_lora_rank)
    block_size = EngineConfig.block_size
    num_bytes = 64 << 10 if setting.dry_run else NUM_BYTES
    return KVLayout(
        num_layers=model.num_layers,
        num_kv_heads=0 if is_latent else model.num_kv_heads,
        block_size=block_size,
        width=model.latent_width if is_latent else model.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        num_blocks=2
        * max(1, num_bytes // (block_size * model.kv_elements_per_token * dtype.itemsize)),
        first_layer=0,
        end_layer=model.num_layers,
    )


class TcpTransport(LocalTransport):
    """TCP on one machine, too."""

    share_memory = False


def transports() -> dict[str, type[Transport]]:
    """Those that this machine has, by the way that is measured with them."""
    found: dict[str, type[Transport]] = {
        READ: LocalTransport,
        WRITE: LocalTransport,
        TCP: TcpTransport,
    }
    if importlib.util.find_spec("nixl_cu12") is not None:
        from nanovllm.kv_transfer.transport.nixl import NixlTransport

        found[NIXL] = NixlTransport
    return found


def time_transfers(layout: KVLayout, rounds: int) -> Seconds:
    """On each of two ranks: transfers half of the blocks of one rank into other places of the
    other's cache. Returns, on the second rank, seconds from the call until the transport reports
    the end. The ways take turns, also with a plain copy."""
    world = get_world_group()
    ids = list(range(layout.num_blocks))
    random.Random(0).shuffle(ids)
    here = ids[: len(ids) // 2]
    there = ids[len(ids) // 2 :]
    ways = {name: _Way(kind, layout) for name, kind in transports().items()}
    copy = _plain_copy(layout, len(here))
    names = map(str, itertools.count())

    def run(name: str) -> float:
        if name == COPY:
            took = timed(copy) if world.is_last else 0.0
        else:
            took = (ways[name].write if name == WRITE else ways[name].read)(
                next(names), here, there
            )
        world.barrier()
        return took

    try:
        # The round to warm up matters: memory is slow when it is touched for the first time.
        return alternate({name: partial(run, name) for name in (COPY, *ways)}, rounds)
    finally:
        for way in ways.values():
            way.transport.close()


class _Way:
    """A transport, with a cache of its own, on each of two ranks."""

    def __init__(self, kind: type[Transport], layout: KVLayout) -> None:
        self.world = get_world_group()
        dtype = getattr(torch, layout.dtype)
        self.caches = {
            layer: kind.empty_cache(layout.cache_shape, dtype, "cpu") for layer in layout.layers
        }
        for cache in self.caches.values():
            cache.fill_(self.world.rank + 1)
        self.transport = kind(layout, self.caches, "127.0.0.1", _SECRET)
        first, second = self.world.all_gather_object(self.transport.address)
        self.peers = [second if self.world.is_first else first]

    def read(self, name: str, here: list[int], there: list[int]) -> float:
        """The second rank fills its blocks `here` with the first one's `there`."""
        if self.world.is_first:
            return 0.0
        took = timed(lambda: self.transport.read(name, self.peers, here, there), self._end)
        assert all((cache[here[0]] == 1).all() for cache in self.caches.values()), (
            "the other rank's numbers"
        )
        for cache in self.caches.values():
            cache[here[0]] = 2
        return took

    def write(self, name: str, here: list[int], there: list[int]) -> float:
        """The second rank fills the first one's blocks `there` with its own `here`."""
        if self.world.is_first:
            self.transport.expect(name, self.peers, there)
            self.world.barrier()
            self._end()
            return 0.0
        self.world.barrier()
        return timed(lambda: self._push(name, here, there), self._end)

    def _push(self, name: str, here: list[int], there: list[int]) -> None:
        for layer in self.caches:
            self.transport.push(name, self.peers, layer, here, there, is_last=True)

    def _end(self) -> None:
        ended: list[Any] = []
        while not ended:
            ended = self.transport.poll(1.0)
        if ended[0].error:
            raise RuntimeError(f"a transfer failed: {ended[0].error}")


def _plain_copy(layout: KVLayout, num_blocks: int) -> Callable[[], None]:
    """An upper bound of the speed: copies as many bytes of each layer in one piece between two
    mappings of shared memory."""
    size = num_blocks * layout.block_bytes
    pairs = [
        [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for _ in range(2)]
        for _ in layout.layers
    ]

    def copy() -> None:
        for target, source in pairs:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), size)

    return copy


def measure(setting: Setting, rounds: int) -> tuple[int, Seconds]:
    """The bytes that are moved, and the seconds of each way; see `time_transfers`."""
    layout = cache_layout(setting)
    seconds = run_ranks(time_transfers, Grid(data=2), layout, rounds)[1]
    return layout.num_blocks // 2 * layout.block_bytes * layout.num_layers, seconds


def transport(setting: Setting) -> Iterator[Row]:
    """The same blocks by every way that this machine has."""
    yield from compare(*measure(setting, 2 if setting.dry_run else 7 * setting.repeats))


def compare(num_bytes: int, seconds: Seconds) -> Iterator[Row]:
    """Compare each way with a plain copy, round by round; see `time_transfers`."""
    title = (
        f"{number(num_bytes / 2**20)} MiB of KV blocks at random addresses, from one process to "
        f"another, medians of {len(seconds[COPY])}"
    )
    for way, times in seconds.items():
        speed = paired(times, seconds[COPY])  # the speeds' ratio is the inverse of the times'
        if way != COPY:
            wanted = GOAL if way in (READ, WRITE) else None
            yield goal(
                f"{way}: bandwidth relative to a plain shared-memory copy",
                speed["median"],
                "×",
                at_least=wanted,
            )
        yield {
            "table": title,
            "way": way,
            "GB/s": [num_bytes / took / 1e9 for took in times],
            "ms": [1e3 * took for took in times],
            "relative to a plain copy": speed,
        }
