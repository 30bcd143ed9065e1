"""Still pictures of single steps: the pages that attention reads and writes, and the packed batch,
as the player draws them."""

from __future__ import annotations

import math
from collections.abc import Collection

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from nanovllm.lab.viz import style
from nanovllm.lab.viz.data import PoolState
from nanovllm.lab.viz.style import INK, MUTED, RequestColors
from nanovllm.trace.record import StepRecord, TracedRequest

# Inches.
_LABEL = 0.95  # left of pages and tokens
_TITLE = 0.34
_PAGE = 0.34
_PAGE_LINE = 0.32
_TOKEN = 0.33
_TOKEN_LINE = 0.72
_WORDS = 3.0  # right of the pages
_MOST_LINES = 4  # of tokens


def _pages_per_line() -> int:
    return int((style.MAX_WIDTH - _LABEL - _WORDS) / _PAGE)


def _tokens_per_line() -> int:
    return int((style.MAX_WIDTH - _LABEL) / _TOKEN)


def _page_lines(share: TracedRequest, state: PoolState) -> int:
    return max(1, math.ceil(len(state.tables[share.request_id]) / _pages_per_line()))


def step_height(record: StepRecord, state: PoolState, views: Collection[str]) -> float:
    """Inches that `draw_step` needs."""
    height = _TITLE
    if "attention" in views:
        height += _PAGE_LINE * sum(_page_lines(share, state) for share in record.requests)
    if "batch" in views:
        lines = math.ceil(record.num_tokens / _tokens_per_line())
        height += _TOKEN_LINE * min(_MOST_LINES, lines) + 0.1
    return height


def draw_step(
    ax: Axes, record: StepRecord, state: PoolState, views: Collection[str], colors: RequestColors
) -> None:
    """Draw one step.

    Args:
        ax: where to draw; its height is `step_height`.
        state: the pool right after the step had been scheduled.
        views: "attention", "batch" or both.
    """
    ax.set(xlim=(0, style.MAX_WIDTH), ylim=(step_height(record, state, views), 0))
    ax.axis("off")
    ax.text(0, _TITLE / 2, f"step {record.step}", weight="bold", va="center")
    y = _TITLE
    if "attention" in views:
        for share in record.requests:
            _draw_pages(ax, y, share, state, colors[share.request_id])
            y += _PAGE_LINE * _page_lines(share, state)
        y += 0.1
    if "batch" in views:
        _draw_tokens(ax, y, record, state, colors)


def _draw_pages(ax: Axes, y: float, share: TracedRequest, state: PoolState, color: str) -> None:
    """The pages of a request: tokens that attention reads are pale, those that the step writes are
    solid."""
    size = state.block_size
    end = share.start + share.num_tokens
    table = state.tables[share.request_id]
    high = _PAGE_LINE - 0.06
    ax.text(0, y + high / 2, share.request_id, weight="bold", va="center")
    for number, block_id in enumerate(table):
        line, place = divmod(number, _pages_per_line())
        left = _LABEL + place * _PAGE
        top = y + line * _PAGE_LINE
        wide = _PAGE - 0.04
        for kind, last in (("prefill", end), ("decode", share.start)):
            part = wide * min(size, max(0, last - number * size)) / size
            face = style.mark_style(kind, color)["facecolor"]
            ax.add_patch(Rectangle((left, top), part, high, facecolor=face))
        ax.add_patch(Rectangle((left, top), wide, high, fill=False, edgecolor=color))
        box = {"boxstyle": "round,pad=0.1", "facecolor": style.BACKGROUND, "edgecolor": "none"}
        place_of_id = (left + wide / 2, top + high / 2)
        ax.text(*place_of_id, str(block_id), ha="center", va="center", fontsize=8, bbox=box)
    num_pages = math.ceil(share.start / size)
    pages = f"{num_pages} page{'s' if num_pages != 1 else ''}"
    reads = f"reads {share.start} in {pages}" if share.start else "reads nothing before"
    right = _LABEL + min(len(table), _pages_per_line()) * _PAGE + 0.1
    words = f"{share.kind}: {reads}, writes {share.num_tokens}"
    ax.text(right, y + high / 2, words, va="center", fontsize=9)


def _kinds(share: TracedRequest) -> list[str]:
    """The mark of each token of a share."""
    kinds = [share.kind] * (share.num_tokens - share.num_drafts)
    kinds += ["accepted draft"] * min(share.num_drafts, share.num_accepted)
    return kinds + ["rejected draft"] * (share.num_tokens - len(kinds))


def _draw_tokens(
    ax: Axes, y: float, record: StepRecord, state: PoolState, colors: RequestColors
) -> None:
    """A column for each token, in the order of the batch: its request, its position in the request
    and its slot in the cache."""
    tokens = [
        (share.request_id, share.start + number, kind)
        for share in record.requests
        for number, kind in enumerate(_kinds(share))
    ]
    shown = tokens[: _MOST_LINES * _tokens_per_line()]
    for number, (request_id, position, kind) in enumerate(shown):
        line, place = divmod(number, _tokens_per_line())
        left = _LABEL + place * _TOKEN
        top = y + line * _TOKEN_LINE
        if place == 0:
            for name, down in (("request", 0.13), ("position", 0.37), ("slot", 0.55)):
                ax.text(0, top + down, name, va="center", fontsize=9, color=MUTED)
        look = style.mark_style(kind, colors[request_id])
        ax.add_patch(Rectangle((left, top), _TOKEN - 0.04, 0.26, linewidth=0.8, **look))
        block_id = state.tables[request_id][position // state.block_size]
        slot = block_id * state.block_size + position % state.block_size
        ink = style.ink_on(look["facecolor"]) if kind == "prefill" else INK
        for text, down, color in (
            (request_id, 0.13, ink),
            (str(position), 0.37, INK),
            (str(slot), 0.55, INK),
        ):
            middle = left + (_TOKEN - 0.04) / 2
            ax.text(middle, top + down, text, ha="center", va="center", fontsize=8, color=color)
    if len(shown) < len(tokens):
        words = f"and {len(tokens) - len(shown):,} more tokens"
        ax.text(style.MAX_WIDTH, _TITLE / 2, words, ha="right", va="center", color=MUTED)
