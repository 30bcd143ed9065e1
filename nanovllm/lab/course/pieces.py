"""Cut Python source into pieces: whole lines, each with a key that finds it again in another
version of the source."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nanovllm.lab.course.notebook import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef
Kind = Literal[
    "docstring", "import", "typing", "class", "definition", "assignment", "statement", "comment"
]


@dataclass(eq=False)
class Piece:
    """The lines [start, end) of a source: a statement with the comments right above it, or comments
    on their own.

    A class has a head (decorators, the `class` line) and members, and so has its `__init__`;
    `parts` are the statements that reopened it. `name` is what a later version replaces it by,
    `key` is unique among its siblings. `seat` is the first version, whose place in the module a
    later version takes. `is_placed` says that a directive gives its place below the piece above.
    `is_state` says that the cell has `x = 0` in a class where the module has `self.x = 0` in
    `__init__`."""

    kind: Kind
    source: Source
    start: int
    end: int
    lines: list[str]
    node: ast.stmt | None = None
    name: str = ""
    key: str = ""
    parent: Piece | None = None
    head: list[str] = field(default_factory=list)
    members: list[Piece] = field(default_factory=list)
    parts: list[Piece] = field(default_factory=list)
    seat: Piece | None = None
    is_placed: bool = False
    is_state: bool = False

    @property
    def first(self) -> Piece:
        """The version whose place in the module this one takes; itself where nothing was
        replaced."""
        return self.seat or self

    @property
    def blanks(self) -> int:
        """The number of blank lines above it."""
        row = self.start
        while row > self.source.body and not self.source.lines[row - 1].strip():
            row -= 1
        return self.start - row

    def follows(self, other: Piece) -> bool:
        """Whether there are only blank lines between `other` and this piece."""
        between = self.source.lines[other.end : self.start]
        return (
            self.source is other.source
            and other.end <= self.start
            and not any(map(str.strip, between))
        )


def cut(source: Source) -> list[Piece]:
    """The pieces of a whole source.

    Raises:
        CourseError: syntax error, two statements on one line, or a class body not indented with
            four spaces.
    """
    return _cut(source, source.parse(), source.body, len(source.lines), None)


def first_row(node: ast.stmt) -> int:
    """The index of a statement's first line, decorators included."""
    decorators = node.decorator_list if isinstance(node, ast.ClassDef | Function) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1


def last_row(node: ast.stmt) -> int:
    """The index of the line below a statement."""
    return node.end_lineno or node.lineno


def label(pieces: Sequence[Piece]) -> None:
    """Give siblings unique keys: a name, counted where it recurs, or the distance to the last named
    piece."""
    seen: dict[str, int] = {}
    last = ""
    distance = 0
    for piece in pieces:
        if piece.name:
            seen[piece.name] = seen.get(piece.name, 0) + 1
            last = f"{piece.name}#{seen[piece.name]}" if seen[piece.name] > 1 else piece.name
            distance = 0
            piece.key = last
        else:
            distance += 1
            piece.key = f"{last}+{distance}"
        label(piece.members)


def _cut(
    source: Source, nodes: list[ast.stmt], start: int, stop: int, parent: Piece | None
) -> list[Piece]:
    """The pieces of the lines [start, stop), which hold the statements of one body."""
    pieces: list[Piece] = []
    row = start
    for node in nodes:
        first = first_row(node)
        last = last_row(node)
        if first < row:
            raise source.error("two statements on one line", first + 1)
        above = first
        while above > row and source.lines[above - 1].lstrip().startswith("#"):
            above -= 1
        pieces += _comments(source, row, above, parent)
        pieces.append(_piece(source, node, above, last, parent, opens=node is nodes[0]))
        row = last
    return pieces + _comments(source, row, stop, parent)


def _piece(
    source: Source, node: ast.stmt, start: int, end: int, parent: Piece | None, opens: bool
) -> Piece:
    piece = Piece(
        kind="statement",
        source=source,
        start=start,
        end=end,
        lines=source.lines[start:end],
        node=node,
        parent=parent,
    )
    if isinstance(node, ast.Import | ast.ImportFrom) and parent is None:
        piece.kind = "import"
    elif parent is None and _is_typing_block(node):
        piece.kind = "typing"
    elif isinstance(node, ast.ClassDef):
        piece.kind = "definition"
        piece.name = node.name
        if parent is None and node.body[0].lineno > node.lineno:  # not `class A: ...`
            _open(piece, node, indent=4)
    elif isinstance(node, Function):
        piece.kind = "definition"
        piece.name = _function_name(node)
        if parent is not None and piece.name == "__init__" and _has_own_lines(source, node):
            _open(piece, node, indent=8)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        piece.kind = "assignment"
        piece.name = ", ".join(map(ast.unparse, targets))
    elif opens and ast.get_docstring(ast.Module([node], [])) is not None:
        piece.kind = "docstring"
        piece.name = "__doc__"
    return piece


def _has_own_lines(source: Source, node: Function) -> bool:
    """Whether the body of a function begins below its header."""
    first = node.body[0]
    return not source.lines[first_row(first)][: first.col_offset].strip()


def _open(piece: Piece, node: ast.ClassDef | Function, indent: int) -> None:
    """Split a class, or its `__init__`, into a head and members."""
    source = piece.source
    start = first_row(node.body[0])
    if node.body[0].col_offset != indent:
        raise piece.source.error(
            f"indent the body of class {node.name} with four spaces", start + 1
        )
    while source.lines[start - 1].lstrip().startswith("#") or not source.lines[start - 1].strip():
        start -= 1
    if isinstance(node, ast.ClassDef):
        piece.kind = "class"
    piece.head = source.lines[piece.start : start]
    piece.members = _cut(source, node.body, start, piece.end, piece)
    piece.parts = [piece]


def _is_typing_block(node: ast.stmt) -> bool:
    """Whether it is `if TYPE_CHECKING:` with imports alone, on lines of their own."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        and not node.orelse
        and node.body[0].lineno > node.lineno
        and all(isinstance(statement, ast.Import | ast.ImportFrom) for statement in node.body)
    )


def _function_name(node: Function) -> str:
    """The function's name; `name.setter` for an accessor, nothing for `_`, since several functions
    may be called `_`."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Attribute) and decorator.attr in ("setter", "deleter"):
            return f"{node.name}.{decorator.attr}"
    return "" if node.name == "_" else node.name


def _comments(source: Source, start: int, stop: int, parent: Piece | None) -> list[Piece]:
    """The blocks of comments in lines that hold no statement."""
    pieces = []
    begin = start
    for row in range(start, stop + 1):
        if row == stop or not source.lines[row].strip():
            if row > begin:
                pieces.append(
                    Piece("comment", source, begin, row, source.lines[begin:row], parent=parent)
                )
            begin = row + 1
    return pieces
