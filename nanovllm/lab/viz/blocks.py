"""Pictures of a pool over time: which request holds which block in which step; and a player's still
picture."""

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from nanovllm.lab.viz import style
from nanovllm.lab.viz.data import PoolState, pool_states, request_ids, step_edges
from nanovllm.lab.viz.steps import draw_step, step_height
from nanovllm.lab.viz.style import RequestColors
from nanovllm.lab.viz.timeline import (
    draw_budget,
    draw_timeline,
    draw_usage,
    explain,
    stacked,
    timeline_height,
)
from nanovllm.trace.trace import Trace

_MOST_BLOCKS = 40  # rows of more blocks would be too thin to read


def draw_blocks(
    trace: Trace, *, colors: RequestColors | None = None, ax: Axes | None = None
) -> Axes:
    """Draw which request holds which block, step by step. A bar begins with the name of the request
    that holds the block. Grey and hatched: the block is free, and its content can still be found.

    Args:
        colors, ax: as in `draw_timeline`.
    """
    states: list[PoolState] = []
    edges: list[tuple[float, float]] = []
    for state, (begin, end) in zip(pool_states(trace), step_edges(trace, "step"), strict=True):
        if edges and edges[-1][1] < begin:  # no request was left, and content stayed
            states.append(states[-1].emptied(trace.settings.enable_prefix_caching is not False))
            edges.append((edges[-1][1], begin))
        states.append(state)
        edges.append((begin, end))
    colors = colors or RequestColors(request_ids(trace))
    ax = ax or style.new_axes(blocks_height(trace))
    ax.set(xlim=(edges[0][0], edges[-1][1]), ylim=(trace.settings.num_blocks - 0.5, -0.5))
    for block_id in range(trace.settings.num_blocks):
        _draw_row(ax, block_id, states, edges, colors)
    ax.set(xlabel="step", ylabel="block")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(visible=False)
    return ax


def blocks_height(trace: Trace) -> float:
    """Inches for a row per block."""
    return 0.5 + 0.19 * trace.settings.num_blocks


def _draw_row(
    ax: Axes,
    block_id: int,
    states: Sequence[PoolState],
    edges: Sequence[tuple[float, float]],
    colors: RequestColors,
) -> None:
    first, last = ax.get_xlim()

    def use(step: int) -> tuple[list[str], bool]:
        return states[step].holders(block_id), block_id in states[step].cached

    for (holders, is_cached), group in groupby(range(len(states)), use):
        steps = list(group)
        begin = edges[steps[0]][0]
        width = edges[steps[-1]][1] - begin
        look: dict[str, Any]
        if holders:
            look = {"facecolor": colors[holders[0]], "edgecolor": style.BACKGROUND}
        elif is_cached:
            look = style.mark_style("cached", style.FAINT)
        else:
            continue
        ax.add_patch(Rectangle((begin, block_id - 0.42), width, 0.84, **look))
        names = "+".join(holders)
        if 0.08 * len(names) < style.MAX_WIDTH * width / (last - first):
            place = (begin + 0.12, block_id)
            ink = style.ink_on(look["facecolor"])
            ax.annotate(names, place, va="center", fontsize=8, color=ink)


def draw_still(trace: Trace, views: Collection[str], steps: Collection[int] = ()) -> Axes:
    """Draw what a player shows, for pages where none runs: the timeline, and below it, for all
    steps, which blocks are held by which request ("tables", "pool"), the "budget" and the "usage";
    then the pages ("attention") and tokens ("batch") of single steps.

    A pool of more than 40 blocks is drawn as the number of blocks in use.

    Args:
        steps: numbers of the steps whose pages and tokens are drawn.
    """
    colors = RequestColors(request_ids(trace))
    asks_for_blocks = "tables" in views or "pool" in views
    is_small = 0 < trace.settings.num_blocks <= _MOST_BLOCKS
    blocks = asks_for_blocks and is_small
    usage = "usage" in views or (asks_for_blocks and not is_small)
    heights = [timeline_height(len(colors))]
    heights += [blocks_height(trace)] if blocks else []
    heights += [1.6] * (usage + ("budget" in views))
    single = [
        (record, state)
        for record, state in zip(trace, pool_states(trace), strict=True)
        if record.step in steps and record.requests and {"attention", "batch"} & set(views)
    ]
    panels = [step_height(record, state, views) for record, state in single]
    axes = stacked(heights, 0.7, panels)
    shared = axes[: len(heights)]
    draw_timeline(trace, colors=colors, ax=axes[0])
    if blocks:
        draw_blocks(trace, colors=colors, ax=axes[1])
    if usage:
        draw_usage(trace, ax=axes[1 + blocks])
    if "budget" in views:
        draw_budget(trace, colors=colors, ax=shared[-1])
    for ax in shared[:-1]:
        ax.label_outer()
    for ax, (record, state) in zip(axes[len(shared) :], single, strict=True):
        draw_step(ax, record, state, views, colors)
    explain(shared, trace)
    return axes[0]
