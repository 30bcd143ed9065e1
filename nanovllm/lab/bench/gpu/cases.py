"""Random attention problems with their answers in float64, for the GPU and for Triton's interpreter alike.

A case is as nasty as the engine may ever be: pages lie anywhere, what nobody has written is NaN, table entries
past a sequence's end name a block full of NaN, and padding rows follow the last sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.attention.base import AttentionMetadata, Rotary, kv_cache_shape

#: Largest relative error of a row, ‖out - expected‖ / ‖expected‖. A 16-bit kernel rounds its weights and its output.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
# Scores that the oracle holds at once.
_SCORES = 2**26


@dataclass
class AttentionCase:
    """The arguments of `AttentionBackend.forward`, and what it should return.

    Attributes:
        q: `[num_tokens + padding_rows, num_heads, head_dim]`.
        k, v: `[num_tokens + padding_rows, num_kv_heads, head_dim]`, of the new tokens.
        kv_cache: the tokens before them are in it, everything else is NaN.
        rotary: what q and k still need, or None.
        expected: `[num_tokens, num_heads, head_dim]` float64; padding rows may become anything.
        expected_keys: `[num_tokens, num_kv_heads, head_dim]`, what the cache has to hold for k.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    kv_cache: Tensor
    metadata: AttentionMetadata
    scale: float
    sliding_window: int
    soft_cap: float
    rotary: Rotary | None
    expected: Tensor
    expected_keys: Tensor

    @property
    def tolerance(self) -> float:
        """The error that rounding explains; a query and a key that are rotated are rounded once more, before the
        scores."""
        return TOLERANCES[self.q.dtype] * (1 if self.rotary is None else 5)

    def error(self, out: Tensor) -> float:
        """The largest relative error of a row (one token, one head); NaN if anything is."""
        return relative_error(out[: len(self.expected)], self.expected)

    def cache_error(self) -> float:
        """The same of the keys and values that `forward` was to write; infinite if it wrote anything else."""
        num_tokens = len(self.expected)
        blocks, offsets = _places(self.metadata.slot_mapping[:num_tokens], self.kv_cache.shape[3])
        pairs = ((0, self.expected_keys), (1, self.v[:num_tokens]))
        errors = [relative_error(self.kv_cache[blocks, i, :, offsets], rows.double()) for i, rows in pairs]
        # NaN is passed on by max() only where it comes first.
        error = float(torch.tensor(errors).max())
        tokens = int(self.metadata.seq_lens.sum())
        row_size = self.kv_cache.shape[2] * self.kv_cache.shape[4]
        written = sum(int(torch.count_nonzero(part == part)) for part in self.kv_cache.split(4096))
        return error if written == tokens * 2 * row_size else float("inf")


