"""Two GPUs: how close NCCL comes to the cost model."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nanovllm.distributed.groups import Grid, get_tp_group
from nanovllm.lab.bench.parts import Setting, Skip
from nanovllm.lab.bench.report import Row
from nanovllm.lab.cost_model import LINKS, Link, fit, ring_all_gather, ring_all_reduce, wire_bytes
from nanovllm.lab.processes import run_ranks

RANKS = 2
# From a decode step of one request to a prefill of 8192 tokens, 8192 bfloat16 numbers each.
SIZES = tuple(1 << shift for shift in (11, 14, 16, 18, 20, 22, 24, 27))
_ROUNDS = 5


def time_collectives(sizes: tuple[int, ...], device_type: str, rounds: int) -> dict[str, list[float]]:
    """On each rank: seconds of a call on tensors of so many bytes, by operation; calls are queued one after another, as the
    engine queues them."""
    group = get_tp_group()
    device = torch.device(device_type, group.local_rank) if device_type == "cuda" else torch.device("cpu")
    operations: dict[str, Callable[[torch.Tensor], object]] = {
        "all-reduce": group.all_reduce,
        "all-gather": lambda x: group.all_gather(x, dim=0),
    }
    found: dict[str, list[float]] = {}
    for name, operation in operations.items():
        found[name] = []
        for size in sizes:
            x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
            calls = 2 if device_type == "cpu" else 20
            _seconds(operation, x, calls)  # connections are made at the first call
            found[name].append(statistics.median(_seconds(operation, x, calls) for _ in range(rounds)))
    return found


def _seconds(operation: Callable[[torch.Tensor], object], x: torch.Tensor, calls: int) -> float:
    get_tp_group().barrier()
    start = time.perf_counter()
    for _ in range(calls):
        operation(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return (time.perf_counter() - start) / calls


def nccl(setting: Setting) -> Iterator[Row]:
    """Collectives on two GPUs; in a dry run, in two processes on the CPU, over gloo."""
    count, device = torch.cuda.device_count(), setting.device.type
    if not setting.dry_run and count < RANKS:
        raise Skip(f"it needs {RANKS} GPUs, and this machine has {count}")
    sizes, rounds = (SIZES[:3], 1) if setting.dry_run else (SIZES, _ROUNDS)
    limits: dict[str, Any] = {
        "device": device,
        "disable_custom_all_reduce": True,
        "timeout": max(1.0, setting.seconds_left),
    }
    ranks = run_ranks(time_collectives, Grid(tensor=RANKS), sizes, device, rounds, **limits)
    link = None if setting.dry_run else find_link()
    yield {
        "table": "The machine",
        "what": "link between the first two GPUs",
        "value": link.name if link else "not known",
    }
    yield from compare(
        {name: [max(rank[name][i] for rank in ranks) for i in range(len(sizes))] for name in ranks[0]}, sizes, link
    )


def compare(times: dict[str, list[float]], sizes: tuple[int, ...], link: Link | None) -> Iterator[Row]:
    """Compare measured times with the cost model: of the link as in its data sheet, and of a link with the latency and
    bandwidth that fit these times best.

    Args:
        times: by operation, in the order of `sizes`, the bytes that a rank hands in.
    """
    for name, seconds in times.items():
        # Around a ring of two, an all-reduce is two messages of half, and an all-gather one of all.
        cost, messages = (ring_all_reduce, 2) if name == "all-reduce" else (ring_all_gather, 1)
        fitted = fit(name, [size / messages for size in sizes], [s / messages for s in seconds])
        for size, measured in zip(sizes, seconds, strict=True):
            row: Row = {"table": "Collectives on 2 GPUs, and the predictions of the cost model", "operation": name}
            row |= {"bytes per rank": size, "µs": 1e6 * measured}
            row["GB/s sent"] = wire_bytes(name.replace("-", "_"), RANKS, size) / measured / 1e9
            for column, known in (("data sheet", link), ("best fit", fitted)):
                predicted = None if known is None else cost(known, RANKS, size)
                row[f"{column}: µs"] = None if predicted is None else 1e6 * predicted
                row[f"{column} ÷ measured"] = None if predicted is None else predicted / measured
            yield row


def find_link() -> Link | None:
    """The link between the first two GPUs, if nvidia-smi shows it and the cost model knows it."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    topology, generation = (
        subprocess.run([smi, *words], capture_output=True, text=True).stdout
        for words in (["topo", "-m"], ["--query-gpu=pcie.link.gen.max", "--format=csv,noheader", "--id=0"])
    )
    return link_of(topology, torch.cuda.get_device_capability(0)[0], generation.strip())


def link_of(topology: str, capability: int, pcie_generation: str) -> Link | None:
    """The link that `nvidia-smi topo -m` shows between GPU0 and GPU1: "NV18" for 18 lanes of NVLink, else a way over PCIe."""
    rows = [line.split() for line in topology.splitlines()]
    own = next((row for row in rows if row[:1] == ["GPU0"] and len(row) > 2 and row[1] == "X"), None)
    if own is None:
        return None
    if own[2].startswith("NV"):
        return LINKS.get({9: "NVLink 4", 10: "NVLink 5"}.get(capability, ""))
    return LINKS.get(f"PCIe {pcie_generation}.0 x16")
