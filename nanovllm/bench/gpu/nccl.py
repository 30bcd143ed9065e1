"""Two GPUs: the tokens of an engine that is divided between them, and how close NCCL comes to the cost model."""

from __future__ import annotations

import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nanovllm.bench.gpu.engine import run_requests, start_engine
from nanovllm.bench.gpu.setting import Row, Setting, Skip, reason_of
from nanovllm.bench.gpu.shapes import TINY, write_checkpoint
from nanovllm.bench.ranks import run_ranks
from nanovllm.bench.workloads import Workload
from nanovllm.distributed.cost_model import LINKS, Link, fit, ring_all_gather, ring_all_reduce, wire_bytes
from nanovllm.distributed.groups import Grid, get_tp_group

RANKS = 2
# What divided engines have in common with an undivided one: every token.
DIVIDED: dict[str, dict[str, Any]] = {
    "tensor parallel 2": {"tensor_parallel_size": 2},
    "tensor parallel 2, eager": {"tensor_parallel_size": 2, "enforce_eager": True},
    "pipeline parallel 2": {"pipeline_parallel_size": 2},
}
# From a decode step of one request to a prefill of 8192 tokens, 8192 bfloat16 numbers each.
SIZES = tuple(1 << shift for shift in (11, 14, 16, 18, 20, 22, 24, 27))
_ROUNDS = 5


def nccl(setting: Setting) -> Iterator[Row]:
    """Tokens first, then bandwidth; in a dry run, two processes on the CPU, over gloo."""
    count = torch.cuda.device_count()
    if not setting.dry_run and count < RANKS:
        raise Skip(f"it needs {RANKS} GPUs, and this machine has {count}")
    yield from _tokens(setting)
    yield from _bandwidth(setting)


def _tokens(setting: Setting) -> Iterator[Row]:
    """Whether two GPUs sample the tokens of one, in float32."""
    count, lengths, outputs = (2, (3, 20), (3, 3)) if setting.dry_run else (8, (5, 150), (48, 48))
    options: dict[str, Any] = {"dtype": "float32", "device": setting.device.type, "num_kv_blocks": 128}
    # A small budget: prompts come in chunks, beside requests that decode.
    options |= {"max_num_seqs": count, "max_num_batched_tokens": 16 if setting.dry_run else 64}
    with tempfile.TemporaryDirectory() as work:
        folder = str(write_checkpoint(pathlib.Path(work), TINY))
        requests = Workload("", "throughput", "", count, lengths, outputs).requests(TINY["vocab_size"])
        core = start_engine(folder, **options)
        expected, _ = run_requests(core, requests)
        core.close()
        for name, division in DIVIDED.items():
            if setting.dry_run and division.get("enforce_eager"):
                continue  # there are no graphs on a CPU
            row: Row = {"table": "checks", "name": f"greedy tokens: {name} as one rank"}
            try:
                core = start_engine(folder, **options, **division)
                try:
                    found, _ = run_requests(core, requests)
                finally:
                    core.close()
            except Exception as error:  # the next one may tell more
                yield row | {"passed": False, "reason": reason_of(error)}
                continue
            wrong = [i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
            yield row | {"passed": not wrong} | ({"reason": f"requests {wrong} differ"} if wrong else {})


# ---------------------------------------------------------------- bandwidth


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


def _bandwidth(setting: Setting) -> Iterator[Row]:
    sizes, rounds = (SIZES[:3], 1) if setting.dry_run else (SIZES, _ROUNDS)
    arguments = sizes, setting.device.type, rounds
    ranks = run_ranks(
        time_collectives,
        Grid(tensor=RANKS),
        *arguments,
        device=setting.device.type,
        gloo_only=True,
        timeout=max(1.0, setting.seconds_left),
    )
    link = None if setting.dry_run else find_link()
    yield {
        "table": "facts",
        "name": "link between the first two GPUs",
        "value": link.name if link else "not known",
    }
    yield from collective_rows(
        {name: [max(rank[name][i] for rank in ranks) for i in range(len(sizes))] for name in ranks[0]},
        sizes,
        link,
    )


def collective_rows(
    times: dict[str, list[float]], sizes: tuple[int, ...], link: Link | None
) -> Iterator[Row]:
    """Measured times beside what the cost model says: of the link as its data sheet has it, and of one with the latency and
    bandwidth that fit these times best.

    Args:
        times: by operation, in the order of `sizes`, the bytes that a rank hands in.
    """
    for name, seconds in times.items():
        cost = _COSTS[name]
        # Around a ring of two, an all-reduce is two messages of half, and an all-gather one of all.
        messages = 2 if name == "all-reduce" else 1
        fitted = fit(name, [size / messages for size in sizes], [s / messages for s in seconds])
        for size, measured in zip(sizes, seconds, strict=True):
            row: Row = {"table": "collectives", "operation": name, "num_bytes": size, "seconds": measured}
            row["bus_bytes"] = wire_bytes(name.replace("-", "_"), RANKS, size)
            row["fitted_seconds"] = cost(fitted, size)
            yield row | ({"predicted_seconds": cost(link, size)} if link else {})


_COSTS: dict[str, Callable[[Link, float], float]] = {
    "all-reduce": lambda link, size: ring_all_reduce(link, RANKS, size),
    "all-gather": lambda link, size: ring_all_gather(link, RANKS, size),
}


def find_link() -> Link | None:
    """What connects the first two GPUs, as far as nvidia-smi tells and the cost model knows it."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    topology, generation = (
        subprocess.run([smi, *words], capture_output=True, text=True).stdout
        for words in (
            ["topo", "-m"],
            ["--query-gpu=pcie.link.gen.max", "--format=csv,noheader", "--id=0"],
        )
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
