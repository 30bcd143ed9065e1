"""The scheduler as an animation: three queues, the step's token budget, what is computed of whom, the pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from nanovllm.lab.viz import memory, style
from nanovllm.lab.viz.animation.beats import Beat, abridge, beats, short_names
from nanovllm.lab.viz.animation.stage import LEFT, LIT, RIGHT, SMALL, TEXT, Scene, finish, new_frame, pace
from nanovllm.lab.viz.data import request_ids, share_kind
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, RequestColors, ink_on
from nanovllm.trace.trace import Trace, TracedRequest

_LANE = (20, 66, 330)  # left, top of the first, width of a queue
_LANE_HEIGHT, _LANE_PITCH, _LANE_TEXT = 46, 53, 84
_ROWS = (368, 92, 436)  # left, top of the first, right end of the bars of progress
_MOST_ROWS = 6
_BUDGET = (130, 238, 40)  # left, top, height of the bar
_POOL_TOP, _POOL_HEIGHT = 300, 72
_MOST_SQUARES = 256


def scheduler_scene(trace: Trace, steps: Sequence[int], captions: Mapping[int, str] | None = None) -> Scene:
    """Queues, budget, progress and pool, share by share.

    Args:
        steps: numbers of the steps to show.
        captions: by step number, to stand instead of what is said otherwise.
    """
    told = abridge(beats(trace, steps, captions), 15.0)
    names, colors = short_names(trace), RequestColors(request_ids(trace))
    rows = _rows(trace, steps)
    num_rows = 1 + max((row for taken in rows.values() for row in taken.values()), default=0)
    longest = max((n for beat in told for n in beat.known.values()), default=1)
    kinds = {"free", "prefill", "decode"}
    kinds |= {"cached"} if any(beat.pool.cached for beat in told) else set()

    def draw(number: int) -> Figure:
        beat = told[number]
        title = f"The scheduler: who gets the step's {beat.record.token_budget} tokens?"
        ax = new_frame(title, beat.caption, kinds, cached="free, still cached")
        ax.text(RIGHT, 27, f"step {beat.record.step}", fontsize=22, ha="right", va="center", color=MUTED)
        for lane, queue in enumerate(("waiting", "running", "swapped")):
            _draw_lane(ax, lane, queue, getattr(beat.queues, queue), names, colors, beat.lit)
        _draw_progress(ax, beat, rows[beat.record.step], num_rows, longest, names, colors)
        _draw_budget(ax, beat, names, colors)
        _draw_pool(ax, beat, colors)
        return finish(ax)

    return draw, pace([beat.seconds for beat in told])


def _draw_lane(
    ax: Axes,
    lane: int,
    queue: str,
    members: Sequence[str],
    names: Mapping[str, str],
    colors: RequestColors,
    lit: Sequence[str],
) -> None:
    """A queue with a chip for each request. Many get smaller chips in two rows; what does not fit is counted."""
    left, top, width = _LANE[0], _LANE[1] + lane * _LANE_PITCH, _LANE[2]
    box = FancyBboxPatch((left, top), width, _LANE_HEIGHT, "round,pad=0,rounding_size=8", facecolor="#F7F7F7")
    box.set(edgecolor=FAINT, linewidth=1.2)
    ax.add_patch(box)
    ax.text(left + 8, top + _LANE_HEIGHT / 2, queue, fontsize=SMALL, va="center")
    few = len(members) <= 5
    side, pitch, columns = (38, 44, 5) if few else (19, 22, 10)
    room = columns if few else 2 * columns - 2
    for place, request_id in enumerate(members[:room]):
        x = left + _LANE_TEXT + 14 + pitch * (place % columns)
        y = top + 4 + (0 if few else 20 * (place // columns))
        look: dict[str, Any] = {"facecolor": colors[request_id], "edgecolor": colors[request_id], "linewidth": 0.0}
        if request_id in lit:
            _light(ax, x, y, side, side)
        ax.add_patch(FancyBboxPatch((x, y), side, side, f"round,pad=0,rounding_size={side / 5}", zorder=3, **look))
        if few:
            name, color = names[request_id], ink_on(colors[request_id])
            ax.text(x + side / 2, y + side / 2, name, fontsize=TEXT if len(name) < 3 else 16, fontweight="bold",
                    ha="center", va="center", color=color, zorder=4)  # fmt: skip
    if len(members) > room:
        ax.text(
            left + width - 4, top + _LANE_HEIGHT - 12, f"+{len(members) - room}", fontsize=16, ha="right", va="center"
        )


def _light(ax: Axes, x: float, y: float, width: float, height: float) -> None:
    ax.add_patch(
        Rectangle((x - 3, y - 3), width + 6, height + 6, facecolor=LIT, edgecolor=INK, linewidth=1.0, zorder=2)
    )


def _rows(trace: Trace, steps: Sequence[int]) -> dict[int, dict[str, int]]:
    """By step: a row for each request that is there, as long as there is room. A request keeps its row; where there are
    few requests, nobody else gets it afterwards."""
    shown, rows, live = set(steps), {}, {}  # type: set[int], dict[int, dict[str, int]], dict[str, int]
    few = len(request_ids(trace)) <= _MOST_ROWS
    for record in trace:
        here = [*(s.request_id for s in record.requests), *record.running, *record.swapped, *record.waiting]
        if record.step not in shown:
            continue
        live = live if few else {r: row for r, row in live.items() if r in here}
        for request_id in dict.fromkeys([*record.arrived, *here]):
            free = [row for row in range(_MOST_ROWS) if row not in live.values()]
            if request_id not in live and free:
                live[request_id] = free[0]
        rows[record.step] = dict(live)
    return rows


def _draw_progress(
    ax: Axes,
    beat: Beat,
    rows: Mapping[str, int],
    num_rows: int,
    longest: int,
    names: Mapping[str, str],
    colors: RequestColors,
) -> None:
    """What is computed of what is known, and in full colour what this step adds."""
    left, top, width = _ROWS
    ax.text(left - 2, top - 17, "computed, of all known tokens", fontsize=SMALL, va="center")
    scale = (width - 30) / longest
    pitch = min(42, 126 // num_rows)
    height = 0.72 * pitch
    shares = {share.request_id: share for share in beat.record.requests[: beat.num_shares]}
    hidden = [r for r in beat.known if rows.get(r, -1) < 0]
    for request_id, known in beat.known.items():
        row = rows.get(request_id, -1)
        if row < 0:
            continue
        y, color, done = top + pitch * row, colors[request_id], beat.computed[request_id]
        share = shares.get(request_id)
        before = share.start if share else done
        ax.text(left - 2, y + height / 2, names[request_id], fontsize=17, va="center", fontweight="bold", ha="left")
        x = left + 46
        bar: dict[str, Any] = {"edgecolor": "none", "linewidth": 0, "zorder": 2}
        ax.add_patch(
            Rectangle((x, y), min(before, done) * scale, height, facecolor=style.mix(color, BACKGROUND, 0.6), **bar)
        )
        if share:
            ax.add_patch(
                Rectangle((x + before * scale, y), max(3.0, share.num_tokens * scale), height, facecolor=color, **bar)
            )
        ax.add_patch(Rectangle((x, y), known * scale, height, fill=False, edgecolor=color, linewidth=1.4, zorder=3))
        ax.text(x + known * scale + 6, y + height / 2, f"{done}/{known}", fontsize=16, va="center")
    if hidden:
        ax.text(RIGHT, top - 17, f"and {len(hidden)} more", fontsize=SMALL, va="center", ha="right", color=MUTED)


def _draw_budget(ax: Axes, beat: Beat, names: Mapping[str, str], colors: RequestColors) -> None:
    """The step's budget, filled share by share in the order in which tokens are packed."""
    left, top, height = _BUDGET
    budget = max(1, beat.record.token_budget)
    scale = (RIGHT - left) / budget
    ax.text(LEFT, top + height / 2, "budget", fontsize=TEXT, va="center")
    ax.add_patch(Rectangle((left, top), RIGHT - left, height, facecolor=BACKGROUND, edgecolor=MUTED, linewidth=1.4))
    if budget <= 64:
        ax.vlines([left + i * scale for i in range(1, budget)], top, top + height, color=FAINT, linewidth=0.8)
    x = float(left)
    for share in beat.record.requests[: beat.num_shares]:
        width = share.num_tokens * scale
        look: dict[str, Any] = style.mark_style(share_kind(share), colors[share.request_id])
        ax.add_patch(Rectangle((x, top), width, height, linewidth=1.2, zorder=2, **look))
        _label_share(ax, x + width / 2, top + height / 2, width, share, names, str(look["facecolor"]))
        x += width
    left_over = budget - sum(share.num_tokens for share in beat.record.requests[: beat.num_shares])
    text = f"{left_over} left"
    if RIGHT - x > 80 and left_over:
        box: dict[str, Any] = {"boxstyle": "round,pad=0.15", "facecolor": BACKGROUND, "edgecolor": "none"}
        ax.text(
            (x + RIGHT) / 2, top + height / 2, text, fontsize=SMALL, ha="center", va="center", color=MUTED, bbox=box
        )


