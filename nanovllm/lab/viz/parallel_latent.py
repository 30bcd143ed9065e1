"""Pictures of latent attention: what a token costs in the cache, the two ways of computing, and when which is cheaper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from nanovllm.attention.latent import LatentShape
from nanovllm.lab.viz.style import INK, MUTED, PALETTE, mix, pale

KINDS = {"every head its own": PALETTE[5], "heads share (GQA)": PALETTE[0], "latent (MLA)": PALETTE[2]}
LATENT, EXPANDED, QUERY, MATRIX = PALETTE[2], PALETTE[1], PALETTE[0], PALETTE[3]


def draw_bytes_per_token(models: Mapping[str, tuple[str, int]]) -> Figure:
    """A bar for each model.

    Args:
        models: name to (kind of attention, one of `KINDS`; bytes of one token's cache, over all layers).
    """
    figure, ax = plt.subplots(figsize=(9, 0.42 * len(models) + 1.1))
    for y, (kind, size) in enumerate(models.values()):
        ax.barh(y, size / 1024, color=KINDS[kind], height=0.7)
        ax.text(size / 1024 + 40, y, f"{size / 1024:,.0f}", va="center", fontsize=10)
    longest = max(size for _, size in models.values()) / 1024
    ax.set(xlim=(0, 1.1 * longest), ylim=(len(models) - 0.4, -0.6))
    ax.set_yticks(range(len(models)), list(models))
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("KiB of cache for one token, all layers, 16 bits a number")
    used = {kind for kind, _ in models.values()}
    handles = [Rectangle((0, 0), 1, 1, color=color) for kind, color in KINDS.items() if kind in used]
    ax.legend(handles, [kind for kind in KINDS if kind in used], loc="lower right")
    return figure


def draw_two_ways() -> Figure:
    """Naive and absorbed attention of one query of one head: the same numbers in another order."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.5))
    for ax, title in zip(
        axes, ("Naive: make keys and values, then attend", "Absorbed: attend to the latents themselves"), strict=True
    ):
        ax.set(xlim=(0, 100), ylim=(106, 0), title=title)
        ax.axis("off")
    left, right = axes
    _box(left, 2, 40, 14, 42, LATENT, "cache\n\nlatents\n$c_1 … c_n$")
    _box(left, 31, 40, 12, 16, MATRIX, "$W^{K}$")
    _box(left, 31, 66, 12, 16, MATRIX, "$W^{V}$")
    _box(left, 56, 32, 16, 26, EXPANDED, "keys\n$W^{K} c_i$")
    _box(left, 56, 64, 16, 26, EXPANDED, "values\n$W^{V} c_i$")
    _box(left, 56, 8, 16, 12, QUERY, "query $q$")
    _box(left, 85, 69, 14, 16, QUERY, "out")
    for start, end in (((16, 55), (31, 48)), ((16, 67), (31, 74)), ((43, 48), (56, 47)), ((43, 74), (56, 76))):
        _arrow(left, start, end)
    _arrow(left, (64, 20), (64, 32), "scores", (66, 26))
    _arrow(left, (72, 77), (85, 77))
    _arrow(left, (72, 45), (90, 69), "weights", (79, 50))
    left.text(50, 99, "a key and a value are made for every cached\ntoken, for every head, in every step", ha="center",
              va="center", fontsize=10, color=MUTED)  # fmt: skip
    _box(right, 42, 40, 16, 42, LATENT, "cache\n\nlatents\n$c_1 … c_n$")
    _box(right, 1, 8, 16, 12, QUERY, "query $q$")
    _box(right, 26, 6, 13, 16, MATRIX, "$(W^{K})^{T}$")
    _box(right, 61, 8, 27, 12, QUERY, "$q' = (W^{K})^{T} q$")
    _box(right, 65, 54, 13, 16, QUERY, "$\\sum p_i c_i$")
    _box(right, 84, 54, 12, 16, MATRIX, "$W^{V}$")
    _box(right, 84, 84, 12, 12, QUERY, "out")
    _arrow(right, (17, 14), (26, 14))
    _arrow(right, (39, 14), (61, 14))
    _arrow(right, (72, 20), (54, 40), "scores", (66, 30))
    _arrow(right, (58, 62), (65, 62))
    _arrow(right, (78, 62), (84, 62))
    _arrow(right, (90, 70), (90, 84))
    right.text(38, 98, "the matrices meet one query,\nand nothing is made per cached token", ha="center", va="center",
               fontsize=10, color=MUTED)  # fmt: skip
    return figure


def _box(ax: Axes, x: float, y: float, width: float, height: float, color: str, text: str) -> None:
    ax.add_patch(Rectangle((x, y), width, height, facecolor=pale(color), edgecolor=mix(color, "#000000", 0.2)))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=10)


def _arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    text: str = "",
    at: tuple[float, float] | None = None,
) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=INK, linewidth=1.1))
    if at is not None:
        ax.text(*at, text, fontsize=10, va="center")


def draw_crossover(
    shape: LatentShape, seq_len: int, measured: Mapping[str, Mapping[int, float]], unit: float
) -> Figure:
    """Operations of naive and absorbed attention over the number of new tokens, and what was measured.

    Args:
        seq_len: tokens of the sequence, the new ones among them.
        measured: "naive" and "absorbed": number of new tokens to seconds.
        unit: operations that this machine does in a second, which puts both on one axis.
    """
    figure, ax = plt.subplots(figsize=(9, 3.8))
    counts = sorted({*range(1, 9), *range(8, seq_len + 1, 8)})
    for name, color, flops in (("naive", EXPANDED, shape.naive_flops), ("absorbed", LATENT, shape.absorbed_flops)):
        ax.plot(counts, [flops(n, seq_len) / 1e9 for n in counts], color=color, label=f"{name}, counted")
        points = measured[name]
        ax.plot(list(points), [s * unit / 1e9 for s in points.values()], "o", color=color, label=f"{name}, measured")
    even = crossover(shape, seq_len, range(1, seq_len + 1))
    ax.axvline(even, color=MUTED, linewidth=1, linestyle=":")
    ax.set(
        xscale="log", yscale="log", xlabel=f"new tokens, of {seq_len:,} in the sequence", ylabel="billion operations"
    )
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.text(even * 0.96, ax.get_ylim()[0] * 1.3, f"even at about {even}", fontsize=10, color=MUTED, ha="right")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return figure


def crossover(shape: LatentShape, seq_len: int, counts: Sequence[int]) -> int:
    """The first of the numbers of new tokens from which expanding is cheaper."""
    return next(n for n in counts if shape.naive_flops(n, seq_len) < shape.absorbed_flops(n, seq_len))
