"""The drawings of lectures 20 to 26. Each function makes one picture; the lectures say what it
shows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nanovllm.distributed.cost_model import Link
from nanovllm.distributed.expert_parallel import ExpertPlacement
from nanovllm.distributed.groups import Grid
from nanovllm.lab.viz.style import (
    BACKGROUND,
    FAINT,
    INK,
    MUTED,
    PALETTE,
    ink_on,
    mix,
    pale,
    request_color,
)
from nanovllm.models.config import ModelConfig

Span = tuple[int, float, float]  # of a stage: a micro-batch, when its computation begins and ends


def box(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    text: Any = "",
    fill: str = BACKGROUND,
) -> None:
    """A filled rectangle with a text in its middle."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=MUTED, linewidth=0.8))
    ax.text(
        x + width / 2,
        y + height / 2,
        str(text),
        ha="center",
        va="center",
        fontsize=9,
        color=INK if fill == "none" else ink_on(fill),
    )


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0}
    )


def curves(
    ax: Axes, lines: Mapping[str, tuple[Sequence, Sequence]], marks: str = "-", **look: Any
) -> Axes:
    """Lines by name, one colour each, with both axes logarithmic. `marks` is matplotlib's format;
    `look` is set on the axes."""
    for row, (name, (xs, ys)) in enumerate(lines.items()):
        ax.plot(xs, ys, marks, color=request_color(row), markersize=6, linewidth=1.6, label=name)
    ax.set(**{"xscale": "log", "yscale": "log"} | look)
    ax.grid(True)
    return ax


# ---------------------------------------------------------------- lecture 20


def draw_orders(num_ranks: int) -> Figure:
    """The way of an order from the engine's process to its ranks, and of the answers back."""
    figure, ax = plt.subplots(figsize=(9, 0.9 + 0.75 * num_ranks))
    middle = num_ranks / 2
    box(ax, 0, middle - 0.9, 2.3, 1.8, "engine core\nschedules", mix(PALETTE[0], BACKGROUND, 0.75))
    box(
        ax,
        2.5,
        middle - 0.9,
        2.1,
        1.8,
        "executor\nwrites each\norder once",
        mix(PALETTE[1], BACKGROUND, 0.75),
    )
    for row, text in enumerate(("order 7", "order 8", "")):
        box(
            ax,
            5.4,
            middle - 0.9 + 0.6 * row,
            1.3,
            0.6,
            text,
            pale(PALETTE[2]) if text else BACKGROUND,
        )
    ax.text(
        6.05,
        middle - 1.1,
        "one ring in\nshared memory",
        ha="center",
        va="bottom",
        fontsize=9,
        color=MUTED,
    )
    arrow(ax, (4.65, middle), (5.35, middle))
    for rank in range(num_ranks):
        y, is_last = rank + 0.5, rank == 0
        box(ax, 8.0, y - 0.35, 2.0, 0.7, f"rank {rank}: worker", mix(PALETTE[3], BACKGROUND, 0.75))
        arrow(ax, (6.75, middle), (7.95, y))
        ax.plot([10.05, 10.8], [y, y], color=PALETTE[5] if is_last else FAINT, linewidth=2.2)
        ax.text(
            10.9,
            y,
            "answer 7, heartbeats" if is_last else "heartbeats",
            va="center",
            fontsize=9,
            color=INK,
        )
    below = num_ranks + 0.25
    ax.plot([10.8, 10.8, 3.55], [0.5, below, below], color=FAINT, linewidth=2.2)
    arrow(ax, (3.55, below), (3.55, middle + 0.95))
    ax.text(7.0, below + 0.1, "one socket per rank", ha="center", va="top", fontsize=9, color=MUTED)
    ax.set(xlim=(-0.1, 13.2), ylim=(below + 0.5, min(-0.1, middle - 1.8)))
    ax.axis("off")
    return figure


