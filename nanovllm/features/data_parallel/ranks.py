"""Settings of one of several engines: its ranks, and what differs from the other engines.

Built by notebooks/25_data_parallel.ipynb: edit it there.
"""

from __future__ import annotations

import dataclasses
import pathlib

from nanovllm.data.config import EngineConfig
from nanovllm.distributed.groups import Grid


def engine_grid(config: EngineConfig) -> tuple[Grid, int]:
    """Return the grid of an engine's ranks, and the number of the engine's first rank in it.

    Engines in lock-step form one grid. Every other engine has its own grid.
    """
    num_stages = config.pipeline_parallel_size
    num_shards = config.tensor_parallel_size
    if not config.in_lock_step:
        return Grid(1, num_stages, num_shards), 0
    grid = Grid(config.data_parallel_size, num_stages, num_shards)
    return grid, (config.data_parallel_rank or 0) * num_stages * num_shards


def rank_config(config: EngineConfig, rank: int, address: str) -> EngineConfig:
    """Return the settings of one engine.

    Args:
        address: the address at which the ranks of all engines connect; "" if the engines do not
            share experts.
    """
    trace = trace_path(config.trace, rank) if config.trace is not None else None
    return dataclasses.replace(
        config, data_parallel_rank=rank, data_parallel_address=address, trace=trace
    )


def trace_path(path: str, rank: int) -> str:
    """Name the trace file of one engine: run.jsonl.gz -> run.dp0.jsonl.gz."""
    whole = pathlib.Path(path)
    name, _, ending = whole.name.partition(".")
    return str(whole.with_name(f"{name}.dp{rank}" + (f".{ending}" if ending else "")))
