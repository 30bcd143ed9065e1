"""The engine as it stands after a lecture: a package that generates and serves."""

import shutil
import tomllib
from pathlib import Path

from nanovllm.lab.course.build import build, find_lectures, read_lectures, write
from nanovllm.lab.course.notebook import PACKAGE, CourseError

FIRST = 18  # the lecture that completes an engine
SERVER = 90  # lectures from here on are about the way in, which every stage has

# : What the package can do without: for each part the first lecture that builds or names it, and
# patterns of its files.
PARTS: dict[str, tuple[int, list[str]]] = {
    name: (part["lecture"], part["files"])
    for name, part in tomllib.loads(
        Path(__file__).with_name("parts.toml").read_text(encoding="utf-8")
    ).items()
}


def write_stage(root: Path, last: int, folder: Path) -> None:
    """Write the package as it stands after lecture `last`: without the parts of later lectures, and
    with modules built from the cells up to that lecture. What later lectures build of the remaining
    modules is there as it will be.

    Raises:
        CourseError: there is no such stage, the folder is not empty, or a module cannot be built.
    """
    stages = [
        number for path in find_lectures(root) if FIRST <= (number := _number(path.name)) < SERVER
    ]
    if last not in stages:
        raise CourseError(
            f"there is no stage {last}; lectures after which there is an engine: "
            f"{', '.join(map(str, stages))}"
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise CourseError(f"{folder} is not empty: name a new folder")
    copy = Path(
        shutil.copytree(
            root / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__")
        )
    )
    for first, patterns in PARTS.values():
        for path in [path for pattern in patterns for path in copy.glob(pattern) if path.is_file()]:
            if last < first < SERVER:
                path.unlink(missing_ok=True)
    lectures = [
        lecture for lecture in read_lectures(root) if not last < _number(lecture.name) < SERVER
    ]
    for lecture in lectures:
        lecture.exports = [
            cell for cell in lecture.exports if not last < _number(cell.lecture) < SERVER
        ]
    write(folder, [module for module in build(root, lectures) if (folder / module.path).exists()])
    for path in sorted(copy.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    shutil.copy(root / "pyproject.toml", folder)


def _number(lecture: str) -> int:
    return int(Path(lecture).name[:2])
