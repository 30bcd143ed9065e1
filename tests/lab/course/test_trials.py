"""Trials: which calls have no end, and tests that take long although each call ends."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from nanovllm.lab.course.notebook import CourseError
from nanovllm.lab.course.trials import IMPORTS, Outcome, Trials
from nanovllm.lab.course.workbook import explain

LOOP = """
def inner(n):
    return sum(range(n))

def outer():
    while True:
        inner(1000)
"""
SEARCH = """
import time
from hypothesis import given, settings, strategies as st
from package import code

@settings(deadline=None, max_examples=40, database=None)
@given(st.lists(st.integers(0, 1 << 30), min_size=30))
def test_all(numbers):
    assert code.slow(numbers)
"""
SLOW = """
import time

def slow(numbers):
    end = time.process_time() + 0.06
    while time.process_time() < end:
        pass
    return {}
"""


def try_out(folder: Path, code: str, test: str, limit: float, imports: float = IMPORTS) -> Outcome:
    (folder / "package").mkdir()
    (folder / "package/__init__.py").touch()
    (folder / "package/code.py").write_text(code)
    (folder / "tests").mkdir()
    (folder / "tests/test_it.py").write_text(test)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    with Trials(limit, imports) as trials:
        return trials.run_tests(folder, ["tests/test_it.py"])


def test_the_loop_is_named_and_not_what_it_calls(tmp_path: Path) -> None:
    test = "from package import code\ndef test_it(): code.outer()\n"
    outcome = try_out(tmp_path, LOOP, test, limit=1)
    assert outcome.code
    assert [place.function for place in outcome.stuck] == ["outer", "test_it"]
    said = explain(outcome, ["Class.outer"])
    assert "outer was running, package/code.py:" in said and "Is its loop endless?" in said
    assert "It waits for what a function of yours does" in explain(outcome, ["inner"])


def test_a_search_may_take_longer_than_a_call(tmp_path: Path) -> None:
    outcome = try_out(tmp_path, SLOW.format("True"), SEARCH, limit=2)
    assert (outcome.code, outcome.stuck) == (0, ()), outcome.text


def test_the_smallest_example_is_not_looked_for_until_the_time_is_over(tmp_path: Path) -> None:
    outcome = try_out(tmp_path, SLOW.format("sum(numbers) < 1 << 29"), SEARCH, limit=2)
    assert outcome.code and not outcome.stuck and not outcome.late
    assert explain(outcome).startswith("wrong\n") and "code.slow(" in explain(outcome)


WAITS = """
import subprocess, sys, time
def test_it():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("other", "w").write(str(other.pid))
    {}
"""


def test_what_a_test_has_started_ends_with_it(tmp_path: Path) -> None:
    outcome = try_out(tmp_path, "", WAITS.format("while True: pass"), limit=1)
    assert outcome.stuck
    _await_end(int((tmp_path / "other").read_text()))


def test_a_test_may_wait_for_longer_than_a_call(tmp_path: Path) -> None:
    outcome = try_out(tmp_path, "", WAITS.format("time.sleep(2)"), limit=0.5)
    assert outcome.code == 0, outcome.text
    _await_end(int((tmp_path / "other").read_text()))


def test_nothing_runs_after_trials_that_are_interrupted(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS.format("time.sleep(600)") + "test_it()\n")
    with ThreadPoolExecutor(1) as pool:
        with Trials(limit=100) as trials:
            run = pool.submit(trials.run, tmp_path, "waits")
            while not (pid := tmp_path / "other").exists() or not pid.read_text():
                assert not run.done()
        with pytest.raises(CourseError, match="was ended from outside"):
            run.result()
    _await_end(int(pid.read_text()))


def _await_end(pid: int) -> None:
    """Return when a process has ended; it may become a zombie."""
    deadline = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "it still runs"
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (SLOW.format("True"), SEARCH.replace("40", "4000")),
        ("import itertools", "from package.code import *\ndef test(): any(itertools.repeat(0))"),
    ],
    ids=["many calls", "a call that cannot be interrupted"],
)
def test_all_ends_when_the_total_time_is_over(code: str, test: str, tmp_path: Path) -> None:
    outcome = try_out(tmp_path, code, test, limit=0.5, imports=4)
    assert outcome.code and outcome.late, outcome.text
    assert explain(outcome).startswith("not finished: ") and "\n" not in explain(outcome)
