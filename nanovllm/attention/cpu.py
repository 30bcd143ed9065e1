"""Paged attention on the CPU: compiled loops that read the pages where they lie."""

from __future__ import annotations

from torch import Tensor

from nanovllm import ops
from nanovllm.attention.base import AttentionMetadata


class CpuBackend:
    """Nothing is gathered: a decode step reads every cached key and value once, which is the least it can do."""

    name = "cpu"

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
        """See `AttentionBackend.forward`; without a C++ compiler the operators fall back to torch."""
        ops.write_kv_cache(k, v, kv_cache, metadata.slot_mapping)
        return ops.paged_attention(
            q,
            kv_cache,
            metadata.block_tables,
            metadata.seq_lens,
            metadata.query_start_loc,
            scale,
            sliding_window,
            soft_cap,
        )
