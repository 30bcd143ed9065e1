"""C++ kernels for the CPU: compiled on first use, cached, called through ctypes.

The sources are plain C++ with a C interface, so that any compiler builds them in seconds, without
torch's headers or Python's. Where there is no compiler, or it fails, `is_available` says so once in
the log and `nanovllm.ops` goes on with plain torch. Every function here checks what its kernel
needs (float32 or bfloat16, dense rows, no gradient) and hands everything else to `reference`.

As many threads as `torch.get_num_threads()` share the tasks of a kernel (cpu_threads.h).

Environment: `CXX` names the compiler, `CXXFLAGS` is added to its flags, the result is kept under
`NANOVLLM_HOME` (~/.cache/nanovllm), and `NANOVLLM_NATIVE=0` leaves only plain torch on the CPU."""

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.ops import reference
from nanovllm.ops.native_library import BuildError, load_library

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / name for name in ("cpu_kernels.cpp", "cpu_attention.cpp", "cpu_layers.cpp")]
HEADERS = sorted(FOLDER.glob("cpu_*.h"))
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-pthread")

LINEAR_ALIGNMENT = 32
# Rows and columns of a packed weight's groups, for any CPU: the sizes of a tile in cpu_tiles.h.
PACKED_OUTPUTS = 16
PACKED_INPUTS = 32
HEAD_ALIGNMENT = 8

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64
_FLOAT = ctypes.c_float
_INT = ctypes.c_int
_BOOL = ctypes.c_bool
# Return type and arguments of each kernel. Those that return a flag refuse indices that point
# outside their tensors.
_SIGNATURES: dict[str, list[type | None]] = {
    "rms_norm": [None, *[_POINTER] * 3, *[_SIZE] * 4, _FLOAT, _INT],
    "add_rms_norm": [None, *[_POINTER] * 4, *[_SIZE] * 2, _FLOAT, _INT],
    "apply_rope": [_BOOL, *[_POINTER] * 4, *[_SIZE] * 7, _INT],
    "write_kv_cache": [_BOOL, *[_POINTER] * 4, *[_SIZE] * 8, _INT],
    "silu_and_mul": [None, *[_POINTER] * 2, *[_SIZE] * 2, _INT],
    "embedding": [_BOOL, *[_POINTER] * 3, *[_SIZE] * 3, _INT],
    "widen": [None, *[_POINTER] * 2, *[_SIZE] * 2, _INT],
    "argmax": [None, *[_POINTER] * 2, *[_SIZE] * 3, _INT],
    "linear": [None, *[_POINTER] * 4, *[_SIZE] * 3, _INT],
    "pack_weight": [None, *[_POINTER] * 2, *[_SIZE] * 2, _INT],
    "linear_packed": [None, *[_POINTER] * 4, *[_SIZE] * 3, _INT],
    "paged_attention": [_BOOL, *[_POINTER] * 6, *[_SIZE] * 10, _FLOAT, _SIZE, _FLOAT, _INT],
    "decoder_layers": [_BOOL, *[_POINTER] * 9, *[_SIZE] * 15, *[_FLOAT] * 3, _INT],
}
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


# ----------------------------------------------------------------------------------------- building


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernels; or None, with the reason in the log, if plain torch has to replace
    them."""
    try:
        library = load_library(SOURCES, HEADERS, FLAGS, "the CPU kernels")
    except (BuildError, OSError) as error:
        logger.warning("no CPU kernels, using plain torch: %s", error)
        return None
    library.keep_freed_memory()
    return library


def is_available() -> bool:
    """Whether the kernels can be used; the first call may compile them, which takes a few
    seconds."""
    return _library() is not None


@cache
def kernel_of(name: str, dtype: torch.dtype) -> Callable[..., bool] | None:
    """The C function for this dtype, or None where there is none."""
    library = _library()
    if library is None or dtype not in _SUFFIXES:
        return None
    address = ctypes.c_void_p.in_dll(library, f"{name}_{_SUFFIXES[dtype]}").value
    return ctypes.CFUNCTYPE(*_SIGNATURES[name])(address)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------- operators


_NOTHING = torch.empty(0)  # its address is null


def _kernel_for(name: str, fits: bool, *tensors: Tensor) -> Callable[..., bool] | None:
    """The C function for these tensors; None if they do not fit, if their dtypes differ or have no
    kernel, or if one needs a gradient."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype:
            return None
    if not fits or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return None
    return kernel_of(name, dtype)


