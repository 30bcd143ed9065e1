"""Products with quantized weights in Triton, for GPUs.

A 4-bit weight is packed as `[out_features / 16, in_features / 64, 16 * 32]` uint8. A unit of 64
inputs of one output is 32 bytes: byte j has input j in its lower half and input j + 32 in its upper
half, so that each half is a tile of a product as it is. 16 outputs lie side by side. 8-bit weights
stay as they are.

**One order of sums, whatever the batch.** The number of tokens chooses tiles, and how many programs
share a sum, but no order: the inputs are always summed in four parts, which are then added one
after the other; a part in units of 64 inputs, a unit in two products of
32. A tile of outputs is the left operand of `tl.dot` and a tile of tokens the right one, because
the height of the left operand decides which instruction NVIDIA's GPUs use, and it is the same for
all batches. Ampere's instruction multiplies 16 outputs by 8 tokens, whatever the tile is, so the
bits are the same. Hopper's multiplies 64 outputs by as many tokens as the tile has, and AMD's GPUs
have one of 16 outputs and one of 32. How such an instruction adds its products is not documented,
nor does `tl.dot` promise an
instruction: there, equal bits in 16 bits are expected and tested, not guaranteed. In float32 the
tile is always the same, and W8A8 adds integers, which is exact."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops import reference_quantized as reference
from nanovllm.ops.reference_quantized import compiled, pack_values  # noqa: F401
from nanovllm.ops.triton_common import covers

# A sum has four parts. Fewer programs than these leave much of a GPU idle: then each computes one
# part of its sums.
PARTS = 4
FEW_PROGRAMS = 264


class Tiles(NamedTuple):
    """Sizes of a launch: tokens and outputs of a tile, warps of a program, and stages of its
    pipeline."""

    tokens: int
    outputs: int
    num_warps: int
    num_stages: int


def choose_tiles(num_tokens: int, dtype: torch.dtype) -> Tiles:
    """Choose the sizes of a launch. In float32 there is no exact matrix instruction: everything
    goes through registers, and a small tile has enough of them."""
    if dtype == torch.float32:
        return Tiles(tokens=16, outputs=32, num_warps=4, num_stages=4)
    if num_tokens <= 16:
        return Tiles(tokens=16, outputs=64, num_warps=4, num_stages=4)
    if num_tokens <= 64:
        return Tiles(tokens=64, outputs=64, num_warps=4, num_stages=4)
    return Tiles(tokens=128, outputs=128, num_warps=8, num_stages=3)


@triton.jit
def quantized_linear_kernel(
    x_ptr,
    value_ptr,
    scale_ptr,
    row_scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    num_tokens,
    num_outputs,
    num_inputs,
    num_groups,
    part_inputs,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """The sums of a tile of tokens (rows of x) and a tile of outputs, or PARTS of their parts, each
    over `part_inputs`. Where x is integers, `row_scale_ptr` has their scales.

    Grid (ceil(num_tokens / TILE_ROWS), ceil(num_outputs / TILE_OUTPUTS), programs per sum):
    neighbours share a tile of weights."""
    token = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[None, :]
    output = tl.program_id(1).to(tl.int64) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)[:, None]
    ours = token < num_tokens
    known = output < num_outputs
    channel = tl.arange(0, TILE_INPUTS)
    row = output * num_inputs if BITS == 8 else output // 16 * (8 * num_inputs) + output % 16 * 32
    x_rows = x_ptr + token * x_stride + channel[:, None]
    value_rows = value_ptr + row + channel[None, :]
    kind: tl.constexpr = tl.float32 if row_scale_ptr is None else tl.int32
    total = tl.zeros([TILE_OUTPUTS, TILE_ROWS], kind)
    for part in range(tl.program_id(2) * PARTS, tl.program_id(2) * PARTS + PARTS):
        sums = tl.zeros([TILE_OUTPUTS, TILE_ROWS], kind)
        for start in range(
            part * part_inputs, tl.minimum((part + 1) * part_inputs, num_inputs), 2 * TILE_INPUTS
        ):
            both = tl.load(value_rows + start * 8, mask=known, other=0) if BITS == 4 else 0
            for half in tl.static_range(2):
                first = start + half * TILE_INPUTS
                inside = (first + channel < num_inputs)[None, :]
                read = (
                    both >> 4 * half & 15
                    if BITS == 4
                    else tl.load(value_rows + first, mask=known & inside, other=0)
                )
                x = tl.load(x_rows + first, mask=ours & tl.trans(inside), other=0)
                if row_scale_ptr is None:
                    place = output * num_groups + tl.minimum(
                        first // (num_inputs // num_groups), num_groups - 1
                    )
                    zero = (
                        8 * (BITS == 4)
                        if zero_ptr is None
                        else tl.load(zero_ptr + place, mask=known)
                    )
                    # The bits of 1.5 * 2^23 + an integer are made faster than by a conversion. The
                    # difference is exact, and its product with the scale is rounded once.
                    wide = (read.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - (
                        zero + 12582912.0
                    )
                    read = wide * tl.load(scale_ptr + place, mask=known).to(tl.float32)
                sums = tl.dot(read.to(x.dtype), x, sums, input_precision="ieee", out_dtype=kind)
        total += sums
    if row_scale_ptr is not None:
        total = (
            total.to(tl.float32)
            * tl.load(row_scale_ptr + token, mask=ours)
            * tl.load(scale_ptr + output, mask=known)
        )
    if bias_ptr is not None:
        total += tl.load(bias_ptr + output, mask=known).to(tl.float32)
    tl.store(
        out_ptr + (tl.program_id(2) * num_tokens + token) * num_outputs + output,
        total,
        mask=ours & known,
    )


@triton.jit
def add_parts_kernel(
    part_ptr, bias_ptr, out_ptr, size, num_outputs, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums from their parts, in the order of `quantized_linear_kernel`. Grid (ceil(size /
    BLOCK),)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ptr + part * size + place, mask=place < size)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + place % num_outputs).to(tl.float32)
    tl.store(out_ptr + place, total, mask=place < size)


@triton.jit
def quantize_rows_kernel(x_ptr, out_ptr, scale_ptr, x_stride, width, BLOCK: tl.constexpr):
    """One row. Grid (num_tokens,)."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + channel, mask=channel < width, other=0).to(tl.float32)
    # Magnitudes are ordered as their bits are as integers, in which NaN is the largest. (A maximum
    # of numbers would ignore it.)
    largest = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)
    # Between 2^23 and 2^24 there are only integers: the sum is rounded to the nearest, halves to
    # even.
    rounded = x * tl.where(largest == 0, 0.0, tl.div_rn(127.0, largest)) + 12582912.0 - 12582912.0
    tl.store(out_ptr + row * width + channel, rounded.to(tl.int8), mask=channel < width)
    tl.store(scale_ptr + row, tl.div_rn(largest, 127.0))


