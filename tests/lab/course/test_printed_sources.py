"""A lecture that prints a function's source has a copy of it in its saved output. When the function
changes, the copy is stale, and the lecture no longer passes nbval; this test finds it without
running the lecture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LECTURES = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


def lines_of_functions(text: str) -> Iterator[str]:
    """Yield the lines of functions in an output; a cell may print other things after them."""
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith(("def ", "async def ", "class ", "@")):
            inside = True
        elif line and not line.startswith((" ", ")")):
            inside = False
        if inside and line:
            yield line


def printed_sources(lecture: Path) -> Iterator[tuple[int, str]]:
    """Yield the saved output of each cell that prints sources, with the number of the cell."""
    for number, cell in enumerate(json.loads(lecture.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "print(inspect.getsource(" in source:
            for output in cell["outputs"]:
                if output.get("name") == "stdout":
                    yield number, "".join(output["text"])


@pytest.fixture(scope="module")
def lines_of_the_package() -> set[str]:
    files = (ROOT / "nanovllm").rglob("*.py")
    return {line for file in files for line in file.read_text().splitlines()}


def test_printed_sources_are_those_of_the_package(lines_of_the_package: set[str]) -> None:
    stale = []
    seen = 0
    for lecture in LECTURES:
        for number, text in printed_sources(lecture):
            seen += 1
            stale += [
                f"{lecture.stem}, cell {number}: {line}"
                for line in lines_of_functions(text)
                if line not in lines_of_the_package
            ]
    assert seen >= 10
    assert not stale, "execute these lectures again: make run"
