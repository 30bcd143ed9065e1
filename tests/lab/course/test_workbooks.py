"""Workbooks: what is blank, what their check says, and an engine with the learner's own methods."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm.lab.course.__main__ import main
from nanovllm.lab.course.build import build, find_lectures, read_lectures
from nanovllm.lab.course.notebook import CourseError, source_of
from nanovllm.lab.course.trials import Outcome, Place
from nanovllm.lab.course.workbook import Workbook, explain
from tests.examples import by_night
from tests.house import ROOT
from tests.lab.course.test_course_build import OPENING, TITLE, make_course

LECTURES = {path.stem: path for path in find_lectures(ROOT)}
READY = [name for name in LECTURES if name != "00_tour"]  # all that build modules
# By day one of them; at night all.
CHECKED = [
    name if name[:2] == "12" else pytest.param(name, marks=pytest.mark.nightly) for name in READY
]
# By day every fourth.
BUILT = [*READY[::4], *by_night(name for name in READY if name not in READY[::4])]
WRONG = "\n        return self.nothing"
BLANK = "\n        raise NotImplementedError("


def check(name: str, data: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `check` prints about a notebook; "" if all is right."""
    file = folder / "mine.ipynb"
    file.write_text(json.dumps(data))
    code = main(["--root", str(ROOT), "check", name, str(file)])
    said = capsys.readouterr()
    verdicts = said.out.splitlines()
    assert (code == 0) == bool(verdicts and all(line.endswith(": right") for line in verdicts))
    return said.out + said.err if code else ""


def changed(data: dict[str, Any], old: str, new: str, count: int = 1) -> dict[str, Any]:
    """The notebook with other text in so many of its cells."""
    text = json.dumps(data)
    before, after = json.dumps(old)[1:-1], json.dumps(new)[1:-1]
    assert text.count(before) == count, (old, text.count(before))
    return json.loads(text.replace(before, after))


@pytest.mark.parametrize("name", BUILT)
def test_a_workbook_is_blank_and_the_solved_one_builds_the_engine(name: str) -> None:
    original = Workbook(ROOT, LECTURES[name])
    data = original.to_fill_in()
    assert len(original.blanks) >= 2
    text = "\n".join("".join(cell["source"]) for cell in data["cells"])
    assert "<summary>Solution" not in text and not any(
        cell.get("outputs") for cell in data["cells"]
    )
    assert all(f"`{blank}`" in "".join(data["cells"][1]["source"]) for blank in original.blanks)
    learners = Workbook(ROOT, LECTURES[name], data)
    assert learners.tests == original.tests
    for blank, piece in learners.blanks.items():
        assert ast.get_docstring(piece.node) and len(piece.node.body) == 2  # type: ignore[arg-type, union-attr]
        assert text.count(f'raise NotImplementedError("write {blank}")') == 1
    solved = learners.replace({blank: piece.lines for blank, piece in original.blanks.items()})
    for module in build(ROOT, read_lectures(ROOT, [name], {LECTURES[name]: solved})):
        assert module.text == (ROOT / module.path).read_text(encoding="utf-8")


def test_a_workbook_that_was_not_written_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--root", str(ROOT), "check", "13", str(tmp_path / "mine.ipynb")]) == 1
    assert (
        "mine.ipynb: there is no such notebook; `workbook 13` writes 13_scheduler_workbook.ipynb"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["workbook", "check"])
