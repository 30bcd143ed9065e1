"""Paged attention on a GPU, in Triton: which kernel, cut into which tiles, for which batch.

Built by notebooks/15_triton_attention.ipynb: edit it there, then run `python -m nanovllm.course build`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nanovllm.attention.base import AttentionMetadata, Rotary
from nanovllm.attention.triton_kernels import (
    combine_kernel,
    decode_attention_kernel,
    mixed_attention_kernel,
    write_kv_kernel,
)

# The hardware has an instruction for 2^x and none for e^x, so scores are kept in units of log 2.
LOG2_E = 1.4426950408889634
# Contexts of a few tiles are not worth a launch of their own: in a mixed batch their decodes stay with the others.
SHORT_CONTEXT = 256
# Most parts into which a decode's context is cut; combining them costs little beside reading a long context.
MAX_SPLITS = 64
# A product and a sum in one instruction, which rounds once. Newer versions of Triton want to be asked for it.
FUSED = {"enable_fp_fusion": True}


def write_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    rotary: Rotary | None = None,
) -> None:
    """Put keys and values into their slots; with `rotary`, rotate keys on the way and queries in place.

    Args:
        q, k, v: as in `AttentionBackend.forward`; tokens may lie apart (views of one projection), heads may not.
    """
    num_kv_heads, head_dim = k.shape[1:]
    group = q.shape[1] // num_kv_heads
    # Without rotation these two are not read, but a kernel's arguments have to point somewhere.
    positions, cos_sin = rotary if rotary is not None else (slot_mapping, slot_mapping)
    if len(slot_mapping):
        write_kv_kernel[(len(slot_mapping), num_kv_heads)](
            q,
            k,
            v,
            kv_cache,
            slot_mapping,
            positions,
            cos_sin,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            GROUP=group,
            GROUP_P2=triton.next_power_of_2(group),
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_SIZE=kv_cache.shape[3],
            HEAD_DIM=head_dim,
            HALF_P2=triton.next_power_of_2(head_dim // 2),
            ROTATE=rotary is not None,
            num_warps=2,
            **FUSED,
        )


class Hardware(NamedTuple):
    """What decides about tiles: multiprocessors of the GPU, shared memory that one program may use (bytes), and threads
    of a warp (64 on AMD)."""

    num_processors: int
    shared_memory: int
    warp_size: int = 32

    @classmethod
    @cache
    def of(cls, device: torch.device) -> Hardware:
        """The numbers of a device; on a CPU, where kernels are interpreted, those of an H100."""
        if device.type == "cpu":
            return cls(132, 227 * 1024)
        properties = torch.cuda.get_device_properties(device)
        shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
        return cls(properties.multi_processor_count, shared, properties.warp_size)


def choose_splits(num_seqs: int, num_kv_heads: int, hardware: Hardware) -> int:
    """Parts of each decode's context: enough programs for many rounds on every multiprocessor, so that the last round,
    which is never full, weighs little. It depends on nothing that changes while a CUDA graph is replayed."""
    wanted = -(-16 * hardware.num_processors // (num_seqs * num_kv_heads))
    return min(triton.next_power_of_2(wanted), MAX_SPLITS)


class Tiles(NamedTuple):
    """How a kernel is cut: rows of queries and number of keys in a tile, warps of a program, stages of its pipeline."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def shared_memory(self, channels: int, itemsize: int) -> int:
        """Bytes that the compiler will need, at most. A tile of keys and values is loaded two stages after the entry of
        the block table that says where it lies; Hopper's matrix instructions read one more while it is replaced."""
        num_buffers = self.num_stages // 2 + (self.rows >= 64)
        return (self.rows + num_buffers * 2 * self.keys) * channels * itemsize + 3072


