"""Colours, marks and settings that all pictures share; the package's docstring says what they
mean."""

import io
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

# M. Okabe and K. Ito, "Color Universal Design", 2008: blue, orange, green, purple, sky, vermilion.
# Its yellow is left out: lines and pale fills of it vanish on white. The player in the browser
# reads the same file.
_LANGUAGE = json.loads(
    (pathlib.Path(__file__).parents[2] / "trace" / "web" / "style.json").read_text(encoding="utf-8")
)
PALETTE: tuple[str, ...] = tuple(_LANGUAGE["palette"])
INK: str = _LANGUAGE["ink"]
MUTED: str = _LANGUAGE["muted"]
FAINT: str = _LANGUAGE["faint"]
BACKGROUND: str = _LANGUAGE["background"]
MEANINGS: dict[str, str] = _LANGUAGE["meanings"]  # mark to a sentence
MAX_WIDTH = 9.0  # inches

# Settings of matplotlib by group. DejaVu Sans is part of matplotlib, so that figures are the same
# on every machine; without the hashsalt, ids in SVG files are random.
_STYLE: dict[Any, dict[str, Any]] = {
    "figure": {
        "figsize": (MAX_WIDTH, 3.6),
        "dpi": 110,
        "facecolor": BACKGROUND,
        "constrained_layout.use": True,
    },
    "savefig": {"dpi": 110, "facecolor": BACKGROUND, "transparent": False},
    "font": {"family": "DejaVu Sans", "size": 11},
    "text": {"color": INK},
    "axes": {
        "titlesize": 12,
        "titlelocation": "left",
        "labelsize": 11,
        "labelcolor": INK,
        "edgecolor": MUTED,
    }
    | {"facecolor": BACKGROUND, "spines.top": False, "spines.right": False, "axisbelow": True}
    | {"prop_cycle": cycler(color=PALETTE)},
    "xtick": {"labelsize": 10, "color": INK},
    "ytick": {"labelsize": 10, "color": INK},
    "legend": {"fontsize": 10, "frameon": False, "handlelength": 1.8},
    "grid": {"color": FAINT, "linewidth": 0.7},
    "hatch": {"linewidth": 1.2},
    "lines": {"linewidth": 2.0},
    "svg": {"hashsalt": "nanovllm", "fonttype": "path"},
}
# Matplotlib writes its version and the date into files: a redrawn figure would differ for no
# visible reason.
_METADATA: dict[str, Any] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}


def use_style() -> None:
    """Give matplotlib the settings of the course; each lecture calls it once, at the top. In a
    notebook, figures become PNG images, and running it again gives the same bytes."""
    for group, values in _STYLE.items():
        matplotlib.rc(group, **values)
    if "IPython" not in sys.modules or (shell := sys.modules["IPython"].get_ipython()) is None:
        return  # no notebook here
    from matplotlib_inline.config import InlineBackend

    backend = InlineBackend.instance(parent=shell)
    backend.figure_formats = {"png"}
    backend.print_figure_kwargs = {"bbox_inches": "tight", "metadata": _METADATA["png"]}


def request_color(index: int) -> str:
    """The colour (hex) of the request that appeared `index`-th, counted from 0."""
    colors = [*PALETTE, *(mix(color, "#000000", 0.4) for color in PALETTE), *_LANGUAGE["further"]]
    return colors[index % len(colors)]


def mix(color: str, other: str, share: float) -> str:
    """`color` with `share` (0 to 1) of `other` in it, as hex."""
    first, second = np.array([to_rgb(color), to_rgb(other)])
    return to_hex(first + (second - first) * share)


