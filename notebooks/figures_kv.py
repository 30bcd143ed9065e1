"""The drawings of lectures 31 and 32. Each function makes one picture; the lectures say what it shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from figures_parallel import arrow, box, curves
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanovllm.lab.viz import PoolState, RequestColors, percentile, request_ids, style, timeline_spans
from nanovllm.lab.viz.data import Span
from nanovllm.lab.viz.style import BACKGROUND, INK, MUTED, PALETTE, pale
from nanovllm.trace.trace import Trace


def draw_crossing(producer: PoolState, consumer: PoolState, moved: Sequence[tuple[int, int]], title: str) -> Figure:
    """Two pools, one above the other, and the pairs of blocks (there, here) that cross from one to the other."""
    figure, ax = plt.subplots(figsize=(9, 2.3))
    for y, name, state in ((0.0, "producer", producer), (2.6, "consumer", consumer)):
        ax.text(-0.3, y + 0.4, name, ha="right", va="center", fontweight="bold")
        for block in range(state.num_blocks):
            box(ax, block, y, 0.84, 0.84)
            ax.add_patch(
                plt.Rectangle((block, y), 0.84 * state.filled(block) / state.block_size, 0.84, color=PALETTE[0])
            )
            ax.text(block + 0.42, y + (1.4 if y else -0.2), str(block), ha="center", fontsize=9, color=MUTED)
    for there, here in moved:
        arrow(ax, (there + 0.42, 0.9), (here + 0.42, 2.54))
    ax.set(xlim=(-2.4, producer.num_blocks), ylim=(3.8, -0.5), aspect="equal", title=title)
    ax.axis("off")
    return figure


@dataclass
class Clocked:
    """A trace, and when its clock said 0 on a clock that several engines share, in seconds."""

    trace: Trace
    began: float

    def spans(self, since: float = 0.0) -> list[Span]:
        """What its requests computed, in seconds since a moment on the shared clock."""
        spans = [s for s in timeline_spans(self.trace, "time", merge=False) if s.kind in ("prefill", "decode")]
        for span in spans:
            span.begin, span.end = span.begin + self.began - since, span.end + self.began - since
        return spans


def transfers_between(
    producer: Clocked, consumer: Clocked, fetched: Mapping[str, str], since: float = 0.0
) -> dict[str, tuple[float, float]]:
    """From the end of the producer's last step for a request to the beginning of the consumer's first one.

    Args:
        fetched: the consumer's request id to the producer's.
    """
    ends = {span.request_id: span.end for span in producer.spans(since)}
    starts = {span.request_id: span.begin for span in reversed(consumer.spans(since))}
    return {here: (ends[there], starts[here]) for here, there in fetched.items()}


def draw_engines(engines: Mapping[str, Clocked], since: float, fetched: Mapping[str, str]) -> Figure:
    """The timelines of a producer and a consumer on one clock, which says 0 at `since`; `fetched` as above."""
    rows = {name: request_ids(clocked.trace) for name, clocked in engines.items()}
    owner = {there: here for here, there in fetched.items()}
    colors = RequestColors(r for ids in reversed(rows.values()) for r in ids if r not in owner)
    size = (9, 0.9 + sum(0.5 + 0.3 * len(ids) for ids in rows.values()))
    heights = [1 + len(ids) for ids in rows.values()]
    figure, both = plt.subplots(2, 1, sharex=True, figsize=size, height_ratios=heights)
    arrivals = transfers_between(*engines.values(), fetched, since)
    for ax, (name, clocked) in zip(both, engines.items(), strict=True):
        spans = [(span.request_id, span.kind, span.begin, span.end) for span in clocked.spans(since)]
        if ax is both[-1]:
            spans += [(request_id, "transferred", *span) for request_id, span in arrivals.items()]
        for request_id, kind, begin, end in spans:
            look = style.mark_style(kind, colors[owner.get(request_id, request_id)])
            ax.add_patch(plt.Rectangle((begin, rows[name].index(request_id) - 0.33), end - begin, 0.66, **look))
        ax.set_yticks(range(len(rows[name])), [f"for {owner[r]}" if r in owner else r for r in rows[name]])
        ax.set(ylim=(len(rows[name]) - 0.5, -0.5), title=name)
    both[-1].set(
        xlabel="seconds", xlim=(0, max(span.end for clocked in engines.values() for span in clocked.spans(since)))
    )
    style.legend(figure, ("prefill", "decode", "transferred"), transferred="its KV is on its way")
    return figure


def draw_gaps(gaps: Mapping[str, Sequence[float]], title: str) -> Figure:
    """Every gap between two tokens as a tick, a row per arrangement; a circle is the median, a diamond the 99th percentile."""
    figure, ax = plt.subplots(figsize=(9, 0.9 + 0.55 * len(gaps)))
    for row, (color, values) in enumerate(zip(PALETTE, gaps.values(), strict=False)):
        ax.plot(values, [row] * len(values), "|", color=color, markersize=13, alpha=0.5)
        ax.plot(percentile(values, 50), row, "o", color=color, markeredgecolor=INK)
        ax.plot(percentile(values, 99), row, "D", color=color, markeredgecolor=INK)
        ax.text(percentile(values, 99), row - 0.3, f"{1000 * percentile(values, 99):.0f} ms", ha="center", fontsize=9)
    ax.set_yticks(range(len(gaps)), list(gaps))
    ax.set(xlabel="seconds from one token to the next", xscale="log", title=title, ylim=(len(gaps) - 0.5, -0.75))
    return figure


def draw_lengths(
    ax: Axes,
    lengths: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    measured: Mapping[str, Sequence[tuple[int, float]]],
    title: str,
    crossings: Sequence[float] = (),
) -> None:
    """Seconds by the length of a prefix: computed again (the first line) and fetched. What was measured are points, in the
    order of the lines; dotted: from which length on fetching is faster."""
    curves(
        ax,
        {name: (lengths, seconds) for name, seconds in lines.items()},
        title=title,
        xlabel="tokens",
        ylabel="seconds",
    )
    for color, (name, points) in zip(PALETTE, measured.items(), strict=False):
        ax.plot(*zip(*points, strict=True), "o", color=color, label=name)
    for length in crossings:
        ax.axvline(length, color=MUTED, linewidth=1, linestyle=":")
    ax.legend(fontsize=9)


def draw_split(shares: Mapping[str, Sequence[float]], num_engines: int, title: str) -> Figure:
    """Requests per second for 1, 2, ... `num_engines - 1` producers, a line per workload; the best is ringed."""
    figure, ax = plt.subplots(figsize=(9, 3.4))
    splits = range(1, num_engines)
    lines = {name: (splits, values) for name, values in shares.items()}
    curves(ax, lines, "o-", xscale="linear", yscale="linear", ylabel="requests per second", title=title, ylim=(0, None))
    for values in shares.values():
        ax.plot(1 + int(np.argmax(values)), max(values), "o", color=INK, markersize=13, fillstyle="none")
    ax.set_xticks(splits, [f"{p}P {num_engines - p}D" for p in splits])
    ax.legend()
    return figure


# ---------------------------------------------------------------- lecture 32


def draw_places(places: Mapping[str, Sequence[str]], moves: Mapping[str, Sequence[tuple]], title: str) -> Figure:
    """Places one below the other, with the blocks in their slots ("A0" is block 0 of text A), and how blocks move.

    Args:
        moves: kind of move to pairs of a start and an end, each a place and a slot.
    """
    figure, ax = plt.subplots(figsize=(9, 3.9))
    rows = {name: 1.75 * i for i, name in enumerate(places)}
    for name, slots in places.items():
        ax.text(-0.35, rows[name] + 0.42, name, ha="right", va="center", fontweight="bold")
        for slot, block in enumerate(slots):
            box(ax, slot, rows[name], 0.84, 0.84, block, pale(PALETTE["ABC".index(block[0])]) if block else BACKGROUND)
    for style_, (kind, pairs) in zip(("-", "--", ":"), moves.items(), strict=False):
        ax.plot([], [], style_, color=INK, label=kind)
        for (above, here), (below, there) in pairs:
            down = rows[below] > rows[above]
            start, end = rows[above] + (0.88 if down else -0.04), rows[below] + (-0.04 if down else 0.88)
            look = {"arrowstyle": "-|>", "color": INK, "linestyle": style_, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (there + 0.42, end), (here + 0.42, start), arrowprops=look)
    figure.legend(loc="outside lower center", ncols=3)
    ax.set(xlim=(-3.2, max(map(len, places.values()))), ylim=(1.75 * len(places), -0.2), aspect="equal", title=title)
    ax.axis("off")
    return figure


def draw_presence(
    presence: Mapping[str, np.ndarray], asked: Sequence[int], served: Sequence[Mapping[str, float]], title: str
) -> Figure:
    """Which document is where, question by question.

    Args:
        presence: place to `[num_documents, num_questions]`: the share of a document that is there before the question.
        asked: the document of each question.
        served: of each question, what each place gave; what none gave was computed.
    """
    num_documents = len(next(iter(presence.values())))
    size = (9, 0.6 + len(presence) * (0.35 + 0.17 * num_documents))
    figure, every = plt.subplots(len(presence), 1, sharex=True, figsize=size)
    names = "ABCDEFGH"[:num_documents]
    for ax, (place, shares) in zip(every, presence.items(), strict=True):
        for (document, turn), share in np.ndenumerate(shares):
            ax.barh(document, 0.9 * share, left=turn, height=0.8, color=PALETTE[document % 6])
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


def draw_deviation(deviation: np.ndarray, bounds: Sequence[int], selected: Sequence[int], title: str) -> Figure:
    """How far reused keys and values are from fresh ones, token by token and layer by layer, and which tokens a blend chose.

    Args:
        deviation: `[num_layers, num_tokens]`, relative to the layer's mean squared length; eight layers are drawn.
        bounds: where each chunk begins, and the end of the last.
    """
    rows = np.linspace(1, len(deviation) - 1, 8).round().astype(int)
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, height_ratios=[3, 1.2], figsize=(9, 3.9))
    image = upper.imshow(np.log10(np.maximum(deviation[rows], 1e-4)), aspect="auto", cmap="magma_r", vmin=-3, vmax=0.5)
    figure.colorbar(image, ax=upper, pad=0.01, label="log₁₀")
    upper.set_yticks(range(len(rows)), [f"layer {row}" for row in rows], fontsize=9)
    colors = np.where(np.isin(np.arange(len(deviation[1])), selected), PALETTE[1], MUTED)
    lower.bar(range(len(colors)), deviation[1], width=1.0, color=colors)
    lower.set(
        yscale="log", ylabel="layer 1", xlabel="token of the documents (orange: computed in all layers, grey: reused)"
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
    """What computing a share of the tokens costs (seconds, relative to computing all), and what it buys.

    Args:
        quality: name to shares and the values of `label` there.
    """
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.3))
    linear = {"xscale": "linear", "yscale": "linear", "ylim": (0, None), "xlabel": "share of tokens that are computed"}
    curves(
        axes[0],
        {name: (ratios, v) for name, v in seconds.items()},
        "o-",
        ylabel="TTFT, of computing everything",
        **linear,
    )
    curves(axes[1], quality, "o-", ylabel=label, **linear)
    for ax in axes:
        ax.legend(fontsize=9)
    figure.suptitle(title)
    return figure
