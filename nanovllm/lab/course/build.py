"""Build modules from lectures, and compare the two."""

import ast
import difflib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanovllm.lab.course.copies import FOLDER
from nanovllm.lab.course.fold import MARKER, Module, fold
from nanovllm.lab.course.last_built import LastBuilt
from nanovllm.lab.course.notebook import PACKAGE, CourseError, Lecture, read_lecture

# Sorted and used imports, no empty TYPE_CHECKING block; F821 finds names that only the notebook
# knows.
_RULES = "I,F401,F821,TC005"
_IMPORT_IT = " in the module: define it, or import it in the exported cell that has the imports"


def find_root(start: Path, *others: Path) -> Path:
    """The folder, from `start` or else from others upwards, that holds pyproject.toml and
    notebooks/."""
    for folder in (each for first in (start, *others) for each in (first, *first.parents)):
        if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
            return folder
    raise CourseError(
        f"no folder from {start} upwards has a pyproject.toml and notebooks/: name it with --root"
    )


def find_lectures(root: Path, names: Sequence[str] = ()) -> list[Path]:
    """The notebooks that are meant by file names, stems or the beginnings of stems; all of them for
    no name."""
    every = sorted((root / "notebooks").glob("*.ipynb"))
    found = []
    for name in names:
        if Path(name).exists() and Path(name).resolve().parent.name == FOLDER:
            raise CourseError(
                f"`{name}` is your copy; name the lecture in notebooks/, which modules are built "
                "from"
            )
        wanted = Path(name).name.removesuffix(".ipynb")
        exact = [path for path in every if path.stem == wanted]
        matches = exact or [path for path in every if path.stem.startswith(wanted)]
        if len(matches) != 1:
            choice = ", ".join(path.stem for path in matches or every) or "none"
            raise CourseError(
                f"`{name}` is {'more than one' if matches else 'no'} lecture; there are: {choice}"
            )
        found.append(matches[0])
    return list(dict.fromkeys(found)) if names else every


def read_lectures(
    root: Path, names: Sequence[str] = (), data: Mapping[Path, Any] | None = None
) -> list[Lecture]:
    """Read the course; the lectures that are named, or all, with the cells of later lectures that
    continue their modules.

    Args:
        data: the JSON of notebooks that is not their files'.

    Raises:
        CourseError: two lectures build the same module, none builds the one that a cell continues,
            or one cannot be read.
    """
    every = {path: read_lecture(path, root, (data or {}).get(path)) for path in find_lectures(root)}
    wanted = find_lectures(root, names)
    owners = dict[str, Lecture]()
    for lecture in every.values():
        later = [cell for cell in lecture.exports if cell.extends]
        lecture.exports = [cell for cell in lecture.exports if not cell.extends]
        for cell in later:
            if (owner := owners.get(cell.module or "")) is None:
                raise cell.error(
                    f"no earlier lecture builds {cell.module}, which this cell is to continue", 1
                )
            owner.exports.append(cell)
            wanted += [owner.path] * (lecture.path in wanted)
        for module in lecture.modules:
            if (owner := owners.setdefault(module, lecture)) is not lecture:
                cell = next(cell for cell in lecture.exports if cell.module == module)
                raise cell.error(
                    f"{module} is built by {owner.name} already: `#| extend {module}` continues it",
                    1,
                )
    return [every[path] for path in dict.fromkeys(wanted)]


def build(root: Path, lectures: Iterable[Lecture]) -> list[Module]:
    """Build the modules of lectures, sorted and formatted with the root's settings, without writing
    them.

    Raises:
        CourseError: a cell cannot be folded, or a module uses a name that it neither defines nor
            imports.
    """
    modules = {
        m.path: m for lecture in lectures for m in (fold(lecture, name) for name in lecture.modules)
    }
    texts, problems = polish(root, {path: module.text for path, module in modules.items()})
    for path, row, message in problems:
        raise _locate(modules[path], row, message)
    for path, text in texts.items():
        modules[path].text = text
    return list(modules.values())


def polish(root: Path, texts: dict[str, str]) -> tuple[dict[str, str], list[tuple[str, int, str]]]:
    """Sort imports, drop unused ones and format, all files in two runs of ruff.

    Args:
        root: the folder whose pyproject.toml has the settings.
        texts: module texts by path, relative to the root.

    Returns:
        The polished texts, and the problems that remain as (path, line, message).
    """
    if not texts:
        return {}, []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        report = _ruff(
            root, folder, "check", "--select", _RULES, "--fix", "--output-format", "json"
        )
        problems = [
            (
                Path(item["filename"]).relative_to(folder).as_posix(),
                item["location"]["row"],
                item["message"] + (_IMPORT_IT if item["code"] == "F821" else ""),
            )
            for item in json.loads(report)
            if item["code"] in ("F821", "invalid-syntax", None)
        ]
        if not problems:
            _ruff(root, folder, "format", "--quiet")
        return {path: (folder / path).read_text(encoding="utf-8") for path in texts}, problems