def choose_tiles(max_rows: int, head_dim: int, dtype: torch.dtype, hardware: Hardware) -> Tiles:
    """Tiles for programs of which none has more than `max_rows` rows of queries to serve.

    Few rows wait for memory: the 16 rows that a matrix instruction takes at least, and many keys in flight. Many rows
    compute: four warps for 64 rows, as Hopper's matrix instruction wants them. All of these fit into the registers of
    sm_80, sm_90 and gfx942, which `nanovllm kernels` shows.
    """
    channels = triton.next_power_of_2(head_dim)
    if dtype == torch.float32:  # there is no exact matrix instruction: everything goes through registers
        return Tiles(16, 64 if channels <= 64 else 16, 4, 3)
    rows = 16 if max_rows <= 16 else 64 if max_rows <= 64 or channels > 128 else 128
    if hardware.warp_size == 64:
        return Tiles(rows, max(32, 4096 // channels), 4, 2)
    keys = max(32, (4096 if rows == 64 else 8192) // channels)
    tiles = Tiles(rows, keys, 8 if rows == 128 or (rows == 64 and channels > 128) else 4, 5)
    while tiles.shared_memory(channels, dtype.itemsize) > hardware.shared_memory and tiles.num_stages > 1:
        tiles = tiles._replace(num_stages=tiles.num_stages - 2)
    return tiles


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    hardware: Hardware | None = None,
) -> Tensor:
    """Attention over keys and values that are in the cache already; see `AttentionBackend.forward`.

    Nothing here looks at a length on the device: launches depend on the numbers of tokens and sequences, and on whether
    any sequence has more than one new token.
    """
    hardware = hardware or Hardware.of(q.device)
    num_seqs, num_kv_heads, block_size, head_dim = len(metadata.seq_lens), *kv_cache.shape[2:]
    num_tokens, num_heads = q.shape[:2]
    group = num_heads // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    scales = (scale * LOG2_E, 0.0)
    if soft_cap:  # soft_cap * tanh(x), where tanh(x) = 1 - 2 / (2^(2 x log2(e)) + 1)
        scales = (soft_cap * LOG2_E, 2 * LOG2_E * scale / soft_cap)
    constants = {
        "GROUP": group,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "HEAD_P2": triton.next_power_of_2(head_dim),
        "WINDOWED": sliding_window > 0,
        "CAPPED": soft_cap > 0,
        # float32 is asked for where results are compared: no tensor cores, which would round to 10 bits.
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
    lengths = (metadata.seq_lens, metadata.query_start_loc)
    strides = (q.stride(0), metadata.block_tables.stride(0), kv_cache.stride(0))
    # In a mixed batch, too, a decode over a long context must not be one program's work.
    split_decodes = metadata.max_query_len == 1 or (num_seqs > 1 and metadata.max_seq_len > SHORT_CONTEXT)
    if split_decodes:
        tiles = choose_tiles(group, head_dim, q.dtype, hardware)
        splits = choose_splits(num_seqs, num_kv_heads, hardware)
        partial = log_weight = out  # not used by a single part
        if splits > 1:
            partial = q.new_empty((num_seqs, splits, num_heads, head_dim), dtype=torch.float32)
            log_weight = q.new_empty((num_seqs, splits, num_heads), dtype=torch.float32)
        decode_attention_kernel[(num_seqs, num_kv_heads, splits)](
            q,
            kv_cache,
            out,
            partial,
            log_weight,
            metadata.block_tables,
            *lengths,
            *scales,
            sliding_window,
            *strides,
            **constants,
            TILE_ROWS=max(tiles.rows, triton.next_power_of_2(group)),
            TILE_KEYS=tiles.keys,
            NUM_SPLITS=splits,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **FUSED,
        )
        if splits > 1:
            combine_kernel[(num_seqs, num_heads)](
                partial,
                log_weight,
                out,
                *lengths,
                sliding_window,
                NUM_HEADS=num_heads,
                HEAD_DIM=head_dim,
                HEAD_P2=constants["HEAD_P2"],
                TILE_KEYS=tiles.keys,
                NUM_SPLITS=splits,
                WINDOWED=sliding_window > 0,
                num_warps=4,
                **FUSED,
            )
    if metadata.max_query_len > 1:
        tiles = choose_tiles(metadata.max_query_len * group, head_dim, q.dtype, hardware)
        rows = max(tiles.rows, triton.next_power_of_2(group))
        tile_tokens = rows // group
        mixed_attention_kernel[(num_tokens // tile_tokens + num_seqs, num_kv_heads)](
            q,
            kv_cache,
            out,
            metadata.block_tables,
            *lengths,
            num_seqs,
            *scales,
            sliding_window,
            *strides,
            **constants,
            TILE_ROWS=rows,
            TILE_TOKENS=tile_tokens,
            TILE_KEYS=tiles.keys,
            SKIP_DECODES=split_decodes,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **FUSED,
        )
    return out


class TritonBackend:
    """Reads the pages where they lie, on the GPU; see `AttentionBackend` for shapes.

    Args:
        hardware: the GPU that tiles are chosen for, if it is not the one at hand.
    """

    name = "triton"
    fuses_rotary = True
    supports_graphs = True

    def __init__(self, hardware: Hardware | None = None) -> None:
        self.hardware = hardware

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
        rotary: Rotary | None = None,
    ) -> Tensor:
        """See `AttentionBackend.forward`; with `rotary`, q and k are rotated while k is written."""
        write_kv_cache(q, k, v, kv_cache, metadata.slot_mapping, rotary)
        return paged_attention(q, kv_cache, metadata, scale, sliding_window, soft_cap, self.hardware)
