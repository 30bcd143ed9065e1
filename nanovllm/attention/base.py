"""The interface of attention backends, and the forward context that gives them a step's
metadata.

Built by notebooks/14_prefill_and_decode.ipynb: edit it there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.data.parts import load
from nanovllm.ops.support import why_no_triton

logger = logging.getLogger(__name__)


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
        marks padding. max_query_len, max_seq_len: the largest values, known on the host.
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


class AttentionBackend(Protocol):
    """Writes new keys and values into the cache of one layer and attends over it.

    A backend with `fuses_rotary = True` takes a further argument `rotary`, a `Rotary` or None, and
    rotates q and k while it writes. For all other backends, `attend` rotates them first."""

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
        connector: if KV is shared with other engines (lecture 31), may save a layer after its
            attention.
    """

    backend: AttentionBackend
    kv_caches: list[Tensor] | dict[int, Tensor]
    metadata: AttentionMetadata
    connector: Any = None


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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    scale: float,
    rotary: Rotary | None = None,
    **options: Any,
) -> Tensor:
    """Attention as a model calls it: the model names its layer, and the forward context supplies
    cache and metadata. Shapes and options as in `AttentionBackend.forward`. With `rotary`, q and k
    are not rotated yet, and may be overwritten. A connector may save the layer then."""
    context = get_forward_context()
    if getattr(context.backend, "fuses_rotary", False):
        options["rotary"] = rotary
    elif rotary is not None:
        q, k = ops.apply_rope(q, k, rotary.positions, rotary.cos_sin)
    kv_cache = context.kv_caches[layer]
    connector = context.connector
    out = context.backend.forward(q, k, v, kv_cache, context.metadata, scale, **options)
    if connector is not None:
        connector.save_kv_layer(layer, kv_cache)
    return out


# Modules and classes of each backend, for ordinary and for latent attention (lecture 26); imported
# when it is chosen.
BACKENDS = {
    "torch": ("torch:TorchBackend", "latent:TorchLatentBackend"),
    "cpu": ("torch:CpuBackend", "latent:TorchLatentBackend"),
    "triton": ("triton:TritonBackend", "latent_kernels:TritonLatentBackend"),
}


def get_backend(
    name: str, device: torch.device, head_dim: int = 64, latent: bool = False
) -> AttentionBackend:
    """The backend called `name`; "auto" takes the fastest one for the device; `latent` for latent
    attention.

    Raises:
        ValueError: an unknown name, or a backend that cannot run this model on this device; names
            the alternative.
    """
    if name not in (*BACKENDS, "auto"):
        raise ValueError(
            f"attention backend {name!r} is not available here; available: {', '.join(BACKENDS)}"
        )
    if name == "cpu" and device.type != "cpu":
        raise ValueError(f"attention backend 'cpu' does not run on {device.type}; use 'torch'")
    if name == "auto" and device.type == "cpu":
        name = "cpu"
    if name in ("auto", "triton"):
        obstacle = why_no_triton(device, head_dim)
        if obstacle is not None and name == "triton":
            raise ValueError(
                f"attention backend 'triton' cannot run here: {obstacle}; use 'auto' or 'torch'"
            )
        if obstacle is not None:
            logger.warning(
                "using the slow attention backend 'torch', because 'triton' cannot run: %s",
                obstacle,
            )
        name = "triton" if obstacle is None else "torch"
    return load(f"nanovllm.attention.{BACKENDS[name][latent]}", f"attention backend {name!r}")()


def backend_name(backend: AttentionBackend, given: str = "auto") -> str:
    """Return the name in `BACKENDS` of a backend: the given one, or else the one that "auto" has
    become."""
    names = {spec.partition(":")[2]: name for name, specs in BACKENDS.items() for spec in specs}
    if given != "auto":
        return given
    return next(names[kind.__name__] for kind in type(backend).__mro__ if kind.__name__ in names)
