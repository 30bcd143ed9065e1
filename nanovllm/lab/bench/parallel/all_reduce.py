"""The sum over two ranks: in shared memory, by gloo, and as the cost model says."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from nanovllm.distributed.cost_model import fit, one_shot_all_reduce, ring_all_reduce
from nanovllm.distributed.groups import Grid, get_tp_group
from nanovllm.lab.bench.parallel.findings import Finding, Found, in_turn, microseconds, number, paired, slowest
from nanovllm.lab.bench.parallel.setting import Setting
from nanovllm.lab.bench.ranks import run_ranks
from nanovllm.lab.bench.report import Table

Times = dict[str, dict[int, list[float]]]


SHARED, GLOO = "shared memory", "gloo"
GOAL_SIZES = {2048: 5.0, 65536: 5.0, 1 << 20: None}
# The cost model learns from these sizes what it then says of the others.
FITTED_SIZES = (1 << 10, 1 << 13, 1 << 15, 1 << 18, 1 << 19, 1 << 21)


def time_all_reduces(sizes: Sequence[int], calls: int, rounds: int) -> Times:
    """On each rank: seconds of a call, by way and by size in bytes, for each round; the ways take turns.

    Raises:
        RuntimeError: this machine has no all-reduce in shared memory.
    """
    group = get_tp_group()
    shared = group.shared
    if shared is None:
        raise RuntimeError("there is no all-reduce in shared memory here: its functions are not compiled")
    times: Times = {way: {size: [] for size in sizes} for way in (SHARED, GLOO)}
    for turn in range(rounds + 1):
        for size in sizes:
            x = torch.zeros(size // 4)
            count = calls if size <= 1 << 16 else max(2, calls // 5)
            for way in in_turn(list(times), turn):
                group.shared = shared if way == SHARED else None
                group.all_reduce(x)  # all are here
                start = time.perf_counter()
                for _ in range(count):
                    group.all_reduce(x)
                if turn:  # the first one is to warm up
                    times[way][size].append((time.perf_counter() - start) / count)
    group.shared = shared
    return times


def predict(times: Times, world_size: int) -> dict[str, dict[int, float]]:
    """What the cost model says of the sizes of the goals, in seconds, if it knows how long the others take.

    Shared memory is one message of everything; gloo goes around a ring, `2 (n - 1)` messages of an n-th each.
    """
    found = {}
    for way, parts in ((SHARED, 1), (GLOO, 2 * (world_size - 1))):
        cost = one_shot_all_reduce if way == SHARED else ring_all_reduce
        lengths = [size * (world_size - 1) if way == SHARED else size / world_size for size in FITTED_SIZES]
        seconds = [statistics.median(times[way][size]) / parts for size in FITTED_SIZES]
        link = fit(way, lengths, seconds)
        found[way] = {size: cost(link, world_size, size) for size in GOAL_SIZES}
    return found


def all_reduces(setting: Setting) -> Found:
    """The sum over two ranks, which every layer needs twice."""
    calls, rounds = (2, 1) if setting.dry_run else (50, 5 * setting.repeats)
    sizes = sorted([*FITTED_SIZES, *GOAL_SIZES])
    ranks = run_ranks(time_all_reduces, Grid(tensor=2), sizes, calls, rounds)
    times: Times = {
        way: {size: slowest([rank[way][size] for rank in ranks]) for size in sizes} for way in (SHARED, GLOO)
    }
    return report_all_reduces(times)


def report_all_reduces(times: Times) -> Found:
    """What the times of two ranks say.

    Args:
        times: see `time_all_reduces`; rounds of the two ways make pairs.
    """
    predicted = predict(times, 2)
    found, rows = Found(data={"seconds": times, "predicted": predicted}), []
    for size, goal in GOAL_SIZES.items():
        ratio = paired(times[SHARED][size], times[GLOO][size])
        figure = f"all-reduce of {_size(size)} on 2 ranks: time of gloo over shared memory"
        if goal is None:
            found.findings.append(Finding(figure, ratio.ratio, " ×"))
        else:
            found.findings.append(Finding.at_least(figure, ratio.ratio, " ×", goal))
        for way in (SHARED, GLOO):
            measured = statistics.median(times[way][size])
            error = predicted[way][size] / measured - 1
            cells = [_size(size), way, microseconds(times[way][size]), number(1e6 * predicted[way][size])]
            rows.append([*cells, f"{error:+.0%}", number(size / measured / 1e9)])
    columns = ["bytes", "way", "µs", "the cost model says", "error", "GB/s"]
    title = "All-reduce on 2 ranks, medians; the model has seen other sizes only"
    found.tables.append(Table(title, columns, rows))
    return found


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KB"
