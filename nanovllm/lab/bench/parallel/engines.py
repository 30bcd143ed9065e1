"""Whole engines: what an executor costs a step, what a rank loads, and what divided engines make of the same cores."""

from __future__ import annotations

import pathlib
import statistics
import tempfile
import time
from typing import Any

import torch

from nanovllm.data.config import EngineConfig
from nanovllm.distributed.groups import Grid, get_tp_group
from nanovllm.engine.core import EngineCore, create_core
from nanovllm.lab.bench.gpu.engine import add_requests, run_requests, start_engine
from nanovllm.lab.bench.gpu.shapes import TINY, write_config
from nanovllm.lab.bench.parallel.findings import Finding, Found, estimate, in_turn, number, paired
from nanovllm.lab.bench.parallel.pipeline import Stopwatch
from nanovllm.lab.bench.parallel.setting import Setting
from nanovllm.lab.bench.ranks import run_alone, run_ranks
from nanovllm.lab.bench.report import Table
from nanovllm.lab.bench.watch import Estimate
from nanovllm.lab.bench.workloads import BenchRequest, Workload
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import checkpoint_tensors, load_model
from nanovllm.ops.device import choose_dtype

# ---------------------------------------------------------------- executors

BACKENDS = ("uni", "mp")
BATCHES = (1, 16)


def time_steps(folder: str, options: dict[str, Any], steps: int, rounds: int) -> dict[int, dict[str, list[float]]]:
    """Seconds of a decode step, the median of each round, by the number of requests and by executor; they take turns."""
    length = 32 + steps * (rounds + 2)
    options = options | {"max_model_len": length, "max_num_seqs": max(BATCHES)}
    cores = {name: start_engine(folder, distributed_executor_backend=name, **options) for name in BACKENDS}
    found: dict[int, dict[str, list[float]]] = {}
    try:
        for batch in BATCHES:
            times: dict[str, list[float]] = {name: [] for name in BACKENDS}
            for core in cores.values():
                add_requests(core, [BenchRequest([3 + i] * 16, length - 16) for i in range(batch)])
                core.step()  # the prompts
            for turn in range(rounds + 1):
                for name in in_turn(BACKENDS, turn):
                    seconds = _median_step(cores[name], steps)
                    if turn:  # the first one is to warm up
                        times[name].append(seconds)
            for core in cores.values():
                for index in range(batch):
                    core.abort_request(str(index))
            found[batch] = times
    finally:
        for core in cores.values():
            core.close()
    return found


def _median_step(core: EngineCore, steps: int) -> float:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def executor(setting: Setting) -> Found:
    """The same engine with its only rank in its own process, and in another one."""
    steps, rounds = (2, 1) if setting.dry_run else (10, 6 * setting.repeats)
    with tempfile.TemporaryDirectory() as tiny:
        write_config(pathlib.Path(tiny), TINY)
        models = {
            # A step so short that nothing hides what is added to it; it has no use for a second core.
            "tiny model": (1, tiny, setting.options(load_format="dummy")),
            setting.folder.name: (setting.threads, str(setting.folder), setting.options()),
        }
        times = {
            name: run_alone(time_steps, *arguments, steps, rounds, threads=threads)
            for name, (threads, *arguments) in models.items()
        }
    return report_executors(times)


def report_executors(times: dict[str, dict[int, dict[str, list[float]]]]) -> Found:
    """What steps of the two executors say, in pairs; see `time_steps`."""
    found, rows = Found(data={"seconds": times}), []
    for model, by_batch in times.items():
        for batch, both in by_batch.items():
            pairs = list(zip(both["uni"], both["mp"], strict=True))
            more, ratio = Estimate.of([mp - uni for uni, mp in pairs]), paired(both["uni"], both["mp"])
            step = 1e3 * statistics.median(both["uni"])
            where = f"executor mp against uni, {model}, {batch} request{'s' * (batch > 1)}"
            found.findings.append(Finding(f"{where}: added to a step", 1e6 * more.ratio, " µs"))
            found.findings.append(Finding(f"{where}: step time", ratio.ratio, " ×"))
            rows.append([model, str(batch), number(step), estimate(more, 1e6), estimate(ratio)])
    columns = ["model", "requests", "uni, ms a step", "mp, µs more", "mp / uni"]
    title = "One rank in a process of its own (mp) against in-process (uni): decode steps, 95 % intervals"
    found.tables.append(Table(title, columns, rows))
    return found


