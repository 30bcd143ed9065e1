"""Cells that continue a class show what is new: lines that an earlier cell has are marked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from nanovllm.lab.course.__main__ import main
from nanovllm.lab.course.copies import FOLDER, copy_lectures
from nanovllm.lab.course.execute import normalise
from nanovllm.lab.course.notebook import source_of
from nanovllm.lab.course.unchanged import KEY, Earlier, mark, unchanged_lines
from nanovllm.lab.course.workbook import write_workbook

ROOT = Path(__file__).parents[3]
LECTURES = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
FIRST = """
class Pool:
    size: int = 4

    def take(self, count):
        taken = self.free[:count]
        del self.free[:count]
        return taken

    @property
    def room(self):
        return len(self.free)

def show(pool):
    print(pool)
"""


def unchanged(*cells: str) -> list[str]:
    """The unchanged lines of the last cell."""
    earlier = Earlier()
    for cell in cells:
        found = earlier.add(cell.strip("\n").split("\n"))
    lines = cells[-1].strip("\n").split("\n")
    return [lines[number - 1] for number in found]


def test_lines_that_a_method_keeps_are_unchanged() -> None:
    again = """
#| export
@extend
class Pool(Pool):
    # Never more than there are.
    def take(self, count):
        count = min(count, len(self.free))
        taken = self.free[:count]

        del self.free[:count]
        return taken

    def give(self, taken):
        return taken
"""
    assert unchanged(FIRST, again) == [
        "@extend",
        "class Pool(Pool):",
        "    def take(self, count):",
        "        taken = self.free[:count]",
        "        del self.free[:count]",
        "        return taken",
    ]
    # The last version counts.
    assert "        count = min(count, len(self.free))" not in unchanged(again, FIRST, again)


def test_a_class_of_an_earlier_lecture_has_an_unchanged_head() -> None:
    cell = "@extend\nclass Pool(Pool):\n    # ---- state\n\n    def take(self):\n        pass"
    assert unchanged(cell) == ["@extend", "class Pool(Pool):"]
    assert unchanged("class Pool(Base):\n    pass") == []


def test_a_method_with_little_of_the_old_one_is_new() -> None:
    other = """
class Other(Pool):
    def take(self, count):
        return 1

class Pool(Pool):
    def take(self, count):
        if count == 1:
            return self.free.popleft()
        while len(self.taken) < count:
            self.taken.append(self.free.popleft())
        return self.taken
"""
    assert unchanged(FIRST, other) == ["class Pool(Pool):"]


def test_accessors_and_functions_are_told_apart() -> None:
    other = """
class Pool(Pool):
    size: int = 4

    @room.setter
    def room(self, value):
        return len(self.free)

def show(pool):
    print(pool)
"""
    assert unchanged(FIRST, other) == [
        "class Pool(Pool):",
        "    size: int = 4",
        "def show(pool):",
        "    print(pool)",
    ]
    assert unchanged(FIRST, "%timeit show(1)\n" + other) == []


def test_lines_are_stored_in_words_of_the_metadata() -> None:
    cells = [v4.new_code_cell(FIRST.strip()), v4.new_code_cell("# 𝜆\n" + FIRST.strip())]
    cells.append(v4.new_code_cell("print(1)", metadata={KEY: {"unchanged": "1", "length": 8}}))
    notebook = v4.new_notebook(cells=[v4.new_markdown_cell("# Title"), *cells])
    for _ in range(2):
        normalise(notebook, ROOT)
        first, second, third = (cell.metadata for cell in notebook.cells[1:])
        assert KEY not in first and KEY not in third
        assert second[KEY] == {"unchanged": "2-3 5-8 10-12 14-15", "length": len(FIRST.strip()) + 5}
        assert unchanged_lines(second) == {*range(2, 16)} - {4, 9, 13}
    assert unchanged_lines({}) == set()


@pytest.mark.parametrize("path", LECTURES, ids=[path.stem for path in LECTURES])
def test_stored_lines_are_those_that_repeat(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    stored = [cell["metadata"].get(KEY) for cell in cells]
    mark(cells)
    found = [cell["metadata"].get(KEY) for cell in cells]
    wrong = [i for i, pair in enumerate(zip(stored, found, strict=True)) if pair[0] != pair[1]]
    assert not wrong, f"{path.stem}, cells {wrong}: python -m nanovllm.lab.course run {path.stem}"


def test_copies_and_workbooks_keep_and_count_them(tmp_path: Path) -> None:
    for name in ("notebooks", "figures", "nanovllm", "tests", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    copy_lectures(tmp_path)
    lecture = json.loads((ROOT / "notebooks/13_scheduler.ipynb").read_text("utf-8"))["cells"]
    copy = json.loads((tmp_path / FOLDER / "13_scheduler.ipynb").read_text("utf-8"))["cells"]
    marks = [cell["metadata"].get(KEY) for cell in lecture]
    assert any(marks) and [cell["metadata"].get(KEY) for cell in copy] == marks
    cells = json.loads(write_workbook(tmp_path, "13").read_text("utf-8"))["cells"]
    marked = [cell for cell in cells if KEY in cell["metadata"]]
    assert marked
    for cell in marked:
        lines = source_of(cell)
        assert cell["metadata"][KEY]["length"] == len("\n".join(lines))
        assert not any(
            "NotImplementedError" in lines[number - 1]
            for number in unchanged_lines(cell["metadata"])
        )


def test_a_page_shows_them_paler_and_folds_answers_and_side_matters(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    again = "class Pool(Pool):\n    def give(self):\n        '''Two\n        lines < 3.'''\n"
    again += "\n    def take(self, count):\n        taken = self.free[:count]\n        return 1"
    output = v4.new_output("stream", text="304 tokens")
    cells = [v4.new_code_cell(FIRST.strip()), v4.new_code_cell(again)]
    cells += [v4.new_code_cell("measure()", outputs=[output]), v4.new_code_cell("print(5)")]
    cells[2].metadata.jupyter = {"outputs_hidden": True}
    cells[3].outputs = [v4.new_output("stream", text="5")]
    cells[3].metadata.jupyter = {"source_hidden": True}
    mark(cells)
    path = tmp_path / "notebooks/10_first.ipynb"
    (tmp_path / "film.gif").write_bytes(b"GIF89a")
    film = v4.new_markdown_cell("![A film](../film.gif)")
    nbformat.write(v4.new_notebook(cells=[*cells, film]), path)
    assert main(["--root", str(tmp_path), "page", "10"]) == 0
    page = (tmp_path / FOLDER / "10_first.html").read_text(encoding="utf-8")
    pale = re.findall(r'<span class="unchanged">(.*?)</span>(?=\n)', page)
    texts = [re.sub("<.*?>", "", line) for line in pale]
    assert texts == [
        "class Pool(Pool):",
        "    def take(self, count):",
        "        taken = self.free[:count]",
    ]
    assert ".unchanged {" in page
    answer, code = re.findall(r"<details.*?</details>", page, re.DOTALL)
    assert "304 tokens" in answer and page.count("304 tokens") == 1
    assert "print" in code and page.count("<pre>5") == 1
    # Films are in the page, with the script that plays them.
    assert 'src="data:image/gif;base64,R0lGODlh"' in page and "function showFilm" in page
