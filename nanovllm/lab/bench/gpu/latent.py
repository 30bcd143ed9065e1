"""Latent attention: random problems with their answers in float64, and how close decoding comes to copying."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.latent import LatentBackend, latent_cache_shape
from nanovllm.lab.bench.gpu.cases import TOLERANCES, oracle, relative_error
from nanovllm.lab.bench.gpu.setting import Row, Setting, Skip
from nanovllm.lab.bench.gpu.timing import median_seconds
from nanovllm.ops.support import why_no_triton

# Of DeepSeek-V2-Lite; V3 has the same, and 128 heads, which eight ranks share.
RANK, ROPE, BLOCK_SIZE = 512, 64, 16
HEADS, BATCHES, CONTEXTS = (16, 128), (1, 8, 64, 256), (1024, 8192, 32768)
# Of a GPU's free memory; the rest is for queries, partial results and the cache that is flushed.
_MEMORY_SHARE = 0.8


@dataclass
class LatentCase:
    """The arguments of `LatentBackend.forward`, and what it should return; pages lie anywhere, what nobody has written is
    NaN, and padding rows follow the last sequence.

    Attributes:
        expected: `[num_tokens, num_heads, v]` float64, from keys and values of every head.
    """

    q: Tensor
    latent: Tensor
    up: Tensor
    kv_cache: Tensor
    metadata: AttentionMetadata
    scale: float
    expected: Tensor

    @property
    def tolerance(self) -> float:
        """Twice ordinary attention's: absorbed queries are rounded, and so are averages of latents."""
        return 2 * TOLERANCES[self.q.dtype]

    def errors(self, backend: LatentBackend) -> tuple[float, float]:
        """The largest relative error of a row (one token, one head), and of a row of the cache; NaN if anything is, and
        infinite if something was written that should not be."""
        cache, tokens = self.kv_cache.clone(), len(self.expected)
        out = backend.forward(self.q, self.latent, self.up, cache, self.metadata, self.scale)
        rows = cache.flatten(0, 1)
        wrong = relative_error(rows[self.metadata.slot_mapping[:tokens]], self.latent[:tokens].double())
        written = int(torch.count_nonzero(rows == rows))
        if written != int(self.metadata.seq_lens.sum()) * rows.shape[1]:
            wrong = float("inf")
        return relative_error(out[:tokens], self.expected), wrong


