"""Two GPUs: the tokens of an engine that is divided between them, and how close NCCL comes to the cost model."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nanovllm.distributed.cost_model import LINKS, Link, fit, ring_all_gather, ring_all_reduce, wire_bytes
from nanovllm.distributed.groups import Grid, get_tp_group
from nanovllm.lab.bench.gpu.engine import run_requests, start_engine
from nanovllm.lab.bench.gpu.setting import Row, Setting, Skip, reason_of
from nanovllm.lab.bench.gpu.shapes import TINY, TINY_DEEPSEEK, TINY_MIXTRAL, write_checkpoint
from nanovllm.lab.bench.ranks import run_ranks
from nanovllm.lab.bench.workloads import BenchRequest, Workload

RANKS = 2
_TENSOR, _DATA = {"tensor_parallel_size": RANKS}, {"data_parallel_size": RANKS}
_WHOLE = {"enable_expert_parallel": True}
# Every fifth step, experts go to where the last four steps would have wanted them.
_MOVING: dict[str, Any] = _WHOLE | {
    "enable_eplb": True,
    "eplb_config": {
        "window_size": 4, "step_interval": 5, "num_redundant_experts": 2, "log_balancedness": True,
    },
}  # fmt: skip
# What divided engines have in common with an undivided one: every token. By model: its shape and the divisions.
DIVIDED: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "Llama": (
        TINY,
        {
            "tensor parallel 2": _TENSOR,
            "tensor parallel 2, eager": _TENSOR | {"enforce_eager": True},
            "pipeline parallel 2": {"pipeline_parallel_size": RANKS},
        },
    ),
    "Mixtral": (
        TINY_MIXTRAL,
        {
            "tensor parallel 2, whole experts": _TENSOR | _WHOLE,
            "tensor parallel 2, experts that move": _TENSOR | _MOVING,
            "data parallel 2, whole experts": _DATA | _WHOLE,
            "data parallel 2, experts that move": _DATA | _MOVING,
        },
    ),
    "DeepSeek-V3": (TINY_DEEPSEEK, {"tensor parallel 2": _TENSOR}),
}
# Enough for a dry run to go through all that is written here; tests/ have the other divisions on a CPU.
_DRY = ("pipeline parallel 2", "tensor parallel 2, experts that move", "data parallel 2, experts that move")
# From a decode step of one request to a prefill of 8192 tokens, 8192 bfloat16 numbers each.
SIZES = tuple(1 << shift for shift in (11, 14, 16, 18, 20, 22, 24, 27))
_ROUNDS = 5


def nccl(setting: Setting) -> Iterator[Row]:
    """Bandwidth first, which is soon done, then tokens; in a dry run, two processes on the CPU, over gloo."""
    count = torch.cuda.device_count()
    if not setting.dry_run and count < RANKS:
        raise Skip(f"it needs {RANKS} GPUs, and this machine has {count}")
    yield from _bandwidth(setting)
    yield from _tokens(setting)


def _tokens(setting: Setting) -> Iterator[Row]:
    """Whether two GPUs sample the tokens of one, in float32."""
    count, lengths, outputs = (3, (3, 20), (9, 9)) if setting.dry_run else (8, (5, 150), (48, 48))
    requests = Workload("", "throughput", "", count, lengths, outputs).requests(TINY["vocab_size"])
    options: dict[str, Any] = {"dtype": "float32", "device": setting.device.type, "num_kv_blocks": 128}
    # A small budget: prompts come in chunks, beside requests that decode.
    options |= {"max_num_seqs": count, "max_num_batched_tokens": 16 if setting.dry_run else 64}
    for model, (shape, divisions) in DIVIDED.items():
        chosen = {name: each for name, each in divisions.items() if name in _DRY or not setting.dry_run}
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as work:
            folder = str(write_checkpoint(pathlib.Path(work), shape))
            yield from compare(model, folder, requests, options, chosen)


def compare(
    model: str, folder: str, requests: list[BenchRequest], options: dict[str, Any], divisions: dict[str, dict[str, Any]]
) -> Iterator[Row]:
    """For each division of a model, whether it gives the tokens of one rank; where experts shall move, whether they do."""

    def run(**division: Any) -> list[list[int]]:
        core = start_engine(folder, **options, **division)
        try:
            return run_requests(core, requests)[0]
        finally:
            core.close()

    undivided: dict[str, dict[str, Any]] = {"one rank": {}}
    expected: list[list[int]] = []
    for name, division in (undivided | divisions).items():
        row: Row = {"table": "checks", "name": f"greedy tokens, {model}: {name}"}
        try:
            # Only what has to be read is kept back: of a run that hangs, all else is in the report.
            moves_experts = "enable_eplb" in division
            with log_of_ranks() if moves_experts else contextlib.nullcontext([""]) as said:
                found = run(**division)
        except Exception as error:
            yield row | {"passed": False, "reason": reason_of(error)}
            if not division:
                return  # there is nothing to compare with
            continue
        if not division:
            expected = found
            continue
        wrong = [i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
        row |= {"passed": False, "reason": f"requests {wrong} differ"} if wrong else {"passed": True}
        moves = [int(count) for count in re.findall(r"now .*; (\d+) bytes moved", said[0])]
        if moves_experts and not (any(moves) and len(moves) % RANKS == 0):
            row |= {"passed": False, "reason": f"experts have not moved on both ranks: {moves} bytes"}
        yield row


@contextlib.contextmanager
def log_of_ranks() -> Iterator[list[str]]:
    """Collects what the processes of the ranks log, which is there (one text) afterwards, and passes it on."""
    said: list[str] = []
    logger, own_error = logging.getLogger("nanovllm"), os.dup(2)
    level = logger.level
    with tempfile.TemporaryFile("w+") as file:
        logger.setLevel(logging.INFO)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(own_error, 2)
            os.close(own_error)
            logger.setLevel(level)
            file.seek(0)
            said.append(file.read())
            sys.stderr.write(said[0])


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
    yield {"table": "facts", "name": "link between the first two GPUs", "value": link.name if link else "not known"}
    yield from collective_rows(
        {name: [max(rank[name][i] for rank in ranks) for i in range(len(sizes))] for name in ranks[0]}, sizes, link
    )


def collective_rows(times: dict[str, list[float]], sizes: tuple[int, ...], link: Link | None) -> Iterator[Row]:
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
