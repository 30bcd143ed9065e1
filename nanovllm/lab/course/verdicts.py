"""Checks a growing engine: this lecture's tests on the reader's code, then those of the earlier
lectures; and what follows when all are right."""

from __future__ import annotations

import difflib
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

from nanovllm.lab.course.blanks import Blank
from nanovllm.lab.course.growing import FILM, SOURCE, WORKLOADS, Growing
from nanovllm.lab.course.trials import Outcome, Trials
from nanovllm.lab.course.workbook import explain, link_tests
from nanovllm.lab.course.workloads import Workload

FIRST_FILM = 11  # before it, no lecture builds a part of the scheduler
_SCHEDULER = "nanovllm/core/scheduler.py"
_SQUARES = {"right": "■", "written": "◧", "open": "□"}
_MEANING = "■ right  ◧ written, not right yet  □ to write  · not opened yet"


class Checker:
    """Checks the engine, again and again in one process of `Trials`.

    Args:
        say: prints a line.
    """

    def __init__(self, engine: Growing, trials: Trials, say: Callable[[str], None]) -> None:
        self.engine = engine
        self.trials = trials
        self.say = say

    def check(self, lecture: int) -> bool:
        """Run the tests of a lecture's functions, then those of the earlier lectures, and print the
        verdicts. If a test fails, try functions alone, those first that have changed since they
        were right. Returns whether everything is right.

        Raises:
            CourseError: the engine's files cannot be used; the message names the fix.
        """
        engine = self.engine
        for path in sorted({blank.path for blank in engine.blanks()}):
            engine.functions(path)  # a syntax error is told before anything runs
        unfinished = [blank for blank in engine.blanks() if engine.is_open(blank)]
        earlier = [blank for blank in unfinished if blank.lecture < lecture]
        if earlier:
            self.say(f"Not written in earlier lectures, hence the lecture's: {_names(earlier)}")
        ours = engine.blanks([lecture])
        written = [blank for blank in ours if blank not in unfinished]
        for blank in ours:
            if blank not in written:
                engine.note(blank, right=False)
                self.say(f"{blank.name}: not written yet")
        together = self._complaint(written, unfinished) if written else ""
        verdicts = self._try_alone(written, together)
        if together and not any(verdicts):
            before = [each for each in engine.blanks() if each.lecture < lecture]
            changed = [each for each in before if not (each in unfinished or engine.is_right(each))]
            if not any(self._try_alone(changed, together)):
                self.say(
                    "Each is right with the lecture's code for all others, but not with yours, "
                    f"which is {together}"
                )
        if verdicts and all(verdicts) and self._complaint(written, engine.blanks()):
            self.say(
                "The same tests fail with the lecture's code for all functions: another line of "
                f"{SOURCE} is wrong; `git diff` shows what you changed"
            )
        engine.save()
        if together or len(written) < len(ours):
            return False
        return self._check_earlier(lecture, unfinished)

    def _check_earlier(self, lecture: int, unfinished: list[Blank]) -> bool:
        numbers = [number for number in self.engine.lectures if number < lecture]
        before = [blank for blank in self.engine.blanks(numbers) if blank not in unfinished]
        if not before:
            return True
        complaint = self._complaint(before, unfinished)
        changed = [each for each in before if not self.engine.is_right(each)]
        if complaint and any(self._try_alone(changed, complaint)):
            return False
        which = f"Tests of {_lectures(before)}"
        self.say(f"{which}: {complaint or 'still right'}")
        if not complaint:
            for blank in before:
                self.engine.note(blank, right=True)
        return not complaint

    def _try_alone(self, blanks: list[Blank], together: str) -> list[str]:
        """Print and note what is wrong with each of some functions: nothing if all are right
        together. One that has not changed since it was right is not tried if another is wrong."""
        verdicts: list[str] = []
        # Stable: those that have changed come first, each group in the order of the course.
        for blank in sorted(blanks, key=self.engine.is_right):
            if together and any(verdicts) and self.engine.is_right(blank):
                self.say(f"{blank.name}: right before, and unchanged")
                continue
            verdicts.append(self._alone(blank, together))
            self.engine.note(blank, right=not verdicts[-1])
            self.say(f"{blank.name}: {verdicts[-1] or 'right'}")
        return verdicts

    def _alone(self, blank: Blank, together: str) -> str:
        """What is wrong with one function, with the lecture's code for all others."""
        others = [each for each in self.engine.blanks() if each != blank]
        if not together or all(map(self.engine.is_open, others)):
            return together
        return self._complaint([blank], others)

    def _complaint(self, blanks: Iterable[Blank], given: Collection[Blank]) -> str:
        """Run the tests of some functions, with the lecture's code for those that are given.
        Returns what is wrong."""
        tests = list(dict.fromkeys(test for blank in blanks for test in blank.tests))
        mine = [each.name for each in self.engine.blanks() if each not in given]
        with tempfile.TemporaryDirectory() as folder:
            assembled = self.engine.put_together(Path(folder), [each.name for each in given])
            link_tests(self.engine.course.root, Path(folder))
            outcome = self.trials.run_tests(Path(folder), tests)
            return assembled.translate(explain(outcome, mine))

    # ---------------------------------------------------------------- when all are right

    def differences(self, lecture: int) -> list[str]:
        """For each function of a lecture, how the lecture's code differs from the reader's."""
        found = []
        for blank in self.engine.blanks([lecture]):
            mine = self.engine.lines(blank)
            theirs = self.engine.course.solution(blank)
            lines = list(difflib.unified_diff(mine, theirs, n=2, lineterm=""))
            found.append(f"{blank.name}, yours (-) and the lecture's (+):")
            found += ["..." if line.startswith("@@") else line for line in lines[2:]]
            found += ["the same"] * (not lines)
        return found

    def film(self, lecture: int) -> list[str]:
        """Run the reader's scheduler and write a page that plays it. Returns the frames for a
        terminal; none, after a line with the reason, if it could not be run."""
        outcome, frames = self._run("film", str(lecture), str(self.engine.folder / FILM))
        if outcome.code:
            self.say(f"The film broke off: {explain(outcome)}")
            return []
        return json.loads(frames)

    def film_title(self) -> str:
        """Whose scheduler the film shows."""
        blanks = [blank for blank in self.engine.blanks() if blank.path == _SCHEDULER]
        if not blanks or any(map(self.engine.is_open, blanks)):
            return "The lecture's scheduler with your code"
        return "Your scheduler"

    def open_workload(self, workload: Workload) -> bool:
        """Write the file of a second part; returns False if it is there already."""
        file = self.engine.folder / WORKLOADS / workload.file
        if file.exists():
            return False
        file.parent.mkdir(exist_ok=True)
        file.write_text(workload.template(), encoding="utf-8")
        return True

    def run_workload(self, workload: Workload) -> float | None:
        """Say how the reader's file compares with the lecture's code. Returns the ratio if the
        workload is beaten."""
        file = WORKLOADS / workload.file
        outcome, result = self._run("workloads", str(workload.lecture), str(file))
        if outcome.code:
            said = explain(outcome, [each.function for each in outcome.stuck if each.file == file])
            # Leave out the calls of the course itself, which come first in a traceback.
            _, begin, below = said.partition(f'  File "{file}"')
            self.say(f"{file}: wrong\n{begin}{below}" if begin else f"{file}: {said}")
            return None
        counts = json.loads(result)
        ratio = counts["yours"] / counts["lecture"]
        is_beaten = ratio <= workload.target
        self.say(
            f"{WORKLOADS / workload.file}: {counts['yours']:,} {workload.unit}, the lecture's "
            f"{counts['lecture']:,}: {ratio:.2f} ×, {'beaten' if is_beaten else 'to beat'} at "
            f"{workload.target} ×"
        )
        if not is_beaten:
            return None
        self.engine.progress.beaten[str(workload.lecture)] = round(ratio, 4)
        return ratio

    def _run(self, module: str, *arguments: str) -> tuple[Outcome, str]:
        """Run a module of the course tool on the reader's engine; returns what it wrote into the
        file that is its last argument."""
        with tempfile.TemporaryDirectory() as folder:
            unfinished = [each.name for each in self.engine.blanks() if self.engine.is_open(each)]
            assembled = self.engine.put_together(Path(folder), unfinished)
            own = self.engine.folder / WORKLOADS
            if own.exists():
                shutil.copytree(own, Path(folder, WORKLOADS))
            result = Path(folder, "result.json")
            outcome = self.trials.run(
                Path(folder), f"nanovllm.lab.course.{module}", *arguments, str(result)
            )
            text = result.read_text(encoding="utf-8") if result.exists() else ""
            said = replace(outcome, text=assembled.translate(outcome.text))
            return said, text


