"""What the parts find: figures beside their goals, and the tables of details."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanovllm.lab.bench.machine import Noise
from nanovllm.lab.bench.report import Context, Table
from nanovllm.lab.bench.watch import Estimate

DRY_RUN = "DRY RUN WITH TINY SIZES: NOT A MEASUREMENT"


@dataclass
class Finding:
    """A figure.

    Attributes:
        goal: in words; "" if the figure is only reported.
        reached: None without a goal, and in a dry run.
    """

    figure: str
    measured: float
    unit: str
    goal: str = ""
    reached: bool | None = None

    @classmethod
    def at_least(cls, figure: str, measured: float, unit: str, goal: float) -> Finding:
        """A figure that has to reach the goal."""
        return cls(figure, measured, unit, f"≥ {number(goal)}{unit}", measured >= goal)

    @classmethod
    def at_most(cls, figure: str, measured: float, unit: str, goal: float) -> Finding:
        """A figure that must not exceed the goal."""
        return cls(figure, measured, unit, f"≤ {number(goal)}{unit}", measured <= goal)

    @classmethod
    def near(cls, figure: str, measured: float, unit: str, goal: float, tolerance: float) -> Finding:
        """A figure that must not be further from the goal than this share of it."""
        words = f"{number(goal)}{unit}, within {tolerance:.0%} of it" if tolerance else f"{number(goal)}{unit}"
        return cls(figure, measured, unit, words, abs(measured - goal) <= tolerance * abs(goal))


@dataclass
class Found:
    """What a part found; `data` has everything that was measured, for JSON."""

    findings: list[Finding] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def __add__(self, other: Found) -> Found:
        """What both found."""
        return Found(self.findings + other.findings, self.tables + other.tables, self.data | other.data)


@dataclass
class Part:
    """What became of a part; `failure` says why there is nothing."""

    name: str
    title: str
    seconds: float
    noise: Noise
    found: Found = field(default_factory=Found)
    failure: str = ""


@dataclass
class Report:
    """All of it, for whoever reads it."""

    context: Context
    parts: list[Part]
    dry_run: bool
    title: str

    def __post_init__(self) -> None:
        if self.dry_run:  # nothing can be reached
            for part in self.parts:
                for finding in part.found.findings:
                    finding.reached = None

    @property
    def failed(self) -> bool:
        """Whether a part failed. (A goal that is not reached is a result.)"""
        return any(part.failure for part in self.parts)

    def tables(self) -> list[Table]:
        """Goals first, details after them, and last how the parts went."""
        words = {None: "dry run" if self.dry_run else "–", True: "yes", False: "NO"}
        goals = [
            [f.figure, f"{number(f.measured)}{f.unit}", f.goal or "–", words[f.reached] if f.goal else "–"]
            for part in self.parts
            for f in part.found.findings
        ]
        parts = [
            [p.title, p.failure.strip().splitlines()[-1] if p.failure else "", f"{p.seconds:.0f}"]
            + [f"{100 * share:.0f}" for share in (p.noise.steal, p.noise.others)]
            for p in self.parts
        ]
        found = [Table(self.title, ["figure", "measured", "goal", "reached"], goals, num_labels=1)]
        found += [table for part in self.parts for table in part.found.tables]
        found.append(Table("Parts", ["part", "failure", "s", "steal %", "others %"], parts, num_labels=2))
        return [table for table in found if table.rows]

    def lines(self) -> list[str]:
        """The conditions, one fact a line."""
        model = (
            f"model {self.context.model}, {self.context.dtype}; all of it took {self.context.seconds / 60:.1f} minutes"
        )
        facts = [self.context.machine_line(), model, self.context.engine_line("nanovllm")]
        return [DRY_RUN, *facts] if self.dry_run else facts

    def as_json(self) -> str:
        """Everything as JSON."""
        parts = [dataclasses.asdict(part) for part in self.parts]
        for part in parts:
            part |= {name: part["found"][name] for name in ("findings", "data")}
            del part["found"]
        data = {"dry_run": self.dry_run, "failed": self.failed, "context": dataclasses.asdict(self.context)}
        return json.dumps(data | {"parts": parts}, indent=1, allow_nan=False) + "\n"


def number(value: float) -> str:
    """Three digits."""
    size = abs(value)
    if size >= 1e6:
        return f"{value:,.0f}"
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def estimate(estimate: Estimate, factor: float = 1.0) -> str:
    """ "1.02 (1.01 – 1.04)": a median and its 95 % interval."""
    median, low, high = (number(factor * v) for v in (estimate.ratio, estimate.low, estimate.high))
    return f"{median} ({low} – {high})"


def paired(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """How much larger the second of each pair is than the first."""
    return Estimate.of([b / a for a, b in zip(first, second, strict=True)])


def in_turn(names: Sequence[str], round_number: int) -> list[str]:
    """The names, in the other order every other time: no trend favours either."""
    return list(names)[:: -1 if round_number % 2 else 1]


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Of each time, the slowest rank's: before that nobody can go on."""
    return np.asarray(per_rank).max(axis=0).tolist()


def microseconds(seconds: Sequence[float]) -> str:
    """The median."""
    return number(1e6 * statistics.median(seconds))
