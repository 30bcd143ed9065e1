"""Carry edits made in modules back into the cells of the lectures that build them."""

import ast
import copy
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.lab.course.build import build, current_texts, differences, polish, read_lectures
from nanovllm.lab.course.fold import Module, from_init, quoted
from nanovllm.lab.course.last_built import LastBuilt
from nanovllm.lab.course.notebook import Cell, CourseError, Lecture, Source, source_of
from nanovllm.lab.course.pieces import Piece, cut, label
from nanovllm.lab.course.unchanged import mark


class Edits:
    """Changes to lines [start, end) of cells, by lecture and number."""

    def __init__(self) -> None:
        self.changes: dict[tuple[str, int], list[tuple[int, int, list[str]]]] = defaultdict(list)

    def replace(self, piece: Piece, start: int, end: int, lines: list[str]) -> None:
        """Put `lines` in the place of [start, end) of the cell of a piece, or before `start` where
        the two are equal."""
        assert isinstance(piece.source, Cell)
        self.changes[piece.source.lecture, piece.source.number].append((start, end, lines))

    def apply(self, lecture: Lecture) -> dict[str, Any]:
        """A copy of a notebook's JSON with the edits; ids, outputs and metadata stay."""
        data = copy.deepcopy(lecture.data)
        for number, changes in (
            (number, c) for (name, number), c in self.changes.items() if name == lecture.name
        ):
            raw = data["cells"][number - 1]
            lines = source_of(raw)
            done = 0
            result: list[str] = []
            for start, end, new in sorted(changes, key=lambda change: (change[0], change[1])):
                result += [*lines[done:start], *new]
                done = max(done, end)
            raw["source"] = (
                "\n".join([*result, *lines[done:]]).rstrip("\n").splitlines(keepends=True)
            )
        return data


def pull(root: Path, names: Sequence[str]) -> list[str]:
    """Change the cells of lectures, all of them for no name, so that they build the present
    modules.

    The modules are sorted and formatted first. Lectures are written only if they then build all of
    their modules exactly. Edits of a lecture that was not built since stay: the module gets them,
    too.

    Returns:
        One message per change.

    Raises:
        CourseError: some of the edit cannot be carried back; it names the rest. Nothing is written
            then.
    """
    modules = build(root, read_lectures(root, names))
    on_disk = current_texts(root, modules)
    current = _with_edits_of_lectures(modules, on_disk, LastBuilt(root))
    notes = [
        f"{module.path}: not there yet; build it"
        for module in modules
        if module.path not in current
    ]
    edited = [m for m in modules if m.path in current and current[m.path] != m.text]
    polished, problems = polish(root, {module.path: current[module.path] for module in edited})
    for path, row, message in problems:
        raise CourseError(f"{path}, line {row}: {message}")
    edits = Edits()
    for module in edited:
        if polished[module.path] != module.text:
            _carry_module(module, polished[module.path], edits)
    lectures = read_lectures(root)
    data = {
        lecture.path: new for lecture in lectures if (new := edits.apply(lecture)) != lecture.data
    }
    _verify(root, names, data, {**current, **polished})
    for file, content in data.items():
        mark(content["cells"])
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    notes += [f"{name}: changed cell {number}" for name, number in sorted(edits.changes)]
    for path, text in {**current, **polished}.items():
        if on_disk[path] != text:
            (root / path).write_text(text, encoding="utf-8")
            is_merged = on_disk[path] != current[path]
            what = "has the lecture's edits, too" if is_merged else "sorted and formatted"
            notes.append(f"{path}: {what}")
    LastBuilt(root).store({**current, **polished})
    return notes


def _with_edits_of_lectures(
    modules: Sequence[Module], texts: dict[str, str], last: LastBuilt
) -> dict[str, str]:
    """The source of each module, by path, with what was edited in their lectures since the two
    agreed.

    Raises:
        CourseError: a module and its lecture differ in lines that both have changed; it names the
            modules.
    """
    built = {module.path: module.text for module in modules}
    merged = {
        path: text if text == built[path] else last.merged(path, text, built[path])
        for path, text in texts.items()
    }
    torn = [path for path, text in merged.items() if text is None]
    if torn:
        raise CourseError(
            "These modules and their lectures have both changed the same lines:\n"
            + "".join(f"  {path}\n" for path in torn)
            + "Nothing was written. `python -m nanovllm.lab.course build --check` shows the lines: "
            "make both sides equal there, and pull again."
        )
    return {path: text for path, text in merged.items() if text is not None}


def _verify(
    root: Path, names: Sequence[str], data: dict[Path, Any], wanted: dict[str, str]
) -> None:
    """Check that changed notebooks build the wanted modules, character by character."""
    failed = (
        "this cannot be carried back (the lectures are as they were), so edit the lecture instead:"
    )
    try:
        rebuilt = build(root, read_lectures(root, names, data))
    except CourseError as error:
        raise CourseError(f"{failed}\n{error}") from None
    found = differences(wanted, [item for item in rebuilt if item.path in wanted])
    if found:
        raise CourseError("\n".join([failed, *found]))


def _carry_module(module: Module, wanted: str, edits: Edits) -> None:
    before, shown_before = _pieces_of(module.path, module.text)
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