def relative_error(out: Tensor, expected: Tensor) -> float:
    """The largest ‖out - expected‖ / ‖expected‖ over the last axis, in float64; NaN if anything is NaN."""
    if not expected.numel():
        return 0.0
    expected = expected.double()
    return float(((out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def attention_case(
    seed: int,
    sequences: Sequence[tuple[int, int]],
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    padding_rows: int = 0,
    rotary: bool = False,
    num_blocks: int | None = None,
) -> AttentionCase:
    """Draw a case.

    Args:
        sequences: `(query_len, context_len)` of each: new tokens, and tokens that are in the cache already.
        padding_rows: rows after the last sequence's, of slot -1.
        rotary: q and k come unrotated.
        num_blocks: size of the cache; by default what is needed and a few. The highest block is always used.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    query_lens = torch.tensor([query for query, _ in sequences])
    seq_lens = torch.tensor([query + context for query, context in sequences])
    needed = [-(-length // block_size) for length in seq_lens.tolist()]
    num_blocks = num_blocks or sum(needed) + 3
    shape = kv_cache_shape(num_blocks, num_kv_heads, block_size, head_dim)
    kv_cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
    free = [num_blocks - 1, *torch.randperm(num_blocks - 1, generator=generator, device=device).tolist()]
    tables = torch.full((len(sequences), max(needed, default=0) + 1), free[-1], dtype=torch.int32)

    num_tokens = int(query_lens.sum())
    # Scores with a deviation of 3: some weights are large, so that the running maximum moves.
    q = 3 * draw(num_tokens + padding_rows, num_heads, head_dim)
    k, v = (draw(num_tokens + padding_rows, num_kv_heads, head_dim) for _ in range(2))
    positions = torch.zeros(len(q), dtype=torch.int64)
    slots = torch.full((len(q),), -1, dtype=torch.int64)
    cos_sin = cos_sin_table(int(seq_lens.max()), head_dim).to(device) if rotary else None

    expected, expected_keys, start = [], [], 0
    for index, (query_len, context_len) in enumerate(sequences):
        end = start + query_len
        blocks = torch.tensor(free[: needed[index]], dtype=torch.int32)
        del free[: needed[index]]
        tables[index, : len(blocks)] = blocks
        position = torch.arange(context_len + query_len)
        slot = blocks[position // block_size].long() * block_size + position % block_size
        positions[start:end], slots[start:end] = position[context_len:], slot[context_len:]
        context = [draw(context_len, num_kv_heads, head_dim) for _ in range(2)]
        place = _places(slot[:context_len].to(device), block_size)
        for i in range(2):
            kv_cache[place[0], i, :, place[1]] = context[i]
        rows = [q[start:end], k[start:end]]
        if cos_sin is not None:
            rows = [rotated(row, cos_sin[context_len : context_len + query_len]) for row in rows]
        keys, values = torch.cat([context[0], rows[1]]), torch.cat([context[1], v[start:end]])
        expected.append(oracle(rows[0], keys, values, head_dim**-0.5, sliding_window, soft_cap))
        expected_keys.append(rows[1])
        start = end

    lengths = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)])
    metadata = AttentionMetadata(
        lengths.int().to(device),
        seq_lens.int().to(device),
        tables.to(device),
        slots.to(device),
        int(query_lens.max()),
        int(seq_lens.max()),
    )
    return AttentionCase(
        q,
        k,
        v,
        kv_cache,
        metadata,
        head_dim**-0.5,
        sliding_window,
        soft_cap,
        None if cos_sin is None else Rotary(positions.to(device), cos_sin),
        torch.cat(expected),
        torch.cat(expected_keys),
    )


def oracle(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, sliding_window: int = 0, soft_cap: float = 0.0
) -> Tensor:
    """Causal attention of the last tokens of one sequence over all of it, in float64.

    Args:
        q: `[query_len, num_heads, head_dim]`.
        keys, values: `[seq_len, num_kv_heads, head_dim]`.

    Returns: `[query_len, num_heads, head_dim]` float64.
    """
    query_len, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    grouped = q.double().view(query_len, num_kv_heads, group, head_dim)
    keys, values = keys.double(), values.double()
    out = torch.empty_like(grouped)
    chunk = max(1, _SCORES // (num_heads * max(seq_len, 1)))
    key_position = torch.arange(seq_len, device=q.device)
    for start in range(0, query_len, chunk):
        rows = slice(start, min(start + chunk, query_len))
        scores = torch.einsum("qhgd,khd->hgqk", grouped[rows], keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = key_position[seq_len - query_len :][rows, None] - key_position
        hidden = distance < 0
        if sliding_window:
            hidden |= distance >= sliding_window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hgqk,khd->qhgd", weights, values)
    return out.view(query_len, num_heads, head_dim)


def _places(slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Blocks, and offsets in them."""
    return slots // block_size, slots % block_size


def cos_sin_table(num_positions: int, head_dim: int) -> Tensor:
    """`[num_positions, head_dim]` float32, the cosines in the first half and the sines in the second."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(num_positions)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def rotated(rows: Tensor, cos_sin: Tensor) -> Tensor:
    """Rows `[tokens, heads, head_dim]` turned by their angles, in float64, and rounded to their dtype; cosines and
    sines are rounded to it before, as models do."""
    cos, sin = cos_sin.to(rows.dtype).double()[:, None].chunk(2, dim=-1)
    first, second = rows.double().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(rows.dtype)