# ---------------------------------------------------------------- weights


def load_share(folder: str, dtype: str) -> tuple[int, int]:
    """On each rank: bytes of the weights that it holds, and of the checkpoint's tensors that it has to read."""
    config = ModelConfig.from_pretrained(folder)
    model = load_model(folder, config, choose_dtype(dtype, torch.device("cpu")))
    held = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    places = [(model.checkpoint_place(name), tensor) for name, tensor in checkpoint_tensors(pathlib.Path(folder))]
    return sum(held.values()), sum(tensor[place.source].nbytes for place, tensor in places if place is not None)


def weights(setting: Setting) -> Found:
    """What each of several ranks loads of the model."""
    size = setting.tensor_size()
    if size is None:
        raise ValueError(f"the layers of {setting.folder.name} cannot be divided among 2, 3 or 4 ranks")
    arguments = str(setting.folder), setting.dtype
    shares = {n: run_ranks(load_share, Grid(tensor=n), *arguments) for n in (1, size)}
    return report_weights(shares)


def report_weights(shares: dict[int, list[tuple[int, int]]]) -> Found:
    """What the ranks hold and read says; see `load_share`. By the number of ranks, of which one is 1."""
    found, rows = Found(data={"bytes": shares}), []
    (whole,) = shares[1]
    for size, ranks in shares.items():
        for rank, share in enumerate(ranks):
            cells = [f"{size}", str(rank)]
            for part, total in zip(share, whole, strict=True):
                cells += [number(part / 2**20), number(part / total)]
            rows.append(cells)
        if size > 1:
            for index, what in enumerate(("held", "read")):
                most = max(share[index] for share in ranks) / whole[index]
                figure = f"weights {what} by a rank of {size}, of those of one rank"
                # Norms are on all ranks, and rows of padding on the last ones.
                found.findings.append(Finding.near(figure, 100 * most, " %", 100 / size, tolerance=0.02))
    columns = ["ranks", "rank", "held MiB", "of all", "read MiB", "of all"]
    found.tables.append(Table("Weights of a rank, tensor parallel", columns, rows, num_labels=0))
    return found


# ---------------------------------------------------------------- tokens a second


def load_of(setting: Setting) -> Workload:
    """Requests that keep a small batch busy."""
    count, lengths = (2, (4, 4)) if setting.dry_run else (16, (32, 32))
    return Workload("", "throughput", "", count, lengths, lengths)


def grids(setting: Setting) -> dict[str, dict[str, int]]:
    """What one rank with all cores is compared with: settings, by name."""
    size = setting.tensor_size()
    found = {f"tensor parallel {size}": {"tensor_parallel_size": size}} if size else {}
    return found | {"pipeline parallel 2": {"pipeline_parallel_size": 2}, "data parallel 2": {"data_parallel_size": 2}}