def _carry_pieces(
    module: Module, origins: list[Piece], before: list[Piece], after: list[Piece], edits: Edits
) -> None:
    """Carry the changes among siblings, from the pieces `before` the edit to those `after` it.

    `origins` are the same siblings as pieces of cells; keys find one in the other.
    """
    origin_of = {piece.key: piece for piece in origins}
    old_of = {piece.key: piece for piece in before}
    kept = {piece.key for piece in after}
    top = next((origin for origin in origins if origin.key in kept), None)
    anchor: Piece | None = None
    for row, new in enumerate(after):
        origin = origin_of.get(new.key)
        old = old_of.get(new.key)
        if origin is None or old is None:
            below = after[row + 1] if row + 1 < len(after) else None
            follower = next((origin_of[p.key] for p in after[row:] if p.key in origin_of), None)
            if follower and follower.first.is_placed:
                # Below the anchor, in the anchor's cell, it would end up below the follower.
                _insert(module, new, at=None, top=follower, below=below, edits=edits)
            else:
                _insert(module, new, at=anchor, top=top, below=below, edits=edits)
            continue
        if new.members and old.members and origin.members:
            if new.head != old.head:
                edits.replace(origin, origin.start, origin.start + len(origin.head), new.head)
            _carry_pieces(module, origin.members, old.members, new.members, edits)
        elif new.lines != old.lines:
            edits.replace(origin, origin.start, origin.end, _as_in_cell(new.lines, origin))
        if anchor and origin.follows(anchor) and new.blanks != old.blanks:
            edits.replace(origin, anchor.end, origin.start, [""] * new.blanks)
        anchor = origin
    _delete([origin_of[key] for key in old_of if key not in kept and key in origin_of], edits)


def _insert(
    module: Module,
    new: Piece,
    *,
    at: Piece | None,
    top: Piece | None,
    below: Piece | None,
    edits: Edits,
) -> None:
    """Add a new piece after the one above it in the module, or before the first one."""
    if at:
        seat = at.first
        row = seat.end
        lines = [*[""] * new.blanks, *_as_in_cell(new.lines, seat)]
    elif top:
        seat = top.first
        row = seat.start
        lines = [*new.lines, *[""] * (below.blanks if below else 0)]
    else:
        raise CourseError(
            f"{module.path}: `{new.lines[0].strip()}` has no neighbour in a cell to be added to"
        )
    edits.replace(seat, row, row, lines)


def _as_in_cell(lines: list[str], origin: Piece) -> list[str]:
    """Lines of a module as the cell of `origin` has them: there, state is in the class body."""
    return from_init(lines) if origin.is_state else lines


def _delete(gone: list[Piece], edits: Edits) -> None:
    """Remove pieces, a class with all its continuations, and a continuation with the last of its
    members."""
    for origin in gone:
        for part in origin.parts or [origin]:
            parent = part.parent
            if (
                parent
                and not parent.parts
                and all(m in gone or m.kind == "comment" for m in parent.members)
            ):
                part = parent
            start = part.start
            end = part.end
            lines = part.source.lines
            while start > part.source.body and not lines[start - 1].strip():
                start -= 1
            opening = part.parent.start + len(part.parent.head) if part.parent else part.source.body
            while start == opening and end < len(lines) and not lines[end].strip():
                end += 1
            edits.replace(part, start, end, [])


def _carry_docstring(module: Module, before: list[Piece], after: list[Piece], edits: Edits) -> None:
    old = _summary(before, module)
    new = _summary(after, module)
    if new is None or new == old:
        return
    found = module.docstring
    lines = quoted(new + "\n" if "\n" in new else new)
    edits.changes[module.lecture.name, found.number].append((found.start, found.end, lines))


def _summary(pieces: list[Piece], module: Module) -> str | None:
    """The docstring without the line that names the lectures."""
    text = ast.get_docstring(ast.Module([piece.node for piece in pieces if piece.node], []))
    return text and text.removesuffix(module.marker).strip()


def _carry_imports(module: Module, before: list[Piece], after: list[Piece], edits: Edits) -> None:
    """Add new imports to the lecture; the build merges them, and drops one that is no longer
    used."""
    known = _imports(before) | _imports([*module.imports, *module.typing])
    blocks = module.typing
    imports = module.imports
    for statement, typing in sorted(_imports(after) - known):
        if typing and blocks:
            cell = blocks[0].source
            row = blocks[0].end
            lines = [f"    {statement}"]
        else:
            lines = ["", "if TYPE_CHECKING:", f"    {statement}"] if typing else [statement]
            if imports:
                same = [piece for piece in imports if piece.source is imports[0].source]
                cell = imports[0].source
                row = same[0].start if "from __future__" in statement else same[-1].end
            else:
                cell = module.cells[0]
                row = module.cells[0].body
                lines = [*lines, ""]
                if cell.sets_module == module.name:
                    row = module.docstring.end
                    lines = ["", *lines]
        assert isinstance(cell, Cell)
        edits.changes[cell.lecture, cell.number].append((row, row, lines))


def _imports(pieces: list[Piece]) -> set[tuple[str, bool]]:
    """Import statements, and whether each is under TYPE_CHECKING."""
    nodes = [
        (node, piece.kind == "typing")
        for piece in pieces
        for node in (piece.node.body if isinstance(piece.node, ast.If) else [piece.node])
    ]
    return {
        (ast.unparse(node), typing)
        for node, typing in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
