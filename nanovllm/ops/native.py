"""C++ kernels for the CPU: compiled on first use, cached, called through ctypes.

The sources are plain C++ with a C interface, so that any compiler builds them in seconds, without torch's headers or
Python's. Where there is no compiler, or it fails, `is_available` says so once in the log and `nanovllm.ops` goes on
with plain torch. Every function here checks what its kernel needs (float32 or bfloat16, dense rows, no gradient) and
hands everything else to `reference`.

The kernels' threads are those of torch's own OpenMP runtime, as many as `torch.get_num_threads()`: a second runtime
would keep a second set of threads spinning on the same cores.

Environment: `CXX` names the compiler, `CXXFLAGS` is added to its flags, the result is kept under `NANOVLLM_HOME`
(~/.cache/nanovllm), and `NANOVLLM_NATIVE=0` leaves only plain torch on the CPU.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.ops import reference
from nanovllm.ops.native_library import BuildError, load_library

logger = logging.getLogger(__name__)

SOURCES = ("cpu_kernels.cpp", "cpu_attention.cpp")
HEADERS = ("cpu_vector.h", "cpu_tiles.h", "cpu_products.h")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC")

# Beyond so many tokens a matrix product belongs to torch's library, which then repays rearranging its operands.
# Measured with AVX512_BF16 on matrices of 576 x 576 to 4096 x 4096, where the two meet between 48 and 96.
MAX_LINEAR_TOKENS = 48
LINEAR_ALIGNMENT = 32
# The groups of a packed weight, as the tiles of cpu_tiles.h have them.
PACKED_OUTPUTS, PACKED_INPUTS = 16, 32
HEAD_ALIGNMENT = 8

_POINTER, _SIZE, _FLOAT, _INT, _BOOL = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int, ctypes.c_bool)
# What each kernel returns and takes. Those that return a flag refuse indices that point outside their tensors.
_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": [None, *[_POINTER] * 3, *[_SIZE] * 4, _FLOAT, _INT],
    "add_rms_norm": [None, *[_POINTER] * 4, *[_SIZE] * 2, _FLOAT, _INT],
    "apply_rope": [_BOOL, *[_POINTER] * 4, *[_SIZE] * 7, _INT],
    "write_kv_cache": [_BOOL, *[_POINTER] * 4, *[_SIZE] * 8, _INT],
    "silu_and_mul": [None, *[_POINTER] * 2, *[_SIZE] * 2, _INT],
    "linear": [None, *[_POINTER] * 4, *[_SIZE] * 3, _INT],
    "pack_weight": [None, *[_POINTER] * 2, *[_SIZE] * 2, _INT],
    "linear_packed": [None, *[_POINTER] * 4, *[_SIZE] * 3, _INT],
    "paged_attention": [_BOOL, *[_POINTER] * 6, *[_SIZE] * 10, _FLOAT, _SIZE, _FLOAT, _INT],
}
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


# ---------------------------------------------------------------------------------------------------- building


def _openmp_runtime() -> str | None:
    """The OpenMP library that torch has loaded into this process."""
    try:
        mapped = Path("/proc/self/maps").read_text().split()
    except OSError:
        return None
    return next((path for path in mapped if Path(path).name.startswith(("libgomp", "libiomp5", "libomp"))), None)


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernels, or None, with the reason in the log, where plain torch has to do."""
    if os.environ.get("NANOVLLM_NATIVE") == "0":
        logger.info("CPU kernels are switched off by NANOVLLM_NATIVE=0")
        return None
    reasons = []
    folder = Path(__file__).parent
    sources, headers = [folder / name for name in SOURCES], [folder / name for name in HEADERS]
    try:
        runtime = _openmp_runtime()
        attempts: list[tuple[str, ...]] = [FLAGS]
        if runtime:
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
            # Not every compiler knows the flag or the runtime's symbols; one thread is better than no kernels.
            attempts.insert(0, (*FLAGS, "-fopenmp"))
        for attempt in attempts:
            try:
                library = load_library(sources, headers, attempt, "the CPU kernels")
                library.keep_freed_memory()
                return library
            except BuildError as error:
                reasons.append(str(error))
    except OSError as error:
        reasons.append(str(error))
    logger.warning("no CPU kernels, using plain torch: %s", "; ".join(dict.fromkeys(reasons)))
    return None


def is_available() -> bool:
    """Whether the kernels are there; the first call may compile them, which takes a few seconds."""
    return _library() is not None


