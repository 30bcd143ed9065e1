"""A lecture that prints a function's source has a copy of it in its saved output. When the function
changes, the copy is stale, and the lecture no longer passes nbval; this test finds it without
running the lecture."""

from __future__ import annotations

import json
import re
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
            yield line.strip()


def lines_of_passages(text: str) -> Iterator[str]:
    """Yield the code in an output of passages: what is indented or numbered, without the number.

    A function's name as a comment and an ellipsis only separate the passages."""
    for line in text.splitlines():
        code = re.sub(r"^ *\d+ +", "", line).strip()
        is_separator = code == "..." or re.fullmatch(r"# \w+", code) is not None
        if line.startswith(" ") and code and not is_separator:
            yield code


def printed_sources(lecture: Path) -> Iterator[tuple[int, str]]:
    """Yield each line of the package's code in a saved output, with the number of its cell.

    A cell prints sources by itself, or with a function that the lecture defined for passages."""
    printers: set[str] = set()
    for number, cell in enumerate(json.loads(lecture.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        for definition in re.finditer(r"^def (\w+)\(.*?(?=^\S|\Z)", source, re.M | re.S):
            if "inspect.getsource" in definition[0]:
                printers.add(definition[1])
        text = "".join(
            "".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout"
        )
        if "print(inspect.getsource(" in source:
            lines = lines_of_functions(text)
        elif any(re.search(rf"^{name}\(", source, re.M) for name in printers):
            lines = lines_of_passages(text)
        else:
            continue
        yield from ((number, line) for line in lines)


@pytest.fixture(scope="module")
def lines_of_the_package() -> set[str]:
    files = (ROOT / "nanovllm").rglob("*.py")
    return {line.strip() for file in files for line in file.read_text().splitlines()}


def test_printed_sources_are_those_of_the_package(lines_of_the_package: set[str]) -> None:
    stale = []
    cells = set()
    for lecture in LECTURES:
        for number, line in printed_sources(lecture):
            cells.add((lecture.stem, number))
            if line not in lines_of_the_package:
                stale.append(f"{lecture.stem}, cell {number}: {line}")
    assert len(cells) >= 25
    assert not stale, "execute these lectures again: make run"