def draw_ring(
    frames: Sequence[tuple[str, Sequence[int]]], messages: Sequence[tuple[str, int]], size: int
) -> Figure:
    """A ring step by step: which messages are in it, and how far writer and readers are.

    Args:
        frames: what has just happened, and the counters after it: of the writer, then of each
            reader.
        messages: name and length of each message, in the order of the stream.
        size: bytes of the ring.
    """
    figure, axes = plt.subplots(
        -(-len(frames) // 2), 2, figsize=(9, 1.2 * -(-len(frames) // 2)), squeeze=False
    )
    ends = list(accumulate(length for _, length in messages))
    for ax, (title, (written, *read)) in zip(axes.flat, frames, strict=False):
        ax.add_patch(
            Rectangle((0, 0), size, 1, facecolor=BACKGROUND, edgecolor=MUTED, linewidth=0.8)
        )
        for number, ((name, length), end) in enumerate(zip(messages, ends, strict=True)):
            begin, stop = max(end - length, written - size), min(end, written)
            while begin < stop:  # the ring's end cuts a message in two
                part = min(stop, (begin // size + 1) * size)
                is_free = part <= min(read)
                fill = BACKGROUND if is_free else pale(PALETTE[number % 6])
                width = part - begin
                box(
                    ax,
                    begin % size,
                    0,
                    width,
                    1,
                    name if width > size / 8 and not is_free else "",
                    fill,
                )
                begin = part
        for row, (name, count) in enumerate(
            [("writer", written), *((f"reader {i}", c) for i, c in enumerate(read))]
        ):
            x, y = count % size, -0.15 if row == 0 else 1.35 + 0.6 * (row - 1)
            ax.plot(
                x,
                y,
                "v" if row == 0 else "^",
                color=INK if row == 0 else PALETTE[4 + row % 2],
                markersize=6,
            )
            ax.text(
                x + size / 60,
                y,
                f"{name}: {count}",
                va="bottom" if row == 0 else "center",
                fontsize=9,
                color=INK,
            )
        ax.set(xlim=(-2, size * 1.2), ylim=(1.4 + 0.6 * len(read), -0.75))
        ax.set_title(title, fontsize=10, loc="left")
        ax.axis("off")
    for ax in list(axes.flat)[len(frames) :]:
        ax.axis("off")
    return figure


# ---------------------------------------------------------------- lecture 21


def draw_grid(grid: Grid) -> Figure:
    """The ranks of a grid, once for each kind of group: columns are tensor ranks, rows are stages,
    and a gap separates the data-parallel replicas. Ranks of one colour are a group."""
    titles = {
        "tp": "tp: share each layer",
        "pp": "pp: share the layers",
        "dp": "dp: same weights",
        "ep": "ep: share the experts",
    }
    figure, axes = plt.subplots(1, 4, figsize=(9, 0.75 + 0.52 * grid.pipeline))
    for ax, (kind, title) in zip(axes, titles.items(), strict=True):
        for number, ranks in enumerate(grid.groups(kind)):
            for rank in ranks:
                replica, rest = divmod(rank, grid.pipeline * grid.tensor)
                stage, column = divmod(rest, grid.tensor)
                fill = mix(PALETTE[number % 6], BACKGROUND, 0.55 * (number // 6))
                box(ax, replica * (grid.tensor + 0.45) + column, stage, 0.88, 0.88, rank, fill)
        ax.set(
            xlim=(-0.1, grid.data * (grid.tensor + 0.45)),
            ylim=(grid.pipeline, -0.1),
            aspect="equal",
            title=title,
        )
        ax.title.set_fontsize(10)
        ax.axis("off")
    return figure


def draw_collectives(panels: Mapping[str, tuple[Sequence, Sequence]]) -> Figure:
    """What each rank holds before and after a collective: a column per rank, a letter per piece, a
    colour per origin.

    Args:
        panels: title to two lists with the numbers of each rank. The digit at place r of a number
            is a piece of rank r: 1 is the piece a.
    """
    figure, axes = plt.subplots(
        -(-len(panels) // 3), 3, figsize=(9, 2.1 * -(-len(panels) // 3)), squeeze=False
    )
    for ax in axes.flat:
        ax.axis("off")
    for ax, (title, (before, after)) in zip(axes.flat, panels.items(), strict=False):
        for start, side in ((0.0, before), (len(before) + 0.9, after)):
            for rank, numbers in enumerate(side):
                ax.text(
                    start + rank + 0.44, -0.15, f"r{rank}", ha="center", fontsize=9, color=MUTED
                )
                for row, number in enumerate(numbers):
                    places = [
                        place for place, digit in enumerate(reversed(str(number))) if digit != "0"
                    ]
                    for i, place in enumerate(places):  # a sum has the colours of all its terms
                        ax.add_patch(
                            Rectangle(
                                (start + rank + i * 0.88 / len(places), row),
                                0.88 / len(places),
                                0.88,
                                color=pale(PALETTE[place]),
                            )
                        )
                    piece = "abcdefgh"[int(str(number)[-1 - places[0]]) - 1]
                    box(ax, start + rank, row, 0.88, 0.88, piece, "none")
        arrow(ax, (len(before) - 0.05, 2), (len(before) + 0.8, 2))
        ax.set(xlim=(-0.3, len(before) + len(after) + 1.2), ylim=(4.1, -0.75), aspect="equal")
        ax.set_title(title, fontsize=11, loc="center")
    return figure


def draw_costs(
    algorithms: Mapping[str, Callable[[Link, int, float], float]], links: Sequence[Link], ranks: int
) -> Figure:
    """The predicted time over the size: one panel per link, one line per algorithm."""
    figure, axes = plt.subplots(1, len(links), figsize=(9, 3.2), sharey=True)
    sizes = np.logspace(10, 28, 37, base=2)
    for ax, link in zip(axes, links, strict=True):
        lines = {
            name: (sizes, [1e6 * cost(link, ranks, size) for size in sizes])
            for name, cost in algorithms.items()
        }
        curves(ax, lines, title=link.name, xlabel="bytes").set_xticks(
            [1e3, 1e6, 1e8], ["1 KB", "1 MB", "100 MB"]
        )
    axes[0].set_ylabel("µs")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(algorithms)
    )
    return figure


def draw_measured(
    measured: Mapping[str, tuple[Link, Mapping[int, float]]], predicted: Sequence[int]
) -> Axes:
    """Measured times over sizes (hollow where the fit has not seen them), and the fitted lines."""
    ax = plt.subplots(figsize=(6.4, 3.4))[1]
    sizes = np.logspace(10, 21.3, 60, base=2)
    lines = {
        f"{name}: {1e6 * link.latency:.0f} µs + bytes / ({link.bandwidth / 1e9:.1f} GB/s)": (
            sizes,
            [1e6 * link.message(size) for size in sizes],
        )
        for name, (link, _) in measured.items()
    }
    curves(
        ax, lines, xlabel="bytes", ylabel="µs", title="All-reduce on 2 ranks; hollow: not fitted"
    )
    for row, (_, times) in enumerate(measured.values()):
        for size, seconds in times.items():
            color = request_color(row)
            ax.plot(
                size,
                1e6 * seconds,
                "o",
                color=color,
                markerfacecolor=BACKGROUND if size in predicted else color,
            )
    ax.set_xticks([2**10, 2**14, 2**17, 2**20], ["1 KB", "16 KB", "128 KB", "1 MB"])
    ax.minorticks_off()
    ax.legend(loc="upper left")
    return ax


# ---------------------------------------------------------------- lecture 22


def matrix(
    ax: Axes,
    x: float,
    y: float,
    rows: Sequence[Sequence[float]],
    ranks: Sequence[Sequence[int | None]],
) -> None:
    """Numbers with the upper left corner at (x, y), each in the colour of its rank (None: of
    all)."""
    for i, (row, owners) in enumerate(zip(rows, ranks, strict=True)):
        for j, (value, rank) in enumerate(zip(row, owners, strict=True)):
            box(
                ax,
                x + j,
                y - i - 1,
                1,
                1,
                f"{value:g}",
                BACKGROUND if rank is None else pale(PALETTE[rank]),
            )


def draw_worked_example(ax: Axes) -> None:
    """y = W₂ (W₁ x)² on two ranks: rows of W₁, columns of W₂, one sum."""
    matrix(ax, 5.6, 13.6, [[1, 1], [1, -1]], [[0, 0], [1, 1]])
    matrix(ax, 14.4, 13.6, [[2, 1], [0, 4]], [[0, 1], [0, 1]])
    for rank, y, up, hidden, down, addend in (
        (0, 9.2, [1, 1], 3, (2, 0), (18, 0)),
        (1, 5.2, [1, -1], -1, (1, 4), (1, 4)),
    ):
        ax.text(
            -0.4, y, f"rank {rank}", ha="right", va="center", color=PALETTE[rank], fontweight="bold"
        )
        matrix(ax, 0.4, y + 1, [[1], [2]], [[None]] * 2)
        matrix(ax, 5.6, y + 0.5, [up], [[rank] * 2])
        for x, value in ((9.4, hidden), (12.6, hidden**2)):
            matrix(ax, x, y + 0.5, [[value]], [[rank]])
        for x, (above, below) in ((14.9, down), (18.4, addend)):
            matrix(ax, x, y + 1, [[above], [below]], [[rank]] * 2)
        for x, text in ((8.5, "· x  ="), (11.5, "squared:"), (14.25, "×"), (17.15, "=")):
            ax.text(x, y, text, ha="center", va="center", fontsize=10)
        arrow(ax, (1.6, y), (5.4, y))
        arrow(ax, (19.6, y), (22.0, 7.2))
    matrix(ax, 22.2, 8.2, [[19], [4]], [[None]] * 2)
    notes = {
        "W₁, cut into rows": (10.3, 12.6),
        "W₂, cut into columns": (19.6, 12.6),
        "x, whole": (0.9, 3.4),
    }
    notes |= {
        "partial sums": (18.9, 3.4),
        "all-reduce": (22.7, 8.6),
        "y, whole,\non both ranks": (22.7, 5.0),
    }
    for text, (x, y) in notes.items():
        ax.text(x, y, text, ha="center", va="center", fontsize=10, color=MUTED)
    ax.set(xlim=(-3.2, 24.8), ylim=(2.9, 14.0), aspect="equal")
    ax.axis("off")


def draw_layer_shards(ax: Axes, config: ModelConfig, tp: int) -> None:
    """All matrices of a decoder layer, to scale, in bands of their ranks, and where the ranks
    meet."""
    width, kv = config.intermediate_size / 400, config.num_kv_heads * config.head_dim / 400
    hidden, q = config.hidden_size / 400, config.num_heads * config.head_dim / 400
    halves = [  # what stands on the left, the matrix on the right, and what happens in between
        (
            [("gate", width), ("up", width)],
            "down_proj",
            width,
            f"gating, {config.intermediate_size // tp}\nchannels per rank",
        ),
        (
            [("q", q), ("k", kv), ("v", kv)],
            "o_proj",
            q,
            f"attention,\n{config.num_heads // tp} heads per rank",
        ),
    ]
    bottom = 0.0
    for left, name, across, doing in halves:
        middle, y = bottom + sum(height for _, height in left) / 2, bottom
        for part, height in reversed(left):
            for rank in range(tp):
                box(
                    ax,
                    2,
                    y + height * (tp - 1 - rank) / tp,
                    hidden,
                    height / tp,
                    "",
                    pale(PALETTE[rank]),
                )
                box(
                    ax,
                    6.5 + across * rank / tp,
                    middle - hidden / 2,
                    across / tp,
                    hidden,
                    "",
                    pale(PALETTE[rank]),
                )
            ax.text(1.9, y + height / 2, part, ha="right", va="center")
            y += height
        notes = {
            "x\nwhole": (0.3, middle),
            doing: (4.2 + hidden / 2, middle + 0.4),
            name: (6.5 + across / 2, middle + hidden / 2 + 0.2),
        }
        notes |= {"all-reduce": (11.6, middle + 0.3), "x whole": (13.25, middle)}
        for text, (x, at) in notes.items():
            ax.text(x, at, text, ha="center", va="center", fontsize=10)
        for start, end in ((0.75, 1.4), (2.1 + hidden, 6.4), (6.6 + across, 12.5)):
            arrow(ax, (start, middle), (end, middle))
        bottom = y + 0.9
    for rank in range(tp):
        box(ax, 2 + 1.8 * rank, -0.9, 1.6, 0.5, f"rank {rank}", pale(PALETTE[rank]))
    ax.set(xlim=(-0.2, 14), ylim=(-1, bottom), aspect="equal")
    ax.axis("off")


def draw_kv_heads(ax: Axes, num_heads: int, num_kv_heads: int, sizes: Sequence[int]) -> None:
    """The query heads and KV heads of each rank, for several numbers of ranks. A KV head has one
    colour."""
    for row, tp in enumerate(sizes):
        ax.text(-0.2, row + 0.4, f"{tp} rank{'s' * (tp > 1)}", ha="right", va="center")
        per_rank = num_heads // tp
        for first in range(0, num_heads, per_rank):
            heads = range(first, first + per_rank)
            box(
                ax,
                first + 0.03,
                row,
                per_rank - 0.06,
                0.4,
                "   ".join(f"q{head}" for head in heads),
            )
            kv_heads = sorted({head * num_kv_heads // num_heads for head in heads})
            wide = (per_rank - 0.06) / len(kv_heads)
            for i, kv in enumerate(kv_heads):
                box(
                    ax,
                    first + 0.03 + i * wide,
                    row + 0.4,
                    wide,
                    0.4,
                    f"kv{kv}",
                    pale(PALETTE[2 + kv]),
                )
    ax.set(xlim=(-1, num_heads), ylim=(len(sizes), -0.1))
    ax.axis("off")


# ---------------------------------------------------------------- lecture 23


def ideal_spans(times: Sequence[float], micro_batches: int) -> list[list[Span]]:
    """What each stage of a pipeline would do when, if sending took no time and a micro-batch took
    the stage `times[stage]`."""
    ready = [0.0] * micro_batches
    stages = []
    for time in times:
        ready = list(
            accumulate(
                ready, lambda free, arrived, time=time: max(free, arrived) + time, initial=0.0
            )
        )[1:]
        stages.append([(i, end - time, end) for i, end in enumerate(ready)])
    return stages


def idle_share(stages: Sequence[Sequence[Span]]) -> float:
    """The part of all stages' time, from the first begin to the last end, in which they computed
    nothing: the bubble."""
    spans = [span for stage in stages for span in stage]
    length = max(end for _, _, end in spans) - min(begin for _, begin, _ in spans)
    return 1 - sum(end - begin for _, begin, end in spans) / (len(stages) * length)


def draw_pipeline(panels: Mapping[str, Sequence[Sequence[Span]]], unit: str = "ms") -> Figure:
    """What each stage computed when: a panel per title, a row per stage, a bar per micro-batch.
    Grey is idle."""
    heights = [0.3 + 0.36 * len(stages) for stages in panels.values()]
    size = (9, sum(heights) + 0.45)
    figure, axes = plt.subplots(
        len(panels), 1, figsize=size, height_ratios=heights, sharex=True, squeeze=False
    )
    factor = 1000 if unit == "ms" else 1
    width = factor * max(
        max(s[-1][2] for s in stages) - min(s[0][1] for s in stages) for stages in panels.values()
    )
    for ax, (title, stages) in zip(axes[:, 0], panels.items(), strict=True):
        first, last = min(stage[0][1] for stage in stages), max(stage[-1][2] for stage in stages)
        for row, stage in enumerate(stages):
            ax.barh(row, (last - first) * factor, height=0.76, color=FAINT)
            for number, begin, end in stage:
                wide = (end - begin) * factor
                text = number if wide > width / 55 else ""
                box(
                    ax,
                    (begin - first) * factor,
                    row - 0.38,
                    wide,
                    0.76,
                    text,
                    request_color(number),
                )
        ax.set_yticks(range(len(stages)), [f"stage {row}" for row in range(len(stages))])
        ax.set(title=title, xlim=(0, width), ylim=(len(stages) - 0.5, -0.5))
    axes[-1, 0].set_xlabel(unit)
    return figure


# ---------------------------------------------------------------- lectures 24 and 25


def draw_shuffle(
    routings: Sequence[Sequence[Sequence[int]]], placement: ExpertPlacement, title: str
) -> Axes:
    """One dispatch: the tokens of each rank and their experts, the rows that each rank receives,
    and its experts.

    Args:
        routings: for each rank, the experts of each of its tokens.
        placement: without replicas.
    """
    ax = plt.subplots(figsize=(9, 4.572))[1]
    height, sent, received = 1 + max(map(len, routings)) * 2, 0.0, 0.0
    for target, experts in enumerate(placement.slots):
        top = target * height
        ax.text(-0.3, top + height / 2, f"rank {target}", ha="right", va="center")
        for slot, expert in enumerate(experts):
            box(ax, 8.2, top + 1 + 2 * slot, 1.3, 0.8, f"expert {expert}")
        received = top
        for source, tokens in enumerate(routings):
            for token, chosen in enumerate(tokens):
                name, sent = f"{'abcdefgh'[source]}{token}", source * height + 1 + 1.5 * token
                box(
                    ax,
                    0,
                    sent,
                    1.7,
                    0.8,
                    f"{name} → {', '.join(map(str, chosen))}",
                    pale(PALETTE[source]),
                )
                slots = [slot for slot, expert in enumerate(experts) if expert in chosen]
                if slots:
                    ax.plot(
                        [1.7, 4.6],
                        [sent + 0.4, received + 0.4],
                        color=PALETTE[source],
                        linewidth=1 + (source != target),
                    )
                    box(ax, 4.6, received, 0.8, 0.8, name, pale(PALETTE[source]))
                    for slot in slots:
                        ax.plot(
                            [5.4, 8.2],
                            [received + 0.4, top + 1.4 + 2 * slot],
                            color=MUTED,
                            linewidth=0.9,
                        )
                    received += 1.1
    for x, text in (
        (0.85, "its tokens and their experts"),
        (5.0, "rows received"),
        (8.85, "its experts"),
    ):
        ax.text(x, -0.5, text, ha="center", fontsize=10, color=MUTED)
    ax.set(xlim=(-1.5, 9.7), ylim=(len(routings) * height - 0.4, -1.2), title=title)
    ax.axis("off")
    return ax


def draw_expert_load(load: Sequence[Sequence[int]], title: str) -> Axes:
    """How many tokens each expert (column) of each layer (row) got, as multiples of the layer's
    mean."""
    share = np.array([[value * len(row) / max(1, sum(row)) for value in row] for row in load])
    ax = plt.subplots(figsize=(9, 0.42 * len(load) + 1.1))[1]
    image = ax.imshow(share, cmap="Blues", vmin=0, aspect="auto")
    for (layer, expert), value in np.ndenumerate(share):
        color = BACKGROUND if value > 0.6 * share.max() else INK
        ax.text(expert, layer, f"{value:.1f}", ha="center", va="center", fontsize=8, color=color)
    ax.set(
        xlabel="expert",
        ylabel="layer",
        title=title,
        xticks=range(share.shape[1]),
        yticks=range(len(share)),
    )
    ax.figure.colorbar(image, ax=ax, label="load / mean", pad=0.01)
    return ax


def draw_balance(loads: Sequence[int], placements: Mapping[str, ExpertPlacement]) -> Figure:
    """The tokens of each rank, a piece per expert, for each placement; experts with replicas are
    orange."""
    figure, row = plt.subplots(1, len(placements), figsize=(9, 3.4), sharey=True)
    for ax, (name, placement) in zip(row, placements.items(), strict=True):
        totals, mean = placement.rank_loads(loads), sum(loads) / len(placement.slots)
        for rank, slots in enumerate(placement.slots):
            parts = sorted(
                ((loads[e] / len(placement.replicas[e]), e) for e in slots), reverse=True
            )
            for bottom, (height, expert) in zip(
                accumulate((h for h, _ in parts), initial=0.0), parts, strict=False
            ):
                fill = PALETTE[1] if len(placement.replicas[expert]) > 1 else PALETTE[0]
                box(ax, rank - 0.4, bottom, 0.8, height, "", fill)
                if height > 0.25 * mean:
                    middle = bottom + height / 2
                    if (
                        abs(middle - mean) < 0.15 * mean < height / 4
                    ):  # the dashed line would go through the number
                        middle -= height / 4
                    ax.text(
                        rank,
                        middle,
                        str(expert),
                        ha="center",
                        va="center",
                        fontsize=9,
                        color=ink_on(fill),
                    )
        ax.axhline(mean, color=INK, linestyle="--", linewidth=1)
        ax.set_xticks(range(len(totals)))
        ax.set(
            title=f"{name}: max / mean {max(totals) / mean:.2f}",
            xlabel="rank",
            xlim=(-0.6, len(totals) - 0.4),
        )
    row[0].set(
        ylabel="tokens", ylim=(0, 1.03 * max(max(p.rank_loads(loads)) for p in placements.values()))
    )
    figure.supxlabel(
        "blue: an expert (its number) · orange: a replica of one that has several · dashed: mean",
        fontsize=10,
    )
    return figure


def draw_shares(grid: Grid, num_heads: int, num_experts: int) -> Figure:
    """The requests, attention heads and experts of each rank (a column) of a grid with one
    stage."""
    figure, ax = plt.subplots(figsize=(9, 3.1))
    heads, experts = num_heads // grid.tensor, num_experts // grid.world_size
    for rank in range(grid.world_size):
        data, tensor = divmod(rank, grid.tensor)
        ax.text(
            rank + 0.5, 3.1, f"rank {rank}\ndata {data}, tensor {tensor}", ha="center", fontsize=10
        )
        if tensor == 0:
            box(
                ax,
                rank,
                2,
                grid.tensor,
                0.72,
                f"the requests of data rank {data}",
                pale(PALETTE[data]),
            )
        box(
            ax,
            rank,
            1,
            1,
            0.72,
            f"heads {tensor * heads}–{(tensor + 1) * heads - 1}",
            pale(PALETTE[2 + tensor]),
        )
        box(
            ax,
            rank,
            0,
            1,
            0.72,
            f"experts {rank * experts}–{(rank + 1) * experts - 1}",
            mix(PALETTE[4], BACKGROUND, rank / 5),
        )
    names = [
        "all ranks\ndivide the experts",
        "tensor ranks\ndivide the heads",
        "data ranks\ndivide the requests",
    ]
    ax.set_yticks([0.36, 1.36, 2.36], names)
    ax.set(xlim=(0, grid.world_size), ylim=(-0.1, 3.65), xticks=[])
    ax.spines[:].set_visible(False)
    return figure


def split_waves(kinds: Sequence[Sequence[int]]) -> list[range]:
    """The steps of each wave: it ends with the first step in which no engine computes a request.

    Args:
        kinds: for each engine, how many requests it computes in each step.
    """
    ends = [step + 1 for step, counts in enumerate(zip(*kinds, strict=True)) if not any(counts)]
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def draw_waves(kinds: Sequence[Sequence[int]]) -> Figure:
    """A row per engine, a cell per step with the number of requests that it computes; grey is a
    dummy batch. Between the waves all engines pause (not to scale)."""
    figure, ax = plt.subplots(figsize=(9, 0.75 + 0.62 * len(kinds)))
    for number, steps in enumerate(split_waves(kinds)):
        ax.text(steps.start + 1.6 * number, -0.2, f"wave {number}", fontsize=10, color=MUTED)
        for row, counts in enumerate(kinds):
            for step in steps:
                box(
                    ax,
                    step + 1.6 * number,
                    row,
                    1,
                    0.8,
                    counts[step] or "·",
                    PALETTE[row] if counts[step] else FAINT,
                )
    ax.set_yticks(
        [row + 0.4 for row in range(len(kinds))], [f"data rank {row}" for row in range(len(kinds))]
    )
    ax.set(
        ylim=(len(kinds), -0.75),
        xticks=[],
        xlabel="steps →   (a number: requests computed · grey: a dummy batch)",
    )
    ax.spines[:].set_visible(False)
    ax.autoscale(axis="x", tight=True)
    return figure


def bars(ax: Axes, rows: Iterable[tuple[float, float, str, str]], height: float = 0.7) -> None:
    """Horizontal bars with a text behind each: (y, length, text, colour)."""
    for y, length, text, color in rows:
        ax.barh(y, length, height=height, color=color)
        ax.text(length, y, f" {text}", va="center", fontsize=9)


def draw_routers(
    measured: Mapping[str, Sequence[int]], hits: Mapping[str, float], needed: int, title: str
) -> Figure:
    """The prompt tokens that each engine computes, and the share that came from a cache, for each
    way of routing; dashed: what an engine has to compute in any case, if the load is divided
    evenly."""
    figure, ax = plt.subplots(figsize=(9, 1.2 + 0.75 * len(measured)))
    for i, tokens in enumerate(measured.values()):
        bars(
            ax,
            [
                (i + 0.36 * r - 0.18, n, f"data rank {r}: {n}", PALETTE[r])
                for r, n in enumerate(tokens)
            ],
            0.32,
        )
    ax.axvline(needed, color=INK, linewidth=1, linestyle="--")
    ax.text(needed, -0.52, " every block once, divided evenly", fontsize=9)
    ax.set_yticks(
        range(len(measured)), [f"{name}\n{hits[name]:.0%} from the cache" for name in measured]
    )
    ax.set(
        xlabel="prompt tokens computed by each engine", title=title, ylim=(len(hits) - 0.4, -0.85)
    )
    ax.margins(x=0.18)
    return figure


# ---------------------------------------------------------------- lecture 26

KINDS = {
    "every head its own": PALETTE[5],
    "heads share (GQA)": PALETTE[0],
    "latent (MLA)": PALETTE[2],
}


def draw_bytes_per_token(models: Mapping[str, tuple[str, int]]) -> Figure:
    """The cache of one token, over all layers: model to (one of `KINDS`, bytes)."""
    figure, ax = plt.subplots(figsize=(9, 0.42 * len(models) + 1.1))
    bars(
        ax,
        [
            (y, size / 1024, f"{size / 1024:,.0f}", KINDS[kind])
            for y, (kind, size) in enumerate(models.values())
        ],
    )
    ax.set_yticks(range(len(models)), list(models))
    ax.set(
        ylim=(len(models) - 0.4, -0.6),
        xlabel="KiB of cache per token, all layers, 16 bits per number",
    )
    ax.legend(
        [Rectangle((0, 0), 1, 1, color=color) for color in KINDS.values()],
        list(KINDS),
        loc="lower right",
    )
    return figure


def draw_two_ways() -> Figure:
    """Naive and absorbed attention of one query of one head: the same numbers in another order."""
    latents, query, matrix, made = (pale(PALETTE[i]) for i in (2, 0, 3, 1))
    cache = "cache\n\nlatents\n$c_1 … c_n$"
    naive = [
        (2, 40, 14, 42, cache, latents),
        (31, 40, 12, 16, "$W^{K}$", matrix),
        (31, 66, 12, 16, "$W^{V}$", matrix),
        (56, 32, 16, 26, "keys\n$W^{K} c_i$", made),
        (56, 64, 16, 26, "values\n$W^{V} c_i$", made),
        (56, 8, 16, 12, "query $q$", query),
        (85, 69, 14, 16, "out", query),
    ]
    flows = [
        ((16, 55), (31, 48)),
        ((16, 67), (31, 74)),
        ((43, 48), (56, 47)),
        ((43, 74), (56, 76)),
        ((64, 20), (64, 32)),
        ((72, 77), (85, 77)),
        ((72, 45), (90, 69)),
    ]
    absorbed = [
        (42, 40, 16, 42, cache, latents),
        (1, 8, 16, 12, "query $q$", query),
        (26, 6, 13, 16, "$(W^{K})^{T}$", matrix),
        (61, 8, 27, 12, "$q' = (W^{K})^{T} q$", query),
        (65, 54, 13, 16, "$\\sum p_i c_i$", query),
        (84, 54, 12, 16, "$W^{V}$", matrix),
        (84, 84, 12, 12, "out", query),
    ]
    turns = [
        ((17, 14), (26, 14)),
        ((39, 14), (61, 14)),
        ((72, 20), (54, 40)),
        ((58, 62), (65, 62)),
        ((78, 62), (84, 62)),
        ((90, 70), (90, 84)),
    ]
    titles = (
        "Naive: make keys and values, then attend",
        "Absorbed: attend to the latents themselves",
    )
    notes = (
        "a key and a value are made for every cached\ntoken, for every head, in every step",
        "the matrices meet one query,\nand nothing is made per cached token",
    )
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.5))
    labels = [(66, 27, "scores"), (83, 55, "weights")], [(66, 31, "scores")]
    for ax, boxes, arrows, title, note, words in zip(
        axes, (naive, absorbed), (flows, turns), titles, notes, labels, strict=True
    ):
        for each in boxes:
            box(ax, *each)
        for start, end in arrows:
            arrow(ax, start, end)
        for x, y, word in words:
            ax.text(x, y, word, fontsize=9)
        ax.text(40, 100, note, ha="center", va="center", fontsize=10, color=MUTED)
        ax.set(xlim=(0, 100), ylim=(106, 0), title=title)
        ax.axis("off")
    return figure


def draw_crossover(
    flops: Mapping[str, Callable[[int, int], int]],
    seq_len: int,
    measured: Mapping[str, Mapping[int, float]],
    unit: float,
) -> Figure:
    """Operations of naive and absorbed attention over the number of new tokens, and what was
    measured.

    Args:
        flops: "naive" and "absorbed": number of new tokens and of all tokens to operations.
        measured: "naive" and "absorbed": number of new tokens to seconds.
        unit: operations that this machine does per second, which puts both on one axis.
    """
    figure, ax = plt.subplots(figsize=(9, 3.8))
    counts = range(1, seq_len + 1)
    curves(
        ax,
        {
            f"{name}, counted": (counts, [f(n, seq_len) / 1e9 for n in counts])
            for name, f in flops.items()
        },
    )
    points = {
        f"{name}, measured": (list(m), [s * unit / 1e9 for s in m.values()])
        for name, m in measured.items()
    }
    curves(
        ax,
        points,
        "o",
        xlabel=f"new tokens, of {seq_len:,} in the sequence",
        ylabel="billion operations",
    )
    even = next(n for n in counts if flops["naive"](n, seq_len) < flops["absorbed"](n, seq_len))
    ax.axvline(even, color=MUTED, linestyle=":", label=f"even at about {even}")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return figure
