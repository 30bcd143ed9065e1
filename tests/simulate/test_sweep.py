"""Sweeps: combinations, processes, the frontier, and the highest load."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from nanovllm.data.errors import UsageError
from nanovllm.simulate.report import Summary
from nanovllm.simulate.sweep import (
    TPOT,
    TTFT,
    Settings,
    combinations,
    highest_load,
    mark_frontier,
    run_all,
)
from tests.server_process import are_gone, wait_until


def product(point: Settings) -> Summary:
    """A simulation for tests."""
    if point["a"] == 13:
        raise UsageError("13 is impossible")
    return {"product": point["a"] * point["b"]}


def test_all_combinations() -> None:
    points = combinations({"a": [1, 2], "b": ["x", "y"]})
    assert points == [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y")]
    assert combinations({}) == [{}]


@pytest.mark.parametrize("num_cores", [1, 2])
def test_results_do_not_depend_on_the_number_of_processes(num_cores: int) -> None:
    points = combinations({"a": [1, 13, 3], "b": [5, 7]})
    impossible = {"error": "13 is impossible"}
    expected = [{"product": 5}, {"product": 7}, impossible, impossible]
    expected += [{"product": 15}, {"product": 21}]
    assert run_all(product, points, num_processes=num_cores) == expected


def test_a_sweep_of_impossible_points_is_an_error() -> None:
    with pytest.raises(UsageError, match="13 is impossible"):
        run_all(product, [{"a": 13, "b": 1}] * 2, num_processes=1)


def test_the_frontier_has_the_points_that_no_other_one_beats() -> None:
    times = [(1, 9), (2, 8), (2, 7), (3, 7), (4, 1), (5, 2), (1, 9.5), (2, 7)]
    summaries = [served(9, *each) for each in times]
    summaries.append({"error": "impossible"})
    mark_frontier(summaries)
    marks = [summary["on_frontier"] for summary in summaries]
    assert marks == [True, False, True, False, True, False, False, True, False]


def served(completed: int, ttft: float, tpot: float, **more: int) -> Summary:
    """A summary of nine requests."""
    outcomes = {"length": completed, "rejected": 9 - completed}
    return {"completed": completed, "outcomes": outcomes, TTFT: ttft, TPOT: tpot, **more}


def test_fast_answers_to_fewer_requests_are_not_on_the_frontier() -> None:
    summaries = [served(4, 1, 1), served(9, 2, 9), served(9, 3, 3), served(9, 1, 1, num_cut=1)]
    summaries += [served(0, 0, 0), served(9, 4, 4)]
    mark_frontier(summaries)
    marks = [summary["on_frontier"] for summary in summaries]
    assert marks == [False, True, True, False, False, False]
    # Where every row has lost requests, those with the fewest are compared.
    summaries = [served(4, 1, 1), served(7, 2, 2), served(7, 3, 1), served(6, 1, 1)]
    mark_frontier(summaries)
    assert [summary["on_frontier"] for summary in summaries] == [False, True, True, False]


@pytest.mark.parametrize("limit", [0.037, 1.0, 1.5, 100.0])
def test_the_highest_load_is_found_to_within_two_percent(limit: float) -> None:
    def simulate(load: float) -> Summary | None:
        return {"load": load} if load <= limit else None

    load, summary = highest_load(simulate, start=1.0)
    assert summary["load"] == load
    assert load <= limit < load * 1.02


@pytest.mark.parametrize(("summary", "answer"), [({}, "always"), (None, "never")])
def test_objectives_that_no_load_decides_are_an_error(summary: Summary | None, answer: str) -> None:
    with pytest.raises(UsageError, match=f"are {answer} kept"):
        highest_load(lambda load: summary, 1.0)


# Each point takes longer than a test.
LONG_SWEEP = [
    *("--num-prompts", "10000000", "--request-rate", "30"),
    *("--sweep", "max-num-seqs=8,16,32,64", "--processes", "2"),
]


@pytest.mark.started
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_processes_of_a_sweep_end_with_it(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "nanovllm", "simulate", *LONG_SWEEP],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as sweep:
        parent = psutil.Process(sweep.pid)
        workers: list[psutil.Process] = []

        def compute() -> bool:
            workers[:] = [each for each in parent.children() if "spawn_main" in str(each.cmdline())]
            return len(workers) == 2 and all(sum(each.cpu_times()[:2]) > 1 for each in workers)

        try:
            wait_until(compute, seconds=120)
            sweep.send_signal(number)
            wait_until(lambda: are_gone(workers), what="the workers have ended")
            _, errors = sweep.communicate(timeout=60)
        finally:
            sweep.kill()
    if number == signal.SIGINT:
        assert (sweep.returncode, errors) == (128 + signal.SIGINT, "")


def end_early(settings: Settings) -> Summary:
    os._exit(1)


@pytest.mark.started
def test_a_process_that_ends_early_is_reported_in_a_line() -> None:
    with pytest.raises(UsageError, match="a process of --sweep has ended early"):
        run_all(end_early, [{}, {}], num_processes=2)
