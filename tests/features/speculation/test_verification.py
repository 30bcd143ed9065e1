"""Which drafts are kept: the tokens are the model's own, or have exactly its distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanovllm.core.sampling import Sampler, SamplingRow, draw, uniform
from nanovllm.core.schedule import SampledToken, ScheduledRequest, SchedulerOutput
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.features.speculation.verification import (
    ACCEPT,
    DRAFT,
    REPLACE,
    DraftedRow,
    RejectionSampler,
    draw_draft,
    keep_accepted,
    verify,
)
from tests.examples import by_night

P = torch.tensor([0.40, 0.25, 0.15, 0.08, 0.05, 0.04, 0.02, 0.01])
Q = torch.tensor([0.25, 0.35, 0.10, 0.15, 0.05, 0.05, 0.03, 0.02])
PEAKED = torch.tensor([0.93, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01])
COUNT = 40_000


def share(name: str, *drafts: int) -> ScheduledRequest:
    return ScheduledRequest(name, 0, 1 + len(drafts), [], [], extra_token_ids=[*drafts])


def test_tokens_are_kept_up_to_the_first_that_was_not_drafted() -> None:
    own = {"none": [9, 2, 3], "some": [1, 9, 3], "all": [1, 2, 9], "no drafts": [5]}
    plan = SchedulerOutput(
        [share(name, *(1, 2)[: len(tokens) - 1]) for name, tokens in own.items()]
    )
    plan.add(share("in prefill"))
    sampled = {name: [SampledToken(token) for token in tokens] for name, tokens in own.items()}
    kept = keep_accepted(plan, sampled)
    found = {name: [token.token_id for token in tokens] for name, tokens in kept.items()}
    assert found == {"none": [9], "some": [1, 9], "all": [1, 2, 9], "no drafts": [5]}


def numbers(stream: int, count: int = COUNT) -> Tensor:
    return torch.tensor([uniform(7, index, stream) for index in range(count)], dtype=torch.float64)


def chi_square(found: Tensor, distribution: Tensor) -> float:
    """0.1 % of right samples of eight tokens have more than 24.3."""
    expected = distribution.double() * len(found)
    return float(
        ((torch.bincount(found, minlength=len(distribution)) - expected) ** 2 / expected).sum()
    )


@pytest.mark.parametrize(
    ("p", "q"), [(P, Q), (Q, PEAKED), (P, P), *by_night([(Q, P), (P, P.flip(0)), (PEAKED, Q)])]
)
def test_verified_tokens_have_the_distribution_of_the_model(p: Tensor, q: Tensor) -> None:
    rows_p, rows_q = p.expand(COUNT, -1), q.expand(COUNT, -1)
    drafts = draw(rows_q.log(), numbers(DRAFT))
    found = verify(rows_p, rows_q, drafts, numbers(ACCEPT), numbers(REPLACE))
    assert chi_square(drafts, q) < 24.3 and chi_square(found, p) < 24.3
    # No rule keeps more of the drafts than 1 - TV. A replacement is never the draft, where p is
    # below q.
    bound = float(torch.minimum(p, q).sum())
    assert (
        abs(float((found == drafts).double().mean()) - bound)
        < 4 * math.sqrt(bound * (1 - bound) / COUNT) + 1e-6
    )


def test_a_draft_is_accepted_or_replaced_row_by_row() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.6, 0.2]])
    for draft, accept, token in ((0, 0.99, 0), (1, 0.49, 1), (1, 0.51, 0), (2, 0.99, 2)):
        for replacement in (0.0, 0.5, 0.999):
            numbers = (
                torch.tensor([value], dtype=torch.float64) for value in (accept, replacement)
            )
            assert verify(p, q, torch.tensor([draft]), *numbers).tolist() == [token]


def test_equal_distributions_accept_every_draft() -> None:
    for p in (P, torch.tensor([1.0, 0.0, 0.0])):
        drafts, ones = (
            torch.arange(len(p))[p > 0],
            torch.full((int((p > 0).sum()),), 1 - 2.0**-53, dtype=torch.float64),
        )
        rows = p.expand(len(drafts), -1)
        assert verify(rows, rows, drafts, ones, ones).equal(drafts)


def test_a_draft_is_replaced_by_the_model_where_p_and_q_differ_by_rounding_only() -> None:
    """Where p sums to a little less than q, max(p - q, 0) is zero for every token, and a number in
    `accept` may still be above p / q."""
    p, q = P.double() * (1 - 2.0**-20), P.double()
    drafts, middle = torch.tensor([3]), torch.tensor([0.5], dtype=torch.float64)
    assert not (p - q).clamp(min=0).any()
    found = verify(p[None], q[None], drafts, torch.ones_like(middle) - 2.0**-53, middle)
    assert found.equal(draw(p.log()[None], middle)) and found.item() not in (0, 3, 7)


def test_drafts_accepting_and_replacing_use_numbers_of_their_own() -> None:
    streams = torch.stack([numbers(stream, 4000) for stream in (0, DRAFT, ACCEPT, REPLACE)])
    assert float((torch.corrcoef(streams) - torch.eye(4)).abs().max()) < 0.07
    assert uniform(3, 5) != uniform(3, 5, DRAFT) == uniform(3, 5, DRAFT)


def test_a_draft_comes_from_the_distribution_that_it_is_told_with() -> None:
    params, logits = SamplingParams(temperature=2, seed=7), P.log()
    pairs = [draw_draft(logits, params, index) for index in range(3000)]
    q = (logits / 2).softmax(0)
    assert all(torch.allclose(distribution, q) for _, distribution in pairs[:3])
    assert chi_square(torch.tensor([token for token, _ in pairs]), q) < 24.3
    token, distribution = draw_draft(logits, SamplingParams(temperature=0), 0)
    assert (token, distribution.tolist()) == (0, [1.0] + [0.0] * 7)


def row(params: SamplingParams, index: int, draft: int | None = None) -> SamplingRow:
    common = (params, [0] * (9 + index), 9)
    return (
        SamplingRow(*common) if draft is None else DraftedRow(*common, draft=draft, distribution=Q)
    )


def test_the_sampler_verifies_drafted_rows_and_no_others() -> None:
    """With the distribution after temperature and truncation; rows without drafts, and greedy ones,
    are those of every sampler."""
    params = SamplingParams(temperature=0.8, top_k=5, seed=7)
    p = (P.log() / 0.8).masked_fill(torch.arange(8) >= 5, -math.inf).softmax(0)
    rows = [row(params, index, draft=index % 8) for index in range(64)]
    plain = [row(params, index) for index in range(64)]
    greedy = [row(SamplingParams(temperature=0), index, draft=3) for index in range(4)]
    logits = P.log().expand(132, -1)
    found = RejectionSampler().choose(logits.clone(), [*rows, *plain, *greedy])
    drafts = torch.arange(64) % 8
    wanted = verify(
        p.expand(64, -1), Q.expand(64, -1), drafts, numbers(ACCEPT, 64), numbers(REPLACE, 64)
    )
    assert found[:64].equal(wanted) and not bool((found[:64] >= 5).any())
    assert (
        found[64:128].equal(Sampler().choose(logits[:64].clone(), plain))
        and found[128:].tolist() == [0] * 4
    )
