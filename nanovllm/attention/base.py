"""What a step tells attention, how it gets there, and what every attention backend has to answer.

Built by notebooks/14_prefill_and_decode.ipynb: edit it there, then run `python -m nanovllm.course build`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor


@dataclass
class AttentionMetadata:
    """Where the tokens of a mixed batch belong. The new tokens of all sequences are packed one after another.

    Sequence s has the rows `query_start_loc[s] : query_start_loc[s + 1]`; they are the *last* positions of its
    `seq_lens[s]` tokens. One row is a decode step, all rows a whole prompt, some rows a chunk or the rest after a
    prefix hit: the two vectors together say it all, and no flag tells prefill from decode.

    Attributes:
        query_start_loc: `[num_seqs + 1]` int32.
        seq_lens: `[num_seqs]` int32, tokens in the cache once this step's have been written.
        block_tables: `[num_seqs, max_blocks]` int32; entries past a sequence's last block are not read.
        slot_mapping: `[num_tokens]` int64, `block * block_size + offset` for each new token; -1 marks padding.
        max_query_len, max_seq_len: the largest values, known on the host.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int


class AttentionBackend(Protocol):
    """Writes new keys and values into the cache of one layer and attends over it."""

    name: str

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int = 0,
    ) -> Tensor:
        """Attention of all new tokens, each over its own sequence up to itself.

        Args:
            q: `[num_tokens, num_heads, head_dim]`.
            k, v: `[num_tokens, num_kv_heads, head_dim]`; each KV head serves `num_heads / num_kv_heads` query heads.
            kv_cache: `[num_blocks, 2, num_kv_heads, block_size, head_dim]` of this layer, changed in place.
            scale: factor on q·k.
            sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; 0 means all.

        Returns:
            `[num_tokens, num_heads, head_dim]`, in q's dtype.
        """


def kv_cache_shape(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """Shape of one layer's cache. A block's keys and values lie together, so that it moves as one piece; within
    it, each head's rows lie together, so that a kernel that serves one head reads them in one stream."""
    return (num_blocks, 2, num_kv_heads, block_size, head_dim)


@dataclass
class ForwardContext:
    """What a forward pass needs beside the model's inputs: who attends, over which caches, and where."""

    backend: AttentionBackend
    kv_caches: list[Tensor]
    metadata: AttentionMetadata


_current: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make the context visible to the attention layers below, for the duration of one forward pass.

    Raises:
        RuntimeError: a context is set already: two forward passes would write to each other's slots.
    """
    global _current
    if _current is not None:
        raise RuntimeError("a forward pass is running already; forward contexts do not nest")
    _current = context
    try:
        yield
    finally:
        _current = None


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass.

    Raises:
        RuntimeError: no forward pass is running.
    """
    if _current is None:
        raise RuntimeError("attention was called outside of `with forward_context(...)`")
    return _current


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, sliding_window: int = 0) -> Tensor:
    """Attention as a model calls it: it says which layer it is and learns nothing else. Shapes as in
    `AttentionBackend.forward`."""
    context = get_forward_context()
    return context.backend.forward(q, k, v, context.kv_caches[layer], context.metadata, scale, sliding_window)


# name -> module and class; imported when chosen, so that nobody needs what he does not use.
BACKENDS = {
    "torch": ("nanovllm.attention.torch", "TorchBackend"),
    "cpu": ("nanovllm.attention.cpu", "CpuBackend"),
}


def get_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called `name`; "auto" takes the fastest one for the device.

    Raises:
        ValueError: an unknown name, or a backend that cannot run on this device; names the alternative.
    """
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "torch"
    if name not in BACKENDS:
        raise ValueError(
            f"attention backend {name!r} is not available here; available: {', '.join(BACKENDS)}"
        )
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"attention backend 'cpu' does not run on {device.type}; use 'torch'")
    module, cls = BACKENDS[name]
    return getattr(import_module(module), cls)()
