"""The drawings of lectures 31 and 32. Each function makes one picture; the lectures say what it
shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from figures_parallel import arrow, box, curves
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from nanovllm.lab.viz import (
    PoolState,
    RequestColors,
    percentile,
    request_ids,
    style,
    timeline_spans,
)
from nanovllm.lab.viz.data import Span
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, PALETTE, pale, request_color
from nanovllm.trace.trace import Trace


def draw_crossing(
    producer: PoolState, consumer: PoolState, moved: Sequence[tuple[int, int]], title: str
) -> Figure:
    """Two pools, one above the other, and the pairs of blocks (there, here) that cross from one to
    the other."""
    figure, ax = plt.subplots(figsize=(9, 2.4))
    for y, name, state in ((0.0, "producer", producer), (2.6, "consumer", consumer)):
        ax.text(-0.3, y + 0.4, name, ha="right", va="center", fontweight="bold")
        for block in range(state.num_blocks):
            box(ax, block, y, 0.84, 0.84)
            if width := 0.84 * state.filled(block) / state.block_size:
                ax.add_patch(plt.Rectangle((block, y), width, 0.84, color=PALETTE[0]))
            ax.text(
                block + 0.42,
                y + (1.4 if y else -0.2),
                str(block),
                ha="center",
                fontsize=9,
                color=MUTED,
            )
    for there, here in moved:
        arrow(ax, (there + 0.42, 0.9), (here + 0.42, 2.54))
    ax.set(xlim=(-2.4, producer.num_blocks), ylim=(4.2, -0.9), aspect="equal", title=title)
    ax.axis("off")
    return figure


def draw_stages(next_stage: Mapping[tuple[str, str], str]) -> Figure:
    """A state machine: a box per stage, an arrow per pair of stages, with the events that lead from
    one to the other.

    Args:
        next_stage: a stage and an event to the stage that follows. The first stage begins it.
    """
    events: dict[tuple[str, str], list[str]] = {}
    for (stage, event), following in next_stage.items():
        events.setdefault((stage, following), []).append(event)
    column = {
        next(iter(next_stage))[0]: 0
    }  # the longest way to a stage; the table has no circle but of a stage to itself
    for _ in next_stage:
        for stage, following in events:
            if stage != following:
                column[following] = max(column.get(following, 0), column.get(stage, 0) + 1)
    places = {}
    for stage, x in column.items():
        peers = [other for other, at in column.items() if at == x]
        places[stage] = (2.6 * x, 1.5 * (peers.index(stage) - (len(peers) - 1) / 2))
    ends = set(column) - {stage for stage, _ in next_stage}
    figure, ax = plt.subplots(figsize=(9, 3.6))
    for stage, (x, y) in places.items():
        fill = FAINT if stage in ends else pale(PALETTE[0])
        ax.text(
            x,
            y,
            stage,
            ha="center",
            va="center",
            bbox={"boxstyle": "round,pad=0.5", "fc": fill, "ec": MUTED},
        )
    for (stage, following), names in events.items():
        (x, y), (to_x, to_y) = places[stage], places[following]
        bend = (
            -0.42 if column[following] - column[stage] > 2 else 0.0
        )  # over the boxes between them
        look = {
            "arrowstyle": "-|>",
            "color": INK,
            "connectionstyle": f"arc3,rad={bend}",
            "shrinkA": 0,
            "shrinkB": 0,
        }
        middle = ((x + to_x) / 2, (y + to_y) / 2 + (bend / 2 * (to_x - x) - 0.26 if bend else 0))
        if stage == following:
            look["connectionstyle"] = "arc3,rad=1.6"
            ax.annotate("", (x + 0.3, y + 0.26), (x - 0.3, y + 0.26), arrowprops=look)
            middle = (x, y + 0.75)
        else:
            edge, to_edge = (
                0.2 + 0.035 * len(name) for name in (stage, following)
            )  # half a box, and a little
            start, end = (x + edge, y), (to_x - to_edge, to_y)
            if bend:
                start, end = (x + 0.2, y - 0.26), (to_x - 0.1, to_y - 0.26)
            ax.annotate("", end, start, arrowprops=look)
        label = {"ha": "center", "va": "center", "fontsize": 10, "style": "italic"}
        ax.text(
            *middle, "\n".join(names), **label, bbox={"fc": BACKGROUND, "ec": "none", "pad": 1.5}
        )
    ax.set(xlim=(-0.8, 2.6 * max(column.values()) + 0.8), ylim=(1.6, -2.2))
    ax.axis("off")
    return figure


@dataclass
class Clocked:
    """A trace, and when its clock said 0 on a clock that several engines share, in seconds."""

    trace: Trace
    began: float

    def spans(self, since: float = 0.0) -> list[Span]:
        """What its requests computed, in seconds since a moment on the shared clock."""
        spans = [
            s
            for s in timeline_spans(self.trace, "time", merge=False)
            if s.kind in ("prefill", "decode")
        ]
        for span in spans:
            span.begin, span.end = span.begin + self.began - since, span.end + self.began - since
        return spans


def transfers_between(
    producer: Clocked, consumer: Clocked, fetched: Mapping[str, str], since: float = 0.0
) -> dict[str, tuple[float, float]]:
    """From the end of the producer's last step for a request to the beginning of the consumer's
    first one.

    Args:
        fetched: the consumer's request id to the producer's.
    """
    ends = {span.request_id: span.end for span in producer.spans(since)}
    starts = {span.request_id: span.begin for span in reversed(consumer.spans(since))}
    return {here: (ends[there], starts[here]) for here, there in fetched.items()}


def draw_engines(
    engines: Mapping[str, Clocked], since: float, fetched: Mapping[str, str]
) -> Figure:
    """The timelines of a producer and a consumer on one clock, which says 0 at `since`; `fetched`
    as above."""
    rows = {name: request_ids(clocked.trace) for name, clocked in engines.items()}
    owner = {there: here for here, there in fetched.items()}
    colors = RequestColors(r for ids in reversed(rows.values()) for r in ids if r not in owner)
    size = (9, 0.9 + sum(0.5 + 0.3 * len(ids) for ids in rows.values()))
    heights = [1 + len(ids) for ids in rows.values()]
    figure, both = plt.subplots(2, 1, sharex=True, figsize=size, height_ratios=heights)
    arrivals = transfers_between(*engines.values(), fetched, since)
    for ax, (name, clocked) in zip(both, engines.items(), strict=True):
        spans = [
            (span.request_id, span.kind, span.begin, span.end) for span in clocked.spans(since)
        ]
        if ax is both[-1]:
            spans += [(request_id, "transferred", *span) for request_id, span in arrivals.items()]
        for request_id, kind, begin, end in spans:
            look = style.mark_style(kind, colors[owner.get(request_id, request_id)])
            ax.add_patch(
                plt.Rectangle(
                    (begin, rows[name].index(request_id) - 0.33), end - begin, 0.66, **look
                )
            )
        ax.set_yticks(
            range(len(rows[name])), [f"for {owner[r]}" if r in owner else r for r in rows[name]]
        )
        ax.set(ylim=(len(rows[name]) - 0.5, -0.5), title=name)
    last = max(span.end for clocked in engines.values() for span in clocked.spans(since))
    both[-1].set(xlabel="seconds", xlim=(0, 1.02 * last))
    style.legend(figure, ("prefill", "decode", "transferred"), transferred="its KV is on its way")
    return figure


def round_ticks(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 times a power of ten: a logarithmic axis over one decade would have a
    single one."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def draw_gaps(gaps: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Every gap between two tokens as a tick, a row per arrangement; a circle is the median, a
    diamond the 99th percentile."""
    label = "seconds from one token to the next (● median, ◆ 99th percentile)"
    figure, ax = plt.subplots(figsize=(9, 0.9 + 0.55 * len(gaps)))
    for row, values in enumerate(gaps.values()):
        color = request_color(row)
        ax.plot(values, [row] * len(values), "|", color=color, markersize=13, alpha=0.5)
        ax.plot(percentile(values, 50), row, "o", color=color, markeredgecolor=INK)
        ax.plot(percentile(values, 99), row, "D", color=color, markeredgecolor=INK)
        ax.text(
            percentile(values, 99),
            row - 0.3,
            f"{1000 * percentile(values, 99):.0f} ms",
            ha="center",
            fontsize=9,
        )
    ax.set_yticks(range(len(gaps)), list(gaps))
    ax.set(xlabel=label, xscale="log", title=title, ylim=(len(gaps) - 0.5, -0.75))
    ax.margins(x=0.1)  # for the values above the diamonds
    round_ticks(ax.xaxis)
    return figure


