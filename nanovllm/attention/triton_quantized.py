"""The Triton backend over a KV cache in 8 bits (ops/quantized_cache.py): a kernel that quantizes
what it writes.

The kernels of lecture 15 read such a cache. They convert e4m3 by its bits, so that they compile for
GPUs which have no such numbers (sm_80) or others (gfx942)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.triton import TritonBackend, paged_attention
from nanovllm.ops.quantized_cache import LARGEST, SCALE_BYTES, TINY


@triton.jit
def write_quantized_kernel(
    k_ptr,
    v_ptr,
    cache_ptr,
    slot_ptr,
    k_stride,
    v_stride,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROW: tl.constexpr,
    LARGEST: tl.constexpr,
    TINY: tl.constexpr,
):
    """The key or value of one token and KV head, with the rounding of `quantized_cache.quantize`.
    Grid (num_tokens, num_kv_heads, 2)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_ptr + token)
    channel = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    inside = channel < HEAD_DIM
    if slot >= 0:
        if tl.program_id(2) == 0:
            x = tl.load(
                k_ptr + token * k_stride + head * HEAD_DIM + channel, mask=inside, other=0.0
            )
        else:
            x = tl.load(
                v_ptr + token * v_stride + head * HEAD_DIM + channel, mask=inside, other=0.0
            )
        absmax = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), 0), TINY)
        scaled = x.to(tl.float32) * tl.div_rn(tl.full([], LARGEST, tl.float32), absmax)
        if LARGEST == 127:
            # 1.5 * 2^23: the integer is in the low bits.
            numbers = (scaled + 12582912.0).to(tl.int32, bitcast=True)
        else:
            bits = scaled.to(tl.int32, bitcast=True)
            magnitude = bits & 0x7FFFFFFF
            # The biases are 7 and 127.
            normal = ((magnitude + 0x7FFFF + (magnitude >> 20 & 1)) >> 20) - (120 << 3)
            # Below 2^-6, multiples of 2^-9: the distance of floats after 2^14.
            subnormal = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
            numbers = tl.where(tl.abs(scaled) < 0.015625, subnormal, normal) | (bits >> 24 & 0x80)
        part = (slot // BLOCK_SIZE * 2 + tl.program_id(2)) * NUM_KV_HEADS + head
        rows = cache_ptr + part * BLOCK_SIZE * ROW
        tl.store(
            rows + slot % BLOCK_SIZE * HEAD_DIM + channel,
            numbers.to(cache_ptr.dtype.element_ty),
            mask=inside,
        )
        scales = (rows + BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.float32))
        tl.store(scales + slot % BLOCK_SIZE, tl.div_rn(absmax, tl.full([], LARGEST, tl.float32)))


@triton.jit
def widen(k, v, page_ptr, offset, value_offset, exists, dtype: tl.constexpr):
    """Tiles of a quantized cache as numbers of `dtype`, and the scales of their tokens, at `offset`
    behind each `page_ptr`.

    The bits of e4m3, moved to where a float16 has them, mean 1 / 256 of the number: the exponent's
    bias is 15 there, and 7 here."""
    scales = page_ptr.to(tl.pointer_type(tl.float32)) + offset
    k_scale = tl.load(scales, mask=exists, other=0.0)
    v_scale = tl.load(scales + value_offset // 4, mask=exists, other=0.0)
    if k.dtype == tl.uint8:
        k = k.to(tl.uint16)
        v = v.to(tl.uint16)
        k_scale = k_scale * 256
        v_scale = v_scale * 256
        k = ((k & 0x80) << 8 | (k & 0x7F) << 7).to(tl.float16, bitcast=True)
        v = ((v & 0x80) << 8 | (v & 0x7F) << 7).to(tl.float16, bitcast=True)
    return k.to(tl.float32).to(dtype), v.to(tl.float32).to(dtype), k_scale, v_scale


def write_kv_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """As `quantized_cache.write_kv_cache`; heads must be contiguous within each token."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens:
        write_quantized_kernel[(num_tokens, num_kv_heads, 2)](
            k,
            v,
            as_bytes(kv_cache),
            slot_mapping,
            k.stride(0),
            v.stride(0),
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_SIZE=kv_cache.shape[3],
            HEAD_DIM=head_dim,
            ROW=kv_cache.shape[4],
            LARGEST=LARGEST[kv_cache.dtype],
            TINY=TINY,
            num_warps=1,
            enable_fp_fusion=False,
        )


def as_bytes(kv_cache: Tensor) -> Tensor:
    """A cache as the kernels take it: bytes stand for e4m3, which not all GPUs know."""
    return kv_cache if kv_cache.dtype == torch.int8 else kv_cache.view(torch.uint8)


class QuantizedTritonBackend(TritonBackend):
    """Quantizes keys and values as it writes them, and reads the pages in place; see
    `attention.quantized`."""

    fuses_rotary = False
    scale_bytes = SCALE_BYTES

    def __init__(self, backend: TritonBackend, kv_dtype: torch.dtype) -> None:
        super().__init__(backend.hardware)
        self.kv_dtype = kv_dtype

    def step_kinds(
        self, num_heads: int, kv_cache: Tensor, max_num_seqs: int, max_num_tokens: int
    ) -> list[tuple[int, int, int]]:
        """See the base class: those of a cache in 16 bits."""
        *outer, row = kv_cache.shape
        unquantized = kv_cache.new_empty(1, dtype=torch.bfloat16).expand(*outer, row - SCALE_BYTES)
        return super().step_kinds(num_heads, unquantized, max_num_seqs, max_num_tokens)

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        write_kv_cache(k, v, kv_cache, metadata.slot_mapping)
        return paged_attention(
            q,
            as_bytes(kv_cache),
            metadata,
            scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            hardware=self.hardware,
            widen=widen,
        )
