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
from nanovllm.attention.triton import LOG2_E, MAX_SPLITS, Hardware, Tiles, attend_decodes


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
    q: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, rank: int, scale: float, hardware: Hardware,
    query_start_loc: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend with one absorbed query per row, each over the first tokens of its block table: the decodes of lecture 15, with
    a single KV head whose rows are key and value.

    Args:
        q: `[num_queries, num_heads, rank + rope]`.
        block_tables: `[num_queries, max_blocks]` int32.
        seq_lens: `[num_queries]` int32; 0 for padding, which becomes zeros.
        query_start_loc: `[num_queries + 1]` int32: 0, 1, 2 and so on, if the caller has it.

    Returns:
        `[num_queries, num_heads, rank]`.
    """
    (num_queries, num_heads, width), q = q.shape, q.contiguous()
    tiles = choose_latent_tiles(num_heads, width, q.dtype, hardware)
    splits = choose_latent_splits(num_queries, num_heads, tiles, hardware)
    out, rank_p2 = q.new_empty(num_queries, num_heads, rank), max(16, triton.next_power_of_2(rank))
    if query_start_loc is None:
        query_start_loc = torch.arange(num_queries + 1, dtype=torch.int32, device=q.device)
    arguments = {
        "q_ptr": q, "cache_ptr": kv_cache, "out_ptr": out,
        "table_ptr": block_tables, "seq_len_ptr": seq_lens, "query_start_ptr": query_start_loc,
        "score_scale": scale * LOG2_E, "cap_scale": 0.0, "window": 0,
        "q_stride": q.stride(0), "table_stride": block_tables.stride(0), "block_stride": kv_cache.stride(0),
        "NUM_HEADS": num_heads, "GROUP": tiles.rows, "NUM_KV_HEADS": 1, "BLOCK_SIZE": kv_cache.shape[1],
        "HEAD_DIM": rank, "HEAD_P2": rank_p2, "WINDOWED": False, "CAPPED": False,
    }  # fmt: skip
    num_tiles, combine_warps = triton.cdiv(num_heads, tiles.rows), max(4, splits * rank_p2 // 2048)
    attend_decodes(arguments, num_tiles, tiles, splits, width - rank, combine_warps)
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
            averages = decode_latent(
                absorb(q, up, shape.rope), kv_cache, metadata.block_tables, metadata.seq_lens, shape.rank, scale, hardware,
                metadata.query_start_loc,
            )  # fmt: skip
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
            where = metadata.block_tables[seq], length.contiguous()
            averages = decode_latent(absorb(q[row], up, shape.rope), kv_cache, *where, shape.rank, scale, hardware)
            out[row] = unabsorb(averages, up, shape.v)
        return out
