"""Every operator in plain torch: what runs where no faster kernel fits, and the oracle for those kernels.

In float64 these functions are as exact as the formulas; in bfloat16 they round where the Hugging Face Llama rounds,
so that both produce the same activations. The contracts (shapes, what is overwritten) stand in `nanovllm.ops`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def _accumulator(tensor: Tensor) -> Tensor:
    """`tensor` in float32, or in float64 where it already is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = _accumulator(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin[positions].unsqueeze(1).to(q.dtype).chunk(2, dim=-1)
    for heads in (q, k):
        first, second = heads.chunk(2, dim=-1)
        heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    return q, k


def write_kv_cache(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    block_size = kv_cache.shape[3]
    kept = slot_mapping >= 0
    blocks = torch.div(slot_mapping[kept], block_size, rounding_mode="floor")
    offsets = slot_mapping[kept] % block_size
    kv_cache[blocks, 0, :, offsets] = k[kept]
    kv_cache[blocks, 1, :, offsets] = v[kept]


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def pack_weight(weight: Tensor) -> Tensor:
    return weight


def unpack_weight(packed: Tensor) -> Tensor:
    """`[out_features, in_features]` from what `pack_weight` made on a machine with matrix tiles."""
    groups, steps, words, width = packed.shape
    parts = packed.view(groups, steps, words, width // 2, 2)
    return parts.permute(0, 3, 1, 2, 4).reshape(groups * width // 2, steps * words * 2)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, unpack_weight(weight) if weight.ndim == 4 else weight, bias)


def grouped_linear(
    x: Tensor, weight: Tensor, counts: Tensor, product: Callable[[Tensor, Tensor], Tensor] = linear
) -> Tensor:
    """As in `nanovllm.ops`; `product` multiplies the rows of one group."""
    # A packed weight has an output in every second column of its tiles.
    outputs = weight.shape[1] if weight.ndim == 3 else weight.shape[1] * weight.shape[4] // 2
    out, start = x.new_zeros(len(x), outputs), 0
    for group, count in enumerate(counts.tolist()):
        if count:
            out[start : start + count] = product(x[start : start + count], weight[group])
            start += count
    return out


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    if weight.ndim == 2:
        return F.embedding(token_ids, weight)
    # A packed row lies in words of two values; all words of output o are column o of its group's tiles.
    words = weight.view(torch.int32)
    outputs = words.shape[3]
    rows = words[token_ids // outputs, :, :, token_ids % outputs]  # [tokens, steps, words of a step]
    return rows.flatten(1).view(weight.dtype)


def argmax(x: Tensor) -> Tensor:
    return x.argmax(dim=-1)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    out = torch.zeros_like(q)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        num_queries = rows.stop - rows.start
        if num_queries > 0:
            first = max(0, length - num_queries - sliding_window + 1) if sliding_window > 0 else 0
            keys, values = gather_sequence(kv_cache, block_tables[sequence], first, length)
            out[rows] = _attend(q[rows], keys, values, scale, sliding_window, soft_cap)
    return out


def gather_sequence(kv_cache: Tensor, block_table: Tensor, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the positions `first` to `length - 1` of one sequence.

    Returns: `[num_kv_heads, length - first, head_dim]` each.
    """
    block_size = kv_cache.shape[3]
    first_block, last_block = first // block_size, (length - 1) // block_size
    pages = kv_cache[block_table[first_block : last_block + 1].long()]  # [blocks, 2, heads, block_size, head_dim]
    offset = first - first_block * block_size
    keys, values = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, offset : offset + length - first]
    return keys, values


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, soft_cap: float) -> Tensor:
    """Causal attention of `[queries, heads, head_dim]`, the last positions of `[kv_heads, length, head_dim]`."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, length, _ = keys.shape
    grouped = _accumulator(q).view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qhgd,hkd->hgqk", grouped, _accumulator(keys)) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    key_positions = torch.arange(length, device=q.device)
    query_positions = key_positions[length - num_queries :, None]
    visible = key_positions <= query_positions
    if window > 0:
        visible &= key_positions > query_positions - window
    probabilities = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    attended = torch.einsum("hgqk,hkd->qhgd", probabilities, _accumulator(values))
    return attended.reshape(q.shape).to(q.dtype)
