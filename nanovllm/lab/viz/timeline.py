"""Pictures of steps: the timeline of requests, the token budget, the blocks in use; several traces
compared."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from nanovllm.lab.viz import style
from nanovllm.lab.viz.data import (
    Event,
    Span,
    StepScale,
    request_ids,
    step_edges,
    timeline_events,
    timeline_spans,
)
from nanovllm.lab.viz.style import INK, RequestColors
from nanovllm.trace.trace import Trace

_BAR = 0.72  # height of a request's bar in its row
_MOST_CELLS = 80  # with more steps, equal neighbours are drawn as one bar
_LABEL_PITCH = 0.15  # inches that a row label needs


def draw_timeline(
    trace: Trace,
    x: StepScale = "step",
    *,
    colors: RequestColors | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw requests by steps: each row shows when a request waited, was prefilled, decoded, was
    preempted and ended. Where there is room, a prefill carries its number of tokens.

    Args:
        x: the x axis, see `step_edges`.
        colors: to keep colours across figures.
        ax: where to draw. Without it, a figure is made, with a legend.
    """
    ids = request_ids(trace)
    colors = colors or RequestColors(ids)
    legend = ax is None
    ax = ax or style.new_axes(
        timeline_height(len(ids)) + (0.7 if legend else 0.3) + (0.3 if title else 0)
    )
    _set_x(ax, trace, x)
    ax.set_ylim(max(1, len(ids)) - 0.5, -0.5)
    per_unit, pitch = _inches(ax, len(ids))
    joined = len(trace) > _MOST_CELLS
    spans = timeline_spans(trace, x, merge=joined)
    cached = {(s.request_id, s.begin): s.num_tokens for s in spans if s.kind == "cached"}
    rows = {request_id: row for row, request_id in enumerate(ids)}
    # Either all prefills of equal width have a label, or none.
    digits = len(str(max((span.num_tokens for span in spans), default=0)))
    for span in (s for s in spans if s.kind != "cached"):
        row = rows[span.request_id]
        color = colors[span.request_id]
        num_cached = cached.get((span.request_id, span.begin), 0)
        _draw_span(ax, span, row, color=color, num_cached=num_cached, joined=joined)
        fits = pitch > 0.25 and (span.end - span.begin) * per_unit > 0.09 * digits + 0.08
        if span.kind == "prefill" and fits and not num_cached:
            look: dict[str, Any] = {
                "ha": "center",
                "va": "center",
                "fontsize": 9,
                "color": style.ink_on(color),
            }
            ax.text((span.begin + span.end) / 2, row, str(span.num_tokens), zorder=5, **look)
    for event in timeline_events(trace, x):
        _draw_event(ax, event, rows[event.request_id], pitch)
    every = max(1, math.ceil(_LABEL_PITCH / pitch))
    ax.set_yticks(range(0, len(ids), every), ids[::every])
    ax.tick_params(axis="y", length=0, labelsize=10 if pitch > 0.17 else 9)
    ax.set_title(title)
    if legend:
        explain([ax], trace)
    return ax


def timeline_height(num_requests: int) -> float:
    """Inches for the rows of so many requests."""
    return min(8.0, num_requests * max(0.18, min(0.42, 5.0 / max(1, num_requests))) + 0.5)


