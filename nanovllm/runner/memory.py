"""How many KV blocks a runner has room for.

Without a GPU that is simple arithmetic; on a GPU it is not known before the largest step has been run.

Built by notebooks/17_model_runner.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
from torch import Tensor

from nanovllm.data.config import parse_bytes
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.ops.device import MemoryProfile, out_of_memory
from nanovllm.runner.sampling import SamplingRow

if TYPE_CHECKING:
    from nanovllm.runner.runner import ModelRunner

logger = logging.getLogger(__name__)


def longest_request(runner: ModelRunner) -> int:
    """Tokens that a request may have before the size of the pool is known."""
    positions = runner.model_config.max_position_embeddings
    return min(runner.config.max_model_len or positions, positions)


def num_blocks_that_fit(runner: ModelRunner) -> int:
    """Blocks for the KV pool: as the settings say, or by `kv_cache_memory`, or a sane part of what is free.

    Args:
        runner: its weights are loaded, and its caches are not made yet.

    Raises:
        ValueError: not one block fits.
    """
    config, size = runner.config, runner.bytes_per_block
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.kv_cache_memory is not None:
        free = parse_bytes(config.kv_cache_memory, "kv_cache_memory")
        count = free // size
    else:
        free = free_memory(runner)
        # By default, no more memory than all running requests fill at their longest.
        count = min(free // size, config.max_num_seqs * -(-longest_request(runner) // config.block_size))
    if count < 1:
        raise ValueError(
            f"no KV block of {size} bytes fits into {max(0, free)} bytes: "
            f"raise kv_cache_memory or gpu_memory_utilization, or lower block_size"
        )
    return count


def free_memory(runner: ModelRunner) -> int:
    """Bytes that the pool may take if the settings do not say how many."""
    config, gib = runner.config, 2**30
    if runner.device.type != "cuda":  # all ranks share the memory; on several machines, there is more than this
        ranks = config.world_size * config.data_parallel_size
        return min(psutil.virtual_memory().available // 4, 4 * gib) // ranks
    with out_of_memory("the largest step", "lower max_num_batched_tokens or max_num_seqs"):
        found = profile_run(runner)
    share = config.gpu_memory_utilization
    left = found.left(share)
    logger.info(
        "GPU memory: %.2f GiB, of which %.0f %% may be used: %s; that leaves %.2f GiB for the KV pool",
        found.total / gib, 100 * share, found, left / gib,
    )  # fmt: skip
    return left


def profile_run(runner: ModelRunner) -> MemoryProfile:
    """Run the largest step that there can be, record two graphs, and measure what that takes."""
    device = runner.device
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step(runner)
    # What stays allocated (buffers, workspaces of libraries) is in use from now on.
    activations = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    free, total = _free_and_total(device)
    graphs = graph_memory(runner) if runner.make_graph is not None else 0
    return MemoryProfile(total, total - free, weights, activations, graphs)


def _free_and_total(device: torch.device) -> tuple[int, int]:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


@torch.inference_mode()
def run_largest_step(runner: ModelRunner) -> None:
    """Run as many tokens as a step may have, of as many requests as there may be, every one of which samples. All read one block
    of zeros, and write nothing."""
    config, longest = runner.config, longest_request(runner)
    budget = config.token_budget if config.enable_chunked_prefill else max(config.token_budget, longest)
    num_seqs = min(config.max_num_seqs, budget)
    counts = np.full(num_seqs, min(budget // num_seqs, longest))
    # The rest of the budget goes to the first request, which has the longest prompt then.
    counts[0] = min(longest, counts[0] + budget % num_seqs)
    num_tokens, most = int(counts.sum()), int(counts.max())
    runner.kv_caches = runner._make_caches(1, runner.device)
    runner._make_buffers(budget, -(-longest // config.block_size))
    runner._slot_mapping.array[:] = -1
    runner._query_start_loc.array[1 : num_seqs + 1] = np.cumsum(counts)
    runner._seq_lens.array[:num_seqs] = counts
    runner._upload(num_seqs, num_tokens)
    inputs = runner._inputs(num_seqs, num_tokens, most, most)
    hidden = runner._run_model(*inputs, runner.link.blank(num_tokens))
    if isinstance(hidden, Tensor):
        params = SamplingParams(temperature=1, top_p=0.9, logprobs=1)
        row = SamplingRow(params, np.zeros(1, dtype=np.int32), 1)
        runner.sampler.sample(runner.model.compute_logits(hidden[:num_seqs]), [row] * num_seqs)


@torch.inference_mode()
def graph_memory(runner: ModelRunner) -> int:
    """Bytes that the ladder of graphs will take: the largest with the memory that all share, and as much for each of the others as
    the second."""
    sizes, free = runner._graph_sizes(), [_free_and_total(runner.device)[0]]
    graphs = runner._empty_graphs()
    largest_two = sizes[:-3:-1]
    runner._decode(largest_two[-1])  # what it compiles and loads is not to be counted as a graph's
    for size in largest_two:
        graphs.capture(size, runner._decode)
        free.append(_free_and_total(runner.device)[0])
    largest, *others = (before - after for before, after in pairwise(free))
    return largest + sum(others) * (len(sizes) - 1)
