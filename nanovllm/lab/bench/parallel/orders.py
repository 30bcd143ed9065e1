"""The time that it takes to send a step's plan to all ranks: by the message queue, and by a pipe
per rank."""

import itertools
import pathlib
import pickle
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Client, Listener
from typing import Any

from nanovllm.distributed.groups import Grid, get_world_group
from nanovllm.distributed.shared_memory import MessageQueue
from nanovllm.lab.bench.local import TINY, add_requests, start_engine, write_config
from nanovllm.lab.bench.metrics import alternate, slowest
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, goal
from nanovllm.lab.bench.workloads import BenchRequest
from nanovllm.lab.processes import run_ranks

QUEUE = "shared-memory queue"
PIPES = "one pipe per rank"
# As in an engine, orders do not follow each other at once: the receivers have gone to sleep.
PAUSE_SECONDS = 0.002
_STAMP = struct.Struct("d")


def order_bytes(num_requests: int, folder: str) -> int:
    """The length of the order to decode a token of each request."""
    core = start_engine(
        folder, load_format="dummy", device="cpu", kv_cache_memory="8MiB", max_num_seqs=64
    )
    add_requests(core, [BenchRequest([1] * 8, 8) for _ in range(num_requests)])
    core.step()
    return len(pickle.dumps(("launch", (core.scheduler.schedule(),)), pickle.HIGHEST_PROTOCOL))


def send_orders(num_bytes: int, count: int, repeats: int) -> dict[str, list[float]]:
    """On each rank: rank 0 sends, all others listen. Seconds from before an order is sent until
    this rank has it; on rank 0, until the call returns. (`time.perf_counter` is one clock for all
    processes of a machine.)"""
    world = get_world_group()
    if world.is_first:
        queue = MessageQueue.create(world.world_size - 1)
        with Listener() as listener:
            world.broadcast_object((queue.handle, listener.address))
            pipes = [listener.accept() for _ in range(world.world_size - 1)]

        def send_all(message: bytes) -> None:
            for pipe in pipes:
                pipe.send_bytes(message)

        channels: dict[str, Any] = {QUEUE: queue.put, PIPES: send_all}
    else:
        handle, address = world.broadcast_object(None)
        queue = MessageQueue.attach(handle, world.rank - 1)
        pipe = Client(address)
        channels = {QUEUE: queue.get, PIPES: pipe.recv_bytes}

    def run(channel: Callable[..., bytes]) -> list[float]:
        times = []
        for _ in range(count):
            if world.is_first:
                time.sleep(PAUSE_SECONDS)
                start = time.perf_counter()
                channel(_STAMP.pack(start) + bytes(max(0, num_bytes - _STAMP.size)))
            else:
                (start,) = _STAMP.unpack_from(channel())
            times.append(time.perf_counter() - start)
        return times

    found = alternate(
        {way: partial(run, channel) for way, channel in channels.items()}, repeats, warm_up=0
    )
    world.barrier()
    return {way: list(itertools.chain(*rounds)) for way, rounds in found.items()}


def orders(setting: Setting) -> Iterator[Row]:
    """From the scheduler's process to that of every rank."""
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = run_ranks(
            order_bytes, Grid(), 16, str(write_config(pathlib.Path(folder), TINY))
        )[0]
    for readers in (1, 2) if setting.dry_run else (1, 2, 4):
        count = 5 if setting.dry_run else 100
        sent, *read = run_ranks(
            send_orders, Grid(tensor=1 + readers), num_bytes, count, setting.repeats
        )
        for way in (QUEUE, PIPES):
            latencies = slowest([times[way] for times in read])
            figure = (
                f"command to {readers} rank{'s' * (readers > 1)}, {way}: until every rank has it"
            )
            yield goal(figure, 1e6 * statistics.median(latencies), "µs")
            yield {
                "table": (
                    f"Commands of {num_bytes} bytes (16 decoding requests), one every "
                    f"{1e3 * PAUSE_SECONDS:g} ms, medians"
                ),
                "way": way,
                "ranks": readers,
                "until every rank has it, µs": [1e6 * seconds for seconds in latencies],
                "until the sender continues, µs": [1e6 * seconds for seconds in sent[way]],
            }
