"""Carry an edit made in a module back into the cells of the lecture that builds it."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.lab.course.build import Built, build, current_texts, differences, polish
from nanovllm.lab.course.fold import MARKER, Module, quoted
from nanovllm.lab.course.notebook import Cell, CourseError, Lecture, Source, read_lecture, source_of, string_statement
from nanovllm.lab.course.pieces import Piece, cut, label

# (under TYPE_CHECKING, level, module or nothing, name, other name)
Alias = tuple[bool, int, str, str, str]


@dataclass
class Edits:
    """Changes to lines [start, end) of cells, by cell number, and what they do in words."""

    changes: dict[int, list[tuple[int, int, list[str]]]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)

    def replace(self, number: int, start: int, end: int, lines: list[str], note: str = "") -> None:
        """Put `lines` in the place of [start, end) of a cell, or before `start` where the two are equal."""
        self.changes[number].append((start, end, lines))
        if note:
            self.notes.append(f"cell {number}: {note}")

    def apply(self, data: dict[str, Any]) -> dict[str, Any]:
        """A copy of a notebook's JSON with the edits; ids, outputs and metadata stay."""
        data = copy.deepcopy(data)
        for number, changes in self.changes.items():
            raw = data["cells"][number - 1]
            lines, done = source_of(raw), 0
            result: list[str] = []
            for start, end, new in sorted(changes, key=lambda change: (change[0], change[1])):
                result += [*lines[done:start], *new]
                done = max(done, end)
            raw["source"] = "\n".join([*result, *lines[done:]]).rstrip("\n").splitlines(keepends=True)
        return data


def pull(root: Path, lecture: Lecture) -> list[str]:
    """Change the cells of a lecture so that they build the present modules.

    The modules are sorted and formatted first. The lecture is written only if it then builds all of its modules exactly.

    Returns:
        One message per change.

    Raises:
        CourseError: some of the edit cannot be carried back; it names the rest. Nothing is written then.
    """
    built = build(root, [lecture])
    current = current_texts(root, built)
    notes = [f"{item.module.path}: not there yet; build it" for item in built if item.module.path not in current]
    built = [item for item in built if item.module.path in current]
    edited = {item.module.path for item in built if current[item.module.path] != item.text}
    polished, problems = polish(root, {path: current[path] for path in edited})
    wanted = {**current, **polished}
    for path, row, message in problems:
        raise CourseError(f"{path}, line {row}: {message}")
    edits = Edits()
    for item in built:
        if wanted[item.module.path] != item.text:
            _carry_module(item, wanted[item.module.path], edits)
    if edits.changes:
        data = edits.apply(lecture.data)
        _verify(root, lecture, data, wanted)
        lecture.path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        notes += [f"{lecture.name}: {note}" for note in edits.notes]
    elif any(wanted[item.module.path] != item.text for item in built):
        _verify(root, lecture, lecture.data, wanted)
    for path, text in wanted.items():
        if current[path] != text:
            (root / path).write_text(text, encoding="utf-8")
            notes.append(f"{path}: sorted and formatted")
    return notes


def _verify(root: Path, lecture: Lecture, data: dict[str, Any], wanted: dict[str, str]) -> None:
    """Check that a changed notebook builds the wanted modules, character by character."""
    failed = f"{lecture.name}: this cannot be carried back (the lecture is as it was), so edit the lecture instead:"
    try:
        rebuilt = build(root, [read_lecture(lecture.path, root, data)])
    except CourseError as error:
        raise CourseError(f"{failed}\n{error}") from None
    found = differences(wanted, [item for item in rebuilt if item.module.path in wanted])
    if found:
        raise CourseError("\n".join([failed, *found]))


def _carry_module(built: Built, wanted: str, edits: Edits) -> None:
    module = built.module
    before, shown_before = _pieces_of(module.path, built.text)
    after, shown_after = _pieces_of(module.path, wanted)
    _carry_docstring(module, before, after, edits)
    _carry_imports(module, before, after, edits)
    _carry_pieces(module, module.pieces, shown_before, shown_after, edits)


