"""Workbooks: a lecture whose core methods are blank, and the check that runs the engine's tests
with what the learner wrote.

A blank is named in the cell that defines it, with the tests that decide whether it is right:

    #| yours BlockPool.touch: tests/core/test_block_pool.py tests/kv/test_pools.py::TestPool
"""

import ast
import json
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from nanovllm.lab.course.build import build, find_lectures, read_lectures, write
from nanovllm.lab.course.copies import FOLDER
from nanovllm.lab.course.fold import fold
from nanovllm.lab.course.notebook import PACKAGE, CourseError, load
from nanovllm.lab.course.pieces import Function, Piece
from nanovllm.lab.course.pull import Edits
from nanovllm.lab.course.trials import LIMIT, Outcome, Trials
from nanovllm.lab.course.unchanged import mark

_SOLUTION = re.compile(r"<details><summary>Solution.*?</details>\s*", re.DOTALL)
_INTRODUCTION = (
    "**This is your workbook.** You write {names}: each has a docstring that says what it does, "
    "and raises an error so far. Save the\n"
    "notebook and run, in a terminal in the project's folder, "
    "`.venv/bin/python -m nanovllm.lab.course check {number}`: this puts what you wrote into the "
    "engine,\n"
    "runs the engine's own tests, and says what is wrong."
)


