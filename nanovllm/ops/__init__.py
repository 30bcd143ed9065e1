"""The operators of a decoder-only transformer in torch, C++ and Triton, and the choice of a device
(lectures 10, 15).

`reference` holds every operator in plain torch, for any device and dtype. `native` holds the same
operators as C++ loops for the CPU, compiled on first use. `triton` has those that a GPU gains from.
Both hand to `reference` whatever they do not cover. The device of the first tensor chooses the
module. With `NANOVLLM_NATIVE=0` in the environment, or in a copy of the package without `native`,
plain torch replaces the C++ loops; Triton's operators stay.

A GPU runs kernels after the call has returned, so they cannot raise an error. An IndexError on a
CPU is NaN on a GPU (`apply_rope`), or a failed assertion after which the process cannot use the GPU
any more.

**The paged cache** of one layer is `kv_cache[num_blocks, 2, num_kv_heads, block_size,
head_dim]`: slot `s` is in block `s // block_size` at offset `s % block_size`; index 0 of the second
axis holds keys, 1 values. The block is the outermost axis, so that swapping or sending a block is
one contiguous copy; the head comes before the offset, so that a kernel which attends with one head
reads one contiguous `[block_size, head_dim]` matrix per block."""

import contextlib
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from nanovllm.data.parts import MissingPartError, needed_for
from nanovllm.ops import reference
from nanovllm.ops.support import why_no_triton

logger = logging.getLogger(__name__)

# On a CPU, torch multiplies bfloat16 matrices with oneDNN, which compiles a kernel for every number
# of rows: 0.3 to 1 MB of memory and about a millisecond each. Prefills have any number of rows.
# oneDNN and torch's binding each keep the last 1024 kernels by default, several hundred megabytes.
# Both read their limits on first use.
MAX_COMPILED_PRODUCTS = 64
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, str(MAX_COMPILED_PRODUCTS))


