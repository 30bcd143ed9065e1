"""Animations as GIF files whose bytes depend on the pictures alone."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

_NUM_COLORS = 255
_UNCHANGED = 255  # the last of the 256 stands for "as in the frame before"


def gif_bytes(draw: Callable[[int], Figure], seconds: Sequence[float]) -> bytes:
    """An endless animation.

    All frames share one palette, that of the colours which are shown most, and nothing is dithered: equal pictures give
    equal bytes, flat areas keep their exact colour, and what does not change from frame to frame takes no space.

    Args:
        draw: makes the figure of a frame, by its number. All figures must have the same size; each is closed.
        seconds: how long each frame stands.

    Raises:
        ValueError: no frame, or figures of different sizes.
    """
    frames = [_render(draw(number)) for number in range(len(seconds))]
    if len({frame.shape for frame in frames}) != 1:
        sizes = sorted({(frame.shape[1], frame.shape[0]) for frame in frames})
        raise ValueError(f"an animation needs frames of one size, got {sizes}")
    palette = _palette(frames)
    indexed = [_indexed(frame, palette, frames[number - 1] if number else None) for number, frame in enumerate(frames)]
    buffer = io.BytesIO()
    indexed[0].save(
        buffer,
        format="GIF",
        save_all=True,
        append_images=indexed[1:],
        duration=[round(1000 * each) for each in seconds],
        loop=0,
        optimize=False,
        transparency=_UNCHANGED,
        disposal=1,  # each frame is drawn over the one before
    )
    return buffer.getvalue()


def _render(figure: Figure) -> np.ndarray:
    """The pixels of a figure [height, width], each as the number 0xRRGGBB."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba()).astype(np.int32)
    plt.close(figure)
    return pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2]


def _palette(frames: Sequence[np.ndarray]) -> np.ndarray:
    """The colours that most pixels have; those that are equally frequent in a fixed order."""
    counts: Counter[int] = Counter()
    for frame in frames:
        colors, times = np.unique(frame, return_counts=True)
        counts.update(dict(zip(colors.tolist(), times.tolist(), strict=True)))
    return np.array(sorted(counts, key=lambda color: (-counts[color], color))[:_NUM_COLORS])


def _indexed(frame: np.ndarray, palette: np.ndarray, before: np.ndarray | None) -> Image.Image:
    """The frame with each pixel's nearest colour, or nothing where it is as before. Pillow's own search for the nearest is
    coarse: it makes white almost white."""
    colors, where = np.unique(frame, return_inverse=True)
    differences = _channels(colors)[:, None] - _channels(palette)[None]
    nearest = (differences**2).sum(axis=-1).argmin(axis=-1).astype(np.uint8)
    pixels = nearest[where].reshape(frame.shape)
    if before is not None:
        pixels[frame == before] = _UNCHANGED
    image = Image.fromarray(pixels)
    image.putpalette(_channels(palette).astype(np.uint8).tobytes())
    return image


def _channels(colors: np.ndarray) -> np.ndarray:
    """0xRRGGBB [n] -> [n, 3]."""
    return np.stack([colors >> shift & 255 for shift in (16, 8, 0)], axis=-1)
