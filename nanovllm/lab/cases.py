"""Random attention problems with their answers in float64, for the GPU, the CPU and Triton's
interpreter alike.

Pages are in random order, every slot that holds no token is NaN, block-table entries past a
sequence's end name a block full of NaN, and padding rows follow the last sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.base import AttentionMetadata, Rotary, kv_cache_shape

#: Largest relative error of a row, ‖out - expected‖ / ‖expected‖. A 16-bit kernel rounds its
# weights and its output.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
# Scores that the oracle holds at once.
_SCORES = 2**26


class Problem:
    """Sequences on pages of a cache, and a source of random numbers.

    Args:
        sequences: `(query_len, context_len)` of each: new tokens, and tokens that are in the cache
            already.
        padding_rows: rows after the last sequence's, of slot -1.
        num_blocks: size of the cache; by default what is needed and a few. The highest block is
            always used.

    Attributes:
        slots: of each sequence, the slots of all its tokens.
        positions: `[num_tokens + padding_rows]`.
    """

    def __init__(
        self,
        seed: int,
        sequences: Sequence[tuple[int, int]],
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        padding_rows: int = 0,
        num_blocks: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.block_size = block_size
        self._generator = torch.Generator(self.device).manual_seed(seed)
        query_lens, seq_lens = (
            torch.tensor(lens) for lens in zip(*((q, q + c) for q, c in sequences), strict=True)
        )
        needed = [-(-length // block_size) for length in seq_lens.tolist()]
        self.num_blocks = num_blocks or sum(needed) + 3
        self.num_tokens = int(query_lens.sum())
        self.num_rows = self.num_tokens + padding_rows
        order = torch.randperm(
            self.num_blocks - 1, generator=self._generator, device=self.device
        ).tolist()
        free = [self.num_blocks - 1, *order]
        tables = torch.full((len(sequences), max(needed) + 1), free[-1], dtype=torch.int32)
        self.positions = torch.zeros(self.num_rows, dtype=torch.int64)
        mapping = torch.full((self.num_rows,), -1)
        self.slots = list[Tensor]()
        start = 0
        for index, (query_len, context_len) in enumerate(sequences):
            blocks = torch.tensor(free[: needed[index]], dtype=torch.int32)
            del free[: needed[index]]
            tables[index, : len(blocks)] = blocks
            position = torch.arange(context_len + query_len)
            slots = blocks[position // block_size].long() * block_size + position % block_size
            end = start + query_len
            self.positions[start:end], mapping[start:end] = (
                position[context_len:],
                slots[context_len:],
            )
            self.slots.append(slots.to(self.device))
            start = end
        self.metadata = AttentionMetadata(
            query_start_loc=torch.tensor(
                [0, *query_lens.cumsum(0).tolist()], dtype=torch.int32, device=self.device
            ),
            seq_lens=seq_lens.int().to(self.device),
            block_tables=tables.to(self.device),
            slot_mapping=mapping.to(self.device),
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
        )

    def draw(self, *shape: int) -> Tensor:
        """Normal random numbers."""
        return torch.randn(shape, generator=self._generator, device=self.device).to(self.dtype)

    def cache(self, *shape: int) -> Tensor:
        """A cache without any token."""
        return torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)


@dataclass
class AttentionCase:
    """The arguments of `AttentionBackend.forward`, and what it should return.

    Attributes:
        q: `[num_tokens + padding_rows, num_heads, head_dim]`.
        k, v: `[num_tokens + padding_rows, num_kv_heads, head_dim]`, of the new tokens.
        kv_cache: the tokens before them are in it, everything else is NaN.
        rotary: the rotation that q and k still need, or None.
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
        """The error that rounding explains; rotated queries and keys are rounded once more, before
        the scores."""
        return TOLERANCES[self.q.dtype] * (1 if self.rotary is None else 5)

    def error(self, out: Tensor) -> float:
        """The largest relative error of a row (one token, one head); NaN if anything is."""
        return relative_error(out[: len(self.expected)], self.expected)

    def cache_error(self) -> float:
        """The same of the keys and values that `forward` was to write; infinite if it wrote
        anything else."""
        num_tokens = len(self.expected)
        block_size = self.kv_cache.shape[3]
        slots = self.metadata.slot_mapping[:num_tokens]
        written = self.kv_cache[slots // block_size, :, :, slots % block_size]
        wanted = torch.stack([self.expected_keys, self.v[:num_tokens]], dim=1)
        return error_in_cache(self.kv_cache, self.metadata, written, wanted)


def error_in_cache(
    cache: Tensor, metadata: AttentionMetadata, written: Tensor, wanted: Tensor
) -> float:
    """The largest relative error of the rows that were to be written; infinite if the cache has
    other tokens than the sequences'."""
    # All others are NaN.
    num_written = sum(int(torch.count_nonzero(part == part)) for part in cache.split(4096))
    if num_written != int(metadata.seq_lens.sum()) * wanted.shape[1:].numel():
        return float("inf")
    return relative_error(written, wanted)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """The largest ‖out - expected‖ / ‖expected‖ over the last axis, in float64; NaN if anything is
    NaN."""
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
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    rotary: bool = False,
    **options: Any,
) -> AttentionCase:
    """Draw a case.

    Args:
        rotary: q and k are not rotated yet.
        options: of `Problem`.
    """
    problem = Problem(seed, sequences, **options)
    scale = head_dim**-0.5
    kv_cache = problem.cache(
        *kv_cache_shape(problem.num_blocks, num_kv_heads, problem.block_size, head_dim)
    )
    # Scores with a deviation of 3: some weights are large, so that the running maximum moves.
    q = 3 * problem.draw(problem.num_rows, num_heads, head_dim)
    k, v = (problem.draw(problem.num_rows, num_kv_heads, head_dim) for _ in range(2))
    cos_sin = (
        cos_sin_table(problem.metadata.max_seq_len, head_dim).to(problem.device) if rotary else None
    )
    expected = []
    expected_keys = []
    start = 0
    for (query_len, context_len), slots in zip(sequences, problem.slots, strict=True):
        end = start + query_len
        context = [problem.draw(context_len, num_kv_heads, head_dim) for _ in range(2)]
        _write(kv_cache, slots[:context_len], context)
        rows = [q[start:end], k[start:end]]
        if cos_sin is not None:
            rows = [rotated(row, cos_sin[context_len : context_len + query_len]) for row in rows]
        keys = torch.cat([context[0], rows[1]])
        values = torch.cat([context[1], v[start:end]])
        expected.append(
            oracle(rows[0], keys, values, scale, sliding_window=sliding_window, soft_cap=soft_cap)
        )
        expected_keys.append(rows[1])
        start = end
    rotation = None if cos_sin is None else Rotary(problem.positions.to(problem.device), cos_sin)
    return AttentionCase(
        q=q,
        k=k,
        v=v,
        kv_cache=kv_cache,
        metadata=problem.metadata,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        rotary=rotation,
        expected=torch.cat(expected),
        expected_keys=torch.cat(expected_keys),
    )