def test_a_lecture_without_modules_has_no_workbook(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, message in (
        ("00", "00_tour builds no module, and has no workbook"),
        ("1", "`1` is more than one lecture"),
    ):
        assert main(["--root", str(ROOT), command, name]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", CHECKED)
def test_a_blank_workbook_is_not_right_and_the_lecture_is(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Workbook(ROOT, LECTURES[name])
    said = check(name, original.to_fill_in(), tmp_path, capsys)
    assert said.splitlines() == [f"{blank}: not written yet" for blank in original.blanks]
    assert not check(name, original.lecture.data, tmp_path, capsys)


def test_a_wrong_body_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Workbook(ROOT, LECTURES["11_paged_memory"]).to_fill_in()
    data = changed(data, BLANK + '"write BlockPool.touch")', WRONG)
    said = check("11", data, tmp_path, capsys)
    assert "BlockPool.free_blocks: not written yet\nBlockPool.touch: wrong\n___" in said
    assert (
        "nanovllm/core/block_pool.py:" in said and ": in touch\n    return self.nothing\n" in said
    )
    assert "E   AttributeError: 'BlockPool' object has no attribute 'nothing'" in said


def test_an_endless_loop_ends_and_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Workbook(ROOT, LECTURES["12_block_tables"])
    data = original.to_fill_in()
    blank = BLANK + '"write KVCacheManager.allocate_slots")'
    data = changed(data, blank, "\n        while request:\n            num_tokens += 1")
    file = tmp_path / "mine.ipynb"
    file.write_text(json.dumps(data))
    arguments = ["--root", str(ROOT), "check", "12", str(file), "--limit", "1"]
    assert main(arguments) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("KVCacheManager.allocate_slots: no end within the time limit: ")
    assert "allocate_slots was running, nanovllm/core/kv_cache_manager.py:" in line


def test_another_function_that_does_not_end_blames_no_loop_of_the_learner() -> None:
    place = Place("tests/core/test_scheduler_machine.py", 230, "abort")
    said = explain(Outcome(1, "", (place,)), names=["Scheduler._preempt"])
    assert "abort was running, tests/core/test_scheduler_machine.py:230. It waits for what" in said
    assert "Is its loop endless" not in said


def test_methods_are_tried_together_and_alone_only_if_one_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    write = Workbook.write_package

    def count(self: Workbook, new: dict[str, list[str]], folder: Path) -> None:
        tried.append(len(new))
        write(self, new, folder)

    monkeypatch.setattr(Workbook, "write_package", count)
    original = Workbook(ROOT, LECTURES["12_block_tables"])
    assert not check("12", original.lecture.data, tmp_path, capsys)
    assert tried == [0], "both methods in one run"
    data = changed(original.lecture.data, "found.append(block_id)", "found.insert(0, block_id)")
    tried.clear()
    said = check("12", data, tmp_path, capsys)
    assert said.startswith("KVCacheManager.get_computed_blocks: wrong")
    assert said.endswith("KVCacheManager.allocate_slots: right\n")
    assert tried == [0, 1, 1]


def test_what_cannot_be_folded_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, file = Workbook(ROOT, LECTURES["11_paged_memory"]).to_fill_in(), tmp_path / "mine.ipynb"
    blank = BLANK + '"write BlockPool.touch")'
    assert check("11", changed(data, blank, "\n        return ="), tmp_path, capsys).startswith(
        f"{file}: cell "
    )
    undefined = check("11", changed(data, blank, "\n        return np"), tmp_path, capsys)
    assert "Undefined name `np` in the module: define it, or import it in " in undefined
    gone = check("11", changed(data, "    def touch(", "    def tuch("), tmp_path, capsys)
    assert gone.startswith(f"{file}: cell ") and "this cell must define `BlockPool.touch`" in gone
    file.write_text("{")
    assert main(["--root", str(ROOT), "check", "11", str(file)]) == 1
    assert main(["--root", str(ROOT), "check", "11", str(tmp_path / "none.ipynb")]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"{file}: not a notebook") and said[1].startswith(
        f"{tmp_path / 'none.ipynb'}: "
    )


def test_a_right_workbook_makes_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Workbook(ROOT, LECTURES["11_paged_memory"])
    lines = original.blanks["BlockPool.touch"].lines
    data = original.replace({"BlockPool.touch": [*lines, "        self.mine = True"]})
    file, out = tmp_path / "mine.ipynb", tmp_path / "engine"
    file.write_text(json.dumps(data))
    assert main(["--root", str(ROOT), "check", "11", str(file), "--out", str(out)]) == 0
    assert f"cd {out} && PYTHONPATH=. " in capsys.readouterr().out
    program = (
        "from nanovllm import LLM; from nanovllm.core.block_pool import BlockPool as B; p = B(1); "
        "p.touch([0]); print(p.mine)"
    )
    environment = os.environ | {"PYTHONPATH": str(out)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=out, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr
    assert main(["--root", str(ROOT), "check", "11", str(file), "--out", str(out)]) == 1
    assert "is not empty: name a new folder" in capsys.readouterr().err


POOL = (
    '#| export\n#| yours Pool.free: {}\nclass Pool:\n    def free(self):\n        """Free it."""\n'
    "        return 1"
)


def test_a_workbook_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_pool.py").write_text("def test_free(): ...")
    make_course(tmp_path, lecture=[TITLE, OPENING, POOL.format("tests/test_pool.py::test_free")])
    assert main(["--root", str(tmp_path), "workbook", "lecture"]) == 0
    file = tmp_path / "my_notebooks/lecture_workbook.ipynb"
    assert str(file) in capsys.readouterr().out
    cells = json.loads(file.read_text())["cells"]
    assert source_of(cells[-1])[-2:] == [
        '        """Free it."""',
        '        raise NotImplementedError("write Pool.free")',
    ]
    before = file.read_bytes()
    assert main(["--root", str(tmp_path), "workbook", "lecture"]) == 1
    assert "already exists" in capsys.readouterr().err and file.read_bytes() == before


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([POOL.format("tests/nothing.py")], "there is no test tests/nothing.py"),
        (
            [POOL.format("pyproject.toml::test_nothing")],
            "there is no test pyproject.toml::test_nothing",
        ),
        (
            [POOL.format("pyproject.toml").replace("def free", "def give")],
            "this cell must define `Pool.free`",
        ),
        ([POOL.format("")], "needs a function and its tests"),
        (
            [POOL.format("pyproject.toml").replace('"""Free it."""', "pass")],
            "not a function with a docstring",
        ),
        ([POOL.format("pyproject.toml") + "\n#| yours Pool.free: x"], "first lines of its cell"),
    ],
)
def test_a_blank_needs_a_definition_and_tests(tmp_path: Path, cells: list[str], words: str) -> None:
    make_course(tmp_path, lecture=[TITLE, OPENING, *cells])
    with pytest.raises(CourseError, match=words):
        Workbook(tmp_path, tmp_path / "notebooks/lecture.ipynb").to_fill_in()


def test_a_later_lecture_may_not_replace_a_blank(tmp_path: Path) -> None:
    later = (
        "#| extend pool\nfrom nanovllm.lab.course import extend\n\n\n@extend\nclass Pool(Pool):\n  "
        "  def free(self):\n        return 2"
    )
    first = [TITLE, OPENING, POOL.format("pyproject.toml")]
    make_course(tmp_path, **{"11_paged": first, "23_more": [TITLE, later]})
    with pytest.raises(CourseError, match="no later lecture may replace it"):
        Workbook(tmp_path, tmp_path / "notebooks/11_paged.ipynb")
