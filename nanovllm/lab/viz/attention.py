"""Attention over pages: what a step's queries read and write, and how a long context is shared out among programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from nanovllm.lab.viz import memory, style
from nanovllm.lab.viz.animation.beats import short_names
from nanovllm.lab.viz.animation.stage import LEFT, LIT, SMALL, TEXT, Scene, finish, new_frame, pace, several
from nanovllm.lab.viz.data import PoolState, pool_states, request_ids, share_kind
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, RequestColors, pale
from nanovllm.trace.trace import StepRecord, Trace, TracedRequest

_POOL = (20, 84, 290, 290)  # left, top, width, height
_QUERIES = (424, 84, 456, 290)
_MOST_BLOCKS = 256  # beyond, the pool is drawn without fill levels
_MOST_READ_FRAMES = 6
_MOST_CELLS = 64  # in a row or column; beyond, cells are not drawn one by one
_LEGEND = [
    Patch(label="read from the cache", facecolor=pale(MUTED), edgecolor=MUTED),
    Patch(label="written in this step", facecolor=MUTED, edgecolor=MUTED),
    Patch(label="later token: hidden", facecolor=BACKGROUND, edgecolor=FAINT),
]


@dataclass
class Pages:
    """What attention does for one request in one step.

    Attributes:
        table: the pages that are read, in order: those of its block table that hold tokens.
        written: pages to which the step's keys and values go.
        num_keys: keys that the last query sees, which are all.
        num_products: pairs of a query and a key it sees.
    """

    share: TracedRequest
    table: list[int]
    written: list[int]
    num_keys: int
    num_products: int


def attended_pages(trace: Trace, step: int) -> list[Pages]:
    """For each share of a step, in the order in which tokens are packed, what it reads and writes.

    Raises:
        ValueError: no such step.
    """
    record, state = _at(trace, step)
    return [_pages(share, state) for share in record.requests]


def _at(trace: Trace, step: int) -> tuple[StepRecord, PoolState]:
    for record, state in zip(trace, pool_states(trace), strict=True):
        if record.step == step and record.requests:
            return record, state
    raise ValueError(f"the trace has no step {step} that computes anything")


def _pages(share: TracedRequest, state: PoolState) -> Pages:
    size, end = state.block_size, share.start + share.num_tokens
    table = state.tables[share.request_id][: math.ceil(end / size)]
    products = share.num_tokens * share.start + share.num_tokens * (share.num_tokens + 1) // 2
    return Pages(share, table, table[share.start // size :], end, products)


# ---------------------------------------------------------------- drawing


def draw_attention(trace: Trace, step: int, *, most: int = 4, ax: Axes | None = None) -> Axes:
    """The pool, and beside it, for each share of the step, its queries (rows) over its keys (columns, page by page).

    Args:
        step: number of the step.
        most: shares to show at most; those with the longest contexts.

    Raises:
        ValueError: no such step.
    """
    record, state = _at(trace, step)
    colors, names = RequestColors(request_ids(trace)), short_names(trace)
    shown = sorted(attended_pages(trace, step), key=lambda p: -p.num_keys)[:most]
    shown.sort(key=lambda p: [s.request_id for s in record.requests].index(p.share.request_id))
    gap, rows = 62, [min(24.0, 220.0 / p.share.num_tokens) * p.share.num_tokens for p in shown]
    height = max(300.0, sum(rows) + gap * len(rows) + 20)
    legend = ax is None
    ax = ax or style.new_axes(height / 100 + 0.5)
    ax.set(xlim=(0, 900), ylim=(height, 0), aspect="equal")
    ax.axis("off")
    written = {b for p in shown for b in p.written}
    _draw_pool(ax, (20, 30, 290, height - 50), state, colors, written, set(), 0.72)
    ax.text(20, 14, "the pool (yellow: written to)", fontsize=SMALL * 0.72, va="center")
    y = 0.0
    for pages, used in zip(shown, rows, strict=True):
        text = f"{names[pages.share.request_id]}: {_counted(pages)}"
        ax.text(_QUERIES[0], y + 14, text, fontsize=SMALL * 0.72, va="center", fontweight="bold")
        box = (_QUERIES[0], y + 28, _QUERIES[2], used + 30)
        color = colors[pages.share.request_id]
        _draw_queries(ax, box, pages, state.block_size, color, len(pages.table), written, 0.72)
        y += used + gap
    if legend:
        style.legend(ax, (), _LEGEND)
    return ax


def _counted(pages: Pages) -> str:
    count = pages.share.num_tokens
    queries = f"{count} queries" if count > 1 else "1 query"
    return f"{queries}, {pages.num_keys:,} keys in {len(pages.table)} page{'s' * (len(pages.table) > 1)}"


def _draw_pool(
    ax: Axes,
    box: tuple[float, float, float, float],
    state: PoolState,
    colors: RequestColors,
    lit: set[int],
    faded: set[int],
    text_scale: float = 1.0,
) -> None:
    """The pool as a grid that fills the box. Lit pages have a yellow ring; faded ones stand back."""
    left, top, width, height = box
    pitch, columns = max(
        (min(width / columns, height / math.ceil(state.num_blocks / columns)), columns)
        for columns in range(1, state.num_blocks + 1)
    )
    size = 0.82 * pitch
    if state.num_blocks > _MOST_BLOCKS:
        return _draw_large_pool(ax, left, top, pitch, columns, state, colors, lit, faded)
    for block_id in range(state.num_blocks):
        x, y = left + pitch * (block_id % columns) + 3, top + pitch * (block_id // columns) + 3
        if block_id in lit:
            ring: dict[str, Any] = {"facecolor": LIT, "edgecolor": INK, "linewidth": 1.0, "zorder": 0.5}
            ax.add_patch(Rectangle((x - 4, y - 4), size + 8, size + 8, **ring))
        memory._draw_physical(ax, x, y, size, size, block_id, state, colors)
        if block_id in faded:
            ax.add_patch(Rectangle((x - 1, y - 1), size + 2, size + 2, facecolor=BACKGROUND, alpha=0.72, zorder=5))
        elif pitch * text_scale >= 26:
            label = {"boxstyle": "round,pad=0.1", "facecolor": BACKGROUND, "edgecolor": "none", "alpha": 0.9}
            font = SMALL * text_scale
            ax.text(
                x + size / 2, y + size / 2, str(block_id), fontsize=font, ha="center", va="center", bbox=label, zorder=6
            )


def _draw_large_pool(
    ax: Axes,
    left: float,
    top: float,
    pitch: float,
    columns: int,
    state: PoolState,
    colors: RequestColors,
    lit: set[int],
    faded: set[int],
) -> None:
    """Small squares in the colours of their (first) holders; lit ones are black, since a ring could not be seen."""
    owner = {b: request_id for request_id, table in reversed(state.tables.items()) for b in table}
    boxes, faces = [], []
    for block_id in range(state.num_blocks):
        x, y = left + pitch * (block_id % columns), top + pitch * (block_id // columns)
        right, bottom = x + 0.82 * pitch, y + 0.82 * pitch
        boxes.append([(x, y), (right, y), (right, bottom), (x, bottom)])
        color = colors[owner[block_id]] if block_id in owner else FAINT
        faces.append(INK if block_id in lit else style.mix(color, BACKGROUND, 0.7) if block_id in faded else color)
    ax.add_collection(PolyCollection(boxes, facecolors=faces, linewidths=0))


def _draw_queries(
    ax: Axes,
    box: tuple[float, float, float, float],
    pages: Pages,
    block_size: int,
    color: str,
    num_read: int,
    lit: set[int],
    text_scale: float = 1.0,
) -> None:
    """A row for each query, a column for each key, under the pages in which the keys lie, some of them lit; what has been
    read of the first `num_read` pages is coloured."""
    left, top, width, height = box
    share, count = pages.share, pages.share.num_tokens
    cell = min(26.0, width / (len(pages.table) * block_size))
    row = min(26.0, (height - 30) / count)
    first, small = top + 30, SMALL * text_scale
    ax.text(left - 10, top + 12, "page", fontsize=small, ha="right", va="center")
    width, legible = block_size * cell, block_size * cell >= 32
    gap = min(1.0, width / 8)
    for i, block_id in enumerate(pages.table):
        x = left + i * width
        look: dict[str, Any] = {
            "facecolor": LIT if block_id in lit else BACKGROUND,
            "edgecolor": color,
            "linewidth": min(1.4, width / 6),
        }
        ax.add_patch(Rectangle((x + gap, top), width - 2 * gap, 24, **look))
        if legible:
            ax.text(x + width / 2, top + 12, str(block_id), fontsize=small, ha="center", va="center")
    keys = min(num_read * block_size, pages.num_keys)
    old = min(keys, share.start)
    flat: dict[str, Any] = {"edgecolor": "none", "linewidth": 0, "zorder": 2}
    ax.add_patch(Rectangle((left, first), old * cell, count * row, facecolor=pale(color), **flat))
    steps = range(count) if count <= _MOST_CELLS else range(0, count, count // _MOST_CELLS)
    for i in steps:
        seen = min(keys, share.start + i + 1) - share.start
        if seen > 0:
            corner, tall = (left + share.start * cell, first + i * row), min(steps.step, count - i) * row
            ax.add_patch(Rectangle(corner, seen * cell, tall, facecolor=color, **flat))
    _draw_cells(ax, left, first, pages.num_keys, count, cell, row)
    labelled = range(count) if row >= 20 else sorted({0, count - 1})
    for i in labelled:
        text = f"token {share.start + i}" if i == 0 else str(share.start + i)
        ax.text(left - 10, max(first + (i + 0.5) * row, first + 11), text, fontsize=small, ha="right", va="center")


def _draw_cells(ax: Axes, left: float, top: float, columns: int, rows: int, cell: float, row: float) -> None:
    right, bottom = left + columns * cell, top + rows * row
    if columns <= _MOST_CELLS and cell >= 5:
        ax.vlines([left + i * cell for i in range(1, columns)], top, bottom, color=BACKGROUND, linewidth=1.0, zorder=3)
    if rows <= _MOST_CELLS and row >= 5:
        ax.hlines([top + i * row for i in range(1, rows)], left, right, color=BACKGROUND, linewidth=1.0, zorder=3)
    ax.add_patch(
        Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=FAINT, linewidth=1.2, zorder=4)
    )


# ---------------------------------------------------------------- the animation


def attention_scene(trace: Trace, steps: Sequence[int], captions: Mapping[int, str] | None = None) -> Scene:
    """Which pages a decode reads, and which a piece of a prompt reads and writes, page by page.

    Args:
        steps: numbers of the steps to choose from: the one with the most different shares is shown.
        captions: by step number, to stand instead of what is said otherwise.

    Raises:
        ValueError: nothing is computed in these steps.
    """
    frames = attention_frames(trace, most_telling_step(trace, steps), captions)
    return lambda i: frames[i][0](), pace([seconds for _, seconds in frames])


def most_telling_step(trace: Trace, steps: Sequence[int]) -> int:
    """The step with both a decode and a piece of a prompt that reads older pages, if there is one; of several, the one
    whose decode has the longest context.

    Raises:
        ValueError: nothing is computed in these steps.
    """
    wanted = set(steps)
    records = [record for record in trace if record.step in wanted and record.requests]
    if not records:
        raise ValueError("nothing is computed in these steps")

    def tells(record: StepRecord) -> tuple[int, int]:
        kinds = {(share_kind(s), share_kind(s) == "prefill" and s.start > 0) for s in record.requests}
        return len(kinds), max(s.start for s in record.requests)

    return max(records, key=tells).step


Frames = list[tuple[Callable[[], Figure], float]]


def attention_frames(trace: Trace, step: int, captions: Mapping[int, str] | None = None) -> Frames:
    """What draws each frame of a step, and for how many seconds it stands: the longest decode, then the longest prompt."""
    state = _at(trace, step)[1]
    names, colors = short_names(trace), RequestColors(request_ids(trace))
    chosen = _decode_and_prefill(attended_pages(trace, step))
    frames: Frames = []

    def add(pages: Pages, caption: str, seconds: float, num_read: int, lit: set[int]) -> None:
        caption = (captions or {}).get(step, caption)
        request_id = pages.share.request_id

        def draw() -> Figure:
            ax = new_frame("Attention reads pages, wherever they lie", caption, extra=_LEGEND)
            ax.text(880, 27, f"step {step}", fontsize=22, ha="right", va="center", color=MUTED)
            ax.text(LEFT, 68, "the pool", fontsize=TEXT, va="center")
            faded = set(range(state.num_blocks)) - set(pages.table)
            _draw_pool(ax, _POOL, state, colors, lit, faded)
            head = f"{names[request_id]}: {_counted(pages)}"
            ax.text(_QUERIES[0], 68, head, fontsize=TEXT, fontweight="bold", va="center")
            _draw_queries(ax, _QUERIES, pages, state.block_size, colors[request_id], num_read, lit)
            return finish(ax)

        frames.append((draw, seconds))

    for pages in chosen:
        name = names[pages.share.request_id]
        add(pages, _written_words(name, pages, state.block_size), 1.9, 0, set(pages.written))
        last = len(pages.table)
        reading = sorted({math.ceil(last * i / _MOST_READ_FRAMES) for i in range(1, _MOST_READ_FRAMES + 1)})
        for num_read in reading:
            lit = set(pages.table[:num_read])
            done = num_read == last
            add(pages, _read_words(name, pages), 2.2 if done else 0.45, num_read, lit)
    return frames


def _decode_and_prefill(step: list[Pages]) -> list[Pages]:
    kinds: dict[str, list[Pages]] = {"decode": [], "prefill": []}
    for pages in step:
        kinds[share_kind(pages.share)].append(pages)
    return [max(group, key=lambda p: (p.share.start > 0, p.num_keys)) for group in kinds.values() if group]


def _written_words(name: str, pages: Pages, size: int) -> str:
    """What is written before anything is read."""
    start, count = pages.share.start, pages.share.num_tokens
    if count == 1:
        slot = pages.written[0] * size + start % size
        return f"First, write: the key and value of {name}'s token {start} go to page {pages.written[0]}, slot {slot}."
    word = "pages" if len(pages.written) > 1 else "page"
    return f"First, write: the keys of {name}'s tokens {start} to {start + count - 1} go to {word} {several(pages.written)}."


def _read_words(name: str, pages: Pages) -> str:
    count, keys = pages.share.num_tokens, pages.num_keys
    if count == 1:
        return (
            f"Then, read, in the table's order: one query needs all {keys:,} keys. All that reading, for one new token."
        )
    return (
        f"Then, read: each page serves all {count} queries, {pages.num_products:,} products for {keys:,} keys. "
        "No query sees a later token."
    )
