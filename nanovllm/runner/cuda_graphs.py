"""A decode step as one launch: recorded once for a ladder of batch sizes, then padded and replayed;
and the warm-up before.

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

    MemoryPool = torch.cuda._POOL_HANDLE  # the id of memory that graphs share

logger = logging.getLogger(__name__)


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes to record, in rising order: 1, 2, 4, 8, multiples of 8 up to 256, of 16 up to
    512, of 32 up to 1024 and so on, and `max_num_seqs` itself. From 128 rows up, less than one row
    in sixteen is padding."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + max(8, 2 ** (sizes[-1].bit_length() - 1) // 16))
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class CudaGraph:
    """Work on an NVIDIA or AMD GPU that is recorded once and repeated as it was, addresses and
    shapes included.

    Args:
        stream: where it is recorded; all graphs that share memory have to be recorded on one
            stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], object], pool: MemoryPool | None) -> MemoryPool:
        """Record what `work` launches. The work is done once before, since CUDA cannot record while
        a Triton kernel is compiled, or while a library loads its kernels and allocates its
        workspace.

        Args:
            work: reads and writes at the same addresses every time.
            pool: memory for the temporary tensors of `work`, shared with other graphs that never
                run at the same time; None for the first of them.

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
        """Launch all of it again, on the current stream."""
        self.graph.replay()


class DecodeGraphs:
    """A decode step, recorded for some batch sizes, and the buffers for what it receives and
    computes. Fills the runner's buffers with padding, with which it records.

    It keeps no reference to the runner, which owns it: a cycle would hold the GPU's memory until
    Python collects garbage."""

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
        """Record the step of `size` rows. Begin with the largest: the others then find all the
        memory they need."""
        self._graphs[size] = self._make_graph()
        self._pool = self._graphs[size].capture(partial(self.decode, runner, size), self._pool)

    def decode(self, runner: ModelRunner, size: int) -> Tensor:
        """Run the model on the `size` requests in the buffers, one token each: this is what a graph
        records. So it reads and writes only buffers that never move, and its launches do not depend
        on any length."""
        inputs = runner.buffers.inputs(size, size, 1, runner.config.max_request_tokens)
        out = runner._run_model(
            *inputs, self._received[:size] if self._received is not None else None
        )
        if runner.speculator is not None:
            runner.speculator.keep()
        return self._out[:size].copy_(out)

    def size_for(self, num_seqs: int) -> int:
        """The smallest recorded size that is large enough; there is one."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def replay(self, batch: Batch, received: Tensor | None) -> Tensor:
        """Compute a batch of sequences of one token, which is in the runner's buffers, by the graph
        that fits.

        The batch has been padded to a recorded size, the length of `input_ids`; its first rows are
        tokens, so many of each request as `num_scheduled` says. If an earlier stage of a pipeline
        has sent rows (`received`), they are first copied to the beginning of the buffer that the
        graph reads, `_received`.

        Returns:
            The rows of these tokens in the output buffer `_out`. The last stage
            (`get_pp_group().is_last`, also without a pipeline) returns a view of the buffer. Other
            stages return a copy: the next replay may overwrite the buffer before the rows are sent.
        """
        count = int(batch.num_scheduled.sum())
        if received is not None and self._received is not None:
            self._received[:count].copy_(received)
        self._graphs[len(batch.input_ids)].replay()
        out = self._out[:count]
        # The next step may begin before this one's has been sent.
        return out if get_pp_group().is_last else out.clone()


@torch.inference_mode()
def capture_graphs(runner: ModelRunner) -> DecodeGraphs:
    """Record the runner's decode step for each size of the ladder, the largest first: the memory
    that it takes is enough for the others. Logs the number of graphs, and the time."""
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
    """Compile every kernel before the first request needs it: run a step of padding of each kind
    that the backend names."""
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
        torch.cuda.synchronize(
            runner.device
        )  # the first batch will overwrite what is being uploaded
    logger.info(
        "warmed up with %d kinds of steps in %.1f s", len(kinds), time.perf_counter() - start
    )