def _pieces_of(path: str, text: str) -> tuple[list[Piece], list[Piece]]:
    """The docstring and imports of a module, and the labelled pieces below them."""
    pieces = cut(Source(path, text.split("\n")))
    head = [piece for piece in pieces if piece.kind in ("docstring", "import", "typing")]
    label(shown := [piece for piece in pieces if piece not in head])
    return head, shown


def _carry_pieces(module: Module, origins: list[Piece], before: list[Piece], after: list[Piece], edits: Edits) -> None:
    """Carry the changes among siblings, from the pieces `before` the edit to those `after` it.

    `origins` are the same siblings as pieces of cells; keys find one in the other.
    """
    origin_of = {piece.key: piece for piece in origins}
    old_of = {piece.key: piece for piece in before}
    kept = {piece.key for piece in after}
    top = next((origin for origin in origins if origin.key in kept), None)
    anchor: Piece | None = None
    for new, below in zip(after, [*after[1:], None], strict=True):
        origin, old = origin_of.get(new.key), old_of.get(new.key)
        if origin is None or old is None:
            _insert(module, new, anchor, top, below, edits)
            continue
        if new.kind == old.kind == origin.kind == "class":
            if new.head != old.head:
                start = origin.start
                note = f"changed the head of class {new.name}"
                edits.replace(_number(origin), start, start + len(origin.head), new.head, note)
            _carry_pieces(module, origin.members, old.members, new.members, edits)
        elif new.lines != old.lines:
            lines = _for_cell(origin, new.lines)
            edits.replace(_number(origin), origin.start, origin.end, lines, f"changed {_called(new)}")
        if anchor and origin.follows(anchor) and new.blanks != old.blanks:
            note = f"changed the space above {_called(new)}"
            edits.replace(_number(origin), anchor.end, origin.start, [""] * new.blanks, note)
        anchor = origin
    _delete([origin_of[key] for key in old_of if key not in kept and key in origin_of], edits)


def _insert(
    module: Module, new: Piece, anchor: Piece | None, top: Piece | None, below: Piece | None, edits: Edits
) -> None:
    """Add a new piece after the one above it in the module, or before the first one."""
    if anchor:
        seat = anchor.first
        row, lines = seat.end, [*[""] * new.blanks, *new.lines]
    elif top:
        seat = top.first
        row, lines = seat.start, [*new.lines, *[""] * (below.blanks if below else 0)]
    else:
        raise CourseError(f"{module.path}: {_called(new)} has no neighbour in a cell to be added to")
    edits.replace(
        _number(seat), row, row, lines, f"added {_called(new)}{f' after {_called(anchor)}' if anchor else ''}"
    )


def _delete(gone: list[Piece], edits: Edits) -> None:
    """Remove pieces, a class with all its continuations, and a continuation with the last of its members."""
    for origin in gone:
        note = f"removed {_called(origin)}"
        for part in origin.parts or [origin]:
            parent = part.parent
            if parent and not parent.parts and all(m in gone or m.kind == "comment" for m in parent.members):
                part = parent
            start, end, lines = part.start, part.end, part.source.lines
            while start > part.source.body and not lines[start - 1].strip():
                start -= 1
            opening = part.parent.start + len(part.parent.head) if part.parent else part.source.body
            while start == opening and end < len(lines) and not lines[end].strip():
                end += 1
            edits.replace(_number(part), start, end, [], note)
            note = ""