def call(kernel: Callable[..., bool], tensors: Sequence[Tensor], *numbers: float) -> bool:
    """Call a C function with the addresses of tensors (an empty tensor's is null), numbers, and the
    number of threads."""
    return kernel(*map(Tensor.data_ptr, tensors), *numbers, torch.get_num_threads())


def _heads_are_dense(tensor: Tensor) -> bool:
    """Whether the heads of `[tokens, heads, head_dim]` are contiguous within each token; tokens may
    lie apart."""
    _, head_stride, stride = tensor.stride()
    return stride == 1 and head_stride == tensor.shape[2]


def _blocks_are_dense(kv_cache: Tensor) -> bool:
    """Whether every block is contiguous; blocks may lie apart, as in a cache that holds all layers
    of a block."""
    return kv_cache.is_contiguous() or kv_cache[0].is_contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    heads = x.ndim == 3
    width = x.shape[-1]
    fits = weight.numel() == width and (x.is_contiguous() or (heads and _heads_are_dense(x)))
    if (kernel := _kernel_for("rms_norm", fits, x, weight)) is None:
        return reference.rms_norm(x, weight, eps)
    out = torch.empty_like(x)
    groups, stride = (x.shape[1], x.stride(0)) if heads else (1, width)
    sizes = (x.numel() // (groups * width), groups, width, stride)
    call(kernel, (x, weight, out), *sizes, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    fits = (
        residual.shape == x.shape
        and weight.numel() == width
        and x.is_contiguous()
        and residual.is_contiguous()
    )
    if (kernel := _kernel_for("add_rms_norm", fits, x, residual, weight)) is None:
        return reference.add_rms_norm(x, residual, weight, eps)
    out = torch.empty_like(x)
    call(kernel, (x, residual, weight, out), x.numel() // width, width, eps)
    return out, residual


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    num_positions, rotated = cos_sin.shape
    fits = (
        positions.dtype == torch.int64
        and cos_sin.dtype == torch.float32
        and cos_sin.is_contiguous()
    )
    fits = fits and rotated == head_dim and positions.numel() == tokens and _heads_are_dense(q)
    fits = fits and k.shape == (tokens, num_kv_heads, head_dim) and _heads_are_dense(k)
    if (kernel := _kernel_for("apply_rope", fits, q, k)) is None:
        return reference.apply_rope(q, k, positions, cos_sin)
    sizes = tokens, num_heads, num_kv_heads, head_dim, q.stride(0), k.stride(0), num_positions
    if not call(kernel, (q, k, positions.contiguous(), cos_sin), *sizes):
        raise IndexError(f"a position is outside the table of {num_positions} rotations")
    return q, k


def write_kv_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    tokens = slot_mapping.numel()
    fits = (
        k.shape == v.shape == (tokens, num_kv_heads, head_dim) and slot_mapping.dtype == torch.int64
    )
    fits = fits and _heads_are_dense(k) and _heads_are_dense(v) and _blocks_are_dense(kv_cache)
    if (kernel := _kernel_for("write_kv_cache", fits, k, v, kv_cache)) is None:
        return reference.write_kv_cache(k, v, kv_cache, slot_mapping)
    sizes = (
        tokens,
        num_kv_heads,
        head_dim,
        num_blocks,
        block_size,
        k.stride(0),
        v.stride(0),
        kv_cache.stride(0),
    )
    if not call(kernel, (k, v, kv_cache, slot_mapping.contiguous()), *sizes):
        raise IndexError(f"a slot is beyond the cache of {num_blocks} blocks of {block_size}")


def silu_and_mul(x: Tensor) -> Tensor:
    if (kernel := _kernel_for("silu_and_mul", x.is_contiguous(), x)) is None:
        return reference.silu_and_mul(x)
    tokens, width = x.shape
    out = x.new_empty(tokens, width // 2)
    call(kernel, (x, out), tokens, width // 2)
    return out


def pack_weight(weight: Tensor) -> Tensor:
    outputs, inner = weight.shape
    fits = weight.is_contiguous() and outputs % PACKED_OUTPUTS == 0 and inner % PACKED_INPUTS == 0
    if (kernel := _kernel_for("pack_weight", fits, weight)) is None:
        return weight
    values = 4 // weight.itemsize  # of a word
    shape = (
        outputs // PACKED_OUTPUTS,
        inner // PACKED_INPUTS,
        PACKED_INPUTS // values,
        values * PACKED_OUTPUTS,
    )
    packed = weight.new_empty(shape)
    call(kernel, (weight, packed), inner, outputs)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `nanovllm.ops.linear`. A kernel's result for a token does not depend on the others in the
    batch. Torch's library, which multiplies what no kernel takes, chooses the order of the sums for
    the whole matrix."""
    x = x.contiguous()
    tokens, inner = x.shape
    if packed := weight.ndim == 4:
        outputs = weight.shape[0] * PACKED_OUTPUTS
        weight_inner = weight.shape[1] * PACKED_INPUTS
    else:
        outputs, weight_inner = weight.shape
    fits = inner == weight_inner and weight.is_contiguous()
    fits = fits and (packed or inner % LINEAR_ALIGNMENT == 0)
    if bias is not None:
        fits = fits and bias.dtype == x.dtype and bias.is_contiguous() and bias.numel() == outputs
    if (kernel := _kernel_for("linear_packed" if packed else "linear", fits, x, weight)) is None:
        return reference.linear(x, weight, bias)
    out = x.new_empty(tokens, outputs)
    call(kernel, (x, weight, _NOTHING if bias is None else bias, out), tokens, inner, outputs)
    return out


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    kernel = kernel_of("embedding", weight.dtype)
    if weight.ndim != 4 or kernel is None:
        return reference.embedding(token_ids, weight)
    inner = weight.shape[1] * PACKED_INPUTS
    outputs = weight.shape[0] * PACKED_OUTPUTS
    out = weight.new_empty(len(token_ids), inner)
    if not call(kernel, (token_ids.contiguous(), weight, out), len(token_ids), inner, outputs):
        raise IndexError(f"a token is not in the vocabulary of {outputs}")
    return out


def widen(x: Tensor) -> Tensor:
    # For so many numbers torch would wake threads of its own, which takes longer than the numbers
    # of one row.
    if x.dtype is torch.float32 or (kernel := _kernel_for("widen", x.is_contiguous(), x)) is None:
        return x.float()
    out = torch.empty(x.shape)
    call(kernel, (x, out), *x.shape)
    return out


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return reference.grouped_linear(x, weight, counts, linear)


def argmax(x: Tensor) -> Tensor:
    fits = x.shape[1] > 0 and x.stride(1) == 1
    if (kernel := _kernel_for("argmax", fits, x)) is None:
        return reference.argmax(x)
    out = torch.empty(len(x), dtype=torch.int64)
    call(kernel, (x, out), *x.shape, x.stride(0))
    return out


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
    _, num_heads, q_head_dim = q.shape
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    fits = (
        q_head_dim == head_dim and head_dim % HEAD_ALIGNMENT == 0 and num_heads % num_kv_heads == 0
    )
    fits = (
        fits and _heads_are_dense(q) and _blocks_are_dense(kv_cache) and block_tables.stride(1) == 1
    )
    fits = fits and block_tables.dtype == seq_lens.dtype == query_start_loc.dtype == torch.int32
    if (kernel := _kernel_for("paged_attention", fits, q, kv_cache)) is None:
        return reference.paged_attention(
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
    tensors = q, kv_cache, out, block_tables, seq_lens.contiguous(), query_start_loc.contiguous()
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
    if not call(kernel, tensors, *sizes, scale, sliding_window, soft_cap):
        raise IndexError(
            "seq_lens, query_start_loc and block_tables do not agree with each other or the cache"
        )
    return out
