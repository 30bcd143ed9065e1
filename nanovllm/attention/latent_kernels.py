"""Latent attention in Triton: a decode reads each row of the cache once, for up to 64 heads, as key and as value.

`cache[num_blocks, block_size, rank + rope]` is one layer's cache. Offsets of blocks are in 64 bits.

Built by notebooks/26_latent_attention.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.latent import LatentShape, TorchLatentBackend, absorb, unabsorb
from nanovllm.attention.triton import LOG2_E, MAX_SPLITS, Hardware, Tiles, attend_decodes, write_kv_cache


class LatentTiles(Tiles):
    """Lecture 15's `Tiles` for this kernel: `rows` are heads, and `keys` are rows of the cache."""

    def shared_memory(self, width: int, itemsize: int) -> int:
        """Upper bound on the compiler's shared memory in bytes: the queries, and one tile per two stages after the first, since the
        block table's entry for a tile is loaded before the tile; one more for Hopper's matrix instructions, as in lecture 15."""
        rows = self.rows + (max(1, (self.num_stages - 1) // 2) + (self.rows >= 64)) * self.keys
        return rows * width * itemsize + 4096


def choose_latent_tiles(num_heads: int, width: int, dtype: torch.dtype, hardware: Hardware) -> LatentTiles:
    """Choose tiles with up to 64 heads of a token on Hopper, whose matrix instructions take tiles from shared memory; before, the
    sums of so many heads and 512 channels would not leave enough registers."""
    many = LatentTiles(64, 64, 8, 3) if num_heads > 32 and hardware.generation == 9 else LatentTiles(32, 32, 8, 5)
    tiles = LatentTiles(16, 32, 4, 5) if num_heads <= 16 else many
    if dtype == torch.float32:  # no exact matrix instruction: everything goes through registers
        tiles = LatentTiles(16, 16, 8, 3)
    if hardware.warp_size == 64:  # AMD: a wave has twice the threads, and loads do not pass through shared memory
        return tiles._replace(rows=16, keys=min(tiles.keys, 32), num_warps=4, num_stages=2)
    while tiles.shared_memory(width, dtype.itemsize) > hardware.shared_memory and tiles.num_stages > 1:
        tiles = tiles._replace(num_stages=tiles.num_stages - 2)
    return tiles


def choose_latent_splits(num_queries: int, num_heads: int, tiles: LatentTiles, hardware: Hardware) -> int:
    """Parts of each context, such that between one and two times as many programs run as fit at once: two on each multiprocessor, one
    of 64 heads. With more parts, as `choose_splits` of lecture 15 has, their averages would cost too much: one of 16 heads is as large as
    28 rows of the cache, and is written and read."""
    programs, at_once = num_queries * triton.cdiv(num_heads, tiles.rows), 1 if tiles.rows >= 64 else 2
    return min(triton.next_power_of_2(at_once * hardware.num_processors // programs + 1), MAX_SPLITS)


class TritonLatentBackend(TorchLatentBackend):
    """Runs decodes through lecture 15's kernel. Long pieces of prompts are expanded; the tokens of short ones run as decodes.

    Args:
        hardware: the GPU that tiles are chosen for; by default, that of the tensors.
    """

    name = "triton"
    supports_graphs = decodes_pieces = True

    def __init__(self, hardware: Hardware | None = None) -> None:
        self.hardware = hardware

    @staticmethod
    def write(latent: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Put each token's row into its slot: as the key of a single head in a cache that has no values."""
        rows = latent[:, None]
        write_kv_cache(rows, rows, rows, kv_cache[:, None, None], slot_mapping)

    def step_kinds(
        self, num_heads: int, kv_cache: Tensor, max_num_seqs: int, max_num_tokens: int
    ) -> list[tuple[int, int, int]]:
        """As `TritonBackend.step_kinds`: the fewest decodes with each number of parts."""
        hardware = self.hardware or Hardware.of(kv_cache.device)
        tiles = choose_latent_tiles(num_heads, kv_cache.shape[2], kv_cache.dtype, hardware)
        kinds = {choose_latent_splits(n, num_heads, tiles, hardware): n for n in range(max_num_seqs, 0, -1)}
        return [(n, 1, 1) for n in kinds.values()]

    def decode(
        self, q: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, rank: int, scale: float,
        query_start_loc: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend with one absorbed query per row, each over the first tokens of its block table: the decodes of lecture 15,
        with a single KV head whose rows are key and value.

        Args:
            q: `[num_queries, num_heads, rank + rope]`.
            block_tables: `[num_queries, max_blocks]` int32.
            seq_lens: `[num_queries]` int32; 0 for padding, which becomes zeros.
            query_start_loc: `[num_queries + 1]` int32: 0, 1, 2 and so on, if the caller has it.

        Returns:
            `[num_queries, num_heads, rank]`.
        """
        (num_queries, num_heads, width), q = q.shape, q.contiguous()
        hardware = self.hardware or Hardware.of(q.device)
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
            "HEAD_STRIDE": 0, "HEAD_DIM": rank, "HEAD_P2": rank_p2, "WINDOWED": False, "CAPPED": False, "WIDEN": None,
        }  # fmt: skip
        num_tiles, combine_warps = triton.cdiv(num_heads, tiles.rows), max(4, splits * rank_p2 // 2048)
        attend_decodes(arguments, num_tiles, tiles, splits, width - rank, combine_warps)
        return out

    def forward(
        self, q: Tensor, latent: Tensor, up: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """See `TorchLatentBackend.forward`. A step of decodes reads no length on the host, so that a CUDA graph can record it;
        a step with prompts does."""
        if metadata.max_query_len > 1:
            return TorchLatentBackend.forward(self, q, latent, up, kv_cache, metadata, scale)
        self.write(latent, kv_cache, metadata.slot_mapping)
        shape, where = LatentShape.of(q, latent, up), (metadata.block_tables, metadata.seq_lens)
        q = absorb(q, up, shape.rope)
        return unabsorb(self.decode(q, kv_cache, *where, shape.rank, scale, metadata.query_start_loc), up, shape.v)
