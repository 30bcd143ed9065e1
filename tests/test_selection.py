"""What a run may leave out."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests import selection
from tests.house import ROOMS, ROOT
from tests.stand_ins import set_constants


@pytest.fixture
def record(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An own record, on a machine that is not CI's."""
    path = tmp_path / "build" / "passed.json"
    set_constants(monkeypatch, selection, RECORD=path)
    monkeypatch.delenv("CI", raising=False)
    return path


def names(every: bool = False) -> list[str]:
    return [path.name for path in selection.lectures(every)]


def run(notebook: str, num_cells: int, failed: bool = False) -> None:
    """Report a run of a lecture to the plugin, with its last cell failed or not."""
    plugin = selection.PassedLectures()
    for number in range(num_cells):
        is_last = number == num_cells - 1
        report: Any = SimpleNamespace(
            nodeid=f"notebooks/{notebook}::Cell {number}",
            when="call",
            failed=failed and is_last,
            skipped=False,
        )
        plugin.pytest_runtest_logreport(report)
    plugin.pytest_sessionfinish(int(failed))


def test_packages_above_a_package() -> None:
    assert selection.packages_above(["cli"]) == ["cli"]
    # All but the one that imports nothing of the package.
    assert selection.packages_above(["data"]) == [room for room in ROOMS if room != "processes"]
    above = selection.packages_above(["core"])
    assert {"core", "engine", "server", "cli"} <= set(above)
    assert not {"data", "kv", "text", "ops"} & set(above)
    assert "tests/engine" in selection.test_paths(["core"])
    assert "tests/ops" not in selection.test_paths(["core"])
    with pytest.raises(SystemExit, match="no package 'schedular'"):
        selection.packages_above(["schedular"])


def test_make_runs_nothing_if_a_package_is_unknown() -> None:
    """Without paths, pytest would run all tests."""
    program = f"BIN={pathlib.Path(sys.executable).parent}"
    packages = ".venv/site/node_modules/.package-lock.json"  # npm's
    made = [f"-o{target}" for target in ("browser", "servers", packages)]
    command = ["make", *made, program, "test", "PACKAGE=schedular"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode != 0 and "there is no package 'schedular'" in run.stderr
    assert "Tests in" not in run.stdout


def test_a_lecture_that_passed_is_left_out_until_something_changes(
    record: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lecture = "21_process_groups.ipynb"
    cells = selection._num_cells(selection.NOTEBOOKS / lecture)
    assert lecture in names()
    run(lecture, cells)
    assert lecture not in names() and len(names()) == len(names(every=True)) - 1
    assert lecture in names(every=True)
    monkeypatch.setenv("CI", "true")
    assert lecture in names()
    monkeypatch.delenv("CI")
    run(lecture, cells, failed=True)
    assert lecture in names(), "it passed before, and has failed now"
    run(lecture, cells - 1)
    assert lecture in names(), "a cell did not run"
    run(lecture, cells)
    stored = json.loads(record.read_text())
    record.write_text(json.dumps({**stored, lecture: "of another module"}))
    assert lecture in names()


def test_a_digest_covers_modules_and_what_they_load(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = selection.NOTEBOOKS / "24_expert_parallel.ipynb"
    modules, scripts = selection._imported("import nanovllm\nfrom figures_parallel import arrow")
    assert "engine.llm" in modules, "nanovllm/__init__.py names it in a string"
    assert {path.name for path in scripts} >= {"figures_parallel.py"}
    digest = selection.lecture_digest.__wrapped__
    changed = tmp_path / "moe.py"
    changed.write_text("# edited\n")
    set_constants(monkeypatch, selection, ROOT=pathlib.Path("/"), ENVIRONMENT=())
    before = digest(notebook)
    assert before == digest(notebook)
    monkeypatch.setitem(selection.FILES, "distributed.expert_parallel", changed)
    assert digest(notebook) != before
