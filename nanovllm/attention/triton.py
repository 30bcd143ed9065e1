"""Paged attention on a GPU, in Triton: chooses kernels and tiles for a batch, and launches them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from nanovllm.attention.base import AttentionBackend, AttentionMetadata, Rotary
from nanovllm.attention.triton_kernels import (
    combine_kernel,
    decode_attention_kernel,
    mixed_attention_kernel,
    write_kv_kernel,
)

# The hardware has an instruction for 2^x and none for e^x, so scores are kept in units of log 2.
LOG2_E = 1.4426950408889634
# A mixed batch whose longest context is at most this gives its decodes no launch of their own: it
# would not pay.
SHORT_CONTEXT = 256
# Maximum number of parts of a decode's context; combining parts costs little compared with reading
# a long context.
MAX_SPLITS = 64
# GPUs with at least this much shared memory (bytes) have matrix instructions that read operands
# from there.
HOPPER_SHARED_MEMORY = 200 * 1024
# A product and a sum in one instruction, which rounds once. Newer versions of Triton need this
# option.
FUSED = {"enable_fp_fusion": True}


def write_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    rotary: Rotary | None = None,
) -> None:
    """Put keys and values into their slots; with `rotary`, rotate keys on the way and queries in
    place.

    Args:
        q, k, v: as in `AttentionBackend.forward`; tokens may have any stride (views of one
            projection), heads must be contiguous.
    """
    num_kv_heads, head_dim = k.shape[1:]
    # Without rotation these two are not read, but a kernel needs valid pointers.
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
            GROUP=q.shape[1] // num_kv_heads,
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_SIZE=kv_cache.shape[3],
            HEAD_DIM=head_dim,
            PARTS=kv_cache.shape[1],
            ROTATE=rotary is not None,
            num_warps=2,
            enable_fp_fusion=False,
        )


class Hardware(NamedTuple):
    """The numbers that tiles depend on: multiprocessors of the GPU, shared memory that one program
    may use (bytes), threads per warp (64 on AMD), and the first number of the compute capability (9
    on Hopper)."""

    num_processors: int
    shared_memory: int
    warp_size: int = 32
    generation: int = 9

    @classmethod
    @cache
    def of(cls, device: torch.device) -> Hardware:
        """The numbers of a device; on a CPU, the interpreter runs one program after another."""
        if device.type == "cpu":
            return cls(1, 227 * 1024)
        properties = torch.cuda.get_device_properties(device)
        shared: int = properties.shared_memory_per_block
        if torch.version.hip is None:  # NVIDIA's GPUs have more for a program that asks for it
            shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        return cls(properties.multi_processor_count, shared, properties.warp_size, properties.major)


def choose_splits(num_seqs: int, num_kv_heads: int, hardware: Hardware) -> int:
    """Number of parts of each decode's context: about 16 programs per multiprocessor, so that the
    last round, which is not full, matters little; at most MAX_SPLITS. Depends on nothing that
    changes while a CUDA graph is replayed."""
    wanted = -(-16 * hardware.num_processors // (num_seqs * num_kv_heads))
    splits: int = triton.next_power_of_2(wanted)
    return min(splits, MAX_SPLITS)


class Tiles(NamedTuple):
    """Sizes of a kernel's launch: rows of queries and keys per tile, warps per program, stages of
    its pipeline."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def shared_memory(self, channels: int, itemsize: int, num_loaded: int = 2) -> int:
        """Upper bound on the compiler's shared memory in bytes. A tile of keys and values
        (`num_loaded` is 2) is loaded two stages after its entry of the block table; Hopper's matrix
        instructions read one more tile while it is replaced."""
        num_buffers = self.num_stages // 2 + (self.rows >= 64)
        return (self.rows + num_buffers * num_loaded * self.keys) * channels * itemsize + 3072

    def fitting(
        self, channels: int, itemsize: int, hardware: Hardware, num_loaded: int = 2
    ) -> Tiles:
        """These tiles, with fewer stages if shared memory does not suffice."""
        if (
            self.num_stages <= 2
            or self.shared_memory(channels, itemsize, num_loaded) <= hardware.shared_memory
        ):
            return self
        return self._replace(num_stages=self.num_stages - 2).fitting(
            channels, itemsize, hardware, num_loaded
        )


