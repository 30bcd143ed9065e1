"""What the header of a trace says of the scheduler that made its steps."""

from __future__ import annotations

from typing import Any

from nanovllm.scheduler.scheduler import Scheduler


def trace_settings(scheduler: Scheduler) -> dict[str, Any]:
    """The sizes and policies that a reader needs."""
    config, manager = scheduler.config, scheduler.manager
    return {
        "block_size": manager.block_size,
        "num_blocks": manager.pool.num_blocks,
        "token_budget": config.token_budget,
        "max_num_seqs": config.max_num_seqs,
        "batching_policy": config.batching_policy,
        "enable_prefix_caching": manager.enable_prefix_caching,
    }
