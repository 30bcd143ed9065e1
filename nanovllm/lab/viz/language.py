"""The visual language on one page: every colour and every mark, drawn by the code that draws them
everywhere."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nanovllm.lab.viz import style
from nanovllm.lab.viz.data import PoolState
from nanovllm.lab.viz.memory import draw_pool
from nanovllm.lab.viz.style import PALETTE, RequestColors

_ROW = 0.34  # inches


def draw_language() -> Figure:
    """What each colour, each mark and each kind of block means."""
    rows = 0.85 * len(style.MARKS)
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(style.MAX_WIDTH, _ROW * (rows + 7.5)), height_ratios=(1.6, rows, 4.2)
    )
    _draw_colors(top)
    marks = [style.legend_handle(mark, f"{mark}: {style.MEANINGS[mark]}") for mark in style.MARKS]
    middle.legend(
        handles=marks,
        loc="upper left",
        borderaxespad=0,
        borderpad=0,
        handlelength=3,
        labelspacing=0.8,
    )
    middle.set_title("What happens to a token or a request has one mark")
    middle.axis("off")
    _draw_blocks(bottom)
    return figure


def _draw_colors(ax: Axes) -> None:
    for number in range(2 * len(PALETTE)):
        color = style.request_color(number)
        ax.add_patch(Rectangle((number, 0), 0.86, 1, facecolor=color, edgecolor="none"))
        ax.text(
            number + 0.43, 0.5, f"r{number}", ha="center", va="center", color=style.ink_on(color)
        )
    ax.set(
        xlim=(0, 2 * len(PALETTE)),
        ylim=(0, 1),
        title="A request has one colour, by its order of appearance",
    )
    ax.axis("off")


def _draw_blocks(ax: Axes) -> None:
    tables = {"r0": [0, 1, 2], "r1": [0, 1, 4]}
    state = PoolState(6, 4, tables, {"r0": 11, "r1": 9}, cached={5})
    draw_pool(state, columns=6, colors=RequestColors(tables), ax=ax)
    ax.set_title("A block is a square of its tokens, filled from the top left")
    words = [
        "held by both:",
        "striped, ×2",
        "11 tokens:\n3 of 4 cells",
        "free",
        "9 tokens:\n1 of 4 cells",
    ]
    words += ["free, can still\nbe found"]
    for block, text in enumerate(words):
        ax.text(block + 0.43, 1.0, text, ha="center", va="top", fontsize=9)
    ax.set_ylim(1.6, -0.1)
