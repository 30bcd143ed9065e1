"""The reader's own engine: a git repository that grows by the modules of one lecture after the
other, with functions that the reader writes.

    src/nanovllm/   the modules of the lectures so far
    workloads/      second parts: what to beat with one's own classes
    course.json     how far the reader is
    course          runs the course tool here
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nanovllm.lab.course.blanks import Blank, Course, Functions
from nanovllm.lab.course.notebook import PACKAGE, CourseError

STATE = "course.json"
SOURCE = Path("src")
WORKLOADS = Path("workloads")
FILM = "film.html"
_IGNORED = f"/course\n/{FILM}\n__pycache__/\n"
_NAME = ["-c", "user.name=Reader", "-c", "user.email=reader@localhost"]
# A hook or a script may have set these, which lead git to another repository.
_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
_CONFLICT = re.compile(
    r"^<<<<<<< .*\n(?P<mine>(?s:.*?))^\|{7} .*\n(?P<before>(?s:.*?))^=======\n"
    r"(?P<after>(?s:.*?))^>>>>>>> .*\n",
    re.MULTILINE,
)
_README = """# My engine

It grows with the lectures of the course in {root}.

    ./course check --watch    # at each change: is it right? If not: which test fails, and where
    ./course hint             # three steps of help for the next function
    ./course status           # all functions of the course, as squares
    ./course next             # the next lecture: its modules, with functions to write

