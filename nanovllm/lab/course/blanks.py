"""Blanks of all lectures in the modules that they build, and functions in Python source that are
exchanged for others of the same name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nanovllm.lab.course.build import build, find_lectures, read_lectures
from nanovllm.lab.course.fold import fold
from nanovllm.lab.course.notebook import CourseError, Lecture
from nanovllm.lab.course.pieces import Function, first_row, last_row
from nanovllm.lab.course.workbook import is_open, workbook_path


@dataclass(frozen=True)
class Blank:
    """A function that the reader writes.

    Attributes:
        name: such as `BlockPool.touch`.
        lecture: its number.
        path: of its module, relative to the course.
        tests: that decide whether it is right, as pytest takes them.
        section: heading of its section in the lecture.
    """

    name: str
    lecture: int
    path: str
    tests: tuple[str, ...]
    section: str


class Course:
    """Lectures, their modules and blanks.

    Attributes:
        titles: of the lectures that build modules, by number, in order.
        blanks: by name, in the order of the lectures.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.titles: dict[int, str] = {}
        self.blanks: dict[str, Blank] = {}
        for lecture in read_lectures(root):
            if not lecture.modules:
                continue
            number = number_of(lecture.name)
            self.titles[number] = Path(lecture.name).stem[3:].replace("_", " ")
            for cell in lecture.exports:
                for name, tests in cell.yours.items():
                    path = f"nanovllm/{str(cell.module).replace('.', '/')}.py"
                    section = _section(lecture, cell.number)
                    self.blanks[name] = Blank(name, number, path, tuple(tests.split()), section)

    def blanks_of(self, lectures: Iterable[int]) -> list[Blank]:
        """The blanks of some lectures."""
        wanted = set(lectures)
        return [blank for blank in self.blanks.values() if blank.lecture in wanted]

    def until(self, number: int) -> list[int]:
        """The lectures up to one of them.

        Raises:
            CourseError: no such lecture builds a module.
        """
        numbers = list(self.titles)
        if number not in numbers:
            raise CourseError(
                f"no lecture {number} builds a module; these do: {', '.join(map(str, numbers))}"
            )
        return numbers[: numbers.index(number) + 1]

    def workbook(self, number: int) -> Path:
        """The path of the workbook of a lecture, which may not be written yet."""
        (lecture,) = find_lectures(self.root, [str(number)])
        return workbook_path(self.root, lecture)

    def solution(self, blank: Blank) -> list[str]:
        """The lecture's lines of a function."""
        text = (self.root / blank.path).read_text(encoding="utf-8")
        return Functions(text, blank.path).lines(blank.name)

    def modules(self, lectures: Iterable[int]) -> dict[str, str]:
        """The modules that these lectures build, by path, with all blanks open and without the
        cells of other lectures."""
        wanted = set(lectures)
        read = [each for each in read_lectures(self.root) if number_of(each.name) in wanted]
        for lecture in read:
            lecture.exports = [c for c in lecture.exports if number_of(c.lecture) in wanted]
        texts = {
            module.path: module.text.replace(module.marker, f"Of {module.lecture.name}.")
            for module in build(self.root, read)
        }
        for blank in self.blanks_of(wanted):
            functions = Functions(texts[blank.path], blank.path)
            texts[blank.path] = functions.replace({blank.name: functions.opened(blank.name)}).text
        return texts

    def extended_by(self, number: int) -> set[str]:
        """Paths of the modules to which a lecture adds cells, its own included."""
        return {
            fold(lecture, name).path
            for lecture in read_lectures(self.root)
            for name in lecture.modules
            if any(c.module == name and number_of(c.lecture) == number for c in lecture.exports)
        }


def number_of(lecture: str) -> int:
    """The number of a lecture with this file name."""
    return int(Path(lecture).name[:2])


def _section(lecture: Lecture, number: int) -> str:
    """The last heading above a cell, counted from 1."""
    found = ""
    for cell in lecture.data["cells"][:number]:
        if cell["cell_type"] == "markdown":
            headings = re.findall(r"(?m)^#+ (.+)$", "".join(cell["source"]))
            found = headings[-1] if headings else found
    return found


@dataclass
class Replaced:
    """Source with other functions, which may be longer or shorter.

    Attributes:
        moves: (first line after a function that was replaced, by how many lines it moved), from
            bottom to top; lines count from 1 in the text as it was.
    """

    text: str
    moves: list[tuple[int, int]] = field(default_factory=list)

    def line(self, number: int) -> int:
        """The line of the text as it was that this line has become."""
        for first, distance in sorted(self.moves):
            if number >= first + distance:
                number -= distance
        return number


class Functions:
    """The functions and methods of a module.

    Raises:
        CourseError: syntax error; the message begins with the place.
    """

    def __init__(self, text: str, place: str) -> None:
        self._place = place
        self._lines = text.split("\n")
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            if (error.text or "").startswith(("<<<<<<<", "=======", ">>>>>>>")):
                raise CourseError(
                    f"{place}:{error.lineno}: git has left two versions of these lines in a merge: "
                    "keep one, and delete the lines that begin with <<<<<<<, ======= and >>>>>>>"
                ) from None
            raise CourseError(f"{place}:{error.lineno}: syntax error: {error.msg}") from None
        except ValueError as error:  # a null byte
            raise CourseError(f"{place}: syntax error: {error}") from None
        self._nodes: dict[str, Function] = {}
        for node in tree.body:
            if isinstance(node, Function):
                self._nodes[node.name] = node
            elif isinstance(node, ast.ClassDef):
                members = (each for each in node.body if isinstance(each, Function))
                self._nodes |= {f"{node.name}.{each.name}": each for each in members}

    def node(self, name: str) -> Function:
        """A function's node.

        Raises:
            CourseError: there is no such function.
        """
        if name not in self._nodes:
            raise CourseError(
                f"{self._place}: `{name}` is missing: is it misspelt? `git diff {self._place}` "
                "shows what you have changed"
            )
        return self._nodes[name]

    def is_open(self, name: str) -> bool:
        """Whether a function is still blank."""
        return is_open(self.node(name))

    def lines(self, name: str) -> list[str]:
        """The lines of a function, decorators included."""
        node = self.node(name)
        return self._lines[first_row(node) : last_row(node)]

    def opened(self, name: str) -> list[str]:
        """The lines of a function up to the end of its docstring, and an error instead of the
        rest."""
        node = self.node(name)
        first = node.body[0]
        error = f'{" " * first.col_offset}raise NotImplementedError("write {name}")'
        return [*self._lines[first_row(node) : last_row(first)], error]

    def replace(self, new: Mapping[str, list[str]]) -> Replaced:
        """The module with other lines for some functions."""
        lines = list(self._lines)
        moves = []
        for name in sorted(new, key=lambda name: -first_row(self.node(name))):
            start = first_row(self.node(name))
            end = last_row(self.node(name))
            lines[start:end] = new[name]
            moves.append((end + 1, len(new[name]) - (end - start)))
        return Replaced("\n".join(lines), moves)
