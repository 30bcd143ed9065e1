"""The smallest paged attention in Triton: one program for each new token and query head.

The `triton` backend computes the same, and more: sliding windows and soft caps, with programs that
share what they read.

Built by notebooks/15_triton_attention.ipynb: edit it there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.ops import triton_common  # noqa: F401 (bfloat16 in Triton's interpreter)

# The hardware has an instruction for 2^x and none for e^x, so scores are kept in units of log 2.
LOG2_E = 1.4426950408889634


@triton.jit
def write_kv_kernel(
    k_ptr,
    v_ptr,
    cache_ptr,
    slot_ptr,
    k_stride,
    v_stride,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Copy the key and the value of one token and KV head into the token's slot. A token of slot -1
    is padding. Grid (num_tokens, num_kv_heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_ptr + token)
    channel = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    inside = channel < HEAD_DIM
    if slot >= 0:
        row = (slot // BLOCK_SIZE * 2 * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
        key = tl.load(k_ptr + token * k_stride + head * HEAD_DIM + channel, mask=inside)
        value = tl.load(v_ptr + token * v_stride + head * HEAD_DIM + channel, mask=inside)
        target = cache_ptr + row * HEAD_DIM + channel
        tl.store(target, key, mask=inside)
        tl.store(target + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, value, mask=inside)


@triton.jit
def paged_decode_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    table_ptr,
    seq_ptr,
    num_keys_ptr,
    score_scale,
    q_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Attend with one token and one query head to the first `num_keys[token]` keys of the token's
    sequence `seq[token]`. GROUP query heads share a KV head. `score_scale` is in units of log 2.
    Grid (num_tokens, num_heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    inside = channel < HEAD_DIM
    q_row = q_ptr + token * q_stride + head * HEAD_DIM
    q = tl.load(q_row + channel, mask=inside, other=0.0).to(tl.float32)
    table = table_ptr + tl.load(seq_ptr + token) * table_stride
    num_keys = tl.load(num_keys_ptr + token)
    peak = float("-inf")
    total = 0.0
    sums = tl.zeros(channel.shape, tl.float32)
    for start in range(0, num_keys, TILE_KEYS):
        position = start + tl.arange(0, TILE_KEYS)
        visible = position < num_keys
        block = tl.load(table + position // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
        row = (block * 2 * NUM_KV_HEADS + head // GROUP) * BLOCK_SIZE + position % BLOCK_SIZE
        keys = cache_ptr + row[:, None] * HEAD_DIM + channel[None, :]
        mask = visible[:, None] & inside[None, :]
        values = keys + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
        k = tl.load(keys, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(values, mask=mask, other=0.0).to(tl.float32)
        scores = tl.sum(q[None, :] * k, 1) * score_scale
        scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 0))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(weights[:, None] * v, 0)
        peak = new_peak
    out = sums / tl.maximum(total, 1.0)  # the largest score alone weighs 1: 0 means no key at all
    tl.store(out_ptr + (token * tl.num_programs(1) + head) * HEAD_DIM + channel, out, mask=inside)


def rows_of_batch(metadata: AttentionMetadata, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequence of each row of a batch, and the number of keys that it sees, both
    `[num_tokens]` int32: the keys up to itself, and none for padding after the last sequence.

    Reads nothing from the device.
    """
    starts = metadata.query_start_loc
    token = torch.arange(num_tokens, dtype=torch.int32, device=starts.device)
    seq = torch.searchsorted(starts[1:].contiguous(), token, right=True, out_int32=True)
    is_padding = seq == len(starts) - 1
    seq = seq.masked_fill(is_padding, 0)
    num_keys = metadata.seq_lens[seq] - (starts[1:][seq] - token) + 1
    return seq, num_keys.masked_fill(is_padding, 0)


def write_kv_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put keys and values `[num_tokens, num_kv_heads, head_dim]` into their slots. Tokens may have
    any stride (views of one projection), heads must be contiguous."""
    num_tokens, num_kv_heads, head_dim = k.shape
    write_kv_kernel[(num_tokens, num_kv_heads)](
        k,
        v,
        kv_cache,
        slot_mapping,
        k.stride(0),
        v.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=kv_cache.shape[3],
        HEAD_DIM=head_dim,
    )


def paged_attention(
    q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """Attention over keys and values that are in the cache already; see `AttentionBackend`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    paged_decode_kernel[(num_tokens, num_heads)](
        q,
        kv_cache,
        out,
        metadata.block_tables,
        *rows_of_batch(metadata, num_tokens),
        scale * LOG2_E,
        q.stride(0),
        metadata.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        TILE_KEYS=32,
    )
    return out


class SimpleTritonBackend(AttentionBackend):
    """Reads the pages in place, a prompt token by token; see `AttentionBackend` for shapes. It has
    neither sliding windows nor soft caps."""

    name = "triton_simple"
    compiles_kernels = True

    def step_kinds(
        self, num_heads: int, kv_cache: Tensor, max_num_seqs: int, max_num_tokens: int
    ) -> list[tuple[int, int, int]]:
        """See the base class: the two kernels are the same for every step."""
        return [(1, 1, 1)]

    def forward(
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
        """See `AttentionBackend.forward`.

        Raises:
            ValueError: there is a sliding window or a soft cap.
        """
        if sliding_window or soft_cap:
            raise ValueError(
                "attention backend 'triton_simple' does not support sliding windows or soft caps; "
                "use 'triton'"
            )
        write_kv_cache(k, v, kv_cache, metadata.slot_mapping)
        return paged_attention(q, kv_cache, metadata, scale)
