"""Second parts of lectures: a workload, a count of what the engine does with it, and a file in
which the reader beats the lecture's count.

`python -m nanovllm.lab.course.workloads LECTURE FILE RESULT` counts with the reader's file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


class UnfairError(Exception):
    """A count that does not count, since the engine did something else."""


class Names(dict[str, Any]):
    """The names that the reader's file defines."""

    def __missing__(self, name: str) -> NoReturn:
        raise UnfairError(f"the file defines no {name}")


Load = Callable[[], Names]  # runs the file


@dataclass(frozen=True)
class Workload:
    """A count to beat.

    Attributes:
        lecture: its number.
        title: the task in a few words.
        unit: the noun for the count, which should fall.
        target: the largest ratio to the lecture's count that beats it.
    """

    lecture: int
    title: str
    unit: str
    target: float

    @property
    def file(self) -> str:
        """The name of the reader's file."""
        return f"lecture_{self.lecture}.py"

    @property
    def original(self) -> Path:
        """The file as it was when the reader began."""
        return Path(__file__).with_name(self.file)

    def template(self) -> str:
        """The text with which the reader's file begins."""
        return self.original.read_text(encoding="utf-8")


WORKLOADS = (
    Workload(10, "generate with fewer rows", "rows through the model", 0.75),
    Workload(11, "keep what is asked for again", "prompt tokens computed", 0.85),
    Workload(12, "do not look twice", "lookups in the prefix cache", 0.6),
    Workload(13, "answer sooner", "steps from arrivals to first tokens", 0.7),
    Workload(14, "read shared pages once", "rows of KV gathered", 0.3),
    Workload(16, "find the nucleus in fewer logits", "probabilities sorted", 0.65),
    Workload(20, "send shorter orders", "bytes of orders", 0.3),
    Workload(21, "an all-reduce over two nodes", "time units", 0.75),
    Workload(23, "stages that take equally long", "time units of the slowest stages", 0.9),
    Workload(24, "move fewer experts", "experts moved", 0.6),
    Workload(32, "store what is asked for again", "blocks computed or stored", 0.55),
    Workload(40, "graphs of the sizes that occur", "rows of padding", 0.5),
    Workload(41, "round with a smaller error", "hundredths of squared error", 0.85),
    Workload(42, "better guesses", "forward passes", 0.75),
    Workload(51, "a fleet of which two engines are slow", "milliseconds to first tokens", 0.33),
)


def workload_of(lecture: int) -> Workload | None:
    """The second part of a lecture; None if it has none."""
    return next((each for each in WORKLOADS if each.lecture == lecture), None)