class Workbook:
    """A lecture and its blanks: the functions that the learner writes.

    Args:
        path: the lecture in notebooks/.
        data: the JSON of the learner's copy of it; by default the lecture's own.

    Attributes:
        tests: for each blank the tests that decide whether it is right, as pytest takes them.
        blanks: the piece of a cell that defines it.

    Raises:
        CourseError: a cell cannot be folded, does not define its blank, or names a test that does
            not exist.
    """

    def __init__(self, root: Path, path: Path, data: dict[str, Any] | None = None) -> None:
        self.root = root
        self.path = path
        lectures = self._read(data)
        self.lecture = next(lecture for lecture in lectures if lecture.path == path)
        modules = [fold(lecture, name) for lecture in lectures for name in lecture.modules]
        pieces = [piece for module in modules for piece in module.pieces]
        self.tests = dict[str, str]()
        self.blanks = dict[str, Piece]()
        for cell in (
            cell for module in modules for cell in module.cells if cell.lecture == self.lecture.name
        ):
            for name, tests in cell.yours.items():
                piece = _find(pieces, name)
                if piece is None or piece.source.place.split(":")[0] != self.lecture.name:
                    raise cell.error(
                        f"this cell must define `{name}`, and no later lecture may replace it", 1
                    )
                for file, _, test in (
                    each.partition("::") for each in tests.split() if data is None
                ):
                    if not (root / file).is_file() or test not in (root / file).read_text(
                        encoding="utf-8"
                    ):
                        raise cell.error(f"there is no test {file}::{test}", 1)
                self.tests[name], self.blanks[name] = tests, piece

    def _read(self, data: dict[str, Any] | None) -> list[Any]:
        return read_lectures(self.root, [self.path.stem], {self.path: data} if data else None)

    def replace(self, new: Mapping[str, list[str]]) -> dict[str, Any]:
        """The notebook's JSON with other lines for some of the blanks."""
        edits = Edits()
        for name, lines in new.items():
            edits.replace(self.blanks[name], self.blanks[name].start, self.blanks[name].end, lines)
        return edits.apply(self.lecture)

    def write_package(self, new: Mapping[str, list[str]], folder: Path) -> None:
        """Write the whole package with this notebook's modules and other lines for some of the
        blanks."""
        modules = build(self.root, self._read(self.replace(new)))
        shutil.copytree(self.root / PACKAGE, folder / PACKAGE)
        write(folder, modules)

    def to_fill_in(self) -> dict[str, Any]:
        """The JSON of the learner's notebook: docstrings without bodies, no outputs, and no
        solutions."""
        data = self.replace({name: blank(name, piece) for name, piece in self.blanks.items()})
        for cell in data["cells"]:
            cell["source"] = _SOLUTION.sub("", "".join(cell["source"]))
            cell |= {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
        text = _INTRODUCTION.format(
            names=", ".join(f"`{name}`" for name in self.blanks), number=self.path.name[:2]
        )
        first = {"cell_type": "markdown", "id": "workbook", "metadata": {}, "source": text}
        data["cells"] = [
            data["cells"][0],
            first,
            *(cell for cell in data["cells"][1:] if cell["source"]),
        ]
        mark(data["cells"])
        return data


def _find(pieces: list[Piece], name: str) -> Piece | None:
    """A function by its name, such as `touch` or `BlockPool.touch`."""
    first, _, rest = name.partition(".")
    found = next((piece for piece in pieces if piece.name == first), None)
    return _find(found.members, rest) if found and rest else found


def blank(name: str, piece: Piece) -> list[str]:
    """The lines of a function up to the end of its docstring, and an error instead of the rest."""
    node = piece.node
    if not isinstance(node, Function) or ast.get_docstring(node) is None:
        raise piece.source.error(
            f"`{name}` is not a function with a docstring, which tells the learner what to write", 1
        )
    line = f'{" " * node.body[0].col_offset}raise NotImplementedError("write {name}")'
    return [*piece.source.lines[piece.start : node.body[0].end_lineno], line]


def is_open(node: ast.stmt | None) -> bool:
    """Whether a function is still blank: its docstring, and an error instead of the rest."""
    rest = node.body[1:] if isinstance(node, Function) and ast.get_docstring(node) else []
    return (
        len(rest) == 1
        and isinstance(rest[0], ast.Raise)
        and "NotImplementedError" in ast.unparse(rest[0])
    )


def explain(outcome: Outcome, names: Collection[str] = ()) -> str:
    """What is wrong according to pytest, in a few lines; "" if all tests pass.

    Args:
        names: functions that the learner wrote.
    """
    if outcome.code == 0:
        return ""
    if outcome.stuck:
        place = outcome.stuck[0]
        is_mine = place.function in {name.split(".")[-1] for name in names}
        cause = "Is its loop endless?" if is_mine else "It waits for what a function of yours does."
        return (
            f"no end within the time limit: {place.function} was running, {place.file}:"
            f"{place.line}. {cause} (`--limit` gives a call more seconds)"
        )
    if outcome.late:
        return (
            "not finished: the tests make many calls, or wait, or Python cannot interrupt one. "
            "`--limit` gives them more time, which a slow machine may need"
        )
    _, said, *_ = [
        *re.split(r"(?m)^=.* (?:FAILURES|ERRORS) =.*\n|^!.*\n", outcome.text),
        outcome.text,
    ]
    # The test and the learner's code are at the beginning, the error at the end.
    lines = [line for line in said.rstrip().split("\n") if "Use -v to get more" not in line]
    return "\n".join(["wrong", *lines[:15], *lines[15:][-12:]])


def write_workbook(root: Path, lecture: str) -> Path:
    """Write the workbook of a lecture beside the learner's copies of lectures, and return its
    path."""
    original, file = find_workbook(root, lecture)
    if file.exists():
        raise CourseError(f"{file} already exists: rename or delete it to get a fresh one")
    file.parent.mkdir(exist_ok=True)
    file.write_text(
        json.dumps(original.to_fill_in(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return file


def check(
    root: Path,
    lecture: str,
    file: Path | None = None,
    out: Path | None = None,
    limit: float = LIMIT,
) -> Iterator[tuple[str, str]]:
    """Run the tests of all blanks that are written, with the lecture's own lines for the others. If
    one fails, run those of each blank with the lecture's lines for all others.

    Args:
        file: the learner's notebook; by default where `write_workbook` puts it.
        out: a new folder, to which the package with all of the learner's functions is written if
            they are right.
        limit: seconds for each test.

    Yields:
        The name of a blank, and what is wrong with it: "" if it is right.

    Raises:
        CourseError: there is no such notebook, a cell of it cannot be folded, or the folder is not
            empty.
    """
    original, usual = find_workbook(root, lecture)
    file = file or usual
    if not file.is_file():
        raise CourseError(
            f"{file}: there is no such notebook; `workbook {lecture}` writes {usual.name}"
        )
    if out and out.is_dir() and any(out.iterdir()):
        raise CourseError(f"{out} is not empty: name a new folder")
    try:
        learners = Workbook(root, original.path, load(file, str(file)))
        written = [name for name in original.tests if not is_open(learners.blanks[name].node)]
        with Trials(limit) as trials:
            together = _complaint(learners, original, written, trials) if written else ""
            wrong = len(original.tests) - len(written)
            for name in original.tests:
                if name not in written:
                    yield name, "not written yet"
                    continue
                found = together
                if together and len(written) > 1:
                    found = _complaint(learners, original, [name], trials)
                wrong += bool(found)
                yield name, found
        if together and not wrong:
            raise CourseError(f"each is right alone, and together they are {together}")
        if out and not wrong:
            learners.write_package({}, out)
    except CourseError as error:
        raise CourseError(str(error).replace(original.lecture.name, str(file))) from None


def _complaint(learners: Workbook, original: Workbook, names: list[str], trials: Trials) -> str:
    """Run the tests of these blanks, with the learner's lines for them and the lecture's for
    all others; returns what is wrong, "" if they pass."""
    others = {name: original.blanks[name].lines for name in learners.blanks if name not in names}
    tests = [test for name in names for test in original.tests[name].split()]
    with tempfile.TemporaryDirectory() as folder:
        learners.write_package(others, Path(folder))
        link_tests(learners.root, Path(folder))
        return explain(trials.run_tests(Path(folder), list(dict.fromkeys(tests))), names)


def link_tests(root: Path, folder: Path) -> None:
    """Put the course's tests into a folder with a package that they are to test."""
    for shared in ("tests", "pyproject.toml"):
        (folder / shared).symlink_to(root / shared)


def find_workbook(root: Path, lecture: str) -> tuple[Workbook, Path]:
    """A lecture as a workbook, and the path of the learner's.

    Raises:
        CourseError: no such lecture, or it builds no module.
    """
    (path,) = find_lectures(root, [lecture])
    if not (original := Workbook(root, path)).blanks:
        raise CourseError(f"{path.stem} builds no module, and has no workbook")
    return original, workbook_path(root, path)


def workbook_path(root: Path, lecture: Path) -> Path:
    """The path of the learner's workbook of a lecture."""
    return root / FOLDER / f"{lecture.stem}_workbook.ipynb"
