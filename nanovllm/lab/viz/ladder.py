"""A picture of the ladder of engines: see `nanovllm.lab.course.ladder`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from nanovllm.lab.viz.style import FAINT, MUTED, PALETTE, use_style

if TYPE_CHECKING:
    from nanovllm.lab.course.ladder import DecodeStep, Ladder

BUILT, NEW = PALETTE[0], PALETTE[1]
GRAPHS = 40  # the lecture on CUDA graphs
# The parts of a decode step, in its order.
PARTS = {"device": BUILT, "launches": NEW, "scheduler": PALETTE[2], "rest": MUTED}


def draw_ladder(ladder: Ladder) -> Figure:
    """Draw recorded speeds as bars, from the bottom of the ladder to the top, and speeds measured
    now as points. Engines of later lectures, and other engines, are pale. Below, draw where the
    time of a decode step on a GPU goes."""
    use_style()
    heights = [len(ladder.steps) + 2, len(ladder.on_gpu) + 2]
    figure, (above, below) = plt.subplots(
        2, figsize=(8.5, 0.28 * sum(heights)), height_ratios=heights, layout="constrained"
    )
    draw_engines(above, ladder)
    draw_decode_steps(below, ladder.on_gpu, is_graph=ladder.lecture >= GRAPHS)
    plt.close(figure)
    return figure


def draw_engines(axes: Axes, ladder: Ladder) -> None:
    """Draw one bar for each engine."""
    for place, step in enumerate(ladder.steps):
        is_built = 0 < step.lecture <= ladder.lecture
        color = BUILT if is_built else MUTED
        if step.recorded is not None:
            axes.barh(
                place, step.recorded, color=color, alpha=1.0 if is_built else 0.35, height=0.6
            )
        if step.now is not None:
            axes.plot(step.now, place, "D", color=NEW, markersize=6, zorder=3)
    labels = [_label(step.name, step.lecture) for step in ladder.steps]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("output tokens/s: bars recorded, diamonds now")
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()


def draw_decode_steps(axes: Axes, steps: list[DecodeStep], *, is_graph: bool) -> None:
    """Draw one bar for each decode step; those that the reader's engine does not make are pale."""
    divided = any(step.scheduler is not None for step in steps)
    labels = {
        "device": "device",
        "launches": "launches",
        "scheduler": "scheduler",
        "rest": "rest of the host" if divided else "scheduler and rest of the host",
    }
    for place, step in enumerate(steps):
        left = 0.0
        mine = step.with_graphs == is_graph
        for part, color in PARTS.items():
            width = getattr(step, part) or 0.0
            axes.barh(
                place,
                width,
                left=left,
                color=color,
                alpha=1.0 if mine else 0.35,
                edgecolor=FAINT,
                height=0.6,
            )
            left += width
    handles = [Patch(color=color) for color in PARTS.values()]
    shown = [
        (handle, labels[part])
        for handle, part in zip(handles, PARTS, strict=True)
        if divided or part != "scheduler"
    ]
    names = [
        f"{step.running} running, {'graphs' if step.with_graphs else 'eager'}" for step in steps
    ]
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("ms of a decode step, 1B model, recorded on an H200")
    axes.legend(*zip(*shown, strict=True), loc="upper right", fontsize=8)
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()


def _label(name: str, lecture: int) -> str:
    return f"{lecture}  {name}" if lecture else name
