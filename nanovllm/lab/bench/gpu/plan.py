"""The parts of `bench gpu`, and its goals."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.lab.bench.machine import usable_cores
from nanovllm.lab.bench.parts import Part
from nanovllm.lab.bench.report import Row, goal

_HERE = "nanovllm.lab.bench.gpu."
DECODE = "Decode attention, 32/8 heads of 128, bf16, blocks of 16"
SIMPLE = "Decode attention of the smallest kernel (triton_simple), the same shape"
LATENT = "Latent decode, absorbed, latents of 512 + 64, bf16, blocks of 16"
PREFILL = "Prefill attention, the same shape, causal FLOPs"
MODELS = "Whole models of random weights"
STEP = "Where the time of a decode step goes, under torch's profiler"
OURS = "nanovllm"
GRAPHS = "nanovllm, graphs"


@dataclass(frozen=True)
class PlannedPart:
    """A part of `bench gpu`: tests first, then measurements, then comparisons.

    Attributes:
        title: its name in the report.
        function: module of this package and function, which is imported when the part begins.
        seconds: the time limit, after which it is killed.
        arguments: of the function.
    """

    title: str
    function: str
    seconds: int
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Goal:
    """A figure to reach, which was set for an H200. The worst of the rows that count decides.

    Attributes:
        figure, unit: its name in the report.
        table, column: where the numbers are.
        at_least, at_most: one of the two: the number to reach.
        cells: what a row that counts has in other columns.
        least: the smallest numbers that it has in other columns.
    """

    figure: str
    unit: str
    table: str
    column: str
    at_least: float | None = None
    at_most: float | None = None
    cells: dict[str, str | int] = field(default_factory=dict)
    least: dict[str, int] = field(default_factory=dict)

    def counts(self, row: Row) -> bool:
        """Return whether the goal is about this row."""
        return (
            row["table"] == self.table
            and row.get(self.column) is not None
            and all(row[name] == cell for name, cell in self.cells.items())
            and all(row[name] >= number for name, number in self.least.items())
        )

    def reached(self, rows: Sequence[Row]) -> Row:
        """Return the row of the report that compares the worst of the rows with the goal."""
        worst: Callable[..., Any] = max if self.at_least is None else min
        number = worst((row[self.column] for row in rows if self.counts(row)), default=None)
        if self.at_least is None:
            return goal(self.figure, number, self.unit, at_most=self.at_most)
        return goal(self.figure, number, self.unit, at_least=self.at_least)


PARTS = [
    # They spend most of their time in the compiler: this part is divided among the cores.
    PlannedPart("kernels", function="proofs:prove", seconds=150, arguments=("test_kernels.py",)),
    PlannedPart(
        "compute-sanitizer", function="proofs:prove", seconds=120, arguments=("test_sanitizer.py",)
    ),
    PlannedPart(
        "greedy tokens", function="proofs:prove", seconds=120, arguments=("test_tokens.py",)
    ),
    PlannedPart(
        "two GPUs, greedy tokens",
        function="proofs:prove",
        seconds=180,
        arguments=("test_divided.py",),
    ),
    PlannedPart("decode attention", function="attention:decode", seconds=60),
    PlannedPart("latent attention", function="attention:latent", seconds=60),
    PlannedPart("prefill attention", function="attention:prefill", seconds=90),
    PlannedPart("two GPUs, NCCL", function="nccl:nccl", seconds=180),
    PlannedPart(
        "Llama-3.2-1B, graphs",
        function="end_to_end:engine",
        seconds=75,
        arguments=("Llama-3.2-1B", "graphs"),
    ),
    PlannedPart(
        "Llama-3.1-8B, graphs",
        function="end_to_end:engine",
        seconds=110,
        arguments=("Llama-3.1-8B", "graphs"),
    ),
    PlannedPart(
        "Llama-3.2-1B, eager",
        function="end_to_end:engine",
        seconds=75,
        arguments=("Llama-3.2-1B", "eager"),
    ),
    PlannedPart(
        "Llama-3.1-8B, eager",
        function="end_to_end:engine",
        seconds=45,
        arguments=("Llama-3.1-8B", "eager", "stream"),
    ),
    PlannedPart(
        "Llama-3.2-1B, transformers",
        function="end_to_end:transformers",
        seconds=75,
        arguments=("Llama-3.2-1B",),
    ),
    PlannedPart(
        "Llama-3.1-8B, transformers",
        function="end_to_end:transformers",
        seconds=75,
        arguments=("Llama-3.1-8B",),
    ),
]

GOALS = [
    Goal(
        figure="decode attention, 64 × 8k or more, relative to copy bandwidth",
        unit="%",
        table=DECODE,
        column="% of copy",
        at_least=85,
        least={"sequences": 64, "context": 8192},
    ),
    Goal(
        figure="latent decode, 16 heads, 64 × 8k or more, relative to copy bandwidth",
        unit="%",
        table=LATENT,
        column="% of copy",
        at_least=80,
        cells={"heads": 16},
        least={"sequences": 64, "context": 8192},
    ),
    Goal(
        figure="prefill attention at 8k, relative to the bf16 matrix peak",
        unit="%",
        table=PREFILL,
        column="% of peak",
        at_least=60,
        cells={"implementation": OURS, "new tokens": 8192, "context before": 0},
    ),
    Goal(
        figure="prefill attention: time of torch's flash SDPA ÷ nanovllm's",
        unit="×",
        table=PREFILL,
        column="÷ nanovllm",
        at_least=1 / 1.1,
        cells={"implementation": "SDPA flash"},
    ),
    Goal(
        figure="8B shape, decode step of one stream, relative to the weight-bandwidth limit",
        unit="%",
        table=MODELS,
        column="% of weight bandwidth",
        at_least=85,
        cells={"shape": "Llama-3.1-8B", "engine": GRAPHS, "workload": "W1"},
    ),
    Goal(
        figure="1B shape, 256 requests, relative to the roofline",
        unit="%",
        table=MODELS,
        column="% of roofline",
        at_least=60,
        cells={"shape": "Llama-3.2-1B", "engine": GRAPHS, "workload": "256 requests"},
    ),
    Goal(
        figure="host gap in a decode step, with graphs",
        unit="%",
        table=STEP,
        column="host gap %",
        at_most=5,
        cells={"engine": GRAPHS},
    ),
]


def goals(rows: Sequence[Row]) -> Iterator[Row]:
    """The goals, with the worst of the rows that count."""
    for wish in GOALS:
        yield wish.reached(rows)


def plan(dry_run: bool) -> list[Part]:
    """All parts, in order."""
    # The ceilings come first, because later parts compare with them. A dry run measures nothing, so
    # all else runs at once, and all shapes are the same tiny one.
    parts = [Part("the machine", _HERE + "machine:machine", (), 60)]
    # Two more parts run at the same time as the kernels' tests.
    shares = 1 if dry_run else max(1, min(10, len(usable_cores())) - 2)
    for part in PARTS:
        if dry_run and "Llama-3.1-8B" in part.arguments:
            continue
        divided = [(part.title, part.arguments)]
        if part.title == "kernels":
            divided = [
                (f"kernels {i + 1}/{shares}", (*part.arguments, f"{i}/{shares}"))
                for i in range(shares)
            ]
        is_alone = not dry_run and part.function != "proofs:prove"
        parts += [
            Part(
                title=title,
                function=_HERE + part.function,
                arguments=arguments,
                seconds=part.seconds,
                alone=is_alone,
            )
            for title, arguments in divided
        ]
    return parts
