"""A long context, cut into parts for many programs of a GPU, and put together again: the split of a decode."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nanovllm.lab.viz.animation.stage import LEFT, RIGHT, SMALL, TEXT, Scene, finish, new_frame, pace
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, PALETTE, ink_on, pale

_BAR = (96, 34)  # top and height of the context
_GRID = (22, 24.0, 212)  # columns, pitch, top of the grid of multiprocessors
_PARTIAL_TOP, _PARTIAL_SIDE = 150, 11
_COLOR = PALETTE[0]
_Box = list[tuple[float, float]]


@dataclass(frozen=True)
class Split:
    """How one decode is shared out, as the Triton backend does it.

    Attributes:
        num_parts: parts of the context, a program for each and each KV head.
        keys: keys of a part.
        tile: keys that a program reads at a time.
    """

    context: int
    num_kv_heads: int
    num_processors: int
    num_parts: int
    keys: int
    tile: int

    @property
    def num_programs(self) -> int:
        """Programs for one request."""
        return self.num_parts * self.num_kv_heads


def split_of(num_requests: int, context: int, num_kv_heads: int, group: int, head_dim: int) -> Split:
    """The split of each decode among `num_requests` on an H100 (132 multiprocessors), in bfloat16.

    Args:
        context: tokens of each request.
        group: query heads for each KV head.
    """
    import torch  # a trace can be drawn without either; these numbers are the kernel's own

    from nanovllm.attention.triton import Hardware, choose_splits, choose_tiles

    hardware = Hardware(132, 227 * 1024)
    tile = choose_tiles(group, head_dim, torch.bfloat16, hardware).keys
    parts = choose_splits(num_requests, num_kv_heads, hardware)
    keys = math.ceil(math.ceil(context / parts) / tile) * tile
    return Split(context, num_kv_heads, hardware.num_processors, parts, keys, tile)


def split_scene() -> Scene:
    """One decode over a long context: as few programs, as many, their results combined, and what other batches need."""
    split = split_of(1, 8192, 8, 4, 128)
    heads, processors = split.num_kv_heads, split.num_processors
    frames: list[tuple[Callable[[], Figure], float]] = []

    def add(caption: str, seconds: float, parts: int, done: float, combined: float = -1.0) -> None:
        frames.append((lambda: _draw(split, caption, parts, done, combined), seconds))

    alone = (
        f"Without a split: a program for each of the {heads} KV heads, {split.context:,} keys each. "
        f"{processors - heads} of {processors} multiprocessors have nothing to do."
    )
    add(alone, 2.4, 1, 0.0)
    for done in (0.06, 0.12, 0.19, 0.25):
        add(alone, 0.35, 1, done)
    cut = (
        f"Split in {split.num_parts} parts of {split.keys} keys: {split.num_programs} programs. "
        "All multiprocessors read at the same time."
    )
    add(cut, 2.4, split.num_parts, 0.0)
    for done in (0.25, 0.5, 0.75, 1.0):
        add(cut, 0.35, split.num_parts, done)
    join = "Each part gives an average of its values, and its weight. combine_kernel makes one answer of them."
    for combined, seconds in ((0.0, 1.2), (0.5, 0.3), (1.0, 2.0)):
        add(join, seconds, split.num_parts, 1.0, combined)
    counts = [1, 16, 64, 256]
    splits = [split_of(count, split.context, heads, 4, 128) for count in counts]
    last = "The more requests decode together, the fewer parts each needs: there are enough programs anyway."
    frames.append((lambda: _draw_batches(last, counts, splits), 3.0))
    return lambda i: frames[i][0](), pace([seconds for _, seconds in frames])


def _frame(caption: str) -> Axes:
    ax = new_frame("A long context, shared out among programs", caption)
    ax.text(RIGHT, 27, "decode", fontsize=22, ha="right", va="center", color=MUTED)
    return ax


def _draw(split: Split, caption: str, parts: int, done: float, combined: float) -> Figure:
    """The context in `parts`, of each of which a share `done` has been read; above -1, `combined` says how far the
    partial results have come together."""
    ax = _frame(caption)
    text = f"the context of one request: {split.context:,} keys, read {split.tile} at a time"
    ax.text(LEFT, 74, text, fontsize=SMALL, va="center")
    top, height = _BAR
    width = (RIGHT - LEFT) / parts
    gap = 2.0 if parts > 1 else 0.0
    for part in range(parts):
        x = LEFT + part * width
        ax.add_patch(Rectangle((x, top), width - gap, height, facecolor=pale(_COLOR), linewidth=0, zorder=1))
        ax.add_patch(Rectangle((x, top), (width - gap) * done, height, facecolor=_COLOR, linewidth=0, zorder=2))
    if combined >= 0:
        _draw_partials(ax, parts, width, combined)
    _draw_processors(ax, split, parts, done)
    return finish(ax)


def _draw_partials(ax: Axes, parts: int, width: float, combined: float) -> None:
    """The parts' results on their way to the middle, where they become one."""
    middle = (LEFT + RIGHT) / 2
    if combined >= 1:
        ax.add_patch(
            Rectangle((middle - 62, _PARTIAL_TOP - 8), 124, 30, facecolor=_COLOR, edgecolor=INK, linewidth=1.4)
        )
        ax.text(middle, _PARTIAL_TOP + 7, "one answer", fontsize=SMALL, ha="center", va="center", color=ink_on(_COLOR))
        return
    for part in range(parts):
        x = LEFT + (part + 0.5) * width
        x += (middle - x) * combined
        look: dict[str, Any] = {"facecolor": _COLOR, "edgecolor": BACKGROUND, "linewidth": 0.8}
        ax.add_patch(Rectangle((x - _PARTIAL_SIDE / 2, _PARTIAL_TOP), _PARTIAL_SIDE, 1.3 * _PARTIAL_SIDE, **look))


