"""Pictures of lecture 21: the grid of ranks and its groups, what each collective moves, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MAX_WIDTH, MUTED, PALETTE, ink_on, mix

if TYPE_CHECKING:
    from nanovllm.distributed.cost_model import Link
    from nanovllm.distributed.groups import Grid

Cells = Sequence[Sequence[Mapping[int, int]]]
_MEANINGS = {
    "tp": "tp: share each layer",
    "pp": "pp: share the layers",
    "dp": "dp: same weights",
    "ep": "ep: share the experts",
}


def draw_grid(grid: Grid, kinds: Sequence[str] = ("tp", "pp", "dp", "ep")) -> Figure:
    """The ranks of a grid, once for each kind of group; ranks of one colour are a group.

    Columns are tensor ranks, rows pipeline stages, and each frame is a data-parallel replica.
    """
    figure, axes = plt.subplots(1, len(kinds), figsize=(MAX_WIDTH, 0.75 + 0.52 * grid.pipeline), layout="constrained")
    for ax, kind in zip(np.atleast_1d(axes), kinds, strict=True):
        for color, ranks in zip(_cycle(len(grid.groups(kind))), grid.groups(kind), strict=True):
            for rank in ranks:
                _draw_rank(ax, grid, rank, color)
        for replica in range(grid.data):
            x = replica * (grid.tensor + 0.45)
            frame = FancyBboxPatch((x - 0.02, -0.02), grid.tensor - 0.08, grid.pipeline - 0.08, "round,pad=0.1")
            frame.set(facecolor="none", edgecolor=MUTED, linewidth=0.9)
            ax.add_patch(frame)
        ax.set(xlim=(-0.2, grid.data * (grid.tensor + 0.45) - 0.35), ylim=(grid.pipeline + 0.1, -0.2), aspect="equal")
        ax.set_title(_MEANINGS[kind], fontsize=10, loc="center")
        ax.axis("off")
    return figure


def _cycle(count: int) -> list[str]:
    """So many colours that can be told apart: the palette, then paler."""
    return [mix(PALETTE[i % len(PALETTE)], BACKGROUND, 0.55 * (i // len(PALETTE))) for i in range(count)]


def _draw_rank(ax: Axes, grid: Grid, rank: int, color: str) -> None:
    replica, rest = divmod(rank, grid.pipeline * grid.tensor)
    stage, column = divmod(rest, grid.tensor)
    x, y = replica * (grid.tensor + 0.45) + column, stage
    ax.add_patch(Rectangle((x, y), 0.88, 0.88, facecolor=color, edgecolor=color))
    ax.text(x + 0.44, y + 0.46, str(rank), ha="center", va="center", color=ink_on(color), fontsize=10)


def decode(numbers: Sequence[Sequence[int]]) -> list[list[dict[int, int]]]:
    """Numbers in which the digit at place r stands for a piece of rank r, as {rank: piece} for each."""
    return [
        [{place: int(d) - 1 for place, d in enumerate(reversed(str(n))) if d != "0"} for n in row] for row in numbers
    ]


def draw_collectives(panels: Mapping[str, tuple[Cells, Cells]], columns: int = 3) -> Figure:
    """What each rank holds before and after a collective.

    Args:
        panels: a title, then two lists with the cells of each rank: `{rank: piece}` says whose pieces were added up in
            the cell. Each rank has its colour, a sum has those of all its terms; the number is that of the piece.
    """
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(MAX_WIDTH, 2.1 * rows), layout="constrained", squeeze=False)
    height = max(len(cells) for sides in panels.values() for side in sides for cells in side)
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax, (title, (before, after)) in zip(axes.flat, panels.items(), strict=False):
        gap = len(before) + 0.9
        for start, side in ((0.0, before), (gap, after)):
            for rank, cells in enumerate(side):
                ax.text(start + rank + 0.44, -0.15, str(rank), ha="center", va="bottom", fontsize=9, color=MUTED)
                for row, cell in enumerate(cells):
                    _draw_cell(ax, start + rank, row, cell)
        ax.annotate(
            "", (gap - 0.12, height / 2), (gap - 0.9, height / 2), arrowprops={"arrowstyle": "-|>", "color": INK}
        )
        ax.set(xlim=(-0.7, gap + len(after) + 0.6), ylim=(height + 0.1, -0.75), aspect="equal")
        ax.set_title(title, fontsize=11, loc="center")
        ax.axis("off")
    return figure


def _draw_cell(ax: Axes, x: float, y: float, cell: Mapping[int, int]) -> None:
    width = 0.88 / max(len(cell), 1)
    for index, rank in enumerate(sorted(cell)):
        ax.add_patch(Rectangle((x + index * width, y), width, 0.88, facecolor=PALETTE[rank], edgecolor="none"))
    ax.add_patch(Rectangle((x, y), 0.88, 0.88, facecolor="none", edgecolor=FAINT if not cell else INK, linewidth=0.7))
    for piece in set(cell.values()):
        badge = {"boxstyle": "round,pad=0.12", "facecolor": BACKGROUND, "edgecolor": "none"}
        ax.text(x + 0.44, y + 0.46, str(piece), ha="center", va="center", fontsize=9, bbox=badge)


_MARKERS = "osD^v"


def draw_costs(
    algorithms: Mapping[str, Callable[[Link, int, float], float]], links: Sequence[Link], world_size: int
) -> Figure:
    """Predicted time over size: a panel a link, a line an algorithm."""
    figure, axes = plt.subplots(1, len(links), figsize=(MAX_WIDTH, 3.2), sharey=True, layout="constrained")
    sizes = np.logspace(10, 28, 37, base=2)
    for ax, link in zip(np.atleast_1d(axes), links, strict=True):
        for color, marker, (name, cost) in zip(PALETTE, _MARKERS, algorithms.items(), strict=False):
            times = [1e6 * cost(link, world_size, size) for size in sizes]
            ax.plot(sizes, times, color=color, label=name, marker=marker, markevery=6, markersize=5, linewidth=1.6)
        ax.set(xscale="log", yscale="log", title=link.name, xlabel="bytes")
        ax.set_xticks([1e3, 1e6, 1e8], ["1 KB", "1 MB", "100 MB"])
        ax.grid(True)
    np.atleast_1d(axes)[0].set_ylabel("µs")
    figure.legend(
        *np.atleast_1d(axes)[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(algorithms)
    )
    return figure


def draw_measured(measured: Mapping[str, tuple[Link, Mapping[int, float]]], predicted: Sequence[int]) -> Axes:
    """Measured times over sizes, and the fitted lines.

    Args:
        measured: a name, then the fitted link, and seconds by bytes.
        predicted: the sizes that the fit has not seen; their marks are hollow.
    """
    ax = plt.subplots(figsize=(6.4, 3.4), layout="constrained")[1]
    sizes = np.logspace(10, 21.3, 60, base=2)
    for color, marker, (name, (link, times)) in zip(PALETTE, _MARKERS, measured.items(), strict=False):
        line = [1e6 * link.message(size) for size in sizes]
        label = f"{name}: {1e6 * link.latency:.0f} µs + bytes / ({link.bandwidth / 1e9:.1f} GB/s)"
        ax.plot(sizes, line, color=color, linewidth=1.4, label=label)
        for size, seconds in times.items():
            face = BACKGROUND if size in predicted else color
            ax.plot(size, 1e6 * seconds, marker, color=color, markerfacecolor=face, markersize=7, linestyle="none")
    ax.set(xscale="log", yscale="log", xlabel="bytes", ylabel="µs", title="All-reduce on 2 ranks; hollow: not fitted")
    ax.set_xticks([2**10, 2**14, 2**17, 2**20], ["1 KB", "16 KB", "128 KB", "1 MB"])
    ax.minorticks_off()
    ax.grid(True)
    ax.legend(loc="upper left")
    return ax
