"""Reuses the keys and values of a text behind another prefix: CacheBlend (Yao et al. 2025, arXiv
2405.16444).

A prefix cache finds a document only if everything before it is the same. But documents that were
retrieved for a question come in any order, behind any text. Their cached keys and values are wrong
there in two ways:

1. The keys were rotated for other positions. A rotation by the difference corrects that exactly.
2. The document's tokens have not attended to the text that is before them now. Only computing them
   corrects that, but most tokens hardly change. So the first two layers are computed for all
   tokens, the tokens whose keys and values then differ most from the reused ones are computed in
   the other layers too, and all other tokens keep the reused keys and values.

The result is an approximation. Blocks from the first reused token on must not be found in the
prefix cache.

Built by notebooks/32_kv_sharing.ipynb: edit it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    ForwardContext,
    Rotary,
    forward_context,
)
from nanovllm.distributed.groups import get_tp_group
from nanovllm.kv_transfer.blend.chunks import Chunk, place_chunk, slots_of
from nanovllm.models.llama import LlamaForCausalLM

# ----------------------------------------------------------------------------------- scattered rows


def scattered_metadata(
    positions: Tensor, block_table: Tensor, block_size: int
) -> AttentionMetadata:
    """Attention metadata for computing only some tokens of one sequence.

    A backend assumes that a sequence's new tokens are its last ones. So each run of neighbouring
    tokens becomes its own sequence, which ends with the run, and all of them have the same block
    table. Two of them may write to the same block, since all writes of a layer come before its
    reads.

    Args:
        positions: `[num_tokens]` int64, ascending.
        block_table: `[max_blocks]` int32.
    """
    host = positions.cpu().numpy()
    last = np.flatnonzero(np.append(np.diff(host) != 1, True))  # of each run
    starts = np.append(0, last + 1)
    seq_lens = host[last] + 1
    device = positions.device
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_tables=block_table.expand(len(last), -1).contiguous(),
        slot_mapping=slots_of(positions, block_table, block_size),
        max_query_len=int(np.diff(starts).max()),
        max_seq_len=int(seq_lens[-1]),
    )


# -------------------------------------------------------------------------------------------- blend


@dataclass
class BlendRows:
    """What a selection can use to score the tokens that could be dropped in this layer.

    Attributes:
        positions: `[num_rows]` int64.
        offsets: `[num_rows]` int64, of each token in its chunk.
        reused, fresh: `[num_rows, 2, num_kv_heads, head_dim]`: keys and values of this rank's
            heads, from the chunk and as they were just computed.
    """

    positions: Tensor
    offsets: Tensor
    reused: Tensor
    fresh: Tensor


def kv_deviation(rows: BlendRows) -> Tensor:
    """How far the reused keys and values are from the fresh ones: squared distance, `[num_rows]`
    float32."""
    return get_tp_group().all_reduce(
        (rows.fresh.float() - rows.reused.float()).square().flatten(1).sum(1)
    )


@dataclass
class BlendOutput:
    """The result of a blend.

    Attributes:
        hidden: `[1, hidden_size]` of the last token.
        num_rows: how many tokens were computed, by layer.
        selected: positions of the reused tokens that were computed in all layers, ascending.
    """

    hidden: Tensor
    num_rows: list[int]
    selected: list[int]


@dataclass
class _Prompt:
    """The blocks of a prompt, and what computes its tokens, at most `max_rows` at a time."""

    model: LlamaForCausalLM
    backend: AttentionBackend
    kv_caches: list[Tensor]
    block_table: Tensor
    max_rows: int

    def place_chunks(
        self, chunks: Sequence[tuple[int, Chunk]], num_computed_tokens: int, num_tokens: int
    ) -> Tensor:
        """Write the chunks into the blocks.

        Returns:
            `[num_tokens]` int64: each token's offset in its chunk; -1 for a token in no chunk.
        """
        offsets = torch.full((num_tokens,), -1)
        for start, chunk in chunks:
            place_chunk(
                chunk,
                start,
                self.kv_caches,
                self.block_table,
                cos_sin=self.model.model.cos_sin,
                first=num_computed_tokens,
            )
            offsets[start : start + len(chunk)] = torch.arange(len(chunk))
        return offsets

    def compute(
        self, layers: range, positions: Tensor, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute some layers for the tokens at these positions, piece by piece: each piece attends
        to those before it.

        Args:
            positions: `[num_rows]` int64, ascending.
            x, residual: `[num_rows, hidden_size]`, as before the first of the layers.
        """
        pieces = positions.split(self.max_rows)
        cos_sin = self.model.model.cos_sin
        metadata = [
            scattered_metadata(piece, self.block_table, self.kv_caches[0].shape[3])
            for piece in pieces
        ]
        for layer in layers:
            out = []
            for i, parts in enumerate(
                zip(x.split(self.max_rows), residual.split(self.max_rows), strict=True)
            ):
                with forward_context(ForwardContext(self.backend, self.kv_caches, metadata[i])):
                    out.append(self.model.model.layers[layer](*parts, Rotary(pieces[i], cos_sin)))
            x, residual = (torch.cat(parts) for parts in zip(*out, strict=True))
        return x, residual

    def kv(self, layer: int, positions: Tensor) -> Tensor:
        """Keys and values in a layer's cache, `[num_positions, 2, num_kv_heads, head_dim]`."""
        kv_cache = self.kv_caches[layer]
        block_size = self.kv_caches[layer].shape[3]
        return kv_cache[
            self.block_table[positions // block_size].long(), :, :, positions % block_size
        ]


def _num_exact(chunks: Sequence[tuple[int, Chunk]]) -> int:
    """How many tokens at the beginning have exact keys and values."""
    is_prefix = chunks and chunks[0][0] == chunks[0][1].start == 0
    return len(chunks[0][1]) if is_prefix else 0


def keep_rows(rows: BlendRows, ratio: float, score: Callable[[BlendRows], Tensor]) -> Tensor:
    """Choose the rows that are computed in the remaining layers: those in no chunk, and the share
    `ratio` of the others with the highest scores, rounded up.

    Returns:
        `[num_rows]` bool.
    """
    kept = rows.offsets < 0
    num_kept = math.ceil(ratio * int((~kept).sum()))
    kept[score(rows).masked_fill(kept, -math.inf).topk(num_kept).indices] = True
    return kept


@torch.inference_mode()
def blend(
    model: LlamaForCausalLM,
    backend: AttentionBackend,
    kv_caches: list[Tensor],
    block_table: Tensor,
    token_ids: Sequence[int],
    chunks: Sequence[tuple[int, Chunk]],
    recompute_ratio: float = 0.15,
    num_computed_tokens: int = 0,
    check_layer: int = 1,
    score: Callable[[BlendRows], Tensor] = kv_deviation,
    max_rows: int | None = None,
) -> BlendOutput:
    """Prefill a prompt with chunks that were computed earlier, behind other prefixes.

    All tokens that are in no chunk are computed, and of the others the share `recompute_ratio` with
    the highest scores. Up to and including the check layer, where the score is computed, all tokens
    are computed. Attention always runs over the whole sequence. At ratio 0 a chunk's keys are only
    rotated; at ratio 1 everything is computed.

    Args:
        block_table: `[max_blocks]` int32, with room for all tokens.
        token_ids: of the prompt, at least one.
        chunks: with the position at which each begins in the prompt, in order; each has the tokens
            that the prompt has there.
        num_computed_tokens: how many tokens at the beginning are in the blocks already. They are
            exact, and not written.
        score: rates the tokens; those with the highest values are computed.
        max_rows: tokens per forward pass of a layer, which bounds the memory for activations; None:
            all.
    """
    device = block_table.device
    prompt = _Prompt(model, backend, kv_caches, block_table, max_rows or len(token_ids))
    offsets = prompt.place_chunks(chunks, num_computed_tokens, len(token_ids))
    offsets[-1] = -1  # the last token's logits are needed
    offsets = offsets.to(device)
    first = min(max(num_computed_tokens, _num_exact(chunks)), len(token_ids) - 1)
    positions = torch.arange(first, len(token_ids), device=device)
    positions = positions[offsets[positions] < 0] if recompute_ratio == 0 else positions
    x = model.model.embed_tokens(torch.tensor(token_ids, device=device)[positions])
    residual = torch.zeros_like(x)
    layers = range(len(kv_caches))
    num_rows = [len(positions)] * len(layers)
    if 0 < recompute_ratio < 1:
        before = layers[: check_layer + 1]
        layers = layers[check_layer + 1 :]
        reused = prompt.kv(check_layer, positions)
        x, residual = prompt.compute(before, positions, x, residual)
        rows = BlendRows(positions, offsets[positions], reused, prompt.kv(check_layer, positions))
        kept = keep_rows(rows, recompute_ratio, score)
        positions = positions[kept]
        x = x[kept]
        residual = residual[kept]
        num_rows[len(before) :] = [len(positions)] * len(layers)
    x, residual = prompt.compute(layers, positions, x, residual)
    hidden = model.model.norm.add(x[-1:], residual[-1:])[0]
    return BlendOutput(hidden, num_rows, positions[offsets[positions] >= 0].tolist())
