"""Evaluates an EAGLE-3 head: how many of its drafts the target would accept."""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.offline.eagle_drafts import SampleDrafter

LONGEST_DRAFT = 5  # longest draft in the evaluation


@torch.no_grad()
def evaluate(
    drafter: SampleDrafter, held_out: Tensor, batch_size: int
) -> dict[str, dict[str, list[float]]]:
    """Draft for held-out samples.

    Args:
        held_out: the samples' indices, `[num_held_out]` int64.

    Returns:
        For greedy and for drawn samples: by position, the share of draft tokens that are accepted
        with all tokens before them; and by length of the draft, the tokens per step of the target.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for name, greedy in (("temperature 0", True), ("temperature 0.7", False)):
        numbers = held_out[drafter.samples.greedy[held_out] == greedy]
        accepted = [
            sample
            for batch in (numbers.split(batch_size) if len(numbers) else ())
            for sample in accepted_drafts(drafter, batch)
        ]
        if accepted:
            shares = torch.cat(accepted).float().mean(0).tolist()
            found[name] = {
                "acceptance": [round(share, 4) for share in shares],
                "tokens per step": [
                    tokens_per_step(accepted, k) for k in range(1, LONGEST_DRAFT + 1)
                ],
            }
    return found


def accepted_drafts(drafter: SampleDrafter, batch: Tensor) -> list[Tensor]:
    """Return which draft tokens the target accepts.

    Returns:
        For each sample of the batch, `[rows, LONGEST_DRAFT]` int64: 1 where a draft token is
        accepted with all tokens before it.
    """
    data = drafter.data
    hits = []
    with drafter.autocast:
        for draft in drafter.drafts(batch, LONGEST_DRAFT, free=True):
            tokens = data.vocabulary.draft_to_target[draft.logits.argmax(-1)]
            hits.append((tokens == data.samples.token_ids[draft.places]) & draft.is_there)
    accepted = torch.stack(hits, 1).long().cumprod(1).cpu()
    samples = drafter.samples
    num_rows = samples.lengths[batch] - samples.starts[batch] - 1
    return list(accepted.split(num_rows.tolist()))


def tokens_per_step(samples: list[Tensor], k: int) -> float:
    """Return the tokens per step of the target with drafts of `k` tokens: a draft of which the
    target accepts n tokens yields n + 1 tokens, and the next draft starts after them.

    Args:
        samples: see `accepted_drafts`.
    """
    steps = 0
    tokens = 0
    for sample in samples:
        accepted = sample[:, :k].sum(1).tolist()
        place = 0
        while place < len(accepted):
            steps += 1
            place += 1 + accepted[place]
        tokens += place
    return round(tokens / max(1, steps), 3)