You write the functions in `src/nanovllm/` that raise `NotImplementedError`; their docstrings say
what they do. Functions that you have not written yet, of earlier lectures too, are the lecture's
whenever your engine is checked. When all functions of a lecture are right, `check` commits them,
plays a scheduler with your code, shows the lecture's code, and opens a second part in `workloads/`.
"""


@dataclass
class Progress:
    """How far the reader is, as `course.json` has it.

    Attributes:
        lecture: the number of the lecture that was opened last.
        right: digests of functions that passed their tests, by name.
        hints: how many hints the reader has seen, by name of the function.
        beaten: the ratio to the lecture's count of the version that beat it last, by number of the
            lecture.
        done: a digest of its functions, by number of each lecture whose functions were all right.
        tested: a digest of all that the last check ran, if everything was right.
    """

    lecture: int
    right: dict[str, str] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    beaten: dict[str, float] = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)
    tested: str = ""


class Growing:
    """The reader's engine in a folder.

    Raises:
        CourseError: the folder is no such engine, or its state cannot be read; the message names
            the fix.
    """

    def __init__(self, course: Course, folder: Path) -> None:
        self.course = course
        self.folder = folder
        if not (folder / STATE).is_file():
            raise CourseError(
                f"{folder} is no engine that `course start` made: go to yours, or name it with "
                "--engine FOLDER"
            )
        if not (folder / ".git").exists():
            raise CourseError(
                f"{folder} is not a git repository: `git init {shlex.quote(str(folder))}` "
                "makes it one again, and changes no file"
            )
        try:
            self.progress = Progress(**json.loads((folder / STATE).read_text(encoding="utf-8")))
            self.lectures = course.until(self.progress.lecture)
        except (ValueError, TypeError, AttributeError):
            raise CourseError(
                f"{folder / STATE} cannot be read: `git checkout HEAD {STATE}` brings the last "
                "commit's back, and changes no other file"
            ) from None

    @classmethod
    def start(cls, course: Course, folder: Path, lecture: int) -> Growing:
        """Make a repository with the modules of the lectures up to this one.

        Raises:
            CourseError: the folder is not empty, there is no such lecture, or no git.
        """
        lectures = course.until(lecture)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CourseError(f"{folder} is not empty: name a new folder")
        if shutil.which("git") is None:
            raise CourseError("your engine is a git repository: install git first")
        modules = course.modules(lectures)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / STATE).write_text(_json(Progress(lecture)), encoding="utf-8")
        (folder / ".gitignore").write_text(_IGNORED, encoding="utf-8")
        (folder / "README.md").write_text(_README.format(root=course.root), encoding="utf-8")
        launcher = folder / "course"
        launcher.write_text(
            f'#!/bin/sh\ncd -- "$(dirname -- "$0")" && PYTHONPATH={shlex.quote(str(course.root))} '
            f"exec {shlex.quote(sys.executable)} -m nanovllm.lab.course "
            f'--root {shlex.quote(str(course.root))} "$@"\n',
            encoding="utf-8",
        )
        launcher.chmod(0o755)
        git(folder, "init", "-q")
        engine = cls(course, folder)
        engine.write(modules)
        engine.commit(f"Lecture {lecture}: begin", SOURCE, "README.md", ".gitignore")
        return engine

    def open_next(self) -> tuple[int, dict[str, list[str]]]:
        """Add the modules of the next lecture. Where the lecture continues a module, lines that the
        reader has changed stay as they are.

        Returns:
            The number of the lecture, and by the path of each of its modules the lecture's lines
            that could not be added, since the reader changed those in their place.

        Raises:
            CourseError: there is no next lecture, or the reader has a file of the same name.
        """
        numbers = list(self.course.titles)
        if self.lectures == numbers:
            raise CourseError(f"lecture {numbers[-1]} is the last: your engine is complete")
        number = numbers[len(self.lectures)]
        before = self.course.modules(self.lectures)
        after = self.course.modules([*self.lectures, number])
        written = {path: after[path] for path in sorted(self.course.extended_by(number))}
        lost: dict[str, list[str]] = {path: [] for path in written}
        for path in written.keys() & before.keys():
            written[path], lost[path] = _merged(self.read(path), before[path], written[path])
        taken = [path for path in written.keys() - before.keys() if self.place(path).exists()]
        if taken:
            raise CourseError(
                f"{SOURCE / taken[0]} is a module of lecture {number}: rename yours first"
            )
        self.write(written)
        self.progress.lecture = number
        self.lectures.append(number)
        self.save()
        return number, lost

    def place(self, path: str) -> Path:
        """The reader's file of a module."""
        return self.folder / SOURCE / path

    def read(self, path: str) -> str:
        """The reader's text of a module.

        Raises:
            CourseError: the file is missing, or no text.
        """
        try:
            return self.place(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError):
                raise CourseError(f"{SOURCE / path} is not UTF-8: save it as UTF-8") from None
            raise CourseError(
                f"{SOURCE / path} is missing: `git restore {SOURCE / path}` brings the last "
                "commit's back"
            ) from None

    def write(self, modules: Mapping[str, str]) -> None:
        """Write modules, by path."""
        for path, text in modules.items():
            self.place(path).parent.mkdir(parents=True, exist_ok=True)
            self.place(path).write_text(text, encoding="utf-8")

    def save(self) -> None:
        """Write how far the reader is, if it changed."""
        file = self.folder / STATE
        if json.loads(file.read_text(encoding="utf-8")) != asdict(self.progress):
            file.write_text(_json(self.progress), encoding="utf-8")

    # ---------------------------------------------------------------- functions

    def functions(self, path: str) -> Functions:
        """The functions of the reader's module; see `Functions` for errors."""
        return Functions(self.read(path), str(SOURCE / path))

    def blanks(self, lectures: Collection[int] | None = None) -> list[Blank]:
        """The functions to write: of these lectures, by default of all that are open."""
        return self.course.blanks_of(self.lectures if lectures is None else lectures)

    def is_open(self, blank: Blank) -> bool:
        """Whether the reader has not written a function yet."""
        return self.functions(blank.path).is_open(blank.name)

    def lines(self, blank: Blank) -> list[str]:
        """The reader's lines of a function."""
        return self.functions(blank.path).lines(blank.name)

    def is_right(self, blank: Blank) -> bool:
        """Whether a function passed its tests as it is now."""
        return self.progress.right.get(blank.name) == _digest(self.lines(blank))

    def note(self, blank: Blank, right: bool) -> None:
        """Note whether a function has passed its tests."""
        self.progress.right.pop(blank.name, None)
        if right:
            self.progress.right[blank.name] = _digest(self.lines(blank))

    def finish(self, lecture: int) -> bool:
        """Note that all functions of a lecture are right as they are now; returns whether they were
        not before."""
        digest = _digest([line for blank in self.blanks([lecture]) for line in self.lines(blank)])
        before = self.progress.done.get(str(lecture))
        self.progress.done[str(lecture)] = digest
        return before != digest

    def fingerprint(self, lecture: int) -> str:
        """Digest of all that a check of this lecture runs: the reader's files, the course's package
        and its tests."""
        digest = hashlib.sha256(str(lecture).encode())
        own = self.folder / SOURCE
        for folder in (own, self.course.root / PACKAGE, self.course.root / "tests"):
            for file in sorted(folder.rglob("*.py")):
                digest.update(f"\n{file.relative_to(folder)}\n".encode() + file.read_bytes())
        return digest.hexdigest()[:16]

    def put_together(self, folder: Path, given: Collection[str]) -> Assembled:
        """Write the course's package with the reader's modules into an empty folder.

        Args:
            given: names of functions that are the lecture's.
        """
        shutil.copytree(self.course.root / PACKAGE, folder / PACKAGE)
        assembled = Assembled(folder)
        for file in sorted((self.folder / SOURCE / PACKAGE).rglob("*")):
            path = file.relative_to(self.folder / SOURCE).as_posix()
            if not file.is_file() or "__pycache__" in file.parts:
                continue
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix != ".py":
                shutil.copy(file, target)
                continue
            blanks = [each for each in self.blanks() if each.path == path and each.name in given]
            new = {blank.name: self.course.solution(blank) for blank in blanks}
            replaced = self.functions(path).replace(new)
            assembled.moves[path] = replaced.line
            target.write_text(replaced.text, encoding="utf-8")
        return assembled

    # ---------------------------------------------------------------- git

    def commit(self, message: str, *paths: str | Path) -> bool:
        """Commit these paths and the reader's progress, and nothing else that has been staged.

        Returns:
            Whether one of these paths had changed; if none had, there is no commit.

        Raises:
            CourseError: git did not commit; the message has its reason.
        """
        self.save()
        names = [str(path) for path in paths]
        git(self.folder, "add", "--", *names)
        if not git(self.folder, "status", "--porcelain", "--", *names):
            return False
        git(self.folder, "add", "--", STATE)
        identity = [] if self.has_identity else _NAME
        options = ["-q", "--no-verify", "--no-gpg-sign", "-m", message]
        git(self.folder, *identity, "commit", *options, "--", STATE, *names)
        return True

    @property
    def has_identity(self) -> bool:
        """Whether git knows whose commits these are."""
        try:
            return bool(git(self.folder, "var", "GIT_COMMITTER_IDENT"))
        except CourseError:
            return False


