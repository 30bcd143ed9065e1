"""What all animations share: a frame of fixed size in pixels, with a title, a legend and a caption, and their pace."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyBboxPatch

from nanovllm.lab.viz import style
from nanovllm.lab.viz.style import BACKGROUND, INK

WIDTH, HEIGHT = 900, 500  # pixels; a point is a pixel too, since frames have 72 dots an inch
TOP, BOTTOM = 52, 380  # scenes draw between these: the title is above, the legend and the caption are below
LEFT, RIGHT = 20, 880
TEXT, SMALL = 20, 18  # font sizes that are still read when the animation is shown at half size
LIT = "#F0E442"  # the yellow that the palette leaves out: a ring around what the caption speaks of
CAPTION = "#F3F3F3"
_CAPTION_WIDTH = WIDTH - 2 * LEFT - 20
_PAUSE = 160  # pixels by which a line may be longer for the sake of ending where a sentence does

Scene = tuple[Callable[[int], Figure], list[float]]
"""An animation: what draws a frame, by its number, and how many seconds each frame stands."""


def new_frame(title: str, caption: str, kinds: Iterable[str] = (), extra: Iterable[Any] = (), **names: str) -> Axes:
    """An empty frame. Its axes cover it: x goes from 0 to `WIDTH`, y from 0 at the top to `HEIGHT`, in pixels.

    Args:
        caption: what happens now, in plain words; what does not fit in two lines is left out.
        kinds, extra, names: what the legend explains, as in `style.legend`.
    """
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, facecolor=BACKGROUND)
    figure.set_layout_engine("none")
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    ax.axis("off")
    ax.text(LEFT, 27, title, fontsize=22, fontweight="bold", va="center")
    box = FancyBboxPatch((12, 420), WIDTH - 24, 70, "round,pad=0,rounding_size=8", facecolor=CAPTION, linewidth=0)
    ax.add_patch(box)
    ax.text(LEFT + 6, 456, "\n".join(_wrap(caption)), fontsize=TEXT, va="center", color=INK, linespacing=1.25)
    handles = [style.legend_handle(kind, names.get(kind, kind)) for kind in style.MARKS if kind in set(kinds)]
    handles += list(extra)
    if handles:
        look: dict[str, Any] = {"fontsize": SMALL, "columnspacing": 1.1, "handletextpad": 0.5}
        look |= {"borderpad": 0, "borderaxespad": 0, "handlelength": 1.5, "frameon": False}
        place = (LEFT, 401)
        ax.legend(
            handles=handles,
            loc="center left",
            bbox_to_anchor=place,
            bbox_transform=ax.transData,
            ncols=len(handles),
            **look,
        )
    return ax


@functools.cache
def _renderer() -> RendererAgg:
    return RendererAgg(1, 1, 72)


@functools.cache
def _width(word: str) -> float:
    """Pixels from the beginning of a word in a caption to that of what would follow it at once."""
    font = FontProperties(size=TEXT)
    with_bars, bars = (_renderer().get_text_width_height_descent(text, font, False)[0] for text in (f"|{word}|", "||"))
    return with_bars - bars


def _wrap(text: str) -> list[str]:
    """The caption in one line, or in two of about equal length; what is too much ends in an ellipsis."""
    words = text.split()

    def length(some: Sequence[str]) -> float:
        return sum(map(_width, some)) + _width(" ") * max(0, len(some) - 1)

    if length(words) <= _CAPTION_WIDTH:
        return [" ".join(words)]

    def cost(pair: tuple[list[str], list[str]]) -> float:
        return max(map(length, pair)) - _PAUSE * (pair[0][-1][-1] in ".:;,")

    while True:
        if length(words) <= 2 * _CAPTION_WIDTH:
            breaks = [(words[:i], words[i:]) for i in range(1, len(words) + 1)]
            fitting = [pair for pair in breaks if max(map(length, pair)) <= _CAPTION_WIDTH]
            if fitting or len(words) < 3:
                return [" ".join(line) for line in min(fitting or breaks, key=cost)]
        words = [*words[:-2], "…"]


def finish(ax: Axes) -> Figure:
    """The figure of a frame, once it is drawn."""
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    return figure


def pace(
    seconds: Sequence[float], least: float = 8.0, most: float = 15.0, ends: tuple[float, float] = (1.5, 1.8)
) -> list[float]:
    """Stretch or shorten an animation to between `least` and `most` seconds; the first and the last frame stand at
    least as long as `ends` says. Times are whole hundredths of a second, as GIF files count them, and at least 4 of them.
    """
    shown = list(seconds)
    shown[0], shown[-1] = max(shown[0], ends[0]), max(shown[-1], ends[1])
    inner = shown[1:-1]
    kept = sum(shown) - sum(inner)
    if not inner:
        return [math.ceil(100 * max(each, least / len(shown))) / 100 for each in shown]
    scale = (min(max(sum(shown), least + 0.01 * len(shown)), most) - kept) / sum(inner)
    inner = [max(4, math.floor(100 * scale * each)) / 100 for each in inner]
    return [shown[0], *inner, shown[-1]]


def several(names: Sequence[Any], most: int = 4) -> str:
    """ "A", "A and B", "A, B and C"; beyond `most`, "A, B, C and 5 more"."""
    words = [str(name) for name in names]
    if len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