def time_grids(
    folder: str, options: dict[str, Any], work: Workload, grids: dict[str, dict[str, int]], repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """For each grid: seconds of the workload on one rank, and on the grid, in turn."""
    base, found = start_engine(folder, **options), {}
    vocabulary = base.model_config.vocab_size
    for name, sizes in grids.items():
        core = create_core(EngineConfig(model=folder, **(options | sizes)))
        try:
            pairs = []
            for repeat in range(repeats + 1):
                requests = work.requests(vocabulary, repeat=repeat)
                both = {}
                for engine in in_turn(("base", "grid"), repeat):
                    start = time.perf_counter()
                    run_requests(core if engine == "grid" else base, requests)
                    both[engine] = time.perf_counter() - start
                if repeat:  # the first one is to warm up
                    pairs.append((both["base"], both["grid"]))
            found[name] = pairs
        finally:
            core.close()
    return found


def count_collectives(folder: str, options: dict[str, Any], batch: int, steps: int) -> dict[str, float]:
    """On each rank: decode steps, how long they take, and how much of that goes to collectives.

    Every rank has an engine of its own, and all come to the same plans.
    """
    core, group = start_engine(folder, **options), get_tp_group()
    add_requests(core, [BenchRequest([3 + i] * 16, steps + 4) for i in range(batch)])
    for _ in range(3):
        core.step()
    watches = [Stopwatch(group, name) for name in ("all_reduce", "all_gather")]
    group.calls.clear()
    group.bytes_sent.clear()
    start = time.perf_counter()
    for _ in range(steps):
        core.step()
    seconds = (time.perf_counter() - start) / steps
    config = core.model_config
    formula = (2 * config.num_layers + 1) * batch * config.hidden_size * core.runner.dtype.itemsize
    return {
        "step_seconds": seconds,
        "collective_seconds": sum(watch.seconds for watch in watches) / steps,
        "calls": sum(group.calls.values()) / steps,
        "all_reduced_bytes": group.bytes_sent["all_reduce"] / steps,
        "all_reduced_formula": formula,
    }


def throughput(setting: Setting) -> Found:
    """The same requests on divided engines, with no more cores than one rank has."""
    work, found = load_of(setting), Found()
    options = setting.options(max_num_seqs=32)
    arguments = str(setting.folder), options, work, grids(setting), setting.repeats
    pairs = run_alone(time_grids, *arguments, threads=setting.threads)
    found.data["seconds"], rows = pairs, []
    tokens = sum(request.max_tokens for request in work.requests(setting.model.vocab_size))
    for name, both in pairs.items():
        one, grid = ([pair[i] for pair in both] for i in (0, 1))
        ratio = paired(grid, one)
        found.findings.append(Finding(f"{name}: tokens/s, of one rank with all cores", ratio.ratio, " ×"))
        speeds = [number(tokens / statistics.median(times)) for times in (one, grid)]
        rows.append([name, *speeds, estimate(ratio), " ".join(number(a / b) for a, b in both)])
    columns = ["grid", "one rank, tokens/s", "the grid, tokens/s", "ratio", "pairs"]
    title = (
        f"{work.num_prompts} requests of {work.input_len[0]} + {work.output_len[0]} tokens on {setting.threads} cores"
    )
    found.tables.append(Table(title, columns, rows, num_labels=1))
    if (size := setting.tensor_size()) is not None:
        _add_collectives(found, setting, size)
    return found


def _add_collectives(found: Found, setting: Setting, size: int) -> None:
    """Where the time of a tensor-parallel step goes."""
    batch, steps = (2, 2) if setting.dry_run else (16, 20)
    arguments = str(setting.folder), setting.options(max_num_seqs=32), batch, steps
    threads = max(1, setting.threads // size)
    ranks = run_ranks(count_collectives, Grid(tensor=size), *arguments, threads=threads)
    found.data["collectives"] = ranks
    step, inside = (statistics.median(rank[name] for rank in ranks) for name in ("step_seconds", "collective_seconds"))
    where = f"tensor parallel {size}, {batch} requests decode"
    found.findings.append(Finding(f"{where}: in collectives, waiting included", 1e3 * inside, " ms a step"))
    found.findings.append(Finding(f"{where}: a step", 1e3 * step, " ms"))
    counted, formula = ranks[0]["all_reduced_bytes"], ranks[0]["all_reduced_formula"]
    found.findings.append(Finding.near(f"{where}: bytes all-reduced a step", counted, "", formula, tolerance=0))
