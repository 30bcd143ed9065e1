"""Pictures of data parallelism (lecture 25): who holds what, and who steps when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nanovllm.distributed.groups import Grid
from nanovllm.lab.viz.style import FAINT, INK, MUTED, PALETTE, ink_on, mix, pale


def _box(axes: Axes, x: float, y: float, width: float, text: str, color: str, height: float = 0.72) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="white", linewidth=2))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=10, color=ink_on(color))


def draw_shares(grid: Grid, num_heads: int, num_experts: int) -> Figure:
    """Which rank of a grid with one stage holds which requests, attention heads and experts: a column a rank. What stands
    in two boxes of one colour is there twice."""
    ranks, heads = grid.world_size, num_heads // grid.tensor
    experts = num_experts // ranks
    figure, axes = plt.subplots(figsize=(9, 3.1))
    for rank in range(ranks):
        data, tensor = divmod(rank, grid.tensor)
        axes.text(rank + 0.5, 3.42, f"rank {rank}", ha="center", va="center", fontweight="bold")
        axes.text(rank + 0.5, 3.12, f"data {data}, tensor {tensor}", ha="center", va="center", fontsize=9, color=MUTED)
        _box(axes, rank, 1, 1, f"heads {tensor * heads}–{(tensor + 1) * heads - 1}", pale(PALETTE[2 + tensor]))
        shade = mix(PALETTE[4], PALETTE[5], rank / max(1, ranks - 1))
        _box(axes, rank, 0, 1, f"experts {rank * experts}–{(rank + 1) * experts - 1}", pale(shade))
    for data in range(grid.data):
        text = f"the requests of data rank {data}"
        _box(axes, data * grid.tensor, 2, grid.tensor, text, pale(PALETTE[data]))
    names = ["all ranks\nshare the experts", "tensor ranks\nshare the heads", "data ranks\nshare the requests"]
    axes.set_yticks([y + 0.36 for y in range(3)], names)
    axes.tick_params(length=0)
    axes.set(xlim=(0, ranks), ylim=(-0.1, 3.65), xticks=[])
    axes.spines[:].set_visible(False)
    return figure


def split_waves(kinds: Sequence[Sequence[int]]) -> list[range]:
    """The steps of each wave: it ends with the first step in which nobody computes a request.

    Args:
        kinds: for each engine, how many requests it computes in each step.
    """
    waves, start = [], 0
    for step, counts in enumerate(zip(*kinds, strict=True)):
        if not any(counts):
            waves.append(range(start, step + 1))
            start = step + 1
    return waves


def draw_waves(kinds: Sequence[Sequence[int]], pause: float = 1.6) -> Figure:
    """Engines x steps: a cell is a step, with the number of requests that the engine computes in it; pale ones are dummies.
    Between the waves everybody pauses (not to scale).

    Args:
        kinds: see `split_waves`.
    """
    waves = split_waves(kinds)
    rows, width = len(kinds), sum(map(len, waves)) + pause * len(waves)
    figure, axes = plt.subplots(figsize=(9, 0.75 + 0.62 * rows))
    x = 0.0
    for number, steps in enumerate(waves):
        axes.text(x, -0.22, f"wave {number}", ha="left", va="bottom", fontsize=10, color=MUTED)
        for row, counts in enumerate(kinds):
            for i, step in enumerate(steps):
                count = counts[step]
                color = PALETTE[row] if count else FAINT
                axes.add_patch(Rectangle((x + i, row), 1, 0.8, facecolor=color, edgecolor="white", linewidth=1))
                text, ink = (str(count), ink_on(color)) if count else ("·", MUTED)
                axes.text(x + i + 0.5, row + 0.4, text, ha="center", va="center", fontsize=8, color=ink)
        x += len(steps) + pause
        if number + 1 < len(waves):
            for row in range(rows):
                axes.plot([x - pause + 0.25, x - 0.25], [row + 0.4] * 2, color=MUTED, linewidth=1, linestyle=":")
    axes.set_yticks([row + 0.4 for row in range(rows)], [f"data rank {row}" for row in range(rows)])
    axes.tick_params(length=0)
    axes.set(xlim=(-0.1, width - pause + 0.1), ylim=(rows, -0.75), xticks=[])
    axes.set_xlabel("steps →   (a number: requests computed · grey: a dummy · dotted: all pause)", color=INK)
    axes.spines[:].set_visible(False)
    return figure


def draw_routers(measured: Mapping[str, Sequence[int]], hits: Mapping[str, float], needed: int, title: str) -> Figure:
    """What each engine computes of the prompts, a bar an engine, for each way of routing.

    Args:
        measured: router to the prompt tokens that each engine has computed.
        hits: router to the share of prompt tokens that came from a cache.
        needed: tokens that an engine has to compute in any case, if the load is divided evenly.
    """
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.75 * len(measured)))
    for i, tokens in enumerate(measured.values()):
        for rank, count in enumerate(tokens):
            y = i + 0.36 * (rank - (len(tokens) - 1) / 2)
            axes.barh(y, count, height=0.32, color=PALETTE[rank])
            axes.text(count, y, f" data rank {rank}: {count}", va="center", fontsize=9)
    axes.axvline(needed, color=INK, linewidth=1, linestyle="--")
    axes.text(needed, -0.52, " every block once, divided evenly", va="bottom", fontsize=9, color=INK)
    axes.set_yticks(range(len(measured)), [f"{name}\n{hits[name]:.0%} from the cache" for name in measured])
    most = max(max(tokens) for tokens in measured.values())
    axes.set(
        xlabel="prompt tokens computed by each engine",
        title=title,
        xlim=(0, 1.18 * most),
        ylim=(len(hits) - 0.4, -0.85),
    )
    return figure