class Kernels(Protocol):
    """The operators that each module of kernels has; the functions below describe them."""

    __name__: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    apply_rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    write_kv_cache: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    silu_and_mul: Callable[[Tensor], Tensor]
    pack_weight: Callable[[Tensor], Tensor]
    embedding: Callable[[Tensor, Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    grouped_linear: Callable[[Tensor, Tensor, Tensor], Tensor]
    widen: Callable[[Tensor], Tensor]
    argmax: Callable[[Tensor], Tensor]
    paged_attention: Callable[..., Tensor]


@cache
def _kernels(device: torch.device) -> Kernels:
    """The module whose functions serve tensors on this device; decided once per process."""
    if device.type == "cpu":
        with contextlib.suppress(MissingPartError), needed_for("compiled operators"):
            import nanovllm.ops.native as native

            if native.is_available():
                return cast(Kernels, native)
    if device.type == "cuda":
        # Each operator checks dtypes and sizes itself.
        obstacle = why_no_triton(device, head_dim=0)
        if obstacle is None:
            from nanovllm.ops import triton

            return cast(Kernels, triton)
        logger.warning("no Triton operators, using plain torch: %s", obstacle)
    return cast(Kernels, reference)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last axis (Zhang and Sennrich, 2019, arXiv
    1910.07467).

    Args:
        x: `[..., hidden]`; a strided `[tokens, heads, head_dim]` view of a fused projection will
            do.
        weight: `[hidden]`, of x's dtype.
        eps: added to the mean square.

    Returns: a new contiguous tensor of x's shape and dtype. The statistics are computed in float32,
        the normalised row is rounded to x's dtype and only then multiplied with the weight, as
        Hugging Face does.
    """
    return _kernels(x.device).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x to the residual stream and normalises the sum:
    `(rms_norm(residual + x), residual + x)`.

    **In place**: the sum is written into `residual`, which is the second tensor returned.

    Args:
        x, residual: `[tokens, hidden]`, of one dtype.
        weight, eps: as in `rms_norm`.
    """
    return _kernels(x.device).add_rms_norm(x, residual, weight, eps)


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al., 2021, arXiv 2104.09864) in Llama's layout: channel i of
    the first half of a head is rotated with channel i of the second half.

    **In place**: q and k are overwritten, and returned. Views of a fused qkv projection will do.

    Args:
        q: `[tokens, num_heads, head_dim]`.
        k: `[tokens, num_kv_heads, head_dim]`.
        positions: `[tokens]` int64.
        cos_sin: `[max_positions, head_dim]` float32, the cosines in the first half and the sines in
            the second.

    Raises:
        IndexError: a position is beyond the table.
    """
    return _kernels(q.device).apply_rope(q, k, positions, cos_sin)


def write_kv_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes new keys and values into the paged cache.

    Args:
        k, v: `[tokens, num_kv_heads, head_dim]`, rows may be strided.
        kv_cache: the layer's cache, see the module's docstring.
        slot_mapping: `[tokens]` int64, the slot of every token; -1 marks padding, which is not
            written.

    Raises:
        IndexError: a slot is beyond the cache.
    """
    _kernels(k.device).write_kv_cache(k, v, kv_cache, slot_mapping)


def silu_and_mul(x: Tensor) -> Tensor:
    """The gate of SwiGLU (Shazeer, 2020, arXiv 2002.05202): `silu(x[:, :size]) * x[:, size:]`.

    Args:
        x: `[tokens, 2 * size]`, the gate projection beside the up projection.

    Returns: `[tokens, size]`.
    """
    return _kernels(x.device).silu_and_mul(x)


def pack_weight(weight: Tensor) -> Tensor:
    """The weight in the layout that this machine multiplies fastest.

    A CPU's kernels read a copy from front to back, in groups of 16 outputs. In bfloat16 it is
    `[out_features / 16, in_features / 32, 16, 32]`, where `packed[g, s, w, 2 * o + i] = weight[16 *
    g + o, 32 * s + 2 * w + i]`: one instruction of Intel's AMX multiplies a kilobyte of it. In
    float32 it is `[out_features / 16, in_features / 32, 32, 16]`, and `packed[g, s, w, o] =
    weight[16 * g + o, 32 * s + w]`.

    Args:
        weight: `[out_features, in_features]`.

    Returns: a tensor that `linear` and `embedding` take in place of the weight: the copy, or the
    weight itself."""
    return _kernels(weight.device).pack_weight(weight)


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of a matrix.

    Args:
        token_ids: `[tokens]` int64.
        weight: `[vocabulary, hidden]`, or what `pack_weight` made of it, or a module that looks up
            its `rows`.

    Returns: `[tokens, hidden]`.
    """
    if not isinstance(weight, Tensor):
        rows: Tensor = weight.rows(token_ids)
        return rows
    return _kernels(weight.device).embedding(token_ids, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, accumulated in float32. On a CPU with compiled kernels, a row of the
    result depends on this row of x alone, to the last bit.

    Args:
        x: `[tokens, in_features]`.
        weight: `[out_features, in_features]`, or what `pack_weight` made of it, or a module that
            multiplies by its own weight.
        bias: `[out_features]` or None.

    Returns: `[tokens, out_features]`.
    """
    return (
        _kernels(x.device).linear(x, weight, bias)
        if isinstance(weight, Tensor)
        else weight(x, bias)
    )


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """`linear` with a weight for each group of rows (the experts of a mixture): the first
    `counts[0]` rows of x are multiplied with `weight[0]`, the next `counts[1]` with `weight[1]`,
    and so on.

    Args:
        x: `[rows, in_features]`.
        weight: `[groups, out_features, in_features]`; each of them may be what `linear` takes.
        counts: `[groups]` int64, on x's device; their sum is at most the number of rows.

    Returns: `[rows, out_features]`; rows beyond the last group are undefined.
    """
    if not isinstance(weight, Tensor):
        return reference.grouped_linear(x, weight, counts, linear)
    return _kernels(x.device).grouped_linear(x, weight, counts)


def widen(x: Tensor) -> Tensor:
    """In float32. `x` is `[rows, width]`; the tensor itself if it is of float32."""
    return _kernels(x.device).widen(x)


def argmax(x: Tensor) -> Tensor:
    """The index of the largest value of each row; of several equal ones, the first. NaN is larger
    than any number.

    Args:
        x: `[rows, columns]`.

    Returns: `[rows]` int64.
    """
    return _kernels(x.device).argmax(x)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Causal attention of a mixed batch over the paged cache (Kwon et al., 2023, arXiv 2309.06180).

    Sequence s has the query rows `query_start_loc[s]:query_start_loc[s + 1]`, which are the last
    positions of its `seq_lens[s]` tokens: one row when it decodes, all when it prefills, anything
    between for a chunk or after a prefix hit, none when the step does not compute it. All its keys
    and values, those of the query rows included, are in the cache.

    Args:
        q: `[tokens, num_heads, head_dim]`; num_heads is a multiple of the cache's num_kv_heads, and
            head h attends with KV head `h // (num_heads // num_kv_heads)`.
        kv_cache: the layer's cache, see the module's docstring.
        block_tables: `[sequences, max_blocks]` int32, the blocks of every sequence in order.
        seq_lens: `[sequences]` int32, tokens before this step and new ones together.
        query_start_loc: `[sequences + 1]` int32, rising from 0.
        scale: factor on the scores, usually `head_dim ** -0.5`.
        sliding_window: where above 0, position i sees the positions in `(i - sliding_window, i]`
            only (Mistral). Blocks that no query sees are not read, so their entries in the table
            may be stale.
        soft_cap: where above 0, scores pass through `soft_cap * tanh(score / soft_cap)` (Gemma 2).

    Returns: `[tokens, num_heads, head_dim]`, of q's dtype; rows beyond the last sequence are
    undefined.

    Raises:
        IndexError: a sequence needs a block that its table or the cache does not have.
    """
    return _kernels(q.device).paged_attention(
        q,
        kv_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
