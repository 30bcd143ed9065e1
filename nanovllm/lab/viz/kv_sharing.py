"""Pictures of KV that outlives its request (lecture 32): tiers, what a hit is worth, and blended chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from nanovllm.lab.viz import style
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, PALETTE, RequestColors, ink_on, pale

# What moves a block from one place to another, and how its arrow is drawn.
MOVES: dict[str, dict[str, Any]] = {
    "saved when full": {"linestyle": "-", "arrowstyle": "-|>"},
    "spilled": {"linestyle": ":", "arrowstyle": "-|>"},
    "loaded on a hit": {"linestyle": "--", "arrowstyle": "-|>"},
}


@dataclass(frozen=True)
class Move:
    """A block goes from one place to another.

    Attributes:
        kind: one of `MOVES`.
        start, end: name of the place, and the slot in it.
    """

    kind: str
    start: tuple[str, int]
    end: tuple[str, int]


def draw_places(
    places: Mapping[str, Sequence[str]], moves: Sequence[Move] = (), title: str = "", note: str = ""
) -> Figure:
    """Places one below the other, the fastest on top, with the blocks that lie in their slots, and where they move.

    Args:
        places: name to what lies in each slot: a letter for its text and a number, as "A0"; "" for an empty slot.
        note: below the picture.
    """
    colors = RequestColors(sorted({block[0] for slots in places.values() for block in slots if block}))
    rows = {name: 1.75 * i for i, name in enumerate(places)}
    most = max(map(len, places.values()))
    figure, axes = plt.subplots(figsize=(style.MAX_WIDTH, 0.9 + 1.0 * len(places)))
    for name, slots in places.items():
        y = rows[name]
        axes.text(-0.35, y + 0.42, name, ha="right", va="center", fontweight="bold")
        for slot, block in enumerate(slots):
            color = colors[block[0]] if block else BACKGROUND
            edge = color if block else MUTED
            axes.add_patch(Rectangle((slot, y), 0.84, 0.84, facecolor=color, edgecolor=edge, linewidth=1.0))
            axes.text(slot + 0.42, y + 0.42, block, ha="center", va="center", fontsize=10, color=ink_on(color))
    for move in moves:
        (above, here), (below, there) = move.start, move.end
        down = rows[below] > rows[above]
        start = (here + (0.28 if down else 0.56), rows[above] + (0.88 if down else -0.04))
        end = (there + (0.28 if down else 0.56), rows[below] + (-0.04 if down else 0.88))
        look: dict[str, Any] = {"color": INK, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}
        axes.add_patch(FancyArrowPatch(start, end, **look, **MOVES[move.kind]))
    handles = [
        plt.Line2D([], [], color=INK, linewidth=1.4, linestyle=MOVES[kind]["linestyle"], label=kind)
        for kind in MOVES
        if kind in {move.kind for move in moves}
    ]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    if note:
        axes.text(0, 1.75 * len(places) - 0.35, note, fontsize=9, color=MUTED, va="center")
    bottom = 1.75 * len(places) - (0.0 if note else 0.75)
    axes.set(xlim=(-3.2, most), ylim=(bottom, -0.2), aspect="equal", title=title)
    axes.axis("off")
    return figure


def draw_presence(
    presence: Mapping[str, np.ndarray], asked: Sequence[int], served: Sequence[Mapping[str, float]], title: str = ""
) -> Figure:
    """Which document lies where, question by question.

    Args:
        presence: place to `[num_documents, num_questions]`: the share of a document that lies there before the question.
        asked: the document of each question.
        served: of each question, the share of its document that each place gave; what none gave was computed.
    """
    num_documents = len(next(iter(presence.values())))
    colors = RequestColors(map(str, range(num_documents)))
    height = 0.6 + len(presence) * (0.35 + 0.17 * num_documents)
    figure, every = plt.subplots(len(presence), 1, sharex=True, squeeze=False, figsize=(style.MAX_WIDTH, height))
    for axes, (name, shares) in zip(every[:, 0], presence.items(), strict=True):
        for document, row in enumerate(shares):
            for turn, share in enumerate(row):
                if share:
                    size = 0.84 * share
                    box = Rectangle((turn, document + 0.92 - size), 0.9, size, facecolor=colors[str(document)])
                    axes.add_patch(box)
        for turn, (document, given) in enumerate(zip(asked, served, strict=True)):
            if given.get(name):
                axes.plot(turn + 0.45, document + 0.5, "o", color=BACKGROUND, markeredgecolor=INK, markersize=6)
            elif not any(given.values()) and name == next(iter(presence)):
                axes.plot(turn + 0.45, document + 0.5, "x", color=INK, markersize=6)
        axes.set_yticks(np.arange(num_documents) + 0.5, [chr(65 + i) for i in range(num_documents)], fontsize=9)
        axes.set(xlim=(0, len(asked)), ylim=(num_documents, 0))
        axes.set_title(name, loc="left", fontsize=10)
        axes.tick_params(length=0)
        axes.set_facecolor("#fafafa")
    every[-1, 0].set_xticks(np.arange(len(asked)) + 0.45, [chr(65 + i) for i in asked], fontsize=9)
    every[-1, 0].set_xlabel("asked about   (○ comes from here · × computed)")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure


def draw_hit_rates(
    measured: Mapping[str, float], predicted: Mapping[str, float], ttfts: Mapping[str, float], title: str = ""
) -> Figure:
    """Hit rates, predicted and measured, and the mean time to first token; a row an arrangement.

    Args:
        measured, predicted: arrangement to the share of prompt tokens that were not computed.
        ttfts: arrangement to seconds.
    """
    figure, (left, right) = plt.subplots(
        1, 2, sharey=True, width_ratios=[3, 2], figsize=(style.MAX_WIDTH, 0.9 + 0.55 * len(measured))
    )
    for row, name in enumerate(measured):
        left.barh(row, measured[name], height=0.56, color=PALETTE[0])
        left.text(measured[name] + 0.01, row, f"{measured[name]:.0%}", va="center", fontsize=9)
        left.plot([predicted[name]] * 2, [row - 0.36, row + 0.36], color=INK, linewidth=2)
        right.barh(row, 1000 * ttfts[name], height=0.56, color=PALETTE[1])
        right.text(1000 * ttfts[name], row, f" {1000 * ttfts[name]:.0f}", va="center", fontsize=9)
    left.set_yticks(range(len(measured)), list(measured))
    left.tick_params(axis="y", length=0)
    left.set(xlim=(0, 1.1), ylim=(len(measured) - 0.5, -0.5), xlabel="prompt tokens not computed  (line: predicted)")
    left.xaxis.set_major_formatter(PercentFormatter(1.0, 0))
    right.set(xlabel="mean time to first token, ms", xlim=(0, 1250 * max(ttfts.values())))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure


def draw_crossings(
    lengths: Sequence[int],
    lines: Mapping[str, Sequence[float]],
    measured: Mapping[str, Sequence[float]] | None = None,
    crossings: Mapping[str, float] | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Seconds to the first token by the length of a prefix: computed again (the first line, black), and fetched.

    Args:
        lines: name to what was predicted for each length.
        measured: the same, as it was measured, drawn as points.
        crossings: name to the length from which on fetching is predicted to be faster; marked on the first line.
    """
    axes = ax or style.new_axes(3.8)
    first = next(iter(lines))
    looks = {name: INK if name == first else PALETTE[(i - 1) % len(PALETTE)] for i, name in enumerate(lines)}
    for name, seconds in lines.items():
        axes.plot(lengths, seconds, color=looks[name], linewidth=3 if name == first else 1.6, label=name)
        if measured and name in measured:
            axes.plot(lengths, measured[name], "o", color=looks[name], markersize=5)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prefix", ylabel="milliseconds", title=title)
    for name, length in (crossings or {}).items():
        if lengths[0] <= length <= lengths[-1]:
            axes.axvline(length, color=looks[name], linewidth=1, linestyle=":")
    if len(lengths) <= 8:
        axes.set_xticks(list(lengths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{1000 * value:,.4g}"))
    low, high = axes.get_ylim()
    if high < 100 * low:  # powers of ten alone would be too few
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid()
    axes.legend(fontsize=9)
    return axes


def draw_deviation(
    deviation: np.ndarray, bounds: Sequence[int], selected: Sequence[int], num_layers: int = 8, title: str = ""
) -> Figure:
    """How far reused keys and values are from fresh ones, token by token and layer by layer, and which tokens a blend chose.

    Args:
        deviation: `[num_layers, num_tokens]`, relative to the layer's mean squared length.
        bounds: where each chunk begins, and the end of the last.
        selected: the tokens that were chosen.
        num_layers: so many rows are drawn, evenly spread.
    """
    rows = np.linspace(1, len(deviation) - 1, num_layers).round().astype(int)
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, height_ratios=[3, 1.2], figsize=(style.MAX_WIDTH, 3.9))
    shown = np.log10(np.maximum(deviation[rows], 1e-4))
    image = upper.imshow(shown, aspect="auto", cmap="magma_r", vmin=-3, vmax=0.5, interpolation="nearest")
    bar = figure.colorbar(image, ax=upper, ticks=[-3, -2, -1, 0], pad=0.01)
    bar.ax.set_yticklabels(["0.001", "0.01", "0.1", "1"])
    upper.set_yticks(range(len(rows)), [f"layer {row}" for row in rows], fontsize=9)
    total = deviation[1]
    chosen = np.zeros(len(total), dtype=bool)
    chosen[list(selected)] = True
    positions = np.arange(len(total))
    lower.bar(positions[~chosen], total[~chosen], width=1.0, color=MUTED)
    lower.bar(positions[chosen], total[chosen], width=1.0, color=PALETTE[1])
    lower.set(yscale="log", ylabel="layer 1", xlabel="token of the documents, in the order of the prompt")
    figure.legend(
        handles=[Patch(color=PALETTE[1], label="computed in all layers"), Patch(color=MUTED, label="reused")],
        loc="outside lower center",
        ncols=2,
    )
    for axes in (upper, lower):
        for bound in bounds[1:-1]:
            axes.axvline(bound - 0.5, color=INK, linewidth=1)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure


def draw_trade(
    ratios: Sequence[float],
    seconds: Mapping[str, Sequence[float]],
    quality: Mapping[str, Sequence[float]],
    label: str,
    points: Mapping[str, tuple[float, float]] | None = None,
    title: str = "",
) -> Figure:
    """What computing a share of the tokens costs and what it buys, side by side.

    Args:
        ratios: the shares, 0 to 1.
        seconds: name to the time to first token at each share, of computing everything; the first is measured (dots).
        quality: name to the value of `label` at each share.
        points: what else was tried: name to a share and the value of `label` there.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(style.MAX_WIDTH, 3.3))
    for i, (name, values) in enumerate(seconds.items()):
        left.plot(ratios, values, "o-" if i == 0 else "--", color=PALETTE[0] if i == 0 else INK, label=name)
    left.axhline(1.0, color=MUTED, linewidth=1, linestyle=":")
    left.set(ylim=(0, None), ylabel="TTFT, of computing everything")
    for i, (name, values) in enumerate(quality.items()):
        right.plot(ratios, values, "os^D"[i % 4] + "-", color=PALETTE[i % len(PALETTE)], label=name)
    for i, (name, (ratio, value)) in enumerate((points or {}).items(), start=len(quality)):
        right.plot(ratio, value, "os^D"[i % 4], color=PALETTE[i % len(PALETTE)], markersize=8, label=name)
    right.set(ylabel=label, ylim=(0, None))
    for axes in (left, right):
        axes.set_xlabel("tokens of the documents that are computed")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, 0))
        axes.grid()
        axes.legend(fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure


def draw_file(parts: Mapping[str, int], title: str = "") -> Figure:
    """The bytes of an entry, part by part; not to scale, with the true lengths below.

    Args:
        parts: name to the number of bytes.
    """
    figure, axes = plt.subplots(figsize=(style.MAX_WIDTH, 1.2))
    widths = [max(1.0, min(4.0, len(name) / 8)) for name in parts]
    x = 0.0
    for i, (width, (name, count)) in enumerate(zip(widths, parts.items(), strict=True)):
        color = pale(PALETTE[i % len(PALETTE)]) if i + 1 < len(parts) else FAINT
        axes.add_patch(Rectangle((x, 0), width, 0.7, facecolor=color, edgecolor=BACKGROUND, linewidth=2))
        axes.text(x + width / 2, 0.35, name, ha="center", va="center", fontsize=10)
        axes.text(x + width / 2, -0.12, f"{count:,} bytes", ha="center", va="top", fontsize=9, color=MUTED)
        x += width
    axes.set(xlim=(0, x), ylim=(-0.45, 0.75), title=title)
    axes.axis("off")
    return figure
