"""Every operator of `quantized` in plain torch: the fallback where no faster kernel fits, and the
reference for those kernels.

Built by notebooks/41_quantization.ipynb: edit it there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm import ops


def unpack(words: Tensor, bits: int = 4) -> Tensor:
    """Return the unsigned integers in 32-bit words, lowest bits first: `[..., width]` to
    `[..., width * 32 / bits]`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    values: Tensor = words[..., None] >> shifts & 2**bits - 1
    return values.flatten(-2)


def pack(values: Tensor, bits: int = 4) -> Tensor:
    """Return unsigned integers as int32 words: the inverse of `unpack`."""
    shifts = torch.arange(0, 32, bits, device=values.device)
    of_words: Tensor = values.long().unflatten(-1, (-1, 32 // bits))
    return (of_words << shifts).sum(-1).to(torch.int32)


def round_to_nearest(
    weight: Tensor,
    bits: int,
    groups: int,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a matrix, each weight by itself.

    Args:
        weight: `[out_features, in_features]`.
        bits: 4 or 8.
        groups: scales per row.
        symmetric: the grid is q * scale: with 4 bits q is -8 to 7 and the scale absmax / 7.5; with
            8 bits -127 to 127 and absmax / 127. Otherwise (with 4 bits alone) the 16 values range
            from the smallest weight of the group, or 0, to the largest, or 0.
        dtype: of the scales. Weights are rounded to the grid of the rounded scales.

    Returns: (values, scales, zeros), as a file stores them:

        values    4 bits: `pack`ed nibbles, `[out_features, in_features / 8]` int32; symmetric, a
                  nibble is q + 8. 8 bits: `[out_features, in_features]` int8.
        scales    `[out_features, groups]`, at least the smallest normal number of `dtype`: a
                  group of zeros would divide 0 by 0.
        zeros     symmetric: None. Otherwise the nibble of 0, `[out_features, groups]` uint8.
    """
    grouped = weight.float().unflatten(1, (groups, -1))
    if symmetric:
        spread = grouped.abs().amax(-1)
        steps = 7.5 if bits == 4 else 127
        zeros = None
    else:
        spread = grouped.amax(-1).clamp(min=0) - grouped.amin(-1).clamp(max=0)
        steps = 15
    tiny = torch.finfo(dtype).tiny
    scales = (spread / steps).to(dtype).clamp(min=tiny)
    wide = scales.float()[..., None]
    if not symmetric:
        zeros = (-grouped.amin(-1, keepdim=True).clamp(max=0) / wide).round().clamp(0, 15)
    rounded = (grouped / wide).round()
    if bits == 8:
        return rounded.clamp(-127, 127).flatten(1).to(torch.int8), scales, None
    nibbles = (rounded + (8 if zeros is None else zeros)).clamp(0, 15).flatten(1)
    return pack(nibbles), scales, None if zeros is None else zeros.squeeze(-1).to(torch.uint8)


def dequantize(values: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    whole = values if values.dtype == torch.int8 else unpack(values) - (8 if zeros is None else 0)
    groups = whole.unflatten(-1, (scales.shape[-1], -1)) - (
        0 if zeros is None else zeros[..., None]
    )
    wide = torch.promote_types(scales.dtype, torch.float32)
    weight: Tensor = groups.to(wide) * scales[..., None].to(wide)
    return weight.flatten(-2).to(dtype)


def linear_w4a16(
    x: Tensor,
    nibbles: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    return ops.linear(x, dequantize(nibbles, scales, zeros, x.dtype), bias)


def linear_w8a16(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.linear(x, dequantize(values, scales, None, x.dtype), bias)


def rows(
    token_ids: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return dequantize(
        values[token_ids], scales[token_ids], None if zeros is None else zeros[token_ids], dtype
    )


def pack_nibbles(*tensors: Tensor) -> list[Tensor]:
    return [*tensors]


def pack_values(values: Tensor) -> Tensor:
    return values


def compiled(*_: object) -> tuple[int, Tensor]:
    return 0, torch.empty(0)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row. In float32, its scale is absmax / 127, and a number becomes
    x * (127 / absmax), rounded to the nearest integer, halves to even. A row of zeros has the
    scale 0. The quotient 127 / absmax is rounded once: for the number 127 divided by a tensor,
    torch computes 1 / absmax and multiplies by 127, which rounds twice.

    Args:
        x: `[tokens, width]`.

    Returns: int8 `[tokens, width]`, and float32 scales `[tokens, 1]`.
    """
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest
    return (wide * inverse.masked_fill(largest == 0, 0)).round().to(torch.int8), largest / 127


# A float32 holds a sum of so many products of 8-bit integers exactly, whatever the order: 1024 *
# 128 * 127 < 2**24.
EXACT_PRODUCTS = 1024


def linear_w8a8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    quantized, row_scales = quantize_rows(x)
    steps = zip(quantized.split(EXACT_PRODUCTS, -1), values.split(EXACT_PRODUCTS, -1), strict=True)
    sums = torch.stack([(a.float() @ b.float().T).to(torch.int32) for a, b in steps]).sum(
        0, dtype=torch.int32
    )
    out = sums.float() * row_scales * scales.T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def linear_w4a8(
    x: Tensor,
    nibbles: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    quantized, row_scales = quantize_rows(x)
    sizes = scales.shape[1], -1
    exact = torch.float32 if x.shape[1] <= 8 * EXACT_PRODUCTS * scales.shape[1] else torch.float64
    integers = (
        dequantize(nibbles, torch.ones_like(scales), zeros, exact).unflatten(1, sizes).unbind(1)
    )
    out = torch.zeros(len(x), len(scales), device=x.device)
    for a, b, scale in zip(
        quantized.to(exact).unflatten(1, sizes).unbind(1), integers, scales.T, strict=True
    ):
        out += (a @ b.T).float() * scale
    out *= row_scales
    return (out if bias is None else out + bias.float()).to(x.dtype)
