"""The backends whose operators are functions of one module: in plain torch, and compiled for the
CPU.

Built by notebooks/14_prefill_and_decode.ipynb: edit it there.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from nanovllm import ops
from nanovllm.attention.base import AttentionMetadata
from nanovllm.ops import reference


class TorchBackend:
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
        """First every token is written, then every token reads. So a sequence may share a page that
        another sequence fills in this very step."""
        self.operators.write_kv_cache(k, v, kv_cache, metadata.slot_mapping)
        batch = metadata.block_tables, metadata.seq_lens, metadata.query_start_loc
        return self.operators.paged_attention(q, kv_cache, *batch, scale, sliding_window, soft_cap)


class CpuBackend(TorchBackend):
    """Reads the pages in place with compiled loops: it gathers nothing, and a decode step reads
    every cached key and value once. Without a C++ compiler, the operators fall back to plain torch.
    """

    name = "cpu"
    operators = ops
