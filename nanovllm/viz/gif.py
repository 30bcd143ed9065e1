"""Animations as GIF files whose bytes depend on the pictures alone."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

_NUM_COLORS = 255  # one of the 256 stands for "as in the frame before"
_SAMPLED_FRAMES = 8


def gif_bytes(draw: Callable[[int], Figure], seconds: Sequence[float]) -> bytes:
    """An endless animation.

    All frames share one palette, made from some of them, and nothing is dithered: equal pictures give equal bytes,
    and what does not change from frame to frame takes no space.

    Args:
        draw: makes the figure of a frame, by its number. All figures must have the same size; each is closed.
        seconds: how long each frame stands.

    Raises:
        ValueError: no frame, or figures of different sizes.
    """
    frames = [_render(draw(number)) for number in range(len(seconds))]
    if len({frame.size for frame in frames}) != 1:
        raise ValueError(
            f"an animation needs frames of one size, got {sorted({frame.size for frame in frames})}"
        )
    palette = _palette(frames)
    indexed = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    indexed[0].save(
        buffer,
        format="GIF",
        save_all=True,
        append_images=indexed[1:],
        duration=[round(1000 * each) for each in seconds],
        loop=0,
        optimize=False,
    )
    return buffer.getvalue()


def _render(figure: Figure) -> Image.Image:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    plt.close(figure)
    return image


def _palette(frames: Sequence[Image.Image]) -> Image.Image:
    """An image with the colours that serve all frames best."""
    picked = [frames[i * (len(frames) - 1) // max(1, _SAMPLED_FRAMES - 1)] for i in range(_SAMPLED_FRAMES)]
    width, height = frames[0].size
    sheet = Image.new("RGB", (width, height * len(picked)))
    for row, frame in enumerate(picked):
        sheet.paste(frame, (0, row * height))
    return sheet.quantize(_NUM_COLORS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
