"""How a step's schedule becomes tensors: packed rows, positions, slots, query offsets."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nanovllm.lab.viz import style
from nanovllm.lab.viz.animation.beats import short_names
from nanovllm.lab.viz.animation.stage import LEFT, LIT, RIGHT, SMALL, Scene, finish, new_frame, pace, several
from nanovllm.lab.viz.attention import most_telling_step
from nanovllm.lab.viz.data import PoolState, pool_states, request_ids
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, RequestColors, ink_on
from nanovllm.trace.trace import StepRecord, Trace

_LABELS_END, _PITCH, _CELL = 206, 52, 30  # right end of the labels; widest column; height of a row
_ROWS = {"request": 66, "positions": 112, "page": 158, "slot_mapping": 204}
_NUMBERS = {"query_start_loc": 254, "seq_lens": 302, "last_rows": 350}
_MOST_COLUMNS = 16
_STAGES = ["request", "positions", "page", "slot_mapping", "query_start_loc", "seq_lens", "last_rows"]


@dataclass
class PackedBatch:
    """The tensors that a step is made of, by the names they have in the runner.

    Attributes:
        request_ids: in the order in which their tokens are packed.
        query_start_loc: `[num_seqs + 1]`, where each request's rows begin, and their end.
        seq_lens: `[num_seqs]`, tokens of each in the cache once the step's have been written.
        positions: `[num_tokens]`.
        pages: `[num_tokens]`, the block of each token, from its request's table.
        slot_mapping: `[num_tokens]`, `block * block_size + offset`.
        last_rows: `[num_due]`, rows of which a token is sampled.
        tables: block table of each request.
    """

    request_ids: list[str]
    query_start_loc: list[int]
    seq_lens: list[int]
    positions: list[int]
    pages: list[int]
    slot_mapping: list[int]
    last_rows: list[int]
    tables: list[list[int]]


def packed_batch(trace: Trace, step: int) -> PackedBatch:
    """What the runner builds for a step.

    Raises:
        ValueError: no such step.
    """
    for record, state in zip(trace, pool_states(trace), strict=True):
        if record.step == step and record.requests:
            return _pack(record, state)
    raise ValueError(f"the trace has no step {step} that computes anything")


def _pack(record: StepRecord, state: PoolState) -> PackedBatch:
    size = state.block_size
    batch = PackedBatch([], [0], [], [], [], [], [], [])
    for share in record.requests:
        table, end = state.tables[share.request_id], share.start + share.num_tokens
        batch.request_ids.append(share.request_id)
        batch.tables.append(table)
        batch.positions += range(share.start, end)
        batch.pages += [table[position // size] for position in range(share.start, end)]
        batch.slot_mapping += [table[position // size] * size + position % size for position in range(share.start, end)]
        batch.query_start_loc.append(len(batch.positions))
        batch.seq_lens.append(end)
        if share.sampled:
            batch.last_rows.append(len(batch.positions) - 1)
    return batch


def batch_scene(trace: Trace, steps: Sequence[int], captions: Mapping[int, str] | None = None) -> Scene:
    """A step's schedule becomes tensors, one after another; then the step after it, at a glance.

    Args:
        steps: numbers of the steps to choose from: the one with the most different shares is shown.
        captions: by step number, to stand instead of what is said otherwise.

    Raises:
        ValueError: nothing is computed in these steps.
    """
    step = most_telling_step(trace, steps)
    names, colors = short_names(trace), RequestColors(request_ids(trace))
    batch = packed_batch(trace, step)
    words = _words(batch, names, trace.settings["block_size"])
    frames = [_Frame(step, batch, number, text) for number, text in enumerate(words, start=1)]
    later = [record.step for record in trace if record.step > step and record.requests][:1]
    for following in later:
        packed = packed_batch(trace, following)
        rows = f"{len(packed.positions)} row{'s' * (len(packed.positions) > 1)}"
        text = f"The next step: {rows}, in the same buffers. Nothing tells a prompt from an answer."
        frames.append(_Frame(following, packed, len(_STAGES) + 1, text))
    for frame in frames:
        frame.caption = (captions or {}).get(frame.step, frame.caption)
    return lambda i: _draw(frames[i], names, colors), pace([1.8] * len(frames))


@dataclass
class _Frame:
    """The first `num_stages` of `_STAGES` are shown; the last of them, if any is, is explained."""

    step: int
    batch: PackedBatch
    num_stages: int
    caption: str


def _example(batch: PackedBatch) -> int:
    """The row that is explained: the last but one of the longest share, so that its page is not the first of the table."""
    starts = batch.query_start_loc
    longest = max(range(len(batch.request_ids)), key=lambda i: (starts[i + 1] - starts[i], batch.seq_lens[i]))
    return max(starts[longest], starts[longest + 1] - 2)


def _words(batch: PackedBatch, names: Mapping[str, str], size: int) -> list[str]:
    """A caption for each of the stages."""
    starts, row = batch.query_start_loc, _example(batch)
    counts = [after - before for before, after in itertools.pairwise(starts)]
    owner = next(i for i in range(len(counts)) if starts[i + 1] > row)
    name, position, page = names[batch.request_ids[owner]], batch.positions[row], batch.pages[row]
    plan = several([f"{names[r]} {count}" for r, count in zip(batch.request_ids, counts, strict=True)], 5)
    first, last = batch.positions[starts[owner]], batch.positions[starts[owner + 1] - 1]
    where = f"{first} to {last}" if last > first else str(first)
    due = [names[batch.request_ids[i]] for i in range(len(counts)) if starts[i + 1] - 1 in batch.last_rows]
    return [
        f"The schedule says how many tokens for whom: {plan}. They are packed one after another, without padding.",
        f"positions: {name} has {first} tokens in the cache, so its new ones are at {where}.",
        f"Where does token {position} of {name} go? Its block table says so, "
        f"in entry {position} // {size} = {position // size}: page {page}.",
        f"slot_mapping: page {page} x {size} + {position} % {size} = {batch.slot_mapping[row]}. "
        "Its key and value are written there.",
        f"query_start_loc: where each request's rows begin. {name}'s rows are {starts[owner]} to {starts[owner + 1] - 1}.",
        f"seq_lens: how far each may look back. {name} will have {batch.seq_lens[owner]} tokens in the cache.",
        f"last_rows: only these rows become logits, and {several(due, 5)} get{'s' * (len(due) == 1)} a token."
        if due
        else "last_rows: nobody's tokens are all computed yet, so no row becomes logits.",
    ]


def _columns(batch: PackedBatch) -> list[int]:
    """The rows of the tensors that are shown, -1 where some are left out."""
    rows: list[int] = []
    for begin, end in itertools.pairwise(batch.query_start_loc):
        fits = len(batch.positions) <= _MOST_COLUMNS or end - begin <= 6
        rows += range(begin, end) if fits else [begin, begin + 1, begin + 2, -1, end - 2, end - 1]
    if len(rows) > _MOST_COLUMNS:
        rows = [*rows[:8], -1, *rows[-7:]]
    return [row for i, row in enumerate(rows) if row >= 0 or rows[i - 1] >= 0]


def _draw(frame: _Frame, names: Mapping[str, str], colors: RequestColors) -> Figure:
    ax = new_frame("A schedule becomes tensors", frame.caption)
    ax.text(RIGHT, 27, f"step {frame.step}", fontsize=22, ha="right", va="center", color=MUTED)
    columns = _columns(frame.batch)
    pitch = min(_PITCH, (RIGHT - _LABELS_END - 10) / len(columns))
    for stage, name in enumerate(_STAGES):
        explained, shown = stage == frame.num_stages - 1, stage < frame.num_stages
        y = _ROWS.get(name) or _NUMBERS[name]
        font: dict[str, Any] = {} if name in ("request", "page") else {"family": "DejaVu Sans Mono"}
        look: dict[str, Any] = {
            "color": INK if shown else FAINT,
            "fontweight": "bold" if explained else "normal",
        } | font
        ax.text(LEFT, y + _CELL / 2, name, fontsize=SMALL, va="center", **look)
        if not shown:
            continue
        if name in _ROWS:
            _draw_row(ax, frame.batch, name, columns, pitch, names, colors, explained)
        else:
            _draw_numbers(ax, frame.batch, name, columns, pitch, colors, explained)
    return finish(ax)


def _draw_row(
    ax: Axes,
    batch: PackedBatch,
    name: str,
    columns: Sequence[int],
    pitch: float,
    names: Mapping[str, str],
    colors: RequestColors,
    explained: bool,
) -> None:
    """One number for each token of the step."""
    values = {"positions": batch.positions, "page": batch.pages, "slot_mapping": batch.slot_mapping}.get(name)
    y, example = _ROWS[name], _example(batch)
    for column, row in enumerate(columns):
        x = _LABELS_END + column * pitch
        if row < 0:
            ax.text(x + pitch / 2, y + _CELL / 2, "…", fontsize=SMALL, ha="center", va="center")
            continue
        owner = bisect_right(batch.query_start_loc, row) - 1
        color = colors[batch.request_ids[owner]]
        one = batch.query_start_loc[owner + 1] - batch.query_start_loc[owner] == 1
        look: dict[str, Any] = style.mark_style("decode" if one else "prefill", color)
        text = names[batch.request_ids[owner]]
        if values is not None:
            lit = explained and row == example
            look, text = {"facecolor": LIT if lit else BACKGROUND, "edgecolor": color}, str(values[row])
        ax.add_patch(Rectangle((x + 1, y), pitch - 4, _CELL, linewidth=1.6, **look))
        size = min(float(SMALL), 1.5 * (pitch - 4) / len(text))
        ink = ink_on(str(look["facecolor"]))
        ax.text(x + pitch / 2 - 1, y + _CELL / 2, text, fontsize=size, ha="center", va="center", color=ink)


def _draw_numbers(
    ax: Axes,
    batch: PackedBatch,
    name: str,
    columns: Sequence[int],
    pitch: float,
    colors: RequestColors,
    explained: bool,
) -> None:
    """Numbers that are one a request: under its first row, over its rows, or under its last one."""
    y, starts = _NUMBERS[name] + _CELL / 2, batch.query_start_loc
    look: dict[str, Any] = {"fontsize": SMALL, "ha": "center", "va": "center"}
    for owner, request_id in enumerate(batch.request_ids):
        mine = [c for c, row in enumerate(columns) if starts[owner] <= row < starts[owner + 1]]
        if not mine:
            continue
        left, right = _LABELS_END + mine[0] * pitch, _LABELS_END + (mine[-1] + 1) * pitch
        if name == "query_start_loc":
            ax.plot([left - 1, left - 1], [_ROWS["slot_mapping"] + _CELL + 6, y - 12], color=INK, linewidth=1.4)
            ax.text(left - 1, y, str(starts[owner]), **look)
            if owner == len(batch.request_ids) - 1:
                ax.plot([right - 1, right - 1], [_ROWS["slot_mapping"] + _CELL + 6, y - 12], color=INK, linewidth=1.4)
                ax.text(right - 1, y, str(starts[-1]), **look)
        elif name == "seq_lens":
            ax.plot(
                [left + 3, right - 5], [y - 13, y - 13], color=colors[request_id], linewidth=4, solid_capstyle="butt"
            )
            ax.text((left + right) / 2 - 1, y + 3, str(batch.seq_lens[owner]), **look)
        elif starts[owner + 1] - 1 in batch.last_rows:
            box: dict[str, Any] = {
                "boxstyle": "round,pad=0.25",
                "facecolor": LIT if explained else BACKGROUND,
                "edgecolor": INK,
            }
            ax.text(right - pitch / 2 - 1, y, str(starts[owner + 1] - 1), bbox=box, **look)
