"""The paged cache in 8 bits, in plain torch: the fallback where no faster kernel fits, and the
oracle for those kernels.

A layer's cache is `kv_cache[num_blocks, 2, num_kv_heads, block_size, head_dim + 4]`, of int8 or
float8_e4m3fn (OCP 8-bit floating point, Micikevicius et al., 2022, arXiv 2209.05433). Its last two
axes are one row of bytes: first the `[block_size, head_dim]` values of a head, then their
`[block_size]` float32 scales. So a block is still one piece of memory, which can be swapped, sent
and stored by code that knows nothing of scales, and values begin at multiples of 16 bytes.

Each key and each value of a token and KV head has a scale of its own, as in vLLM's
int8_per_token_head and fp8_per_token_head: a number that is written once never changes, whatever is
written after it, so that a token's value does not depend on its batch."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.ops import attention

SCALE_BYTES = 4
#: The largest number of each format.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# A row whose numbers are all below this is rounded as if its largest were this: the inverse of its
# scale is a float32.
TINY = 1e-30


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize each row to 8 bits, in float32: the scale is absmax / LARGEST, and a number becomes
    x * (LARGEST / absmax), rounded to the nearest value of the format, halves to even.

    Args:
        x: `[..., head_dim]`, finite, below 1e38.

    Returns: values of x's shape, and float32 scales `[..., 1]`.
    """
    wide = x.float()
    absmax = wide.abs().amax(-1, keepdim=True).clamp(min=TINY)
    # A number / a tensor would be rounded twice.
    scaled = wide * (torch.full_like(absmax, LARGEST[dtype]) / absmax)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), absmax / LARGEST[dtype]


def parts(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a cache: values `[num_blocks, 2, num_kv_heads, block_size,
    head_dim]` and scales `[..., block_size, 1]`."""
    block_size, width = kv_cache.shape[3:]
    values, scales = kv_cache.flatten(3).split(
        [block_size * (width - SCALE_BYTES), block_size * SCALE_BYTES], dim=3
    )
    return values.unflatten(3, (block_size, -1)), scales.view(torch.float32).unsqueeze(-1)


def write_kv_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """As `ops.write_kv_cache`, into a cache as the module describes it."""
    new = zip(
        parts(kv_cache), quantize(k, kv_cache.dtype), quantize(v, kv_cache.dtype), strict=True
    )
    for part, keys, values in new:
        attention.write_kv_cache(keys, values, part, slot_mapping)


def gather_kv(
    kv_cache: Tensor, block_table: Tensor, seq_len: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """As `attention.gather_kv`: keys and values, in float32."""
    pages = (attention.gather_kv(part, block_table, seq_len, first) for part in parts(kv_cache))
    (keys, values), (key_scales, value_scales) = pages
    return keys.float() * key_scales, values.float() * value_scales


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
    """As `ops.paged_attention`, over a cache as the module describes it."""
    return attention.paged_attention(
        q,
        kv_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        gather=gather_kv,
    )
