"""Second parts of lectures: a workload, a count of what the engine does with it, and a file in
which the reader beats the lecture's count.

`python -m nanovllm.lab.course.workloads LECTURE FILE RESULT` counts with the reader's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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

    def template(self) -> str:
        """The text with which the reader's file begins."""
        return Path(__file__).with_name(self.file).read_text(encoding="utf-8")


WORKLOADS = (
    Workload(10, "generate with fewer rows", "rows through the model", 0.75),
    Workload(11, "keep what is asked for again", "prompt tokens computed", 0.85),
    Workload(12, "do not look twice", "lookups in the prefix cache", 0.6),
    Workload(13, "answer sooner", "steps from arrivals to first tokens", 0.7),
    Workload(14, "read shared pages once", "rows of KV gathered", 0.3),
)


def workload_of(lecture: int) -> Workload | None:
    """The second part of a lecture; None if it has none."""
    return next((each for each in WORKLOADS if each.lecture == lecture), None)
