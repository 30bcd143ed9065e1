"""Pictures of experts on ranks: the shuffle, who is busy, how balancing helps, and who holds what in a grid."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from nanovllm.distributed.expert_parallel import ExpertPlacement
from nanovllm.lab.viz import style
from nanovllm.lab.viz.style import BACKGROUND, FAINT, INK, MUTED, PALETTE

Routing = Sequence[Sequence[int]]


def _box(ax: Axes, x: float, y: float, width: float, text: str, color: str, fill: str = BACKGROUND) -> None:
    ax.add_patch(Rectangle((x, y - 0.38), width, 0.76, facecolor=fill, edgecolor=color, linewidth=1.4))
    ax.text(x + width / 2, y, text, ha="center", va="center", fontsize=9, color=style.ink_on(fill))


def draw_shuffle(routings: Sequence[Routing], placement: ExpertPlacement, *, title: str = "") -> Axes:
    """One dispatch: the tokens of each rank on the left, the rows that each rank receives, and the experts they visit.

    Args:
        routings: for each rank, the experts of each of its tokens.
        placement: without replicas, so that it is clear who goes where.
    """
    ranks, size = len(placement.slots), placement.num_slots
    rows: list[list[tuple[int, int, list[int]]]] = [[] for _ in range(ranks)]  # (source, token, slots)
    for target, source in ((t, s) for t in range(ranks) for s in range(ranks)):
        for token, experts in enumerate(routings[source]):
            slots = [placement.slots[target].index(e) for e in experts if e in placement.slots[target]]
            if slots:
                rows[target].append((source, token, slots))
    heights = [max(len(routings[r]), len(rows[r]), size) + 0.9 for r in range(ranks)]
    tops = [sum(heights[:r]) for r in range(ranks)]
    ax = style.new_axes(0.34 * sum(heights) + 0.9)

    def level(rank: int, i: int, count: int) -> float:
        return tops[rank] + (heights[rank] - 0.9 - count) / 2 + i + 0.5

    for rank in range(ranks):
        ax.text(-0.35, tops[rank] + heights[rank] / 2 - 0.45, f"rank {rank}", ha="right", va="center", color=INK)
        if rank:
            ax.axhline(tops[rank] - 0.45, color=FAINT, linewidth=1)
        for slot, expert in enumerate(placement.slots[rank]):
            _box(ax, 8.2, level(rank, slot, size), 1.3, f"expert {expert}", MUTED)
        for token, experts in enumerate(routings[rank]):
            at = level(rank, token, len(routings[rank]))
            _box(ax, 0, at, 1.7, f"{'abcdefgh'[rank]}{token} → {', '.join(map(str, experts))}", PALETTE[rank])
        for i, (source, token, slots) in enumerate(rows[rank]):
            at, color = level(rank, i, len(rows[rank])), PALETTE[source]
            start = level(source, token, len(routings[source]))
            ax.plot([1.7, 4.6], [start, at], color=color, linewidth=1.8 if source != rank else 0.9)
            _box(ax, 4.6, at, 0.8, f"{'abcdefgh'[source]}{token}", color, style.pale(color))
            for slot in slots:
                ax.plot([5.4, 8.2], [at, level(rank, slot, size)], color=MUTED, linewidth=0.9)
    for x, name in ((0.85, "its tokens and their experts"), (5.0, "rows received"), (8.85, "its experts")):
        ax.text(x, -0.35, name, ha="center", va="bottom", fontsize=10, color=MUTED)
    ax.set(xlim=(-1.5, 9.7), ylim=(sum(heights) - 0.6, -0.9), title=title)
    ax.axis("off")
    return ax


def draw_expert_load(load: Sequence[Sequence[int]], *, title: str = "") -> Axes:
    """A heat map: how many tokens each expert of each layer got, as multiples of the layer's mean.

    Args:
        load: a row a layer, a column an expert.
    """
    share = [[value * len(row) / max(1, sum(row)) for value in row] for row in load]
    ax = style.new_axes(0.42 * len(load) + 1.1)
    image = ax.imshow(share, cmap="Blues", vmin=0, vmax=max(map(max, share)), aspect="auto")
    for layer, row in enumerate(share):
        for expert, value in enumerate(row):
            color = BACKGROUND if value > 0.6 * max(map(max, share)) else INK
            ax.text(expert, layer, f"{value:.1f}", ha="center", va="center", fontsize=8, color=color)
    ax.set(xlabel="expert", ylabel="layer", title=title, xticks=range(len(share[0])), yticks=range(len(share)))
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.figure.colorbar(image, ax=ax, label="load / mean", pad=0.01)
    return ax


def draw_balance(loads: Sequence[int], placements: dict[str, ExpertPlacement]) -> list[Axes]:
    """The tokens of each rank, a piece an expert, once for each placement; experts with replicas stand out.

    Args:
        loads: tokens of each logical expert.
        placements: by the name that stands over it.
    """
    import matplotlib.pyplot as plt

    figure, row = plt.subplots(
        1, len(placements), figsize=(style.MAX_WIDTH, 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    highest = max(max(placement.rank_loads(loads)) for placement in placements.values())
    for ax, (name, placement) in zip(row[0], placements.items(), strict=True):
        counts = [len(replicas) for replicas in placement.replicas]
        totals = placement.rank_loads(loads)
        mean = sum(loads) / len(totals)
        for rank, slots in enumerate(placement.slots):
            bottom = 0.0
            for expert in sorted(slots, key=lambda expert: -loads[expert] / counts[expert]):
                height = loads[expert] / counts[expert]
                color = PALETTE[1] if counts[expert] > 1 else PALETTE[0]
                ax.bar(rank, height, bottom=bottom, color=color, edgecolor=BACKGROUND, linewidth=0.8)
                if height > 0.055 * highest:
                    ax.text(
                        rank, bottom + 0.028 * highest, str(expert), ha="center", va="center",
                        fontsize=8, color=style.ink_on(color),
                    )  # fmt: skip
                bottom += height
        ax.axhline(mean, color=INK, linewidth=1.2, linestyle="--")
        ax.set(title=f"{name}: max / mean {max(totals) / mean:.2f}", xlabel="rank", xticks=range(len(totals)))
    row[0][0].set_ylabel("tokens")
    handles = [
        Patch(color=PALETTE[0], label="an expert (its number)"),
        Patch(color=PALETTE[1], label="a replica of one that has several"),
        plt.Line2D([], [], color=INK, linewidth=1.2, linestyle="--", label="mean"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return list(row[0])
