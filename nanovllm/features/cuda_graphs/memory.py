"""Measures the GPU memory that is left for the KV pool: runs the largest step, and records two CUDA
graphs.

Built by notebooks/40_cuda_graphs.ipynb: edit it there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.core.runner import RunnerSettings
from nanovllm.core.sampling import SamplingRow
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import resolve
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.ops.device import out_of_memory

if TYPE_CHECKING:
    from nanovllm.core.runner import ModelRunner

logger = logging.getLogger(__name__)


def free_memory(runner: ModelRunner, config: EngineConfig, longest: int) -> int:
    """Return the bytes of GPU memory for the KV pool; below 0 if there are none.

    Args:
        runner: its weights are loaded, and its caches are not made yet.
        longest: the most tokens of a request.

    Raises:
        ValueError: the largest step does not fit in the memory.
    """
    share = config.gpu_memory_utilization
    gib = 2**30
    with out_of_memory("the largest step", "lower max_num_batched_tokens or max_num_seqs"):
        profile = profile_run(runner, config, longest)
    left = int(profile.total * share) - profile.in_use - profile.activations - profile.graphs
    logger.info(
        "GPU memory: %.2f GiB, of which %.0f %% may be used: weights %.2f GiB, activations %.2f "
        "GiB, graphs %.2f GiB, other %.2f GiB; that leaves %.2f GiB for the KV pool",
        profile.total / gib,
        100 * share,
        profile.weights / gib,
        profile.activations / gib,
        profile.graphs / gib,
        (profile.in_use - profile.weights) / gib,
        left / gib,
    )
    return left


@dataclass(frozen=True)
class MemoryProfile:
    """The use of a GPU's memory, in bytes.

    Attributes:
        total: the GPU's memory.
        in_use: used between two steps, by weights, CUDA and its libraries, and other processes.
        weights: allocated by torch before the first step.
        activations: allocated in addition while the largest step runs.
        graphs: estimated for CUDA graphs.
    """

    total: int
    in_use: int
    weights: int
    activations: int
    graphs: int


def profile_run(runner: ModelRunner, config: EngineConfig, longest: int) -> MemoryProfile:
    """Run the largest possible step, record two graphs, and measure their memory."""
    device = runner.device
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step(runner, config, longest)
    # Buffers and workspaces of libraries stay allocated after the step.
    activations = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    free, total = _free_and_total(device)
    return MemoryProfile(
        total=total,
        in_use=total - free,
        weights=weights,
        activations=activations,
        graphs=runner.forward.extra_bytes(runner),
    )


def _free_and_total(device: torch.device) -> tuple[int, int]:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


@torch.inference_mode()
def run_largest_step(runner: ModelRunner, config: EngineConfig, longest: int) -> None:
    """Run a step with the most tokens and the most requests, all of which sample. They read one
    block of zeros, and write no KV."""
    max_blocks = -(-longest // config.block_size)
    # As if the pool had room for exactly one request.
    resolved = resolve(config, model_max_len=longest, num_kv_blocks=max_blocks, on_gpu=True)
    budget = resolved.token_budget
    if not config.enable_chunked_prefill:
        budget = max(budget, longest)
    num_seqs = min(config.max_num_seqs, budget)
    counts = np.full(num_seqs, min(budget // num_seqs, longest))
    # The first request gets the rest of the token budget, so that its prompt is the longest.
    counts[0] = min(longest, counts[0] + budget % num_seqs)
    num_tokens = int(counts.sum())
    most = int(counts.max())
    runner.make_buffers(
        RunnerSettings(
            max_num_seqs=config.max_num_seqs,
            max_request_tokens=longest,
            max_blocks=max_blocks,
            token_budget=budget,
            max_num_samples=resolved.max_num_samples,
            max_decodes=resolved.max_decodes,
        ),
        num_blocks=1,
    )
    runner.buffers.slot_mapping.array[:] = -1
    runner.buffers.query_start_loc.array[1 : num_seqs + 1] = np.cumsum(counts)
    runner.buffers.seq_lens.array[:num_seqs] = counts
    inputs = runner.buffers.inputs(num_seqs, num_tokens, most, most, upload=True)
    hidden = runner.forward.run(*inputs)
    if runner.forward.samples:
        params = SamplingParams(temperature=1, top_p=0.9, logprobs=1)
        row = SamplingRow(params, np.zeros(1, dtype=np.int32), 1)
        logits = runner.forward.model.compute_logits(hidden[:num_seqs])
        runner.sampler.sample(logits, [row] * num_seqs)
