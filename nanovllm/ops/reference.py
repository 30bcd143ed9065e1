"""Every operator in plain torch: the fallback where no faster kernel fits, and the oracle for those
kernels.

In float64 these functions are as exact as the formulas; in bfloat16 they round where the Hugging
Face Llama rounds, so that both produce the same activations. `nanovllm.ops` documents shapes and
which arguments are overwritten."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.attention import paged_attention as paged_attention
from nanovllm.ops.attention import write_kv_cache as write_kv_cache


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # float64 stays
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


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def pack_weight(weight: Tensor) -> Tensor:
    return weight


def unpack_weight(packed: Tensor) -> Tensor:
    """`[out_features, in_features]` from a packed weight (see `nanovllm.ops.pack_weight`)."""
    groups, _, _, width = packed.shape  # 16 outputs, each with the values of a word
    split: Tensor = packed.unflatten(3, (16, width // 16))
    return split.permute(0, 3, 1, 2, 4).reshape(groups * 16, -1)


def widen(x: Tensor) -> Tensor:
    return x.float()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, unpack_weight(weight) if weight.ndim == 4 else weight, bias)


def grouped_linear(
    x: Tensor, weight: Tensor, counts: Tensor, product: Callable[[Tensor, Tensor], Tensor] = linear
) -> Tensor:
    """As in `nanovllm.ops`; `product` multiplies the rows of one group."""
    outputs = weight.shape[1] * (1 if weight.ndim == 3 else 16)  # a packed weight has groups of 16
    out = x.new_zeros(len(x), outputs)
    start = 0
    for group, count in enumerate(counts.tolist()):
        if count:
            out[start : start + count] = product(x[start : start + count], weight[group])
            start += count
    return out


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    if weight.ndim == 2:
        return F.embedding(token_ids, weight)
    # A packed row is stored in words of 32 bits; all words of output o are column o of its group.
    words = weight.view(torch.int32)
    outputs = words.shape[3]
    # [tokens, steps, words of a step]
    rows = words[token_ids // outputs, :, :, token_ids % outputs]
    return rows.flatten(1).view(weight.dtype)


def argmax(x: Tensor) -> Tensor:
    return x.argmax(dim=-1)