@dataclass
class Assembled:
    """A package with the reader's modules in a folder.

    Attributes:
        moves: by module, from a line there to the line of the reader's file.
    """

    folder: Path
    moves: dict[str, Callable[[int], int]] = field(default_factory=dict)

    def translate(self, text: str) -> str:
        """Text with the places of the reader's files, instead of these."""

        def place(match: re.Match[str]) -> str:
            move = self.moves.get(match[1])
            return f"{SOURCE}/{match[1]}:{move(int(match[2]))}" if move else match[0]

        text = text.replace(f"{self.folder.resolve()}/", "").replace(f"{self.folder}/", "")
        return re.sub(rf"({PACKAGE}/[\w/]+\.py):(\d+)", place, text)


def find_engine(start: Path) -> Path | None:
    """The folder, from `start` upwards, that has the state of an engine; None if there is none."""
    return next((each for each in (start, *start.parents) if (each / STATE).is_file()), None)


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder.

    Raises:
        CourseError: git failed; the message has its reason.
    """
    environment = {name: text for name, text in os.environ.items() if name not in _GIT_VARIABLES}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment | {"GIT_TERMINAL_PROMPT": "0"},
    )
    if done.returncode:
        said = [*(done.stderr + done.stdout).strip().splitlines(), "no reason given"]
        raise CourseError(f"git: {said[0]}")
    return done.stdout


def _merged(mine: str, before: str, after: str) -> tuple[str, list[str]]:
    """The reader's text with what a lecture changes, and those of the lecture's lines for which the
    reader has others. Lines that both insert in one place all stay, the reader's first."""
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch, name) for name in ("mine", "before", "after")]
        for file, text in zip(files, (mine, before, after), strict=True):
            file.write_text(text.removesuffix("\n") + "\n", encoding="utf-8")
        command = ["git", "merge-file", "-p", "--diff3", *map(str, files)]
        # Its exit status is the number of conflicts, and above 127 an error.
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode > 127:
        raise CourseError(f"git: {done.stderr.strip()}")
    lost: list[str] = []

    def resolve(conflict: re.Match[str]) -> str:
        own = conflict["mine"]
        old = conflict["before"]
        new = conflict["after"]
        if new.startswith(old):  # the lecture adds lines below those that the reader has changed
            return own + new.removeprefix(old)
        if new.endswith(old):
            return new.removesuffix(old) + own
        known = old.splitlines() + own.splitlines()
        lost.extend(line for line in new.splitlines() if line not in known)
        return own

    return _CONFLICT.sub(resolve, done.stdout), lost


def _json(progress: Progress) -> str:
    return json.dumps(asdict(progress), indent=1, sort_keys=True) + "\n"


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
