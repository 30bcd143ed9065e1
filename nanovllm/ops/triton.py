"""The small operators between the matrix products as Triton kernels, for GPUs: each reads and
writes memory once.

Plain torch makes half a dozen passes over the activations for one RMSNorm, and launches as many
kernels. These kernels compute in float32 and round where `reference` rounds, so the results are the
same up to the order of a sum and the last bits of `exp` and `rsqrt`. Inputs that they do not cover
(other dtypes, rows with gaps, gradients) go to `reference`, and so do the operators that torch's
own kernels serve well."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops import reference
from nanovllm.ops.reference import (  # noqa: F401
    embedding,
    linear,
    pack_weight,
    paged_attention,
    widen,
    write_kv_cache,
)
from nanovllm.ops.triton_common import covers

# A program holds a whole row in registers.
LARGEST_ROW = 16384
# Gated channels of one program.
GATE_BLOCK = 1024
# Columns that a program compares at a time to find the largest.
ARGMAX_BLOCK = 4096


def _num_warps(elements: int) -> int:
    """Warps for a program over `elements` numbers: 16 per thread, which are two loads of 16 bytes
    in bfloat16."""
    return min(max(elements // 512, 1), 16)


# ------------------------------------------------------------------------------------ normalisation


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_heads,
    token_stride,
    head_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """One row of one token; with ADD, its sum with the residual, which is also stored there. The
    row is rounded before and after the multiplication with the weight. Grid (num_tokens *
    num_heads,)."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < WIDTH
    start = row // num_heads * token_stride + row % num_heads * head_stride
    x = tl.load(x_ptr + start + channel, mask=inside, other=0.0)
    if ADD:
        residual = residual_ptr + row * residual_stride + channel
        x = (tl.load(residual, mask=inside, other=0.0).to(tl.float32) + x.to(tl.float32)).to(
            x.dtype
        )
        tl.store(residual, x, mask=inside)
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    normalised = (wide.to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + row * WIDTH + channel, normalised, mask=inside)


