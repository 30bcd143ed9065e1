"""Whole engines: what a rank loads, and the speed of divided engines on the same cores."""

import itertools
import pathlib
import statistics
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch

from nanovllm.distributed.groups import Grid, get_tp_group
from nanovllm.lab.bench.local import add_requests, run_requests, start_engine
from nanovllm.lab.bench.metrics import alternate, timed
from nanovllm.lab.bench.parallel.pipeline import Stopwatch
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, goal, paired
from nanovllm.lab.bench.workloads import BenchRequest, Workload
from nanovllm.lab.processes import run_ranks
from nanovllm.layers.tensor_parallel import parallelize
from nanovllm.models.config import ModelConfig
from nanovllm.models.loader import checkpoint_tensors, load_model
from nanovllm.ops.device import choose_dtype

# ---------------------------------------------------------------- weights


def load_share(folder: str, dtype: str) -> tuple[int, int]:
    """On each rank: bytes of the weights that it holds, and of the checkpoint's tensors that it has
    to read."""
    config = ModelConfig.from_pretrained(folder)
    kind = choose_dtype(dtype, torch.device("cpu"))
    model = load_model(folder, config, kind, transforms=[parallelize])
    held = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    tensors = dict(checkpoint_tensors(pathlib.Path(folder)))
    places = model.checkpoint_places()
    return sum(held.values()), sum(
        tensors[name][place.source].nbytes for name in places for place in places[name]
    )


def weights(setting: Setting) -> Iterator[Row]:
    """The weights that each of several ranks loads."""
    size = setting.tensor_size()
    if size is None:
        raise ValueError(f"the layers of {setting.folder} cannot be divided among 2, 3 or 4 ranks")
    yield from compare_weights(
        {n: run_ranks(load_share, Grid(tensor=n), setting.folder, setting.dtype) for n in (1, size)}
    )


def compare_weights(shares: dict[int, list[tuple[int, int]]]) -> Iterator[Row]:
    """Compare what ranks hold and read with one rank; `shares` by the number of ranks, see
    `load_share`."""
    (whole,) = shares[1]
    for size, ranks in shares.items():
        for rank, share in enumerate(ranks):
            row: Row = {"table": "Weights per rank, tensor parallel", "ranks": size, "rank": rank}
            for what, part, total in zip(("held", "read"), share, whole, strict=True):
                row |= {f"{what} MiB": part / 2**20, f"{what}, share of all": part / total}
            yield row
        for index, what in enumerate(("held", "read")) if size > 1 else ():
            most = max(share[index] for share in ranks) / whole[index]
            # Norms are on all ranks, and rows of padding on the last ones.
            figure = f"weights {what} by one rank of {size}, relative to a single rank"
            yield goal(figure, 100 * most, "%", near=100 / size, tolerance=0.02)


# ---------------------------------------------------------------- tokens per second


def time_grids(
    options: dict[str, Any], work: Workload, grids: dict[str, dict[str, int]], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """For each grid: seconds of the workload on "one" rank and on the "grid", in turn."""
    base = start_engine(**options)
    found = dict[str, dict[str, list[float]]]()

    def run(engine: Any, turns: Iterator[int]) -> float:
        requests = work.requests(base.model_config.vocab_size, repeat=next(turns))
        return timed(partial(run_requests, engine, requests))

    for name, sizes in grids.items():
        with closing(start_engine(**options | sizes)) as core:
            both = {
                "one": partial(run, base, itertools.count()),
                "grid": partial(run, core, itertools.count()),
            }
            found[name] = alternate(both, repeats)
    return found


def count_collectives(options: dict[str, Any], batch: int, steps: int) -> dict[str, float]:
    """On each rank: the time of decode steps and of the collectives in it.

    Every rank has an engine of its own, and all make the same plans.
    """
    core = start_engine(**options)
    group = get_tp_group()
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
        "formula": (2 * config.num_layers + 1)
        * batch
        * config.hidden_size
        * core.runner.model.lm_head.weight.dtype.itemsize,
    }


def throughput(setting: Setting) -> Iterator[Row]:
    """The same requests on divided engines, with no more cores than one rank has."""
    count, length = (2, 4) if setting.dry_run else (16, 32)
    work = Workload(
        "",
        "throughput",
        "",
        num_prompts=count,
        input_len=(length, length),
        output_len=(length, length),
    )
    size = setting.tensor_size()
    options = setting.options(max_num_seqs=32)
    grids = {f"tensor parallel {size}": {"tensor_parallel_size": size}} if size else {}
    grids |= {
        "pipeline parallel 2": {"pipeline_parallel_size": 2},
        "data parallel 2": {"data_parallel_size": 2},
    }
    arguments = options, work, grids, setting.repeats
    for name, both in run_ranks(time_grids, Grid(), *arguments, threads=setting.threads)[0].items():
        ratio = paired(both["grid"], both["one"])
        yield goal(f"{name}: tokens/s relative to one rank with all cores", ratio["median"], "×")
        yield {
            "table": f"{count} requests of {length} + {length} tokens on {setting.threads} cores",
            "configuration": name,
            "one rank, tokens/s": [count * length / seconds for seconds in both["one"]],
            "this configuration, tokens/s": [count * length / seconds for seconds in both["grid"]],
            "ratio": ratio,
        }
    if size is not None:
        yield from _collectives(options, size, max(1, setting.threads // size), setting.dry_run)


def _collectives(options: dict[str, Any], size: int, threads: int, dry_run: bool) -> Iterator[Row]:
    """Where the time of a tensor-parallel step goes."""
    batch, steps = (2, 2) if dry_run else (16, 20)
    ranks = run_ranks(count_collectives, Grid(tensor=size), options, batch, steps, threads=threads)
    step, inside = (
        statistics.median(rank[name] for rank in ranks)
        for name in ("step_seconds", "collective_seconds")
    )
    where = f"tensor parallel {size}, {batch} requests decode"
    yield goal(f"{where}: time in collectives, including waiting", 1e3 * inside, "ms per step")
    yield goal(f"{where}: step time", 1e3 * step, "ms")
    yield goal(f"{where}: bytes all-reduced per step", ranks[0]["bytes"], near=ranks[0]["formula"])
