"""Whole engines: what an executor adds to a step, what a rank loads, and the speed of divided engines on the same cores."""

from __future__ import annotations

import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from nanovllm.distributed.groups import Grid, get_tp_group
from nanovllm.engine.core import EngineCore
from nanovllm.lab.bench.local import TINY, add_requests, run_requests, start_engine, write_config
from nanovllm.lab.bench.metrics import alternate, timed
from nanovllm.lab.bench.parallel.pipeline import Stopwatch
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, estimate, goal, paired
from nanovllm.lab.bench.workloads import BenchRequest, Workload
from nanovllm.lab.processes import run_ranks
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import checkpoint_tensors, load_model
from nanovllm.ops.device import choose_dtype

BACKENDS, BATCHES = ("uni", "mp"), (1, 16)

# ---------------------------------------------------------------- executors


def time_steps(options: dict[str, Any], steps: int, rounds: int) -> dict[int, dict[str, list[float]]]:
    """Seconds of a decode step, the median of each round, by the number of requests and by executor; they take turns."""
    length = 32 + steps * (rounds + 2)
    options = options | {"max_model_len": length, "max_num_seqs": max(BATCHES)}
    cores = {name: start_engine(distributed_executor_backend=name, **options) for name in BACKENDS}
    found: dict[int, dict[str, list[float]]] = {}
    try:
        for batch in BATCHES:
            for core in cores.values():
                add_requests(core, [BenchRequest([3 + i] * 16, length - 16) for i in range(batch)])
                core.step()  # the prompts
            found[batch] = alternate({name: partial(_median_step, core, steps) for name, core in cores.items()}, rounds)
            for core in cores.values():
                for index in range(batch):
                    core.abort_request(str(index))
    finally:
        for core in cores.values():
            core.close()
    return found


def _median_step(core: EngineCore, steps: int) -> float:
    return statistics.median(timed(core.step) for _ in range(steps))


def executor(setting: Setting) -> Iterator[Row]:
    """The same engine with its only rank in its own process, and in another one."""
    steps, rounds = (2, 1) if setting.dry_run else (10, 6 * setting.repeats)
    with tempfile.TemporaryDirectory() as tiny:
        write_config(pathlib.Path(tiny), TINY)
        models = {
            # A step so short that it hides nothing that is added to it; it has no use for a second core.
            "tiny model": (1, setting.options(load_format="dummy", model=tiny)),
            pathlib.Path(setting.folder).name: (setting.threads, setting.options()),
        }
        for name, (threads, options) in models.items():
            yield from compare_executors(
                name, run_ranks(time_steps, Grid(), options, steps, rounds, threads=threads)[0]
            )


def compare_executors(model: str, times: dict[int, dict[str, list[float]]]) -> Iterator[Row]:
    """Compare the steps of the two executors, round by round; see `time_steps`."""
    for batch, both in times.items():
        more = estimate([1e6 * (mp - uni) for uni, mp in zip(both["uni"], both["mp"], strict=True)])
        ratio = paired(both["uni"], both["mp"])
        where = f"executor mp against uni, {model}, {batch} request{'s' * (batch > 1)}"
        yield goal(f"{where}: added to a step", more["median"], "µs")
        yield goal(f"{where}: step time", ratio["median"], "×")
        yield {
            "table": "One rank in a process of its own (mp) against in-process (uni): decode steps, 95 % intervals",
            "model": model,
            "requests": batch,
            "uni, ms per step": [1e3 * seconds for seconds in both["uni"]],
            "mp, µs more": more,
            "mp / uni": ratio,
        }


# ---------------------------------------------------------------- weights


def load_share(folder: str, dtype: str) -> tuple[int, int]:
    """On each rank: bytes of the weights that it holds, and of the checkpoint's tensors that it has to read."""
    config = ModelConfig.from_pretrained(folder)
    model = load_model(folder, config, choose_dtype(dtype, torch.device("cpu")))
    held = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    tensors, places = dict(checkpoint_tensors(pathlib.Path(folder))), model.checkpoint_places()
    return sum(held.values()), sum(tensors[name][place.source].nbytes for name in places for place in places[name])


def weights(setting: Setting) -> Iterator[Row]:
    """The weights that each of several ranks loads."""
    size = setting.tensor_size()
    if size is None:
        raise ValueError(f"the layers of {setting.folder} cannot be divided among 2, 3 or 4 ranks")
    yield from compare_weights(
        {n: run_ranks(load_share, Grid(tensor=n), setting.folder, setting.dtype) for n in (1, size)}
    )


