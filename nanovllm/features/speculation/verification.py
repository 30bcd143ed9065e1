"""Verifies drafts: accepts those that equal the model's sampled tokens; of drawn drafts, those that
rejection sampling accepts.

Built by notebooks/42_speculative_decoding.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanovllm.core.device_copies import upload
from nanovllm.core.sampling import Sampler, SamplingRow, draw, moderate, uniform
from nanovllm.core.schedule import SampledToken, SchedulerOutput
from nanovllm.data.sampling_params import SamplingParams


def keep_accepted(
    plan: SchedulerOutput, sampled: dict[str, list[SampledToken]]
) -> dict[str, list[SampledToken]]:
    """Keep the sampled tokens that the model would have sampled without drafts: all up to and
    including the first that differs from the draft at its position.

    Args:
        sampled: by request, the token after the known tokens, and the token after each draft. A
            request that samples nothing is missing.

    Returns:
        The tokens of each request.
    """
    kept = {}
    for scheduled in plan.requests:
        name = scheduled.request_id
        if name not in sampled:
            continue
        count = 1
        for draft, token in zip(scheduled.extra_token_ids, sampled[name], strict=False):
            if token.token_id != draft:
                break
            count += 1
        kept[name] = sampled[name][:count]
    return kept


# Independent random streams: to draw a draft, to accept or reject it, and to draw its replacement.
DRAFT = 1
ACCEPT = 2
REPLACE = 3


def draw_draft(logits: Tensor, params: SamplingParams, index: int) -> tuple[int, Tensor]:
    """Draw a draft at the request's temperature.

    Args:
        logits: `[vocab_size]` float32.
        index: the token's index in the request's output.

    Returns:
        The token, and the distribution from which it was drawn; for a greedy request, 1 at the
        token.
    """
    if params.greedy:
        token = int(logits.argmax())
        return token, torch.zeros_like(logits).index_fill_(
            0, torch.tensor(token, device=logits.device), 1.0
        )
    scaled = (logits / moderate(params.temperature)).unsqueeze(0)
    number = upload([uniform(params.seed or 0, index, DRAFT)], torch.float64, logits.device)
    return int(draw(scaled, number)), scaled.softmax(dim=1)[0]


def verify(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, replacement: Tensor) -> Tensor:
    """Accept a draft x with probability min(1, p(x) / q(x)), else draw from max(p - q, 0),
    normalised: the result has distribution p (Leviathan et al. 2023, arXiv 2211.17192).

    Args:
        p, q: `[num_rows, vocab_size]`, distributions of the model and of the drafts.
        drafts: `[num_rows]` int64, drawn from q.
        accept, replacement: `[num_rows]` float64 in [0, 1), independent of each other and of the
            drafts. A draft is accepted if its number in `accept` is below p(x) / q(x); `draw`,
            which takes logits, draws with the one in `replacement`.

    Returns:
        `[num_rows]` int64.
    """
    places = drafts.unsqueeze(1)
    accepted = accept < (p.gather(1, places) / q.gather(1, places)).squeeze(1)
    rest = (p - q).clamp(min=0)
    # If p and q differ by rounding errors only, max(p - q, 0) may be all zeros: then use p.
    rest = torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, p)
    return torch.where(accepted, drafts, draw(rest.log(), replacement))


@dataclass(kw_only=True)
class DraftedRow(SamplingRow):
    """A row of logits that verifies a draft.

    Attributes:
        draft: the token.
        distribution: the probabilities from which it was drawn, `[vocab_size]` float32.
    """

    draft: int
    distribution: Tensor


class RejectionSampler(Sampler):
    """Samples as `Sampler` does, but verifies the drafts of `DraftedRow`s."""

    def choose(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Return the next tokens, `[num_rows]` int64; in drafted rows, accepted drafts."""
        drafted = {
            i: row
            for i, row in enumerate(rows)
            if isinstance(row, DraftedRow) and not row.params.greedy
        }
        if not drafted:
            return super().choose(logits, rows)
        places = list(drafted)
        picked = list(drafted.values())
        send = partial(upload, dtype=torch.int64, device=logits.device)
        p = self._scaled(self._allowed(logits[places], picked), picked).softmax(dim=1)
        tokens = super().choose(logits, rows)
        verified = verify(
            p,
            q=torch.stack([row.distribution for row in picked]),
            drafts=send([row.draft for row in picked]),
            accept=random_numbers(picked, ACCEPT, logits.device),
            replacement=random_numbers(picked, REPLACE, logits.device),
        )
        return tokens.index_copy_(0, send(places), verified)


def random_numbers(rows: Sequence[SamplingRow], stream: int, device: torch.device) -> Tensor:
    """Return each row's number of a random stream, `[num_rows]` float64 in [0, 1)."""
    numbers = [uniform(row.params.seed or 0, row.num_output_tokens, stream) for row in rows]
    return upload(numbers, torch.float64, device)
