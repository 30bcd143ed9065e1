"""Draws the pictures in figures/: `python -m nanovllm.lab.viz [FOLDER]`. The same records give the same bytes."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable

from nanovllm.lab.viz import draw_language, image_bytes, use_style
from nanovllm.lab.viz.animation import memory_figures, schedule_figures


def visual_language() -> bytes:
    """All colours and marks on one page, as SVG."""
    return image_bytes(draw_language(), "svg")


FIGURES: dict[str, Callable[[], bytes]] = {
    "visual_language.svg": visual_language,
    **memory_figures.FIGURES,
    **schedule_figures.FIGURES,
}


def draw_all(folder: pathlib.Path) -> None:
    """Write every figure into the folder."""
    use_style()
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (folder / name).write_bytes(draw())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m nanovllm.lab.viz", description=__doc__)
    parser.add_argument("folder", nargs="?", default="figures", type=pathlib.Path)
    draw_all(parser.parse_args().folder)
