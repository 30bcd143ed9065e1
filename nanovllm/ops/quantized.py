"""Products with quantized weights, and the choice of what computes them.

`reference_quantized` holds every operator in plain torch. A module `native_quantized` beside
`native`, or `triton_quantized` beside `triton`, may hold faster ones; the device of the first
tensor chooses, as in `nanovllm.ops`.

**4-bit weights** are `nibbles`, `[..., out_features, in_features / 8]` int32: word w of a row holds
the inputs 8w to 8w+7, the first in the lowest four bits. A nibble is q + 8 for q from -8 to 7.
`scales` are `[..., out_features, groups]`: each is for a group of in_features / groups neighbouring
inputs. `zeros`, if there are any, are nibbles, too: `[..., out_features, groups]` uint8 from 0 to
15; without, they are 8. The weight is `(nibble - zero) * scale`.

**8-bit weights** are `values`, `[..., out_features, in_features]` int8, with scales
`[..., out_features, groups]`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.ops import reference_quantized


class Kernels(Protocol):
    """The operators that each module of kernels has; the functions below describe them."""

    linear_w4a16: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    linear_w4a8: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    linear_w8a16: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    linear_w8a8: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    quantize_rows: Callable[[Tensor], tuple[Tensor, Tensor]]
    rows: Callable[[Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]
    compiled: Callable[..., tuple[int, Tensor]]
    pack_nibbles: Callable[..., list[Tensor]]
    pack_values: Callable[[Tensor], Tensor]


@cache
def _kernels(device: torch.device) -> Kernels:
    """The module whose functions serve tensors on this device; decided once per process."""
    name = ops._kernels(device).__name__
    if name == "nanovllm.ops.native":
        from nanovllm.ops import native_quantized

        return cast(Kernels, native_quantized)
    if name == "nanovllm.ops.triton":
        from nanovllm.ops import triton_quantized

        return cast(Kernels, triton_quantized)
    return cast(Kernels, reference_quantized)


def linear_w4a16(
    x: Tensor,
    nibbles: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias` for a 4-bit weight: the product with the dequantized weight, which is
    rounded to x's dtype. A row of the result depends on this row of x alone wherever that is true
    of `ops.linear`.

    Args:
        x: `[tokens, in_features]`.
        nibbles, scales, zeros: see the module's docstring; they may be what `pack_nibbles` made of
            them. Scales are of x's dtype.
        bias: `[out_features]` or None.

    Returns: `[tokens, out_features]`, of x's dtype.
    """
    return _kernels(x.device).linear_w4a16(x, nibbles, scales, zeros, bias)


def linear_w4a8(
    x: Tensor,
    nibbles: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """As `linear_w4a16` with inputs in 8-bit integers, see `quantize_rows`, and float32 scales. The
    sums of products within a group are exact integers. In float32, each is multiplied by its scale,
    they are added in the order of the groups, and the sum is multiplied by the row's scale; then
    the bias is added, and the result rounded. A row of the result depends on this row of x alone,
    to the last bit, on every device."""
    return _kernels(x.device).linear_w4a8(x, nibbles, scales, zeros, bias)


def linear_w8a16(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear_w4a16`, for an 8-bit weight with scales of x's dtype."""
    return _kernels(x.device).linear_w8a16(x, values, scales, bias)


def linear_w8a8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` in 8-bit integers on both sides, see `quantize_rows`. The sums are
    exact int32, over all inputs. They are converted to float32 and multiplied with the row's scale,
    then with the output's; then the bias is added, and the result rounded.

    Args:
        x: `[tokens, in_features]`.
        values: `[out_features, in_features]` int8, or what `pack_values` made of them.
        scales: `[out_features, 1]` float32.
        bias: `[out_features]` or None.

    Returns: `[tokens, out_features]`, of x's dtype. A row depends on this row of x alone, to the
    last bit, on every device."""
    return _kernels(x.device).linear_w8a8(x, values, scales, bias)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 `[tokens, width]`, float32 scales `[tokens, 1]`) of each row. In float32, the scale is
    absmax / 127, and a number is x * (127 / absmax), rounded to the nearest integer, halves to
    even. A row of zeros has the scale 0."""
    return _kernels(x.device).quantize_rows(x)


def dequantize(values: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The matrix `[..., out_features, in_features]`: the difference of integers is exact, its
    product with the scale is rounded once.

    Args:
        values: nibbles or 8-bit values as they are stored, not packed for kernels.
    """
    return reference_quantized.dequantize(values, scales, zeros, dtype)


def rows(
    token_ids: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Dequantized rows of a quantized embedding, `[tokens]` to `[tokens, width]`; `values` may be
    packed for kernels."""
    return _kernels(values.device).rows(token_ids, values, scales, zeros, dtype)


def compiled(
    kind: str, dtype: torch.dtype, values: Tensor, scales: Tensor, *zeros: Tensor
) -> tuple[int, Tensor]:
    """For `models.fused`: the address of a C function that computes the product of this kind
    ("w8a8") for inputs of a dtype, and what of the weight it reads: the tensors' addresses, which
    hold while the tensors live. Without such a function 0 and nothing."""
    return _kernels(values.device).compiled(kind, dtype, values, scales, *zeros)


def pack_nibbles(nibbles: Tensor, *scales_and_zeros: Tensor) -> list[Tensor]:
    """`[out_features, in_features / 8]` nibbles with their scales, and zeros if there are any, in
    the layout that this machine's `linear_w4a16` and `linear_w4a8` read fastest, or as they are."""
    return _kernels(nibbles.device).pack_nibbles(nibbles, *scales_and_zeros)


def pack_values(values: Tensor) -> Tensor:
    """`[out_features, in_features]` 8-bit values in the layout that this machine's `linear_w8a8`
    reads fastest, or as they are."""
    return _kernels(values.device).pack_values(values)
