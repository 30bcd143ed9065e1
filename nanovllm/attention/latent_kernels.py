"""Latent attention in Triton: a decode reads each row of the cache once, for up to 32 heads, as key and as value.

`cache[num_blocks, block_size, rank + rope]` is one layer's cache. Offsets of blocks are in 64 bits.

Built by notebooks/26_latent_attention.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.latent import LatentShape, absorb, attend_expanded, gather_latent, unabsorb
from nanovllm.attention.triton import FUSED, LOG2_E, MAX_SPLITS, Hardware, Tiles
from nanovllm.attention.triton_kernels import combine_kernel


@triton.jit
def write_latent_kernel(latent_ptr, cache_ptr, slot_ptr, latent_stride, WIDTH: tl.constexpr, WIDTH_P2: tl.constexpr):
    """One token: its row goes into its slot, unless it is padding. Grid (num_tokens,). Blocks lie one after another, and
    so do their rows: a slot is the number of a row."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        channel = tl.arange(0, WIDTH_P2)
        row = tl.load(latent_ptr + token * latent_stride + channel, mask=channel < WIDTH)
        tl.store(cache_ptr + slot * WIDTH + channel, row, mask=channel < WIDTH)


@triton.jit
def _latent_step(
    q_latent, q_rope, sums, peak, total, cache_ptr, table_ptr, start, end, score_scale, block_stride,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, TILE_KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of rows: the positions from `start` on, all of which exist unless MASKED."""
    latent_channel = tl.arange(0, q_latent.shape[1])
    rope_channel = tl.arange(0, q_rope.shape[1])
    position = start + tl.arange(0, TILE_KEYS)
    exists = position < end
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=exists, other=0)
    rows = cache_ptr + block.to(tl.int64) * block_stride + position % BLOCK_SIZE * (RANK + ROPE)
    # A slot that was never written may hold NaN, and 0 * NaN is NaN: it must not be loaded.
    latents = rows[:, None] + latent_channel[None, :]
    k_ropes = rows[None, :] + (RANK + rope_channel)[:, None]
    if MASKED:
        latent = tl.load(latents, mask=exists[:, None] & (latent_channel < RANK)[None, :], other=0.0)
        k_rope = tl.load(k_ropes, mask=exists[None, :] & (rope_channel < ROPE)[:, None], other=0.0)
    elif (q_latent.shape[1] == RANK) & (q_rope.shape[1] == ROPE):
        latent = tl.load(latents)
        k_rope = tl.load(k_ropes)
    else:
        latent = tl.load(latents, mask=(latent_channel < RANK)[None, :], other=0.0)
        k_rope = tl.load(k_ropes, mask=(rope_channel < ROPE)[:, None], other=0.0)
    # The one tile that was loaded is the key here ...
    scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
    scores = tl.dot(q_rope, k_rope, scores, input_precision="ieee")
    if MASKED:
        scores = tl.where(exists[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * score_scale)
    weights = tl.exp2(scores * score_scale - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    # ... and the value here.
    sums = tl.dot(weights.to(latent.dtype), latent, sums * shrink[:, None], input_precision="ieee")
    return sums, new_peak, total


@triton.jit
def latent_decode_kernel(
    q_ptr, cache_ptr, out_ptr, partial_ptr, log_weight_ptr, table_ptr, seq_len_ptr, score_scale, q_stride,
    table_stride, block_stride, NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, RANK_P2: tl.constexpr, ROPE_P2: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """An absorbed query: TILE_ROWS of its heads over one part of the context. Grid (number of queries, tiles of heads,
    NUM_SPLITS). The parts become one in lecture 15's `combine_kernel`; a query that sees nothing becomes zeros."""
    query = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    seq_len = tl.load(seq_len_ptr + query)
    part = tl.cdiv(tl.cdiv(seq_len, NUM_SPLITS), TILE_KEYS) * TILE_KEYS  # whole tiles, as `_parts` cuts them
    begin = split * part
    end = tl.minimum(begin + part, seq_len)
    if (begin < end) | (NUM_SPLITS == 1):
        head = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        latent_channel = tl.arange(0, RANK_P2)
        rope_channel = tl.arange(0, ROPE_P2)
        mine = (head < NUM_HEADS)[:, None]
        q_row = q_ptr + query * q_stride + head[:, None] * (RANK + ROPE)
        q_latent = tl.load(q_row + latent_channel[None, :], mask=mine & (latent_channel < RANK)[None, :], other=0.0)
        q_rope = tl.load(q_row + RANK + rope_channel[None, :], mask=mine & (rope_channel < ROPE)[None, :], other=0.0)
        sums = tl.zeros([TILE_ROWS, RANK_P2], tl.float32)
        peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        table = table_ptr + query * table_stride
        whole = begin + (end - begin) // TILE_KEYS * TILE_KEYS
        for start in range(begin, whole, TILE_KEYS):
            sums, peak, total = _latent_step(
                q_latent, q_rope, sums, peak, total, cache_ptr, table, start, end, score_scale, block_stride,
                BLOCK_SIZE, RANK, ROPE, TILE_KEYS, False)  # fmt: skip
        for start in range(whole, end, TILE_KEYS):
            sums, peak, total = _latent_step(
                q_latent, q_rope, sums, peak, total, cache_ptr, table, start, end, score_scale, block_stride,
                BLOCK_SIZE, RANK, ROPE, TILE_KEYS, True)  # fmt: skip
        total = tl.where(total == 0.0, 1.0, total)
        out = sums / total[:, None]
        cell = head[:, None] * RANK + latent_channel[None, :]
        inside = mine & (latent_channel < RANK)[None, :]
        if NUM_SPLITS == 1:
            tl.store(out_ptr + query * NUM_HEADS * RANK + cell, out.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            part_row = (query * NUM_SPLITS + split) * NUM_HEADS
            tl.store(partial_ptr + part_row * RANK + cell, out, mask=inside)
            tl.store(log_weight_ptr + part_row + head, peak + tl.log2(total), mask=head < NUM_HEADS)


class LatentTiles(Tiles):
    """Lecture 15's `Tiles` for this kernel: `rows` are heads, and `keys` are rows of the cache."""

    def shared_memory(self, width: int, itemsize: int) -> int:
        """Upper bound on the compiler's shared memory in bytes: the queries, and one tile per two stages after the first,
        since the block table's entry for a tile is loaded before the tile."""
        return (self.rows + max(1, (self.num_stages - 1) // 2) * self.keys) * width * itemsize + 4096


def choose_latent_tiles(num_heads: int, width: int, dtype: torch.dtype, hardware: Hardware) -> LatentTiles:
    """Choose tiles with up to 32 heads of a token: sums of 64 heads and 512 channels would not leave enough registers."""
    if dtype == torch.float32:  # no exact matrix instruction: everything goes through registers
        tiles = LatentTiles(16, 16, 8, 3)
    else:
        tiles = LatentTiles(16, 32, 4, 5) if num_heads <= 16 else LatentTiles(32, 32, 8, 5)
    if hardware.warp_size == 64:  # AMD: a wave has twice the threads, and loads do not pass through shared memory
        return tiles._replace(rows=16, num_warps=4, num_stages=2)
    while tiles.shared_memory(width, dtype.itemsize) > hardware.shared_memory and tiles.num_stages > 1:
        tiles = tiles._replace(num_stages=tiles.num_stages - 2)
    return tiles


def choose_latent_splits(num_queries: int, num_heads: int, tiles: LatentTiles, hardware: Hardware) -> int:
    """Parts of each context, as `choose_splits` of lecture 15: enough programs for several rounds."""
    programs = num_queries * triton.cdiv(num_heads, tiles.rows)
    return min(triton.next_power_of_2(triton.cdiv(8 * hardware.num_processors, programs)), MAX_SPLITS)


def store_latent(latent: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put each token's row into its slot, as `write_latent`, but without reading a slot on the host."""
    width = kv_cache.shape[2]
    if len(slot_mapping):
        write_latent_kernel[(len(slot_mapping),)](
            latent, kv_cache, slot_mapping, latent.stride(0),
            WIDTH=width, WIDTH_P2=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip


def decode_latent(
    q: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, rank: int, scale: float, hardware: Hardware
) -> Tensor:
    """Attend with one absorbed query per row, each over the first tokens of its block table.

    Args:
        q: `[num_queries, num_heads, rank + rope]`.
        block_tables: `[num_queries, max_blocks]` int32.
        seq_lens: `[num_queries]` int32; 0 for padding, which becomes zeros.

    Returns:
        `[num_queries, num_heads, rank]`.
    """
    (num_queries, num_heads, width), q = q.shape, q.contiguous()
    tiles = choose_latent_tiles(num_heads, width, q.dtype, hardware)
    splits = choose_latent_splits(num_queries, num_heads, tiles, hardware)
    out = q.new_empty(num_queries, num_heads, rank)
    partial = log_weight = out  # not used by a single part
    if splits > 1:
        partial = q.new_empty((num_queries, splits, num_heads, rank), dtype=torch.float32)
        log_weight = q.new_empty((num_queries, splits, num_heads), dtype=torch.float32)
    rank_p2 = triton.next_power_of_2(rank)
    latent_decode_kernel[(num_queries, triton.cdiv(num_heads, tiles.rows), splits)](
        q, kv_cache, out, partial, log_weight, block_tables, seq_lens, scale * LOG2_E,
        q.stride(0), block_tables.stride(0), kv_cache.stride(0),
        NUM_HEADS=num_heads, BLOCK_SIZE=kv_cache.shape[1], RANK=rank, ROPE=width - rank,
        RANK_P2=max(16, rank_p2), ROPE_P2=max(16, triton.next_power_of_2(width - rank)),
        TILE_ROWS=tiles.rows, TILE_KEYS=tiles.keys, NUM_SPLITS=splits,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **FUSED,
    )  # fmt: skip
    if splits > 1:
        starts = torch.arange(num_queries + 1, dtype=torch.int32, device=q.device)
        combine_kernel[(num_queries, num_heads)](
            partial, log_weight, out, seq_lens, starts, 0,
            NUM_HEADS=num_heads, HEAD_DIM=rank, HEAD_P2=rank_p2, TILE_KEYS=tiles.keys, NUM_SPLITS=splits,
            WINDOWED=False, num_warps=max(4, splits * rank_p2 // 2048), **FUSED,
        )  # fmt: skip
    return out


class TritonLatentBackend:
    """Runs decodes through the kernel above. Long pieces of prompts are expanded; the tokens of short ones run as decodes.

    Args:
        hardware: the GPU that tiles are chosen for; by default, that of the tensors.
    """

    name = "triton"
    supports_graphs = True

    def __init__(self, hardware: Hardware | None = None) -> None:
        self.hardware = hardware

    def step_kinds(
        self, num_heads: int, kv_cache: Tensor, max_num_seqs: int, max_num_tokens: int
    ) -> list[tuple[int, int, int]]:
        """As `TritonBackend.step_kinds`: the fewest decodes with each number of parts."""
        hardware = self.hardware or Hardware.of(kv_cache.device)
        tiles = choose_latent_tiles(num_heads, kv_cache.shape[2], kv_cache.dtype, hardware)
        kinds = {choose_latent_splits(n, num_heads, tiles, hardware): n for n in range(max_num_seqs, 0, -1)}
        return [(n, 1, 1) for n in kinds.values()]

    def forward(
        self, q: Tensor, latent: Tensor, up: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """See `TorchLatentBackend.forward`. A step of decodes reads no length on the host, so that a CUDA graph can record it;
        a step with prompts does."""
        hardware = self.hardware or Hardware.of(q.device)
        store_latent(latent, kv_cache, metadata.slot_mapping)
        shape = LatentShape.of(q, latent, up)
        if metadata.max_query_len == 1:
            query = absorb(q, up, shape.rope)
            averages = decode_latent(
                query, kv_cache, metadata.block_tables, metadata.seq_lens, shape.rank, scale, hardware
            )
            return unabsorb(averages, up, shape.v)
        out = q.new_zeros(len(q), shape.num_heads, shape.v)
        starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        tokens: list[tuple[int, int, int]] = []  # row of q, sequence, and length up to itself
        for s, (first, last) in enumerate(pairwise(starts)):
            count, seq_len = last - first, seq_lens[s]
            if shape.prefers_naive(count, seq_len):
                rows = gather_latent(kv_cache, metadata.block_tables[s], seq_len)
                out[first:last] = attend_expanded(q[first:last], rows, up, scale)
            else:
                tokens += [(first + i, s, seq_len - count + 1 + i) for i in range(count)]
        if tokens:
            row, seq, length = torch.tensor(tokens, dtype=torch.int32).to(q.device).unbind(1)
            averages = decode_latent(
                absorb(q[row], up, shape.rope), kv_cache, metadata.block_tables[seq], length.contiguous(),
                shape.rank, scale, hardware,
            )  # fmt: skip
            out[row] = unabsorb(averages, up, shape.v)
        return out
