"""Chooses what a run may leave out: tests that a change of some packages cannot reach, and lectures
that have passed and did not change since.

    python -m tests.selection packages scheduler kv     # folders with tests of these and all above
    python -m tests.selection lectures                  # lectures to run, the longest first
    python -m tests.selection lectures --all            # every lecture

As a plugin of pytest (`-p tests.selection`), it notes the lectures that pass.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import os
import pathlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import pytest

from tests.house import PACKAGE, ROOMS, ROOT
from tests.test_house import FILES, edges, resolve

NOTEBOOKS = ROOT / "notebooks"
# Not in git: the digests of lectures when they passed here.
RECORD = ROOT / "build" / "passed_lectures.json"
# What every run contains, however small the change.
ALWAYS = ("tests/test_house.py", "tests/test_reading_order.py", "tests/test_project.py")
# Files outside the package on which the result of a lecture depends.
ENVIRONMENT = ("constraints.txt", "nanovllm/lab/course/sanitize.cfg", "tests/forked_kernels.py")


def packages_above(names: Iterable[str]) -> list[str]:
    """Return the packages with these names, and all that import them, directly or not.

    Raises:
        SystemExit: there is no such package; names those there are.
    """
    users: dict[str, set[str]] = defaultdict(set)
    for user, used in edges(with_strings=True):
        users[used.split(".")[0]].add(user.split(".")[0])
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in ROOMS:
            raise SystemExit(f"there is no package {name!r}: there are {', '.join(ROOMS)}")
        found.add(name)
        waiting += [user for user in users[name] if user in ROOMS and user not in found]
    return [room for room in ROOMS if room in found]


def test_paths(names: Iterable[str]) -> list[str]:
    """Return the paths that pytest is given for changes of the packages with these names."""
    folders = [f"tests/{room}" for room in packages_above(names)]
    return [*ALWAYS, *(folder for folder in folders if (ROOT / folder).is_dir())]


@functools.cache
def lecture_digest(notebook: pathlib.Path) -> str:
    """Return a digest of all that the result of a lecture depends on: its own file with its
    outputs, the modules it imports, directly or not, and the other files of their packages."""
    data = json.loads(notebook.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in data["cells"] if cell["cell_type"] == "code"]
    modules, scripts = _imported("\n".join(_without_magic(cell) for cell in cells))
    rooms = {module.split(".")[0] for module in modules}
    others = [
        path
        for room in sorted(rooms - {""})
        for path in sorted((PACKAGE / room).rglob("*"))
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    files = [notebook, *(FILES[module] for module in sorted(modules)), *sorted(scripts), *others]
    digest = hashlib.sha256()
    for path in (*files, *(ROOT / name for name in ENVIRONMENT)):
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _num_cells(notebook: pathlib.Path) -> int:
    """Return the number of cells with code, each of which nbval makes a test."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return sum(cell["cell_type"] == "code" for cell in cells)


def _without_magic(cell: str) -> str:
    lines = cell.split("\n")
    return "\n".join("" if line.startswith(("%", "!")) else line for line in lines)


def _imported(source: str) -> tuple[set[str], set[pathlib.Path]]:
    """Return the modules of the package and the scripts in notebooks/ that a source imports,
    directly or not."""
    modules: set[str] = set()
    scripts: set[pathlib.Path] = set()
    waiting = [source]
    while waiting:
        for name in _imported_names(waiting.pop()):
            script = NOTEBOOKS / f"{name.split('.')[0]}.py"
            if script.is_file() and script not in scripts:
                scripts.add(script)
                waiting.append(script.read_text(encoding="utf-8"))
            if name.startswith("nanovllm."):
                modules.add(resolve(name.removeprefix("nanovllm.")) or "")
            elif name == "nanovllm":
                modules.add("")
    return _closure(modules), scripts


def _imported_names(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def _used_by() -> dict[str, set[str]]:
    used: dict[str, set[str]] = defaultdict(set)
    for user, module in edges(with_strings=True):
        used[user].add(module)
    return used


def _closure(modules: Iterable[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += _used_by()[module]
    return found


def lectures(every: bool) -> list[pathlib.Path]:
    """Return the lectures that have to run, the last one first: the last are the longest.

    Args:
        every: also those that have passed and did not change since. It is meant in CI, too.
    """
    passed = {} if every or os.environ.get("CI") else _record()
    notebooks = sorted(NOTEBOOKS.glob("*.ipynb"), reverse=True)
    return [path for path in notebooks if passed.get(path.name) != lecture_digest(path)]


def _record() -> dict[str, str]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


# ---------------------------------------------------------------- the plugin


class PassedLectures:
    """Notes which lectures a run executes to their end without a failure."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._num_ran: Counter[str] = Counter()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in the report of a cell."""
        path = ROOT / report.nodeid.split("::")[0]
        if path.suffix != ".ipynb":
            return
        if path.name not in self._digests:
            self._digests[path.name] = lecture_digest(path)
        if report.failed:
            self._failed.add(path.name)
        elif report.when == "call" or report.skipped:
            self._num_ran[path.name] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Store the digests, unless the run was interrupted."""
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        stored = _record()
        for name, digest in self._digests.items():
            is_whole = self._num_ran[name] == _num_cells(NOTEBOOKS / name)
            stored[name] = digest if is_whole and name not in self._failed else ""
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin in the process that gets all reports."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(PassedLectures())


def main() -> None:
    """Print the paths to run."""
    parser = argparse.ArgumentParser(prog="python -m tests.selection", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("packages").add_argument("names", nargs="+", metavar="PACKAGE")
    commands.add_parser("lectures").add_argument("--all", action="store_true", dest="every")
    arguments = parser.parse_args()
    if arguments.command == "packages":
        print(*test_paths(arguments.names))
    else:
        print(*(path.relative_to(ROOT) for path in lectures(arguments.every)))


if __name__ == "__main__":
    main()
