"""Pictures of KV memory: the pool, block tables, and shares of memory."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from nanovllm.lab.viz import style
from nanovllm.lab.viz.data import PoolState, pool_state
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, RequestColors

Box = tuple[float, float, float, float]  # left, top, width, height
_SIZE = 0.86  # of a block, in a grid of pitch 1
_MOST_CELLS = 2048  # beyond so many tokens, blocks are drawn without their cells
_MOST_IDS = 64  # beyond so many blocks, ids would be too small to read
# of a block in a list of pitch 1
_STRIP_WIDTH = 4.0
_STRIP_HEIGHT = 0.78


def draw_pool(
    pool: Any,
    tables: Mapping[str, Sequence[int]] | None = None,
    num_tokens: Mapping[str, int] | None = None,
    block_size: int | None = None,
    *,
    columns: int | None = None,
    colors: RequestColors | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw the pool as a grid of blocks in the colours of their holders, with fill levels,
    reference counts, and ids if there are few blocks.

    Args:
        pool: a `BlockPool`, a `KVCacheManager`, a `PoolState` or the number of blocks.
        tables: request id to block ids; without it, held blocks are grey.
        num_tokens: request id to tokens written; without it, held blocks are full.
        block_size: tokens per block (16 by default).
        columns: blocks in a row of the grid.
        colors: to keep colours across figures.
        ax: where to draw. Without it, a figure is made, with a legend.
    """
    state = pool_state(pool, tables, num_tokens, block_size)
    columns = columns or min(
        state.num_blocks, max(8, min(32, math.ceil(math.sqrt(state.num_blocks * 2.5))))
    )
    rows = math.ceil(state.num_blocks / columns)
    side = min(0.56, (style.MAX_WIDTH - 0.4) / columns)
    colors = colors or RequestColors([*state.appeared, *state.tables])
    with_legend = ax is None
    ax = ax or style.new_axes(rows * side + (0.95 if title else 0.7))
    for block_id in range(state.num_blocks):
        y, x = divmod(block_id, columns)
        _draw_physical(ax, (x, y, _SIZE, _SIZE), block_id, state, colors)
        if state.num_blocks <= _MOST_IDS and side >= 0.4:
            _draw_id(ax, x + _SIZE / 2, y + _SIZE / 2, block_id, state)
    ax.set(xlim=(-0.1, columns), ylim=(rows, -0.1), aspect="equal", anchor="W", title=title)
    ax.axis("off")
    if with_legend:
        _pool_legend(ax, state, colors)
    return ax


def _pool_legend(ax: Axes, state: PoolState, colors: RequestColors) -> None:
    """Explain the marks that are in the picture, and its requests if there are at most ten."""
    free = {block_id for block_id, count in enumerate(state.ref_counts) if not count}
    kinds = [
        kind
        for kind, blocks in (("free", free - state.cached), ("cached", free & state.cached))
        if blocks
    ]
    holders = [Patch(label=r, facecolor=colors[r], edgecolor=colors[r]) for r in state.tables]
    style.legend(ax, kinds, holders if len(holders) <= 10 else (), cached="free, still cached")


def _draw_physical(
    ax: Axes, box: Box, block_id: int, state: PoolState, colors: RequestColors
) -> None:
    """A block of the pool: empty, cached, or filled in its holders' colours, with its reference
    count if shared."""
    (x, y, width, height), count = box, state.ref_counts[block_id]
    owners = [colors[request_id] for request_id in state.holders(block_id)] or [MUTED]
    if count:
        across = cell_columns(state.block_size) if width == height else state.block_size
        cells = state.num_blocks * state.block_size <= _MOST_CELLS
        draw_block(
            ax,
            box,
            filled=state.filled(block_id),
            size=state.block_size,
            across=across,
            owners=owners,
            with_cells=cells,
        )
    else:
        kind, color = ("cached", MUTED) if block_id in state.cached else ("free", FAINT)
        look = style.mark_style(kind, color) | {"linewidth": 1.0}
        ax.add_patch(Rectangle((x, y), width, height, zorder=1, **look))
    if count > 1:
        _badge(
            ax, x + width - 0.04, y + height - 0.06, f"×{count}", ha="right", va="bottom", bold=True
        )


def _draw_id(ax: Axes, x: float, y: float, block_id: int, state: PoolState) -> None:
    if state.ref_counts[block_id] > 1:
        y -= 0.2  # make room for the reference count
    if state.ref_counts[block_id] == 0 and block_id not in state.cached:
        ax.text(x, y, str(block_id), ha="center", va="center", fontsize=9, color=MUTED)
    else:
        _badge(ax, x, y, str(block_id))


