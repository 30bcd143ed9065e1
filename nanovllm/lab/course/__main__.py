"""Turn lectures (notebooks/*.ipynb) into modules of the engine, and edits of modules back into
lectures. For readers: `start FOLDER` begins an engine of your own, which grows with the lectures.

A lecture is named by its file name or the beginning of it, such as 11; without a name, all are
meant."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from nanovllm.lab.course.build import (
    build,
    compare,
    find_lectures,
    find_root,
    read_lectures,
    refuse_edited,
    write,
)
from nanovllm.lab.course.copies import FOLDER, copy_lectures, edited_copies
from nanovllm.lab.course.growing_commands import (
    add_check_arguments,
    add_commands,
    check_engine,
    engine_of,
    show_engine,
)
from nanovllm.lab.course.last_built import LastBuilt
from nanovllm.lab.course.notebook import CourseError
from nanovllm.lab.course.pull import pull
from nanovllm.lab.course.stages import LAST, write_stage
from nanovllm.lab.course.workbook import check, write_workbook


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status, 1 for an error or a difference."""
    options = _parser().parse_args(arguments)
    try:
        root = (options.root or find_root(Path.cwd(), Path(__file__))).resolve()
        return int(options.command(root, options))
    except CourseError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m nanovllm.lab.course", description=__doc__)
    root = "folder with pyproject.toml and notebooks/ (default: the current folder or one above it)"
    parser.add_argument("--root", type=Path, help=root)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(run: Callable[[Path, argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(run.__name__.strip("_"), help=help)
        command.set_defaults(command=run)
        return command

    command = add(_build, "write the modules that lectures export, compare, or pull edits back")
    _add_build_arguments(command)

    command = add(_run, "execute lectures and save them normalised")
    command.add_argument("lectures", nargs="*", metavar="LECTURE")
    command.add_argument(
        "--timeout", type=int, default=300, help="maximum time per cell, in seconds (default: 300)"
    )

    _add_stage_commands(add)
    add_commands(add)
    _add_workbook_commands(add)

    command = add(_page, f"write lectures to {FOLDER}/ as web pages, which need no kernel")
    command.add_argument("lectures", nargs="*", metavar="LECTURE")
    add(
        _copy,
        f"copy lectures to {FOLDER}/, where you can run and change them; your work there is never "
        "overwritten",
    )
    return parser


def _add_stage_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    what = "a package that generates and serves, with everything taught so far"
    command = add(_stage, f"write the engine as it is after a lecture: {what}")
    command.add_argument(
        "last", type=int, metavar="LECTURE", help="number of the lecture, such as 18"
    )
    command.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a new folder")

    command = add(
        _ladder, "measure one workload on the engine of a lecture and on transformers (20 s)"
    )
    command.add_argument(
        "lecture",
        type=int,
        nargs="?",
        default=LAST,
        metavar="LECTURE",
        help="number of the lecture that you have read last (default: all)",
    )
    command.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the ladder (.svg or .png)"
    )

    command = add(_diff, "show what lectures change: the stages after two of them, compared")
    command.add_argument(
        "stages",
        type=int,
        nargs=2,
        metavar="LECTURE",
        help="numbers of the lectures, such as 18 23",
    )


def _add_workbook_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    command = add(_workbook, "write a lecture whose core methods are blank, for you to write")
    command.add_argument("lecture", metavar="LECTURE")

    command = add(_check, "say what is wrong with your engine, or with a workbook")
    command.add_argument(
        "lecture",
        nargs="?",
        metavar="LECTURE",
        help="of the workbook; of your engine, by default the last that you have opened",
    )
    command.add_argument(
        "file", type=Path, nargs="?", metavar="FILE", help="path of the workbook, if you moved it"
    )
    command.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="if all methods pass, write an engine that contains them",
    )
    add_check_arguments(command)


def _add_build_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("lectures", nargs="*", metavar="LECTURE")
    mode = command.add_mutually_exclusive_group()
    check = "write nothing; show differences, and exit 1 if there are any"
    mode.add_argument("--check", action="store_true", help=check)
    mode.add_argument(
        "--pull",
        action="store_true",
        help="carry edits made in modules back into the lectures' cells",
    )
    mode.add_argument(
        "--overwrite",
        action="store_true",
        help="write modules that were edited, too: the edits are lost",
    )


def _build(root: Path, options: argparse.Namespace) -> int:
    if options.pull:
        print(*pull(root, options.lectures), sep="\n")
        return 0
    if options.check:
        found = compare(root, options.lectures)
        sys.stdout.write("".join(found))
        return 1 if found else 0
    built = build(root, read_lectures(root, options.lectures))
    last = LastBuilt(root)
    if not options.overwrite:
        refuse_edited(root, built, last)
    changed = write(root, built)
    last.store({module.path: module.text for module in built})
    print(
        *(f"wrote {path}" for path in changed),
        f"{len(built) - len(changed)} modules were up to date",
        sep="\n",
    )
    for name in edited_copies(root):
        print(
            f"{FOLDER}/{name} is your copy, and modules are built from notebooks/{name}: make your "
            "change there"
        )
    return 0


def _run(root: Path, options: argparse.Namespace) -> int:
    from nanovllm.lab.course.execute import run  # the notebook machinery is slow to import

    failed = 0
    for path in find_lectures(root, options.lectures):
        try:
            changed = run(path, root, options.timeout)
            print(
                f"{path.relative_to(root).as_posix()}: {'saved' if changed else 'unchanged'}",
                flush=True,
            )
        except CourseError as error:
            failed = 1
            print(error, file=sys.stderr, flush=True)
    return failed


def _workbook(root: Path, options: argparse.Namespace) -> int:
    print(
        f"Your workbook is {write_workbook(root, options.lecture)}; its first lines say what to do."
    )
    return 0


def _check(root: Path, options: argparse.Namespace) -> int:
    is_workbook = options.lecture and (options.file or not engine_of(options))
    if options.watch or not is_workbook:
        return check_engine(root, options)
    wrong = 0
    for name, complaint in check(root, options.lecture, options.file, options.out, options.limit):
        wrong += bool(complaint)
        print(f"{name}: {complaint or 'right'}", flush=True)
    if options.out and not wrong:
        show_engine(options.out, "the engine with your methods")
    return int(wrong > 0)


def _stage(root: Path, options: argparse.Namespace) -> int:
    write_stage(root, options.last, options.out)
    show_engine(options.out, f"the engine as it stands after lecture {options.last}")
    return 0


def _ladder(root: Path, options: argparse.Namespace) -> int:
    from nanovllm.lab.course.ladder import climb  # it imports the engine

    numbers = [int(path.name[:2]) for path in find_lectures(root, []) if path.name >= "10"]
    if options.lecture not in numbers:
        raise CourseError(
            f"no engine belongs to lecture {options.lecture}: choose one of "
            f"{', '.join(map(str, numbers))}"
        )
    found = climb(options.lecture, root / "figures")
    print(found)
    if options.picture is not None:
        found.draw().savefig(options.picture)
    return 0


def _diff(root: Path, options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        for number in set(options.stages):
            write_stage(root, number, Path(folder, str(number)))
        return (
            subprocess.run(
                ["git", "diff", "--no-index", *map(str, options.stages)], cwd=folder
            ).returncode
            // 2
        )


def _page(root: Path, options: argparse.Namespace) -> int:
    from nanovllm.lab.course.pages import write_page  # nbconvert is slow to import

    for path in find_lectures(root, options.lectures):
        print(f"wrote {write_page(path, root).relative_to(root).as_posix()}", flush=True)
    return 0


def _copy(root: Path, options: argparse.Namespace) -> int:
    older = copy_lectures(root)
    print(f"Your copies of the lectures are in {FOLDER}/.")
    if older:
        print(f"Lectures have changed since you copied them: {', '.join(older)}.")
        print("For a fresh copy, rename or delete yours, and run this command again.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