def choose_tiles(
    max_rows: int, head_dim: int, dtype: torch.dtype, hardware: Hardware, num_kv_heads: int = 1
) -> Tiles:
    """Choose tiles for at most `max_rows` rows of queries of each KV head.

    A program with few rows waits for memory: it gets 16 rows, the minimum of a matrix instruction,
    and many keys in flight. One with many rows is bound by compute: it gets four warps per 64 rows,
    as Hopper's matrix instruction needs. All choices but one fit into the registers of sm_80, sm_90
    and gfx942; `nanovllm kernels` shows it."""
    channels = triton.next_power_of_2(head_dim)
    amd = hardware.warp_size == 64
    if dtype == torch.float32:
        # There is no exact matrix instruction: everything goes through registers.
        if channels <= 64:
            return Tiles(16, 64, 4, 3)
        return Tiles(16, 16, 4, 3) if amd else Tiles(16, 32, 8, 3)
    if max_rows <= 16:
        rows = 16
    elif max_rows <= 64 or channels > 128:
        rows = 64
    else:
        rows = 128
    if amd:
        return Tiles(rows, max(32, 4096 // channels), 4, 2)
    if (
        hardware.generation == 9
        and head_dim in (64, 128)
        and max_rows * num_kv_heads > 1024 * hardware.num_processors
    ):
        # Many programs: two of 8 warps on a multiprocessor at a time, or one of 16. While some
        # weigh scores, others multiply.
        return Tiles(256, 64, 16, 7) if head_dim == 128 else Tiles(128, 64, 8, 7)
    keys = 128 if rows == 128 else max(32, 8192 // channels)
    if rows > 16 and hardware.shared_memory < HOPPER_SHARED_MEMORY:
        # Before Hopper, operands of products go through registers: the more rows a warp has, the
        # fewer keys.
        keys = max(32, (4096 if rows == 128 else 2048) // channels)
    num_warps = 8 if rows == 128 or (rows == 64 and channels > 128) else 4
    return Tiles(rows, keys, num_warps, 5).fitting(channels, dtype.itemsize, hardware)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    hardware: Hardware | None = None,
    widen: JITFunction[Callable[..., object]] | None = None,
) -> Tensor:
    """Attention over keys and values that are in the cache already; see `AttentionBackend.forward`.
    `widen` makes keys and values of a quantized cache (attention/triton_quantized.py).

    Reads no length from the device: launches depend on the numbers of tokens and sequences, and on
    `max_query_len` and `max_seq_len` of the metadata, which are known on the host."""
    hardware = hardware or Hardware.of(q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_heads, head_dim = q.shape[1:]
    num_seqs = len(metadata.seq_lens)
    num_kv_heads = kv_cache.shape[2]
    group = num_heads // num_kv_heads
    arguments: dict[str, object] = {
        **_tensor_arguments(q, kv_cache, metadata),
        # soft_cap * tanh(x), where tanh(x) = 1 - 2 / (2^(2 x log2(e)) + 1)
        "score_scale": (soft_cap or scale) * LOG2_E,
        "cap_scale": 2 * LOG2_E * scale / soft_cap if soft_cap else 0.0,
        "window": sliding_window,
        "WINDOWED": sliding_window > 0,
        "CAPPED": soft_cap > 0,
        "WIDEN": widen,
    }
    # In a mixed batch, too, several programs share a decode over a long context.
    split_decodes = metadata.max_query_len == 1 or (
        num_seqs > 1 and metadata.max_seq_len > SHORT_CONTEXT
    )
    if split_decodes:
        tiles = choose_tiles(group, head_dim, q.dtype, hardware)
        tiles = tiles._replace(rows=max(tiles.rows, triton.next_power_of_2(group)))
        splits = choose_splits(num_seqs, num_kv_heads, hardware)
        attend_decodes(
            decode_attention_kernel,
            arguments,
            out,
            num_seqs=num_seqs,
            num_groups=num_kv_heads,
            tiles=tiles,
            splits=splits,
        )
    if metadata.max_query_len > 1:
        rows = metadata.max_query_len * group
        heads = 0 if widen else num_kv_heads
        tiles = choose_tiles(rows, head_dim, q.dtype, hardware, heads)
        _attend_mixed(
            arguments,
            out,
            num_seqs=num_seqs,
            num_kv_heads=num_kv_heads,
            tiles=tiles,
            skip_decodes=split_decodes,
        )
    return out


def _tensor_arguments(
    q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
) -> dict[str, Tensor | int]:
    """Arguments of all kernels that attend: the tensors, their sizes and strides."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_cache.shape[2]
    return {
        "q_ptr": q,
        "cache_ptr": kv_cache,
        "table_ptr": metadata.block_tables,
        "seq_len_ptr": metadata.seq_lens,
        "query_start_ptr": metadata.query_start_loc,
        "q_stride": q.stride(0),
        "table_stride": metadata.block_tables.stride(0),
        "block_stride": kv_cache.stride(0),
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // num_kv_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": kv_cache.shape[3],
        "HEAD_STRIDE": kv_cache.stride(2),
        "HEAD_DIM": head_dim,
    }


def _attend_mixed(
    arguments: dict[str, object],
    out: Tensor,
    *,
    num_seqs: int,
    num_kv_heads: int,
    tiles: Tiles,
    skip_decodes: bool,
) -> None:
    """Attend for a mixed batch, or for its sequences with several new tokens."""
    num_tokens, num_heads, _ = out.shape
    group = num_heads // num_kv_heads
    rows = max(tiles.rows, triton.next_power_of_2(group))
    tile_tokens = rows // group
    # A quantized tile needs registers in which it is widened.
    keys = min(tiles.keys, 128 if arguments["WIDEN"] is None else 64)
    mixed_attention_kernel[(num_tokens // tile_tokens + num_seqs, num_kv_heads)](
        **arguments,
        out_ptr=out,
        num_seqs=num_seqs,
        TILE_ROWS=rows,
        TILE_TOKENS=tile_tokens,
        TILE_KEYS=keys,
        SKIP_DECODES=skip_decodes,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **FUSED,
    )


def attend_decodes(
    kernel: JITFunction[Callable[..., object]],
    arguments: dict[str, object],
    out: Tensor,
    *,
    num_seqs: int,
    num_groups: int,
    tiles: Tiles,
    splits: int,
) -> None:
    """Attend for the sequences with one new token.

    Args:
        kernel: computes parts of contexts.
        arguments: of the kernel.
        num_groups: groups of query heads, each of which is served by programs of its own.
        splits: parts of each context.
    """
    (_, num_heads, head_dim) = out.shape
    partial = log_weight = out  # of a single part
    if splits > 1:
        partial = out.new_empty((num_seqs, splits, num_heads, head_dim), dtype=torch.float32)
        log_weight = out.new_empty((num_seqs, splits, num_heads), dtype=torch.float32)
    kernel[(num_seqs, num_groups, splits)](
        **arguments,
        partial_ptr=partial,
        log_weight_ptr=log_weight,
        TILE_ROWS=tiles.rows,
        TILE_KEYS=tiles.keys,
        NUM_SPLITS=splits,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **FUSED,
    )
    if splits > 1:
        names = ("seq_len_ptr", "query_start_ptr", "window", "NUM_HEADS", "HEAD_DIM", "WINDOWED")
        shared = {name: arguments[name] for name in names if name in arguments}
        num_warps = max(4, splits * triton.next_power_of_2(head_dim) // 2048)
        combine_kernel[(num_seqs, num_heads)](
            partial,
            log_weight,
            out,
            **shared,
            TILE_KEYS=tiles.keys,
            NUM_SPLITS=splits,
            num_warps=num_warps,
            **FUSED,
        )


class TritonBackend(AttentionBackend):
    """Reads the pages in place, on the GPU; see `AttentionBackend` for shapes.

    Args:
        hardware: the GPU that tiles are chosen for; by default, that of the tensors.
    """

    name = "triton"
    fuses_rotary = True
    supports_graphs = True
    compiles_kernels = True

    def __init__(self, hardware: Hardware | None = None) -> None:
        self.hardware = hardware

    def step_kinds(
        self, num_heads: int, kv_cache: Tensor, max_num_seqs: int, max_num_tokens: int
    ) -> list[tuple[int, int, int]]:
        """Steps that together make Triton compile every kernel that a step of this size can need:
        one for each number of parts and each choice of tiles, with and without decodes in the mixed
        kernel.

        Args:
            kv_cache: of any layer.

        Returns:
            Number of sequences, `max_query_len` and `max_seq_len` of each kind; its lengths on the
            device do not matter.
        """
        hardware = self.hardware or Hardware.of(kv_cache.device)
        num_kv_heads, _, dim = kv_cache.shape[2:]
        group = num_heads // num_kv_heads
        dtype = kv_cache.dtype
        # The fewest sequences with each number of parts, and the shortest query with each choice of
        # tiles.
        splits = {choose_splits(n, num_kv_heads, hardware): n for n in range(max_num_seqs, 0, -1)}
        tiles = {
            choose_tiles(n * group, dim, dtype, hardware, num_kv_heads): n
            for n in range(max_num_tokens, 1, -1)
        }
        batches = [(1, 1), (2, SHORT_CONTEXT + 1)][:max_num_seqs]
        mixed = [(num_seqs, n, seq_len) for n in tiles.values() for num_seqs, seq_len in batches]
        return [(n, 1, 1) for n in splits.values()] + mixed

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
        write_kv_cache(q, k, v, kv_cache, metadata.slot_mapping, rotary=rotary)
        return paged_attention(
            q,
            kv_cache,
            metadata,
            scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            hardware=self.hardware,
        )
