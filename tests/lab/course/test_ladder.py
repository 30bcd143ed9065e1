"""The ladder: one workload on the engine of each lecture."""

from __future__ import annotations

import pathlib
import re

import pytest

from nanovllm.lab.bench.gpu.plan import STEP
from nanovllm.lab.bench.ladder import TABLE, measure, rung_of, rungs
from nanovllm.lab.bench.local import TINY, write_checkpoint
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.steps import HOST_TIME
from nanovllm.lab.course.build import find_lectures
from nanovllm.lab.course.ladder import DecodeStep, climb, decode_steps, notes
from tests.examples import by_night
from tests.house import ROOT

PAGE = f"""    nanovllm bench ladder --markdown figures/ladder.md

- 2026-11-29 18:30 UTC, Some Processor, 2 cores (2 used)

**{TABLE}**

| lecture | engine | tokens/s | ÷ transformers |
| ---: | :--- | ---: | ---: |
|  | transformers | 40 (39 – 41) | 1.00 |
| 11 | KV cache | 1,050 (900 – 1,100) | 26 |
|  | vLLM | 300 | 7.5 |
"""

STEPS_PAGE = f"""**{STEP}**

| shape | engine | running | step ms | host gap % |
| :--- | :--- | ---: | ---: | ---: |
| Llama-3.2-1B | nanovllm, graphs | 256 | 5 | 40 |
| Llama-3.2-1B | nanovllm, eager | 256 | 10 | 70 |
| Llama-3.1-8B | nanovllm, graphs | 256 | 14 | 3 |
"""
HOST_PAGE = f"""**{HOST_TIME}**

| running | scheduler |
| ---: | ---: |
| 256 | 500 (480 – 510) |
"""


@pytest.fixture(scope="module")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny model whose context holds the workload."""
    folder = tmp_path_factory.mktemp("roomy")
    return write_checkpoint(folder, TINY | {"max_position_embeddings": 2048})


def test_every_lecture_has_a_rung() -> None:
    numbers = [int(path.name[:2]) for path in find_lectures(ROOT, [])]
    found = {number: rung_of(number) for number in numbers if number >= 10}
    assert all(0 < rung.lecture <= number for number, rung in found.items())
    assert found[10].name == "each token computes the whole text again"
    assert found[11].name == "KV cache"
    assert found[12].name == "paged KV cache"
    assert found[23] == found[15], "the lecture adds nothing that the workload can show"
    assert found[42].options["speculative_config"]
    assert {rung.lecture for rung in rungs()} <= {0, *numbers}


def test_now_and_recorded(roomy_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "ladder.md").write_text(PAGE)
    ladder = climb(11, tmp_path, model=str(roomy_model))
    steps = {step.name: step for step in ladder.steps}
    assert [name for name, step in steps.items() if step.now] == ["transformers", "KV cache"]
    assert steps["KV cache"].recorded == 1050
    assert (steps["vLLM"].recorded, steps["vLLM"].lecture) == (300, 0)
    assert not any(step.on_gpu for step in ladder.steps)
    text = repr(ladder)
    assert re.search(r"^\| 11 \| \*\*KV cache\*\* \| \S+ \| 1050 \| never \|$", text, re.MULTILINE)
    assert "| 43 | asynchronous scheduling | later | never | never |" in text
    assert "2026-11-29, Some Processor" in text and "`make gpu`" in text
    (bars,) = ladder.draw().axes[0].containers[:1]
    assert bars[0].get_width() == 40


def test_a_decode_step_is_divided(tmp_path: pathlib.Path) -> None:
    assert decode_steps(tmp_path) == []
    (tmp_path / "gpu.md").write_text(STEPS_PAGE)
    eager, graphs = decode_steps(tmp_path)
    # With graphs the device works 3 of 5 ms; without them it waits 5 ms longer.
    assert graphs == DecodeStep(256, True, device=3, launches=0, scheduler=None, rest=2)
    assert eager == DecodeStep(256, False, device=3, launches=5, scheduler=None, rest=2)
    (tmp_path / "ladder_gpu.md").write_text(HOST_PAGE)
    eager, graphs = decode_steps(tmp_path)
    assert graphs == DecodeStep(256, True, device=3, launches=0, scheduler=0.5, rest=1.5)
    assert eager == DecodeStep(256, False, device=3, launches=5, scheduler=0.5, rest=1.5)


def test_what_was_never_recorded_names_its_command(tmp_path: pathlib.Path) -> None:
    never, on_gpu = notes(tmp_path, {})
    assert "never; `nanovllm bench ladder --markdown figures/ladder.md`" in never
    assert "`make gpu`" in on_gpu


@pytest.mark.parametrize("rung", by_night(rungs()), ids=lambda rung: rung.name)
def test_rungs(rung, tiny_model: pathlib.Path) -> None:
    setting = Setting(dry_run=True, folder=str(tiny_model), threads=1, repeats=1)
    (row,) = measure([rung], setting)
    assert row["tokens/s"][0] > 0
