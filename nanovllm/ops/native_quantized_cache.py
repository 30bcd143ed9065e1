"""The paged cache in 8 bits in C++ (cpu_quantized_cache.cpp): the bytes of `quantized_cache`, and
attention that rounds less.

What a kernel does not take (other dtypes, rows with gaps) goes to `quantized_cache`, as everything
does without a compiler."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from nanovllm.ops import native, quantized_cache
from nanovllm.ops.native_library import BuildError, load_library

logger = logging.getLogger(__name__)


@cache
def _library() -> ctypes.CDLL | None:
    source = native.FOLDER / "cpu_quantized_cache.cpp"
    try:
        return load_library(
            [source], native.HEADERS, native.FLAGS, "kernels for a quantized KV cache"
        )
    except (BuildError, OSError) as error:
        logger.warning("no CPU kernels for a quantized KV cache, using plain torch: %s", error)
        return None


def _address(name: str, kv_dtype: torch.dtype, dtype: torch.dtype) -> int:
    symbol = f"{name}_{str(kv_dtype).removeprefix('torch.')}_{native._SUFFIXES[dtype]}"
    return ctypes.c_void_p.in_dll(_library(), symbol).value  # type: ignore[arg-type, return-value]


@cache
def _kernel(name: str, kv_dtype: torch.dtype, dtype: torch.dtype) -> Callable[..., bool] | None:
    """The C function for a cache and queries of these dtypes; None where there is none."""
    if dtype not in native._SUFFIXES or _library() is None:
        return None
    signature = native._SIGNATURES[name]
    return ctypes.CFUNCTYPE(*signature)(_address(name, kv_dtype, dtype))  # type: ignore[arg-type]


def compiled(kv_dtype: torch.dtype) -> dict[torch.dtype, tuple[int, int]]:
    """The addresses of the functions that write and attend, by the dtype of queries, for layers in
    one call (models/fused.py)."""
    names = "write_kv_cache", "paged_attention"
    dtypes = native._SUFFIXES if _library() is not None else ()
    return {dtype: tuple(_address(name, kv_dtype, dtype) for name in names) for dtype in dtypes}  # type: ignore[misc]


def write_kv_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    num_blocks, _, num_kv_heads, block_size, _ = kv_cache.shape
    kernel = _kernel("write_kv_cache", kv_cache.dtype, k.dtype)
    fits = (
        native._heads_are_dense(k)
        and native._heads_are_dense(v)
        and native._blocks_are_dense(kv_cache)
    )
    if kernel is None or not fits:
        return quantized_cache.write_kv_cache(k, v, kv_cache, slot_mapping)
    sizes = (
        len(slot_mapping),
        num_kv_heads,
        k.shape[2],
        num_blocks,
        block_size,
        k.stride(0),
        v.stride(0),
    )
    if not native.call(
        kernel, (k, v, kv_cache, slot_mapping.contiguous()), *sizes, kv_cache.stride(0)
    ):
        raise IndexError(f"a slot is beyond the cache of {num_blocks} blocks of {block_size}")


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
    _, num_heads, head_dim = q.shape
    num_blocks, _, num_kv_heads, block_size, _ = kv_cache.shape
    kernel = _kernel("paged_attention", kv_cache.dtype, q.dtype)
    fits = (
        native._heads_are_dense(q)
        and native._blocks_are_dense(kv_cache)
        and block_tables.stride(1) == 1
    )
    if kernel is None or not fits or head_dim % native.HEAD_ALIGNMENT:
        return quantized_cache.paged_attention(
            q,
            kv_cache,
            block_tables=block_tables,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
    out = torch.empty_like(q)
    sizes = (
        len(seq_lens),
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        q.stride(0),
        num_blocks,
        kv_cache.stride(0),
        block_tables.shape[1],
        block_tables.stride(0),
    )
    tensors = q, kv_cache, out, block_tables, seq_lens.contiguous(), query_start_loc.contiguous()
    if not native.call(kernel, tensors, *sizes, scale, sliding_window, soft_cap):
        raise IndexError(
            "seq_lens, query_start_loc and block_tables do not agree with each other or the cache"
        )
    return out
