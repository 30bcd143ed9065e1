"""Pictures of tensor parallelism (lecture 22): which rank has what of a layer, in the colour of the rank."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Circle, Rectangle

from nanovllm.lab.viz.style import BACKGROUND, INK, MUTED, PALETTE, mix
from nanovllm.models.config import ModelConfig

_ARROW = {"arrowstyle": "->", "color": MUTED, "linewidth": 1.2}


def rank_tint(rank: int) -> str:
    """A pale fill in the colour of a rank, on which text can be read."""
    return mix(PALETTE[rank], BACKGROUND, 0.45)


def _cells(axes: Axes, x: float, y: float, rows: Sequence[Sequence[float]], ranks: Sequence[Sequence[int]]) -> None:
    """A matrix of numbers with its upper left corner at (x, y), each cell in the colour of its rank, -1 for all."""
    for i, (row, owners) in enumerate(zip(rows, ranks, strict=True)):
        for j, (value, owner) in enumerate(zip(row, owners, strict=True)):
            color = "white" if owner < 0 else rank_tint(owner)
            axes.add_patch(Rectangle((x + j, y - i - 1), 1, 1, facecolor=color, edgecolor=MUTED))
            axes.text(x + j + 0.5, y - i - 0.5, f"{value:g}", ha="center", va="center")


def draw_worked_example(axes: Axes) -> None:
    """y = W₂ (W₁ x)² on two ranks, with the numbers of the lecture: rows of W₁, columns of W₂, one sum."""
    lanes = [(9.2, [1, 1], 3, 9, [2, 0], [18, 0]), (5.2, [1, -1], -1, 1, [1, 4], [1, 4])]
    _cells(axes, 5.6, 13.6, [[1, 1], [1, -1]], [[0, 0], [1, 1]])
    _cells(axes, 14.4, 13.6, [[2, 1], [0, 4]], [[0, 1], [0, 1]])
    axes.text(5.3, 12.6, "W₁ =", ha="right", va="center")
    axes.text(14.1, 12.6, "W₂ =", ha="right", va="center")
    axes.text(8.0, 12.6, "cut into rows", va="center", fontsize=10, color=MUTED)
    axes.text(16.8, 12.6, "cut into columns", va="center", fontsize=10, color=MUTED)
    for rank, (y, up, hidden, squared, down, addend) in enumerate(lanes):
        own = [[rank]]
        axes.text(-0.4, y - 0.1, f"rank {rank}", ha="right", va="center", color=PALETTE[rank], fontweight="bold")
        _cells(axes, 0.4, y + 1, [[1], [2]], [[-1], [-1]])
        _cells(axes, 5.6, y + 0.5, [up], [[rank, rank]])
        _cells(axes, 9.4, y + 0.5, [[hidden]], own)
        _cells(axes, 12.6, y + 0.5, [[squared]], own)
        _cells(axes, 14.9, y + 1, [[down[0]], [down[1]]], own * 2)
        _cells(axes, 18.4, y + 1, [[addend[0]], [addend[1]]], own * 2)
        axes.annotate("", (5.4, y), (1.6, y), arrowprops=_ARROW)
        axes.annotate("", (12.5, y), (10.5, y), arrowprops=_ARROW)
        for x, text in [(8.5, "· x  ="), (14.25, "×"), (17.15, "=")]:
            axes.text(x, y, text, ha="center", va="center")
        axes.text(11.5, y + 0.25, "squared", ha="center", fontsize=9, color=MUTED)
        axes.annotate("", (22.0, 7.4 if rank == 0 else 7.0), (19.6, y), arrowprops=_ARROW)
    axes.text(21.4, 8.5, "all-reduce", ha="left", fontsize=10, color=INK)
    _cells(axes, 22.2, 8.2, [[19], [4]], [[-1], [-1]])
    axes.text(0.9, 3.4, "x, whole", ha="center", fontsize=10, color=MUTED)
    axes.text(18.9, 3.4, "addends", ha="center", fontsize=10, color=MUTED)
    axes.text(22.7, 5.5, "y, whole,\non both ranks", ha="center", fontsize=10, color=MUTED, va="center")
    axes.set(xlim=(-3.2, 24.8), ylim=(2.9, 14.0), aspect="equal")
    axes.axis("off")


def _bands(axes: Axes, x: float, y: float, width: float, height: float, tp: int, across: bool = False) -> None:
    """A matrix with its lower left corner at (x, y), cut into bands of rows, or of columns (`across`)."""
    for rank in range(tp):
        if across:
            corner, w, h = (x + rank * width / tp, y), width / tp, height
        else:
            corner, w, h = (x, y + height - (rank + 1) * height / tp), width, height / tp
        axes.add_patch(Rectangle(corner, w, h, facecolor=rank_tint(rank), edgecolor="white", linewidth=0.8))
    axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=MUTED))


def draw_layer_shards(axes: Axes, config: ModelConfig, tp: int) -> None:
    """All matrices of a decoder layer, to scale, with the part of each rank, and where the ranks meet."""
    scale = 1.3 / config.hidden_size
    hidden, width = config.hidden_size * scale, config.intermediate_size * scale
    q, kv = (heads * config.head_dim * scale for heads in (config.num_heads, config.num_kv_heads))
    middle = 2 * width + 0.9 + (q + 2 * kv) / 2  # of the upper row; the lower one is around `width`

    stacked = [
        ("qkv_proj", middle, [("v", kv), ("k", kv), ("q", q)]),
        ("gate_up_proj", width, [("up", width), ("gate", width)]),
    ]
    x = 2.2
    for title, y, parts in stacked:
        bottom = y - sum(height for _, height in parts) / 2
        for name, height in parts:
            _bands(axes, x, bottom, hidden, height, tp)
            axes.text(x - 0.12, bottom + height / 2, name, ha="right", va="center", fontsize=10)
            bottom += height
        axes.text(x + hidden / 2, bottom + 0.12, title, ha="center", fontsize=10)
    _bands(axes, 6.6, middle - hidden / 2, q, hidden, tp, across=True)
    _bands(axes, 6.6, width - hidden / 2, width, hidden, tp, across=True)

    heads = config.num_heads // tp
    notes = [
        (middle, q, "o_proj", f"attention,\n{heads} heads a rank"),
        (width, width, "down_proj", f"gating, {config.intermediate_size // tp}\nchannels a rank"),
    ]
    for y, row_width, name, doing in notes:
        axes.text(6.6 + row_width / 2, y + hidden / 2 + 0.12, name, ha="center", fontsize=10)
        axes.annotate("", (1.35, y), (0.7, y), arrowprops=_ARROW)
        axes.text(0.55, y, "x\nwhole", ha="right", va="center", fontsize=10)
        axes.annotate("", (6.5, y), (2.3 + hidden, y), arrowprops=_ARROW)
        axes.text((8.8 + hidden) / 2, y + 0.12, doing, ha="center", fontsize=10)
        end = 6.6 + row_width
        axes.annotate("", (11.1, y), (end + 0.1, y), arrowprops=_ARROW)
        axes.add_patch(Circle((11.4, y), 0.3, facecolor="white", edgecolor=INK, linewidth=1.5))
        axes.text(11.4, y, "Σ", ha="center", va="center")
        axes.text(11.4, y + 0.42, "all-reduce", ha="center", fontsize=10)
        axes.annotate("", (12.5, y), (11.7, y), arrowprops=_ARROW)
        axes.text(12.6, y, "x\nwhole", va="center", fontsize=10)
    for rank in range(tp):
        axes.add_patch(Rectangle((0.2 + 1.7 * rank, -0.95), 0.35, 0.35, facecolor=rank_tint(rank)))
        axes.text(0.65 + 1.7 * rank, -0.78, f"rank {rank}", va="center", fontsize=10)
    axes.set(xlim=(-0.3, 13.4), ylim=(-1.1, middle + (q + 2 * kv) / 2 + 0.5), aspect="equal")
    axes.axis("off")


def draw_kv_heads(axes: Axes, num_heads: int, num_kv_heads: int, sizes: Sequence[int]) -> None:
    """Which query heads and KV heads each rank has, for several numbers of ranks; a KV head has one colour."""
    group = num_heads // num_kv_heads
    for row, tp in enumerate(sizes):
        y = -2.6 * row
        per_rank = num_heads // tp
        axes.text(-0.5, y, f"{tp} rank{'s' * (tp > 1)}", ha="right", va="center")
        for rank in range(tp):
            left = rank * per_rank * 1.5
            span = per_rank * 1.5 - 0.3
            axes.add_patch(Rectangle((left - 0.05, y - 1.05), span, 2.1, facecolor="#F4F4F4", edgecolor=MUTED))
            heads = range(rank * per_rank, (rank + 1) * per_rank)
            for i, head in enumerate(heads):
                x = left + (i + 0.5) * span / per_rank - 0.05
                axes.text(x, y + 0.5, f"q{head}", ha="center", va="center", color=INK)
            kv_heads = sorted({head // group for head in heads})
            for i, kv in enumerate(kv_heads):
                x = left + (i + 0.5) * span / len(kv_heads) - 0.05
                axes.add_patch(Rectangle((x - 0.52, y - 0.9), 1.04, 0.8, facecolor=rank_tint(2 + kv)))
                axes.text(x, y - 0.5, f"kv{kv}", ha="center", va="center")
    axes.set(xlim=(-2.6, num_heads * 1.5), ylim=(-2.6 * (len(sizes) - 1) - 1.2, 1.2), aspect="equal")
    axes.axis("off")
