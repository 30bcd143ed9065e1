"""Pictures of ranks whose devices sleep: a timeline per rank, and a player of it.

The data are the records that the ranks of `device="sleep"` write, see
`nanovllm.executor.virtual_clock`. A step's bar is divided among its requests, in their colours; the
bar of a step with many requests has the colour of its first one. A rank that has an order and
cannot compute waits: for the stage before, or for the slowest rank. A rank without an order is
idle, and its row is empty."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anywidget
import matplotlib.pyplot as plt
import traitlets
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from nanovllm.executor.virtual_clock import SECOND, RankRead, RankStep
from nanovllm.lab import stored
from nanovllm.lab.viz import style
from nanovllm.lab.viz.player import WEB, bundle, deflate
from nanovllm.lab.viz.style import BACKGROUND, INK, MUTED, RequestColors

Timelines = Mapping[str, Sequence[RankStep | RankRead]]

KINDS = ("compute", "wait", "communicate", "read")
_SHARES = 6  # a step of more requests is one bar
_BAR = 0.72  # height of a bar in its row
_ROW = 0.42  # inches
_MOST_MARKS = 60  # more would hide the bars


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
        rim = 0.8 if num_spans[span.row] <= 3 * _MOST_MARKS else 0.0
        _draw_span(ax, span, rows[span.row], colors, rim)
    zero = _first_order(timelines)
    for name, records in timelines.items():
        steps = [record for record in records if isinstance(record, RankStep)]
        if len(steps) > _MOST_MARKS:
            continue
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


# ---------------------------------------------------------------- the player


class RankPlayer(anywidget.AnyWidget):
    """The timelines of ranks with controls to play, pause, step and scrub.

    Attributes:
        step: number of the moment that is shown; each rank's changes make one.
        speed: moments per second, until the reader chooses another. Long ones take longer.
        theme: "light", "dark", or "auto": as the page around it.
        lines: the record of the ranks, as JSON.
    """

    step = traitlets.Int(0).tag(sync=True)
    views = traitlets.List(["ranks"]).tag(sync=True)
    speed = traitlets.Float(4.0).tag(sync=True)
    theme = traitlets.Enum(["auto", "light", "dark"], "auto").tag(sync=True)
    lines = traitlets.Bytes().tag(sync=True)

    def __init__(
        self, timelines: Timelines, colors: RequestColors, title: str = "", **options: Any
    ) -> None:
        self._esm = bundle("rank_player.js") + "\nexport default { render: renderRankWidget };\n"
        self._css = (WEB / "player.css").read_text(encoding="utf-8")
        self.picture = _still(timelines, colors, title)
        self.words = f"{len(timelines)} ranks, {_duration(timelines):.1f} ms"
        super().__init__(lines=_record(timelines, colors, title), **options)

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The widget, and what a notebook keeps of it for pages where no widget runs."""
        data, metadata = super()._repr_mimebundle_(**options) or ({}, {})
        return data | self.saved(), metadata

    def saved(self) -> dict[str, Any]:
        """The player as a notebook stores it, by MIME type: the picture of `draw_ranks`, and the
        record for pages that play it without a kernel."""
        ranks = deflate(self.lines)
        pictures = {"image/png": self.picture}
        if ranks is None:
            return pictures
        return pictures | {stored.RANKS: {"step": self.step, "speed": self.speed, "ranks": ranks}}

    def __repr__(self) -> str:
        return f"Player: {self.words}; run this cell in JupyterLab to play it"


def play_ranks(
    timelines: Timelines, *, colors: RequestColors | None = None, title: str = ""
) -> RankPlayer:
    """Show the timelines of `draw_ranks` in a player: the value of a notebook's cell.

    Args:
        timelines, colors: as in `draw_ranks`.

    Raises:
        ValueError: there are no records.
    """
    return RankPlayer(timelines, RequestColors() if colors is None else colors, title)


def _duration(timelines: Timelines) -> float:
    """Milliseconds until all ranks have answered."""
    return _milliseconds(max(span.end for span in rank_spans(timelines)))


def _still(timelines: Timelines, colors: RequestColors, title: str) -> bytes:
    ax = draw_ranks(timelines, colors=colors, title=title)
    picture = style.image_bytes(ax)
    plt.close(ax.get_figure(root=True))
    return picture


def _record(timelines: Timelines, colors: RequestColors, title: str) -> bytes:
    """What `trace/web/ranks.js` reads: the spans of each row, with requests by their place in a
    list of ids and of their numbers, which stand for colours."""
    spans = rank_spans(timelines)
    ids = list(dict.fromkeys(request_id for span in spans for request_id in span.tokens))
    places = {request_id: place for place, request_id in enumerate(ids)}
    for request_id in ids:
        colors[request_id]
    numbers = {request_id: number for number, request_id in enumerate(colors)}
    zero = _first_order(timelines)

    def shares(span: RankSpan) -> list[tuple[int, int]]:
        if span.kind != "compute":
            return []
        return [(places[request_id], count) for request_id, count in span.tokens.items()]

    rows = []
    for row in _rows(timelines):
        steps = [each for each in timelines.get(row, ()) if isinstance(each, RankStep)]
        rows.append(
            {
                "name": row,
                "isLink": row not in timelines,
                "spans": [
                    (span.kind, span.begin, span.end, span.step, shares(span))
                    for span in spans
                    if span.row == row
                ],
                "orders": [step.order - zero for step in steps],
                "answers": [step.answer - zero for step in steps],
            }
        )
    requests = [(request_id, numbers[request_id]) for request_id in ids]
    record = {"nanovllm_ranks": 1, "title": title, "requests": requests, "rows": rows}
    return json.dumps(record, separators=(",", ":")).encode()
