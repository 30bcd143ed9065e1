"""A prediction is kept by the notebook, and shown beside the measurement."""

import ast
import json
import pathlib
from typing import Any

import pytest

from nanovllm.lab import course
from tests.house import ROOT

LECTURES = sorted((ROOT / "notebooks").glob("*.ipynb"), key=str)

QUESTION = "How many times as many tokens per second do 8 requests get as one?"


def test_a_prediction_is_shown_beside_the_formula_and_the_measurement(
    capsys: pytest.CaptureFixture[str],
) -> None:
    course.predict(QUESTION, 6, unit="times").reveal(4, formula=8)
    assert capsys.readouterr().out.splitlines() == [
        QUESTION,
        "You predict: 6 times",
        QUESTION,
        "   you predicted: 6 times, 1.5 times too high",
        "  by the formula: 8 times, 2 times too high",
        "        measured: 4 times",
    ]


def test_without_a_prediction_it_says_where_to_put_one(capsys: pytest.CaptureFixture[str]) -> None:
    prediction = course.predict("How long is a step?", ..., unit="ms")
    assert capsys.readouterr().out.endswith("You predict: put a number of ms in the place of ...\n")
    prediction.reveal(12_345.6)
    assert "you predicted: nothing yet\n        measured: 12,346 ms\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("guess", "measured", "said"),
    [
        (2.0, 4.0, "2, 2 times too low"),
        (4.1, 4.0, "4.1: right"),
        (0, 0, "0: right"),
        (0, 3, "0: no"),
        (1_499.6, 3_000, "1,500, 2 times too low"),
    ],
)
def test_how_far_a_prediction_is_off(
    guess: float, measured: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    course.predict("How many?", guess).reveal(measured)
    assert f"you predicted: {said}\n" in capsys.readouterr().out


def test_a_prediction_among_answers(capsys: pytest.CaptureFixture[str]) -> None:
    for answer, verdict in {"swap": "no", "recompute": "right"}.items():
        course.predict("Which wins?", answer, among=("swap", "recompute")).reveal("recompute")
        assert f"you predicted: {answer}: {verdict}\n" in capsys.readouterr().out


def test_a_prediction_is_a_number_or_one_of_the_answers() -> None:
    with pytest.raises(ValueError, match="a prediction is a number of ms, got '3 ms'"):
        course.predict("How long?", "3 ms", unit="ms")
    with pytest.raises(
        ValueError, match="a prediction is one of 'swap', 'recompute', got 'neither'"
    ):
        course.predict("Which wins?", "neither", among=("swap", "recompute"))


def test_an_answer_may_be_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    course.predict(QUESTION, 6, unit="times").reveal(4, simulated=True)
    assert capsys.readouterr().out.endswith("\n       simulated: 4 times\n")


# Functions of lectures that run the engine's scheduler on a clock or a device that is simulated.
SIMULATORS = {"run_on_gpus", "serve_on_gpus", "drive", "viz.simulate"}
# In 00: whether a simulation's schedule differs from the real one. In 20: how late this machine is
# with what the simulated GPUs do in time.
MEASURED_BESIDE = {"with_a_stand_in", "on_time"}


@pytest.mark.parametrize("path", LECTURES, ids=lambda path: path.name[:2])
def test_an_answer_from_a_simulator_says_so(path: pathlib.Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for code in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        calls = [each for each in ast.walk(ast.parse(code)) if isinstance(each, ast.Call)]
        if not SIMULATORS & {ast.unparse(call.func) for call in calls}:
            continue
        for call in calls:
            name, _, method = ast.unparse(call.func).partition(".")
            if method == "reveal" and name not in MEASURED_BESIDE:
                assert "simulated=True" in ast.unparse(call), f"{path.name}: {name}"


@pytest.mark.parametrize("path", LECTURES, ids=lambda path: path.name[:2])
def test_a_lecture_asks_before_the_cell_that_measures(path: pathlib.Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    asked: list[Any] = [
        (assignment.targets[0].id, assignment.value, i)
        for i, cell in enumerate(code)
        if "course.predict(" in cell
        for assignment in ast.parse(cell).body
        if isinstance(assignment, ast.Assign)
        and ast.unparse(assignment.value).startswith("course.predict(")
    ]
    assert len(asked) == sum(cell.count("course.predict(") for cell in code) >= 2
    for name, call, i in asked:
        assert ast.unparse(call.args[1]) == "...", f"{name}: the guess is the learner's"
        again = min((j for other, _, j in asked if other == name and j > i), default=len(code))
        assert any(f"{name}.reveal(" in cell for cell in code[i + 1 : again + 1]), (
            f"{name}: no later cell reveals it"
        )
