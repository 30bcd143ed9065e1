"""Two GPUs: how close NCCL comes to the cost model."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from nanovllm.distributed.cost_model import fit, ring_all_gather, ring_all_reduce, wire_bytes
from nanovllm.distributed.groups import Grid, get_tp_group
from nanovllm.lab.bench.metrics import alternate, slowest, timed
from nanovllm.lab.bench.parts import Setting, Skip
from nanovllm.lab.bench.report import Row
from nanovllm.lab.processes import run_ranks

RANKS = 2
# From a decode step of one request to a prefill of 8192 tokens, 8192 bfloat16 numbers each.
SIZES = tuple(1 << shift for shift in (11, 14, 16, 18, 20, 22, 24, 27))
_ROUNDS = 5


def time_collectives(
    sizes: tuple[int, ...], device_type: str, rounds: int
) -> dict[str, list[float]]:
    """On each rank: seconds of a call on tensors of so many bytes, by operation; calls are queued
    one after another, as the engine queues them."""
    group = get_tp_group()
    device = (
        torch.device(device_type, torch.cuda.current_device())
        if device_type == "cuda"
        else torch.device("cpu")
    )
    operations: dict[str, Callable[[torch.Tensor], object]] = {
        "all-reduce": group.all_reduce,
        "all-gather": lambda x: group.all_gather(x, dim=0),
    }
    calls = 2 if device_type == "cpu" else 20
    at_the_end = [partial(torch.cuda.synchronize, device)] if device_type == "cuda" else []

    def run(name: str, size: int) -> float:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        group.barrier()
        return timed(*[partial(operations[name], x)] * calls, *at_the_end) / calls

    # Connections are made in the round to warm up.
    times = alternate(
        {(name, size): partial(run, name, size) for name in operations for size in sizes}, rounds
    )
    return {name: [statistics.median(times[name, size]) for size in sizes] for name in operations}


def nccl(setting: Setting) -> Iterator[Row]:
    """Collectives on two GPUs; in a dry run, in two processes on the CPU, over gloo."""
    count = torch.cuda.device_count()
    device = setting.device.type
    if not setting.dry_run and count < RANKS:
        raise Skip(f"it needs {RANKS} GPUs, and this machine has {count}")
    sizes, rounds = (SIZES[:3], 1) if setting.dry_run else (SIZES, _ROUNDS)
    limits: dict[str, Any] = {
        "device": device,
        "disable_custom_all_reduce": True,
        "timeout": max(1.0, setting.seconds_left),
    }
    ranks = run_ranks(time_collectives, Grid(tensor=RANKS), sizes, device, rounds, **limits)
    yield from compare({name: slowest([rank[name] for rank in ranks]) for name in ranks[0]}, sizes)


def compare(times: dict[str, list[float]], sizes: tuple[int, ...]) -> Iterator[Row]:
    """Compare measured times with the cost model of a link with the latency and bandwidth that fit
    these times best.

    Args:
        times: by operation, in the order of `sizes`, the bytes that a rank hands in.
    """
    for name, seconds in times.items():
        # Around a ring of two, an all-reduce is two messages of half, and an all-gather one of all.
        cost, messages = (ring_all_reduce, 2) if name == "all-reduce" else (ring_all_gather, 1)
        link = fit(name, [size / messages for size in sizes], [s / messages for s in seconds])
        for size, measured in zip(sizes, seconds, strict=True):
            yield {
                "table": (
                    "Collectives on 2 GPUs, and the cost model of the link that fits them best"
                ),
                "operation": name,
                "bytes per rank": size,
                "µs": 1e6 * measured,
                "GB/s sent": wire_bytes(name.replace("-", "_"), RANKS, size) / measured / 1e9,
                "predicted µs": 1e6 * cost(link, RANKS, size),
                "predicted ÷ measured": cost(link, RANKS, size) / measured,
            }
