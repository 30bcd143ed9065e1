"""Read lectures: the code cells that they export, and the modules that these go to.

The first lines of a code cell may be directives:

    #| default_exp core.block_pool    following exports go to nanovllm/core/block_pool.py
    #| export                       this cell does
    #| export attention.torch       this cell goes to nanovllm/attention/torch.py
    #| extend core.block_pool         this cell continues a module of an earlier lecture
    #| yours BlockPool.touch: TEST  a workbook leaves this function of the cell blank; TESTs, with
    spaces between, check it

`export` and `extend` of a cell that continues a class (`@extend`) may say where its new members
stand in the module. Members that replace earlier ones keep their places.

    #| extend core.block_pool after=touch     below the method `touch`, in the order of the cell
    #| export before=touch                  above it
    #| export after=touch trim:after=free   the same, but the new member `trim` below `free`
    #| export into=__init__                 an assignment `x = 0` of the class body becomes
                                            `self.x = 0` at the end of `__init__`
"""

import ast
import itertools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = "nanovllm"
# A cell with this tag is run only where there is a GPU.
GPU_TAG = "gpu"

_DIRECTIVE = re.compile(r"#\|\s*(\S*)\s*(.*?)\s*$")
_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_TEST_MARKER = re.compile(r"#\s*NBVAL_")
_MISPLACED = re.compile(r"#\|\s*(export|default_exp|extend|yours)\b")


_PLACE = re.compile(r"(?:(\w+):)?(after|before)=(\w+)")
_INTO = "into=__init__"


class CourseError(Exception):
    """A lecture that cannot be built, run or pulled; the message names the cell and the reason."""


@dataclass(eq=False)
class Source:
    """Python source: a module's text, or a cell of a lecture, whose directives end above line
    `body` (from 0).

    `place` names the source in error messages.
    """

    place: str
    lines: list[str]
    body: int = 0

    def error(self, message: str, line: int) -> CourseError:
        """An error at a line of the source, counted from 1."""
        return CourseError(f"{self.place}, line {line}: {message}")

    def parse(self) -> list[ast.stmt]:
        """The statements of the source, with line numbers that count from its first line.

        Raises:
            CourseError: the code is not plain Python.
        """
        code = "\n" * self.body + "\n".join(self.lines[self.body :]) + "\n"
        try:
            return ast.parse(code).body
        except SyntaxError as error:
            raise self.error(f"syntax error: {error.msg}", error.lineno or 1) from None


@dataclass(frozen=True)
class Place:
    """Where new members of a cell stand: "after" or "before" a member of the same class.

    `new` is the one that is meant, "" all that no other place names. `line` is the line of the
    directive in its cell, counted from 1.
    """

    new: str
    side: str
    member: str
    line: int


@dataclass(eq=False)
class Cell(Source):
    """A code cell of a lecture.

    Attributes:
        number: counts all cells of the file from 1.
        extends: whether an earlier lecture builds `module`.
        places: where new members of its classes stand in the module, by the name of the member or
            "" for the others; those without a place stand at the end.
        into_init: the line of an `into=__init__`, counted from 1; 0 without one.
        yours: the tests of each function that workbooks leave blank.
    """

    lecture: str = ""
    number: int = 0
    extends: bool = False
    module: str | None = None
    sets_module: str | None = None
    places: dict[str, Place] = field(default_factory=dict)
    into_init: int = 0
    yours: dict[str, str] = field(default_factory=dict)


@dataclass
class Docstring:
    """The summary of a module, and the lines [start, end) of the cell (counted from 1) that
    contains it."""

    text: str
    number: int
    start: int
    end: int


@dataclass
class Lecture:
    """A notebook: its JSON, the cells it exports in order, and the docstrings of the modules it
    builds."""

    path: Path
    name: str
    data: dict[str, Any]
    exports: list[Cell] = field(default_factory=list)
    docstrings: dict[str, Docstring] = field(default_factory=dict)

    @property
    def modules(self) -> list[str]:
        """The modules that it builds, in the order in which they first appear."""
        return list(
            dict.fromkeys([*(c.module for c in self.exports if c.module), *self.docstrings])
        )

    def docstring(self, module: str) -> Docstring:
        """The docstring of a module."""
        if module not in self.docstrings:
            raise CourseError(
                f"{self.name}: {module} has no docstring: write it into the cell of its "
                "`default_exp`"
            )
        return self.docstrings[module]