def _carry_docstring(module: Module, before: list[Piece], after: list[Piece], edits: Edits) -> None:
    old, new = _summary(before, module), _summary(after, module)
    if new is None or new == old:
        return
    found = module.docstring
    own_quote = sum(module.lecture.docstring(name) is found for name in module.lecture.modules) == 1
    number, start, end = found.number, found.start, found.end
    lines = quoted(new + "\n" if "\n" in new else new)
    if found.quoted and own_quote and "\n\n" not in new:
        lines = [f"> {line}" for line in new.split("\n")]
    elif found.quoted:
        cell = module.lecture.openings.get(module.name)
        if cell is None:
            raise CourseError(f"{module.path}: no cell has `default_exp {module.name}` to hold its new docstring")
        number, start, end, lines = cell.number, cell.body, cell.body, [*lines, ""]
    edits.replace(number, start, end, lines, "changed the summary of the module")


def _summary(pieces: list[Piece], module: Module) -> str | None:
    """The docstring without the line that names the lecture."""
    for piece in pieces:
        if piece.kind == "docstring" and piece.node is not None:
            text = inspect.cleandoc(string_statement(piece.node) or "")
            return text.removesuffix(MARKER.format(module.lecture.name)).strip()
    return None


def _carry_imports(module: Module, before: list[Piece], after: list[Piece], edits: Edits) -> None:
    """Add new imports to the lecture; one that is no longer used may stay, since the build drops it."""
    known = _aliases(before) | _aliases([*module.imports, *module.typing])
    added: dict[tuple[object, ...], list[Alias]] = defaultdict(list)
    for alias in sorted(_aliases(after) - known):
        added[alias[:3] if alias[2] else alias].append(alias)
    for aliases in added.values():
        typing, statement = aliases[0][0], _import(aliases)
        blocks, imports = module.typing, module.imports
        if typing and blocks:
            cell, row, lines = blocks[0].source, blocks[0].end, [f"    {statement}"]
        else:
            lines = ["", "if TYPE_CHECKING:", f"    {statement}"] if typing else [statement]
            if imports:
                same = [piece for piece in imports if piece.source is imports[0].source]
                cell, row = imports[0].source, same[-1].end
                if "from __future__" in statement:
                    row = same[0].start
            else:
                cell, row, lines = module.cells[0], module.cells[0].body, [*lines, ""]
                if cell.sets_module == module.name and not module.docstring.quoted:
                    row, lines = module.docstring.end, ["", *lines]
        assert isinstance(cell, Cell)
        edits.replace(cell.number, row, row, lines, f"added `{statement}`")


def _aliases(pieces: list[Piece]) -> set[Alias]:
    found: set[Alias] = set()
    for piece in pieces:
        nodes = piece.node.body if isinstance(piece.node, ast.If) else [piece.node]
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                level, module = (node.level, node.module or ".") if isinstance(node, ast.ImportFrom) else (0, "")
                for alias in node.names:
                    found.add((piece.kind == "typing", level, module, alias.name, alias.asname or ""))
    return found


def _import(aliases: list[Alias]) -> str:
    """The statement that imports names, all from one module."""
    names = ", ".join(f"{name} as {other}" if other else name for _, _, _, name, other in aliases)
    _, level, module, _, _ = aliases[0]
    return f"from {'.' * level}{module.removeprefix('.')} import {names}" if module else f"import {names}"


def _for_cell(origin: Piece, lines: list[str]) -> list[str]:
    """Lines for the place of a piece: in a cell a late accessor finds its property in the finished class."""
    if origin.parent is None or not origin.name.endswith((".setter", ".deleter")):
        return lines
    late = f"@{origin.parent.name}.{origin.name}"
    if not any(late in line for line in origin.source.lines[origin.start : origin.end]):
        return lines
    return [re.sub(rf"^(\s*)@{re.escape(origin.name)}$", rf"\1{late}", line) for line in lines]


def _number(piece: Piece) -> int:
    assert isinstance(piece.source, Cell)
    return piece.source.number


def _called(piece: Piece) -> str:
    name = piece.name or f"`{piece.lines[0].strip()}`"
    return f"{piece.parent.name}.{name}" if piece.parent and piece.name else name
