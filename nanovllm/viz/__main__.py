"""Draws the pictures in figures/: `python -m nanovllm.viz [FOLDER]`. The same records give the same bytes."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import matplotlib.pyplot as plt

from nanovllm.trace import Trace
from nanovllm.viz import (
    SimulatedRequest,
    compare,
    draw_block_tables,
    image_bytes,
    pool_state_at,
    simulate,
    use_style,
)


def policies() -> dict[str, Trace]:
    """The same six requests under three batching policies: one long prompt comes while others decode."""
    arrivals = [(0, 24, 22), (0, 16, 14), (2, 30, 10), (6, 96, 8), (8, 12, 14), (10, 20, 8)]
    requests = [SimulatedRequest(step, prompt, output) for step, prompt, output in arrivals]
    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "step_cost": 8.0,
        "token_cost": 1.0,
    }
    named = {"static batches": "static", "prefill first": "prefill_first", "chunked prefill": "chunked"}
    return {name: simulate(requests, batching_policy=policy, **options) for name, policy in named.items()}


def draw_policies() -> bytes:
    """Timelines of the three policies under one another, as SVG."""
    return image_bytes(compare(policies(), x="time")[0], "svg")


def draw_tables() -> bytes:
    """Block tables of three requests, two of which share the beginning of their prompts, as SVG."""
    shared = list(range(100, 108))
    requests = [
        SimulatedRequest(0, [*shared, 1, 2, 3], 6, request_id="A"),
        SimulatedRequest(1, [*shared, 4, 5], 6, request_id="B"),
        SimulatedRequest(1, [6, 7, 8, 9, 10, 11], 6, request_id="C"),
    ]
    trace = simulate(requests, num_kv_blocks=14, block_size=4)
    state = pool_state_at(trace, 4)
    return image_bytes(draw_block_tables(state.tables, state.num_tokens, state.block_size, state), "svg")


FIGURES = {"policies.svg": draw_policies, "block_tables.svg": draw_tables}


def draw_all(folder: pathlib.Path) -> None:
    """Write every figure into the folder."""
    use_style()
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        (folder / name).write_bytes(draw())
        plt.close("all")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m nanovllm.viz", description=__doc__)
    parser.add_argument("folder", nargs="?", default="figures", type=pathlib.Path)
    draw_all(parser.parse_args().folder)
