"""The launch of the latent attention kernel: its tiles, its parts, and the backend that uses it
(lecture 26)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nanovllm.attention.latent import TorchLatentBackend
from nanovllm.attention.latent_kernels import latent_attention_kernel
from nanovllm.attention.triton import (
    LOG2_E,
    MAX_SPLITS,
    Hardware,
    Tiles,
    attend_decodes,
    write_kv_cache,
)


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
    """Parts of each context, such that between one and two times as many programs run as fit
    simultaneously: two on each multiprocessor, one of 64 heads. (Fewer are 4 % faster where all
    contexts are equally long, and up to 20 % slower where they are not, since the longest runs last
    and alone.) With more parts, as `choose_splits` of lecture 15 has, their averages would cost too
    much: one of 16 heads is as large as 28 rows of the cache, and is written and read."""
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
