"""The interface of attention backends, and the forward context that gives them a step's
metadata.

Built by notebooks/14_prefill_and_decode.ipynb: edit it there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from nanovllm import ops


@dataclass
class AttentionMetadata:
    """The positions of a mixed batch's tokens. The new tokens of all sequences are packed one after
    another.

    Sequence s has the rows `query_start_loc[s] : query_start_loc[s + 1]`; they are the *last*
    positions of its `seq_lens[s]` tokens. One row is a decode, all rows are a whole prompt, some
    rows are a chunk or the rest after a prefix-cache hit. The two vectors express all of these, so
    no flag is needed for prefill and decode.

    Attributes:
        query_start_loc: `[num_seqs + 1]` int32.
        seq_lens: `[num_seqs]` int32, tokens in the cache once this step's have been written.
        block_tables: `[num_seqs, max_blocks]` int32; entries past a sequence's last block are not
            read.
        slot_mapping: `[num_tokens]` int64, `block * block_size + offset` for each new token; -1
            marks padding.
        max_query_len, max_seq_len: the largest values, known on the host.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int


class Rotary(NamedTuple):
    """The rotation still to be applied to queries and keys: `positions` `[num_tokens]` int64, and
    the table `cos_sin` `[max_positions, head_dim]` float32."""

    positions: Tensor
    cos_sin: Tensor


class AttentionBackend(ABC):
    """Writes new keys and values into the cache of one layer and attends over it.

    Attributes:
        name: of the backend, for messages.
        fuses_rotary: `forward` takes a further argument `rotary`, a `Rotary` or None, and rotates q
            and k while it writes. For all other backends, `attend` rotates them first.
    """

    name: str
    fuses_rotary = False

    # A CUDA graph may record decode steps: `forward` reads no length on the host (lecture 40).
    supports_graphs = False
    # Kernels are compiled on first use, in the variants that `step_kinds` lists.
    compiles_kernels = False
    # Dtype of a quantized cache (lecture 41; None: the model's), and bytes added to each row.
    kv_dtype: torch.dtype | None = None
    scale_bytes = 0

    @abstractmethod
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
        """Attention of all new tokens, each over its own sequence up to itself.

        Args:
            q: `[num_tokens, num_heads, head_dim]`.
            k, v: `[num_tokens, num_kv_heads, head_dim]`; each KV head serves
                `num_heads / num_kv_heads` query heads.
            kv_cache: `[num_blocks, 2, num_kv_heads, block_size, head_dim]` of this layer, changed
                in place.
            scale: factor on q·k.
            sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; 0
                means all.
            soft_cap: above 0, scores pass through `soft_cap * tanh(score / soft_cap)` (Gemma 2).

        Returns:
            `[num_tokens, num_heads, head_dim]`, in q's dtype.
        """

    def step_kinds(
        self, num_heads: int, kv_cache: Tensor, max_num_seqs: int, max_num_tokens: int
    ) -> list[tuple[int, int, int]]:
        """List steps that together make a backend compile every kernel that a step of up to
        `max_num_seqs` sequences and `max_num_tokens` tokens can need.

        Args:
            kv_cache: of any layer.

        Returns:
            Number of sequences, `max_query_len` and `max_seq_len` of each kind.
        """
        return []

    def compiled_functions(self, dtype: torch.dtype) -> tuple[int, int] | None:
        """Addresses of the C++ functions that write to the cache and attend, for layers that run in
        one call (models/fused.py): 0 for those of an unquantized cache; None if the backend does
        not run in C++, or not with activations of this dtype."""
        return None


def kv_cache_shape(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int
) -> tuple[int, ...]:
    """Shape of one layer's cache. A block's keys and values are contiguous, so that it moves as one
    piece. Within a block, each head's rows are contiguous, so that a kernel that serves one head
    reads them in one stream."""
    return (num_blocks, 2, num_kv_heads, block_size, head_dim)


@dataclass
class ForwardContext:
    """The inputs of a forward pass beyond the model's: attention backend, caches and metadata.

    Attributes:
        kv_caches: by the layer's number in the model, for the layers of this rank.
    """

    backend: AttentionBackend
    kv_caches: list[Tensor] | dict[int, Tensor]
    metadata: AttentionMetadata


_current: ContextVar[ForwardContext | None] = ContextVar("forward_context", default=None)


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make the context visible to the attention layers, for the duration of one forward pass.

    Raises:
        RuntimeError: a context is already set in this thread; two forward passes would write to
            each other's slots.
    """
    if _current.get() is not None:
        raise RuntimeError("a forward pass is already running; forward contexts cannot be nested")
    _current.set(context)
    try:
        yield
    finally:
        _current.set(None)


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass.

    Raises:
        RuntimeError: no forward pass is running.
    """
    if (context := _current.get()) is None:
        raise RuntimeError("attention was called outside `with forward_context(...)`")
    return context


class AttentionOptions(TypedDict, total=False):
    """Arguments of `AttentionBackend.forward` that not every model passes."""

    sliding_window: int
    soft_cap: float


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    scale: float,
    rotary: Rotary | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Attention as a model calls it: the model names its layer, and the forward context supplies
    cache and metadata. Shapes and options as in `AttentionBackend.forward`. With `rotary`, q and k
    are not rotated yet, and may be overwritten."""
    context = get_forward_context()
    backend = context.backend
    kv_cache = context.kv_caches[layer]
    if rotary is not None and not backend.fuses_rotary:
        q, k = ops.apply_rope(q, k, rotary.positions, rotary.cos_sin)
    # An argument of backends with `fuses_rotary` alone.
    fused: dict[str, Rotary | None] = {"rotary": rotary} if backend.fuses_rotary else {}
    return backend.forward(
        q, k, v, kv_cache, metadata=context.metadata, scale=scale, **options, **fused
    )
