"""What the header of a trace says of the scheduler that made its steps."""

from __future__ import annotations

from typing import Any

from nanovllm.scheduler.scheduler import Scheduler


def trace_settings(scheduler: Scheduler) -> dict[str, Any]:
    """The sizes and policies that a reader needs."""
    sizes = {"block_size": scheduler.manager.block_size, "num_blocks": scheduler.manager.pool.num_blocks}
    names = ("token_budget", "max_num_seqs", "batching_policy", "enable_prefix_caching")
    return sizes | {name: getattr(scheduler.config, name) for name in names}