def status(engine: Growing) -> list[str]:
    """A line for each lecture of the course, with a square for each function."""
    lines = [f"{engine.folder}, lecture {engine.progress.lecture}", _MEANING, ""]
    width = max(map(len, engine.course.titles.values()))
    for number, title in engine.course.titles.items():
        blanks = engine.course.blanks_of([number])
        if number not in engine.lectures:
            squares, names = "·" * len(blanks), ""
        else:
            states = {blank.name: _state(engine, blank) for blank in blanks}
            squares = "".join(_SQUARES[state] for state in states.values())
            names = " ".join(name for name, state in states.items() if state != "right")
        beaten = engine.progress.beaten.get(str(number))
        won = f"second part: {beaten:.2f} ×" if beaten is not None else ""
        lines.append(f"{number}  {title:{width}}  {squares:4}  {names or won}".rstrip())
    right = sum(engine.is_right(blank) for blank in engine.blanks())
    return [*lines, "", f"{right} of {len(engine.course.blanks)} functions"]


def _state(engine: Growing, blank: Blank) -> str:
    if engine.is_open(blank):
        return "open"
    return "right" if engine.is_right(blank) else "written"


def _names(blanks: Iterable[Blank]) -> str:
    return ", ".join(f"{blank.name} ({blank.lecture})" for blank in blanks)


def _lectures(blanks: Iterable[Blank]) -> str:
    numbers = list(dict.fromkeys(blank.lecture for blank in blanks))
    return f"lecture{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
