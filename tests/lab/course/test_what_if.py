"""Lecture 51: the solutions of its exercises are right, and answers that miss the point are not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from nanovllm.lab.course import Exercise
from tests.house import ROOT

CELLS = json.loads((ROOT / "notebooks" / "51_what_if.ipynb").read_text(encoding="utf-8"))["cells"]
SOURCES = ["".join(cell["source"]) for cell in CELLS]
SOLUTION = re.compile(r"<summary>Solution</summary>\s*```python\n(.*?)```", re.DOTALL)
# What the exercises use of the lecture, besides what it exports.
SETTING = ("import dataclasses", "def make_config", "def dense_seconds", "llama_cost = ")
FIRST = next(i for i, source in enumerate(SOURCES) if "**Exercise 1." in source)
SOLUTIONS = [found[1] for source in SOURCES[FIRST:] if (found := SOLUTION.search(source))]


@pytest.fixture(scope="module")
def lecture() -> dict[str, Any]:
    """The names of the lecture after its exercises, none of which is solved."""
    names: dict[str, Any] = {"__name__": "lecture_51"}
    for number, (cell, source) in enumerate(zip(CELLS, SOURCES, strict=True)):
        is_needed = source.startswith("#| ") or number > FIRST or any(s in source for s in SETTING)
        is_left_out = "where_you_are" in source or "climb(" in source  # the map, and the ladder
        if cell["cell_type"] == "code" and is_needed and not is_left_out:
            exec(compile(source, f"cell {number}", "exec"), names)
    return names


def answer_of(lecture: dict[str, Any], number: int) -> Any:
    """What the solution of an exercise defines."""
    names = dict(lecture)
    before = names.keys() | {"isqrt"}
    replaced = {name for name in re.findall(r"^def (\w+)", SOLUTIONS[number - 1], re.MULTILINE)}
    exec(SOLUTIONS[number - 1], names)
    (name,) = replaced & before
    return names[name]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_solution_is_right(
    lecture: dict[str, Any], number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    exercise = lecture[f"exercise_{number}"]
    assert isinstance(exercise, Exercise) and len(SOLUTIONS) == 3
    assert exercise.check(answer_of(lecture, number)), capsys.readouterr().out


def test_floating_point_is_not_exact_enough(lecture: dict[str, Any]) -> None:
    def by_float(time: int, first: int, growth: int) -> int:
        if time <= 0 or growth == 0:
            return max(0, -(-time // first))
        linear = 2 * first - growth
        root = (linear * linear + 8 * growth * time) ** 0.5
        number = int((root - linear) / (2 * growth))
        return number + (number * first + growth * (number * (number - 1) // 2) < time)

    assert not lecture["exercise_1"].check(by_float)


def test_a_router_that_ignores_prefixes_or_sends_all_to_one_engine_is_not_enough(
    lecture: dict[str, Any],
) -> None:
    check = lecture["exercise_3"].check
    assert not check(lambda ids, loads: loads.index(min(loads)))
    assert not check(lambda ids, loads: ids[0] % len(loads))
