"""Chunks: tokens with keys and values that were computed in an earlier prompt, and how they get out
of a sequence's blocks and into those of another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.kv_transfer.blend.rotation import rotate_keys
from nanovllm.ops.attention import gather_kv


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive tokens with their keys and values on this rank, as computed in an earlier prompt.

    Attributes:
        start: position of the first token there. A chunk that began at 0 is exact as a prefix.
        kv: `[num_layers, 2, num_tokens, num_kv_heads, head_dim]`: keys, rotated for those
            positions, and values.
    """

    start: int
    kv: Tensor

    def __len__(self) -> int:
        return self.kv.shape[2]


def save_chunk(kv_caches: list[Tensor], block_table: Tensor, start: int, end: int) -> Chunk:
    """Copy the keys and values of the positions `start` to `end - 1` out of a sequence's blocks, to
    host memory.

    Args:
        kv_caches: by layer, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.
        block_table: `[max_blocks]` int32, the sequence's.
    """
    layers = [
        torch.stack(gather_kv(cache, block_table, end))[:, :, start:].transpose(1, 2)
        for cache in kv_caches
    ]
    return Chunk(start, torch.stack(layers).cpu())


def slots_of(positions: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """The slots of a sequence's positions in the cache, `[num_positions]` int64."""
    return block_table[positions // block_size].long() * block_size + positions % block_size


def place_chunk(
    chunk: Chunk,
    start: int,
    kv_caches: list[Tensor],
    block_table: Tensor,
    cos_sin: Tensor,
    first: int = 0,
) -> None:
    """Write a chunk into a sequence's blocks at the positions that begin at `start`, to which its
    keys are rotated. Positions before `first` are not written."""
    skipped = min(max(first - start, 0), len(chunk))
    positions = torch.arange(start + skipped, start + len(chunk), device=block_table.device)
    keys, values = chunk.kv[:, :, skipped:].to(block_table.device).unbind(1)
    if start != chunk.start:
        keys = rotate_keys(keys, positions - start + chunk.start, positions, cos_sin)
    slots = slots_of(positions, block_table, kv_caches[0].shape[3])
    for layer, kv_cache in enumerate(kv_caches):
        ops.write_kv_cache(keys[layer], values[layer], kv_cache, slots)