def draw_lengths(
    ax: Axes,
    lengths: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    measured: Mapping[str, Sequence[tuple[int, float]]],
    title: str,
    crossings: Sequence[float] = (),
) -> None:
    """Seconds by the length of a prefix: computed again (the first line) and fetched. What was
    measured are points, in the order of the lines; dotted: from which length on fetching is faster.
    """
    every = {name: (lengths, seconds) for name, seconds in lines.items()}
    curves(ax, every, title=title, xlabel="tokens of the prefix", ylabel="seconds")
    for row, (name, points) in enumerate(measured.items()):
        ax.plot(
            *zip(*points, strict=True),
            "o",
            color=request_color(row),
            label=None if name in lines else name,
        )
    for length in crossings:
        if lengths[0] < length < lengths[-1]:
            ax.axvline(length, color=MUTED, linewidth=1, linestyle=":")
    ticks = [
        2**k
        for k in range(4, 20, 2 if lengths[-1] > 8192 else 1)
        if lengths[0] <= 2**k <= lengths[-1]
    ]
    ax.set_xticks(ticks, [f"{n // 1024}K" if n >= 1024 else n for n in ticks])
    ax.xaxis.set_minor_formatter(NullFormatter())
    if ax.get_ylim()[1] < 100 * ax.get_ylim()[0]:
        round_ticks(ax.yaxis)
    ax.legend(fontsize=9)


