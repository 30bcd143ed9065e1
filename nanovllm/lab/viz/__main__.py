"""Redraws the pictures in figures/: `python -m nanovllm.lab.viz [FOLDER]`. The animations are
filmed in Chromium. With `--timelines TIMES`, draws only what ranks with `device="sleep"` wrote into
the folder TIMES: the picture `ranks.png`, and `ranks.html`, a page that plays it."""

from __future__ import annotations

import argparse
import pathlib

from nanovllm.executor.virtual_clock import read_timelines
from nanovllm.lab.site.players import page_of
from nanovllm.lab.viz import draw_language, image_bytes, play_ranks, use_style
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


def draw_timelines(times: pathlib.Path, folder: pathlib.Path) -> None:
    """Write the timelines of ranks into the folder, as a picture and as a page."""
    use_style()
    player = play_ranks(read_timelines(times))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ranks.png").write_bytes(player.picture)
    (folder / "ranks.html").write_text(page_of(player.saved(), "Ranks"), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m nanovllm.lab.viz", description=__doc__)
    parser.add_argument("folder", nargs="?", default="figures", type=pathlib.Path)
    parser.add_argument("--timelines", metavar="TIMES", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.timelines is None:
        draw_all(arguments.folder)
    else:
        try:
            draw_timelines(arguments.timelines, arguments.folder)
        except ValueError as error:
            parser.error(str(error))
