"""`nanovllm bench parallel`: what its figures say of made-up times, the processes it starts, and the whole as a dry run."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pathlib
import time
from typing import Any

import psutil
import pytest
import torch

from nanovllm.cli.main import main
from nanovllm.distributed.cost_model import Link
from nanovllm.distributed.expert_parallel import ExpertPlacement
from nanovllm.distributed.groups import Grid, get_tp_group
from nanovllm.lab.bench.machine import Noise
from nanovllm.lab.bench.parallel import all_reduce, command, engines, pipeline, shuffle
from nanovllm.lab.bench.parallel.findings import Finding, Found, Part, Report, in_turn, slowest
from nanovllm.lab.bench.parts import part_names
from nanovllm.lab.bench.ranks import RankFailed, run_alone, run_ranks
from nanovllm.lab.bench.report import Context, Table


def reached(found: Found) -> list[bool | None]:
    return [finding.reached for finding in found.findings]


# ---------------------------------------------------------------- processes


def rank_and_sum(value: float) -> tuple[int, int, float]:
    group = get_tp_group()
    return os.getpid(), group.rank, float(group.all_reduce(torch.tensor([value * (1 + group.rank)])))


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
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed.*no such expert"):
        run_ranks(fail_on_rank_1, Grid(tensor=2))
    with pytest.raises(RankFailed, match="rank 0 failed: it died"):
        run_alone(os._exit, 3)
    with pytest.raises(RankFailed, match=r"has not ended after 0\.2 s"):
        run_ranks(time.sleep, Grid(), 600, timeout=0.2)
    assert not multiprocessing.active_children()


# ---------------------------------------------------------------- figures


def passages(*times: list[float], begin: float = 100.0, wait: float = 0.0) -> list[pipeline.Passage]:
    """What stages see that compute so long for each micro-batch, if sending takes no time; `wait` is lost at the end."""
    free = pipeline.with_free_lines([pipeline.Passage(0, 0, each) for each in times])
    return [pipeline.Passage(begin, begin + each.end + wait, each.computing) for each in free]


def by_stage(rounds: list[list[pipeline.Passage]]) -> list[list[pipeline.Passage]]:
    return [list(stage) for stage in zip(*rounds, strict=True)]


def test_the_bubble_of_stages_that_take_equally_long_is_the_theorys() -> None:
    equal = [passages([0.25] * count, [0.25] * count) for count in pipeline.MICRO_BATCHES]
    found = pipeline.report_bubbles(by_stage(equal), "steps", has_goal=True)
    assert reached(found) == [True] * 4
    assert [f.measured for f in found.findings] == pytest.approx([50, 100 / 3, 20, 100 / 9])
    assert [row[0] for row in found.tables[0].rows] == ["1", "2", "4", "8"]

    # Nothing overlaps, and half of the time is lost however many there are.
    lost = [passages([0.25] * n, [0.25] * n, wait=0.25 * (n - 1)) for n in pipeline.MICRO_BATCHES]
    found = pipeline.report_bubbles(by_stage(lost), "steps", has_goal=True)
    assert reached(found) == [True, False, False, False]
    assert [f.measured for f in found.findings] == pytest.approx([50] * 4)
    assert [row[-2:] for row in found.tables[0].rows] == [[row[-1]] * 2 for row in found.tables[0].rows]
    assert not pipeline.report_bubbles(by_stage(lost), "steps", has_goal=False).findings


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
        all_reduce.GLOO: {size: [2 * links[all_reduce.GLOO].message(size / 2)] * 3 for size in sizes},
    }
    found = all_reduce.report_all_reduces(seconds)
    assert reached(found) == [True, True, None]
    assert found.findings[0].measured == pytest.approx((120e-6 + 2048e-9) / (4e-6 + 2048 / 5e9))
    for way, by_size in found.data["predicted"].items():
        for size, predicted in by_size.items():
            assert predicted == pytest.approx(seconds[way][size][0], rel=1e-6)
    for size in sizes:  # one round of three went well
        seconds[all_reduce.SHARED][size] = [seconds[all_reduce.GLOO][size][0]] * 2 + [1e-6]
    assert reached(all_reduce.report_all_reduces(seconds)) == [False, False, None]


def test_bytes_of_a_shuffle_by_hand() -> None:
    placement = ExpertPlacement.initial(4, 2)  # rank 0 has the experts 0 and 1
    choices = torch.tensor([[0, 1], [1, 2], [3, 2]])
    assert shuffle.rows_to(choices, placement) == [2, 2]
    assert shuffle.shuffle_bytes(4, 3, hidden=8, itemsize=2, top_k=2) == 4 * (16 + 16) + 3 * 16


@pytest.mark.parametrize(
    ("shares", "right"),
    [([(340, 335), (330, 335), (340, 335)], [True, True]), ([(340, 1000), (330, 1000), (500, 1000)], [False, False])],
)
def test_weights_have_to_shrink_with_the_number_of_ranks(shares: list[tuple[int, int]], right: list[bool]) -> None:
    found = engines.report_weights({1: [(1000, 1000)], 3: shares})
    assert reached(found) == right
    assert len(found.tables[0].rows) == 4


def test_executors_are_compared_in_pairs() -> None:
    uni, mp = [1e-3, 2e-3, 9e-3], [1.5e-3, 2.5e-3, 9.5e-3]
    more, ratio = engines.report_executors({"m": {1: {"uni": uni, "mp": mp}}}).findings
    assert more.measured == pytest.approx(500) and ratio.measured == pytest.approx(1.25)


def test_small_things() -> None:
    assert in_turn(("a", "b"), 0) == ["a", "b"] and in_turn(("a", "b"), 1) == ["b", "a"]
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]
    assert part_names(["weights, orders", "weights"], command.PARTS) == ["orders", "weights"]
    assert part_names(None, command.PARTS) == list(command.PARTS)
    assert Finding.near("x", 51.1, " %", 50.0, 0.02).reached is False
    assert Finding.near("x", 50.9, " %", 50.0, 0.02).reached is True
    assert Finding.near("x", 7.0, "", 7.0, 0).reached is True


# ---------------------------------------------------------------- report


def report(dry_run: bool = False) -> Report:
    findings = [Finding.at_least("speed", 4.0, " ×", 5.0), Finding("cost", 12.0, " µs")]
    found = Found(findings, [Table("T", ["a", "b"], [["x", "1"]], 1)], {"seconds": [1.0]})
    parts = [
        Part("orders", "orders to the ranks", 3.0, Noise(0.01, 0.5, 1.0), found),
        Part("weights", "weights of a rank", 1.0, Noise(0, 0, 1), failure="Traceback\nOSError: no disk\n"),
    ]
    return Report(Context.now("nanovllm bench parallel", "m", "auto", 2, 4.0), parts, dry_run, command.TITLE)


def test_a_goal_that_is_missed_is_a_result_and_a_part_that_failed_is_none() -> None:
    goals, details, parts = report().tables()
    assert goals.rows == [["speed", "4.00 ×", "≥ 5.00 ×", "NO"], ["cost", "12.0 µs", "–", "–"]]
    assert details.title == "T" and parts.rows[1][:2] == ["weights of a rank", "OSError: no disk"]
    data = json.loads(report().as_json())
    assert data["failed"] is True and data["parts"][0]["data"] == {"seconds": [1.0]}
    assert data["parts"][0]["findings"][0] == {
        "figure": "speed", "measured": 4.0, "unit": " ×", "goal": "≥ 5.00 ×", "reached": False,
    }  # fmt: skip
    dry = report(dry_run=True)
    assert dry.tables()[0].rows[0][3] == "dry run" and "NOT A MEASUREMENT" in dry.lines()[0]


def test_a_part_that_fails_takes_no_other_along(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    def refuse(setting: Any) -> Found:
        raise RankFailed("rank 1 failed: it died")

    fine = Found([Finding("cost", 1.0, " s")])
    monkeypatch.setattr(command, "PARTS", {"a": ("part a", refuse), "b": ("part b", lambda setting: fine)})
    file = tmp_path / "found.json"
    assert main(["bench", "parallel", "--dry-run", "--json", str(file)]) == 1
    data = json.loads(file.read_text())
    assert [part["failure"] for part in data["parts"]] == ["rank 1 failed: it died", ""]
    captured = capsys.readouterr()
    assert "rank 1 failed: it died" in captured.err and "cost" in captured.out


@pytest.mark.parametrize(
    "names", ["weights,all-reduce,experts", pytest.param("orders,executor,pipeline,throughput", marks=pytest.mark.slow)]
)
def test_the_dry_run(names: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "found.json", tmp_path / "found.md"
    words = ["bench", "parallel", "--dry-run", "--repeats", "1", "--part", names]
    assert main([*words, "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    data = json.loads(files[0].read_text())
    assert data["dry_run"] is True and {part["name"] for part in data["parts"]} == set(names.split(","))
    findings = [finding for part in data["parts"] for finding in part["findings"]]
    assert all(math.isfinite(f["measured"]) and f["reached"] is None for f in findings)
    for finding in findings:  # what is counted is right however busy the machine is
        if "bytes" in finding["figure"] and finding["goal"]:
            assert f"{finding['measured']:.0f}" == finding["goal"]
        if finding["figure"].startswith("weights"):
            assert finding["measured"] == pytest.approx(50, abs=1)
    text = files[1].read_text()
    assert "NOT A MEASUREMENT" in text and all(f"| {f['figure']} |" in text for f in findings)
    assert "What parallelism costs" in capsys.readouterr().out
