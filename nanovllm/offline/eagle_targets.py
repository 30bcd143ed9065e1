"""Data that an EAGLE-3 head learns: the target's hidden states at each token of the samples, and
the tokens that the head can predict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from nanovllm.attention.backends import get_backend
from nanovllm.attention.base import (
    AttentionMetadata,
    ForwardContext,
    forward_context,
    kv_cache_shape,
)
from nanovllm.models.eagle import AuxHiddenStates, default_aux_layers
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.offline.eagle_samples import BLOCK_SIZE, MAX_NUM_TOKENS, Samples


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that a head can predict.

    Attributes:
        draft_to_target: `[draft_vocab_size]` int64, rising: their ids.
        target_to_draft: `[vocab_size]` int64, the number of each id in `draft_to_target`; -1 if the
            head cannot predict it.
    """

    draft_to_target: Tensor
    target_to_draft: Tensor

    @classmethod
    def most_frequent(
        cls, samples: Samples, vocab_size: int, draft_vocab_size: int, device: torch.device
    ) -> DraftVocabulary:
        """Return the most frequent tokens of the answers."""
        frequency = torch.bincount(samples.token_ids[samples.answers], minlength=vocab_size)
        most_frequent = frequency.argsort(descending=True, stable=True)[:draft_vocab_size]
        ids = most_frequent.sort().values.to(device)
        numbers = torch.full((vocab_size,), -1, device=device)
        numbers[ids] = torch.arange(len(ids), device=device)
        return cls(ids, numbers)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by which a checkpoint describes it: `d2t`, `[draft_vocab_size]` int64,
        is added to a draft id; `t2d`, `[vocab_size]` bool, marks the target's ids."""
        ids = self.draft_to_target.cpu()
        return {"d2t": ids - torch.arange(len(ids)), "t2d": self.target_to_draft.cpu() >= 0}


@dataclass(frozen=True)
class TrainingData:
    """Samples, and what the target computes for their tokens, on the device that trains.

    Attributes:
        vocabulary: the tokens that the head learns to predict.
        output_head: `[draft_vocab_size, hidden_size]`, the target's output head for these tokens.
        aux: `[num_tokens, 3 * hidden_size]`, the target's residual streams after three layers.
        hidden: `[num_tokens, hidden_size]`, its last hidden states.
        best: `[num_tokens]` int64, its most likely next tokens.
    """

    samples: Samples
    vocabulary: DraftVocabulary
    output_head: Tensor
    aux: Tensor
    hidden: Tensor
    best: Tensor

    @classmethod
    def of(
        cls, target: LlamaForCausalLM, samples: Samples, draft_vocab_size: int, device: torch.device
    ) -> TrainingData:
        """Run the target over the samples. This packs its weights."""
        vocabulary = DraftVocabulary.most_frequent(
            samples, target.config.vocab_size, draft_vocab_size, device
        )
        output_head = target.lm_head.weight[vocabulary.draft_to_target]
        target.pack_weights()
        states, best = zip(*target_states(target, samples, device), strict=True)
        hidden_size = target.config.hidden_size
        aux, hidden = torch.cat(states).split([3 * hidden_size, hidden_size], dim=1)
        return cls(
            samples=samples.to(device),
            vocabulary=vocabulary,
            output_head=output_head,
            aux=aux,
            hidden=hidden,
            best=torch.cat(best),
        )


@torch.inference_mode()
def target_states(
    target: LlamaForCausalLM, samples: Samples, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run the target over the samples, some thousand tokens per forward pass.

    Yields:
        For the tokens of a pass: the residual streams that EAGLE-3 reads and the last hidden
        states, side by side, `[num_tokens, 4 * hidden_size]`; and the most likely next tokens,
        `[num_tokens]`.
    """
    config = target.config
    longest = int(samples.lengths.max())
    width = -(-longest // BLOCK_SIZE)  # blocks of each sample
    groups = torch.arange(len(samples)).split(max(1, MAX_NUM_TOKENS[device.type] // longest))
    # Once a layer has attended, its KV is not needed any more: all layers share one cache.
    shape = kv_cache_shape(len(groups[0]) * width, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    caches = [
        torch.zeros(shape, dtype=target.model.norm.weight.dtype, device=device)
    ] * config.num_layers
    backend = get_backend("auto", device, config.head_dim)
    plain_calls = target.model.layer_calls
    aux = AuxHiddenStates(target.model, default_aux_layers(config.num_layers))
    for group in tqdm(groups, desc="Computing hidden states", unit="batch", dynamic_ncols=True):
        lengths = samples.lengths[group]
        first = int(samples.offsets[group[0]])
        token_ids = samples.token_ids[first : first + int(lengths.sum())].to(device)
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        metadata = dense_metadata(lengths, positions, width, device)
        with forward_context(ForwardContext(backend, caches, metadata)):
            target.model.layer_calls = aux.layer_calls
            hidden = target(token_ids, positions.to(device))
            target.model.layer_calls = plain_calls
        yield torch.cat([*aux.states, hidden], 1), target.compute_logits(hidden).argmax(-1)


def dense_metadata(
    lengths: Tensor, positions: Tensor, width: int, device: torch.device
) -> AttentionMetadata:
    """Return the attention metadata of whole sequences, each in blocks of its own.

    Args:
        lengths: `[num_sequences]` int64.
        positions: `[num_tokens]` int64, of their tokens.
        width: blocks per sequence.
    """
    tables = torch.arange(len(lengths) * width, dtype=torch.int32).view(-1, width)
    first_slots = torch.arange(len(lengths)) * width * BLOCK_SIZE
    slots = first_slots.repeat_interleave(lengths) + positions
    longest = int(lengths.max())
    return AttentionMetadata(
        query_start_loc=F.pad(lengths.cumsum(0), (1, 0)).int().to(device),
        seq_lens=lengths.int().to(device),
        block_tables=tables.to(device),
        slot_mapping=slots.to(device),
        max_query_len=longest,
        max_seq_len=longest,
    )
