"""Which tokens are drafted, how many, and what the scheduler does with those that are wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nanovllm.assembly.scheduling import create_scheduler
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.queues import Queues
from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import (
    ModelRunnerOutput,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.data.resolved_config import resolve
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.speculative_config import SpeculativeConfig
from nanovllm.features.speculation.scheduling import (
    FEW,
    PRIOR,
    PROBE,
    NgramProposer,
    Speculation,
    num_drafts_wanted,
)


def searched(token_ids: list[int], count: int, longest: int, shortest: int) -> list[int]:
    """What `NgramProposer` proposes, by reading the whole text."""
    for length in range(longest, shortest - 1, -1):
        for place in range(len(token_ids) - length):
            if token_ids[place : place + length] == token_ids[-length:]:
                return token_ids[place + length : place + length + count]
    return []


def test_an_ngram_proposes_what_followed_first() -> None:
    assert NgramProposer(3, 2).propose([1, 2, 3, 9, 2, 3, 7, 1, 2, 3], 2) == [9, 2]
    assert NgramProposer(3, 2).propose([1, 2, 3, 9], 2) == [] == NgramProposer(3, 2).propose([4], 2)
    assert NgramProposer(1, 1).propose([5, 5], 4) == [5]  # as far as the text goes
    rng = random.Random(3)
    for _ in range(100):
        longest = rng.randint(1, 4)
        shortest, count = rng.randint(1, longest), rng.randint(1, 5)
        proposer, text = NgramProposer(longest, shortest), [rng.randrange(4)]
        for _ in range(20):
            text += [rng.randrange(4) for _ in range(rng.randint(1, 4))]
            assert proposer.propose(text, count) == searched(text, count, longest, shortest)


def make_request(num_tokens: int = 3, max_tokens: int = 90, **options: Any) -> Request:
    request = Request(
        EngineRequest(
            "A", list(range(num_tokens)), SamplingParams(max_tokens=max_tokens, **options)
        )
    )
    request.max_num_tokens = num_tokens + max_tokens
    return request


class Foreseen(Speculation):
    """May know how many drafts will be accepted."""

    foreseen: float | None = None

    def acceptance(self, request: Request) -> float:
        return super().acceptance(request) if self.foreseen is None else self.foreseen


def make_speculation(
    plain: float = 0.0,
    row: float = 0.0,
    num_requests: int = 1,
    num_blocks: int = 40,
    **options: Any,
) -> Foreseen:
    """One that has seen a step without drafts of `plain` seconds, and some where each request's
    draft took `row` seconds more."""
    speculation = Foreseen(
        SpeculativeConfig(**{"method": "ngram", "num_speculative_tokens": 8} | options),
        Queues(),
        KVCacheManager(num_blocks, 4),
        max_num_seqs=4,
    )
    for drafts in ([], *[[7, 7]] * FEW) if plain else ():
        shares = [
            ScheduledRequest("", 0, 1 + len(drafts), [], [], extra_token_ids=drafts)
            for _ in range(num_requests)
        ]
        speculation.took(SchedulerOutput(shares), plain + row * num_requests * len(drafts))
    pass_steps(speculation, PROBE + 2 - (1 + FEW if plain else 0))
    return speculation


def pass_steps(speculation: Speculation, count: int) -> None:
    """Let steps pass of so many requests that they tell nothing of smaller ones."""
    shares = [ScheduledRequest("", 0, 1, [], [])] * 100
    for _ in range(count):
        speculation.took(SchedulerOutput(shares), 1.0)


@pytest.mark.parametrize(
    ("acceptance", "row", "num_requests", "wanted"),
    [
        (0.5, 0.1, 1, 3),  # 0.5, 0.25 and 0.125 are above 0.1, the next power is not
        (0.5, 0.6, 1, 0),
        (0.88, 0.1, 8, 1),  # a row costs as much as 0.8 tokens
        (0.95, 0.1, 8, 4),
        (0.7, 0.1, 8, 0),
        (1.0, 0.9, 1, 8),
        (0.9, -0.1, 4, 8),  # no row is measured as less than nothing
    ],
)
def test_a_row_pays_if_its_chance_is_above_its_price(
    acceptance: float, row: float, num_requests: int, wanted: int
) -> None:
    speculation, request = make_speculation(1.0, row, num_requests), make_request()
    speculation.foreseen = acceptance
    assert speculation.count(request, num_requests) == wanted
    few = 2 if num_requests == 1 else 1
    pass_steps(speculation, PROBE - 2)
    # In two steps it measures again what it has left.
    for tried in (0 if wanted else few, 0 if wanted else few, wanted):
        assert speculation.count(request, num_requests) == tried
        pass_steps(speculation, 1)
    speculation.queues.add(make_request())
    speculation.before_step(SchedulerOutput())
    assert speculation.count(request, num_requests) == 0


def test_it_measures_steps_without_drafts_first_and_then_with_as_many_as_may_be() -> None:
    speculation = make_speculation()
    speculation.foreseen = 1e-9
    assert speculation.count(make_request(), 1) == 0
    speculation.took(SchedulerOutput([ScheduledRequest("", 0, 1, [], [])]), 1.0)
    for _ in range(FEW):
        assert speculation.count(make_request(), 1) == 8
        assert speculation.count(make_request(), 2) == 0  # of two requests nothing is known
        speculation.took(
            SchedulerOutput([ScheduledRequest("", 0, 9, [], [], extra_token_ids=[7] * 8)]), 2.0
        )
    assert speculation.count(make_request(), 1) == 0


@pytest.mark.parametrize("most", [1, 8])
def test_a_single_draft_measures_no_row_unless_there_are_never_more(most: int) -> None:
    """It pays alone for what all drafts of a step need."""
    speculation = make_speculation(num_speculative_tokens=most)
    speculation.took(SchedulerOutput([ScheduledRequest("", 0, 1, [], [])]), 1.0)
    wanted = [most]  # until rows are measured, they cost nothing; then more than they may bring
    for drafts in ([7], [7] * most):
        for _ in range(FEW):
            shares = [ScheduledRequest("", 0, 1 + len(drafts), [], [], extra_token_ids=drafts)]
            speculation.took(SchedulerOutput(shares), 1.0 + 2.0 * len(drafts))
        wanted.append(speculation.count(make_request(), 1))
    assert wanted == ([1, 0, 0] if most == 1 else [8, 8, 0])


def test_a_table_of_batch_sizes_decides_alone() -> None:
    speculation = make_speculation(
        1.0, 9.0, num_speculative_tokens_per_batch_size=[[1, 2, 5], [3, 4, 20]]
    )
    assert [speculation.count(make_request(), n) for n in (1, 2, 3, 5)] == [5, 5, 8, 0]


def test_a_request_drafts_no_further_than_its_end() -> None:
    speculation = make_speculation()
    assert [speculation.limit(make_request(max_tokens=n)) for n in (1, 2, 5, 9, 20)] == [
        0,
        1,
        4,
        8,
        8,
    ]
    assert speculation.limit(make_request(num_speculative_tokens=2)) == 2
    assert speculation.limit(make_request(num_speculative_tokens=0)) == 0
    assert speculation.limit(make_request(structured_outputs={"regex": "a"})) == 0


def test_acceptance_follows_a_request_and_begins_with_that_of_all() -> None:
    speculation, good, bad = make_speculation(), make_request(), make_request()

    def end(request: Request, num_accepted: int) -> None:
        share = ScheduledRequest("A", 0, 3, [], [], extra_token_ids=[7, 7])
        output = EngineOutput("A", new_token_ids=[7] * (num_accepted + 1))
        speculation.sampled(request, share, ModelRunnerOutput(), output)

    for _ in range(30):
        end(good, 2)
        end(bad, 0)
    # A rejected draft ends the trial: of 60 there were 30 tried twice and 30 tried once.
    assert speculation.acceptance(good) > 0.9 and speculation.acceptance(bad) < 0.1
    assert 0.3 < speculation.acceptance(make_request()) < 0.8
    for _ in range(30):
        end(bad, 2)
    assert speculation.acceptance(bad) > 0.9  # what was long ago counts little
    assert speculation.stats.num_accepted_tokens_per_pos[:3] == [60, 60, 0]


@pytest.mark.parametrize(("num_accepted", "num_tried"), [(0, 1), (1, 2), (2, 3), (3, 3)])
def test_drafts_after_a_rejected_one_are_not_tried(num_accepted: int, num_tried: int) -> None:
    speculation, request = make_speculation(), make_request()
    share = ScheduledRequest("A", 0, 4, [], [], extra_token_ids=[7, 7, 7])
    output = EngineOutput("A", new_token_ids=[7] * (num_accepted + 1))
    speculation.sampled(request, share, ModelRunnerOutput(), output)
    # Of all requests, with one more of each: (accepted + 1) / (accepted + steps with drafts + 1).
    everywhere = (num_accepted + 1) / (num_accepted + 1 + 1)
    expected = (num_accepted + PRIOR * everywhere) / (num_tried + PRIOR)
    assert speculation.acceptance(request) == pytest.approx(expected)


# It drafts nothing itself.
NEVER = '{"method": "ngram", "num_speculative_tokens_per_batch_size": []}'


def make_scheduler(num_blocks: int = 40, **options: Any) -> Scheduler:
    config = EngineConfig(block_size=4, max_num_batched_tokens=32, max_num_seqs=4, **options)
    resolved = resolve(config, model_max_len=4096, num_kv_blocks=num_blocks)
    manager = KVCacheManager(num_blocks, 4, config.enable_prefix_caching)
    return create_scheduler(resolved, manager)


def test_rejected_drafts_are_taken_back_and_blocks_are_named_when_verified() -> None:
    scheduler, request = make_scheduler(speculative_config=NEVER), make_request(6)
    scheduler.add_request(request)

    def step(drafts: list[int], *result: int) -> ScheduledRequest:
        request.extra_token_ids = drafts
        [share] = (plan := scheduler.schedule()).requests
        scheduler.check_invariants()
        sampled = [SampledToken(token) for token in result]
        scheduler.update_from_output(plan, ModelRunnerOutput({"A": sampled}))
        scheduler.check_invariants()
        return share

    def num_found() -> int:
        other = Request(EngineRequest("B", [*request.token_ids, 99], SamplingParams()))
        return len(scheduler.manager.get_computed_blocks(other))

    assert (step([], 70).samples, num_found()) == (1, 1)
    share = step([71, 72, 73], 71, 88)  # 72 is wrong
    assert request.extra_token_ids == []  # what was verified is not verified again
    assert (share.num_tokens, share.samples, list(share.extra_token_ids)) == (4, 4, [71, 72, 73])
    assert (request.token_ids[6:], request.num_computed_tokens, num_found()) == ([70, 71, 88], 8, 2)
    share = step([80, 81, 82], 80, 81, 82, 83)  # all are right
    assert (share.start, share.new_token_ids) == (8, [71, 88])
    assert (request.token_ids[9:], request.num_computed_tokens, num_found()) == (
        [80, 81, 82, 83],
        12,
        3,
    )


@pytest.mark.parametrize(("stop", "max_tokens", "reason"), [([81], 90, "stop"), ([], 4, "length")])
def test_what_follows_the_end_in_a_run_is_dropped(
    stop: list[int], max_tokens: int, reason: str
) -> None:
    scheduler, request = (
        make_scheduler(speculative_config=NEVER),
        make_request(6, max_tokens, stop_token_ids=stop),
    )
    scheduler.add_request(request)
    scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput({"A": [SampledToken(70)]}))
    request.extra_token_ids = [80, 81, 82, 83][: max_tokens - 2]
    sampled = [SampledToken(token) for token in (80, 81, 82, 83, 84)]
    [output] = scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput({"A": sampled}))
    assert output.finish_reason == reason and output.new_token_ids == (
        [80, 81] if stop else [80, 81, 82]
    )
    assert not scheduler.queues.requests and scheduler.manager.pool.num_free == 40


def run(speculation: Speculation, request: Request, num_computed: int) -> Request:
    """Put a request into the running queue, with two drafts."""
    speculation.queues.add(request)
    speculation.queues.move(request, RequestStatus.RUNNING)
    request.num_computed_tokens = num_computed
    request.extra_token_ids = [5, 6]
    return request


def other_request() -> Request:
    request = make_request()
    request.request_id = "B"
    return request


@pytest.mark.parametrize("others", ["none", "wait", "wait for a running slot", "in prefill"])
def test_prompts_come_before_drafts(others: str) -> None:
    speculation = make_speculation(1.0)
    request = run(speculation, make_request(), num_computed=2)
    request.token_ids += [9] * 2
    request.num_computed_tokens = len(request.token_ids) - 1
    if others == "in prefill":
        run(speculation, other_request(), num_computed=1)
    elif others != "none":
        speculation.queues.add(other_request())
    if others == "wait for a running slot":
        speculation.max_num_seqs = 1  # a prompt cannot use the budget of this step
    speculation.before_step(SchedulerOutput())
    keeps = others in ("none", "wait for a running slot")
    assert request.extra_token_ids == ([5, 6] if keeps else [])
    assert (speculation.count(request, 1) > 0) == keeps


def test_no_drafts_when_blocks_are_short() -> None:
    """A request may need blocks for 16 drafts and one block more: 8 to verify, and 8 to make."""
    for num_blocks, drafts in ((5, [5, 6]), (4, [])):
        speculation = make_speculation(num_blocks=num_blocks)
        request = run(speculation, make_request(), num_computed=3)
        request.token_ids.append(9)
        speculation.before_step(SchedulerOutput())
        assert request.extra_token_ids == drafts


def test_drafts_that_a_model_makes_get_their_slots_with_the_share() -> None:
    """`scheduled` allocates them, if a block is free, and tells the runner their number."""
    for num_blocks, num_drafts, new_blocks in ((3, 3, 1), (1, 0, 0)):
        speculation = make_speculation(
            num_blocks=num_blocks,
            method="draft_model",
            model="smollm2-135m",
            num_speculative_tokens=3,
            num_speculative_tokens_per_batch_size=[[1, 9, 3]],
        )
        request = make_request(4)
        run(speculation, request, num_computed=3)
        speculation.manager.allocate_slots(request, 4)
        share = ScheduledRequest("A", 3, 1, [], [], samples=1)
        speculation.scheduled(request, share)
        plan = SchedulerOutput()
        speculation.planned(plan)
        wanted = num_drafts_wanted(plan)
        assert (wanted.get("A", 0), len(share.new_block_ids)) == (num_drafts, new_blocks)
        speculation.before_step(plan := SchedulerOutput())
        speculation.scheduled(request, ScheduledRequest("A", 0, 2, [], []))
        speculation.planned(plan)
        assert not num_drafts_wanted(plan), "a share that samples nothing drafts nothing"