def compare_weights(shares: dict[int, list[tuple[int, int]]]) -> Iterator[Row]:
    """Compare what ranks hold and read with one rank; `shares` by the number of ranks, see `load_share`."""
    (whole,) = shares[1]
    for size, ranks in shares.items():
        for rank, share in enumerate(ranks):
            row: Row = {"table": "Weights of a rank, tensor parallel", "ranks": size, "rank": rank}
            for what, part, total in zip(("held", "read"), share, whole, strict=True):
                row |= {f"{what} MiB": part / 2**20, f"{what}, of all": part / total}
            yield row
        for index, what in enumerate(("held", "read")) if size > 1 else ():
            most = max(share[index] for share in ranks) / whole[index]
            # Norms are on all ranks, and rows of padding on the last ones.
            figure = f"weights {what} by a rank of {size}, of those of one rank"
            yield goal(figure, 100 * most, "%", near=100 / size, tolerance=0.02)


# ---------------------------------------------------------------- tokens per second


def time_grids(
    options: dict[str, Any], work: Workload, grids: dict[str, dict[str, int]], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """For each grid: seconds of the workload on "one" rank and on the "grid", in turn."""
    base, found = start_engine(**options), dict[str, dict[str, list[float]]]()

    def run(engine: Any, turns: Iterator[int]) -> float:
        requests = work.requests(base.model_config.vocab_size, repeat=next(turns))
        return timed(partial(run_requests, engine, requests))

    for name, sizes in grids.items():
        core = start_engine(**options | sizes)
        try:
            both = {"one": partial(run, base, itertools.count()), "grid": partial(run, core, itertools.count())}
            found[name] = alternate(both, repeats)
        finally:
            core.close()
    return found


def count_collectives(options: dict[str, Any], batch: int, steps: int) -> dict[str, float]:
    """On each rank: the time of decode steps and of the collectives in it.

    Every rank has an engine of its own, and all make the same plans.
    """
    core, group = start_engine(**options), get_tp_group()
    add_requests(core, [BenchRequest([3 + i] * 16, steps + 4) for i in range(batch)])
    for _ in range(3):
        core.step()
    watches = [Stopwatch(group, name) for name in ("all_reduce", "all_gather")]
    group.bytes_sent.clear()
    seconds = timed(*[core.step] * steps) / steps
    config = core.model_config
    return {
        "step_seconds": seconds,
        "collective_seconds": sum(watch.seconds for watch in watches) / steps,
        "bytes": group.bytes_sent["all_reduce"] / steps,
        "formula": (2 * config.num_layers + 1) * batch * config.hidden_size * core.runner.dtype.itemsize,
    }


def throughput(setting: Setting) -> Iterator[Row]:
    """The same requests on divided engines, with no more cores than one rank has."""
    count, length = (2, 4) if setting.dry_run else (16, 32)
    work, size = Workload("", "throughput", "", count, (length, length), (length, length)), setting.tensor_size()
    options = setting.options(max_num_seqs=32)
    grids = {f"tensor parallel {size}": {"tensor_parallel_size": size}} if size else {}
    grids |= {"pipeline parallel 2": {"pipeline_parallel_size": 2}, "data parallel 2": {"data_parallel_size": 2}}
    arguments = options, work, grids, setting.repeats
    for name, both in run_ranks(time_grids, Grid(), *arguments, threads=setting.threads)[0].items():
        ratio = paired(both["grid"], both["one"])
        yield goal(f"{name}: tokens/s, of one rank with all cores", ratio["median"], "×")
        yield {
            "table": f"{count} requests of {length} + {length} tokens on {setting.threads} cores",
            "grid": name,
            "one rank, tokens/s": [count * length / seconds for seconds in both["one"]],
            "the grid, tokens/s": [count * length / seconds for seconds in both["grid"]],
            "ratio": ratio,
        }
    if size is not None:
        yield from _collectives(options, size, max(1, setting.threads // size), setting.dry_run)


def _collectives(options: dict[str, Any], size: int, threads: int, dry_run: bool) -> Iterator[Row]:
    """Where the time of a tensor-parallel step goes."""
    batch, steps = (2, 2) if dry_run else (16, 20)
    ranks = run_ranks(count_collectives, Grid(tensor=size), options, batch, steps, threads=threads)
    step, inside = (statistics.median(rank[name] for rank in ranks) for name in ("step_seconds", "collective_seconds"))
    where = f"tensor parallel {size}, {batch} requests decode"
    yield goal(f"{where}: in collectives, waiting included", 1e3 * inside, "ms per step")
    yield goal(f"{where}: a step", 1e3 * step, "ms")
    yield goal(f"{where}: bytes all-reduced per step", ranks[0]["bytes"], near=ranks[0]["formula"])
