"""Latent attention in Triton: a decode reads each row of the cache once, for up to 64 heads, as key
and as value.

`cache[num_blocks, block_size, rank + rope]` is one layer's cache. Offsets of blocks are in 64 bits.

Built by notebooks/26_latent_attention.ipynb: edit it there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm.attention.triton_kernels import _load, _parts, _weigh


@triton.jit
def _load_rows(pointers, exists, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr):
    """Rows of the cache or absorbed queries, from pointers to their first channels `[rows, 1]`: the
    halves of the latent, each `[rows, HALF]`, and the rotated channels. Rows and channels that do
    not exist are zeros."""
    # A product takes at least 16.
    ROPE_P2: tl.constexpr = 16 if ROPE < 16 else triton.next_power_of_2(ROPE)
    channel = tl.arange(0, HALF)[None, :]
    rotated = tl.arange(0, ROPE_P2)[None, :]
    low = _load(pointers + channel, exists, channel < HEAD_DIM, True, HEAD_DIM != 2 * HALF)
    high = _load(
        pointers + HALF + channel, exists, HALF + channel < HEAD_DIM, True, HEAD_DIM != 2 * HALF
    )
    return (
        low,
        high,
        _load(pointers + HEAD_DIM + rotated, exists, rotated < ROPE, True, ROPE != ROPE_P2),
    )


@triton.jit
def _score_rows(q_low, q_high, q_rope, low, high, rope, exists):
    """Scores of queries with rows, `[queries, rows]`; of rows that do not exist, -inf. Neither of
    the two chains of products waits for the other; "ieee" keeps float32 exact."""
    scores = tl.dot(q_low, tl.trans(low), input_precision="ieee")
    others = tl.dot(q_high, tl.trans(high), input_precision="ieee")
    scores += tl.dot(q_rope, tl.trans(rope), others, input_precision="ieee")
    return tl.where(exists[None, :], scores, float("-inf"))


@triton.jit
def latent_attention_kernel(
    q_ptr,
    cache_ptr,
    partial_ptr,
    log_weight_ptr,
    table_ptr,
    seq_len_ptr,
    query_start_ptr,
    score_scale,
    table_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """A sequence with one new token: TILE_ROWS query heads over one part of the context. A row of
    the cache is HEAD_DIM channels of a latent, which is key and value, and ROPE further channels of
    the key. Grid (num_seqs, tiles of heads, NUM_SPLITS); results go where `decode_attention_kernel`
    puts them."""
    seq = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    row = tl.load(query_start_ptr + seq).to(tl.int64)
    seq_len = tl.load(seq_len_ptr + seq)
    _, part = _parts(seq_len, 0, NUM_SPLITS, TILE_KEYS, False)
    begin = split * part
    end = tl.minimum(begin + part, seq_len)
    if (tl.load(query_start_ptr + seq + 1) - row == 1) & ((begin < end) | (NUM_SPLITS == 1)):
        HALF: tl.constexpr = 16 if HEAD_DIM < 32 else triton.next_power_of_2(HEAD_DIM) // 2
        head = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        ours = (head < NUM_HEADS)[:, None]
        queries = q_ptr + (row * NUM_HEADS + head[:, None]) * (HEAD_DIM + ROPE)
        q_low, q_high, q_rope = _load_rows(queries, ours, HEAD_DIM, HALF, ROPE)
        sums_low = tl.zeros(q_low.shape, tl.float32)
        sums_high = tl.zeros(q_low.shape, tl.float32)
        peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        for start in range(begin, end, TILE_KEYS):
            position = start + tl.arange(0, TILE_KEYS)
            exists = position < end
            block = tl.load(
                table_ptr + seq * table_stride + position // BLOCK_SIZE, mask=exists, other=0
            )
            rows = (
                cache_ptr
                + block.to(tl.int64) * block_stride
                + position % BLOCK_SIZE * (HEAD_DIM + ROPE)
            )
            low, high, rope = _load_rows(rows[:, None], exists[:, None], HEAD_DIM, HALF, ROPE)
            scores = _score_rows(q_low, q_high, q_rope, low, high, rope, exists)
            weights, shrink, total, peak = _weigh(scores, peak, total, score_scale, False)
            weights = weights.to(low.dtype)
            sums_low = tl.dot(weights, low, sums_low * shrink[:, None], input_precision="ieee")
            sums_high = tl.dot(weights, high, sums_high * shrink[:, None], input_precision="ieee")
        # The largest score has the weight 1. A sequence of no length has a sum of 0.
        total = tl.maximum(total, 1.0)
        part_row = (row if NUM_SPLITS == 1 else seq * NUM_SPLITS + split) * NUM_HEADS
        channel = tl.arange(0, HALF)[None, :]
        target = partial_ptr + (part_row + head[:, None]) * HEAD_DIM + channel
        tl.store(target, sums_low / total[:, None], mask=ours & (channel < HEAD_DIM))
        tl.store(target + HALF, sums_high / total[:, None], mask=ours & (HALF + channel < HEAD_DIM))
        if NUM_SPLITS > 1:
            tl.store(log_weight_ptr + part_row + head, peak + tl.log2(total), mask=head < NUM_HEADS)