def latent_case(
    seed: int,
    sequences: Sequence[tuple[int, int]],
    num_heads: int = 4,
    rank: int = 32,
    rope: int = 8,
    nope: int = 16,
    v: int = 12,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    padding_rows: int = 0,
) -> LatentCase:
    """Draw a case.

    Args:
        sequences: `(query_len, context_len)` of each: new tokens, and tokens that are in the cache already.
        padding_rows: rows after the last sequence's, of slot -1.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    query_lens = torch.tensor([query for query, _ in sequences])
    seq_lens = torch.tensor([query + context for query, context in sequences])
    needed = [-(-length // block_size) for length in seq_lens.tolist()]
    num_blocks, num_tokens = sum(needed) + 3, int(query_lens.sum())
    kv_cache = torch.full(
        latent_cache_shape(num_blocks, block_size, rank + rope), float("nan"), dtype=dtype, device=device
    )
    free = [num_blocks - 1, *torch.randperm(num_blocks - 1, generator=generator, device=device).tolist()]
    tables = torch.full((len(sequences), max(needed) + 1), free[-1], dtype=torch.int32)
    # Keys and values of about 1, and scores with a deviation of about 3.
    up = (draw(num_heads, nope + v, rank) / rank**0.5).to(dtype)
    q = (3 * draw(num_tokens + padding_rows, num_heads, nope + rope)).to(dtype)
    latent = draw(num_tokens + padding_rows, rank + rope).to(dtype)
    slots = torch.full((len(q),), -1, dtype=torch.int64)
    scale, expected, start = (nope + rope) ** -0.5, [], 0
    for index, (query_len, context_len) in enumerate(sequences):
        end = start + query_len
        tables[index, : needed[index]] = blocks = torch.tensor(free[: needed[index]], dtype=torch.int32)
        del free[: needed[index]]
        position = torch.arange(context_len + query_len)
        slot = blocks[position // block_size].long() * block_size + position % block_size
        slots[start:end] = slot[context_len:]
        context = draw(context_len, rank + rope).to(dtype)
        kv_cache.view(-1, rank + rope)[slot[:context_len].to(device)] = context
        rows = torch.cat([context, latent[start:end]]).double()
        keys, values = torch.einsum("tr,hxr->thx", rows[:, :rank], up.double()).split([nope, v], dim=2)
        keys = torch.cat([keys, rows[:, None, rank:].expand(-1, num_heads, -1)], dim=2)
        # The oracle wants queries, keys and values of one width, and does not mind zeros.
        width = max(nope + rope, v)
        queries, keys, values = (F.pad(x, (0, width - x.shape[2])) for x in (q[start:end], keys, values))
        expected.append(oracle(queries, keys, values, scale)[:, :, :v])
        start = end
    metadata = AttentionMetadata(
        torch.tensor([0, *query_lens.cumsum(0).tolist()], dtype=torch.int32, device=device),
        seq_lens.int().to(device),
        tables.to(device),
        slots.to(device),
        int(query_lens.max()),
        int(seq_lens.max()),
    )
    return LatentCase(q, latent, up, kv_cache, metadata, scale, torch.cat(expected))


def decode_bytes(num_seqs: int, context: int, num_heads: int, itemsize: int = 2) -> int:
    """What a step has to move: every row of the cache once, absorbed queries, and averages of latents."""
    return num_seqs * (context * (RANK + ROPE) + num_heads * (2 * RANK + ROPE)) * itemsize


def decode_flops(num_seqs: int, context: int, num_heads: int) -> int:
    """Two products for each head and row: as wide as the row for the score, and as the latent for the average."""
    return 2 * num_seqs * context * num_heads * (2 * RANK + ROPE)


def latent(setting: Setting) -> Iterator[Row]:
    """One new token for each sequence of a batch: the kernel alone, on queries that are absorbed already."""
    device = setting.device
    if obstacle := why_no_triton(device, ROPE, torch.bfloat16):
        raise Skip(obstacle)
    from nanovllm.attention.latent_kernels import decode_latent
    from nanovllm.attention.triton import Hardware

    batches, contexts = ((2,), (32,)) if setting.dry_run else (BATCHES, CONTEXTS)
    num_blocks = max(batches) * max(contexts) // BLOCK_SIZE
    if device.type == "cuda":
        block_bytes = BLOCK_SIZE * (RANK + ROPE) * 2
        num_blocks = min(num_blocks, int(_MEMORY_SHARE * torch.cuda.mem_get_info()[0]) // block_bytes)
    shape = latent_cache_shape(num_blocks, BLOCK_SIZE, RANK + ROPE)
    cache = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    order = torch.randperm(num_blocks, dtype=torch.int32, device=device)
    for num_heads in HEADS:
        for num_seqs in batches:
            for context in contexts:
                row: Row = {"table": "latent", "heads": num_heads, "batch": num_seqs, "context": context}
                if num_seqs * context > num_blocks * BLOCK_SIZE:
                    yield row | {"reason": "does not fit into the memory"}
                    continue
                q = torch.randn(num_seqs, num_heads, RANK + ROPE, device=device).to(torch.bfloat16)
                tables = order[: num_seqs * context // BLOCK_SIZE].view(num_seqs, -1)
                lengths = torch.full((num_seqs,), context, dtype=torch.int32, device=device)
                arguments = (q, cache, tables, lengths, RANK, (RANK + ROPE) ** -0.5, Hardware.of(device))
                seconds = median_seconds(functools.partial(decode_latent, *arguments), device)
                row["num_bytes"] = decode_bytes(num_seqs, context, num_heads)
                yield row | {"seconds": seconds, "flops": decode_flops(num_seqs, context, num_heads)}
