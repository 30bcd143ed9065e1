"""The results as tables for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import rich.console
import rich.table

from nanovllm.lab.bench.machine import cpu_model, usable_cores
from nanovllm.lab.bench.metrics import AGREEING_PAIRS, TIE
from nanovllm.lab.bench.suite import Results
from nanovllm.lab.bench.worker import versions


@dataclass
class Context:
    """Under what conditions was measured; everything a reader needs to repeat it."""

    command: str
    model: str
    dtype: str
    seconds: float
    date: str
    cpu: str
    num_cores: int
    num_threads: int
    memory_bytes: int
    platform: str
    versions: dict[str, dict[str, str]]

    @classmethod
    def now(
        cls, command: str, model: str, dtype: str, num_threads: int, seconds: float, results: Results | None = None
    ) -> Context:
        """The conditions of what has just ended; `results` knows the versions of the engines, if there were several."""
        found = {"nanovllm": versions("nanovllm")}
        for launch in results.launches if results is not None else ():
            found.setdefault(launch.engine, {}).update(launch.started.versions)
        return cls(
            command,
            model,
            dtype,
            seconds,
            datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            cpu_model(),
            len(usable_cores()),
            num_threads,
            psutil.virtual_memory().total,
            platform.platform(terse=True),
            found,
        )

    def lines(self, results: Results) -> list[str]:
        """For a reader, one fact a line."""
        return [
            self.machine_line(),
            f"measured roofs: {results.limits.bytes_per_second / 1e9:.1f} GB/s read, "
            f"{results.limits.flops_per_second / 1e9:.0f} GFLOP/s in {results.limits.dtype}",
            f"model {self.model}, {self.dtype}; {results.repeats} runs each, in turn, medians; "
            f"all of it took {self.seconds / 60:.1f} minutes",
            *(self.engine_line(engine) for engine in results.engines if engine in self.versions),
        ]

    def machine_line(self) -> str:
        """When, and on what machine."""
        return (
            f"{self.date}, {self.cpu}, {self.num_cores} cores ({self.num_threads} used), "
            f"{self.memory_bytes / 2**30:.0f} GiB, {self.platform}"
        )

    def engine_line(self, engine: str) -> str:
        """The versions of an engine's packages."""
        return f"{engine}: " + ", ".join(f"{name} {version}" for name, version in self.versions[engine].items())