def _inches(ax: Axes, num_rows: int) -> tuple[float, float]:
    """Width of one unit of x and height of one row, in inches; roughly, since the layout is settled
    only later."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    (width, height), place, (low, high) = figure.get_size_inches(), ax.get_position(), ax.get_xlim()
    return place.width * width / (high - low), place.height * height / max(1, num_rows)


def _draw_span(
    ax: Axes, span: Span, row: int, *, color: str, num_cached: int, joined: bool
) -> None:
    """Draw a bar or a line. The part of an admission that came from the prefix cache is on top of
    what was computed."""
    if span.kind in ("waiting", "stalled", "swapped"):
        look = style.line_style(span.kind, color)
        ax.plot(
            [span.begin, span.end], [row, row], solid_capstyle="butt", dash_capstyle="butt", **look
        )
        return
    width = span.end - span.begin
    top = row - _BAR / 2
    height = _BAR
    if num_cached:
        part = min(0.7, max(0.4, num_cached / (num_cached + span.num_tokens))) * _BAR
        look = style.mark_style("cached", color)
        ax.add_patch(Rectangle((span.begin, top), width, part, linewidth=0.8, zorder=2, **look))
        top = top + part
        height = height - part
    look = style.mark_style(span.kind, color)
    ax.add_patch(Rectangle((span.begin, top), width, height, linewidth=0.8, zorder=2, **look))
    if span.kind == "prefill" and not joined:
        # Without a gap the chunks of a prompt would look like one.
        ax.vlines(span.end, top, top + height, color=style.BACKGROUND, linewidth=1.2, zorder=3)


def _draw_event(ax: Axes, event: Event, row: int, pitch: float) -> None:
    """Draw a marker, smaller where rows are low, but large enough to be seen."""
    look = style.event_style(event.kind)
    is_first = event.kind == "first token"
    look["markersize"] = min(
        look["markersize"], max(10.0, pitch * 60) if is_first else max(5.0, pitch * 46)
    )
    ax.plot(event.at, row - _BAR / 2 if is_first else row, zorder=6, clip_on=False, **look)


def draw_budget(
    trace: Trace,
    x: StepScale = "step",
    *,
    colors: RequestColors | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw how each step spends its token budget: a bar stacked by request, in the order in which
    tokens are packed.

    Args:
        x, colors, ax: as in `draw_timeline`.
    """
    colors = colors or RequestColors(request_ids(trace))
    legend = ax is None
    ax = ax or style.new_axes(3.3)
    edges = step_edges(trace, x)
    highest = 1
    boxes = []
    faces = []
    rims = []
    for step, (begin, end) in zip(trace, edges, strict=True):
        level = 0
        for share in step.requests:
            top = level + share.num_tokens
            look = style.mark_style(share.kind, colors[share.request_id])
            boxes.append([(begin, level), (begin, top), (end, top), (end, level)])
            faces.append(look["facecolor"])
            rims.append(style.BACKGROUND if share.kind == "prefill" else look["edgecolor"])
            level = top
        highest = max(highest, level, step.token_budget)
    # Rims would hide small bars.
    rim_width = 0.6 if highest <= 64 and len(edges) <= 2 * _MOST_CELLS else 0.0
    ax.add_collection(
        PolyCollection(boxes, facecolors=faces, edgecolors=rims, linewidths=rim_width, zorder=2)
    )
    _draw_levels(
        ax, edges, [step.token_budget for step in trace], None, label="token budget", **_LIMIT_LINE
    )
    _set_x(ax, trace, x)
    ax.set(ylim=(0, highest * 1.08), ylabel="tokens per step")
    if legend:
        explain([ax], trace, kinds={"prefill", "decode"})
    return ax


def draw_usage(trace: Trace, x: StepScale = "step", *, ax: Axes | None = None) -> Axes:
    """Draw the KV blocks that requests hold, step by step, against the size of the pool. A cross
    marks a preemption.

    Args:
        x, ax: as in `draw_timeline`.
    """
    legend = ax is None
    ax = ax or style.new_axes(2.6)
    edges = step_edges(trace, x)
    held = [step.num_blocks - step.num_free_blocks for step in trace]
    _draw_levels(ax, edges, held, label="held by requests", color=style.PALETTE[0])
    total = max((step.num_blocks for step in trace), default=1)
    ax.axhline(total, label="size of the pool", **_LIMIT_LINE)
    for step, (begin, _), level in zip(trace, edges, held, strict=True):
        if step.preempted:
            ax.plot(begin, level, zorder=6, clip_on=False, **style.event_style("preempted"))
    _set_x(ax, trace, x)
    ax.set(ylim=(0, total * 1.1), ylabel="KV blocks")
    if legend:
        explain([ax], trace, kinds={"preempted"})
    return ax