def draw_split(shares: Mapping[str, Sequence[float]], num_engines: int, title: str) -> Figure:
    """Requests per second for 1, 2, ... `num_engines - 1` producers, a line per workload; the best
    is ringed."""
    figure, ax = plt.subplots(figsize=(9, 3.4))
    splits = range(1, num_engines)
    lines = {name: (splits, values) for name, values in shares.items()}
    curves(
        ax,
        lines,
        "o-",
        xscale="linear",
        yscale="linear",
        ylabel="requests per second",
        title=title,
        ylim=(0, None),
    )
    for values in shares.values():
        ax.plot(
            1 + int(np.argmax(values)), max(values), "o", color=INK, markersize=13, fillstyle="none"
        )
    ax.set_xticks(splits, [f"{p}P {num_engines - p}D" for p in splits])
    figure.legend(loc="outside lower center", ncols=len(shares))
    return figure


# ---------------------------------------------------------------- lecture 32


def draw_places(
    places: Mapping[str, Sequence[str]], moves: Mapping[str, Sequence[tuple]], title: str
) -> Figure:
    """Places one below the other, with the blocks in their slots ("A0" is block 0 of text A; a
    second line in a slot says what it held before), and how blocks move.

    Args:
        moves: kind of move to pairs of a start and an end, each a place and a slot.
    """
    figure, ax = plt.subplots(figsize=(9, 3.9))
    rows = {name: 1.75 * i for i, name in enumerate(places)}
    for name, slots in places.items():
        ax.text(-0.35, rows[name] + 0.42, name, ha="right", va="center", fontweight="bold")
        for slot, block in enumerate(slots):
            box(
                ax,
                slot,
                rows[name],
                0.84,
                0.84,
                block,
                pale(PALETTE["ABC".index(block[0])]) if block else BACKGROUND,
            )
    for style_, (kind, pairs) in zip(("-", "--", ":")[: len(moves)], moves.items(), strict=True):
        ax.plot([], [], style_, color=INK, label=kind)
        for (above, here), (below, there) in pairs:
            down = rows[below] > rows[above]
            start, end = (
                rows[above] + (0.88 if down else -0.04),
                rows[below] + (-0.04 if down else 0.88),
            )
            look = {
                "arrowstyle": "-|>",
                "color": INK,
                "linestyle": style_,
                "shrinkA": 0,
                "shrinkB": 0,
            }
            ax.annotate("", (there + 0.42, end), (here + 0.42, start), arrowprops=look)
    figure.legend(loc="outside lower center", ncols=3)
    ax.set(
        xlim=(-3.2, max(map(len, places.values()))),
        ylim=(1.75 * len(places), -0.2),
        aspect="equal",
        title=title,
    )
    ax.axis("off")
    return figure


