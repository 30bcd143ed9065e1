"""Films that matplotlib draws: pictures of a record, each with a caption."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

from nanovllm.lab.viz.film import gif_bytes
from nanovllm.lab.viz.style import MUTED

_LINE = 92  # letters of a caption that fit beside one another


@dataclass
class Beat:
    """A picture of a film: what is drawn from the record, and the caption."""

    state: Any
    words: str
    seconds: float


@dataclass
class Reel:
    """A film that matplotlib draws.

    Attributes:
        record: what happened, as plain data, the same on every machine.
        draw: draws one state of the record.
        height: of the drawing, in inches; the width is 9.
        corner: a word for each state, for the upper right corner.
    """

    title: str
    record: Any
    beats: Sequence[Beat]
    draw: Callable[[Axes, Any, Any], None]
    height: float
    corner: Callable[[Any], str] = lambda state: ""

    def digest(self) -> str:
        """A hash of the record and the captions, which is written into the file as a comment: a
        test compares the two."""
        script = [
            self.title,
            self.record,
            [[beat.state, beat.words, beat.seconds] for beat in self.beats],
        ]
        return hashlib.sha256(json.dumps(script).encode()).hexdigest()

    def figure(self, beat: Beat) -> Figure:
        """A picture before it is pixels."""
        above, below = 0.45, 0.85  # inches for the title and the caption
        height = self.height + above + below
        figure = Figure(figsize=(9, height), dpi=100, layout="none")
        figure.text(0.02, 1 - 0.13 / height, self.title, fontsize=13, fontweight="bold", va="top")
        figure.text(
            0.98,
            1 - 0.13 / height,
            self.corner(beat.state),
            fontsize=13,
            color=MUTED,
            va="top",
            ha="right",
        )
        ax = figure.add_axes((0.02, below / height, 0.96, self.height / height))
        ax.axis("off")
        self.draw(ax, self.record, beat.state)
        note = figure.add_axes((0.013, 0.1 / height, 0.974, (below - 0.18) / height))
        note.set(xlim=(0, 1), ylim=(0, 1))
        note.axis("off")
        look = {"boxstyle": "round,pad=0,rounding_size=0.01", "mutation_aspect": 12}
        note.add_patch(
            FancyBboxPatch(
                (0.001, 0.01), 0.998, 0.98, facecolor="#f3f3f3", edgecolor="none", **look
            )
        )
        note.text(
            0.014,
            0.5,
            "\n".join(textwrap.wrap(beat.words, _LINE)),
            fontsize=12.5,
            va="center",
            linespacing=1.3,
        )
        FigureCanvasAgg(figure).draw()
        return figure

    def shoot(self) -> bytes:
        """The bytes of a GIF file of 900 pixels width."""
        pixels = [np.asarray(self.figure(beat).canvas.buffer_rgba()) for beat in self.beats]
        pictures = [Image.fromarray(each).convert("RGB") for each in pixels]
        return gif_bytes(pictures, [beat.seconds for beat in self.beats], self.digest())


def told(states: Sequence[Any], words: Mapping[Any, str]) -> list[Beat]:
    """A beat for each state. A caption stands until the next one, at first as long as it takes to
    read."""
    beats, last = [], ""
    for state in states:
        last = words.get(state, last)
        beats.append(Beat(state, last, round(0.8 + len(last) / 40, 1) if state in words else 0.8))
    return beats