def compare(traces: Mapping[str, Trace], x: StepScale = "step") -> list[Axes]:
    """Draw the timelines of several traces under one another, on one x axis and in the same
    colours.

    Args:
        traces: title to trace.
        x: the x axis, see `step_edges`.

    Returns:
        The Axes, from top to bottom.
    """
    colors = RequestColors(request_ids(*traces.values()))
    rows = max(len(request_ids(trace)) for trace in traces.values())
    height = min(timeline_height(rows) + 0.2, 12.0 / len(traces))
    axes = stacked([height] * len(traces), 0.8)
    limits = []
    for ax, (name, trace) in zip(axes, traces.items(), strict=True):
        draw_timeline(trace, x, colors=colors, title=name, ax=ax)
        limits.append(ax.get_xlim())
        ax.label_outer()
    axes[-1].set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
    explain(axes, *traces.values())
    return axes


def overview(trace: Trace, x: StepScale = "step", *, title: str = "") -> list[Axes]:
    """The timeline, the token budget and the blocks of one trace under one another, on one x axis.

    Args:
        x: as in `draw_timeline`.

    Returns:
        The Axes, from top to bottom.
    """
    colors = RequestColors(request_ids(trace))
    axes = stacked([timeline_height(len(colors)), 1.6, 1.6], 1.1 + (0.3 if title else 0))
    draw_timeline(trace, x, colors=colors, title=title, ax=axes[0])
    draw_budget(trace, x, colors=colors, ax=axes[1])
    draw_usage(trace, x, ax=axes[2])
    for ax in axes:
        ax.label_outer()
    explain(axes, trace)
    return axes


def stacked(heights: Sequence[float], rest: float, panels: Sequence[float] = ()) -> list[Axes]:
    """Axes under one another, of these heights in inches: first those with one common x axis, then
    `panels` with their own; `rest` is for titles and legends."""
    every = [*heights, *panels]
    figure = plt.figure(figsize=(style.MAX_WIDTH, sum(every) + rest), layout="constrained")
    grid = figure.add_gridspec(len(every), 1, height_ratios=every)
    first = figure.add_subplot(grid[0])
    others = [figure.add_subplot(grid[row], sharex=first) for row in range(1, len(heights))]
    own = [figure.add_subplot(grid[row]) for row in range(len(heights), len(every))]
    return [first, *others, *own]


def _set_x(ax: Axes, trace: Trace, x: StepScale) -> None:
    """Limits, ticks and label of the x axis."""
    edges = step_edges(trace, x)
    begin, end = (edges[0][0], edges[-1][1]) if edges else (0.0, 1.0)
    ax.set_xlim(begin, end if end > begin else begin + 1)
    names = {
        "step": "step",
        "tokens": "tokens computed",
        "time": f"time ({trace.settings.time_unit})",
    }
    ax.set_xlabel("cost of the steps" if callable(x) else names[x])
    if x in ("step", "tokens"):
        ax.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))


def _draw_levels(
    ax: Axes, edges: list[tuple[float, float]], values: list[int], idle: int | None = 0, **look: Any
) -> None:
    """Draw one value per step, as a line of steps. In the gaps between steps, when the engine is
    idle, the value is `idle`; None connects the steps."""
    xs: list[float] = []
    ys: list[int] = []
    for (begin, end), value in zip(edges, values, strict=True):
        if idle is not None and xs and begin > xs[-1]:
            xs += [xs[-1], begin]
            ys += [idle, idle]
        xs += [begin, end]
        ys += [value, value]
    ax.plot(xs, ys, **look)


_LIMIT_LINE: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 1.4}


def explain(axes: Sequence[Axes], *traces: Trace, kinds: Iterable[str] = style.MARKS) -> None:
    """One legend for pictures of these traces: of the marks `kinds`, those that occur, and all
    lines that have a label."""
    found = {span.kind for trace in traces for span in timeline_spans(trace)}
    found |= {event.kind for trace in traces for event in timeline_events(trace)}
    lines = [line for ax in axes for line in ax.get_legend_handles_labels()[0]]
    style.legend(axes[-1], found.intersection(kinds), lines)
