"""A decode step as one launch: recorded once for a ladder of batch sizes, then padded and replayed.

Built by notebooks/17_model_runner.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from nanovllm.attention.base import AttentionBackend

logger = logging.getLogger(__name__)


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes to record, in rising order: 1, 2, 4, 8, multiples of 8 up to 256, of 16 up to 512, of 32 up to 1024 and
    so on, and `max_num_seqs` itself. From 128 rows up, less than one row in sixteen is padding."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + max(8, 2 ** (sizes[-1].bit_length() - 1) // 16))
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class Graph(Protocol):
    """Work on a device that is recorded once and repeated as it was, addresses and shapes included."""

    def capture(self, work: Callable[[], Tensor], pool: Any) -> Any:
        """Record what `work` launches.

        Args:
            work: reads and writes at the same addresses every time; returns the tensor that holds its result.
            pool: memory for what is in between, shared with other graphs that never run at the same time; None
                for the first of them.

        Returns:
            The pool, for the next graph.
        """

    def replay(self) -> None:
        """Launch all of it again, on the current stream."""


class CudaGraph:
    """A `Graph` on an NVIDIA or AMD GPU.

    Args:
        stream: where it is recorded; all graphs that share memory have to be recorded on one stream.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.graph = torch.cuda.CUDAGraph()

    def capture(self, work: Callable[[], Tensor], pool: Any) -> Any:
        """See `Graph.capture`. The work is done once before, since nothing can be recorded while a Triton kernel is
        compiled, or a library loads its own and makes itself a workspace."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
        torch.cuda.current_stream().wait_stream(self.stream)
        with torch.cuda.graph(self.graph, pool=pool, stream=self.stream):
            work()
        return self.graph.pool()

    def replay(self) -> None:
        """See `Graph.replay`."""
        self.graph.replay()


def graph_maker(device: torch.device, backend: AttentionBackend, enforce_eager: bool) -> Callable[[], Graph] | None:
    """What makes an empty graph; None where every kernel is launched anew in each step."""
    if device.type != "cuda" or enforce_eager:
        return None
    if not getattr(backend, "supports_graphs", False):
        logger.warning(
            "no CUDA graphs, so that decode steps take longer: attention backend '%s' reads lengths on the host",
            backend.name,
        )
        return None
    return partial(CudaGraph, torch.cuda.Stream(device))


class DecodeGraphs:
    """A decode step, recorded for some batch sizes.

    Args:
        make_graph: makes an empty graph.
    """

    def __init__(self, make_graph: Callable[[], Graph]) -> None:
        self._make_graph = make_graph
        self._graphs: dict[int, Graph] = {}
        self._pool: Any = None
        self.sizes: list[int] = []

    def capture(self, size: int, decode: Callable[[int], Tensor]) -> None:
        """Record the step of `size` rows. Begin with the largest: the others then find all the memory they need.

        Args:
            decode: computes the step of so many rows, from buffers that never move to one that never moves. It is not
                kept: the runner that owns these graphs would hold itself, and its memory on the GPU, for ever.
        """
        graph = self._make_graph()
        self._pool = graph.capture(partial(decode, size), self._pool)
        self._graphs[size] = graph
        self.sizes = sorted(self._graphs)

    def size_for(self, num_seqs: int) -> int:
        """The smallest recorded size that is large enough; there is one."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def replay(self, size: int) -> None:
        """Compute the step of `size` rows that is in the buffers."""
        self._graphs[size].replay()
