"""The pool over the life of many requests as an animation; and what pictures of memory share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

from nanovllm.lab.viz import memory, style
from nanovllm.lab.viz.animation import stage
from nanovllm.lab.viz.animation.beats import short_names
from nanovllm.lab.viz.animation.moments import Moment, moments
from nanovllm.lab.viz.data import PoolState, request_ids
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, RequestColors
from nanovllm.trace.trace import Trace

HEAD, BODY = 66, 82  # y of the words above the columns, and of what is below them
_LIT_EDGE = "#9A8B00"
_LEAST_CELL, _LEAST_LABELLED, _LEAST_COUNTED = (6, 40, 60)  # pixels: smaller ones have no room for cells, ids, counts


def pool_scene(
    trace: Trace,
    steps: Sequence[int],
    captions: Mapping[int, str] | None = None,
    *,
    title: str = "The pool of blocks",
    retold: Mapping[tuple[int, str], str] | None = None,
) -> stage.Scene:
    """The pool as a grid, those who hold blocks of it, and which free blocks will be taken next."""
    story = moments(trace, steps, captions, retold)
    picture = _PoolPicture(title, story, Who(RequestColors(request_ids(trace)), short_names(trace)))
    return picture.draw, stage.pace([moment.seconds for moment in story])


@dataclass
class Places:
    """Where each request stands for as long as it holds blocks, so that nothing moves: `tops` in rows."""

    tops: dict[str, float] = field(default_factory=dict)
    height: float = 0.0


def places_of(story: Sequence[Moment], gap: float = 0.5, rows: bool = False) -> Places:
    """Put each request at the highest place where nobody stands at the same time.

    Args:
        rows: a request needs one row whatever it holds, else one for each of its blocks.
    """
    lives: dict[str, tuple[int, int, int]] = {}  # first and last moment, most blocks
    for number, moment in enumerate(story):
        for request_id, table in moment.state.tables.items():
            first, _, most = lives.get(request_id, (number, number, 0))
            lives[request_id] = first, number, max(most, 1 if rows else len(table))
    places = Places()
    for request_id, (first, last, length) in lives.items():
        taken = sorted(
            (places.tops[other], places.tops[other] + lives[other][2] + gap)
            for other in places.tops
            if lives[other][0] <= last and first <= lives[other][1]
        )
        top = 0.0
        for begin, end in taken:
            if top + length + gap > begin:
                top = max(top, end)
        places.tops[request_id] = top
        places.height = max(places.height, top + length)
    return places


@dataclass
class Who:
    """What requests look like and are called."""

    colors: RequestColors
    names: dict[str, str]


def memory_frame(
    title: str, moment: Moment, story: Sequence[Moment], extra: Sequence[Any] = (), small: bool = False
) -> Axes:
    """An empty frame whose legend explains what is to be seen in some frame of the story.

    Args:
        extra: more handles for the legend.
        small: blocks are too small for hatching and reference counts.
    """
    handles = [Patch(label="token", facecolor=MUTED, edgecolor=MUTED), style.legend_handle("free", "free")]
    if any(m.state.cached for m in story):
        handles.append(Patch(label="free, content kept", **_cached_look(small)))
    handles.append(Patch(label="see caption", facecolor=stage.LIT, edgecolor=_LIT_EDGE))
    if any(max(m.state.ref_counts) > 1 for m in story) and not small:
        twice = {"marker": "$×2$", "markersize": 20, "color": INK, "linestyle": "none"}
        handles.append(Line2D([], [], label="shared", **twice))  # type: ignore[arg-type]
    return stage.new_frame(title, moment.caption, (), [*handles, *extra])


def _cached_look(small: bool) -> dict[str, Any]:
    return style.mark_style("decode" if small else "cached", MUTED)


def draw_light(ax: Axes, x: float, y: float, width: float, height: float) -> None:
    """A glow around a block, below it."""
    margin = 5
    place = (x - margin, y - margin)
    box = "round,pad=0,rounding_size=5"
    look = {"facecolor": stage.LIT, "edgecolor": _LIT_EDGE, "linewidth": 1, "zorder": 1}
    ax.add_patch(FancyBboxPatch(place, width + 2 * margin, height + 2 * margin, box, **look))  # type: ignore[arg-type]


_GRID_WIDTH, _GRID_HEIGHT = 536, 264
_LIST_X, _LIST_COLUMNS = 600, (776, 872)
_LIST_ROWS = 8


@dataclass
class _PoolPicture:
    title: str
    story: list[Moment]
    who: Who

    def __post_init__(self) -> None:
        num_blocks = self.story[0].state.num_blocks
        columns = range(1, num_blocks + 1)
        sides = {c: min(_GRID_WIDTH / c, _GRID_HEIGHT / math.ceil(num_blocks / c), 84) for c in columns}
        self.columns = max(sides, key=lambda c: (sides[c], -c))
        self.side = sides[self.columns]
        self.places = places_of(self.story, gap=0, rows=True)

    def draw(self, number: int) -> Figure:
        moment = self.story[number]
        state = moment.state
        ax = memory_frame(self.title, moment, self.story, small=self.side < _LEAST_LABELLED)
        held = sum(count > 0 for count in state.ref_counts)
        heading = {"fontsize": stage.SMALL, "color": MUTED, "va": "center"}
        text = f"the pool: {held} of {state.num_blocks} blocks held"
        ax.text(stage.LEFT, HEAD, text, **heading)  # type: ignore[arg-type]
        ax.text(_LIST_X, HEAD, "who holds", **heading)  # type: ignore[arg-type]
        for x, word in zip(_LIST_COLUMNS, ("tokens", "blocks"), strict=True):
            ax.text(x, HEAD, word, ha="right", **heading)  # type: ignore[arg-type]
        self._draw_grid(ax, moment)
        self._draw_list(ax, state)
        if moment.free_order is not None:
            self._draw_order(ax, moment)
        return stage.finish(ax)

    def _draw_grid(self, ax: Axes, moment: Moment) -> None:
        if self.side < _LEAST_LABELLED:
            self._draw_small_grid(ax, moment)
            return
        state, size = moment.state, 0.84 * self.side
        across = memory.cell_columns(state.block_size)
        with_cells = size / across >= _LEAST_CELL
        for block_id in range(state.num_blocks):
            x, y = self._corner(block_id)
            if block_id in moment.lit:
                draw_light(ax, x, y, size, size)
            owners = [self.who.colors[r] for r in state.holders(block_id)]
            if owners:
                filled = state.filled(block_id)
                memory.draw_block(ax, x, y, size, size, filled, state.block_size, across, owners, with_cells)
            else:
                kind, color = ("cached", MUTED) if block_id in state.cached else ("free", FAINT)
                look = style.mark_style(kind, color) | {"linewidth": 1.5}
                ax.add_patch(Rectangle((x, y), size, size, zorder=2, **look))
            self._label(ax, x + size / 2, y + size / 2, block_id, state)

    def _corner(self, block_id: int) -> tuple[float, float]:
        return (stage.LEFT + block_id % self.columns * self.side, BODY + block_id // self.columns * self.side)

    def _draw_small_grid(self, ax: Axes, moment: Moment) -> None:
        """Many blocks at once: no cells and no ids, a block is filled from its top."""
        state, size = moment.state, 0.84 * self.side
        owners: dict[int, list[str]] = {}
        filled: dict[int, float] = {}
        for request_id, table in state.tables.items():
            color = self.who.colors[request_id]
            for i, block_id in enumerate(table):
                owners.setdefault(block_id, []).append(color)
                share = memory.filled_of(state, request_id, i) / state.block_size
                filled[block_id] = max(share, filled.get(block_id, 0.0))
        free = [b for b in range(state.num_blocks) if b not in owners]
        looks = (
            ([b for b in free if b not in state.cached], style.mark_style("free", FAINT)),
            ([b for b in free if b in state.cached], _cached_look(True)),
            (list(owners), {"facecolor": BACKGROUND, "edgecolor": MUTED}),
        )
        for block_ids, look in looks:
            boxes = [Rectangle(self._corner(b), size, size) for b in block_ids]
            ax.add_collection(PatchCollection(boxes, linewidth=0.8, zorder=2, **look))
        lit = [Rectangle(self._corner(b), size, size) for b in sorted(moment.lit)]
        glow = {"facecolor": "none", "edgecolor": stage.LIT, "linewidth": max(2.0, 0.3 * self.side), "zorder": 1}
        ax.add_collection(PatchCollection(lit, **glow))  # type: ignore[arg-type]
        stripes, colors = [], []
        for block_id, holders in owners.items():
            x, y = self._corner(block_id)
            shown = holders[:4]
            for i, color in enumerate(shown):
                place = (x + i * size / len(shown), y)
                stripes.append(Rectangle(place, size / len(shown), filled[block_id] * size))
                colors.append(color)
        ax.add_collection(PatchCollection(stripes, facecolor=colors, edgecolor="none", zorder=3))

    def _label(self, ax: Axes, x: float, y: float, block_id: int, state: PoolState) -> None:
        count = state.ref_counts[block_id]
        box = {"boxstyle": "round,pad=0.1", "facecolor": BACKGROUND, "edgecolor": "none", "alpha": 0.85}
        text = str(block_id)
        if count > 1:
            text = f"{block_id} ×{count}" if self.side >= _LEAST_COUNTED else f"×{count}"
        ground = {"bbox": box, "color": INK} if count or block_id in state.cached else {"color": MUTED}
        look = {"fontsize": stage.SMALL, "ha": "center", "va": "center", "zorder": 6}
        ax.text(x, y, text, **look, **ground)  # type: ignore[arg-type]

    def _draw_list(self, ax: Axes, state: PoolState) -> None:
        pitch = _GRID_HEIGHT / _LIST_ROWS
        crowded = self.places.height > _LIST_ROWS  # then rows close ranks, else each has its place
        room = _LIST_ROWS - 1 if crowded else _LIST_ROWS
        for number, (request_id, table) in enumerate(list(state.tables.items())[:room]):
            y = BODY + (number if crowded else self.places.tops[request_id]) * pitch + pitch / 2 - 2
            color = self.who.colors[request_id]
            ax.add_patch(Rectangle((_LIST_X, y - 11), 22, 22, facecolor=color, edgecolor=color))
            text = {"fontsize": stage.TEXT, "va": "center"}
            ax.text(_LIST_X + 34, y, self.who.names[request_id], fontweight="bold", **text)  # type: ignore[arg-type]
            for x, count in zip(_LIST_COLUMNS, (state.num_tokens.get(request_id, 0), len(table)), strict=True):
                ax.text(x, y, str(count), ha="right", **text)  # type: ignore[arg-type]
        if len(state.tables) > room:
            y = BODY + (_LIST_ROWS - 0.5) * pitch - 2
            rest = f"and {len(state.tables) - room} more"
            ax.text(_LIST_X + 34, y, rest, fontsize=stage.SMALL, va="center", color=MUTED)

    def _draw_order(self, ax: Axes, moment: Moment) -> None:
        """The old end of the free list: what will be taken next."""
        assert moment.free_order is not None
        y, height = 366, 26
        text = {"fontsize": stage.SMALL, "va": "center"}
        ax.text(stage.LEFT, y, "free blocks, next first:", color=MUTED, **text)  # type: ignore[arg-type]
        x, width = stage.LEFT + 222, 12 + 11 * max(2, len(str(moment.state.num_blocks - 1)))
        room = int((stage.RIGHT - x - 30) // (width + 4))
        for block_id in moment.free_order[:room]:
            kind = "cached" if block_id in moment.state.cached else "free"
            look = style.mark_style(kind, MUTED) | {"linewidth": 1.2}
            ax.add_patch(Rectangle((x, y - height / 2), width, height, **look))
            box = {"boxstyle": "round,pad=0.05", "facecolor": BACKGROUND, "edgecolor": "none", "alpha": 0.85}
            ax.text(x + width / 2, y, str(block_id), ha="center", bbox=box, **text)  # type: ignore[arg-type]
            x += width + 4
        if len(moment.free_order) > room:
            ax.text(x + 2, y, "…", **text)  # type: ignore[arg-type]
        if not moment.free_order:
            ax.text(x, y, "none", **text)  # type: ignore[arg-type]