def _label_share(
    ax: Axes, x: float, y: float, width: float, share: TracedRequest, names: Mapping[str, str], color: str
) -> None:
    """As much as fits: the name and the number of tokens, the name, or nothing."""
    name, count = names[share.request_id], share.num_tokens
    texts = [f"{name}: {count} tokens", f"{name}: {count}", name] if count > 1 else [name]
    for text in texts:
        if len(text) * 11.5 + 6 <= width:
            ax.text(
                x, y, text, fontsize=SMALL, fontweight="bold", ha="center", va="center", color=ink_on(color), zorder=3
            )
            return


def _draw_pool(ax: Axes, beat: Beat, colors: RequestColors) -> None:
    """The pool in the order of block ids; one too large to be drawn block by block becomes a bar."""
    left, state = _BUDGET[0], beat.pool
    held = sum(1 for count in state.ref_counts if count)
    ax.text(LEFT, _POOL_TOP + 21, "KV blocks", fontsize=TEXT, va="center")
    ax.text(LEFT, _POOL_TOP + 48, f"{state.num_blocks - held} free", fontsize=SMALL, va="center", color=MUTED)
    if state.num_blocks > _MOST_SQUARES:
        return _draw_pool_bar(ax, beat, colors)
    pitch, columns = max(
        (
            min(_POOL_HEIGHT / rows, (RIGHT - left) / math.ceil(state.num_blocks / rows)),
            math.ceil(state.num_blocks / rows),
        )
        for rows in range(1, 9)
    )
    for block_id in range(state.num_blocks):
        x, y = left + pitch * (block_id % columns), _POOL_TOP + pitch * (block_id // columns)
        memory._draw_physical(ax, x, y, 0.86 * pitch, 0.86 * pitch, block_id, state, colors)


def _draw_pool_bar(ax: Axes, beat: Beat, colors: RequestColors) -> None:
    left, state, x = _BUDGET[0], beat.pool, float(_BUDGET[0])
    scale = (RIGHT - left) / state.num_blocks
    counted: set[int] = set()
    for request_id, table in state.tables.items():
        width = len(set(table) - counted) * scale
        counted |= set(table)
        ax.add_patch(Rectangle((x, _POOL_TOP + 8), width, 40, facecolor=colors[request_id], linewidth=0, zorder=2))
        x += width
    ax.add_patch(
        Rectangle((left, _POOL_TOP + 8), RIGHT - left, 40, fill=False, edgecolor=MUTED, linewidth=1.4, zorder=3)
    )
