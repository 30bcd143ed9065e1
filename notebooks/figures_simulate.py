"""The drawings of lecture 51. Each function makes one picture."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from figures_parallel import arrow, box
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm.lab.viz.style import BACKGROUND, INK, MUTED, PALETTE, mix, pale, request_color

# A step: when it begins and ends, and the names of its requests.
Span = tuple[float, float, str]


def draw_two_clocks() -> Figure:
    """An engine's step, with a model and without one, and the heap of a fleet's next events."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 3.9), height_ratios=(3, 2))
    rows = {
        "an engine": ("the model runs\n(GPUs, for 12 ms)", PALETTE[3]),
        "a simulated engine": ("a cost says: 12 ms\n(no GPU, no waiting)", pale(PALETTE[3])),
    }
    ours = mix(PALETTE[0], BACKGROUND, 0.75)
    for row, (name, (middle, fill)) in enumerate(rows.items()):
        y = 1.3 * row
        top.text(-0.1, y + 0.45, name, ha="right", va="center", fontsize=10, color=INK)
        parts = (("schedule()", ours), (middle, fill), ("update_from_output()", ours))
        for column, (text, colour) in enumerate(parts):
            box(top, 3.0 * column, y, 2.6, 0.9, text, colour)
            if column:
                arrow(top, (3.0 * column - 0.4, y + 0.45), (3.0 * column, y + 0.45))
    top.set(xlim=(-2.6, 8.8), ylim=(2.4, -0.1))
    events = ["12 ms\nengine 0: result", "14 ms\nrequest C arrives", "19 ms\nengine 1: result"]
    bottom.text(-0.1, 0.5, "next events", ha="right", va="center", fontsize=10, color=INK)
    for column, text in enumerate(events):
        fill = PALETTE[1] if column == 0 else pale(PALETTE[1])
        box(bottom, 3.0 * column, 0.05, 2.6, 0.9, text, fill)
    bottom.text(1.3, 1.35, "the clock jumps to the earliest", ha="center", fontsize=9, color=MUTED)
    bottom.set(xlim=(-2.6, 8.8), ylim=(1.7, -0.1))
    for ax in (top, bottom):
        ax.axis("off")
    return figure


def draw_fleet(spans: Sequence[Sequence[Span]], arrivals: Mapping[str, float]) -> Figure:
    """The steps of each engine, and when requests arrive, in milliseconds."""
    figure, ax = plt.subplots(figsize=(9, 0.9 + 0.7 * len(spans)))
    for row, steps in enumerate(spans):
        for begin, end, names in steps:
            box(ax, begin, row + 0.1, end - begin, 0.8, names, pale(request_color(row)))
    for name, time in arrivals.items():
        ax.axvline(time, color=MUTED, linewidth=1, linestyle=":")
        ax.text(time, -0.12, name, ha="center", va="bottom", fontsize=9, color=INK)
    last = max(end for steps in spans for _, end, _ in steps)
    ax.set(
        xlim=(-1, last + 1),
        ylim=(len(spans), -0.05),
        yticks=[row + 0.5 for row in range(len(spans))],
        yticklabels=[f"engine {row}" for row in range(len(spans))],
        xlabel="ms on the virtual clock",
    )
    ax.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _lines(ax: Axes, lines: Mapping[str, Mapping[int, float]], xlabel: str) -> None:
    for row, (name, points) in enumerate(lines.items()):
        xs = sorted(points)
        ax.plot(xs, [points[x] for x in xs], "o-", color=request_color(row), label=name)
    ax.set(xlabel=xlabel, ylabel="% of requests within objectives")
    ax.grid(True)
    ax.legend()


def draw_servers(lines: Mapping[str, Mapping[int, float]], goal: float) -> Figure:
    """For each router and number of servers, the share of requests that meet the objectives."""
    figure, ax = plt.subplots(figsize=(9, 3.2))
    _lines(ax, lines, "servers")
    ax.axhline(goal, color=MUTED, linewidth=1, linestyle=":")
    return figure


def draw_limits(lines: Mapping[str, Mapping[int, float]], limit: float) -> Figure:
    """For each fleet and limit of TPOT, the share of requests that meet the objectives. A vertical
    line is at the limit of the service."""
    figure, ax = plt.subplots(figsize=(9, 3.2))
    _lines(ax, lines, "limit of TPOT (ms)")
    ax.axvline(limit, color=MUTED, linewidth=1, linestyle=":")
    return figure
