"""Pictures of ranks whose devices sleep: a timeline per rank, and an animation of it.

The data are the records that the ranks of `device="sleep"` write, see
`nanovllm.executor.virtual_clock`. A step's bar is divided among its requests, in their colours; the
bar of a step with many requests has the colour of its first one. A rank that has an order and
cannot compute waits: for the stage before, or for the slowest rank. A rank without an order is
idle, and its row is empty."""

from __future__ import annotations

import base64
import html
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from PIL import Image

from nanovllm.executor.virtual_clock import SECOND, RankRead, RankStep
from nanovllm.lab.viz import style
from nanovllm.lab.viz.film import gif_bytes
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, RequestColors

Timelines = Mapping[str, Sequence[RankStep | RankRead]]

KINDS = ("compute", "wait", "communicate", "read")
_SHARES = 6  # a step of more requests is one bar
_BAR = 0.72  # height of a bar in its row
_ROW = 0.42  # inches
_PICTURES = 60  # of a film
_FILM_SECONDS = 20.0
_STATES = {
    "compute": "computes",
    "wait": "waits",
    "communicate": "communicates",
    "read": "receives KV",
    "idle": "has no order",
}


@dataclass(frozen=True)
class RankSpan:
    """A phase of a rank from `begin` to `end`, in picoseconds since the first step was ordered.

    Attributes:
        row: name of the rank, or of its link to other engines.
        kind: one of `KINDS`. The rank waits for input before it computes, and for the slowest rank
            of its group after it has computed.
        step: number of the step on this rank, counted from 0; -1 for a read.
        tokens: by request, how many the step computes.
    """

    row: str
    kind: str
    begin: int
    end: int
    step: int = -1
    tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RankTotals:
    """The time of a rank by phase, in milliseconds, from the first order until all ranks have
    answered. `reads` can overlap the others, which add up to the whole time."""

    compute: float
    wait: float
    communicate: float
    idle: float
    reads: float

    @property
    def duration(self) -> float:
        """Milliseconds until all ranks have answered."""
        return self.compute + self.wait + self.communicate + self.idle


def rank_spans(timelines: Timelines) -> list[RankSpan]:
    """Return what each rank did when: rank after rank, each in order of time.

    Args:
        timelines: by rank, as `read_timelines` returns them, or a part of each.

    Raises:
        ValueError: there are no records.
    """
    zero = _first_order(timelines)
    return [span for name in timelines for span in _spans_of(name, timelines[name], zero)]


def rank_totals(timelines: Timelines) -> dict[str, RankTotals]:
    """Return how the ranks spend their time, by rank.

    Raises:
        ValueError: there are no records.
    """
    spans = rank_spans(timelines)
    duration = max(span.end for span in spans)
    totals = {}
    for name in timelines:
        sums = dict.fromkeys(KINDS, 0)
        for span in spans:
            if span.row in (name, _link_of(name)):
                sums[span.kind] += span.end - span.begin
        reads = sums.pop("read")
        sums["idle"] = duration - sum(sums.values())
        sums["reads"] = reads
        totals[name] = RankTotals(**{kind: _milliseconds(time) for kind, time in sums.items()})
    return totals


