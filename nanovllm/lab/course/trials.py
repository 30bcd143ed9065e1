"""Trials: programs that run with a package in another folder, each in a fork of one process that
has imported their libraries.

A new interpreter takes seconds to import pytest, torch and transformers, more than most tests. The
process that forks runs this file as a program and imports nothing of the package, so that each fork
imports it from its folder. It learns from each fork which libraries the next one will need."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

LIMIT = 20.0  # seconds of the processor for a call
IMPORTS = 30.0  # seconds for the imports of a program
_LIMITS = 6  # times the limit for a whole program, which may make many calls
_SHRINKING = 3  # seconds for the smallest example that fails; Hypothesis would take 300
# Packages whose modules are imported once, and those that every check needs.
LIBRARIES = {"httpx", "hypothesis", "matplotlib", "numpy", "pytest", "torch", "transformers"}
_AT_ONCE = ("pytest", "hypothesis")
# An endless loop may print.
_MOST_OUTPUT = 1 << 20
_LARGEST_FILE = 1 << 30
_LASTS = "These calls do not end (most recent call first):"
_groups: list[int] = []  # of the fork that runs
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


@dataclass(frozen=True)
class Place:
    """A line of a file in which a function was running."""

    file: Path
    line: int
    function: str


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        code: its exit status; 0 if all went well.
        text: what it wrote.
        stuck: calls that did not end, innermost first; the first contains the loop.
        late: whether its time was over, although no such call was found.
    """

    code: int
    text: str
    stuck: tuple[Place, ...] = ()
    late: bool = False


class Trials:
    """Runs trials, one at a time. A context manager, which ends the process, its fork and what that
    has started.

    Args:
        limit: seconds of the processor for a call of the package's code, or of a test's. A test
            that makes many calls, as those that search for examples, or that waits for another
            process, may take longer.
        imports: seconds for a whole program, added to six times the limit.
    """

    def __init__(self, limit: float = LIMIT, imports: float = IMPORTS) -> None:
        self.limit = limit
        self.total = _LIMITS * limit + imports
        self._output = tempfile.NamedTemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            # Without -P the course's own modules would hide libraries of the same names.
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is this process's to handle
            env=os.environ | {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"},  # macOS, for forks
        )

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()
        self._output.close()

    def run(self, folder: Path, module: str, *arguments: str) -> Outcome:
        """Run a module as a program, in a folder whose packages it imports before all others."""
        assert self._process.stdin and self._process.stdout
        folder = folder.resolve()
        order = {
            "words": [module, *arguments],
            "folder": str(folder),
            "limit": self.limit,
            "total": self.total,
        }
        self._output.truncate(0)
        print(
            json.dumps(order | {"output": self._output.name}), file=self._process.stdin, flush=True
        )
        answer = self._process.stdout.readline()
        if not answer:
            # At the top it would be imported by the process that forks.
            from nanovllm.lab.course.notebook import CourseError

            raise CourseError("the process that runs tests was ended from outside: run this again")
        code = int(answer)
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _MOST_OUTPUT))
        text = self._output.read()
        stuck = _stuck(text, folder) if code else ()
        return Outcome(code, text, stuck, bool(code) and not stuck and "\nTimeout (" in f"\n{text}")

    def run_tests(self, folder: Path, tests: list[str]) -> Outcome:
        """Run tests of pytest's until one fails."""
        options = (
            "-p no:nbval -p no:cacheprovider -x -q -rN --tb=short --color=no --show-capture=no "
            "--disable-warnings --timeout=0 -o faulthandler_timeout=0"
        )
        return self.run(folder, "pytest", *options.split(), *tests)


def _stuck(text: str, folder: Path) -> tuple[Place, ...]:
    """The calls of a folder's code that did not end."""
    _, found, stack = text.rpartition(_LASTS)
    if not found:
        return ()
    frames = [(Path(file), int(line), name) for file, line, name in _FRAME.findall(stack)]
    return tuple(Place(file.relative_to(folder), line, name) for file, line, name in frames)


def _serve() -> None:
    """Fork for each order on the standard input; answer with the fork's exit status."""
    for library in _AT_ONCE:
        importlib.import_module(library)
    from hypothesis.internal.conjecture import engine

    engine.MAX_SHRINKING_SECONDS = _SHRINKING
    signal.signal(signal.SIGTERM, _stop)
    with tempfile.NamedTemporaryFile("r") as report:
        for line in sys.stdin:
            child = os.fork()
            if not child:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.setpgrp()
                _run(json.loads(line), Path(report.name))
            _groups.append(child)
            _, status = os.waitpid(child, 0)
            _end_group()
            print(os.waitstatus_to_exitcode(status), flush=True)
            for library in Path(report.name).read_text(encoding="utf-8").split():
                # Some are no files, but made when another is imported.
                with contextlib.suppress(ImportError):
                    importlib.import_module(library)


def _end_group() -> None:
    """End what the last fork has started and not ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(_groups.pop(), signal.SIGKILL)


def _stop(*_: object) -> NoReturn:
    if _groups:
        _end_group()
    os._exit(0)


def _run(order: dict[str, Any], report: Path) -> NoReturn:
    """Run a program in this fork, and end."""
    for number, path in ((0, os.devnull), (1, order["output"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    os.dup2(1, 2)
    os.chdir(order["folder"])
    os.environ["PYTHONPATH"] = order["folder"]
    sys.path.insert(0, order["folder"])
    sys.argv = order["words"]
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = _LARGEST_FILE if most == resource.RLIM_INFINITY else min(_LARGEST_FILE, most)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, most))
    # pytest redirects the usual ones.
    output = os.dup(1)
    # It ends a call, too, that Python cannot interrupt, in which no other thread runs.
    faulthandler.dump_traceback_later(order["total"], exit=True, file=output)
    watch = (order["limit"], order["folder"], output)
    threading.Thread(target=_watch, args=watch, daemon=True).start()
    code = 1
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    libraries = (each for each in sys.modules if each.split(".")[0] in LIBRARIES)
    report.write_text("\n".join(libraries), encoding="utf-8")
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _watch(limit: float, folder: str, output: int) -> None:
    """End this process when a call of the main thread lasts longer than `limit`; report the calls
    that do, and not those that come and go inside them."""
    main = threading.main_thread().ident
    assert main is not None
    since: dict[FrameType, float] = {}
    while True:
        time.sleep(min(limit / 4, 0.5))
        now = time.process_time()
        calls = _calls(sys._current_frames().get(main), f"{folder}{os.sep}")
        since = {call: since.get(call, now) for call in calls}
        lasting = [call for call, first in since.items() if now - first > limit]
        if lasting:
            lines = (
                f'  File "{call.f_code.co_filename}", line {call.f_lineno} in {call.f_code.co_name}'
                for call in lasting
            )
            os.write(output, "\n".join(["", _LASTS, *lines, ""]).encode())
            os._exit(1)


def _calls(frame: FrameType | None, folder: str) -> Iterator[FrameType]:
    """The calls of a folder's functions, innermost first."""
    while frame is not None:
        # Hypothesis gives its own function, which calls a test again and again, the test's place.
        is_search = frame.f_globals.get("__name__", "").startswith("hypothesis")
        is_import = frame.f_code.co_name == "<module>"
        if frame.f_code.co_filename.startswith(folder) and not is_search and not is_import:
            yield frame
        frame = frame.f_back


if __name__ == "__main__":
    _serve()