def _fits(x: Tensor, values: Tensor, scales: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels can take these tensors: no group ends within a product, and no tensor has
    gaps or needs a gradient."""
    tensors = [values, scales, *(tensor for tensor in others if tensor is not None)]
    inputs = values.shape[1] * (64 if values.ndim == 3 else 1)
    groups = scales.shape[1]
    fits = (
        covers(x)
        and 0 < x.numel() == len(x) * inputs
        and (groups == 1 or inputs // groups % 32 == 0)
    )
    return fits and not any(
        not t.is_contiguous() or (torch.is_grad_enabled() and t.requires_grad) for t in tensors
    )


def _multiply(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    *,
    dtype: torch.dtype,
    row_scales: Tensor | None = None,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The product of tensors that fit.

    Args:
        dtype: of the result.
        row_scales: of x, if it is quantized.
    """
    tokens, inputs = x.shape
    outputs, groups = scales.shape
    out = x.new_empty(tokens, outputs, dtype=dtype)
    tiles = choose_tiles(tokens, x.dtype)
    grid = triton.cdiv(tokens, tiles.tokens), triton.cdiv(outputs, tiles.outputs)
    width, parts = (32, PARTS) if row_scales is None else (64, 1)
    shares = parts if grid[0] * grid[1] < FEW_PROGRAMS else 1
    sums = out if shares == 1 else out.new_empty(shares, tokens, outputs, dtype=torch.float32)
    quantized_linear_kernel[(*grid, shares)](
        x,
        values,
        scales,
        row_scales,
        zeros,
        bias if shares == 1 else None,
        sums,
        x.stride(0),
        tokens,
        outputs,
        inputs,
        groups,
        triton.cdiv(inputs, 2 * width * parts) * 2 * width,
        4 if values.ndim == 3 else 8,
        parts // shares,
        tiles.tokens,
        tiles.outputs,
        width,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
    )
    if shares > 1:
        add_parts_kernel[(triton.cdiv(out.numel(), 1024),)](
            sums, bias, out, out.numel(), outputs, parts, 1024
        )
    return out


def linear_w4a16(
    x: Tensor,
    nibbles: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    if _fits(x, nibbles, scales, zeros, bias):
        return _multiply(x, nibbles, scales, dtype=x.dtype, zeros=zeros, bias=bias)
    return reference.linear_w4a16(
        x, _unpacked(nibbles) if nibbles.ndim == 3 else nibbles, scales, zeros, bias
    )


def linear_w4a8(
    x: Tensor,
    nibbles: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    return reference.linear_w4a8(
        x, _unpacked(nibbles) if nibbles.ndim == 3 else nibbles, scales, zeros, bias
    )


def linear_w8a16(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_w4a16(x, values, scales, None, bias)  # where bytes are as they are


def linear_w8a8(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _fits(x, values, scales, bias):
        return reference.linear_w8a8(x, values, scales, bias)
    quantized, row_scales = quantize_rows(x)
    return _multiply(quantized, values, scales, dtype=x.dtype, row_scales=row_scales, bias=bias)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    tokens, width = x.shape
    block = triton.next_power_of_2(width)
    if not covers(x) or tokens == 0 or block > 32768:  # a program holds a row in registers
        return reference.quantize_rows(x)
    out = x.new_empty(x.shape, dtype=torch.int8)
    scales = x.new_empty(tokens, 1, dtype=torch.float32)
    quantize_rows_kernel[(tokens,)](
        x, out, scales, x.stride(0), width, block, num_warps=8, enable_fp_fusion=False
    )
    return out, scales


def pack_nibbles(nibbles: Tensor, *scales_and_zeros: Tensor) -> list[Tensor]:
    if nibbles.shape[0] % 16 or nibbles.shape[1] % 8:
        return [nibbles, *scales_and_zeros]
    pairs = nibbles.view(torch.uint8)
    halves = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1).unflatten(1, (-1, 2, 32))
    packed = (
        (halves[:, :, 0] | halves[:, :, 1] << 4)
        .unflatten(0, (-1, 16))
        .transpose(1, 2)
        .flatten(2)
        .contiguous()
    )
    return [packed, *scales_and_zeros]


def _unpacked(nibbles: Tensor) -> Tensor:
    """A packed 4-bit weight as it was."""
    pairs = nibbles.unflatten(2, (16, 32)).transpose(1, 2).flatten(0, 1)
    return reference.pack(torch.cat((pairs & 15, pairs >> 4), -1).flatten(1))


def rows(
    token_ids: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return reference.rows(
        token_ids, _unpacked(values) if values.ndim == 3 else values, scales, zeros, dtype
    )