def _ruff(root: Path, folder: Path, *arguments: str) -> str:
    # Without `known-first-party` ruff takes a module of the package for a stranger until its file
    # exists.
    settings = [
        "--config",
        str(root / "pyproject.toml"),
        "--config",
        f'lint.isort.known-first-party=["{PACKAGE}"]',
    ]
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", *settings, "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode > 1 or (done.returncode and arguments[0] == "format"):
        raise CourseError(f"ruff {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


def _locate(module: Module, row: int, message: str) -> CourseError:
    """An error at a line of a module, as an error at the line of the cell that first uses the name
    in the message."""
    named = re.search(r"`(\w+)`", message)
    for cell in module.cells if named else ():
        for node in ast.walk(ast.Module(cell.parse(), [])):
            if named and isinstance(node, ast.Name) and node.id == named[1]:
                hint = (
                    f"{message} in {PACKAGE}.{module.name}: no exported cell before this one "
                    "defines or imports it"
                )
                return cell.error(hint, node.lineno)
    return CourseError(f"{module.lecture.name}: {module.path}, line {row}: {message}")


def current_texts(root: Path, modules: Iterable[Module]) -> dict[str, str]:
    """Return the present text of each module, by path; modules that do not exist yet are left
    out."""
    paths = [module.path for module in modules]
    return {
        path: (root / path).read_text(encoding="utf-8") for path in paths if (root / path).exists()
    }


def differences(current: dict[str, str], modules: Iterable[Module]) -> list[str]:
    """Unified diffs from texts, by path, to the modules that lectures build."""
    found = []
    for module in modules:
        before = current.get(module.path, "")
        built = f"{module.path} (built by {module.lecture.name})"
        if before != module.text:
            texts = before.splitlines(True), module.text.splitlines(True)
            found.append("".join(difflib.unified_diff(*texts, module.path, built)))
    return found


def compare(root: Path, names: Sequence[str]) -> list[str]:
    """Differences between the modules and what lectures build, each followed by what to do about
    it.

    Args:
        names: lectures; for none all of them, and then modules that no lecture builds are named,
            too.
    """
    built = build(root, read_lectures(root, names))
    current = current_texts(root, built)
    last = LastBuilt(root)
    found = []
    for module in built:
        for difference in differences(current, [module]):
            before = current.get(module.path, "")
            found += [difference, last.advice(module.path, current=before, built=module.text)]
    return found + ([] if names else orphans(root, built))


def orphans(root: Path, modules: Iterable[Module]) -> list[str]:
    """Return a line for each module whose docstring names a lecture that does not build it."""
    known = {module.path for module in modules}
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name not in known and (lecture := builder(path.read_text(encoding="utf-8"))):
            found.append(f"{name} says that {lecture} builds it, but it does not\n")
    return found


def builder(text: str) -> str | None:
    """The lecture that a module's docstring names as its builder."""
    pattern = "^" + re.escape(MARKER).replace(r"\{\}", "(.*)") + "$"
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else None


def refuse_edited(root: Path, modules: Iterable[Module], last: LastBuilt) -> None:
    """Check that writing the modules overwrites no edits.

    Raises:
        CourseError: modules were edited since lectures built them; it names them and what to do.
    """
    current = current_texts(root, modules)
    different = [
        m
        for m in modules
        if m.path in current and current[m.path] != m.text and builder(current[m.path])
    ]
    edited = [
        module.path for module in different if not last.has(module.path, current[module.path])
    ]
    if edited:
        raise CourseError(
            "These modules were edited since lectures built them, and building would lose the "
            "edits:\n"
            + "".join(f"  {path}\n" for path in edited)
            + "Nothing was written. `python -m nanovllm.lab.course build --pull` carries the edits "
            "into the lectures; `build --overwrite` discards them."
        )


def write(root: Path, modules: Sequence[Module]) -> list[str]:
    """Write the modules that changed and return their paths.

    Raises:
        CourseError: a module exists that no lecture has built. Nothing is written then.
    """
    current = current_texts(root, modules)
    for module in modules:
        if current.get(module.path, "").strip() and builder(current[module.path]) is None:
            raise CourseError(
                f"{module.lecture.name}: {module.path} was not built by a lecture: move it away "
                "first"
            )
    changed = [module for module in modules if current.get(module.path) != module.text]
    for module in changed:
        path = root / module.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module.text, encoding="utf-8")
    return [module.path for module in changed]
