"""The drawings of lecture 10: packed tokens, one layer, and the mask of packed sequences."""

from itertools import pairwise, product

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from nanovllm.lab.viz.style import PALETTE, request_color

BLUE, PINK = PALETTE[0], PALETTE[3]
PROMPTS = [("a", 3), ("b", 1), ("c", 2)]


def draw_packing_and_layer() -> Figure:
    """Three prompts, padded and packed; beside them, what one layer does with the rows."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.3), width_ratios=[1, 1.1])
    _draw_packing(left)
    _draw_layer(right)
    for axes in (left, right):
        axes.axis("off")
    return figure


def _draw_packing(axes: Axes) -> None:
    def cell(x: float, y: float, text: str, color: str = "#EEEEEE", ink: str = "white") -> None:
        axes.add_patch(Rectangle((x, y), 0.92, 0.8, facecolor=color, edgecolor="#999999"))
        axes.text(x + 0.46, y + 0.4, text, ha="center", va="center", color=ink)

    packed = 0
    for row, (name, length) in enumerate(PROMPTS):
        for i in range(3):
            if i >= length:
                cell(i, 4.2 - row, "pad", ink="#777777")
                continue
            cell(i, 4.2 - row, f"{name}{i}", request_color(row))
            cell(packed, 0.2, f"{name}{i}", request_color(row))
            axes.text(packed + 0.46, -0.05, str(i), ha="center", va="top", fontsize=10)
            packed += 1
    axes.text(0, 5.35, "padded: 9 rows, 3 of them wasted")
    axes.text(0, 1.35, "packed: 6 rows")
    axes.text(6.2, -0.05, "positions", va="top", fontsize=10)
    for x in (0, 3, 4, 6):
        axes.plot([x - 0.04] * 2, [0.1, -0.8], color="#AAAAAA", linewidth=1)
        axes.text(x - 0.04, -1.2, str(x), ha="center", fontsize=10)
    axes.text(6.6, -1.2, "query_start_loc", fontsize=10)
    axes.set(xlim=(-0.2, 8.8), ylim=(-1.5, 5.8))


def _draw_layer(axes: Axes) -> None:
    """One layer beside the residual stream; the model does not compute the dashed box."""
    boxes = {
        4.75: "RMSNorm",
        3.9: "q, k, v = qkv_proj(x)",
        3.05: "attend: RoPE, then attention",
        2.2: "o_proj",
        1.15: "RMSNorm",
        0.3: "SwiGLU: down(silu(gate) · up)",
    }
    outside = {"facecolor": "white", "edgecolor": PINK, "linestyle": "--", "linewidth": 2}
    for y, text in boxes.items():
        style = outside if "attend" in text else {"facecolor": "#DCEAF5", "edgecolor": BLUE}
        axes.add_patch(FancyBboxPatch((1.6, y), 4.3, 0.5, boxstyle="round,pad=0.06", **style))
        axes.text(3.75, y + 0.25, text, ha="center", va="center", fontsize=10)
    arrow = {"arrowstyle": "->", "color": "#444444"}
    for above, below in pairwise(boxes):
        if above != 2.2:  # the second half starts from the stream again
            axes.annotate("", (3.75, below + 0.58), (3.75, above - 0.07), arrowprops=arrow)
    axes.plot([0.6, 0.6], [5.6, -0.1], color="#444444", linewidth=3)
    axes.text(0.35, 2.75, "residual stream", rotation=90, va="center", ha="right", fontsize=10)
    for y in (5.0, 1.4):
        axes.annotate("", (1.52, y), (0.6, y), arrowprops=arrow)
        axes.text(1.0, y + 0.08, "read", ha="center", fontsize=10)
    for y in (2.45, 0.55):
        axes.annotate("", (0.64, y), (1.54, y), arrowprops=arrow)
        axes.text(1.05, y + 0.08, "add", ha="center", fontsize=10)
    axes.text(
        6.2, 3.3, "computed by the\nattention backend", color="#A0527F", va="center", fontsize=10
    )
    axes.text(1.6, 5.5, "one layer: rows meet in attend() only")
    axes.set(xlim=(-0.3, 8.6), ylim=(-0.3, 5.9))


def draw_mask(visible: list[list[bool]]) -> Figure:
    """Which of the packed rows (queries) sees which (keys)."""
    names = [f"{name}{i}" for name, length in PROMPTS for i in range(length)]
    owners = [row for row, (_, length) in enumerate(PROMPTS) for _ in range(length)]
    figure, axes = plt.subplots(figsize=(4, 3.4))
    for row, column in product(range(6), range(6)):
        color = request_color(owners[row]) if visible[row][column] else "#F3F3F3"
        axes.add_patch(Rectangle((column, row), 0.94, 0.94, facecolor=color))
    axes.set(xlim=(0, 6), ylim=(6, 0), aspect="equal", xlabel="keys", ylabel="queries")
    axes.set_xticks([i + 0.5 for i in range(6)], names)
    axes.set_yticks([i + 0.5 for i in range(6)], names)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure
