"""Measures the GPU memory that is left for the KV pool: runs the largest step, and records two CUDA
graphs.

Built by notebooks/40_cuda_graphs.ipynb: edit it there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.data.sampling_params import SamplingParams
from nanovllm.distributed.groups import get_pp_group
from nanovllm.ops.device import out_of_memory
from nanovllm.runner.batch import StepBuffers
from nanovllm.runner.cuda_graphs import DecodeGraphs
from nanovllm.runner.memory import longest_request
from nanovllm.runner.sampling import SamplingRow

if TYPE_CHECKING:
    from nanovllm.runner.runner import ModelRunner

logger = logging.getLogger(__name__)


def free_memory(runner: ModelRunner) -> int:
    """Return the bytes of GPU memory for the KV pool; below 0 if there are none.

    Raises:
        ValueError: the largest step does not fit in the memory.
    """
    share = runner.config.gpu_memory_utilization
    gib = 2**30
    with out_of_memory("the largest step", "lower max_num_batched_tokens or max_num_seqs"):
        profile = profile_run(runner)
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


def profile_run(runner: ModelRunner) -> MemoryProfile:
    """Run the largest possible step, record two graphs, and measure their memory."""
    device = runner.device
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step(runner)
    # Buffers and workspaces of libraries stay allocated after the step.
    activations = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    free, total = _free_and_total(device)
    graphs = graph_memory(runner) if runner.make_graph is not None else 0
    return MemoryProfile(
        total=total, in_use=total - free, weights=weights, activations=activations, graphs=graphs
    )


def _free_and_total(device: torch.device) -> tuple[int, int]:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


@torch.inference_mode()
def run_largest_step(runner: ModelRunner) -> None:
    """Run a step with the most tokens and the most requests, all of which sample. They read one
    block of zeros, and write no KV."""
    config = runner.config
    longest = longest_request(runner)
    budget = (
        config.token_budget if config.enable_chunked_prefill else max(config.token_budget, longest)
    )
    num_seqs = min(config.max_num_seqs, budget)
    counts = np.full(num_seqs, min(budget // num_seqs, longest))
    # The first request gets the rest of the token budget, so that its prompt is the longest.
    counts[0] = min(longest, counts[0] + budget % num_seqs)
    num_tokens = int(counts.sum())
    most = int(counts.max())
    runner.kv_caches = runner._make_caches(1, runner.device)
    runner.buffers = StepBuffers(config, budget, -(-longest // config.block_size), runner.device)
    runner.buffers.slot_mapping.array[:] = -1
    runner.buffers.query_start_loc.array[1 : num_seqs + 1] = np.cumsum(counts)
    runner.buffers.seq_lens.array[:num_seqs] = counts
    inputs = runner.buffers.inputs(num_seqs, num_tokens, most, most, upload=True)
    hidden = runner._run_model(*inputs, runner.blank(num_tokens))
    if get_pp_group().is_last:
        params = SamplingParams(temperature=1, top_p=0.9, logprobs=1)
        row = SamplingRow(params, np.zeros(1, dtype=np.int32), 1)
        runner.sampler.sample(runner.model.compute_logits(hidden[:num_seqs]), [row] * num_seqs)


@torch.inference_mode()
def graph_memory(runner: ModelRunner) -> int:
    """Estimate the bytes of all graphs: those of the largest graph, with the memory that all share,
    plus those of the second graph for each of the others."""
    free = [_free_and_total(runner.device)[0]]
    graphs = DecodeGraphs(runner)
    largest_two = graphs.sizes[:-3:-1]
    # So that compiled and loaded kernels do not count as a graph's memory.
    graphs.decode(runner, largest_two[-1])
    for size in largest_two:
        graphs.capture(runner, size)
        free.append(_free_and_total(runner.device)[0])
    largest, *others = (before - after for before, after in pairwise(free))
    return largest + sum(others) * (len(graphs.sizes) - 1)
