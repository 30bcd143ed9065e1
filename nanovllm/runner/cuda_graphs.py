"""CUDA graphs: records the decode step once per batch size, and replays it, with padding, in one
launch. Also warms up the kernels.

Built by notebooks/40_cuda_graphs.ipynb and 42: edit it there.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.distributed.groups import get_pp_group, get_tp_group
from nanovllm.runner.batch import Batch

if TYPE_CHECKING:
    from nanovllm.runner.runner import ModelRunner

    MemoryPool = torch.cuda._POOL_HANDLE  # id of the memory pool that graphs share

logger = logging.getLogger(__name__)


def ladder(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to record, in rising order: 1, 2, 4, 8, multiples of 8 up to 256, of
    16 up to 512, of 32 up to 1024 and so on, and `max_num_seqs`. With 128 rows or more, less than
    1/16 of the rows are padding."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + max(8, 2 ** (sizes[-1].bit_length() - 1) // 16))
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class CudaGraph:
    """Recorded work of an NVIDIA or AMD GPU. Replays repeat it with the same addresses and shapes.

    Args:
        stream: the stream to record on; the same one for all graphs that share memory.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], object], pool: MemoryPool | None) -> MemoryPool:
        """Record the launches of `work`. Run it once before: CUDA cannot record while Triton
        compiles a kernel, or while a library loads kernels and allocates workspace.

        Args:
            work: must read and write at the same addresses every time.
            pool: memory for the temporary tensors of `work`, shared with graphs that never run
                simultaneously; None for the first graph.

        Returns:
            The pool, for the next graph.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.current_stream().wait_stream(self.stream)
        with torch.cuda.graph(self.graph, pool=pool, stream=self.stream):
            work()
        memory: MemoryPool = self.graph.pool()
        return memory

    def replay(self) -> None:
        """Launch the recorded work on the current stream."""
        self.graph.replay()


class DecodeGraphs:
    """The decode step, recorded for several batch sizes, and the buffers for its input and output.
    It is recorded with padding tokens in the runner's buffers.

    It holds no reference to the runner, which owns it: with a reference cycle, the GPU's memory
    would not be freed before Python's garbage collection."""

    def __init__(self, runner: ModelRunner) -> None:
        self.sizes = ladder(runner.config.max_decodes)
        assert runner.make_graph is not None, "only then are graphs recorded"
        self._make_graph = runner.make_graph
        self._pool: MemoryPool | None = None
        self._graphs: dict[int, CudaGraph] = {}
        most = self.sizes[-1]
        self._received = runner.blank(most)
        self._out = runner.blank_output(most)
        runner.buffers.pad(0, most)
        runner.buffers.inputs(most, most, 1, 1, upload=True)

    def capture(self, runner: ModelRunner, size: int) -> None:
        """Record the step with `size` rows. The largest size must come first: its memory is enough
        for the others."""
        self._graphs[size] = self._make_graph()
        self._pool = self._graphs[size].capture(partial(self.decode, runner, size), self._pool)

    def decode(self, runner: ModelRunner, size: int) -> Tensor:
        """Run the model on the `size` one-token requests in the buffers: the work that a graph
        records. It may read and write only persistent buffers, and its launches must not depend on
        lengths."""
        inputs = runner.buffers.inputs(size, size, 1, runner.config.max_request_tokens)
        out = runner._run_model(
            *inputs, self._received[:size] if self._received is not None else None
        )
        if runner.speculator is not None:
            runner.speculator.keep()
        return self._out[:size].copy_(out)

    def size_for(self, num_seqs: int) -> int:
        """Return the smallest recorded size of at least `num_seqs`, which must exist."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def replay(self, batch: Batch, received: Tensor | None) -> Tensor:
        """Compute a batch of one-token sequences, which is in the runner's buffers, with the graph
        of its size.

        The batch is padded to a recorded size, the length of `input_ids`. Its first
        `num_scheduled.sum()` rows are tokens. If an earlier pipeline stage has sent rows
        (`received`), copy them to the beginning of the graph's input buffer (`_received`) first.

        Returns:
            The rows of the tokens in the output buffer `_out`: a view on the last pipeline stage
            (`get_pp_group().is_last`, also without a pipeline), a copy on the others, because the
            next replay may overwrite the buffer before the rows are sent.
        """
        count = int(batch.num_scheduled.sum())
        if received is not None and self._received is not None:
            self._received[:count].copy_(received)
        self._graphs[len(batch.input_ids)].replay()
        out = self._out[:count]
        # The next step may begin before these rows have been sent.
        return out if get_pp_group().is_last else out.clone()


@torch.inference_mode()
def capture_graphs(runner: ModelRunner) -> DecodeGraphs:
    """Record the runner's decode step for each size of the ladder, the largest first: its memory is
    enough for the others. Log the number of graphs and the time."""
    start = time.perf_counter()
    graphs = DecodeGraphs(runner)
    for size in reversed(graphs.sizes):
        graphs.capture(runner, size)
    seconds = time.perf_counter() - start
    logger.info(
        "captured %d CUDA graphs, for up to %d requests, in %.1f s",
        len(graphs.sizes),
        graphs.sizes[-1],
        seconds,
    )
    return graphs


@torch.inference_mode()
def warm_up(runner: ModelRunner) -> None:
    """Compile all kernels before the first request: run one step of padding tokens for each kind of
    step that the backend has."""
    config = runner.config
    start = time.perf_counter()
    most = config.max_decodes
    num_heads = runner.model_config.num_heads // get_tp_group().world_size
    kinds = runner.backend.step_kinds(num_heads, runner.kv_caches[0], most, config.token_budget)
    runner.buffers.pad(0, most)
    runner.buffers.inputs(most, most, 1, 1, upload=True)
    for num_seqs, max_query_len, max_seq_len in kinds:
        inputs = runner.buffers.inputs(num_seqs, num_seqs, max_query_len, max_seq_len)
        runner._run_model(*inputs, runner.blank(num_seqs))
    if runner.device.type == "cuda":
        # Wait for the uploads: the first batch overwrites their source.
        torch.cuda.synchronize(runner.device)
    logger.info(
        "warmed up with %d kinds of steps in %.1f s", len(kinds), time.perf_counter() - start
    )