def cell_columns(block_size: int) -> int:
    """How many cells are in a row of a block: a divisor of `block_size`, near its square root."""
    return next(
        c
        for c in range(math.isqrt(max(0, block_size - 1)) + 1, block_size + 1)
        if block_size % c == 0
    )


def draw_block(
    ax: Axes,
    box: Box,
    *,
    filled: int,
    size: int,
    across: int,
    owners: Sequence[str],
    with_cells: bool = True,
) -> None:
    """A block whose first `filled` of `size` cells are coloured, row by row from the top left, with
    one stripe per owner."""
    x, y, width, height = box
    down = size // across
    cell_width = width / across
    cell_height = height / down
    whole, part = divmod(filled, across)
    boxes = [(y, width, whole * cell_height)] if whole else []
    if part:
        boxes.append((y + whole * cell_height, part * cell_width, cell_height))
    ax.add_patch(Rectangle((x, y), width, height, facecolor=BACKGROUND, edgecolor="none", zorder=1))
    shown = owners[:4]  # more stripes could not be told apart; the reference count says the rest
    stripe = width / len(shown)
    for top, box_width, box_height in boxes:
        for i, color in enumerate(shown):
            end = min(box_width, (i + 1) * stripe)
            if end > i * stripe:
                corner = (x + i * stripe, top)
                span = end - i * stripe
                ax.add_patch(
                    Rectangle(corner, span, box_height, facecolor=color, edgecolor="none", zorder=2)
                )
    if with_cells:
        look: dict[str, Any] = {"color": BACKGROUND, "linewidth": 0.7, "zorder": 3}
        ax.vlines([x + i * width / across for i in range(1, across)], y, y + height, **look)
        ax.hlines([y + i * height / down for i in range(1, down)], x, x + width, **look)
    ax.add_patch(
        Rectangle((x, y), width, height, fill=False, edgecolor=owners[0], linewidth=1.2, zorder=4)
    )


def _badge(
    ax: Axes,
    x: float,
    y: float,
    text: str,
    ha: str = "center",
    va: str = "center",
    bold: bool = False,
) -> None:
    box = {"boxstyle": "round,pad=0.12", "facecolor": BACKGROUND, "edgecolor": "none", "alpha": 0.9}
    ax.text(
        x,
        y,
        text,
        ha=ha,
        va=va,
        fontsize=9,
        weight="bold" if bold else "normal",
        color=INK,
        bbox=box,
        zorder=6,
    )


def draw_block_tables(
    tables: Mapping[str, Sequence[int]],
    num_tokens: Mapping[str, int] | None = None,
    block_size: int | None = None,
    pool: Any = None,
    *,
    title: str = "",
) -> Axes:
    """Draw the logical blocks of each request on the left, the physical pool on the right, and an
    arrow from each to its place. (The player's view "tables" has room for more than some twenty
    blocks.)

    Args:
        tables: request id to block ids.
        num_tokens: request id to tokens written; without it, all blocks are full.
        block_size: tokens per block (16 by default).
        pool: as in `draw_pool`; by default just large enough for the tables.
    """
    if pool is None:
        pool = max((b for table in tables.values() for b in table), default=0) + 1
    state = pool_state(pool, tables, num_tokens, block_size)
    colors = RequestColors([*state.appeared, *state.tables])
    entries = sum(len(table) for table in state.tables.values())
    height = 0.31 * (max(entries + 0.5 * len(state.tables), state.num_blocks) + 1.2)
    ax = style.new_axes(height + (0.95 if title else 0.7))
    _draw_mapping(ax, state, colors)
    ax.set_title(title)
    ax.axis("off")
    _pool_legend(ax, state, colors)
    return ax


