"""Triton kernels of paged attention: one that writes the cache, one for decodes, one for everything
else.

`cache[num_blocks, 2, num_kv_heads, block_size, head_dim]` is one layer's cache. Offsets of blocks
and tokens are in 64
bits: one layer's cache on a large GPU may have more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanovllm.ops.triton import rotate, rotate_heads


@triton.jit
def write_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cache_ptr,
    slot_ptr,
    position_ptr,
    cos_sin_ptr,
    q_stride,
    k_stride,
    v_stride,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """One token, one KV head: its key and value go into the slot; with ROTATE, the key and the
    head's queries are rotated on the way, the queries in place. With PARTS = 1, the cache has keys
    only. Grid (num_tokens, num_kv_heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_ptr + token)
    half: tl.constexpr = HEAD_DIM // 2
    channel = tl.arange(0, triton.next_power_of_2(half))
    inside = channel < half
    # Padding has no slot; its queries need no rotation either.
    if slot >= 0:
        row = (
            (slot // BLOCK_SIZE * PARTS * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
        ) * HEAD_DIM
        key = k_ptr + token * k_stride + head * HEAD_DIM + channel
        value = v_ptr + token * v_stride + head * HEAD_DIM + channel
        first = tl.load(key, mask=inside)
        second = tl.load(key + half, mask=inside)
        if ROTATE:
            angle = cos_sin_ptr + tl.load(position_ptr + token) * HEAD_DIM + channel
            cos = tl.load(angle, mask=inside).to(first.dtype).to(tl.float32)
            sin = tl.load(angle + half, mask=inside).to(first.dtype).to(tl.float32)
            first, second = rotate(first, second, cos, sin)
            queries = q_ptr + token * q_stride + head * GROUP * HEAD_DIM
            rotate_heads(queries, HEAD_DIM, cos[None, :], sin[None, :], GROUP, half)
        target = cache_ptr + row + channel
        tl.store(target, first, mask=inside)
        tl.store(target + half, second, mask=inside)
        if PARTS == 2:
            target += NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
            tl.store(target, tl.load(value, mask=inside), mask=inside)
            tl.store(target + half, tl.load(value + half, mask=inside), mask=inside)


@triton.jit
def _load(pointers, exists, inside, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """A tile, with zeros for positions that do not exist, and for channels that are not inside. A
    slot that was never written may hold NaN, and 0 * NaN is NaN: it must not be loaded."""
    mask = exists & inside if MASKED else inside
    return tl.load(pointers, mask=mask, other=0.0) if MASKED or PADDED else tl.load(pointers)


@triton.jit
def _weigh(scores, peak, total, score_scale, MASKED: tl.constexpr):
    """Online softmax (Milakov and Gimelshein 2018): take a tile of scores `[rows, keys]` into the
    largest score so far and the total of weights so far, both `[rows]`, in units of log 2. MASKED:
    a row may have seen no key yet.

    Returns: the weights of the tile, the factor by which the earlier sums shrink, and the new total
    and peak."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * score_scale)
    reference = new_peak
    if MASKED:  # a row that has seen no key yet has nothing to compare with
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * score_scale - reference[:, None])
    shrink = tl.exp2(peak - reference)
    return weights, shrink, total * shrink + tl.sum(weights, 1), new_peak


@triton.jit
def _attend(
    q,
    cache_ptr,
    table_ptr,
    begin,
    whole,
    end,
    query_position,
    score_scale,
    cap_scale,
    window,
    block_stride,
    value_offset,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attend with some rows to the keys [begin, end) of a sequence and a KV head, of which all rows
    see all of [begin, whole): whole tiles, which need no mask. WIDEN, if there is one, turns tiles
    of a quantized cache into keys and values, and reads their scales (`triton_quantized.widen`).

    Returns: the weighted average of the values `[rows, channels]`, and log2 of the sum of weights
    `[rows]`; 0 and -inf for a row that sees nothing."""
    sums = tl.zeros(q.shape, tl.float32)
    # The largest score so far, in units of log 2.
    peak = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)  # the sum of 2^(score - peak)
    channel = tl.arange(0, q.shape[1])
    PADDED: tl.constexpr = q.shape[1] != HEAD_DIM
    # Of a prompt's tiles few are last: filling a pipeline would take longer than they do. But loads
    # then pass through registers.
    LAST: tl.constexpr = 1 if q.shape[0] >= 64 and WIDEN is None and not WINDOWED else None
    # With a window, every tile needs the mask.
    for MASKED in tl.static_range(WINDOWED, 2):
        stop = end if MASKED else whole
        for start in tl.range(begin, stop, TILE_KEYS, num_stages=LAST if MASKED else None):
            position = start + tl.arange(0, TILE_KEYS)
            exists = position < end
            block = _load(table_ptr + position // BLOCK_SIZE, exists, exists, MASKED, False)
            offset = block.to(tl.int64) * block_stride + position % BLOCK_SIZE * HEAD_DIM
            # Constants are added to the base, once: an addition to a tile of addresses is one for
            # each thread.
            keys = cache_ptr + offset[:, None] + channel[None, :]
            values = cache_ptr + value_offset + offset[:, None] + channel[None, :]
            k = _load(keys, exists[:, None], channel[None, :] < HEAD_DIM, MASKED, PADDED)
            v = _load(values, exists[:, None], channel[None, :] < HEAD_DIM, MASKED, PADDED)
            if WIDEN is not None:
                page = cache_ptr + (block.to(tl.int64) * block_stride + BLOCK_SIZE * HEAD_DIM)
                k, v, k_scale, v_scale = WIDEN(
                    k, v, page, position % BLOCK_SIZE, value_offset, exists, q.dtype
                )
            # "ieee" keeps float32 exact; 16-bit products are exact in any case.
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if WIDEN is not None:
                scores *= k_scale[None, :]
            if CAPPED:  # tanh, by way of 2^x
                scores = 1.0 - 2.0 / (tl.exp2(scores * cap_scale) + 1.0)
            if MASKED:
                visible = exists[None, :] & (position[None, :] <= query_position[:, None])
                if WINDOWED:
                    visible = visible & (position[None, :] > query_position[:, None] - window)
                scores = tl.where(visible, scores, float("-inf"))
            weights, shrink, total, peak = _weigh(scores, peak, total, score_scale, MASKED)
            if WIDEN is not None:
                weights *= v_scale[None, :]
            sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
        begin = stop
    total = tl.where(total == 0.0, 1.0, total)
    return sums / total[:, None], peak + tl.log2(total)


@triton.jit
def _parts(
    seq_len, window, NUM_SPLITS: tl.constexpr, TILE_KEYS: tl.constexpr, WINDOWED: tl.constexpr
):
    """Cut the context of a decode into NUM_SPLITS parts: returns the first position that it reads,
    and the positions per part.

    The first position is 0; WINDOWED, it is the start of the tile in which the last `window` of the
    seq_len positions begin. Part i begins at first + i * (positions per part). These are whole
    tiles of TILE_KEYS positions, the same number of tiles for all parts, and the fewest with which
    NUM_SPLITS parts contain position seq_len - 1. The last parts may be empty."""
    first = 0
    if WINDOWED:
        first = tl.maximum(seq_len - window, 0) // TILE_KEYS * TILE_KEYS
    return first, tl.cdiv(tl.cdiv(seq_len - first, NUM_SPLITS), TILE_KEYS) * TILE_KEYS


@triton.jit(do_not_specialize=["window"])
def decode_attention_kernel(
    q_ptr,
    cache_ptr,
    partial_ptr,
    log_weight_ptr,
    table_ptr,
    seq_len_ptr,
    query_start_ptr,
    score_scale,
    cap_scale,
    window,
    q_stride,
    table_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """A sequence with one new token: all query heads of one KV head over one part of the context,
    so that each key is read once. Grid (num_seqs, num_kv_heads, NUM_SPLITS); the parts become one
    in `combine_kernel`, which describes `partial` and `log_weight` (Flash-Decoding, Dao et al.
    2023). The only part goes to the sequence's row of `partial[num_tokens, NUM_HEADS, HEAD_DIM]`.
    Sequences with more new tokens are left to `mixed_attention_kernel`."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(query_start_ptr + seq).to(tl.int64)
    if tl.load(query_start_ptr + seq + 1) - row == 1:
        seq_len = tl.load(seq_len_ptr + seq)
        first, part = _parts(seq_len, window, NUM_SPLITS, TILE_KEYS, WINDOWED)
        begin = first + split * part
        end = tl.minimum(begin + part, seq_len)
        if (begin < end) | (NUM_SPLITS == 1):
            member = tl.arange(0, TILE_ROWS)
            channel = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
            mine = (member < GROUP)[:, None] & (channel < HEAD_DIM)[None, :]
            cell = (head * GROUP + member)[:, None] * HEAD_DIM + channel[None, :]
            q = tl.load(q_ptr + row * q_stride + cell, mask=mine, other=0.0)
            whole = begin + (end - begin) // TILE_KEYS * TILE_KEYS
            out, log_weight = _attend(
                q,
                cache_ptr + head * HEAD_STRIDE,
                table_ptr + seq * table_stride,
                begin,
                whole,
                end,
                tl.zeros_like(member) + (seq_len - 1),
                score_scale,
                cap_scale,
                window,
                block_stride,
                NUM_KV_HEADS * HEAD_STRIDE,
                BLOCK_SIZE,
                HEAD_DIM,
                TILE_KEYS,
                WINDOWED,
                CAPPED,
                WIDEN,
            )
            part_row = (row if NUM_SPLITS == 1 else seq * NUM_SPLITS + split) * NUM_HEADS
            tl.store(partial_ptr + part_row * HEAD_DIM + cell, out, mask=mine)
            if NUM_SPLITS > 1:
                tl.store(
                    log_weight_ptr + part_row + head * GROUP + member,
                    log_weight,
                    mask=member < GROUP,
                )


@triton.jit(do_not_specialize=["window"])
def combine_kernel(
    partial_ptr,
    log_weight_ptr,
    out_ptr,
    seq_len_ptr,
    query_start_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    window=0,
    WINDOWED: tl.constexpr = False,
):
    """Combine the parts of one decode and one head: averages over keys, weighted with their sums of
    2^score. Grid (num_seqs, num_heads).

    `partial[num_seqs, NUM_SPLITS, NUM_HEADS, HEAD_DIM]` has the averages, and
    `log_weight[num_seqs, NUM_SPLITS, NUM_HEADS]` log2 of the sums, -inf for a part in which no key
    was visible. The parts that begin at the end of the sequence or later (`_parts`) were never
    written: they may be NaN and must not be loaded. The sums themselves may be too large or too
    small for float32; only their ratios matter. If no key was visible, the result is 0. It goes to
    the sequence's row of `out[num_tokens, NUM_HEADS, HEAD_DIM]`, `query_start[seq]`. Sequences
    without or with several new tokens are left alone."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(query_start_ptr + seq).to(tl.int64)
    if tl.load(query_start_ptr + seq + 1) - row == 1:
        seq_len = tl.load(seq_len_ptr + seq)
        first, part = _parts(seq_len, window, NUM_SPLITS, TILE_KEYS, WINDOWED)
        split = tl.arange(0, NUM_SPLITS)
        used = first + split * part < seq_len
        part_row = (seq * NUM_SPLITS + split) * NUM_HEADS + head
        log_weight = tl.load(log_weight_ptr + part_row, mask=used, other=float("-inf"))
        weight = tl.exp2(log_weight - tl.maximum(tl.max(log_weight, 0), -1e30))
        weight = weight / tl.maximum(tl.sum(weight, 0), 1e-30)
        channel = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
        inside = channel < HEAD_DIM
        known = used[:, None] & inside[None, :]
        partial = tl.load(
            partial_ptr + part_row[:, None] * HEAD_DIM + channel[None, :], mask=known, other=0.0
        )
        out = tl.sum(partial * weight[:, None], 0)
        tl.store(out_ptr + (row * NUM_HEADS + head) * HEAD_DIM + channel, out, mask=inside)


@triton.jit(do_not_specialize=["num_seqs", "window"])
def mixed_attention_kernel(
    q_ptr,
    cache_ptr,
    out_ptr,
    table_ptr,
    seq_len_ptr,
    query_start_ptr,
    num_seqs,
    score_scale,
    cap_scale,
    window,
    q_stride,
    table_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SKIP_DECODES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Whole prompts, chunks, the rest of a prompt after a prefix hit, and decodes, in one launch.

    A tile is TILE_TOKENS tokens of one sequence times the GROUP query heads of one KV head; the
    rest of TILE_ROWS stays idle. Sequence s gets the tiles from `query_start[s] // TILE_TOKENS + s`
    on, which is enough for every length: so the grid (num_tokens // TILE_TOKENS + num_seqs,
    num_kv_heads) is known without reading a length."""
    # Late tiles have the most keys before them: they start first, and short ones fill the gaps at
    # the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    low = 0
    high = num_seqs
    while low < high:  # in the end, low sequences have their first tile here or before
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // TILE_TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    query_start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_start
    first = (tile - (query_start // TILE_TOKENS + seq)) * TILE_TOKENS
    if (first < query_len) & ((query_len > 1) | (not SKIP_DECODES)):
        seq_len = tl.load(seq_len_ptr + seq)
        row = tl.arange(0, TILE_ROWS)
        channel = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
        token = first + row // GROUP
        mine = ((token < query_len) & (row < TILE_TOKENS * GROUP))[:, None] & (channel < HEAD_DIM)[
            None, :
        ]
        cell = (head * GROUP + row % GROUP)[:, None] * HEAD_DIM + channel[None, :]
        packed_row = (query_start + token).to(tl.int64)[:, None]
        q = tl.load(q_ptr + packed_row * q_stride + cell, mask=mine, other=0.0)
        position = seq_len - query_len + first  # of the tile's first token
        end = tl.minimum(position + TILE_TOKENS, seq_len)  # causality: no row sees more
        begin = 0
        if WINDOWED:
            begin = tl.maximum(position - window + 1, 0) // TILE_KEYS * TILE_KEYS
        whole = (position + 1) // TILE_KEYS * TILE_KEYS
        out, _ = _attend(
            q,
            cache_ptr + head * HEAD_STRIDE,
            table_ptr + tl.cast(seq, tl.int64) * table_stride,
            begin,
            whole,
            end,
            position + row // GROUP,
            score_scale,
            cap_scale,
            window,
            block_stride,
            NUM_KV_HEADS * HEAD_STRIDE,
            BLOCK_SIZE,
            HEAD_DIM,
            TILE_KEYS,
            WINDOWED,
            CAPPED,
            WIDEN,
        )
        tl.store(out_ptr + packed_row * (NUM_HEADS * HEAD_DIM) + cell, out, mask=mine)
