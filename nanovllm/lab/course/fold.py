"""Fold the exported cells of a lecture into the text of a module: one ordinary class out of all its
cells."""

import ast
import re
from dataclasses import dataclass, field

from nanovllm.lab.course.notebook import PACKAGE, Cell, Docstring, Lecture, Place
from nanovllm.lab.course.pieces import Piece, cut, first_row, label

MARKER = "Built by {}: edit it there."
_COURSE = f"{PACKAGE}.lab.course"


@dataclass
class Module:
    """A module as pieces of cells: `pieces` in the order in which the module shows them. Its `text`
    is sorted and formatted by `build`."""

    name: str
    lecture: Lecture
    docstring: Docstring
    cells: list[Cell]
    imports: list[Piece] = field(default_factory=list)
    typing: list[Piece] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    text: str = ""

    @property
    def path(self) -> str:
        """The path of the module, relative to the root."""
        return f"{PACKAGE}/{self.name.replace('.', '/')}.py"

    @property
    def marker(self) -> str:
        """The line of its docstring that names its lecture, and the numbers of those that continue
        it."""
        later = dict.fromkeys(
            cell.lecture.split("/")[-1].split("_")[0] for cell in self.cells if cell.extends
        )
        return MARKER.format(self.lecture.name + f" and {', '.join(later)}" * bool(later))

    def source(self) -> str:
        """The source of the pieces, neither sorted nor formatted."""
        docstring = quoted(f"{self.docstring.text}\n\n{self.marker}\n".lstrip())
        imports = [line for piece in self.imports for line in piece.lines]
        typing = [
            line for piece in self.typing for line in piece.lines if line != "if TYPE_CHECKING:"
        ]
        typing[:0] = ["if TYPE_CHECKING:"] * bool(typing)  # one for the imports of all cells
        lines = [*docstring, "", *imports, "", *typing, "", *_render(self.pieces)]
        return "\n".join(lines).rstrip() + "\n"


def quoted(text: str) -> list[str]:
    """The lines of a string literal in triple quotes, raw where it has backslashes."""
    prefix = "r" if "\\" in text and '"""' not in text else ""
    if not prefix:
        text = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'{prefix}"""{text}"""'.split("\n")


def fold(lecture: Lecture, name: str) -> Module:
    """Put together the cells that a lecture exports to a module.

    Raises:
        CourseError: with the cell and the line, where a cell cannot be part of a module.
    """
    cells = [cell for cell in lecture.exports if cell.module == name]
    module = Module(name, lecture, lecture.docstring(name), cells)
    for cell in cells:
        comments: list[Piece] = []
        continues = False
        for piece in cut(cell):
            if piece.kind == "comment":
                comments.append(piece)
            elif piece.kind == "docstring":
                if cell.sets_module is None:
                    raise cell.error(
                        "a module's docstring belongs in the cell of its `default_exp`",
                        piece.start + 1,
                    )
            elif piece.kind == "import":
                # Only lectures need `extend`, and the class that they continue.
                source = piece.node.module if isinstance(piece.node, ast.ImportFrom) else None
                if source not in (_COURSE, f"{PACKAGE}.{name}"):
                    module.imports.append(piece)
            elif piece.kind == "typing":
                module.typing.append(piece)
            elif _reopens(piece):
                module.pieces += comments
                comments = []
                continues = True
                _extend(module, piece)
            else:
                _place(module.pieces, piece, comments)
                comments = []
        module.pieces += comments
        if (cell.places or cell.into_init) and not continues:
            line = max([cell.into_init, *(place.line for place in cell.places.values())])
            raise cell.error("a place is for members of a class that the cell continues", line)
    label(module.pieces)
    module.text = module.source()
    return module


def _place(siblings: list[Piece], piece: Piece, comments: list[Piece]) -> None:
    """Append a piece below its comments, or put it in the place of what an earlier cell calls by
    its name.

    At the top of a module an assignment is a step that code between may rely on, so it replaces
    nothing."""
    replaces = piece.kind in ("definition", "class") or (piece.parent is not None and piece.name)
    versions = [
        sibling
        for sibling in siblings
        if replaces
        and sibling.name == piece.name
        and (sibling.source, sibling.parent) != (piece.source, piece.parent)
    ]
    if piece.kind == "docstring" and not versions:
        siblings.insert(0, piece)
    elif not versions:
        siblings += [*comments, piece]
    else:
        piece.seat = versions[0].first
        index = siblings.index(versions[0])
        siblings[index : index + 1] = [*comments, piece]
        piece.members += [member for member in versions[0].members if member.is_state]
        for version in versions[1:]:
            siblings.remove(version)


