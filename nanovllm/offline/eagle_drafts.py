"""Draft steps at all positions of some samples simultaneously, as training and evaluation need
them: the paper's training-time test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.offline.eagle_head import DraftHead
from nanovllm.offline.eagle_samples import Samples
from nanovllm.offline.eagle_targets import TrainingData


@dataclass(frozen=True)
class DraftStep:
    """One step of drafting. A row is a position at which the next token is part of an answer.

    Attributes:
        logits: `[num_rows, draft_vocab_size]`.
        places: `[num_rows]` int64, the indices of the predicted tokens in `Samples.token_ids`.
        is_there: `[num_rows]` bool: the predicted token is before the end of its sample.
    """

    logits: Tensor
    places: Tensor
    is_there: Tensor


@dataclass(frozen=True)
class SampleDrafter:
    """Drafts for samples with a head in training.

    Attributes:
        target: embeds tokens.
        samples: on the CPU; `data` has them on the device.
    """

    target: LlamaForCausalLM
    head: DraftHead
    samples: Samples
    data: TrainingData

    @property
    def autocast(self) -> torch.autocast:
        """Context in which a head for a model in bfloat16 drafts: its products are in bfloat16."""
        output_head = self.data.output_head
        is_mixed = output_head.dtype == torch.bfloat16
        return torch.autocast(output_head.device.type, torch.bfloat16, enabled=is_mixed)

    def drafts(self, numbers: Tensor, steps: int, free: bool) -> Iterator[DraftStep]:
        """Draft at each position of some samples at which the next token is part of the answer.

        Args:
            numbers: the samples' indices, `[batch]` int64, on the CPU.
            free: each step receives the token that the previous step has predicted; otherwise the
                true token.
        """
        data = self.data
        samples = data.samples
        longest = int(self.samples.lengths[numbers].max())
        numbers = numbers.to(samples.token_ids.device)
        starts = samples.starts[numbers, None]
        ends = samples.lengths[numbers, None]
        # Position in its sample, and index in `token_ids`, of each token: [batch, length].
        within = torch.arange(longest, device=ends.device)
        places = samples.offsets[numbers, None] + within
        rows = ((within >= starts - 1) & (within < ends - 2)).flatten().nonzero()[:, 0]
        last = len(samples.token_ids) - 1
        hidden = self.head.combine(data.aux[places.clamp(max=last)])
        token_ids = samples.token_ids[(places + 1).clamp(max=last)]
        cache = list[tuple[Tensor, Tensor]]()
        for step in range(steps):
            hidden = self.head.step(self._embed(token_ids), hidden, cache)
            guessed = (places + 2 + step).clamp(max=last)
            drafts = DraftStep(
                logits=self.head.compute_logits(hidden.flatten(0, 1)[rows]),
                places=guessed.flatten()[rows],
                is_there=(within + 2 + step < ends).flatten()[rows],
            )
            yield drafts
            if free:
                token_ids.view(-1)[rows] = data.vocabulary.draft_to_target[drafts.logits.argmax(-1)]
            else:
                token_ids = samples.token_ids[guessed]

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Embed token ids, `[batch, length]` to `[batch, length, hidden_size]`."""
        rows: Tensor = self.target.model.embed_tokens(token_ids.flatten())
        return rows.view(*token_ids.shape, -1)
