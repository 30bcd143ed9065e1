"""Timelines as animations: a cursor sweeps over requests, budget and memory; two policies race on one time axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from nanovllm.lab.viz import style, timeline
from nanovllm.lab.viz.animation.beats import Beat, abridge, beats, short_names
from nanovllm.lab.viz.animation.stage import (
    HEIGHT,
    LEFT,
    RIGHT,
    SMALL,
    TEXT,
    TOP,
    WIDTH,
    Scene,
    finish,
    new_frame,
    pace,
)
from nanovllm.lab.viz.data import request_ids, request_metrics, step_edges, timeline_events, timeline_spans
from nanovllm.lab.viz.style import BACKGROUND, INK, MUTED, RequestColors
from nanovllm.trace.trace import Trace

# Figures are drawn for 9 points and more; at two pixels a point they can be read when shown at half size.
_DPI = 144
_BEGIN, _END = 128, 868  # of the time axis
_TICKS = 378  # lowest pixel that tick labels need
_LEGEND = ("prefill", "decode", "first token", "preempted", "stalled", "cached", "swapped", "waiting", "finished")
_MOST_IN_LEGEND = 6
_MOST_REQUESTS = 16


def timeline_scene(trace: Trace, steps: Sequence[int], captions: Mapping[int, str] | None = None) -> Scene:
    """Requests by steps, the budget of each step and the blocks in use, growing step by step.

    Args:
        steps: numbers of the steps to show.
        captions: by step number, to stand instead of what is said otherwise.
    """
    shown = _part(trace, steps)
    told = abridge(_headlines(beats(trace, [record.step for record in shown], captions)), 14.9, 0.14)
    edges = {id(record): end for record, (_, end) in zip(shown, step_edges(shown), strict=True)}
    panels = [(timeline.draw_timeline, 68, 214), (timeline.draw_budget, 226, 282), (timeline.draw_usage, 296, 352)]
    draws = [(draw, top, bottom, shown) for draw, top, bottom in panels]
    picture, low, high = _picture(draws, short_names(trace), RequestColors(request_ids(trace)))
    handles = _legend([shown])
    title = f"{len(request_ids(shown))} requests, step by step"

    def draw(number: int) -> Figure:
        beat = told[number]
        ax = new_frame(title, beat.caption, extra=handles)
        ax.text(RIGHT, 27, f"step {beat.record.step}", fontsize=22, ha="right", va="center", color=MUTED)
        _show(ax, picture, [(top, bottom) for _, top, bottom in panels], (edges[id(beat.record)] - low) / (high - low))
        ax.text(LEFT, 254, "budget", fontsize=SMALL, va="center")
        ax.text(LEFT, 324, "KV blocks", fontsize=SMALL, va="center")
        return finish(ax)

    return draw, pace([beat.seconds for beat in told])


def _part(trace: Trace, steps: Iterable[int]) -> Trace:
    """These steps of a trace, as long as not more requests are in them than there is room for."""
    wanted, part = set(steps), Trace(settings=trace.settings)
    seen: set[str] = set()
    for record in trace:
        if record.step in wanted:
            seen |= {*record.arrived, *(share.request_id for share in record.requests)}
            if part.steps and len(seen) > _MOST_REQUESTS:
                break
            part.steps.append(record)
    return part


def _headlines(told: Iterable[Beat]) -> list[Beat]:
    """Of each step, the beat that teaches most."""
    best: dict[int, Beat] = {}
    for beat in told:
        key = id(beat.record)
        if key not in best or beat.weight > best[key].weight:
            best[key] = beat
    return list(best.values())


def _picture(
    panels: Sequence[tuple[Callable[..., Axes], int, int, Trace]],
    names: Mapping[str, str],
    colors: RequestColors,
    x: Any = "step",
) -> tuple[np.ndarray, float, float]:
    """All that ever will be seen, drawn once: `[HEIGHT, WIDTH, 4]` bytes, and the limits of the x axis, which all share.

    Args:
        panels: what draws it, top and bottom in pixels, and of which trace; from top to bottom.
    """
    figure = Figure(figsize=(WIDTH / _DPI, HEIGHT / _DPI), dpi=_DPI, facecolor=BACKGROUND, layout="none")  # type: ignore[arg-type]
    limits, axes = [], []
    for draw, top, bottom, trace in panels:
        place = (_BEGIN / WIDTH, 1 - bottom / HEIGHT, (_END - _BEGIN) / WIDTH, (bottom - top) / HEIGHT)
        ax = figure.add_axes(place)
        draw(trace, x, colors=colors, ax=ax, legend=False)
        ax.set(xlabel="", ylabel="")
        limits.append(ax.get_xlim())
        axes.append(ax)
        if draw is timeline.draw_timeline:
            labels = [names[r] for r in request_ids(trace)]
            every = -(-len(labels) * 18 // (bottom - top))
            ax.set_yticks(range(0, len(labels), every), labels[::every])
        else:
            levels = [step.token_budget if draw is timeline.draw_budget else step.num_blocks for step in trace]
            ax.set_yticks([0, max(levels)])
        ax.tick_params(labelsize=9, length=3)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    low, high = min(low for low, _ in limits), max(high for _, high in limits)
    for ax in axes:
        ax.set_xlim(low, high)
        ax.tick_params(labelbottom=ax is axes[-1])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba()).copy(), low, high


def _show(ax: Axes, picture: np.ndarray, panels: Sequence[tuple[int, int]], share: float, to: float = _END) -> None:
    """The picture up to the cursor, which has come `share` of the way; what is to its right is still empty."""
    finish(ax).figimage(picture[TOP - 6 : _TICKS + 8], 0, HEIGHT - _TICKS - 8, zorder=-1)
    cursor = _BEGIN + share * (to - _BEGIN)
    for top, bottom in panels:
        box: dict[str, Any] = {"facecolor": BACKGROUND, "edgecolor": "none", "zorder": 5}
        ax.add_patch(Rectangle((cursor + 1, top - 16), WIDTH - cursor, bottom - top + 16, **box))
        ax.plot([cursor, _END], [bottom, bottom], color=MUTED, linewidth=1.6, zorder=6)
        ax.plot([cursor, cursor], [top, bottom], color=INK, linewidth=1.5, zorder=7)


def _legend(traces: Sequence[Trace]) -> list[Patch | Line2D]:
    """The marks that matter most, in the size of the text."""
    found = {span.kind for trace in traces for span in timeline_spans(trace)}
    found |= {event.kind for trace in traces for event in timeline_events(trace)}
    kinds = set([kind for kind in _LEGEND if kind in found][:_MOST_IN_LEGEND])
    handles = [style.legend_handle(kind, kind) for kind in style.MARKS if kind in kinds]
    for handle in handles:
        if isinstance(handle, Line2D):
            handle.set(linewidth=1.6 * handle.get_linewidth(), markersize=1.8 * handle.get_markersize())
            handle.set_markeredgewidth(1.5 * handle.get_markeredgewidth())
    return handles


# ---------------------------------------------------------------- two policies


def policies_scene(traces: Mapping[str, Trace], captions: Sequence[tuple[float, str]]) -> Scene:
    """The same requests under two policies, on one axis of simulated time, with the worst pause so far of each.

    Args:
        traces: name of the policy to trace; two of them.
        captions: from which time on what is said, in order of time. The cursor stops there.
    """
    colors = RequestColors(request_ids(*traces.values()))
    names = {r: r for trace in traces.values() for r in request_ids(trace)}
    tops, height = [90, 248], 102
    panels = [
        (timeline.draw_timeline, top, top + height, trace) for top, trace in zip(tops, traces.values(), strict=True)
    ]
    picture, low, high = _picture(panels, names, colors, "time")
    unit = next(iter(traces.values())).settings["time_unit"]
    frames = _stops([at for at, _ in captions], low, high)
    handles = _legend(list(traces.values()))

    def draw(number: int) -> Figure:
        now = frames[number][0]
        said = [text for at, text in captions if at <= now]
        ax = new_frame("The same requests, two policies", said[-1], extra=handles)
        ax.text(RIGHT, 27, f"{now:.0f} {unit}", fontsize=22, ha="right", va="center", color=MUTED)
        _show(ax, picture, [(top, top + height) for top in tops], (now - low) / (high - low))
        for top, (name, trace) in zip(tops, traces.items(), strict=True):
            ax.text(_BEGIN, top - 22, name, fontsize=TEXT, fontweight="bold", va="center", zorder=8)
            pause, who = worst_pause(trace, now)
            text = f"longest pause: {pause:.0f} {unit} ({who})" if who else "longest pause: none yet"
            ax.text(RIGHT - 12, top - 22, text, fontsize=TEXT, va="center", ha="right", zorder=8)
        return finish(ax)

    return draw, pace([seconds for _, seconds in frames])


def _stops(times: Sequence[float], low: float, high: float, num_frames: int = 56) -> list[tuple[float, float]]:
    """(time, seconds) of each frame: an even sweep that stops where something is said."""
    step = (high - low) / num_frames
    even = [low + i * step for i in range(num_frames + 1)]
    far = [at for at in even if all(abs(at - stop) > 0.6 * step for stop in times)]
    return sorted([(at, 0.11) for at in far] + [(at, 2.0) for at in times])


def worst_pause(trace: Trace, now: float) -> tuple[float, str]:
    """The longest time for which a request that had begun to answer got no token, up to `now`, and which request; a
    pause that has not ended counts as long as it has taken.

    Returns:
        (0, "") if there was none.
    """
    newest: dict[str, float] = {}
    worst, who = 0.0, ""
    for step, (_, end) in zip(trace, step_edges(trace, "time"), strict=True):
        if end > now:
            break
        for share in step.requests:
            if not share.sampled:
                continue
            pause = end - newest.get(share.request_id, end)
            worst, who = max((worst, who), (pause, share.request_id), key=lambda pair: pair[0])
            newest[share.request_id] = end
            if share.request_id in step.finished:
                del newest[share.request_id]
    for request_id, since in newest.items():
        worst, who = max((worst, who), (now - since, request_id), key=lambda pair: pair[0])
    return worst, who


def first_token_at(trace: Trace, request_id: str) -> float:
    """When a request got its first token, in the time of the trace."""
    metrics = request_metrics(trace, "time")[request_id]
    return float(metrics["arrival"] + metrics["ttft"])
