"""A lecture exports what it teaches, and little else: one that needs more is two lectures. And it
says how long it takes."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from nanovllm.lab.course.execute import reading_time
from nanovllm.lab.course.notebook import read_lecture, source_of
from nanovllm.lab.course.unchanged import Earlier

ROOT = Path(__file__).parents[3]
LECTURES = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
MOST = 515
MOST_LINES = 400
# Lectures that are still longer. A number may only fall.
LONGER: dict[str, int] = {}


# A cell is short: it can be seen as a whole, without directives and blank lines.
MOST_IN_CELL = 45
# How many cells of a lecture are longer: two Triton kernels, each of which is one function with its
# signature, and one function whose docstring is half of it. A number may only fall.
LONG_CELLS = {"15_triton_attention": 1, "26_latent_attention": 1, "32_kv_sharing": 1}
# Lines of exported cells that an earlier exported cell has printed for the same member: new ones
# should be a class of their own, or a smaller method. A number may only fall.
REPEATED = {"13_scheduler": 15, "23_pipeline_parallel": 2}
_HEAD = re.compile(r"@extend|class (\w+)\(\1\):")


def exported_statements(path: Path) -> int:
    """Statements of a lecture's exported cells, those that continue other lectures' modules
    included. Lines would reward code that is packed."""
    cells = read_lecture(path, path.parents[1]).exports
    trees = [ast.parse("\n".join(cell.lines[cell.body :])) for cell in cells]
    return sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))


def exported_lines(path: Path) -> int:
    """Lines of code of a lecture's exported cells: without blank lines, comments and docstrings,
    which explain (they are about a third of what a reader sees in these cells)."""
    count = 0
    for cell in read_lecture(path, path.parents[1]).exports:
        lines = cell.lines[cell.body :]
        docstrings = {
            row
            for node in ast.walk(ast.parse("\n".join(lines)))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
            for row in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
        }
        count += sum(
            bool(line.strip()) and not line.strip().startswith("#") and row not in docstrings
            for row, line in enumerate(lines, start=1)
        )
        # The two lines with which a cell continues a class are not in the module.
        count -= 2 * lines.count("@extend")
    return count


def test_no_lecture_has_too_many_lines() -> None:
    lines = {
        path.stem: exported_lines(path)
        for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    }
    print("\n".join(f"{count:5} {name}" for name, count in lines.items()))
    for name, count in lines.items():
        assert count <= LONGER.get(name, MOST_LINES), f"{name} exports {count} lines of code"
        assert name not in LONGER or count > MOST_LINES, f"{name} is short: take it out of LONGER"


def long_cells(path: Path) -> int:
    """Code cells that are longer than `MOST_IN_CELL`."""
    lengths = [
        sum(bool(line.strip()) and not line.startswith("#|") for line in source_of(cell))
        for cell in json.loads(path.read_text("utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    return sum(length > MOST_IN_CELL for length in lengths)


def test_cells_are_short() -> None:
    counts = {path.stem: long_cells(path) for path in LECTURES}
    print("\n".join(f"    {name!r}: {count}," for name, count in counts.items() if count))
    for name, count in counts.items():
        most = LONG_CELLS.get(name, 0)
        assert count <= most, f"{name}: {count} cells of more than {MOST_IN_CELL} lines"


def test_no_exported_method_is_printed_twice() -> None:
    earlier: dict[str, Earlier] = {}
    counts: dict[str, int] = {}
    for path in LECTURES:
        for cell in read_lecture(path, path.parents[1]).exports:
            found = earlier.setdefault(cell.module or "", Earlier()).add(cell.lines)
            lines = [cell.lines[number - 1] for number in found]
            repeated = [line for line in lines if not _HEAD.fullmatch(line)]
            if repeated:
                print(f"{cell.place}:", *repeated, sep="\n")
                counts[path.stem] = counts.get(path.stem, 0) + len(repeated)
    for name, count in counts.items():
        most = REPEATED.get(name, 0)
        assert count <= most, f"{name} prints {count} lines that an earlier cell exports"


def test_no_lecture_exports_too_much() -> None:
    statements = {
        path.stem: exported_statements(path)
        for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    }
    print("\n".join(f"{count:5} {name}" for name, count in statements.items()))
    assert max(statements.values()) <= MOST


def test_hours_follow_from_words_and_cells() -> None:
    """At the top of a lecture, and in the table of all: `python -m nanovllm.lab.course run` states
    them."""
    table = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "notebooks").glob("[1-9]*.ipynb")):
        cells = [
            (cell["cell_type"], "".join(cell["source"]))
            for cell in json.loads(path.read_text("utf-8"))["cells"]
        ]
        wanted = reading_time(cells[1:])
        assert f"Reading time: {wanted}" in cells[0][1], f"{path.name} takes {wanted}"
        hours = [
            f"{hour}:{minute or '00'}"
            for hour, minute in re.findall(r"(\d+) h(?: (\d+) min)?", wanted)
        ]
        row = re.search(rf"^\| .*{re.escape(path.name)}.*$", table, re.MULTILINE)
        assert row and row[0].endswith(f" | {hours[0]} | {hours[1]} |"), (
            f"{path.name}: {' and '.join(hours)}"
        )
