"""Attention over the paged cache in plain torch, one sequence at a time: slow, short, and right in
any dtype. The reference of all others.

Built by notebooks/14_prefill_and_decode.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def write_kv_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put each token's key and value into its slot.

    Args:
        k, v: `[num_tokens, num_kv_heads, head_dim]`.
        kv_cache: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, changed in place.
        slot_mapping: `[num_tokens]` int64; -1 marks padding, which is not written.
    """
    real = slot_mapping >= 0
    slots = slot_mapping[real]
    block = slots // kv_cache.shape[3]
    offset = slots % kv_cache.shape[3]
    kv_cache[block, 0, :, offset] = k[real]
    kv_cache[block, 1, :, offset] = v[real]


def gather_kv(
    kv_cache: Tensor, block_table: Tensor, seq_len: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Copy one sequence's keys and values out of its pages.

    Args:
        block_table: `[max_blocks]` int32, the sequence's row.
        first: position to begin with; the pages before it are not read.

    Returns:
        Keys and values, each `[num_kv_heads, seq_len - first, head_dim]`.
    """
    block_size = kv_cache.shape[3]
    first_block, skipped = divmod(first, block_size)
    blocks = block_table[first_block : -(-seq_len // block_size)].long()
    pages = kv_cache[blocks]  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[
        :, :, skipped : skipped + seq_len - first
    ]
    return keys, values


def visible(
    query_len: int, seq_len: int, sliding_window: int, device: torch.device | None = None
) -> Tensor:
    """Return which positions each of the last `query_len` positions sees: those up to its own, and
    with a sliding window only the last `sliding_window` of them. `[query_len, seq_len]` bool."""
    queries = torch.arange(seq_len - query_len, seq_len, device=device).unsqueeze(1)
    distance = queries - torch.arange(seq_len, device=device)
    return (distance >= 0) & (distance < (sliding_window or seq_len))


def attend_dense(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Return softmax(q·kᵀ · scale) v for the last `query_len` positions of one sequence.

    Args:
        q: `[query_len, num_heads, head_dim]`; head h uses KV head
            `h // (num_heads // num_kv_heads)`.
        keys, values: `[num_kv_heads, seq_len, head_dim]`; values may have another width than keys.
            Positions count from the end, so keys that no row sees may be missing at the beginning.
        sliding_window: see `visible`.
        soft_cap: above 0, scores become `soft_cap * tanh(score / soft_cap)`.

    Returns:
        `[query_len, num_heads, value's head_dim]` in q's dtype; scores and softmax in at least
        float32.
    """
    query_len, num_heads, head_dim = q.shape
    num_kv_heads, seq_len, _ = keys.shape
    group = num_heads // num_kv_heads
    exact = torch.promote_types(q.dtype, torch.float32)
    # The query heads that share a KV head are rows of one matrix product: its keys are never
    # repeated.
    grouped = (
        q.to(exact).view(query_len, num_kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
    )
    # [num_kv_heads, query_len * group, seq_len]
    scores = grouped @ keys.to(exact).transpose(1, 2) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    mask = visible(query_len, seq_len, sliding_window, q.device).repeat_interleave(group, dim=0)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    out = weights @ values.to(exact)
    out = out.view(num_kv_heads, query_len, group, values.shape[2]).transpose(0, 1)
    return out.reshape(query_len, num_heads, values.shape[2]).to(q.dtype)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    gather: Callable[..., tuple[Tensor, Tensor]] = gather_kv,
) -> Tensor:
    """Attention of a packed batch: gather each sequence's pages and attend densely.

    Args:
        q: `[num_tokens, num_heads, head_dim]`. Sequence s has the rows
            `query_start_loc[s] : query_start_loc[s + 1]`, the last of its `seq_lens[s]` positions;
            it may have none in this step. Rows after the last sequence's are padding.
        kv_cache: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`; the keys and values of all
            rows are in it already.
        block_tables, seq_lens, query_start_loc: as in `AttentionMetadata`.
        scale, sliding_window, soft_cap: see `attend_dense`. Pages that the window hides from all
            rows are not read.
        gather: reads a sequence's keys and values, as `gather_kv` does.

    Returns:
        `[num_tokens, num_heads, head_dim]` in q's dtype; padding rows may be anything.
    """
    out = torch.zeros_like(q)
    starts = query_start_loc.tolist()
    for s, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        if rows.start < rows.stop:
            first = max(0, seq_len - len(q[rows]) - sliding_window + 1) if sliding_window else 0
            keys, values = gather(kv_cache, block_tables[s], seq_len, first)
            out[rows] = attend_dense(
                q[rows], keys, values, scale, sliding_window=sliding_window, soft_cap=soft_cap
            )
    return out
