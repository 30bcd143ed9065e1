"""Products with quantized weights in C++ (cpu_quantized.cpp): the results of `reference_quantized`
to the last bit.

A packed weight has three axes, `[out_features / 16, words, 16 * bytes of a word]`: word w of 16
outputs side by side, so that it is read from front to back. A word of an 8-bit weight is four
neighbouring inputs of one output, each plus 128."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.ops import native, reference_quantized
from nanovllm.ops.native_library import BuildError, load_library
from nanovllm.ops.reference_quantized import linear_w8a16 as linear_w8a16
from nanovllm.ops.reference_quantized import quantize_rows as quantize_rows

logger = logging.getLogger(__name__)

SOURCES = ("cpu_quantized.cpp",)
HEADERS = ("cpu_packed.h", "cpu_tiles.h", "cpu_vector.h", "cpu_threads.h")
_SIGNATURE = [None, *[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 4, ctypes.c_int]  # of every product


@cache
def _library() -> ctypes.CDLL | None:
    folder = Path(__file__).parent
    sources = [folder / name for name in SOURCES]
    headers = [folder / name for name in HEADERS]
    try:
        return load_library(
            sources, headers, (*native.FLAGS, "-ffp-contract=off"), "kernels for quantized weights"
        )
    except (BuildError, OSError) as error:
        logger.warning("no CPU kernels for quantized weights, using plain torch: %s", error)
        return None


def _address(name: str, dtype: torch.dtype) -> int:
    return ctypes.c_void_p.in_dll(_library(), f"{name}_{native._SUFFIXES[dtype]}").value  # type: ignore[arg-type,return-value]


@cache
def _function(name: str, dtype: torch.dtype) -> Callable[..., bool]:
    return ctypes.CFUNCTYPE(*_SIGNATURE)(_address(name, dtype))  # type: ignore[arg-type]


def _kernel(
    name: str, scales: Tensor, values: Tensor, x: Tensor, *others: Tensor
) -> Callable[..., bool] | None:
    """The C function for these tensors; None if the weight is not packed, if they do not fit, or if
    one needs a gradient."""
    inputs_of_a_word = 8 if values.dtype is torch.int32 else 4
    fits = (
        values.ndim == 3
        and values.shape[1] * inputs_of_a_word == x.shape[1]
        and x.dtype in native._SUFFIXES
    )
    fits = fits and all(map(Tensor.is_contiguous, (values, scales, x, *others)))
    fits = fits and all(tensor.dtype in (x.dtype, torch.uint8) for tensor in others)
    fits = fits and not (
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (scales, x, *others))
    )
    return _function(name, x.dtype) if fits else None


def _packed(words: Tensor) -> Tensor:
    """`[out_features, words, ...]` with the words of 16 outputs side by side."""
    grouped: Tensor = words.unflatten(0, (-1, native.PACKED_OUTPUTS))
    return grouped.transpose(1, 2).flatten(2).contiguous()


def pack_nibbles(nibbles: Tensor, *scales_and_zeros: Tensor) -> list[Tensor]:
    outputs, words = nibbles.shape
    fits = (
        outputs % native.PACKED_OUTPUTS == 0
        and 8 * words % native.PACKED_INPUTS == 0
        and _library() is not None
    )
    return [_packed(tensor) if fits else tensor for tensor in (nibbles, *scales_and_zeros)]


def pack_values(values: Tensor) -> Tensor:
    outputs, inner = values.shape
    fits = outputs % native.PACKED_OUTPUTS == 0 and inner % 4 == 0 and _library() is not None
    return _packed((values ^ -128).unflatten(1, (-1, 4))) if fits else values


def _unpacked(values: Tensor, rows: Tensor | None = None) -> Tensor:
    """Rows of a weight that may be packed, all by default, as they were."""
    if values.ndim == 2:
        return values if rows is None else values[rows]
    rows = torch.arange(len(values) * native.PACKED_OUTPUTS) if rows is None else rows
    words = values.unflatten(-1, (native.PACKED_OUTPUTS, -1))
    picked: Tensor = words[rows // native.PACKED_OUTPUTS, :, rows % native.PACKED_OUTPUTS]
    picked = picked.flatten(1)
    return picked ^ -128 if values.dtype is torch.int8 else picked


def rows(
    token_ids: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype
) -> Tensor:
    picked = None if zeros is None else _unpacked(zeros, token_ids)
    return reference_quantized.dequantize(
        _unpacked(values, token_ids), _unpacked(scales, token_ids), picked, dtype
    )


def compiled(
    kind: str, dtype: torch.dtype, values: Tensor, scales: Tensor, *zeros: Tensor
) -> tuple[int, Tensor]:
    if values.ndim != 3 or dtype not in native._SUFFIXES:
        return reference_quantized.compiled()
    addresses = [*map(Tensor.data_ptr, (values, scales, *(zeros or [native._NOTHING])))]
    return _address(f"layer_{kind}", dtype), torch.tensor([*addresses, scales.shape[1]])


def _linear(
    name: str,
    dtype: torch.dtype | None,
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    *optional: Tensor | None,
) -> Tensor:
    """The product by the C function of this name, which takes scales of a dtype (None: x's), or by
    that of `reference_quantized`."""
    others = [tensor for tensor in optional if tensor is not None]
    if (
        scales.dtype is not (dtype or x.dtype)
        or (kernel := _kernel(name, scales, values, x, *others)) is None
    ):
        plain = (
            tensor if tensor is None or tensor.ndim < 2 else _unpacked(tensor)
            for tensor in (scales, *optional)
        )
        product: Callable[..., Tensor] = getattr(reference_quantized, name)
        return product(x, _unpacked(values), *plain)
    out = x.new_empty(len(x), len(values) * native.PACKED_OUTPUTS)
    zeros, bias = (
        native._NOTHING if tensor is None else tensor for tensor in (None, *optional)[-2:]
    )
    native.call(
        kernel, (x, values, scales, zeros, bias, out), *x.shape, out.shape[1], scales.shape[1]
    )
    return out


linear_w4a16 = partial(_linear, "linear_w4a16", None)
linear_w4a8, linear_w8a8 = (
    partial(_linear, name, torch.float32) for name in ("linear_w4a8", "linear_w8a8")
)
