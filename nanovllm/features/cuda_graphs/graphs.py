"""CUDA graphs: records the decode step once per batch size, and replays it, with padding, in one
launch. Also warms up the kernels.

Built by notebooks/40_cuda_graphs.ipynb: edit it there.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.core.batch import Batch, StepBuffers
from nanovllm.core.forward import Forward
from nanovllm.core.runner_hooks import RunnerHooks

if TYPE_CHECKING:
    from nanovllm.attention.base import AttentionBackend
    from nanovllm.core.runner import ModelRunner
    from nanovllm.models.llama import LlamaForCausalLM

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


class GraphForward(Forward):
    """Runs a step in which all requests decode by replaying a recorded one of its size, with
    padding. It is recorded with padding tokens in the runner's buffers.

    Args:
        create_graph: makes an empty graph.

    Attributes:
        sizes: the recorded numbers of tokens, in rising order; empty before `prepare`.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        backend: AttentionBackend,
        create_graph: Callable[[], CudaGraph],
    ) -> None:
        super().__init__(model, backend)
        self.sizes: list[int] = []
        self._create_graph = create_graph
        self._clear()

    def _clear(self) -> None:
        self._pool: MemoryPool | None = None
        self._graphs: dict[int, CudaGraph] = {}
        self._out: Tensor | None = None

    # ---------------------------------------------------------------- recording

    @torch.inference_mode()
    def prepare(self, runner: ModelRunner) -> None:
        """Record the decode step for each size of the ladder, the largest first: its memory is
        enough for the others. Log the number of graphs and the time."""
        start = time.perf_counter()
        self._clear()
        sizes = ladder(runner.settings.max_decodes)
        fill_with_padding(runner.buffers, sizes[-1])
        for size in reversed(sizes):
            self.capture(runner, size)
        self.sizes = sizes
        seconds = time.perf_counter() - start
        logger.info(
            "captured %d CUDA graphs, for up to %d requests, in %.1f s",
            len(sizes),
            sizes[-1],
            seconds,
        )

    def capture(self, runner: ModelRunner, size: int) -> None:
        """Record the step with `size` rows. The largest size must come first."""
        self._graphs[size] = self._create_graph()
        work = partial(self.decode, runner, size)
        self._pool = self._graphs[size].capture(work, self._pool)

    def decode(self, runner: ModelRunner, size: int) -> Tensor:
        """Run the model on the `size` one-token requests in the buffers: the work that a graph
        records. It may read and write only persistent buffers, and its launches must not depend on
        lengths.

        Returns:
            The rows of the output buffer, which it has written: `[size, hidden_size]`.
        """
        inputs = runner.buffers.inputs(size, size, 1, runner.settings.max_request_tokens)
        out = self.run(*inputs)
        if self._out is None:  # the largest size
            self._out = torch.zeros_like(out)
        return self._out[:size].copy_(out)

    @torch.inference_mode()
    def extra_bytes(self, runner: ModelRunner) -> int:
        """Estimate the bytes of all graphs: those of the largest graph, with the kernels and the
        memory that all share, plus those of the second graph for each of the others."""
        free = [_free_bytes(runner.device)]
        sizes = ladder(runner.settings.max_decodes)
        largest_two = sizes[::-1][:2]
        fill_with_padding(runner.buffers, sizes[-1])
        for size in largest_two:
            self.capture(runner, size)
            free.append(_free_bytes(runner.device))
        self._clear()
        largest, *others = (before - after for before, after in pairwise(free))
        return largest + sum(others) * (len(sizes) - 1)

    # ---------------------------------------------------------------- a step

    def pad(self, buffers: StepBuffers, counts: np.ndarray) -> int:
        """Pad a batch of one-token sequences to a recorded size; returns the number of padding
        tokens."""
        if not self.sizes or counts.max() > 1:
            return 0
        num_seqs = len(counts)
        padded = self.size_for(num_seqs)
        buffers.pad(num_seqs, padded)
        return padded - num_seqs

    def size_for(self, num_seqs: int) -> int:
        """Return the smallest recorded size of at least `num_seqs`, which must exist."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def __call__(self, batch: Batch) -> Tensor | None:
        """Replay the step if it is recorded, otherwise run it; see `Forward`."""
        if self.sizes and len(batch.rows) and batch.metadata.max_query_len == 1:
            return self.replay(batch)
        return Forward.__call__(self, batch)

    def replay(self, batch: Batch) -> Tensor:
        """Compute a batch of one-token sequences, which is in the runner's buffers, with the graph
        of its size.

        The batch is padded to a recorded size, the length of `input_ids`. Its first
        `num_scheduled.sum()` rows are tokens.

        Returns:
            The rows of the tokens in the output buffer `_out`, a view.
        """
        assert self._out is not None, "the steps are recorded"
        self._graphs[len(batch.input_ids)].replay()
        return self._out[: int(batch.num_scheduled.sum())]


def fill_with_padding(buffers: StepBuffers, num_seqs: int) -> None:
    """Fill the buffers with padding tokens, on the device, too."""
    buffers.pad(0, num_seqs)
    buffers.inputs(num_seqs, num_seqs, 1, 1, upload=True)


class WarmUp(RunnerHooks):
    """Compiles all kernels before the first request.

    Args:
        num_heads: query heads of this rank.
    """

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads

    @torch.inference_mode()
    def allocated(self, runner: ModelRunner) -> None:
        """Run one step of padding tokens for each kind of step that the backend has."""
        start = time.perf_counter()
        forward = runner.forward
        settings = runner.settings
        most = settings.max_decodes
        kinds = forward.backend.step_kinds(
            self.num_heads, runner.kv_caches[0], most, settings.token_budget
        )
        fill_with_padding(runner.buffers, most)
        for num_seqs, max_query_len, max_seq_len in kinds:
            inputs = runner.buffers.inputs(num_seqs, num_seqs, max_query_len, max_seq_len)
            forward.run(*inputs)
        if runner.device.type == "cuda":
            # Wait for the uploads: the first batch overwrites their source.
            torch.cuda.synchronize(runner.device)
        logger.info(
            "warmed up with %d kinds of steps in %.1f s", len(kinds), time.perf_counter() - start
        )


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
