"""Replays steps with drafts as recorded steps of plain decoding: each token is a separate sequence.

Built by notebooks/42_speculative_decoding.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from nanovllm.features.cuda_graphs.graphs import CudaGraph, GraphForward

if TYPE_CHECKING:
    from nanovllm.attention.base import AttentionBackend
    from nanovllm.core.runner import ModelRunner
    from nanovllm.models.llama import LlamaForCausalLM


class DraftGraphForward(GraphForward):
    """Replays a step in which all requests decode, with or without drafts.

    Args:
        max_decode_tokens: the most tokens of a request that decodes: one, and its drafts.
        keep_outputs: called at the end of each recorded step: copies what a drafter reads besides
            the hidden states into buffers whose addresses do not change.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        backend: AttentionBackend,
        create_graph: Callable[[], CudaGraph],
        *,
        max_decode_tokens: int,
        keep_outputs: Callable[[], None],
    ) -> None:
        super().__init__(model, backend, create_graph)
        self._max_decode_tokens = max_decode_tokens
        self._keep_outputs = keep_outputs

    def decode(self, runner: ModelRunner, size: int) -> Tensor:
        """See `GraphForward`; also keep what a drafter reads."""
        out = super().decode(runner, size)
        self._keep_outputs()
        return out

    def sequences(self, rows: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return row and number of tokens of each sequence, as attention sees them.

        If all requests decode, with or without drafts, and a graph can compute the step, each token
        is a sequence of one: a graph has one token per sequence, and a draft sees the drafts before
        it in the cache. Otherwise, each request is a sequence."""
        if (
            not self.sizes
            or counts.max() > self._max_decode_tokens
            or counts.sum() > self.sizes[-1]
        ):
            return rows, counts
        return rows.repeat(counts), np.ones(counts.sum(), dtype=np.int64)