@cache
def _kernel(name: str, dtype: torch.dtype) -> Callable[..., bool] | None:
    """The C function for this dtype, or None where there is none."""
    library = _library()
    if library is None or dtype not in _SUFFIXES:
        return None
    address = ctypes.c_void_p.in_dll(library, f"{name}_{_SUFFIXES[dtype]}").value
    assert address is not None
    return ctypes.CFUNCTYPE(*_SIGNATURES[name])(address)


# --------------------------------------------------------------------------------------------------- operators


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _heads_are_dense(tensor: Tensor) -> bool:
    """Whether the heads of `[tokens, heads, head_dim]` follow one another; tokens may lie apart."""
    _, head_stride, stride = tensor.stride()
    return stride == 1 and head_stride == tensor.shape[2]


def _blocks_are_dense(kv_cache: Tensor) -> bool:
    """Whether every block is contiguous; blocks may lie apart, as in a cache that holds all layers of a block."""
    return kv_cache.is_contiguous() or kv_cache[0].is_contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    kernel = _kernel("rms_norm", x.dtype)
    heads = x.ndim == 3
    width = x.shape[-1]
    fits = weight.dtype == x.dtype and weight.numel() == width
    fits = fits and (x.is_contiguous() or (heads and _heads_are_dense(x)))
    if kernel is None or not fits or _needs_gradient(x, weight):
        return reference.rms_norm(x, weight, eps)
    out = torch.empty_like(x)
    groups, stride = (x.shape[1], x.stride(0)) if heads else (1, width)
    tokens = x.numel() // (groups * width)
    threads = torch.get_num_threads()
    kernel(x.data_ptr(), weight.data_ptr(), out.data_ptr(), tokens, groups, width, stride, eps, threads)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    kernel = _kernel("add_rms_norm", x.dtype)
    width = x.shape[-1]
    fits = residual.dtype == weight.dtype == x.dtype and residual.shape == x.shape and weight.numel() == width
    fits = fits and x.is_contiguous() and residual.is_contiguous()
    if kernel is None or not fits or _needs_gradient(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps)
    out = torch.empty_like(x)
    kernel(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.numel() // width,
        width,
        eps,
        torch.get_num_threads(),
    )
    return out, residual


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    kernel = _kernel("apply_rope", q.dtype)
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    num_positions, rotated = cos_sin.shape
    fits = q.dtype == k.dtype and positions.dtype == torch.int64 and cos_sin.dtype == torch.float32
    fits = fits and rotated == head_dim and positions.numel() == tokens
    fits = fits and k.shape == (tokens, num_kv_heads, head_dim) and cos_sin.is_contiguous()
    fits = fits and _heads_are_dense(q) and _heads_are_dense(k)
    if kernel is None or not fits or _needs_gradient(q, k):
        return reference.apply_rope(q, k, positions, cos_sin)
    positions = positions.contiguous()
    if not kernel(
        q.data_ptr(),
        k.data_ptr(),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        tokens,
        num_heads,
        num_kv_heads,
        head_dim,
        q.stride(0),
        k.stride(0),
        num_positions,
        torch.get_num_threads(),
    ):
        raise IndexError(f"a position is outside the table of {num_positions} rotations")
    return q, k


def write_kv_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    kernel = _kernel("write_kv_cache", k.dtype)
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    tokens = slot_mapping.numel()
    fits = k.dtype == v.dtype == kv_cache.dtype and slot_mapping.dtype == torch.int64
    fits = fits and k.shape == v.shape == (tokens, num_kv_heads, head_dim)
    fits = fits and _heads_are_dense(k) and _heads_are_dense(v) and _blocks_are_dense(kv_cache)
    if kernel is None or not fits or _needs_gradient(k, v):
        return reference.write_kv_cache(k, v, kv_cache, slot_mapping)
    slot_mapping = slot_mapping.contiguous()
    if not kernel(
        k.data_ptr(),
        v.data_ptr(),
        kv_cache.data_ptr(),
        slot_mapping.data_ptr(),
        tokens,
        num_kv_heads,
        head_dim,
        num_blocks,
        block_size,
        k.stride(0),
        v.stride(0),
        kv_cache.stride(0),
        torch.get_num_threads(),
    ):
        raise IndexError(f"a slot is beyond the cache of {num_blocks} blocks of {block_size}")


def silu_and_mul(x: Tensor) -> Tensor:
    kernel = _kernel("silu_and_mul", x.dtype)
    if kernel is None or not x.is_contiguous() or _needs_gradient(x):
        return reference.silu_and_mul(x)
    tokens, width = x.shape
    size = width // 2
    out = x.new_empty(tokens, size)
    kernel(x.data_ptr(), out.data_ptr(), tokens, size, torch.get_num_threads())
    return out