def _normalise(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    width = x.shape[-1]
    heads = x if x.ndim == 3 else x.reshape(-1, 1, width)
    out = x.new_empty(x.shape)
    num_tokens, num_heads, _ = heads.shape
    if out.numel() > 0:
        block = triton.next_power_of_2(width)
        rms_norm_kernel[(num_tokens * num_heads,)](
            heads,
            x if residual is None else residual,
            weight,
            out,
            num_heads,
            heads.stride(0),
            heads.stride(1),
            0 if residual is None else residual.stride(0),
            eps,
            WIDTH=width,
            BLOCK=block,
            ADD=residual is not None,
            num_warps=_num_warps(block),
            enable_fp_fusion=True,
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not covers(x, weight) or x.shape[-1] > LARGEST_ROW:
        return reference.rms_norm(x, weight, eps)
    return _normalise(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not covers(x, residual, weight) or residual.shape != x.shape or x.shape[-1] > LARGEST_ROW:
        return reference.add_rms_norm(x, residual, weight, eps)
    return _normalise(x, residual, weight, eps), residual


# --------------------------------------------------------------------------------- rotary embedding


@triton.jit
def rotate(first, second, cos, sin):
    """Rotate pairs of channels by an angle; each product is rounded, as in plain torch."""
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    x_cos = (x * cos).to(first.dtype).to(tl.float32)
    y_sin = (y * sin).to(first.dtype).to(tl.float32)
    y_cos = (y * cos).to(first.dtype).to(tl.float32)
    x_sin = (x * sin).to(first.dtype).to(tl.float32)
    return (x_cos - y_sin).to(first.dtype), (y_cos + x_sin).to(first.dtype)


@triton.jit
def rotate_heads(heads_ptr, head_stride, cos, sin, NUM_HEADS: tl.constexpr, HALF: tl.constexpr):
    """All heads of one token, in place."""
    head = tl.arange(0, triton.next_power_of_2(NUM_HEADS))[:, None]
    channel = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    inside = (head < NUM_HEADS) & (channel < HALF)
    target = heads_ptr + head * head_stride + channel
    first = tl.load(target, mask=inside, other=0.0)
    second = tl.load(target + HALF, mask=inside, other=0.0)
    first, second = rotate(first, second, cos, sin)
    tl.store(target, first, mask=inside)
    tl.store(target + HALF, second, mask=inside)


@triton.jit
def apply_rope_kernel(
    q_ptr,
    k_ptr,
    position_ptr,
    cos_sin_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    num_positions,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One token, queries and keys. Grid (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + token)
    channel = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    angle = position * 2 * HALF + channel
    # A kernel cannot raise an error: a position beyond the table, which is not read, gives NaN.
    known = (channel < HALF) & (angle >= 0) & (angle < num_positions * 2 * HALF)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    cos = tl.load(cos_sin_ptr + angle, mask=known, other=float("nan")).to(dtype).to(tl.float32)
    sin = (
        tl.load(cos_sin_ptr + angle + HALF, mask=known, other=float("nan")).to(dtype).to(tl.float32)
    )
    rotate_heads(q_ptr + token * q_token_stride, q_head_stride, cos, sin, NUM_HEADS, HALF)
    rotate_heads(k_ptr + token * k_token_stride, k_head_stride, cos, sin, NUM_KV_HEADS, HALF)


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    fits = (
        positions.dtype == torch.int64
        and positions.is_contiguous()
        and positions.numel() == num_tokens
    )
    fits = (
        fits
        and cos_sin.dtype == torch.float32
        and cos_sin.is_contiguous()
        and cos_sin.shape[1] == head_dim
    )
    if not fits or not covers(q, k) or k.shape != (num_tokens, num_kv_heads, head_dim):
        return reference.apply_rope(q, k, positions, cos_sin)
    if num_tokens > 0:
        # enable_fp_fusion: a fused multiply-add would skip the rounding of one product.
        apply_rope_kernel[(num_tokens,)](
            q,
            k,
            positions,
            cos_sin,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            cos_sin.shape[0],
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            num_warps=_num_warps(triton.next_power_of_2(num_heads * head_dim)),
            enable_fp_fusion=False,
        )
    return q, k


# ----------------------------------------------------------------------------------------- the gate


@triton.jit
def silu_and_mul_kernel(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A block of channels of one token. Grid (num_tokens, ceil(SIZE / BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    gate = tl.load(x_ptr + token * x_stride + channel, mask=inside, other=0.0)
    up = tl.load(x_ptr + token * x_stride + SIZE + channel, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    gate = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = (gate.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + token * SIZE + channel, product, mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    if not covers(x):
        return reference.silu_and_mul(x)
    num_tokens, width = x.shape
    size = width // 2
    out = x.new_empty(num_tokens, size)
    if out.numel() > 0:
        block = min(triton.next_power_of_2(size), GATE_BLOCK)
        silu_and_mul_kernel[(num_tokens, triton.cdiv(size, block))](
            x,
            out,
            x.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=_num_warps(2 * block),
            enable_fp_fusion=True,
        )
    return out


# ------------------------------------------------------------------------------- the largest column


@triton.jit
def argmax_kernel(x_ptr, out_ptr, x_stride, width, BLOCK: tl.constexpr):
    """The first column of the largest value of a row. As in torch, NaN is larger than any number.
    Grid (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    # Each lane keeps the largest value that it has read, and the first column that has it.
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    column_of_best = lane
    for start in range(0, width, BLOCK):
        column = start + lane
        x = tl.load(x_ptr + row * x_stride + column, mask=column < width, other=float("-inf"))
        value = x.to(tl.float32)
        is_better = (value > best) | ((value != value) & (best == best))
        best = tl.where(is_better, value, best)
        column_of_best = tl.where(is_better, column, column_of_best)
    is_nan = best != best
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    largest = tl.max(tl.where(is_nan, float("-inf"), best), axis=0)
    is_largest = tl.where(has_nan, is_nan, best == largest)
    tl.store(out_ptr + row, tl.min(tl.where(is_largest, column_of_best, width), axis=0))


def argmax(x: Tensor) -> Tensor:
    num_rows, width = x.shape
    if not covers(x) or width == 0:
        return reference.argmax(x)
    out = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    if num_rows > 0:
        block = min(triton.next_power_of_2(width), ARGMAX_BLOCK)
        argmax_kernel[(num_rows,)](
            x, out, x.stride(0), width, BLOCK=block, num_warps=_num_warps(block)
        )
    return out


# -------------------------------------------------------------------------------- groups of weights


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    from nanovllm.ops import triton_grouped

    return triton_grouped.grouped_linear(x, weight, counts)
