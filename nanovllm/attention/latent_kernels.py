"""Latent attention in Triton: a decode reads each row of the cache once, for up to 64 heads, as key
and as value.

`cache[num_blocks, block_size, rank + rope]` is one layer's cache. Offsets of blocks are in 64 bits.

Built by notebooks/26_latent_attention.ipynb: edit it there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.attention.latent import TorchLatentBackend
from nanovllm.attention.triton import (
    LOG2_E,
    MAX_SPLITS,
    Hardware,
    Tiles,
    attend_decodes,
    write_kv_cache,
)
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
            # Two chains of products, of which neither waits for the other; "ieee" keeps float32
            # exact.
            scores = tl.dot(q_low, tl.trans(low), input_precision="ieee")
            others = tl.dot(q_high, tl.trans(high), input_precision="ieee")
            scores += tl.dot(q_rope, tl.trans(rope), others, input_precision="ieee")
            scores = tl.where(exists[None, :], scores, float("-inf"))
            weights, shrink, total, peak = _weigh(scores, peak, total, score_scale, False)
            sums_low = tl.dot(
                weights.to(low.dtype), low, sums_low * shrink[:, None], input_precision="ieee"
            )
            sums_high = tl.dot(
                weights.to(low.dtype), high, sums_high * shrink[:, None], input_precision="ieee"
            )
        # The largest score has the weight 1. A sequence of no length has a sum of 0.
        total = tl.maximum(total, 1.0)
        part_row = (row if NUM_SPLITS == 1 else seq * NUM_SPLITS + split) * NUM_HEADS
        channel = tl.arange(0, HALF)[None, :]
        target = partial_ptr + (part_row + head[:, None]) * HEAD_DIM + channel
        tl.store(target, sums_low / total[:, None], mask=ours & (channel < HEAD_DIM))
        tl.store(target + HALF, sums_high / total[:, None], mask=ours & (HALF + channel < HEAD_DIM))
        if NUM_SPLITS > 1:
            tl.store(log_weight_ptr + part_row + head, peak + tl.log2(total), mask=head < NUM_HEADS)


def choose_latent_tiles(
    num_heads: int, width: int, dtype: torch.dtype, hardware: Hardware
) -> Tiles:
    """Choose tiles with up to 64 heads of a token on Hopper, whose matrix instructions take tiles
    from shared memory; before, the sums of so many heads and 512 channels would not leave enough
    registers."""
    many = (
        Tiles(64, 64, 8, 3) if num_heads > 32 and hardware.generation == 9 else Tiles(32, 32, 8, 5)
    )
    tiles = Tiles(16, 32, 4, 5) if num_heads <= 16 else many
    if dtype == torch.float32:  # no exact matrix instruction: everything goes through registers
        tiles = Tiles(16, 16, 8, 3)
    if hardware.warp_size == 64:
        # AMD: a wave has twice the threads, and loads do not pass through shared memory.
        return Tiles(16, 16, 4, 2)
    return tiles.fitting(width, dtype.itemsize, hardware, num_loaded=1)


def choose_latent_splits(num_queries: int, num_heads: int, tiles: Tiles, hardware: Hardware) -> int:
    """Parts of each context, such that between one and two times as many programs run as fit at
    once: two on each multiprocessor, one of 64 heads. (Fewer are 4 % faster where all contexts are
    equally long, and up to 20 % slower where they are not, since the longest runs last and alone.)
    With more parts, as `choose_splits` of lecture 15 has, their averages would cost too much: one
    of 16 heads is as large as 28 rows of the cache, and is written and read."""
    programs = num_queries * triton.cdiv(num_heads, tiles.rows)
    at_once = 1 if tiles.rows >= 64 else 2
    splits: int = triton.next_power_of_2(at_once * hardware.num_processors // programs + 1)
    return min(splits, MAX_SPLITS)


class TritonLatentBackend(TorchLatentBackend):
    """Runs decodes in Triton. Long pieces of prompts are expanded; the tokens of short ones run as
    decodes.

    Args:
        hardware: the GPU that tiles are chosen for; by default, that of the tensors.
    """

    name = "triton"
    supports_graphs = True
    compiles_kernels = True
    decodes_pieces = True

    def __init__(self, hardware: Hardware | None = None) -> None:
        self.hardware = hardware

    @staticmethod
    def write(latent: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Put each token's row into its slot: as the key of a single head in a cache that has no
        values."""
        rows = latent[:, None]
        write_kv_cache(rows, rows, rows, kv_cache[:, None, None], slot_mapping)

    def step_kinds(
        self, num_heads: int, kv_cache: Tensor, max_num_seqs: int, max_num_tokens: int
    ) -> list[tuple[int, int, int]]:
        """As `TritonBackend.step_kinds`: the fewest decodes with each number of parts."""
        hardware = self.hardware or Hardware.of(kv_cache.device)
        tiles = choose_latent_tiles(num_heads, kv_cache.shape[2], kv_cache.dtype, hardware)
        kinds = {
            choose_latent_splits(n, num_heads, tiles, hardware): n
            for n in range(max_num_seqs, 0, -1)
        }
        return [(n, 1, 1) for n in kinds.values()]

    def decode(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        rank: int,
        scale: float,
        query_start_loc: Tensor | None = None,
    ) -> Tensor:
        """Attend with one absorbed query per row, each over the first tokens of its block table.

        Args:
            q: `[num_queries, num_heads, rank + rope]`.
            block_tables: `[num_queries, max_blocks]` int32.
            seq_lens: `[num_queries]` int32; 0 for padding, which becomes zeros.
            query_start_loc: `[num_queries + 1]` int32: 0, 1, 2 and so on, if the caller has it.

        Returns:
            `[num_queries, num_heads, rank]`.
        """
        num_queries, num_heads, width = q.shape
        q = q.contiguous()
        hardware = self.hardware or Hardware.of(q.device)
        tiles = choose_latent_tiles(num_heads, width, q.dtype, hardware)
        splits = choose_latent_splits(num_queries, num_heads, tiles, hardware)
        out = q.new_empty(num_queries, num_heads, rank)
        if query_start_loc is None:
            query_start_loc = torch.arange(num_queries + 1, dtype=torch.int32, device=q.device)
        arguments: dict[str, object] = {
            "q_ptr": q,
            "cache_ptr": kv_cache,
            "table_ptr": block_tables,
            "seq_len_ptr": seq_lens,
            "query_start_ptr": query_start_loc,
            "score_scale": scale * LOG2_E,
            "table_stride": block_tables.stride(0),
            "block_stride": kv_cache.stride(0),
            "NUM_HEADS": num_heads,
            "BLOCK_SIZE": kv_cache.shape[1],
            "HEAD_DIM": rank,
            "ROPE": width - rank,
        }
        attend_decodes(
            latent_attention_kernel,
            arguments,
            out,
            num_seqs=len(seq_lens),
            num_groups=triton.cdiv(num_heads, tiles.rows),
            tiles=tiles,
            splits=splits,
        )
        return out
