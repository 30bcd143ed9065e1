"""Backends whose operators are functions of one module: in plain torch, or compiled for the CPU.

Built by notebooks/14_prefill_and_decode.ipynb: edit it there.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.ops import reference


class TorchBackend(AttentionBackend):
    """Writes, then attends, with the operators of a module; see `AttentionBackend` for shapes."""

    name = "torch"
    operators: ModuleType = reference

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """Write all new tokens, then attend: a row may read a page that this step fills."""
        self.operators.write_kv_cache(k, v, kv_cache, metadata.slot_mapping)
        out: Tensor = self.operators.paged_attention(
            q,
            kv_cache,
            block_tables=metadata.block_tables,
            seq_lens=metadata.seq_lens,
            query_start_loc=metadata.query_start_loc,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        return out


class CpuBackend(TorchBackend):
    """Reads the pages in place with compiled loops: it gathers nothing, and a decode step reads
    every cached key and value once. Without a C++ compiler, the operators fall back to plain torch.
    """

    name = "cpu"
    operators = ops

    def compiled_functions(self, dtype: torch.dtype) -> tuple[int, int] | None:
        """See the base class."""
        return 0, 0