def _reopens(piece: Piece) -> bool:
    """Whether a statement is `@extend class A(A)`; refuses whatever only looks like it."""
    node = piece.node
    if not isinstance(node, ast.ClassDef):
        return False
    bases = [ast.unparse(base) for base in node.bases]
    decorators = [ast.unparse(d) for d in node.decorator_list]
    if node.name not in bases and "extend" not in decorators:
        return False
    # A comment above @extend would have no place in the module.
    is_bare = not node.keywords and piece.start == first_row(node)
    if bases != [node.name] or decorators != ["extend"] or not is_bare or piece.kind != "class":
        wanted = (
            f"`@extend`, `class {node.name}({node.name}):` and the members on lines of their own, "
            "nothing else"
        )
        raise piece.source.error(f"a class is continued by {wanted}", first_row(node) + 1)
    return True


def _extend(module: Module, part: Piece) -> None:
    """Add the members of a reopened class to the class."""
    assert isinstance(part.node, ast.ClassDef)
    name = part.node.name
    found = [
        piece
        for piece in module.pieces
        if piece.name == name and isinstance(piece.node, ast.ClassDef)
    ]
    if not found:
        message = f"class {name} is continued, but no earlier cell defines it in {module.name}"
        raise part.source.error(message, part.start + 1)
    target = found[-1]
    if target.kind != "class":
        raise target.source.error(
            f"write the body of class {name} on its own lines to continue it", target.start + 1
        )
    cell = part.source
    assert isinstance(cell, Cell)
    groups: dict[str, list[Piece]] = {name: [] for name in cell.places}
    comments: list[Piece] = []
    for member in part.members:
        if member.kind == "comment":
            comments.append(member)
        elif cell.into_init and member.kind == "assignment":
            _add_state(target, member, comments)
            comments = []
        else:
            _place(target.members, member, comments)
            if member.seat is None and member.kind != "docstring":
                name = member.name if member.name in cell.places else ""
                groups.setdefault(name, []).extend([*comments, member])
            comments = []
    target.members += comments
    groups.setdefault("", []).extend(comments)
    for name, place in cell.places.items():
        _move(target, groups[name], place, cell)
    target.parts.append(part)
    part.parts = []


def _move(target: Piece, new: list[Piece], place: Place, cell: Cell) -> None:
    """Give the new members of a class, with the comments above them, the place that their cell
    asks for."""
    rest = [member for member in target.members if member not in new]
    names = [member.name for member in rest]
    if not any(member.name for member in new):
        raise cell.error(
            f"`{place.side}={place.member}` places nothing: class {target.name} gets no such new "
            "member here, and one that replaces another keeps its place",
            place.line,
        )
    if place.member not in names:
        raise cell.error(
            f"class {target.name} has no member `{place.member}` for new members to stand "
            f"{place.side}; so far it has {', '.join(filter(None, names))}",
            place.line,
        )
    index = names.index(place.member) + (place.side == "after")
    target.members[:] = [*rest[:index], *new, *rest[index:]]
    new[0].is_placed = place.side == "after"


def _add_state(target: Piece, member: Piece, comments: list[Piece]) -> None:
    """Turn an assignment in the body of a reopened class into a statement at the end of
    `__init__`.

    The value must not change, since all objects of the class share it in the lecture."""
    source = member.source
    assert isinstance(member.node, ast.Assign | ast.AnnAssign)
    line = member.node.lineno
    starts = [m for m in target.members if m.name == "__init__" and m.members]
    if not starts:
        raise source.error(
            f"class {target.name} has no `__init__` (below its `def` line) that "
            "`into=__init__` could add to",
            line,
        )
    if not member.name.isidentifier() or not _is_constant(member.node.value):
        raise source.error(
            "`into=__init__` takes assignments of one name to a constant, such as `count = 0`", line
        )
    if comments:
        raise source.error(
            "put the comment directly above the assignment that goes into `__init__`", line
        )
    member.lines = to_init(member.lines, member.name)
    member.name = f"self.{member.name}"
    member.is_state = True
    starts[0].members.append(member)


def _is_constant(node: ast.expr | None) -> bool:
    """Whether it is a literal that cannot be changed: a constant, or a tuple of constants."""
    if isinstance(node, ast.UnaryOp):
        return _is_constant(node.operand)
    if isinstance(node, ast.Tuple):
        return all(map(_is_constant, node.elts))
    return isinstance(node, ast.Constant)


def to_init(lines: list[str], name: str) -> list[str]:
    """The lines of an assignment of a class body, as `__init__` has them."""
    return [
        "    " + re.sub(rf"^    {name}\b", f"    self.{name}", line) if line.strip() else line
        for line in lines
    ]


def from_init(lines: list[str]) -> list[str]:
    """The opposite of `to_init`."""
    return [re.sub(r"^    self\.", "    ", line.removeprefix("    ")) for line in lines]


def _render(pieces: list[Piece]) -> list[str]:
    """The lines of siblings; a blank line parts what stood apart in the lecture."""
    lines: list[str] = []
    for index, piece in enumerate(pieces):
        if index and not piece.is_state:
            lines += [""] * (piece.blanks or not piece.follows(pieces[index - 1]))
        lines += [*piece.head, *_render(piece.members)] if piece.members else piece.lines
    return lines
