"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): the cache holds one short
vector per token for all heads.

Keys and values of every head are products of that vector, the latent, with matrices of the model.
Attention can compute them from the cache (naive), or it can apply the matrices to the queries and
to the output instead (absorbed). Which one is cheaper depends on the number of queries per cached
token.

Built by notebooks/26_latent_attention.ipynb: edit it there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.ops.attention import attend_dense


def latent_cache_shape(num_blocks: int, block_size: int, width: int) -> tuple[int, int, int]:
    """Shape of one layer's cache: rows of `width = kv_lora_rank + qk_rope_head_dim` numbers, one
    per token. There are no heads, and a token's row is both its key and its value."""
    return (num_blocks, block_size, width)


def write_latent(latent: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put each token's row into its slot.

    Args:
        latent: `[num_tokens, width]`, the normalised latent, then the rotated part of the key.
        kv_cache: `[num_blocks, block_size, width]`, changed in place.
        slot_mapping: `[num_tokens]` int64; -1 marks padding, which is not written.
    """
    real = slot_mapping >= 0
    kv_cache.view(-1, kv_cache.shape[2])[slot_mapping[real]] = latent[real]


def gather_latent(kv_cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """Copy one sequence's rows out of its pages: `[seq_len, width]`."""
    num_blocks = -(-seq_len // kv_cache.shape[1])
    return kv_cache[block_table[:num_blocks].long()].flatten(0, 1)[:seq_len]


def expand(rows: Tensor, up: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Compute keys and values from rows of the cache: keys `[num_heads, seq_len, nope + rope]` and
    values `[num_heads, seq_len, v]`.

    Args:
        rows: `[seq_len, rank + rope]`, a latent and the rotated part of the key, which all heads
            share.
        up: `[num_heads, nope + v, rank]`, which maps a latent to each head's key (its first `nope`
            channels) and value.
    """
    rank = up.shape[2]
    width = up.shape[1]
    heads = F.linear(rows[:, :rank], up.flatten(0, 1)).view(len(rows), -1, width).transpose(0, 1)
    k_nope, values = heads.split([nope, width - nope], dim=2)
    k_rope = rows[:, rank:].expand(len(up), -1, -1)  # the same for all heads
    return torch.cat([k_nope, k_rope], dim=2), values


def absorb(q: Tensor, up: Tensor, rope: int) -> Tensor:
    """Transform queries so that rows of the cache are their keys:
    `[num_tokens, num_heads, rank + rope]`.

    q · (W c) = (Wᵀ q) · c: the matrix is applied once to the query, instead of to every latent. It
    does not commute with the rotation, which differs from position to position; so the rotated
    channels stay unchanged.

    Args:
        q: `[num_tokens, num_heads, nope + rope]`.
        up: `[num_heads, nope + v, rank]`, of which the first `nope` rows of a head are its W.
    """
    nope = q.shape[2] - rope
    q_latent = q[:, :, :nope].transpose(0, 1) @ up[:, :nope]  # [num_heads, num_tokens, rank]
    return torch.cat([q_latent.transpose(0, 1), q[:, :, nope:]], dim=2)


def unabsorb(out: Tensor, up: Tensor, v: int) -> Tensor:
    """Transform averages of latents into averages of values: `[num_tokens, num_heads, rank]` to
    `[..., v]`.

    Σ p (W c) = W Σ p c: the matrix is applied once to the average, instead of to every latent.
    """
    return (out.transpose(0, 1) @ up[:, -v:].transpose(1, 2)).transpose(0, 1)


class LatentShape(NamedTuple):
    """Sizes of a layer's latent attention: query heads (of this rank), channels of a head without
    and with rotary positions, channels of a value, and of a latent."""

    num_heads: int
    nope: int
    rope: int
    v: int
    rank: int

    @classmethod
    def of(cls, q: Tensor, latent: Tensor, up: Tensor) -> LatentShape:
        """Read off the arguments of `TorchLatentBackend.forward`."""
        num_heads, rows, rank = up.shape
        rope = latent.shape[1] - rank
        nope = q.shape[2] - rope
        return cls(num_heads, nope, rope, rows - nope, rank)

    def prefers_naive(self, query_len: int, seq_len: int) -> bool:
        """Whether expanding all of the context takes fewer operations than two products per query
        and heads as wide as the latent. A single new token never expands: it would read all keys
        and values of all heads, which the latent avoids."""
        # Pairs of a query and a token that it sees.
        pairs = query_len * seq_len - query_len * (query_len - 1) // 2
        expanded = (seq_len - query_len) * self.rank * (self.nope + self.v)
        return query_len > 1 and expanded < pairs * (2 * self.rank - self.nope - self.v)


def attend_absorbed(q: Tensor, rows: Tensor, up: Tensor, scale: float) -> Tensor:
    """Attention of the last tokens of a sequence without expanded keys and values: all heads share
    one key, the row, and one value, its latent.

    Args:
        q: `[query_len, num_heads, nope + rope]`.
        rows: `[seq_len, rank + rope]`, the sequence's part of the cache.

    Returns:
        `[query_len, num_heads, v]`.
    """
    shape = LatentShape.of(q, rows, up)
    keys = rows.unsqueeze(0)
    return unabsorb(
        attend_dense(absorb(q, up, shape.rope), keys, keys[:, :, : shape.rank], scale), up, shape.v
    )


# Maximum numbers of expanded keys and values at a time (128 MiB in 16 bits): a long context is
# expanded by groups of heads.
EXPANDED_AT_ONCE = 2**26


# Maximum numbers in gathered rows at a time, in a batch of decodes (64 MiB in float32).
GATHERED_AT_ONCE = 2**24


def _lower_right(query_len: int, seq_len: int, device: torch.device) -> Tensor:
    """The causal mask of the last tokens of a sequence."""
    if device.type == "cuda":
        # Kernels that need no mask in memory; importing the module takes seconds.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(query_len, seq_len)
    return torch.ones(query_len, seq_len, dtype=torch.bool, device=device).tril(seq_len - query_len)


def attend_expanded(q: Tensor, rows: Tensor, up: Tensor, scale: float) -> Tensor:
    """The same result from expanded keys and values: torch's fused attention, some heads at a time,
    so that neither the scores nor the keys and values of all heads exist at once."""
    query_len, num_heads, _ = q.shape
    seq_len = len(rows)
    shape = LatentShape.of(q, rows, up)
    at_once = max(1, EXPANDED_AT_ONCE // (seq_len * (shape.nope + shape.rope + shape.v)))
    mask = None if query_len == seq_len else _lower_right(query_len, seq_len, q.device)
    parts = []
    for first in range(0, num_heads, at_once):
        heads = slice(first, first + at_once)
        keys, values = expand(rows, up[heads], shape.nope)
        part = F.scaled_dot_product_attention(
            q[:, heads].transpose(0, 1)[None],
            keys[None],
            values[None],
            mask,
            is_causal=mask is None,
            scale=scale,
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts, dim=1)


def decode_absorbed(
    q: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, rank: int, scale: float
) -> Tensor:
    """Attend with one absorbed query per sequence, for many sequences in two batched products:
    softmax(scale * q . rows) times the rows' latents, in float32 at least.

    Args:
        q: `[num_seqs, num_heads, rank + rope]`.
        kv_cache: `[num_blocks, block_size, rank + rope]`; it may hold NaN where no token was
            written.
        block_tables: `[num_seqs, max_blocks]` int32; what follows a sequence's last block need not
            be the number of a block.
        seq_lens: `[num_seqs]` int32, at least 1.

    Returns:
        `[num_seqs, num_heads, rank]` in q's dtype: each head's average of its sequence's latents.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    block_size = kv_cache.shape[1]
    longest = int(seq_lens.max())
    position = torch.arange(-(-longest // block_size) * block_size, device=q.device)
    seen = position < seq_lens.unsqueeze(1)
    # An entry past a sequence's last block may name any block, and a row past its last token may be
    # NaN.
    tables = block_tables[:, : len(position) // block_size].where(seen[:, ::block_size], 0)
    rows = (
        kv_cache.index_select(0, tables.flatten()).view(len(q), len(position), q.shape[2]).to(exact)
    )
    rows[~seen] = 0
    # [num_seqs, num_heads, positions]
    scores = torch.bmm(q.to(exact), rows.transpose(1, 2)) * scale
    weights = scores.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(dim=-1)
    return torch.bmm(weights, rows[:, :, :rank]).to(q.dtype)


def alike(lengths: list[int], most: int) -> list[list[int]]:
    """Group sequences for batched products: indices of sequences whose lengths are within a factor
    of 1.5, with at most `most` tokens per group, padding included (but at least one sequence)."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        longest = lengths[groups[-1][0]] if groups else 0
        if (
            groups
            and longest <= 1.5 * lengths[index] + 16
            and longest * (len(groups[-1]) + 1) <= most
        ):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


class TorchLatentBackend(AttentionBackend):
    """Attends prompts and chunks one sequence at a time, in whichever way takes fewer operations,
    and decodes of similar length in two batched products."""

    name = "torch"
    write = staticmethod(write_latent)
    # whether `decode` reads no length on the host, and takes short pieces of prompts, too
    decodes_pieces = False

    # A latent and its matrix take the places of keys and values; there is no window and no cap.
    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        latent: Tensor,
        up: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """Attend with all new tokens, each over its own sequence up to itself.

        Args:
            q: `[num_tokens, num_heads, nope + rope]`, the last `rope` channels rotated.
            latent: `[num_tokens, rank + rope]`, the normalised latent, and the rotated part of the
                key.
            up: `[num_heads, nope + v, rank]`: for each head, the matrix that maps a latent to its
                key and value.
            kv_cache: `[num_blocks, block_size, rank + rope]` of this layer, changed in place.
            scale: factor on q·k.

        Returns:
            `[num_tokens, num_heads, v]`, in q's dtype.
        """
        self.write(latent, kv_cache, metadata.slot_mapping)
        shape = LatentShape.of(q, latent, up)
        if self.decodes_pieces and metadata.max_query_len == 1:
            # No length is read, so that a CUDA graph can record it.
            averages = self.decode(
                absorb(q, up, shape.rope),
                kv_cache,
                block_tables=metadata.block_tables,
                seq_lens=metadata.seq_lens,
                rank=shape.rank,
                scale=scale,
                query_start_loc=metadata.query_start_loc,
            )
            return unabsorb(averages, up, shape.v)
        return self._attend_each(q, up, kv_cache, metadata, shape=shape, scale=scale)

    def _attend_each(
        self,
        q: Tensor,
        up: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        shape: LatentShape,
        scale: float,
    ) -> Tensor:
        """Attend for one sequence after another, and for all decodes together."""
        seq_lens = metadata.seq_lens.tolist()
        out = q.new_zeros(len(q), shape.num_heads, shape.v)
        tokens: list[tuple[int, int, int]] = []  # row of q, sequence, and length up to itself
        for s, (first, last) in enumerate(pairwise(metadata.query_start_loc.tolist())):
            count = last - first
            naive = shape.prefers_naive(last - first, seq_lens[s])
            if naive or (count > 1 and not self.decodes_pieces):
                rows = gather_latent(kv_cache, metadata.block_tables[s], seq_lens[s])
                out[first:last] = (attend_expanded if naive else attend_absorbed)(
                    q[first:last], rows, up, scale
                )
            else:
                tokens += [(first + i, s, seq_lens[s] - count + 1 + i) for i in range(count)]
        if tokens:
            row, seq, length = torch.tensor(tokens, dtype=torch.int32).to(q.device).unbind(1)
            averages = self.decode(
                absorb(q[row], up, shape.rope),
                kv_cache,
                block_tables=metadata.block_tables[seq],
                seq_lens=length.contiguous(),
                rank=shape.rank,
                scale=scale,
            )
            out[row] = unabsorb(averages, up, shape.v)
        return out

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
        """Attend with one absorbed query per row, each over the first tokens of its block table; as
        `decode_absorbed`. A backend with `decodes_pieces` also takes sequences without a query, and
        `query_start_loc` then."""
        out = q.new_empty(*q.shape[:2], rank)
        for group in alike(seq_lens.tolist(), GATHERED_AT_ONCE // kv_cache.shape[2]):
            out[group] = decode_absorbed(
                q[group], kv_cache, block_tables[group], seq_lens[group], rank=rank, scale=scale
            )
        return out