def _draw_processors(ax: Axes, split: Split, parts: int, done: float) -> None:
    """A square for each multiprocessor, with a bar for each of its programs, filled as far as it has read."""
    columns, pitch, top = _GRID
    programs = parts * split.num_kv_heads
    ax.text(LEFT, top - 18, f"{split.num_processors} multiprocessors", fontsize=SMALL, va="center")
    most = -(-programs // split.num_processors)
    empty: list[_Box] = []
    full: list[_Box] = []
    rims: list[_Box] = []
    idle: list[_Box] = []
    for number in range(split.num_processors):
        x, y, side = LEFT + pitch * (number % columns), top + pitch * (number // columns), 0.84 * pitch
        mine = len(range(number, programs, split.num_processors))
        wide = side / most
        empty += [_box(x + place * wide, y, wide, side) for place in range(mine)]
        full += [_box(x + place * wide, y + side * (1 - done), wide, side * done) for place in range(mine)]
        (rims if mine else idle).append(_box(x, y, side, side))
    for boxes, face, edge, line in (
        (empty, pale(_COLOR), BACKGROUND, 0.6),
        (full, _COLOR, BACKGROUND, 0.6),
        (idle, "none", FAINT, 1.2),
        (rims, "none", _COLOR, 1.2),
    ):
        ax.add_collection(PolyCollection(boxes, facecolors=face, edgecolors=edge, linewidths=line))
    x = LEFT + columns * pitch + 28
    keys = split.context if parts == 1 else split.keys
    for y, text in ((240, f"{programs} programs"), (276, f"of {keys:,} keys")):
        ax.text(x, y, text, fontsize=26, va="center", fontweight="bold" if y == 240 else "normal")
    busy = min(programs, split.num_processors)
    ax.text(x, 318, f"{busy} of {split.num_processors} busy", fontsize=TEXT, va="center", color=MUTED)


def _box(x: float, y: float, width: float, height: float) -> _Box:
    return [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]


def _draw_batches(caption: str, counts: list[int], splits: list[Split]) -> Figure:
    """For several batch sizes: into how many parts each request's context is cut."""
    ax = _frame(caption)
    heads = splits[0].num_kv_heads
    ax.text(
        LEFT,
        74,
        f"requests x {heads} KV heads x parts = programs, for 132 multiprocessors",
        fontsize=SMALL,
        va="center",
    )
    for row, (count, split) in enumerate(zip(counts, splits, strict=True)):
        y = 112 + 66 * row
        words = f"{count} request{'s' * (count > 1)}"
        ax.text(170, y + 17, words, fontsize=TEXT, ha="right", va="center", fontweight="bold")
        width = 430 / split.num_parts
        gap = min(3.0, 0.3 * width)
        for part in range(split.num_parts):
            box = Rectangle((190 + part * width, y), width - gap, 34, facecolor=_COLOR, linewidth=0)
            ax.add_patch(box)
        parts = f"{split.num_parts} parts: {count * split.num_programs:,} programs"
        ax.text(640, y + 17, parts, fontsize=SMALL, va="center")
    return finish(ax)
