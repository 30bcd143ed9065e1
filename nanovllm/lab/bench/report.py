"""Rows, tables and reports: what every benchmark yields, and how it is shown in a terminal, as
Markdown and as JSON.

A row is a dict: the title of its table under "table", and a cell per column. A cell is a text, a
number, a list of repeated measurements (shown as their median) or an estimate with a confidence
interval (see `estimate`). JSON keeps all of it."""

import argparse
import collections
import datetime
import json
import pathlib
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import rich.console
import rich.markdown

from nanovllm.lab.bench.machine import cpu_model, usable_cores
from nanovllm.lab.bench.worker import versions

Row = dict[str, Any]

GOALS = "Figures and goals"
PARTS = "Parts"
FAILED = "failed"
DRY_RUN = "DRY RUN WITH TINY SIZES: NOT A MEASUREMENT"
_RESAMPLES = 10_000


def estimate(values: Sequence[float]) -> dict[str, Any]:
    """The median of values with its 95 % confidence interval, from resampling; "values" keeps them
    all."""
    drawn = np.random.default_rng(0).choice(values, (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return {
        "median": float(np.median(values)),
        "low": float(low),
        "high": float(high),
        "values": list(values),
    }


def paired(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """An estimate of how many times larger the second measurement of each pair is than the
    first."""
    return estimate([b / a for a, b in zip(first, second, strict=True)])


#: The kinds of goals: their signs, and the direction in which a figure may be beyond them.
_SIGNS = {"at_least": ("≥", 1), "at_most": ("≤", -1), "near": ("=", 0)}


def goal(
    figure: str,
    measured: float | None,
    unit: str = "",
    tolerance: float = 0.0,
    **wanted: float | None,
) -> Row:
    """The row of one headline figure, with its goal if it has one.

    Args:
        measured: None if the figure could not be measured.
        tolerance: the share of a goal `near` by which it may be missed.
        wanted: `at_least`, `at_most` or `near`; None for no goal.
    """
    words = "–"
    reached = None
    for kind, value in wanted.items():
        sign, direction = _SIGNS[kind]
        if value is not None:
            words = f"{sign} {number(value)}" + (f", within {tolerance:.0%}" if tolerance else "")
            if measured is not None:
                distance = measured - value
                reached = (
                    distance * direction >= 0
                    if direction
                    else abs(distance) <= tolerance * abs(value)
                )
    return {
        "table": GOALS,
        "figure": figure,
        "measured": measured,
        "unit": unit,
        "goal": words,
        "reached": reached,
    }


def number(value: float) -> str:
    """Three digits."""
    size = abs(value)
    if size >= 1e6:
        return f"{value:,.0f}"
    if 0 < size < 0.01:
        return f"{value:.1e}"
    if size >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def text_of(cell: Any) -> str:
    """A cell as text; see the module's docstring."""
    if isinstance(cell, dict):
        return "{} ({} – {})".format(*(number(cell[name]) for name in ("median", "low", "high")))
    if isinstance(cell, list):
        cell = statistics.median(cell) if cell and None not in cell else None
    if cell is None or isinstance(cell, bool):
        return {None: "–", True: "yes", False: "NO"}[cell]
    return number(cell) if isinstance(cell, float) else str(cell)


def conditions(
    model: str, threads: int, seconds: float, found: dict[str, dict[str, str]] | None = None
) -> list[str]:
    """When, where and on what was measured: a fact per line.

    Args:
        found: versions of the packages of each engine; by default nanovllm's.
    """
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return [
        f"{now}, {cpu_model()}, {len(usable_cores())} cores ({threads} used), "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {platform.platform(terse=True)}",
        f"model {model}; the whole run took {seconds / 60:.1f} minutes",
        *(
            f"{engine}: " + ", ".join(f"{name} {version}" for name, version in packages.items())
            for engine, packages in (found or {"nanovllm": versions("nanovllm")}).items()
        ),
    ]


@dataclass
class Report:
    """The result of a benchmark: the command, facts about the run, and rows."""

    command: str
    facts: list[str]
    rows: list[Row]
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.dry_run:  # sizes are too small to say anything about a goal
            self.facts.insert(0, DRY_RUN)
            for row in self.rows:
                if row["table"] == GOALS:
                    row["reached"] = None

    @property
    def failed(self) -> bool:
        """Whether a part or a test failed. (A goal that is not reached is a result.)"""
        return any(outcome(row) == FAILED for row in self.rows)

    def tables(self) -> dict[str, list[Row]]:
        """Rows by the title of their table: goals first, then tests, the others in order of
        appearance, and parts last."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row["table"], []).append(
                {name: cell for name, cell in row.items() if name != "table"}
            )

        def rank(title: str) -> int:
            if title in (GOALS, PARTS):
                return 0 if title == GOALS else 3
            return 1 if "passed" in found[title][0] else 2

        return {title: found[title] for title in sorted(found, key=rank)}

    def show(self) -> None:
        """Print it, without the lists of tests and parts."""
        text = self.markdown(with_lists=False)
        rich.console.Console(width=None if sys.stdout.isatty() else 160).print(
            rich.markdown.Markdown(text)
        )

    def markdown(self, with_lists: bool = True) -> str:
        """The command, the facts and the tables as a Markdown document. Tests and parts are
        counted; a table shows those that failed.

        Args:
            with_lists: add the folded list of all tests and of all parts.
        """
        parts = [f"    {self.command}", "\n".join(f"- {fact}" for fact in self.facts)]
        for title, rows in self.tables().items():
            if outcome(rows[0]) is None:
                parts.append(f"**{title}**\n\n{markdown_table(rows)}")
            else:
                parts += outcomes(title, rows, with_lists)
        return "\n\n".join(parts) + "\n"

    def json(self) -> str:
        """Everything that was measured."""
        found = {
            "command": self.command,
            "dry_run": self.dry_run,
            "failed": self.failed,
            "facts": self.facts,
        }
        return json.dumps(found | {"tables": self.tables()}, indent=1, allow_nan=False) + "\n"

    def finish(self, arguments: argparse.Namespace) -> int:
        """Show the report and write the files that the command line asks for; returns the exit
        code."""
        self.show()
        for path, content in ((arguments.json, self.json()), (arguments.markdown, self.markdown())):
            if path is not None:
                pathlib.Path(path).write_text(content, encoding="utf-8")
        return int(self.failed)


def outcome(row: Row) -> str | None:
    """The outcome of a test or a part; None if the row is a measurement."""
    if "passed" in row:
        return {True: "passed", False: FAILED, None: "skipped"}[row["passed"]]
    return row.get("status")


def outcomes(title: str, rows: Sequence[Row], with_list: bool) -> list[str]:
    """Paragraphs about tests or parts: how many passed, a table of those that failed, and the
    folded list of all."""
    counts = collections.Counter(outcome(row) for row in rows)
    numbers = ", ".join(
        f"{counts[each]} {each}" for each in ("passed", "done", FAILED, "skipped") if counts[each]
    )
    parts = [f"**{title}**: {numbers}"]
    if counts[FAILED]:
        parts.append(markdown_table([row for row in rows if outcome(row) == FAILED]))
    if with_list:
        parts += [
            f"<details>\n<summary>All {len(rows)}</summary>",
            markdown_table(rows),
            "</details>",
        ]
    return parts


def markdown_table(rows: Sequence[Row]) -> str:
    """Rows as a table in Markdown. Names of tests are set as code."""
    columns = columns_of(rows)
    lines = [list(columns), [":---" if is_label else "---:" for is_label in columns.values()]]
    for row in rows:
        cells = {name: text_of(row.get(name, "")).replace("|", "/") for name in columns}
        lines.append([f"`{cell}`" if name == "test" else cell for name, cell in cells.items()])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def columns_of(rows: Sequence[Row]) -> dict[str, bool]:
    """The names of all columns, and whether a column holds texts, which are aligned to the left."""
    return {
        name: all(isinstance(row.get(name, ""), str) for row in rows)
        for row in rows
        for name in row
    }
