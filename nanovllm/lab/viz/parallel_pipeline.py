"""Pictures of lecture 23: which stage has what of a model, and who computes which micro-batch when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from nanovllm.lab.viz.style import FAINT, INK, MAX_WIDTH, MUTED, PALETTE, ink_on, mix, request_color

# When a stage computes which micro-batch: its number, begin and end.
Span = tuple[int, float, float]


def ideal_spans(times: Sequence[float], micro_batches: int) -> list[list[Span]]:
    """What a pipeline would do if sending took no time.

    Args:
        times: how long each stage takes for a micro-batch.

    Returns:
        For each stage, its spans.
    """
    arrive = [0.0] * micro_batches  # at the stage that is looked at
    stages = []
    for time in times:
        spans, free = [], 0.0
        for i in range(micro_batches):
            begin = max(free, arrive[i])
            free = arrive[i] = begin + time
            spans.append((i, begin, free))
        stages.append(spans)
    return stages


def idle_share(stages: Sequence[Sequence[Span]]) -> float:
    """The part of all stages' time, from the first begin to the last end, in which they computed nothing: the bubble."""
    spans = [span for stage in stages for span in stage]
    length = max(end for _, _, end in spans) - min(begin for _, begin, _ in spans)
    return 1 - sum(end - begin for _, begin, end in spans) / (len(stages) * length)


def draw_pipeline(panels: Mapping[str, Sequence[Sequence[Span]]], unit: str = "ms", cycle: int | None = None) -> Figure:
    """Who computed what when: for each panel a row a stage, a bar a micro-batch; what is grey was idle.

    Args:
        panels: title to spans of each stage, in seconds if `unit` is "ms", else in whatever it is.
        unit: of the x axis.
        cycle: micro-batches that are so many apart are the same requests, and have the same colour.
    """
    heights = [0.3 + 0.36 * len(stages) for stages in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(MAX_WIDTH, sum(heights) + 0.45), height_ratios=heights, sharex=True, squeeze=False
    )
    factor = 1000 if unit == "ms" else 1
    width = 0.0
    for ax, (title, stages) in zip(axes[:, 0], panels.items(), strict=True):
        first = min(begin for stage in stages for _, begin, _ in stage)
        last = max(end for stage in stages for _, _, end in stage)
        width = max(width, (last - first) * factor)
        for row, stage in enumerate(stages):
            ax.add_patch(Rectangle((0, row - 0.38), (last - first) * factor, 0.76, facecolor=FAINT, edgecolor="none"))
            for number, begin, end in stage:
                _draw_bar(ax, number, (begin - first) * factor, (end - first) * factor, row, cycle)
        ax.set_title(title, fontsize=11)
        ax.set_yticks(range(len(stages)), [f"stage {row}" for row in range(len(stages))])
        ax.set_ylim(len(stages) - 0.5, -0.5)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
    for ax in axes[:, 0]:
        ax.set_xlim(0, width)
        for bar in ax.texts:  # a number that would not fit into its bar says nothing
            bar.set_visible(bar.get_gid() is None or float(bar.get_gid()) > width / 55)
    axes[-1, 0].set_xlabel(unit)
    return figure


def _draw_bar(ax: Axes, number: int, begin: float, end: float, row: int, cycle: int | None) -> None:
    color = request_color(number if cycle is None else number % cycle)
    ax.add_patch(Rectangle((begin, row - 0.38), end - begin, 0.76, facecolor=color, edgecolor="white", linewidth=0.8))
    ax.text(
        (begin + end) / 2, row + 0.02, str(number), ha="center", va="center", fontsize=9, color=ink_on(color),
        gid=f"{end - begin}",
    )  # fmt: skip


def draw_stages(num_layers: int, ranges: Sequence[range], tied: bool = False) -> Figure:
    """A model from the embedding to the output head, and which stage has what of it.

    Args:
        ranges: the layers of each stage.
        tied: embedding and head are one matrix, so that the last stage has the first one's, too.
    """
    figure, ax = plt.subplots(figsize=(MAX_WIDTH, 0.6 + 0.5 * len(ranges)))
    places = {"embedding": 0.0, "norm": num_layers + 3.4, "head": num_layers + 5.2}
    for row, here in enumerate(ranges):
        color = PALETTE[row % len(PALETTE)]
        first, last = row == 0, row == len(ranges) - 1
        for layer in range(num_layers):
            _box(ax, 3.1 + layer, row, 0.86, color if layer in here else None)
        _box(
            ax, places["embedding"], row, 2.6, color if first else mix(color, "#ffffff", 0.6) if last and tied else None
        )
        _box(ax, places["norm"], row, 1.4, color if last else None)
        _box(ax, places["head"], row, 2.6, color if last else None)
        middle = 3.1 + (here.start + here.stop) / 2
        label = ax.text(
            middle, row, f"{here.start} to {here.stop - 1}", ha="center", va="center", fontsize=10, color=ink_on(color)
        )
        label.set_bbox({"facecolor": color, "edgecolor": "none", "pad": 1.5})  # else the gaps would run through it
        if last and tied:
            ax.text(1.3, row, "a copy", ha="center", va="center", fontsize=9, color=INK)
    labels = {
        "embedding": 1.3,
        "layers": 3.1 + num_layers / 2,
        "norm": places["norm"] + 0.7,
        "head": places["head"] + 1.3,
    }
    for text, x in labels.items():
        ax.text(x, -0.62, text, ha="center", va="bottom", fontsize=10)
    ax.set_yticks(range(len(ranges)), [f"stage {row}" for row in range(len(ranges))])
    ax.set(xlim=(-0.2, places["head"] + 2.8), ylim=(len(ranges) - 0.5, -0.95))
    ax.tick_params(axis="both", length=0)
    ax.set_xticks([])
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    return figure


def _box(ax: Axes, x: float, row: int, width: float, color: str | None) -> None:
    box = Rectangle((x, row - 0.33), width, 0.66, linewidth=1.0)
    box.set(facecolor=color or "none", edgecolor=color or FAINT)
    ax.add_patch(box)


def draw_bubbles(stages: int, measured: Mapping[int, float]) -> Figure:
    """The idle share over the number of micro-batches: (p - 1) / (m + p - 1), and what was measured.

    Args:
        measured: number of micro-batches to idle share.
    """
    figure, ax = plt.subplots(figsize=(MAX_WIDTH * 0.62, 2.9))
    most = max(measured)
    counts = range(1, most + 1)
    ax.plot(
        counts, [(stages - 1) / (m + stages - 1) for m in counts], color=MUTED, linewidth=1.6, label="(p−1) / (m+p−1)"
    )
    ax.plot(list(measured), list(measured.values()), "o", color=PALETTE[1], markersize=7, label="measured")
    ax.set(xlabel="micro-batches m", ylabel="idle share", ylim=(0, None), title=f"p = {stages} stages")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.legend()
    return figure
