"""Commands for a growing engine: start, check, hint, status, next."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nanovllm.lab.course.blanks import Course
from nanovllm.lab.course.growing import FILM, SOURCE, WORKLOADS, Growing, find_engine
from nanovllm.lab.course.hints import HINTS
from nanovllm.lab.course.notebook import CourseError
from nanovllm.lab.course.trials import LIMIT, Trials
from nanovllm.lab.course.verdicts import FIRST_FILM, Checker, status
from nanovllm.lab.course.workbook import write_workbook
from nanovllm.lab.course.workloads import workload_of

_POLL = 0.3  # seconds between two looks at the files
_FRAME = 0.45  # seconds for a step of the film
_CLEAR = "\033[2J\033[H"
_UP = "\033[4A\033[J"  # over the four lines of a frame
_ENGINE = "folder of your engine (default: the current folder or one above it)"


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands to the parser of the course tool."""
    command = add(
        _start,
        "begin your own engine: a git repository that grows with the lectures, with functions for "
        "you to write",
    )
    command.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder")
    command.add_argument(
        "--at",
        type=int,
        default=10,
        metavar="LECTURE",
        help="number of the lecture to begin with (default: 10)",
    )
    command = add(_next, "open the next lecture in your engine")
    command.add_argument("--engine", type=Path, metavar="FOLDER", help=_ENGINE)
    command = add(_status, "show all functions of the course as squares")
    command.add_argument("--engine", type=Path, metavar="FOLDER", help=_ENGINE)
    command = add(_hint, "help with a function of your engine, in three steps")
    command.add_argument(
        "function", nargs="?", help="such as BlockPool.touch (default: the first that is not right)"
    )
    command.add_argument("--engine", type=Path, metavar="FOLDER", help=_ENGINE)


def add_check_arguments(command: argparse.ArgumentParser) -> None:
    """Flags with which `check` checks an engine."""
    command.add_argument("--engine", type=Path, metavar="FOLDER", help=_ENGINE)
    command.add_argument(
        "--watch", action="store_true", help="check your engine whenever a file of it changes"
    )
    command.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        metavar="SECONDS",
        help=f"maximum processor time per call; an endless loop ends then (default: {LIMIT:.0f})",
    )


def engine_of(options: argparse.Namespace) -> Path | None:
    """The folder of the engine that is meant; None if none is."""
    given: Path | None = options.engine
    return given.resolve() if given else find_engine(Path.cwd())


def check_engine(root: Path, options: argparse.Namespace) -> int:
    """Check the engine, once or at each change of a file; returns the exit status."""
    with Trials(options.limit) as trials:
        if options.watch:
            return _watch(root, options, trials)
        return _check_once(_find(root, options), options, trials)


def _check_once(engine: Growing, options: argparse.Namespace, trials: Trials) -> int:
    lecture = engine.progress.lecture
    if options.out and options.out.is_dir() and any(options.out.iterdir()):
        raise CourseError(f"{options.out} is not empty: name a new folder")
    if options.lecture is not None:
        lecture = int(options.lecture[:2]) if options.lecture[:2].isdecimal() else 0
        engine.course.until(lecture)
        if lecture not in engine.lectures:
            raise CourseError(
                f"lecture {lecture} is not open yet: `course next` opens the next after "
                f"{engine.progress.lecture}"
            )
    print(f"Lecture {lecture}, {engine.course.titles[lecture]}", flush=True)
    checker = Checker(engine, trials, lambda line: print(line, flush=True))
    files = engine.fingerprint(lecture)
    if engine.progress.tested == files:
        print("Nothing has changed since all tests passed.", flush=True)
    elif not checker.check(lecture):
        return 1
    elif engine.fingerprint(lecture) == files:
        engine.progress.tested = files
        engine.save()
    _celebrate(checker, lecture)
    if options.out:
        given = [blank.name for blank in engine.blanks() if engine.is_open(blank)]
        engine.put_together(options.out, given)
        show_engine(options.out, "the engine with your methods")
    return 0


def _celebrate(checker: Checker, lecture: int) -> None:
    """Commit what is right, and show what comes with it. The film and the lecture's code are shown
    once for each version of the functions."""
    engine = checker.engine
    workload = workload_of(lecture)
    opened = workload is not None and checker.open_workload(workload)
    names = ", ".join(blank.name for blank in engine.blanks([lecture]))
    is_new = engine.finish(lecture)
    if is_new:
        files = [SOURCE, WORKLOADS / workload.file] if workload and opened else [SOURCE]
        if _commit(engine, f"Lecture {lecture}: {names}", *files):
            print(f"Committed: Lecture {lecture}")
    if is_new and lecture >= FIRST_FILM and (frames := checker.film(lecture)):
        _play(frames)
        print(f"{checker.film_title()} in the browser: {engine.folder / FILM}")
    if is_new:
        print(*checker.differences(lecture), sep="\n")
    if workload is not None:
        if is_new:
            print(f"Second part: {workload.title}, in {WORKLOADS / workload.file}")
        ratio = checker.run_workload(workload)
        if ratio is not None:
            message = f"Lecture {lecture}: {workload.title}, {ratio:.2f} ×"
            _commit(engine, message, WORKLOADS / workload.file)
    print("`course next` opens the next lecture.", flush=True)


