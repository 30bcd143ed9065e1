"""Pictures of prefill/decode disaggregation (lecture 31): blocks on their way, two engines on one clock, and what it is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator

from nanovllm.lab.viz import style
from nanovllm.lab.viz.data import PoolState, Span, request_ids, timeline_spans
from nanovllm.lab.viz.memory import draw_block
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, PALETTE, RequestColors
from nanovllm.trace.trace import Trace

_BLOCK = 0.84  # of the pitch of a row of blocks
_BAR = 0.66  # of the height of a request's row


def draw_crossing(
    producer: PoolState, consumer: PoolState, moved: Mapping[str, Sequence[tuple[int, int]]], title: str = ""
) -> Figure:
    """Two pools, one above the other, and the blocks that cross from one to the other.

    Args:
        moved: by request, pairs of a block there and a block here.
    """
    colors = RequestColors([*moved, *producer.tables, *consumer.tables])
    most = max(producer.num_blocks, consumer.num_blocks)
    figure, axes = plt.subplots(figsize=(style.MAX_WIDTH, 2.3))
    for top, name, state in ((0.0, "producer", producer), (2.6, "consumer", consumer)):
        axes.text(-0.3, top + _BLOCK / 2, name, ha="right", va="center", fontweight="bold")
        for block in range(state.num_blocks):
            owners = [colors[holder] for holder in state.holders(block)]
            filled = state.filled(block) if owners else 0
            draw_block(axes, block, top, _BLOCK, _BLOCK, filled, state.block_size, 4, owners or [FAINT])
            below = top + (1.05 if top else -0.2)
            axes.text(block + _BLOCK / 2, below, str(block), ha="center", va="center", fontsize=9, color=MUTED)
    for request_id, pairs in moved.items():
        for there, here in pairs:
            start, end = (there + _BLOCK / 2, _BLOCK + 0.06), (here + _BLOCK / 2, 2.54)
            for color, width in ((BACKGROUND, 3.6), (colors[request_id], 1.8)):  # a rim keeps crossing arrows apart
                look: dict[str, Any] = {"color": color, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
                axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, **look))
    handles = [Rectangle((0, 0), 1, 1, facecolor=colors[r], label=r) for r in moved]
    figure.legend(handles=handles, loc="outside lower center", ncols=6)
    axes.set(xlim=(-2.4, most), ylim=(3.8, -0.5), aspect="equal", title=title)
    axes.axis("off")
    return figure


@dataclass
class Clocked:
    """A trace, and when its clock said 0 on a clock that several engines share, in seconds."""

    trace: Trace
    began: float

    def spans(self, since: float) -> list[Span]:
        """What its requests did, in seconds since a moment on the shared clock."""
        shift = self.began - since
        spans = timeline_spans(self.trace, "time", merge=False)
        for span in spans:
            span.begin, span.end = span.begin + shift, span.end + shift
        return [span for span in spans if span.kind in ("prefill", "decode")]


def transfers_between(
    producer: Clocked, consumer: Clocked, fetched: Mapping[str, str], since: float = 0.0
) -> dict[str, tuple[float, float]]:
    """When the KV of each request was on its way: from the end of the producer's last step for it to the beginning of the
    consumer's first one.

    Args:
        fetched: the consumer's request id to the producer's.
    """
    ends = {span.request_id: span.end for span in producer.spans(since)}
    starts: dict[str, float] = {}
    for span in consumer.spans(since):
        starts.setdefault(span.request_id, span.begin)
    return {here: (ends[there], starts[here]) for here, there in fetched.items()}


def draw_engines(
    engines: Mapping[str, Clocked],
    since: float,
    fetched: Mapping[str, str] | None = None,
    end: float | None = None,
    title: str = "",
) -> Figure:
    """The timelines of several engines, one above the other, on one clock.

    Args:
        since: where the clock of the picture says 0.
        fetched: if the first engine computes for the second: the second's request ids to the first's.
        end: how many seconds to show.
    """
    fetched = fetched or {}
    rows = {name: request_ids(clocked.trace) for name, clocked in engines.items()}
    colors = RequestColors(r for ids in reversed(rows.values()) for r in ids if r not in fetched.values())
    figure, every = plt.subplots(
        len(engines),
        1,
        sharex=True,
        squeeze=False,
        figsize=(style.MAX_WIDTH, 0.9 + sum(0.5 + 0.3 * len(ids) for ids in rows.values())),
        height_ratios=[1 + len(ids) for ids in rows.values()],
    )
    owner = {there: here for here, there in fetched.items()}
    for axes, (name, clocked) in zip(every[:, 0], engines.items(), strict=True):
        for span in clocked.spans(since):
            color = colors[owner.get(span.request_id, span.request_id)]
            _bar(axes, span.begin, span.end, rows[name].index(span.request_id), span.kind, color)
        names = [f"for {owner[r]}" if r in owner else r for r in rows[name]]
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(axis="y", length=0)
        axes.set(ylim=(len(names) - 0.5, -0.5), title=name)
    if fetched:
        (above, below), first, second = every[:, 0], *engines.values()
        upper, lower = rows[next(iter(engines))], rows[list(engines)[1]]
        for here, (begin, stop) in transfers_between(first, second, fetched, since).items():
            _bar(below, begin, stop, lower.index(here), "transferred", colors[here])
            ends = (begin, upper.index(fetched[here]) + _BAR / 2), (begin, lower.index(here) - _BAR / 2)
            below.annotate(
                "",
                xy=ends[1],
                xycoords=below.transData,
                xytext=ends[0],
                textcoords=above.transData,
                arrowprops={"arrowstyle": "-|>", "color": colors[here], "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0},
                annotation_clip=False,
            )
    every[-1, 0].set_xlabel("seconds")
    last = max((span.end for clocked in engines.values() for span in clocked.spans(since)), default=1.0)
    every[-1, 0].set_xlim(0, end or last)
    style.legend(
        figure, {"prefill", "decode"} | ({"transferred"} if fetched else set()), transferred="its KV is on its way"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure


def _bar(axes: Axes, begin: float, end: float, row: int, kind: str, color: str) -> None:
    look = style.mark_style(kind, color)
    axes.add_patch(Rectangle((begin, row - _BAR / 2), max(end - begin, 1e-4), _BAR, linewidth=0.6, **look))


def draw_gaps(gaps: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """Every gap between two tokens as a tick, a row for each arrangement; the median and the 99th percentile are marked.

    Args:
        gaps: arrangement to seconds.
    """
    figure, axes = plt.subplots(figsize=(style.MAX_WIDTH, 0.9 + 0.55 * len(gaps)))
    for row, values in enumerate(gaps.values()):
        color = PALETTE[row % len(PALETTE)]
        axes.plot(values, [row] * len(values), "|", color=color, markersize=13, alpha=0.5)
        for share, mark in ((0.5, "o"), (0.99, "D")):
            at = quantile(values, share)
            axes.plot(at, row, mark, color=color, markeredgecolor=INK, markersize=7, zorder=3)
            if mark == "D":
                axes.text(at, row - 0.3, f"{1000 * at:.0f} ms", ha="center", va="bottom", fontsize=9)
    axes.set_xscale("log")
    _plain(axes.xaxis, 1000)
    axes.set_yticks(range(len(gaps)), list(gaps))
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="milliseconds from one token to the next", title=title, ylim=(len(gaps) - 0.5, -0.75))
    marks = [("o", "median"), ("D", "99th percentile")]
    handles = [Line2D([], [], marker=m, color=MUTED, linestyle="none", label=text) for m, text in marks]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _plain(axis: Any, factor: float = 1.0) -> None:
    """Powers of ten as plain numbers, in units of 1 / factor."""

    def text(value: float, _: object) -> str:
        value *= factor
        return f"{value:,.0f}" if value >= 1 else f"{value:g}"

    axis.set_major_formatter(FuncFormatter(text))
    axis.set_minor_locator(NullLocator())


def draw_crossover(
    tokens: Sequence[int],
    recompute: Sequence[float],
    transfers: Mapping[str, Sequence[float]],
    measured: Mapping[str, Sequence[tuple[int, float]]] | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Seconds by prompt length: to compute the KV, and to transfer it over each link. Where a link's line is above the
    other, transferring is slower than computing it again.

    Args:
        measured: name to pairs of tokens and seconds, drawn as points.
    """
    axes = ax or style.new_axes(3.8)
    axes.plot(tokens, recompute, color=INK, linewidth=3, label="compute again")
    for i, (name, seconds) in enumerate(transfers.items()):
        axes.plot(tokens, seconds, color=PALETTE[i % len(PALETTE)], label=name)
    for i, (name, points) in enumerate((measured or {}).items()):
        axes.plot(*zip(*points, strict=True), "os"[i % 2], color=(INK, PALETTE[0])[i % 2], label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="milliseconds", title=title)
    _plain(axes.xaxis)
    _plain(axes.yaxis, 1000)
    axes.grid()
    axes.legend(fontsize=9)
    return axes


def draw_split(shares: Mapping[str, Sequence[float]], num_engines: int, title: str = "") -> Figure:
    """What each division of a number of engines into producers and consumers achieves, a line for each workload.

    Args:
        shares: workload to a value (requests a second) for 1, 2, ... `num_engines - 1` producers.
    """
    axes = style.new_axes(3.4)
    splits = range(1, num_engines)
    for i, (name, values) in enumerate(shares.items()):
        best = max(range(len(values)), key=lambda k: values[k])
        color = PALETTE[i]
        axes.plot(splits, values, "o-", color=color, label=name)
        axes.plot(splits[best], values[best], "o", color=color, markersize=13, fillstyle="none")
    axes.set_xticks(list(splits), [f"{p}P {num_engines - p}D" for p in splits])
    axes.set(ylabel="requests a second", title=title, ylim=(0, None))
    axes.grid(axis="y")
    axes.legend()
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    return figure
