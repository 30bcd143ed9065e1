"""The course's command line: lectures to modules and back."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from nanovllm.lab.course.build import (
    build,
    current_texts,
    differences,
    find_lectures,
    find_root,
    orphans,
    read_lectures,
    write,
)
from nanovllm.lab.course.notebook import CourseError
from nanovllm.lab.course.pull import pull

Item = TypeVar("Item")

_DESCRIPTION = """\
Turn lectures (notebooks/*.ipynb) into modules of the engine, and edits of modules back into lectures.
A lecture is named by its file name or the beginning of it, such as 11; without a name, all are meant.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status, 1 for an error or a difference."""
    options = _parser().parse_args(arguments)
    try:
        root = (options.root or find_root(Path.cwd())).resolve()
        return int(options.command(root, options))
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m nanovllm.lab.course", description=_DESCRIPTION)
    root = "folder of pyproject.toml and notebooks/ (default: from here upwards)"
    parser.add_argument("--root", type=Path, help=root)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    lectures = argparse.ArgumentParser(add_help=False)
    lectures.add_argument("lectures", nargs="*", metavar="LECTURE")

    help = "write the modules that lectures export, compare, or pull edits back"
    command = commands.add_parser("build", parents=[lectures], help=help)
    mode = command.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", action="store_true", help="write nothing; show differences, and exit 1 if there are any"
    )
    mode.add_argument("--pull", action="store_true", help="carry edits made in modules back into the lectures' cells")
    command.set_defaults(command=_build)

    command = commands.add_parser("run", parents=[lectures], help="execute lectures and save them normalised")
    command.add_argument("--timeout", type=int, default=300, help="longest a cell may take, in seconds (default: 300)")
    command.set_defaults(command=_run)
    return parser


def _build(root: Path, options: argparse.Namespace) -> int:
    lectures = read_lectures(root, options.lectures)
    if options.pull:
        return _each(lectures, lambda lecture: pull(root, lecture))
    built = build(root, lectures)
    if options.check:
        found = differences(current_texts(root, built), built) + ([] if options.lectures else orphans(root, built))
        sys.stdout.write("".join(found))
        return 1 if found else 0
    changed = write(root, built)
    print(*(f"wrote {path}" for path in changed), f"{len(built) - len(changed)} modules were up to date", sep="\n")
    return 0


def _run(root: Path, options: argparse.Namespace) -> int:
    from nanovllm.lab.course.execute import run  # the notebook machinery is slow to import

    def run_one(path: Path) -> list[str]:
        changed = run(path, root, options.timeout)
        return [f"{path.relative_to(root).as_posix()}: {'saved' if changed else 'unchanged'}"]

    return _each(find_lectures(root, options.lectures), run_one)


def _each(items: Iterable[Item], action: Callable[[Item], list[str]]) -> int:
    """Do something for each item, and print its messages or its error. Returns 1 if there was an error."""
    failed = 0
    for item in items:
        try:
            for message in action(item):
                print(message, flush=True)
        except CourseError as error:
            failed = 1
            print(error, file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