def source_of(cell: dict[str, Any]) -> list[str]:
    """The lines of a cell, whose JSON holds them as one string or as a list."""
    return "".join(cell["source"]).split("\n")


def load(path: Path, name: str) -> dict[str, Any]:
    """The JSON of a notebook; `name` is what an error calls it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CourseError(f"{name}: not a notebook: {error}") from None


def read_lecture(path: Path, root: Path, data: dict[str, Any] | None = None) -> Lecture:
    """Read a notebook and its directives.

    Args:
        path: the .ipynb file.
        root: the folder that its name in messages is relative to.
        data: its JSON, where it is not the file's.

    Raises:
        CourseError: the file is not a notebook, or a directive is unknown, misplaced or lacks its
            module.
    """
    name = path.relative_to(root).as_posix()
    if data is None:
        data = load(path, name)
    lecture = Lecture(path, name, data)
    run = 0
    current = None
    for number, raw in enumerate(data["cells"], start=1):
        lines = source_of(raw)
        if raw["cell_type"] == "code":
            run += 1
            cell = Cell(f"{name}: cell {number} (In [{run}])", lines, lecture=name, number=number)
            current = _direct(cell, current)
            _enter(lecture, cell)
    return lecture


def _direct(cell: Cell, current: str | None) -> str | None:
    """Obey the directives at the head of a cell; returns the module that later exports go to."""
    exported = False
    head = list(
        itertools.takewhile(
            lambda line: _DIRECTIVE.match(line) or _TEST_MARKER.match(line), cell.lines
        )
    )
    cell.body = len(head)
    for row, match in enumerate(map(_DIRECTIVE.match, head)):
        if match is None:
            continue
        directive, argument = match.groups()
        if directive == "yours":
            name, _, tests = argument.partition(": ")
            if not tests:
                raise cell.error(
                    "`yours` needs a function and its tests, with `: ` between them", row + 1
                )
            cell.yours[name] = tests
            continue
        if directive not in ("default_exp", "export", "extend"):
            raise cell.error(
                f"unknown directive `{directive}`: there are default_exp, export, extend, yours",
                row + 1,
            )
        if directive != "default_exp":
            argument = _take_places(cell, argument, row + 1)
        if (argument or directive != "export") and not _MODULE_NAME.fullmatch(argument):
            raise cell.error(
                f"`{directive}` needs the name of a module, such as core.block_pool", row + 1
            )
        if argument.split(".")[0] == PACKAGE:
            raise cell.error(f"name the module without `{PACKAGE}.`", row + 1)
        if directive == "default_exp":
            current = cell.sets_module = argument
        else:
            exported = True
            cell.module = argument or None
            cell.extends = directive == "extend"
    for row, line in enumerate(cell.lines[cell.body :], start=cell.body):
        if _MISPLACED.match(line):
            raise cell.error("a directive belongs in the first lines of its cell", row + 1)
    if exported and cell.module is None:
        if current is None:
            raise cell.error(
                "`export` before any `default_exp`: name the module with `default_exp` first", 1
            )
        cell.module = current
    return current


def _take_places(cell: Cell, argument: str, line: int) -> str:
    """Note in the cell where its new members stand; returns the rest of the directive's argument.

    Raises:
        CourseError: there are two places.
    """
    rest = []
    for word in argument.split():
        if match := _PLACE.fullmatch(word):
            place = Place(match[1] or "", match[2], match[3], line)
            if place.new in cell.places:
                raise cell.error("name one place: `after=member` or `before=member`", line)
            cell.places[place.new] = place
        elif word == _INTO:
            cell.into_init = line
        elif "=" in word:
            raise cell.error(
                f"`{word}` is no place: there are after=member, before=member and {_INTO}", line
            )
        else:
            rest.append(word)
    return " ".join(rest)


def _enter(lecture: Lecture, cell: Cell) -> None:
    if cell.module:
        lecture.exports.append(cell)
    if not cell.sets_module:
        return
    nodes = cell.parse()
    text = ast.get_docstring(ast.Module(nodes, []))
    if text is None:
        return
    if cell.sets_module in lecture.docstrings:
        raise cell.error(f"{cell.sets_module} has a docstring already", nodes[0].lineno)
    start = nodes[0].lineno - 1
    end = nodes[0].end_lineno or nodes[0].lineno
    lecture.docstrings[cell.sets_module] = Docstring(text, cell.number, start, end)