def _write(kv_cache: Tensor, slots: Tensor, keys_and_values: Sequence[Tensor]) -> None:
    """Write `[num_tokens, num_kv_heads, head_dim]` of keys, and as many values, into slots."""
    block_size = kv_cache.shape[3]
    kv_cache[slots // block_size, :, :, slots % block_size] = torch.stack([*keys_and_values], dim=1)


def oracle(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Causal attention of the last tokens of one sequence over all of it, in float64.

    Args:
        q: `[query_len, num_heads, head_dim]`.
        keys, values: `[seq_len, num_kv_heads, head_dim]`.

    Returns: `[query_len, num_heads, head_dim]` float64.
    """
    query_len, num_heads, head_dim = q.shape
    seq_len, num_kv_heads, _ = keys.shape
    grouped = q.double().view(query_len, num_kv_heads, num_heads // num_kv_heads, head_dim)
    keys = keys.double()
    values = values.double()
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


def cos_sin_table(num_positions: int, head_dim: int) -> Tensor:
    """`[num_positions, head_dim]` float32, the cosines in the first half and the sines in the
    second."""
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(num_positions)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def rotated(rows: Tensor, cos_sin: Tensor) -> Tensor:
    """Rows `[tokens, heads, head_dim]` turned by their angles, in float64, and rounded to their
    dtype; cosines and sines are rounded to it before, as in the models."""
    cos, sin = cos_sin.to(rows.dtype).double()[:, None].chunk(2, dim=-1)
    first, second = rows.double().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(
        rows.dtype
    )


# ---------------------------------------------------------------- latent attention


@dataclass
class LatentCase:
    """The arguments of `TorchLatentBackend.forward`, and what it should return.

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
        """Twice ordinary attention's: absorbed queries are rounded, and so are averages of
        latents."""
        return 2 * TOLERANCES[self.q.dtype]

    def errors(self, backend: Any) -> tuple[float, float]:
        """The largest relative error of a row (one token, one head), and of a row of the cache; NaN
        if anything is, and infinite if the backend wrote where it should not."""
        cache = self.kv_cache.clone()
        tokens = len(self.expected)
        out = backend.forward(
            self.q, self.latent, self.up, cache, metadata=self.metadata, scale=self.scale
        )
        written = cache.flatten(0, 1)[self.metadata.slot_mapping[:tokens]]
        in_cache = error_in_cache(cache, self.metadata, written, self.latent[:tokens])
        return relative_error(out[:tokens], self.expected), in_cache


def latent_case(
    seed: int,
    sequences: Sequence[tuple[int, int]],
    num_heads: int = 4,
    rank: int = 32,
    rope: int = 8,
    nope: int = 16,
    v: int = 12,
    **options: Any,
) -> LatentCase:
    """Draw a case; the options are those of `Problem`."""
    problem = Problem(seed, sequences, **options)
    kv_cache = problem.cache(problem.num_blocks, problem.block_size, rank + rope)
    # Keys and values of about 1, and scores with a deviation of about 3.
    up = problem.draw(num_heads, nope + v, rank) / rank**0.5
    q = 3 * problem.draw(problem.num_rows, num_heads, nope + rope)
    latent = problem.draw(problem.num_rows, rank + rope)
    scale = (nope + rope) ** -0.5
    expected = []
    start = 0
    for (query_len, context_len), slots in zip(sequences, problem.slots, strict=True):
        end = start + query_len
        context = problem.draw(context_len, rank + rope)
        kv_cache.view(-1, rank + rope)[slots[:context_len]] = context
        rows = torch.cat([context, latent[start:end]]).double()
        keys, values = torch.einsum("tr,hxr->thx", rows[:, :rank], up.double()).split(
            [nope, v], dim=2
        )
        keys = torch.cat([keys, rows[:, None, rank:].expand(-1, num_heads, -1)], dim=2)
        # The oracle takes queries, keys and values of one width; zeros change nothing.
        width = max(nope + rope, v)
        queries, keys, values = (
            F.pad(x, (0, width - x.shape[2])) for x in (q[start:end], keys, values)
        )
        expected.append(oracle(queries, keys, values, scale)[:, :, :v])
        start = end
    return LatentCase(
        q=q,
        latent=latent,
        up=up,
        kv_cache=kv_cache,
        metadata=problem.metadata,
        scale=scale,
        expected=torch.cat(expected),
    )
