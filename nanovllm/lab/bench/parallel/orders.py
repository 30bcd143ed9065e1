"""What it takes to tell all ranks of a plan: the message queue against a pipe a rank."""

from __future__ import annotations

import pathlib
import pickle
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Client, Connection, Listener

from nanovllm.distributed.groups import Grid, get_world_group
from nanovllm.distributed.shared_memory import MessageQueue
from nanovllm.lab.bench.gpu.engine import add_requests, start_engine
from nanovllm.lab.bench.gpu.shapes import TINY, write_config
from nanovllm.lab.bench.parallel.findings import Finding, Found, in_turn, microseconds, slowest
from nanovllm.lab.bench.parallel.setting import Setting
from nanovllm.lab.bench.ranks import run_alone, run_ranks
from nanovllm.lab.bench.report import Table
from nanovllm.lab.bench.workloads import BenchRequest

QUEUE, PIPES = "shared-memory queue", "a pipe a rank"
# An engine's orders do not come at once: whoever waits for them has gone to sleep.
PAUSE_SECONDS = 0.002
_STAMP = struct.Struct("d")


def order_bytes(num_requests: int, folder: str) -> int:
    """How long the order to decode a token of each request is."""
    core = start_engine(folder, load_format="dummy", device="cpu", kv_cache_memory="8MiB", max_num_seqs=64)
    add_requests(core, [BenchRequest([1] * 8, 8) for _ in range(num_requests)])
    core.step()
    return len(pickle.dumps(("launch", (core.scheduler.schedule(),)), pickle.HIGHEST_PROTOCOL))


def send_orders(num_bytes: int, count: int, repeats: int) -> dict[str, list[float]]:
    """On each rank: rank 0 sends, all others listen. Seconds from before an order is sent until this rank has it; on rank 0,
    until it can go on. (`time.perf_counter` is one clock for all processes of a machine.)"""
    world = get_world_group()
    times: dict[str, list[float]] = {QUEUE: [], PIPES: []}
    if world.is_first:
        queue = MessageQueue.create(world.world_size - 1)
        with Listener() as listener:
            world.broadcast_object((queue.handle, listener.address))
            pipes = [listener.accept() for _ in range(world.world_size - 1)]
        senders: dict[str, Callable[[bytes], None]] = {QUEUE: queue.put, PIPES: partial(_send_all, pipes)}
        for turn in range(repeats):
            for way in in_turn(list(senders), turn):
                for _ in range(count):
                    time.sleep(PAUSE_SECONDS)
                    start = time.perf_counter()
                    senders[way](_STAMP.pack(start) + bytes(max(0, num_bytes - _STAMP.size)))
                    times[way].append(time.perf_counter() - start)
        world.barrier()
        return times
    handle, address = world.broadcast_object(None)
    queue, pipe = MessageQueue.attach(handle, world.rank - 1), Client(address)
    receivers: dict[str, Callable[[], bytes]] = {QUEUE: queue.get, PIPES: pipe.recv_bytes}
    for turn in range(repeats):
        for way in in_turn(list(receivers), turn):
            for _ in range(count):
                message = receivers[way]()
                times[way].append(time.perf_counter() - _STAMP.unpack_from(message)[0])
    world.barrier()
    return times


def _send_all(pipes: list[Connection], message: bytes) -> None:
    for pipe in pipes:
        pipe.send_bytes(message)


def orders(setting: Setting) -> Found:
    """From the scheduler's process to that of every rank."""
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = run_alone(order_bytes, 16, str(write_config(pathlib.Path(folder), TINY)))
    found, rows = Found(data={"bytes": num_bytes, "seconds": {}}), []
    for readers in (1, 2) if setting.dry_run else (1, 2, 4):
        count = 5 if setting.dry_run else 100
        sent, *read = run_ranks(send_orders, Grid(tensor=1 + readers), num_bytes, count, setting.repeats)
        latencies = {way: slowest([times[way] for times in read]) for way in (QUEUE, PIPES)}
        for way in (QUEUE, PIPES):
            rows.append([way, str(readers), microseconds(latencies[way]), microseconds(sent[way])])
        found.data["seconds"][readers] = {"until all have it": latencies, "until the sender goes on": sent}
        medians = {way: 1e6 * statistics.median(times) for way, times in latencies.items()}
        figure = f"order to {readers} rank{'s' * (readers > 1)}, {{}}: until all have it"
        found.findings += [Finding(figure.format(way), medians[way], " µs") for way in (QUEUE, PIPES)]
    columns = ["way", "ranks", "until all have it, µs", "until the sender goes on, µs"]
    title = f"Orders of {num_bytes} bytes (16 requests decode), one every {1e3 * PAUSE_SECONDS:g} ms, medians"
    found.tables.append(Table(title, columns, rows, num_labels=1))
    return found
