"""Lines of a lecture's cells that repeat an earlier cell of the lecture: pages show them paler, so
that the reader sees what is new.

`mark` writes them into the cells' metadata. In JupyterLab the extension in `labextensions/` shows
them, which `make lab` loads; in saved pages `pages` does.
"""

import ast
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm.lab.course.notebook import source_of
from nanovllm.lab.course.pieces import Function, first_row, last_row

# The key of a cell's metadata.
KEY = "nanovllm"
# A member with fewer of its earlier lines is a new one: what it has in common with the old one,
# such as an `else:`, is chance.
_LEAST_REPEATED = 1 / 3


def mark(cells: Iterable[dict[str, Any]]) -> None:
    """Note in the metadata of each code cell of a notebook which of its lines are unchanged."""
    earlier = Earlier()
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        lines = source_of(cell)
        found = earlier.add(lines)
        cell["metadata"].pop(KEY, None)
        if found:
            # Readers edit cells: an extension recognises by the length whether the lines still
            # hold. JavaScript counts in units of UTF-16.
            length = len("\n".join(lines).encode("utf-16-le")) // 2
            cell["metadata"][KEY] = {"length": length, "unchanged": _ranges(found)}


def unchanged_lines(metadata: Mapping[str, Any]) -> set[int]:
    """The marked lines of a cell, counted from 1."""
    ranges = [
        [int(number) for number in words.split("-")]
        for words in metadata.get(KEY, {}).get("unchanged", "").split()
    ]
    return {line for each in ranges for line in range(each[0], each[-1] + 1)}


@dataclass
class Earlier:
    """The functions, the classes and their members of the cells so far.

    Attributes:
        printed: the lines of each as last printed, by its name, such as `BlockPool.touch`.
    """

    printed: dict[str, list[str]] = field(default_factory=dict)

    def add(self, lines: list[str]) -> list[int]:
        """Add a cell; returns which of its lines are unchanged, counted from 1."""
        unchanged: list[int] = []
        for part in _parts(lines):
            text = lines[part.start : part.end]
            found = list(_repeated(self.printed.get(part.name, []), text))
            if part.reopens:
                found = list(range(len(text)))
            if len(found) >= _LEAST_REPEATED * sum(bool(line.strip()) for line in text):
                unchanged += [part.start + row + 1 for row in found]
            self.printed[part.name] = text
        return unchanged


@dataclass(frozen=True)
class _Part:
    """The lines [start, end) of a cell that define a name; of a class the lines above its body.

    `reopens`: these lines say no more than that a class is continued.
    """

    name: str
    start: int
    end: int
    reopens: bool = False


def _parts(lines: list[str]) -> Iterator[_Part]:
    try:
        nodes = ast.parse("\n".join(lines)).body
    except SyntaxError:  # a command of IPython's, which defines nothing
        return
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            start = first_row(node)
            bases = [ast.unparse(base) for base in node.bases]
            end = max(_start(lines, node.body[0]), start + 1)
            while end > start + 1 and lines[end - 1].lstrip()[:1] in ("", "#"):
                end -= 1
            yield _Part(node.name, start, end, reopens=bases == [node.name])
            for member in node.body:
                if name := _name(member):
                    first = _start(lines, member)
                    yield _Part(f"{node.name}.{name}", first, last_row(member))
        elif isinstance(node, Function):
            yield _Part(node.name, _start(lines, node), last_row(node))


def _name(node: ast.stmt) -> str:
    """The name that a statement of a class body defines, with its decorators, since a property and
    its setter have the same; "" if none."""
    if isinstance(node, Function):
        return " ".join([node.name, *map(ast.unparse, node.decorator_list)])
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target)
    if isinstance(node, ast.Assign):
        return ", ".join(map(ast.unparse, node.targets))
    return "__doc__" if isinstance(node, ast.Expr) else ""


def _start(lines: list[str], node: ast.stmt) -> int:
    """The row of a statement's first line, comments right above it included."""
    row = first_row(node)
    while row and lines[row - 1].lstrip().startswith("# "):
        row -= 1
    return row


def _repeated(before: list[str], lines: list[str]) -> Iterator[int]:
    """Rows that are also in the lines before, in the same order."""
    matcher = difflib.SequenceMatcher(None, before, lines, autojunk=False)
    for match in matcher.get_matching_blocks():
        yield from (row for row in range(match.b, match.b + match.size) if lines[row].strip())


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers in words, such as "2-5 9"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return " ".join("-".join(map(str, each)) for each in ranges)
