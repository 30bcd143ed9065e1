"""The sum over two ranks: in shared memory, by gloo, and as the cost model predicts it."""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from nanovllm.distributed.cost_model import fit, one_shot_all_reduce, ring_all_reduce
from nanovllm.distributed.groups import Grid, get_tp_group
from nanovllm.lab.bench.metrics import alternate, slowest, timed
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, goal, paired
from nanovllm.lab.processes import run_ranks

Times = dict[str, dict[int, list[float]]]

SHARED = "shared memory"
GLOO = "gloo"
GOAL_SIZES = {2048: 5.0, 65536: 5.0, 1 << 20: None}
# The cost model is fitted to these sizes, and predicts the others.
FITTED_SIZES = (1 << 10, 1 << 13, 1 << 15, 1 << 18, 1 << 19, 1 << 21)


def time_all_reduces(sizes: Sequence[int], calls: int, rounds: int) -> Times:
    """On each rank: seconds per call in each round, by way and by size in bytes; the ways take
    turns.

    Raises:
        RuntimeError: this machine has no all-reduce in shared memory.
    """
    group = get_tp_group()
    shared = group.shared
    if shared is None:
        raise RuntimeError(
            "there is no all-reduce in shared memory here: its functions are not compiled"
        )

    def run(way: str, size: int) -> float:
        x = torch.zeros(size // 4)
        count = calls if size <= 1 << 16 else max(2, calls // 5)
        group.shared = shared if way == SHARED else None
        group.all_reduce(x)  # the ranks begin together
        return timed(*[partial(group.all_reduce, x)] * count) / count

    # The ways are neighbours in time, since they are compared pair by pair.
    times = alternate(
        {(way, size): partial(run, way, size) for size in sizes for way in (SHARED, GLOO)}, rounds
    )
    group.shared = shared
    return {way: {size: times[way, size] for size in sizes} for way in (SHARED, GLOO)}


def predict(times: Times, world_size: int) -> Times:
    """Seconds that the cost model predicts for the sizes of the goals, if it knows those of the
    others.

    Shared memory sends one message of everything; gloo goes around a ring, `2 (n - 1)` messages of
    an n-th each."""
    found: Times = {}
    for way, parts in ((SHARED, 1), (GLOO, 2 * (world_size - 1))):
        cost = one_shot_all_reduce if way == SHARED else ring_all_reduce
        lengths = [
            size * (world_size - 1) if way == SHARED else size / world_size for size in FITTED_SIZES
        ]
        link = fit(
            way, lengths, [statistics.median(times[way][size]) / parts for size in FITTED_SIZES]
        )
        found[way] = {size: [cost(link, world_size, size)] for size in GOAL_SIZES}
    return found


def all_reduces(setting: Setting) -> Iterator[Row]:
    """The sum over two ranks, which every layer needs twice."""
    calls, rounds = (2, 1) if setting.dry_run else (50, 5 * setting.repeats)
    sizes = sorted([*FITTED_SIZES, *GOAL_SIZES])
    ranks = run_ranks(time_all_reduces, Grid(tensor=2), sizes, calls, rounds)
    yield from compare(
        {w: {s: slowest([rank[w][s] for rank in ranks]) for s in sizes} for w in (SHARED, GLOO)}
    )


def compare(times: Times) -> Iterator[Row]:
    """Compare the ways round by round, and each with its prediction; see `time_all_reduces`."""
    predicted = predict(times, 2)
    for size, wanted in GOAL_SIZES.items():
        name = f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
        ratio = paired(times[SHARED][size], times[GLOO][size])
        figure = f"all-reduce of {name} on 2 ranks: gloo time ÷ shared-memory time"
        yield goal(figure, ratio["median"], "×", at_least=wanted)
        for way in (SHARED, GLOO):
            (expected,), measured = predicted[way][size], statistics.median(times[way][size])
            yield {
                "table": "All-reduce on 2 ranks, medians; the cost model is fitted to other sizes",
                "bytes": name,
                "way": way,
                "µs": [1e6 * seconds for seconds in times[way][size]],
                "predicted µs": 1e6 * expected,
                "error": f"{expected / measured - 1:+.0%}",
                "GB/s": size / measured / 1e9,
            }