def draw_presence(
    presence: Mapping[str, np.ndarray],
    asked: Sequence[int],
    served: Sequence[Mapping[str, float]],
    title: str,
) -> Figure:
    """Which document is where, question by question.

    Args:
        presence: place to `[num_documents, num_questions]`: the share of a document that is there
            before the question.
        asked: the document of each question.
        served: of each question, what each place gave; what none gave was computed.
    """
    num_documents = len(next(iter(presence.values())))
    size = (9, 0.6 + len(presence) * (0.35 + 0.17 * num_documents))
    figure, every = plt.subplots(len(presence), 1, sharex=True, figsize=size)
    names = "ABCDEFGH"[:num_documents]
    for ax, (place, shares) in zip(every, presence.items(), strict=True):
        for (document, turn), share in np.ndenumerate(shares):
            ax.barh(document, 0.9 * share, left=turn, height=0.8, color=request_color(document))
        for turn, (document, given) in enumerate(zip(asked, served, strict=True)):
            if given.get(place):
                ax.plot(turn + 0.45, document, "o", color=BACKGROUND, markeredgecolor=INK)
            elif not any(given.values()) and ax is every[0]:
                ax.plot(turn + 0.45, document, "x", color=INK)
        ax.set_yticks(range(num_documents), names, fontsize=9)
        ax.set(xlim=(0, len(asked)), ylim=(num_documents - 0.5, -0.5), title=place)
    every[-1].set_xticks(np.arange(len(asked)) + 0.45, [names[i] for i in asked], fontsize=9)
    every[-1].set_xlabel("asked about   (○ comes from here · × computed)")
    figure.suptitle(title)
    return figure


def draw_deviation(
    deviation: np.ndarray, bounds: Sequence[int], selected: Sequence[int], title: str
) -> Figure:
    """How far reused keys and values are from fresh ones, token by token and layer by layer, and
    which tokens a blend chose.

    Args:
        deviation: `[num_layers, num_tokens]`, relative to the layer's mean squared length; eight
            layers are drawn.
        bounds: where each chunk begins, and the end of the last.
    """
    rows = np.linspace(1, len(deviation) - 1, 8).round().astype(int)
    figure, (upper, lower) = plt.subplots(
        2, 1, sharex=True, height_ratios=[3, 1.2], figsize=(9, 3.9)
    )
    image = upper.imshow(
        np.log10(np.maximum(deviation[rows], 1e-4)),
        aspect="auto",
        cmap="magma_r",
        vmin=-3,
        vmax=0.5,
    )
    figure.colorbar(image, ax=upper, pad=0.01, label="deviation, log₁₀")
    upper.set_yticks(range(len(rows)), [f"layer {row}" for row in rows], fontsize=9)
    colors = np.where(np.isin(np.arange(len(deviation[1])), selected), PALETTE[1], MUTED)
    lower.bar(range(len(colors)), deviation[1], width=1.0, color=colors)
    lower.set(
        yscale="log",
        ylabel="deviation\nin layer 1",
        xlabel="token of the documents (orange: computed in all layers, grey: reused)",
    )
    for bound in bounds[1:-1]:
        upper.axvline(bound - 0.5, color=INK, linewidth=1)
    figure.suptitle(title)
    return figure


def draw_trade(
    ratios: Sequence[float],
    seconds: Mapping[str, Sequence[float]],
    quality: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    label: str,
    title: str,
) -> Figure:
    """What computing a share of the reused tokens again costs (seconds, relative to computing all),
    and what it buys.

    Args:
        quality: name to shares and the values of `label` there.
    """
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.3))
    linear = {
        "xscale": "linear",
        "yscale": "linear",
        "ylim": (0, None),
        "xlabel": "share of reused tokens that are computed again",
    }
    curves(
        axes[0],
        {name: (ratios, v) for name, v in seconds.items()},
        "o-",
        ylabel="TTFT / TTFT of computing all",
        **linear,
    )
    curves(axes[1], quality, "o-", ylabel=label, **linear)
    for ax in axes:
        ax.legend(fontsize=9)
    figure.suptitle(title)
    return figure