def ink_on(color: str) -> str:
    """Black or white, whichever reads better as text on the colour (contrast as in WCAG 2)."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return INK if luminance > 0.25 else BACKGROUND


def pale(color: str) -> str:
    """The light version of a colour, which stands for decode."""
    return mix(color, BACKGROUND, 0.65)


class RequestColors(dict[str, str]):
    """Gives requests their colours by order of appearance. Pass one object to several figures to
    keep the colours, for example `RequestColors(request_ids(trace))`, or one that is empty at first
    while a pool is watched.

    `colors[request_id]` is a hex colour; an id that was not seen before gets the next one.
    """

    def __init__(self, request_ids: Iterable[str] = ()) -> None:
        for request_id in request_ids:
            self[request_id]

    def __missing__(self, request_id: str) -> str:
        return self.setdefault(request_id, request_color(len(self)))


def mark_style(kind: str, color: str) -> dict[str, Any]:
    """Keyword arguments of a matplotlib patch for tokens of this kind."""
    return {
        "prefill": {"facecolor": color, "edgecolor": color},
        "decode": {"facecolor": pale(color), "edgecolor": color},
        "cached": {"facecolor": BACKGROUND, "edgecolor": color, "hatch": "////"},
        "transferred": {"facecolor": BACKGROUND, "edgecolor": color, "hatch": "..."},
        "accepted draft": {"facecolor": mix(color, BACKGROUND, 0.3), "edgecolor": color},
        "rejected draft": {
            "facecolor": mix(color, BACKGROUND, 0.8),
            "edgecolor": color,
            "linestyle": "--",
        },
        "free": {"facecolor": BACKGROUND, "edgecolor": FAINT},
    }[kind]


def line_style(kind: str, color: str) -> dict[str, Any]:
    """Keyword arguments of a matplotlib line for a request in this state."""
    return {
        "waiting": {"color": MUTED, "linewidth": 1.4, "linestyle": (0, (1, 1.5))},
        "stalled": {"color": color, "linewidth": 1.6, "linestyle": "-"},
        "swapped": {"color": color, "linewidth": 3.5, "linestyle": (0, (1.6, 0.8))},
    }[kind]


# Its tip is the point it marks, so that it does not hide the bar below.
_TRIANGLE = ((0.0, 0.0), (-0.6, 1.0), (0.6, 1.0), (0.0, 0.0))
_TIP: dict[str, Any] = {
    "marker": _TRIANGLE,
    "markersize": 14,
    "markeredgecolor": BACKGROUND,
    "markeredgewidth": 0.5,
}


def event_style(kind: str) -> dict[str, Any]:
    """Keyword arguments of a matplotlib marker for an event."""
    look: dict[str, Any] = {
        "first token": _TIP,
        "preempted": {"marker": "x", "markersize": 8, "markeredgewidth": 2.2},
        "finished": {"marker": "|", "markersize": 11, "markeredgewidth": 2.4},
        "aborted": {"marker": "s", "markersize": 6, "fillstyle": "none", "markeredgewidth": 1.6},
    }[kind]
    return {"color": INK, "linestyle": "none"} | look


PATCHES, LINES, EVENTS = (
    tuple(_LANGUAGE["marks"][form]) for form in ("patches", "lines", "events")
)
MARKS = PATCHES + LINES + EVENTS


def legend(
    where: Axes | Figure, kinds: Iterable[str] = MARKS, extra: Iterable[Any] = (), **names: str
) -> Legend:
    """Draw the shared legend below a figure.

    Args:
        where: the figure, or Axes in it.
        kinds: which marks to explain; they are shown in the order of `MARKS`.
        extra: more matplotlib handles with labels, put last.
        names: other words for a mark, as in `cached="free, still cached"`.
    """
    figure = where.get_figure(root=True)
    assert isinstance(figure, Figure)
    wanted = set(kinds)
    handles = [legend_handle(kind, names.get(kind, kind)) for kind in MARKS if kind in wanted]
    handles += list(extra)
    rows = -(-len(handles) // 8) or 1
    columns = max(1, -(-len(handles) // rows))  # rows of equal length
    return figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2
    )


def legend_handle(kind: str, label: str) -> Patch | Line2D:
    """The legend entry of a mark."""
    if kind in PATCHES:
        return Patch(label=label, **mark_style(kind, FAINT if kind == "free" else MUTED))
    if kind in LINES:
        return Line2D([], [], label=label, **line_style(kind, MUTED))
    centred = {"marker": "v", "markersize": 7} if kind == "first token" else {}
    return Line2D([], [], label=label, **event_style(kind) | centred)


def new_axes(height: float, width: float = MAX_WIDTH) -> Axes:
    """Axes in a figure of their own, `width` by `height` inches."""
    return plt.subplots(figsize=(min(width, MAX_WIDTH), height), layout="constrained")[1]


def image_bytes(where: Axes | Figure, format: str = "png") -> bytes:
    """A figure as the bytes of an image without date and version; the format is "png" or "svg"."""
    figure = where.get_figure(root=True)
    assert figure is not None
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": _STYLE["svg"]["hashsalt"]}):
        figure.savefig(buffer, format=format, metadata=_METADATA[format], bbox_inches="tight")
    return buffer.getvalue()