def _draw_mapping(ax: Axes, state: PoolState, colors: RequestColors) -> None:
    """Draw two lists of blocks, logical and physical, as strips, and an arrow for each table
    entry."""
    right = _STRIP_WIDTH + 3.2
    size = state.block_size
    ax.text(_STRIP_WIDTH / 2, -0.45, "logical blocks", ha="center", va="center")
    ax.text(right + _STRIP_WIDTH / 2, -0.45, "physical blocks (the pool)", ha="center", va="center")
    entries = sum(len(table) for table in state.tables.values())
    left_height = entries + 0.5 * max(0, len(state.tables) - 1)
    height = max(left_height, state.num_blocks)
    y = (height - left_height) / 2
    pool_top = (height - state.num_blocks) / 2
    for request_id, table in state.tables.items():
        middle = y + len(table) / 2
        ax.text(-0.75, middle, request_id, ha="right", va="center", fontweight="bold")
        for i, block_id in enumerate(table):
            filled = state.filled_by(request_id, i)
            owners = [colors[request_id]]
            draw_block(
                ax,
                (0, y, _STRIP_WIDTH, _STRIP_HEIGHT),
                filled=filled,
                size=size,
                across=size,
                owners=owners,
            )
            ax.text(
                -0.2,
                y + _STRIP_HEIGHT / 2,
                str(i),
                ha="right",
                va="center",
                fontsize=9,
                color=MUTED,
            )
            start = (_STRIP_WIDTH + 0.08, y + _STRIP_HEIGHT / 2)
            end = (right - 0.62, pool_top + block_id + _STRIP_HEIGHT / 2)
            _arrow(ax, start, end, owners[0])
            y += 1
        y += 0.5
    for block_id in range(state.num_blocks):
        top = pool_top + block_id
        _draw_physical(ax, (right, top, _STRIP_WIDTH, _STRIP_HEIGHT), block_id, state, colors)
        ax.text(
            right - 0.2, top + _STRIP_HEIGHT / 2, str(block_id), ha="right", va="center", fontsize=9
        )
    ax.set(xlim=(-2.2, right + _STRIP_WIDTH + 0.1), ylim=(height + 0.1, -0.9))


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    curve = f"arc3,rad={0.06 if end[1] > start[1] else -0.06}"
    for line_color, width in ((BACKGROUND, 3.6), (color, 1.6)):
        # A white rim keeps crossing arrows apart.
        look: dict[str, Any] = {
            "color": line_color,
            "linewidth": width,
            "shrinkA": 0,
            "shrinkB": 0,
            "zorder": 5,
        }
        look |= {"arrowstyle": "-|>", "mutation_scale": 11, "connectionstyle": curve}
        ax.add_patch(FancyArrowPatch(start, end, **look))


_CATEGORIES: dict[str, dict[str, Any]] = {
    "used": {"facecolor": "#0072B2", "edgecolor": "#0072B2"},
    "reserved": {"facecolor": "#A6CEE3", "edgecolor": "#0072B2"},
    "internal fragmentation": {"facecolor": "#E69F00", "edgecolor": "#8A5F00"},
    "external fragmentation": {"facecolor": "#D55E00", "edgecolor": "#803800"},
    "wasted": {"facecolor": "#E69F00", "edgecolor": "#8A5F00"},
}


def draw_memory(
    rows: Mapping[str, Mapping[str, float]],
    *,
    title: str = "",
    legend: bool | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw what memory is spent on, in percent of the whole: one stacked bar per row.

    Args:
        rows: label to {category: amount}. The categories "used", "reserved", "internal
            fragmentation", "external fragmentation" and "wasted" have fixed colours; others get
            their own.
        legend: explain colours below; by default if the figure is made here.
    """
    legend = ax is None if legend is None else legend
    ax = ax or style.new_axes(
        0.55 * len(rows) + 0.7 + (0.4 if legend else 0) + (0.3 if title else 0)
    )
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    others = [name for name in names if name not in _CATEGORIES]
    looks = {
        n: _CATEGORIES.get(n) or {"facecolor": style.request_color(2 + others.index(n))}
        for n in names
    }
    for y, row in enumerate(rows.values()):
        left = 0.0
        for name, amount in row.items():
            width = 100 * amount / (sum(row.values()) or 1.0)
            ax.barh(y, width, left=left, height=0.66, linewidth=0.8, **looks[name])
            if width >= 6:
                color = style.ink_on(looks[name]["facecolor"])
                ax.text(
                    left + width / 2,
                    y,
                    f"{width:.0f} %",
                    ha="center",
                    va="center",
                    fontsize=10,
                    color=color,
                )
            left += width
    ax.set_yticks(range(len(rows)), list(rows))
    ax.tick_params(axis="y", length=0)
    ax.set(xlabel="% of the memory", title=title, xlim=(0, 100), ylim=(len(rows) - 0.5, -0.5))
    if legend:
        style.legend(ax, (), [Patch(label=name, **looks[name]) for name in names])
    return ax