@dataclass
class Table:
    """A table of texts; the first `num_labels` columns are labels, the others numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    num_labels: int = 2


def tables(results: Results) -> list[Table]:
    """The tables that have rows."""
    found = [_speed(results), _machine_use(results), _starts(results), _ratios(results)]
    return [table for table in found if table.rows]


def _speed(results: Results) -> Table:
    columns = ["workload", "engine", "tokens/s", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "worst"]
    names = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "itl_max")
    rows = []
    for workload, engine in _measured(results):
        row = [workload, engine, _number(results.median(workload, engine, "tokens_per_second"))]
        rows.append(row + [_number(results.median(workload, engine, name), 1000) for name in names])
    return Table("Speed", columns, rows)


def _machine_use(results: Results) -> Table:
    columns = ["workload", "engine", "% of roofline", "bandwidth %", "compute %"]
    columns += ["cores busy", "worst steal %", "worst others %"]
    rows = []
    for workload, engine in _measured(results):
        share = results.roofline(workload, engine)
        row = [workload, engine, *(_number(getattr(share, n, None)) for n in ("percent", "bandwidth", "compute"))]
        noises = [run.noise for run in results.of(workload, engine)]
        row.append(_number(statistics.median(noise.cores for noise in noises)))
        row += [_number(max(getattr(noise, name) for noise in noises), 100) for name in ("steal", "others")]
        rows.append(row)
    return Table("Use of the machine, by the run and by others", columns, rows)


def _measured(results: Results) -> list[tuple[str, str]]:
    """Pairs of a workload and an engine that have runs."""
    pairs = [(workload.name, engine) for workload in results.workloads for engine in results.engines]
    return [pair for pair in pairs if results.of(*pair)]


def _starts(results: Results) -> Table:
    rows = []
    for kind in ("offline", "server"):
        for engine in results.engines:
            starts = [launch.started for launch in results.launches if (launch.kind, launch.engine) == (kind, engine)]
            if starts:
                seconds = statistics.median(start.seconds for start in starts)
                peak = max(start.peak_bytes for start in starts)
                rows.append([kind, engine, str(len(starts)), f"{seconds:.1f}", f"{peak / 2**20:.0f}"])
    columns = ["used as", "engine", "starts", "start to first token s", "peak memory MiB"]
    return Table("Start-up and memory", columns, rows)


def _ratios(results: Results) -> Table:
    first = results.engines[0]
    rows = [
        [where, title, other, f"{c.ratio:.2f}", " ".join(f"{pair:.2f}" for pair in c.pairs), c.verdict]
        for where, title, other, c in results.comparisons()
    ]
    title = (
        f"{first} against the others, pair by pair (above 1: {first} is better; below {TIE} it is a tie "
        f"unless {AGREEING_PAIRS} pairs or more agree)"
    )
    return Table(title, ["workload", "figure", "against", "ratio", "pairs", "verdict"], rows, num_labels=3)


def _number(value: float | None, factor: float = 1.0) -> str:
    """Three digits, or a dash for nothing."""
    if value is None:
        return "–"
    value *= factor
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def print_tables(results: Results, context: Context, console: rich.console.Console) -> None:
    """Show the results in a terminal."""
    show(tables(results), context.lines(results), console)


def markdown(results: Results, context: Context) -> str:
    """The results as a Markdown document."""
    workloads = [f"**{workload.name}**: {workload.title}" for workload in results.workloads]
    return document(context.command, [context.lines(results), workloads], tables(results))


def show(tables: Sequence[Table], lines: Sequence[str], console: rich.console.Console) -> None:
    """Show tables in a terminal, and below them the conditions."""
    for table in tables:
        shown = rich.table.Table(title=table.title, title_justify="left")
        for index, column in enumerate(table.columns):
            shown.add_column(column, justify="left" if index < table.num_labels else "right")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    for line in lines:
        console.print(line, highlight=False, markup=False)


def document(command: str, lists: Sequence[Sequence[str]], tables: Sequence[Table]) -> str:
    """A command, lists of facts and tables as a Markdown document."""
    parts = [f"    {command}", *("\n".join(f"- {line}" for line in lines) for lines in lists)]
    for table in tables:
        rule = [":---" if index < table.num_labels else "---:" for index in range(len(table.columns))]
        lines = ["| " + " | ".join(row) + " |" for row in (table.columns, rule, *table.rows)]
        parts.append(f"**{table.title}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def as_dict(results: Results, context: Context) -> dict[str, Any]:
    """Everything as plain data: each run, each start, and the ratios."""
    return {
        "context": dataclasses.asdict(context),
        "limits": dataclasses.asdict(results.limits),
        "workloads": {workload.name: workload.title for workload in results.workloads},
        "launches": [dataclasses.asdict(launch) for launch in results.launches],
        "runs": [dataclasses.asdict(run) for run in results.runs],
        "roofline": [
            {"workload": workload.name, "engine": engine, "percent": share.percent} | dataclasses.asdict(share)
            for workload in results.workloads
            for engine in results.engines
            if (share := results.roofline(workload.name, engine)) is not None
        ],
        "comparisons": [
            {"workload": where, "figure": title, "first": results.engines[0], "second": other}
            | dataclasses.asdict(comparison)
            for where, title, other, comparison in results.comparisons()
        ],
    }


def as_json(results: Results, context: Context) -> str:
    """Everything as JSON."""
    return json.dumps(as_dict(results, context), indent=1, allow_nan=False) + "\n"
