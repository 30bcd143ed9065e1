"""Animated pictures of KV memory: block tables with arrows into the pool, and the pool over the life of many requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from nanovllm.lab.viz import memory, style
from nanovllm.lab.viz.animation import stage
from nanovllm.lab.viz.animation.beats import short_names
from nanovllm.lab.viz.animation.moments import Moment, moments
from nanovllm.lab.viz.animation.pool import BODY, HEAD, Places, Who, draw_light, memory_frame, places_of, pool_scene
from nanovllm.lab.viz.data import request_ids
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, RequestColors
from nanovllm.trace.trace import Trace

_MOST_ROWS = 12  # of blocks under one another that are still legible at half size
_STRIP = 252  # width of a block in a list
_TABLE_X, _POOL_X = 80, 574


def tables_scene(
    trace: Trace,
    steps: Sequence[int],
    captions: Mapping[int, str] | None = None,
    *,
    title: str = "Block tables",
    words: Mapping[str, Sequence[str]] | None = None,
    show_order: bool = False,
    retold: Mapping[tuple[int, str], str] | None = None,
) -> stage.Scene:
    """Logical blocks of each request on the left, the pool on the right, an arrow for each entry of a block table. Pools
    and tables that do not fit are drawn as `pool_scene`.

    Args:
        words: request id to its tokens as text, at most six letters each, to be written into the cells.
        show_order: number the free blocks in the order in which they will be taken.
        retold: captions for single moments, see `moments`.
    """
    story = moments(trace, steps, captions, retold)
    places = places_of(story)
    if places.height > _MOST_ROWS or trace.settings["num_blocks"] > _MOST_ROWS:
        return pool_scene(trace, steps, captions, title="The pool of blocks" if title == "Block tables" else title)
    who = Who(RequestColors(request_ids(trace)), short_names(trace))
    picture = _TablesPicture(title, story, who, places, words or {}, show_order)
    return picture.draw, stage.pace([moment.seconds for moment in story])


@dataclass
class _TablesPicture:
    title: str
    story: list[Moment]
    who: Who
    places: Places
    words: Mapping[str, Sequence[str]]
    show_order: bool

    def __post_init__(self) -> None:
        num_blocks = self.story[0].state.num_blocks
        room = stage.BOTTOM - BODY
        self.pitch = min(42.0, room / num_blocks)
        self.table_pitch = min(42.0, room / max(1.0, self.places.height))
        self.height = 0.8 * min(self.pitch, self.table_pitch)
        self.contents = _contents(self.story)

    def draw(self, number: int) -> Figure:
        moment = self.story[number]
        state = moment.state
        order = {"marker": "$①$", "markersize": 18, "color": MUTED, "linestyle": "none"}
        extra = [Line2D([], [], label="taken first", **order)] if self.show_order else []  # type: ignore[arg-type]
        ax = memory_frame(self.title, moment, self.story, extra)
        heading = {"fontsize": stage.SMALL, "color": MUTED, "va": "center"}
        ax.text(_TABLE_X, HEAD, "block table: a request's blocks in order", **heading)  # type: ignore[arg-type]
        ax.text(_POOL_X, HEAD, f"the pool: all {state.num_blocks} blocks", **heading)  # type: ignore[arg-type]
        for block_id in range(state.num_blocks):
            self._draw_physical(ax, block_id, number)
        for request_id in state.tables:
            self._draw_table(ax, request_id, moment)
        return stage.finish(ax)

    def _draw_table(self, ax: Axes, request_id: str, moment: Moment) -> None:
        table, size = moment.state.tables[request_id], moment.state.block_size
        color, height = self.who.colors[request_id], self.height
        top = BODY + self.places.tops[request_id] * self.table_pitch
        middle = top + ((len(table) - 1) * self.table_pitch + height) / 2
        name = {"fontsize": 24, "fontweight": "bold", "va": "center", "ha": "center", "color": color}
        ax.text(34, middle, self.who.names[request_id], **name)  # type: ignore[arg-type]
        fresh = moment.fresh.get(request_id, range(0))
        for i, block_id in enumerate(table):
            y = top + i * self.table_pitch
            filled = memory.filled_of(moment.state, request_id, i)
            first = i * size
            texts = list(self.words.get(request_id, ()))[first : first + filled]
            new = {p - first for p in fresh if first <= p < first + size}
            _draw_strip(ax, _TABLE_X, y, height, filled, size, [color], texts, new)
            number = {"fontsize": stage.SMALL, "va": "center", "ha": "right", "color": MUTED}
            ax.text(_TABLE_X - 8, y + height / 2, str(i), **number)  # type: ignore[arg-type]
            start = (_TABLE_X + _STRIP + 4, y + height / 2)
            end = (_POOL_X - 34, BODY + block_id * self.pitch + height / 2)
            _draw_arrow(ax, start, end, color)

    def _draw_physical(self, ax: Axes, block_id: int, number: int) -> None:
        moment = self.story[number]
        state, size = moment.state, moment.state.block_size
        y, height = BODY + block_id * self.pitch, self.height
        middle = y + height / 2
        if block_id in moment.lit:
            draw_light(ax, _POOL_X, y, _STRIP, height)
        text = {"fontsize": 20, "va": "center", "ha": "right"}
        ax.text(_POOL_X - 9, middle, str(block_id), **text)  # type: ignore[arg-type]
        count = state.ref_counts[block_id]
        texts = self.contents[number].get(block_id, (("", 0), 0))
        (writer, index), _ = texts
        content = list(self.words.get(writer, ()))[index * size : (index + 1) * size]
        if count:
            owners = [self.who.colors[r] for r in state.holders(block_id)]
            filled = state.filled(block_id)
            new = {
                p - i * size
                for r, positions in moment.fresh.items()
                for i, b in enumerate(state.tables.get(r, ()))
                for p in positions
                if b == block_id and 0 <= p - i * size < size
            }
            _draw_strip(ax, _POOL_X, y, height, filled, size, owners, content[:filled], new)
        else:
            kind, color = ("cached", MUTED) if block_id in state.cached else ("free", FAINT)
            look = style.mark_style(kind, color) | {"linewidth": 1.5}
            ax.add_patch(Rectangle((_POOL_X, y), _STRIP, height, zorder=2, **look))
            if kind == "cached":
                _write_words(ax, _POOL_X, y, height, size, content, [])
        if count > 1:
            bold = {"fontsize": 22, "fontweight": "bold", "va": "center"}
            ax.text(_POOL_X + _STRIP + 10, middle, f"×{count}", **bold)  # type: ignore[arg-type]
        elif not count and self.show_order and moment.free_order:
            place = moment.free_order.index(block_id) + 1
            _draw_number(ax, _POOL_X + _STRIP + 22, middle, place)


def _contents(story: Sequence[Moment]) -> list[dict[int, tuple[tuple[str, int], int]]]:
    """For each moment: block id to whose tokens are in it (request id and index in its table) and how many."""
    now: dict[int, tuple[tuple[str, int], int]] = {}
    all_contents = []
    for moment in story:
        for request_id, table in moment.state.tables.items():
            for i, block_id in enumerate(table):
                now[block_id] = (request_id, i), memory.filled_of(moment.state, request_id, i)
        all_contents.append(dict(now))
    return all_contents


def _draw_strip(
    ax: Axes,
    x: float,
    y: float,
    height: float,
    filled: int,
    size: int,
    owners: Sequence[str],
    words: Sequence[str],
    fresh: Iterable[int] = (),
) -> None:
    """A block as a row of cells, with a band for each holder; fresh cells have a dark edge."""
    cell, band = _STRIP / size, height / len(owners)
    ax.add_patch(Rectangle((x, y), _STRIP, height, facecolor=BACKGROUND, edgecolor="none", zorder=2))
    for i, color in enumerate(owners):
        place = (x, y + i * band)
        ax.add_patch(Rectangle(place, filled * cell, band, facecolor=color, edgecolor="none", zorder=2))
    inner = [x + i * cell for i in range(1, size)]
    ax.vlines(inner, y, y + height, color=BACKGROUND, linewidth=2, zorder=3)
    ax.vlines(inner[filled:], y, y + height, color=FAINT, linewidth=1.5, zorder=3)
    ax.add_patch(Rectangle((x, y), _STRIP, height, fill=False, edgecolor=owners[0], linewidth=1.8, zorder=4))
    for i in fresh:
        place = (x + i * cell + 1, y + 1)
        ax.add_patch(Rectangle(place, cell - 2, height - 2, fill=False, edgecolor=INK, linewidth=2.6, zorder=5))
    _write_words(ax, x, y, height, size, words, owners)


def _write_words(
    ax: Axes, x: float, y: float, height: float, size: int, words: Sequence[str], owners: Sequence[str]
) -> None:
    """A word a cell; on a label of its own where the ground is not one colour."""
    cell = _STRIP / size
    box = {"boxstyle": "round,pad=0.06", "facecolor": BACKGROUND, "edgecolor": "none"}
    ground = {"color": style.ink_on(owners[0])} if len(owners) == 1 else {"color": INK, "bbox": box}
    look = {"fontsize": 17, "ha": "center", "va": "center_baseline", "zorder": 6, **ground}
    for i, word in enumerate(words):
        ax.text(x + (i + 0.5) * cell, y + height / 2, word, **look)  # type: ignore[arg-type]


def _draw_number(ax: Axes, x: float, y: float, number: int) -> None:
    ax.add_patch(Circle((x, y), 11, facecolor=BACKGROUND, edgecolor=MUTED, linewidth=1.5))
    text = {"fontsize": 16, "ha": "center", "va": "center_baseline", "color": INK}
    ax.text(x, y, str(number), **text)  # type: ignore[arg-type]


def _draw_arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    for line_color, width in ((BACKGROUND, 6.0), (color, 2.6)):  # a white rim keeps crossing arrows apart
        look = {"color": line_color, "linewidth": width, "shrinkA": 0, "shrinkB": 0, "zorder": 7}
        ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=18, **look))  # type: ignore[arg-type]
