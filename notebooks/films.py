"""The films of part 2: `python notebooks/films.py figures` runs ranks, schedulers and engines, and
draws what they recorded."""

from __future__ import annotations

import argparse
import pathlib

from films_kv import fetch
from films_parallel import bubble, lock_step, ring, shared_memory, shuffle

from nanovllm.lab.viz import use_style

FILMS = {
    f"{make.__name__}.gif": make
    for make in (ring, shared_memory, bubble, shuffle, lock_step, fetch)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python notebooks/films.py", description=__doc__)
    parser.add_argument("folder", nargs="?", default="figures", type=pathlib.Path)
    parser.add_argument("names", nargs="*", help="by default all")
    arguments = parser.parse_args()
    use_style()
    for name, make in FILMS.items():
        if not arguments.names or name in arguments.names:
            (arguments.folder / name).write_bytes(make().shoot())
