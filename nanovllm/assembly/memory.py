"""Computes how many KV blocks fit in a runner's memory.

Without a GPU this is simple arithmetic. On a GPU, it has to run the largest step first
(features/cuda_graphs/memory.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from nanovllm.data.config import EngineConfig, parse_bytes
from nanovllm.data.parts import load
from nanovllm.models.config import ModelConfig

if TYPE_CHECKING:
    from nanovllm.core.runner import ModelRunner


def longest_request(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the most tokens that a request may have, before the size of the KV pool is known."""
    positions = model_config.max_position_embeddings
    return min(config.max_model_len or positions, positions)


def num_blocks_that_fit(
    runner: ModelRunner, config: EngineConfig, model_config: ModelConfig
) -> int:
    """Return the number of blocks for the KV pool. The first row that applies:

        num_kv_blocks                             it is set
        kv_cache_memory // bytes_per_block        it is set (`parse_bytes`, with the setting's name
                                                  for its errors)
        min(free_memory // bytes_per_block,       otherwise; `longest` is the number of blocks of
            max_num_seqs * longest)               the longest request (`longest_request`)

    Args:
        runner: its weights are loaded, and its caches are not made yet.

    Raises:
        ValueError: `num_kv_blocks` or `kv_cache_memory` is more than the machine's memory; or no
            block fits: "no KV block of 4096 bytes fits into 100 bytes", with the settings that
            help: `kv_cache_memory`, `gpu_memory_utilization`, `block_size`.
    """
    size = runner.bytes_per_block
    if config.num_kv_blocks is not None:
        _check_host_memory(runner, "num_kv_blocks", config.num_kv_blocks * size)
        return config.num_kv_blocks
    if config.kv_cache_memory is not None:
        free = parse_bytes(config.kv_cache_memory, "kv_cache_memory")
        _check_host_memory(runner, "kv_cache_memory", free)
        count = free // size
    else:
        free = free_memory(runner, config, model_config)
        # By default, at most as many blocks as `max_num_seqs` longest requests fill.
        longest = -(-longest_request(config, model_config) // config.block_size)
        count = min(free // size, config.max_num_seqs * longest)
    if count < 1:
        found = f"no KV block of {size} bytes fits into {max(0, free)} bytes"
        raise ValueError(
            f"{found}: raise kv_cache_memory or, on a GPU, gpu_memory_utilization, or lower "
            "block_size"
        )
    return count


def _check_host_memory(runner: ModelRunner, setting: str, num_bytes: int) -> None:
    """Reject a KV pool on a CPU that is larger than the machine's memory. On a GPU, the allocation
    itself fails."""
    total = psutil.virtual_memory().total
    if runner.device.type == "cpu" and num_bytes > total:
        gib = 2**30
        raise ValueError(
            f"{setting} ({num_bytes / gib:.1f} GiB) exceeds the machine's memory "
            f"({total / gib:.1f} GiB): lower it"
        )


def free_memory(runner: ModelRunner, config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the bytes for the KV pool if no setting gives its size."""
    if runner.device.type == "cuda":
        measure: Callable[[ModelRunner, EngineConfig, int], int] = load(
            "nanovllm.features.cuda_graphs.memory:free_memory", "device 'cuda'"
        )
        return measure(runner, config, longest_request(config, model_config))
    # All ranks share the memory of this machine. With several machines, this is less than each
    # rank has.
    ranks = config.world_size * config.data_parallel_size
    available: int = psutil.virtual_memory().available
    return min(available // 4, 4 * 2**30) // ranks