def _commit(engine: Growing, message: str, *paths: Path) -> bool:
    """Commit these paths; returns False if nothing has changed, and after a line with the reason if
    git did not commit."""
    try:
        return engine.commit(message, *paths)
    except CourseError as error:
        print(f"Nothing was committed ({error}): `git status` in {engine.folder} says why")
        return False


def show_engine(folder: Path, what: str) -> None:
    """Print how to run the engine in a folder."""
    print(
        f"{folder} has {what}. To try it:\n  cd {folder} && PYTHONPATH=. {sys.executable} -m "
        "nanovllm serve"
    )


def _play(frames: list[str]) -> None:
    """Play the film in the terminal; elsewhere print its last step that preempts or finds a prefix,
    so that a log stays short."""
    if not sys.stdout.isatty():
        telling = [frame for frame in frames if "preempted" in frame] or frames
        print(*telling[-1:], sep="\n")
        return
    for number, frame in enumerate(frames):
        print((_UP if number else "") + frame, flush=True)
        time.sleep(_FRAME)


def _watch(root: Path, options: argparse.Namespace, trials: Trials) -> int:
    """Check now and whenever a file changes, until Ctrl-C."""
    folder = _find(root, options).folder
    seen: dict[str, int] = {}
    try:
        while True:
            now = _stamps(folder)
            if now == seen:
                time.sleep(_POLL)
                continue
            print(_CLEAR if sys.stdout.isatty() else "", end="")
            print("Checking …", flush=True)
            try:
                _check_once(_find(root, options), options, trials)
            except CourseError as error:
                print(error, flush=True)
            # A file that the check has written is no change.
            seen = _stamps(folder) | now
            print("Watching your files; Ctrl-C ends.", flush=True)
    except KeyboardInterrupt:
        return 0


def _stamps(folder: Path) -> dict[str, int]:
    """When each file of the engine was written. The next lecture brings new ones."""
    found = {}
    for part in (SOURCE, WORKLOADS):
        for file in (folder / part).rglob("*.py"):
            # An editor may be replacing it.
            with contextlib.suppress(FileNotFoundError):
                found[str(file)] = file.stat().st_mtime_ns
    return found


def _find(root: Path, options: argparse.Namespace) -> Growing:
    folder = engine_of(options)
    if folder is None:
        raise CourseError(
            f"{Path.cwd()} is in no engine that `course start` made: go to yours, or name it with "
            "--engine FOLDER"
        )
    return Growing(Course(root), folder)


def _start(root: Path, options: argparse.Namespace) -> int:
    engine = Growing.start(Course(root), options.folder.resolve(), options.at)
    if not engine.has_identity:
        print(
            "git knows no name for you, so commits are by Reader; `git config --global user.name` "
            "and `user.email` set one."
        )
    print(f"{engine.folder} is your engine, at lecture {options.at}.")
    _show_lecture(engine, options.at)
    print(f"  cd {shlex.quote(str(engine.folder))} && ./course check --watch")
    return 0


def _next(root: Path, options: argparse.Namespace) -> int:
    engine = _find(root, options)
    if unfinished := [each.name for each in engine.blanks() if not engine.is_right(each)]:
        print(f"Not right yet, you can write them at any time: {', '.join(unfinished)}")
    number, lost = engine.open_next()
    _commit(engine, f"Lecture {number}: begin", SOURCE)
    for path, lines in lost.items():
        print(f"new: {SOURCE / path}")
        if lines:
            print("You have changed this place. Add the lecture's lines by hand if you need them:")
            print(*(f"  {line}" for line in lines), sep="\n")
    _show_lecture(engine, number)
    return 0


def _show_lecture(engine: Growing, number: int) -> None:
    """Say where the lecture is, without what the reader writes, and what that is."""
    workbook = engine.course.workbook(number)
    if not workbook.exists():
        write_workbook(engine.course.root, str(number))
    print(f"Read lecture {number} in {workbook}, and write:")
    for blank in engine.blanks([number]):
        print(f"  {blank.name}, {SOURCE / blank.path}")


def _status(root: Path, options: argparse.Namespace) -> int:
    print(*status(_find(root, options)), sep="\n")
    return 0


def _hint(root: Path, options: argparse.Namespace) -> int:
    engine = _find(root, options)
    open_ = {blank.name: blank for blank in engine.blanks()}
    if options.function is not None and options.function not in open_:
        raise CourseError(f"no function {options.function} to write; there are: {', '.join(open_)}")
    wanted = [blank for blank in open_.values() if not engine.is_right(blank)]
    if options.function is not None:
        wanted = [open_[options.function]]
    if not wanted:
        print("All functions are right; `course next` opens the next lecture.")
        return 0
    blank = wanted[0]
    shown = engine.progress.hints.get(blank.name, 0)
    number = min(shown + 1, len(HINTS))
    print(f"{blank.name}, hint {number} of {len(HINTS)}")
    print(HINTS[number - 1](engine.course, blank))
    engine.progress.hints[blank.name] = number
    engine.save()
    return 0
