"""Redraws the pictures in figures/: `python -m nanovllm.lab.viz [FOLDER]`. The animations are
filmed in Chromium."""

from __future__ import annotations

import argparse
import pathlib

from nanovllm.lab.viz import draw_language, image_bytes, use_style
from nanovllm.lab.viz.figures import FILMS


def visual_language() -> bytes:
    """All colours and marks on one page, as SVG."""
    return image_bytes(draw_language(), "svg")


def draw_all(folder: pathlib.Path) -> None:
    """Write every figure into the folder."""
    use_style()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "visual_language.svg").write_bytes(visual_language())
    for name, film in FILMS.items():
        (folder / name).write_bytes(film().shoot())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m nanovllm.lab.viz", description=__doc__)
    parser.add_argument("folder", nargs="?", default="figures", type=pathlib.Path)
    draw_all(parser.parse_args().folder)