def draw_ranks(
    timelines: Timelines,
    *,
    colors: RequestColors | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw one timeline per rank: when each step was ordered, when the rank computed, waited and
    communicated, and when its answer was there.

    Args:
        timelines: see `rank_spans`.
        colors: of the requests, to keep them across figures.
        ax: where to draw. Without it, a figure is made, with a legend.

    Raises:
        ValueError: there are no records.
    """
    spans = rank_spans(timelines)
    rows = _rows(timelines)
    legend = ax is None
    ax = ax or style.new_axes(_height(rows, title) + (0.45 if legend else 0.0))
    _draw(ax, timelines, spans, RequestColors() if colors is None else colors)
    ax.set_title(title)
    if legend:
        _explain(ax, spans)
    return ax


def _first_order(timelines: Timelines) -> int:
    begins = [
        record.order if isinstance(record, RankStep) else record.begin
        for records in timelines.values()
        for record in records
    ]
    if not begins:
        raise ValueError("no rank has a record: run an engine with timelines in its sleep_config")
    return min(begins)


def _spans_of(name: str, records: Sequence[RankStep | RankRead], zero: int) -> Iterator[RankSpan]:
    def span(row: str, kind: str, begin: int, end: int, **more: Any) -> Iterator[RankSpan]:
        if end > begin:
            yield RankSpan(row, kind, begin - zero, end - zero, **more)

    free = zero
    number = 0
    for record in records:
        if isinstance(record, RankRead):
            yield from span(_link_of(name), "read", record.begin, record.end)
            continue
        of_step: dict[str, Any] = {"step": number, "tokens": record.tokens}
        yield from span(name, "wait", max(record.order, free), record.compute, **of_step)
        yield from span(name, "compute", record.compute, record.wait, **of_step)
        yield from span(name, "wait", record.wait, record.communicate, **of_step)
        yield from span(name, "communicate", record.communicate, record.answer, **of_step)
        free = record.answer
        number += 1


def _milliseconds(virtual: int) -> float:
    return 1000 * virtual / SECOND


def _link_of(name: str) -> str:
    return f"{name}, link"


def _rows(timelines: Timelines) -> list[str]:
    """The rows from top to bottom: ranks, and the links of those that read."""
    rows = []
    for name, records in timelines.items():
        rows.append(name)
        if any(isinstance(record, RankRead) for record in records):
            rows.append(_link_of(name))
    return rows


def _height(rows: Sequence[str], title: str) -> float:
    return _ROW * len(rows) + 0.65 + (0.3 if title else 0.0)


def _draw(ax: Axes, timelines: Timelines, spans: Sequence[RankSpan], colors: RequestColors) -> None:
    rows = {name: row for row, name in enumerate(_rows(timelines))}
    last = _milliseconds(max(span.end for span in spans))
    ax.set(xlim=(0, last), ylim=(len(rows) - 0.5, -0.5), xlabel="time (ms)")
    num_spans = Counter(span.row for span in spans)
    for span in spans:
        rim = 0.8 if num_spans[span.row] <= 3 * _PICTURES else 0.0
        _draw_span(ax, span, rows[span.row], colors, rim)
    zero = _first_order(timelines)
    for name, records in timelines.items():
        steps = [record for record in records if isinstance(record, RankStep)]
        if len(steps) > _PICTURES:
            continue  # the marks would hide the bars
        top = rows[name] - _BAR / 2
        orders = [_milliseconds(step.order - zero) for step in steps]
        answers = [_milliseconds(step.answer - zero) for step in steps]
        ax.plot(orders, [top] * len(orders), **_ORDER)
        ax.plot(answers, [rows[name]] * len(answers), **_ANSWER)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.tick_params(axis="y", length=0)


def _draw_span(ax: Axes, span: RankSpan, row: int, colors: RequestColors, rim: float) -> None:
    begin = _milliseconds(span.begin)
    width = _milliseconds(span.end - span.begin)
    top = row - _BAR / 2
    if span.kind == "wait":
        ax.plot([begin, begin + width], [row, row], **_WAIT)
        return
    shares = list(span.tokens.items()) if span.kind == "compute" else []
    if not shares:
        look = {"compute": _DUMMY, "communicate": _COMMUNICATE, "read": _READ}[span.kind]
        ax.add_patch(Rectangle((begin, top), width, _BAR, zorder=2, **look))
    shares = shares if len(shares) <= _SHARES else shares[:1]
    for number, (request_id, count) in enumerate(shares):
        height = _BAR / len(shares)
        place = (begin, top + number * height)
        look = style.mark_style("prefill" if count > 1 else "decode", colors[request_id])
        ax.add_patch(Rectangle(place, width, height, linewidth=rim, zorder=2, **look))


_WAIT: dict[str, Any] = {"solid_capstyle": "butt", "dash_capstyle": "butt", "zorder": 1}
_WAIT |= style.line_style("waiting", MUTED)
_COMMUNICATE: dict[str, Any] = {
    "facecolor": BACKGROUND,
    "edgecolor": MUTED,
    "hatch": "xxxx",
    "linewidth": 0.8,
}
_DUMMY: dict[str, Any] = {
    "facecolor": BACKGROUND,
    "edgecolor": MUTED,
    "linewidth": 0.8,
    "linestyle": "--",
}
_READ: dict[str, Any] = {**style.mark_style("transferred", MUTED), "linewidth": 0.8}
_ORDER: dict[str, Any] = {"marker": 7, "markersize": 6, "color": INK, "linestyle": "none"}
_ORDER |= {"clip_on": False, "zorder": 5}
_ANSWER: dict[str, Any] = {"marker": "|", "markersize": 15, "color": INK, "linestyle": "none"}
_ANSWER |= {"markeredgewidth": 1.4, "clip_on": False, "zorder": 4}


def _explain(ax: Axes, spans: Sequence[RankSpan]) -> None:
    """Draw the legend: what occurs."""
    found = {span.kind for span in spans}
    counts = [n for span in spans if span.kind == "compute" for n in span.tokens.values()]
    handles: list[Any] = [Line2D([], [], label="order", **_ORDER)]
    for kind, present in (("prefill", any(count > 1 for count in counts)), ("decode", 1 in counts)):
        if present:
            handles.append(style.legend_handle(kind, kind))
    if any(span.kind == "compute" and not span.tokens for span in spans):
        handles.append(Patch(label="dummy step", **_DUMMY))
    if "wait" in found:
        handles.append(Line2D([], [], label="waits", **_WAIT))
    if "communicate" in found:
        handles.append(Patch(label="communicates", **_COMMUNICATE))
    if "read" in found:
        handles.append(Patch(label="receives KV", **_READ))
    handles.append(Line2D([], [], label="answer", **_ANSWER))
    style.legend(ax, (), handles)


# ---------------------------------------------------------------- the animation


class RankFilm:
    """An animation of ranks: the value of a notebook's cell. JupyterLab and saved pages show it
    with controls to play, pause and step, without a kernel.

    Attributes:
        gif: the bytes of the animation.
        words: what it shows, for readers who do not see it.
    """

    def __init__(self, gif: bytes, words: str) -> None:
        self.gif = gif
        self.words = words

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.gif).decode()
        return f'<img alt="{html.escape(self.words)}" src="data:image/gif;base64,{data}">'

    def __repr__(self) -> str:
        return self.words


def play_ranks(
    timelines: Timelines, *, colors: RequestColors | None = None, title: str = ""
) -> RankFilm:
    """Animate the timeline of `draw_ranks`: a picture for each moment at which a rank begins
    something else, up to 60, with the state of each rank next to its row.

    Args:
        timelines, colors: as in `draw_ranks`.

    Raises:
        ValueError: there are no records.
    """
    spans = rank_spans(timelines)
    colors = RequestColors() if colors is None else colors
    moments = _moments(spans)
    pictures = [_picture(timelines, spans, colors, title=title, now=now) for now in moments]
    lasting = [after - now for now, after in itertools.pairwise(moments)]
    pace = _FILM_SECONDS / moments[-1]  # per picosecond
    seconds = [min(1.5, max(0.2, pace * each)) for each in lasting] + [2.0]
    last = _milliseconds(moments[-1])
    words = f"Film of {len(timelines)} ranks, {last:.1f} ms in {len(moments)} pictures"
    return RankFilm(gif_bytes(pictures, seconds, title), f"{words}. {title}".rstrip())


def _moments(spans: Sequence[RankSpan]) -> list[int]:
    """When the pictures are: at each change, but at most `_PICTURES`, and the end."""
    last = max(span.end for span in spans)
    grain = max(1, last // _PICTURES)
    moments = [0]
    for at in sorted({time for span in spans for time in (span.begin, span.end)}):
        if grain <= at - moments[-1] and at <= last - grain:
            moments.append(at)
    return [*moments, last]


def states_at(spans: Sequence[RankSpan], rows: Sequence[str], now: int) -> dict[str, str]:
    """Return what each rank begins to do or does at a time, by row, in a word."""
    found = {row: "" if row.endswith(_link_of("")) else _STATES["idle"] for row in rows}
    for span in spans:
        if span.begin <= now < span.end:
            found[span.row] = _STATES[span.kind]
    return found


def _picture(
    timelines: Timelines, spans: Sequence[RankSpan], colors: RequestColors, *, title: str, now: int
) -> Image.Image:
    rows = _rows(timelines)
    height = _height(rows, title) + 0.1
    figure = Figure(figsize=(style.MAX_WIDTH, height), dpi=100)
    figure.set_layout_engine("none")
    left, right, top = 1.5, 1.35, 0.4 if title else 0.15
    box = (
        left / style.MAX_WIDTH,
        0.58 / height,
        1 - (left + right) / style.MAX_WIDTH,
        1 - (0.58 + top) / height,
    )
    ax = figure.add_axes(box)
    _draw(ax, timelines, spans, colors)
    # A veil covers the future.
    moment = _milliseconds(now)
    veil: dict[str, Any] = {"facecolor": BACKGROUND, "alpha": 0.8, "zorder": 8}
    ax.add_patch(Rectangle((moment, -1), ax.get_xlim()[1] - moment, len(rows) + 1, **veil))
    ax.axvline(moment, color=INK, linewidth=1.0, zorder=9)
    is_over = all(span.end <= now for span in spans)
    for row, state in enumerate(() if is_over else states_at(spans, rows, now).values()):
        ax.text(1.01, row, state, transform=ax.get_yaxis_transform(), va="center", fontsize=10)
    ax.set_title(title)
    ax.spines["left"].set_color(FAINT)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
