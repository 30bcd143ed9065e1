"""Fold the exported cells of a lecture into the text of a module: one ordinary class out of all its
cells."""

import ast
from dataclasses import dataclass, field

from nanovllm.lab.course.notebook import PACKAGE, Cell, Docstring, Lecture
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
                if getattr(piece.node, "module", None) not in (_COURSE, f"{PACKAGE}.{name}"):
                    module.imports.append(piece)
            elif piece.kind == "typing":
                module.typing.append(piece)
            elif _reopens(piece):
                module.pieces += comments
                comments = []
                _extend(module, piece)
            else:
                _place(module.pieces, piece, comments)
                comments = []
        module.pieces += comments
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
    comments: list[Piece] = []
    for member in part.members:
        if member.kind == "comment":
            comments.append(member)
            continue
        _place(target.members, member, comments)
        comments = []
    target.members += comments
    target.parts.append(part)
    part.parts = []


def _render(pieces: list[Piece]) -> list[str]:
    """The lines of siblings; a blank line parts what stood apart in the lecture."""
    lines: list[str] = []
    for index, piece in enumerate(pieces):
        if index:
            lines += [""] * (piece.blanks or not piece.follows(pieces[index - 1]))
        lines += [*piece.head, *_render(piece.members)] if piece.kind == "class" else piece.lines
    return lines
