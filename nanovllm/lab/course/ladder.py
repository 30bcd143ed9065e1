"""The ladder: one workload on the engine that the reader has built so far, measured now, and on the
engines of all lectures, read from `figures/`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import COURSE_MODEL
from nanovllm.lab.bench.gpu.plan import GRAPHS, STEP
from nanovllm.lab.bench.ladder import TABLE, measure, rung_of, rungs
from nanovllm.lab.bench.machine import usable_cores
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import number
from nanovllm.lab.bench.steps import HOST_TIME
from nanovllm.lab.course.build import find_root
from nanovllm.lab.recorded import conditions, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "ladder.md"
GPU_PAGE = "ladder_gpu.md"
STEPS_PAGE = "gpu.md"
SHAPE = "Llama-3.2-1B"


@dataclass(frozen=True)
class Step:
    """A row of the ladder: an engine, and its output tokens per second.

    Attributes:
        lecture: that builds it; 0: an engine that no lecture builds.
        now: measured a moment ago; None: not measured now.
        recorded, on_gpu: from `figures/`; None: never measured.
    """

    name: str
    lecture: int
    now: float | None
    recorded: float | None
    on_gpu: float | None


@dataclass(frozen=True)
class DecodeStep:
    """Where the milliseconds of a decode step on a GPU go.

    Attributes:
        running: requests that decode.
        device: kernels, and the pauses between kernels of one launch.
        launches: how much longer the GPU waits for the host without CUDA graphs than with them.
        scheduler: None: it was not measured apart from the rest of the host.
        rest: of the time in which the GPU waits for the host.
    """

    running: int
    with_graphs: bool
    device: float
    launches: float
    scheduler: float | None
    rest: float


@dataclass(frozen=True)
class Ladder:
    """What `climb` returns; Jupyter shows it as a table.

    Attributes:
        lecture: the one that the reader has read.
        on_gpu: decode steps of Llama-3.2-1B, recorded on a GPU.
        notes: where the columns are from.
    """

    lecture: int
    steps: list[Step]
    on_gpu: list[DecodeStep]
    notes: list[str]

    def _repr_markdown_(self) -> str:
        lines = [
            "| lecture | engine | now | recorded | H200 |",
            "| ---: | :--- | ---: | ---: | ---: |",
        ]
        for step in self.steps:
            mine = step.lecture and step.now is not None
            name = f"**{step.name}**" if mine else step.name
            later = step.lecture > self.lecture and step.now is None
            now = "" if step.now is None else number(step.now)
            recorded = [_recorded(value) for value in (step.recorded, step.on_gpu)]
            values = ["later" if later else now, *recorded]
            lines.append("| " + " | ".join([str(step.lecture or ""), name, *values]) + " |")
        return "\n".join([*lines, "", "Output tokens per second. " + " ".join(self.notes)])

    def __repr__(self) -> str:
        return self._repr_markdown_()

    def draw(self) -> Figure:
        """Draw the ladder: recorded values as bars, those of now as points."""
        from nanovllm.lab.viz.ladder import draw_ladder

        return draw_ladder(self)


def _recorded(value: float | None) -> str:
    return "never" if value is None else number(value)


def climb(lecture: int, figures: Path | None = None, *, model: str = COURSE_MODEL) -> Ladder:
    """Measure `transformers` and the engine of a lecture, and read all others from `figures/`.

    Args:
        lecture: the one that was read last.
        figures: the folder of the recorded figures; by default that of the repository.
        model: a folder or a name.
    """
    figures = figures or find_root(Path.cwd()) / "figures"
    now = measure_now(lecture, model)
    recorded = read(figures / PAGE)
    on_gpu = read(figures / GPU_PAGE)
    steps = [
        Step(
            rung.name,
            rung.lecture,
            now.get(rung.name),
            recorded.get(rung.name),
            on_gpu.get(rung.name),
        )
        for rung in rungs()
    ]
    known = {step.name for step in steps}
    steps += [
        Step(name, 0, None, recorded.get(name), on_gpu.get(name))
        for name in dict.fromkeys([*recorded, *on_gpu])
        if name not in known
    ]
    return Ladder(lecture, steps, decode_steps(figures), notes(figures, on_gpu))


def measure_now(lecture: int, model: str) -> dict[str, float]:
    """Measure `transformers` and the engine of a lecture, after a run to warm up; returns tokens
    per second by name."""
    setting = Setting(
        folder=str(resolve_model(model).resolve()), threads=len(usable_cores()), repeats=1
    )
    chosen = [rungs()[0], rung_of(lecture)]
    return {row["engine"]: fmean(row["tokens/s"]) for row in measure(chosen, setting)}


def read(page: Path) -> dict[str, float]:
    """Read the recorded tokens per second by name; nothing if the page has no ladder."""
    return {row["engine"]: mean_of(row["tokens/s"]) for row in read_table(page, TABLE)}


def read_table(page: Path, title: str) -> list[dict[str, str]]:
    """Return the rows of a table; none if there is no such page, or no such table in it."""
    if not page.exists() or f"**{title}**" not in page.read_text(encoding="utf-8"):
        return []
    return list(table(page, title))


def decode_steps(figures: Path) -> list[DecodeStep]:
    """Divide the decode steps that were recorded on a GPU; none if there is no such record."""
    if not (figures / STEPS_PAGE).exists():
        return []
    rows = {
        (int(row["running"]), row["engine"] == GRAPHS): row
        for row in table(figures / STEPS_PAGE, STEP)
        if row["shape"] == SHAPE
    }
    scheduler = {
        int(row["running"]): mean_of(row["scheduler"]) / 1e3
        for row in read_table(figures / GPU_PAGE, HOST_TIME)
    }
    found = []
    for (running, with_graphs), row in sorted(rows.items()):
        waits = _share(row, "host gap %")
        needed = _share(rows[running, True], "host gap %")
        known = scheduler.get(running)
        apart = None if known is None else min(known, needed)
        found.append(
            DecodeStep(
                running,
                with_graphs,
                device=float(row["step ms"]) - waits,
                launches=waits - needed,
                scheduler=apart,
                rest=needed - (apart or 0.0),
            )
        )
    return found


def _share(row: dict[str, str], name: str) -> float:
    return float(row["step ms"]) * float(row[name]) / 100


def mean_of(cell: str) -> float:
    """Read the first number of a cell such as "1,076 (1,060 – 1,090)"."""
    return float(cell.split()[0].replace(",", ""))


def notes(figures: Path, on_gpu: dict[str, float]) -> list[str]:
    """Say where the columns are from."""
    found = []
    if (figures / PAGE).exists():
        command, date, processor = conditions(figures / PAGE)
        found.append(f"Recorded: {date}, {processor}, `{command}`.")
    else:
        found.append("Recorded: never; `nanovllm bench ladder --markdown figures/ladder.md`.")
    if on_gpu:
        found.append(f"H200: {conditions(figures / GPU_PAGE)[1]}, `make gpu`.")
    else:
        found.append("H200: never measured; `make gpu` measures it.")
    return found
