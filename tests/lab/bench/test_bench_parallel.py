"""`nanovllm bench parallel`: what its figures say of made-up times, the processes it starts, and
the whole as a dry run."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pathlib
import time

import psutil
import pytest
import torch

from nanovllm.cli.main import main
from nanovllm.distributed.cost_model import Link
from nanovllm.distributed.expert_parallel import ExpertPlacement
from nanovllm.distributed.groups import Grid, get_tp_group
from nanovllm.lab.bench import steps
from nanovllm.lab.bench.metrics import alternate, slowest
from nanovllm.lab.bench.parallel import all_reduce, engines, pipeline, shuffle
from nanovllm.lab.bench.report import number
from nanovllm.lab.processes import RankError, run_ranks
from tests.compiled import needs_compiled
from tests.lab.bench.rows import goals, measured, reached, rows_of

# ---------------------------------------------------------------- processes


def rank_and_sum(value: float) -> tuple[int, int, float]:
    group = get_tp_group()
    return (
        os.getpid(),
        group.rank,
        float(group.all_reduce(torch.tensor([value * (1 + group.rank)]))),
    )


def fail_on_rank_1() -> None:
    if get_tp_group().rank == 1:
        raise ValueError("no such expert")
    time.sleep(600)


def test_a_function_runs_on_every_rank_of_a_grid() -> None:
    first, second = run_ranks(rank_and_sum, Grid(tensor=2), 2.0)
    assert (first[1:], second[1:]) == ((0, 6.0), (1, 6.0))
    assert len({first[0], second[0], os.getpid()}) == 3
    assert not any(psutil.pid_exists(rank[0]) for rank in (first, second))


def test_a_rank_that_fails_ends_all_and_says_why() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*no such expert"):
        run_ranks(fail_on_rank_1, Grid(tensor=2))
    with pytest.raises(RankError, match="rank 0 died"):
        run_ranks(os._exit, Grid(), 3)
    with pytest.raises(RankError, match=r"has not ended after 0\.2 s"):
        run_ranks(time.sleep, Grid(), 600, timeout=0.2)
    assert not multiprocessing.active_children()


# ---------------------------------------------------------------- figures


def passages(
    *times: list[float], begin: float = 100.0, wait: float = 0.0
) -> list[pipeline.Passage]:
    """What stages see that compute so long for each micro-batch, if sending takes no time; `wait`
    is lost at the end."""
    free = pipeline.with_free_lines([pipeline.Passage(0, 0, each) for each in times])
    return [pipeline.Passage(begin, begin + each.end + wait, each.computing) for each in free]


def by_stage(rounds: list[list[pipeline.Passage]]) -> list[list[pipeline.Passage]]:
    return [list(stage) for stage in zip(*rounds, strict=True)]


def test_the_bubble_of_stages_that_take_equally_long_is_the_theorys() -> None:
    equal = [passages([0.25] * count, [0.25] * count) for count in pipeline.MICRO_BATCHES]
    found = list(pipeline.compare(by_stage(equal), "steps", has_goal=True))
    assert reached(found) == [True] * 4
    assert measured(found) == pytest.approx([50, 100 / 3, 20, 100 / 9])
    assert [row["micro-batches"] for row in rows_of(found)] == [1, 2, 4, 8]

    # Nothing overlaps, and half of the time is lost for any number of micro-batches.
    lost = [passages([0.25] * n, [0.25] * n, wait=0.25 * (n - 1)) for n in pipeline.MICRO_BATCHES]
    found = list(pipeline.compare(by_stage(lost), "steps", has_goal=True))
    assert reached(found) == [True, False, False, False]
    assert measured(found) == pytest.approx([50] * 4)
    assert all(
        row["bubble % with free transfers"] == pytest.approx([row["theory %"]])
        for row in rows_of(found)
    )
    assert not goals(list(pipeline.compare(by_stage(lost), "steps", has_goal=False)))


def test_steps_that_are_not_equally_long_cost_time_on_free_lines_too() -> None:
    first, second = passages([1.0, 3.0], [2.0, 2.0])
    assert (first.end, second.end) == (104, 106)  # the second one waits from 103 to 104
    assert pipeline.bubble([first, second]) == pytest.approx(1 - 8 / 12)
    assert pipeline.bubble(passages([2.0, 2.0], [2.0, 2.0])) == pytest.approx(1 / 3)
    assert pipeline.bubble(passages([2.0, 2.0], [3.0, 1.0])) == pytest.approx(1 / 3)
    assert pipeline.bubble(passages([1.0, 3.0], [3.0, 1.0])) == pytest.approx(1 - 8 / 10)


def test_all_reduces_are_compared_by_pairs_and_predicted_from_other_sizes() -> None:
    links = {all_reduce.SHARED: Link("", 4e-6, 5e9), all_reduce.GLOO: Link("", 60e-6, 1e9)}
    sizes = [*all_reduce.FITTED_SIZES, *all_reduce.GOAL_SIZES]
    seconds = {
        all_reduce.SHARED: {size: [links[all_reduce.SHARED].message(size)] * 3 for size in sizes},
        all_reduce.GLOO: {
            size: [2 * links[all_reduce.GLOO].message(size / 2)] * 3 for size in sizes
        },
    }
    found = list(all_reduce.compare(seconds))
    assert reached(found) == [True, True, None]
    assert measured(found)[0] == pytest.approx((120e-6 + 2048e-9) / (4e-6 + 2048 / 5e9))
    assert all(
        row["predicted µs"] == pytest.approx(row["µs"][0], rel=1e-6) for row in rows_of(found)
    )
    for size in sizes:  # one round of three went well
        seconds[all_reduce.SHARED][size] = [seconds[all_reduce.GLOO][size][0]] * 2 + [1e-6]
    assert reached(list(all_reduce.compare(seconds))) == [False, False, None]


def test_bytes_of_a_shuffle_by_hand() -> None:
    placement = ExpertPlacement.initial(4, 2)  # rank 0 has the experts 0 and 1
    choices = torch.tensor([[0, 1], [1, 2], [3, 2]])
    assert shuffle.rows_to(choices, placement) == [2, 2]
    assert shuffle.shuffle_bytes(4, 3, hidden=8, itemsize=2, top_k=2) == 4 * (16 + 16) + 3 * 16


@pytest.mark.parametrize(
    ("shares", "right"),
    [
        ([(340, 335), (330, 335), (340, 335)], [True, True]),
        ([(340, 1000), (330, 1000), (500, 1000)], [False, False]),
    ],
)
def test_weights_have_to_shrink_with_the_number_of_ranks(
    shares: list[tuple[int, int]], right: list[bool]
) -> None:
    found = list(engines.compare_weights({1: [(1000, 1000)], 3: shares}))
    assert reached(found) == right and len(rows_of(found)) == 4


def test_executors_are_compared_in_pairs() -> None:
    uni, mp = [1e-3, 2e-3, 9e-3], [1.5e-3, 2.5e-3, 9.5e-3]
    found = list(steps.compare_executors("m", {1: {"uni": uni, "mp": mp}}))
    assert measured(found) == pytest.approx([500, 1.25])


def test_small_things() -> None:
    done: list[str] = []
    works = {name: lambda name=name: done.append(name) or len(done) for name in "ab"}
    assert alternate(works, rounds=2) == {"a": [4, 5], "b": [3, 6]} and "".join(done) == "abbaab"
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param("weights,all-reduce,experts", marks=needs_compiled),
        pytest.param("orders,executor,pipeline,throughput", marks=pytest.mark.nightly),
    ],
)
def test_the_dry_run(
    names: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], forked_parts: None
) -> None:
    files = tmp_path / "found.json", tmp_path / "found.md"
    words = ["bench", "parallel", "--dry-run", "--repeats", "1", "--part", names]
    assert main([*words, "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    data = json.loads(files[0].read_text())
    assert data["dry_run"] is True and len(data["tables"]["Parts"]) == len(names.split(","))
    found = data["tables"]["Figures and goals"]
    assert all(math.isfinite(row["measured"]) and row["reached"] is None for row in found)
    for row in found:  # what is counted is right however busy the machine is
        if "bytes" in row["figure"]:
            assert f"= {number(row['measured'])}" == row["goal"]
        if row["figure"].startswith("weights"):
            assert row["measured"] == pytest.approx(50, abs=1)
    text = files[1].read_text()
    assert "NOT A MEASUREMENT" in text and all(f"| {row['figure']} |" in text for row in found)
    assert "Figures and goals" in capsys.readouterr().out
