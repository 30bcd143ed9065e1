"""The highest load that a fleet sustains: it depends neither on the number of requests, nor on how
many of them fit at once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from nanovllm.simulate.report import Summary
from nanovllm.simulate.simulation import find_load, simulate

LOAD = {"random_input_len": 1500, "random_output_len": 2, "goodput": "ttft:400"}
# Their objectives say nothing about the queue.
ANY_QUEUE = LOAD | {"goodput": "tpot:500"}
SESSIONS = LOAD | {"num_turns": 2, "turn_interval": 2.0}
# Requests that wait for a running slot, or for decode engines after their first token.
SLOTS = {"random_input_len": 200, "random_output_len": 10, "max_num_seqs": 4, "goodput": "tpot:500"}
DECODES: dict[str, object] = {
    **{"random_input_len": 100, "random_output_len": 20, "goodput": "ttft:2000"},
    **{"prefill": 1, "decode": 1, "decode_config": '{"max_num_seqs": 4}'},
}


def rate_of(**settings: object) -> float:
    rate = find_load(settings)["request_rate"]
    assert isinstance(rate, float)
    return rate


def capacity_of(**settings: object) -> float:
    """Requests per second of a fleet that gets more than it can serve. With all of them at once,
    they would begin and end together."""
    rate = 1e6
    for factor in (1.3, 1.0):
        busy = simulate({**settings, "request_rate": rate, "num_prompts": 3000})
        throughput = busy["request_throughput"]
        assert isinstance(throughput, float)
        rate = factor * throughput
    return rate


def notes_of(summary: Summary) -> str:
    return "; ".join(summary.get("notes", []))  # type: ignore[call-overload]


@pytest.mark.parametrize("settings", [LOAD, ANY_QUEUE, SESSIONS])
def test_the_rate_does_not_depend_on_the_number_of_prompts(settings: dict[str, object]) -> None:
    few, many = (rate_of(**settings, num_prompts=number) for number in (20, 1000))
    assert few == pytest.approx(many, rel=0.1)
    # Sessions that all begin together lose their cached prompts.
    assert settings is SESSIONS or few < 1.05 * capacity_of(**settings)


@pytest.mark.parametrize("settings", [SLOTS, DECODES])
def test_a_queue_does_not_grow_whatever_the_objectives_say_about_it(
    settings: dict[str, object],
) -> None:
    capacity = capacity_of(**settings)
    rate = rate_of(**settings)
    assert 0.93 * capacity < rate < 1.05 * capacity


def test_an_objective_that_allows_for_a_queue_does_not_ask_for_one() -> None:
    rate = rate_of(**SLOTS)
    assert rate == pytest.approx(rate_of(**SLOTS | {"goodput": ["ttft:10000", "tpot:500"]}), 0.05)


@pytest.mark.parametrize("settings", [ANY_QUEUE, SLOTS, DECODES])
def test_requests_take_longer_and_longer_beyond_the_capacity(settings: dict[str, object]) -> None:
    def growth(share: float) -> object:
        rate = share * capacity
        return simulate({**settings, "burstiness": math.inf, "request_rate": rate})["e2el_growth"]

    capacity = capacity_of(**settings)
    assert growth(0.7) == pytest.approx(0, abs=0.001)
    assert growth(1.2) == pytest.approx(0.2, abs=0.02)
    assert simulate({**settings, "num_prompts": 1})["e2el_growth"] == 0


def test_four_engines_sustain_four_times_the_rate() -> None:
    four = rate_of(**LOAD, replicas=4, routing_policy="round_robin", num_prompts=20)
    assert four == pytest.approx(4 * rate_of(**LOAD), rel=0.2)


def test_long_answers_are_no_queue() -> None:
    """A request takes 14 s. 16 of them run, and hardly any waits."""
    long = {"random_input_len": 64, "random_output_len": 2000, "max_num_seqs": 16}
    rate = rate_of(**long, goodput="ttft:8000", num_prompts=20)
    assert 0.7 * capacity_of(**long) < rate < 1.1 * capacity_of(**long)


def test_a_note_has_the_number_of_prompts_that_it_took() -> None:
    found = find_load({**LOAD, "num_prompts": 50})
    assert f"--num-prompts {found['completed']}: 50 are too few" in notes_of(found)
    rate = found["request_rate"]
    same = simulate({**LOAD, "num_prompts": found["completed"], "request_rate": rate})
    assert found == {"request_rate": rate, **same, "notes": found["notes"]}
    assert "notes" not in find_load({**LOAD, "num_prompts": 1000})


def file_of(path: Path, times: list[float]) -> str:
    rows = [{"timestamp": 1000 * t, "input_length": 1500, "output_length": 2} for t in times]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_a_short_file_has_a_lower_bound(tmp_path: Path) -> None:
    path = file_of(tmp_path / "short.jsonl", [i**1.1 for i in range(30)])
    found = find_load({"workload": path, "goodput": "ttft:1000"})
    took = found["mean_e2el_ms"]
    speedup = found["speedup"]
    assert isinstance(took, float) and isinstance(speedup, float)
    assert 20 * took <= 1000 * 29**1.1 / speedup < 30 * took
    assert "the file is too short to tell" in notes_of(found)


def test_the_speedup_of_a_long_file_is_that_of_the_rate(tmp_path: Path) -> None:
    path = file_of(tmp_path / "long.jsonl", [i / 10 for i in range(1000)])
    found = find_load({"workload": path, "goodput": "ttft:400"})
    speedup = found["speedup"]
    assert isinstance(speedup, float) and "notes" not in found
    capacity = capacity_of(**LOAD)
    assert 0.8 * capacity < 10 * speedup < 1.05 * capacity
    any_queue = find_load({"workload": path, "goodput": "tpot:500"})
    (note,) = any_queue["notes"]  # type: ignore[misc]
    assert note == "a higher speedup keeps the objectives, too, but requests take longer and longer"
    assert speedup <= any_queue["speedup"] < 0.105 * capacity  # type: ignore[operator]