@cache
def _has_tiles() -> bool:
    """Whether a bfloat16 product of matrices takes one instruction a tile here, for which weights are packed."""
    library = _library()
    return library is not None and ctypes.CFUNCTYPE(_BOOL)(("has_tiles", library))()


def pack_weight(weight: Tensor) -> Tensor:
    outputs, inner = weight.shape
    fits = weight.dtype == torch.bfloat16 and weight.is_contiguous()
    fits = fits and outputs % PACKED_OUTPUTS == 0 and inner % PACKED_INPUTS == 0
    kernel = _kernel("pack_weight", weight.dtype) if fits and _has_tiles() else None
    if kernel is None:
        return weight
    packed = weight.new_empty(outputs // PACKED_OUTPUTS, inner // PACKED_INPUTS, PACKED_INPUTS // 2, 2 * PACKED_OUTPUTS)
    kernel(weight.data_ptr(), packed.data_ptr(), inner, outputs, torch.get_num_threads())
    return packed


def _linear_packed(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    kernel = _kernel("linear_packed", torch.bfloat16)
    tokens, inner = x.shape
    outputs = packed.shape[0] * PACKED_OUTPUTS
    if kernel is None or x.dtype != torch.bfloat16 or not x.is_contiguous() or _needs_gradient(x, packed):
        return reference.linear(x, packed, bias)
    if inner != packed.shape[1] * PACKED_INPUTS:
        raise RuntimeError(f"{inner} inputs do not fit a weight of {packed.shape[1] * PACKED_INPUTS}")
    out = x.new_empty(tokens, outputs)
    kernel(
        x.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        tokens,
        inner,
        outputs,
        torch.get_num_threads(),
    )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `nanovllm.ops.linear`. Packed, or up to MAX_LINEAR_TOKENS, a token's result does not depend on the others in
    the batch; else the sums run in another order, chosen by torch's library for the whole matrix."""
    if weight.ndim == 4:
        return _linear_packed(x, weight, bias)
    kernel = _kernel("linear", x.dtype)
    tokens, inner = x.shape
    outputs, weight_inner = weight.shape
    fits = tokens <= MAX_LINEAR_TOKENS and inner % LINEAR_ALIGNMENT == 0 and weight_inner == inner
    fits = fits and weight.dtype == x.dtype and x.is_contiguous() and weight.is_contiguous()
    if bias is not None:
        fits = fits and bias.dtype == x.dtype and bias.is_contiguous() and bias.numel() == outputs
    if kernel is None or not fits or _needs_gradient(x, weight):
        return reference.linear(x, weight, bias)
    out = x.new_empty(tokens, outputs)
    kernel(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        tokens,
        inner,
        outputs,
        torch.get_num_threads(),
    )
    return out


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return reference.grouped_linear(x, weight, counts, linear)


def argmax(x: Tensor) -> Tensor:
    if x.dtype != torch.float32 or x.requires_grad:  # numpy has no bfloat16
        return reference.argmax(x)
    # numpy's own loop takes a fifth of the time of torch's, which compares one number at a time.
    return torch.from_numpy(x.numpy().argmax(axis=-1))


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
    kernel = _kernel("paged_attention", q.dtype)
    _, num_heads, q_head_dim = q.shape
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    fits = q.dtype == kv_cache.dtype and q_head_dim == head_dim and head_dim % HEAD_ALIGNMENT == 0
    fits = fits and num_heads % num_kv_heads == 0 and _heads_are_dense(q) and _blocks_are_dense(kv_cache)
    fits = fits and block_tables.dtype == seq_lens.dtype == query_start_loc.dtype == torch.int32
    if kernel is None or not fits or block_tables.stride(1) != 1 or _needs_gradient(q, kv_cache):
        return reference.paged_attention(
            q, kv_cache, block_tables, seq_lens, query_start_loc, scale, sliding_window, soft_cap
        )
    out = torch.empty_like(q)
    seq_lens, query_start_loc = seq_lens.contiguous(), query_start_loc.contiguous()
    if not kernel(
        q.data_ptr(),
        kv_cache.data_ptr(),
        out.data_ptr(),
        block_tables.data_ptr(),
        seq_lens.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        q.stride(0),
        num_blocks,
        kv_cache.stride(0),
        block_tables.shape[1],
        block_tables.stride(0),
        scale,
        sliding_window,
        soft_cap,
        torch.get_num_threads(),
    ):
        raise IndexError("seq_lens, query_start_loc and block_tables do not agree with each other or the cache")
    return out
