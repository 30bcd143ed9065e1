"""Simulated engines and fleets: times, tokens and outcomes that can be worked out by hand."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from nanovllm.core.request import Request
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.requests import RequestMaker
from nanovllm.simulate.workload import Workload, WorkloadRequest
from tests.simulate.engines import AffineCost, engine_of, request_of, workload_of

# With `AffineCost`: 1000 per step, 100 per token, and 1 per token of context.


def test_times_of_one_request() -> None:
    result = Fleet([engine_of()]).run(workload_of(request_of(0, 50, prompt=10, output=3)))
    (served,) = result.requests
    assert served.first_token == 50 + 1000 + 10 * 100 + 10
    assert served.last_token == served.first_token + 2 * 1100 + 11 + 12
    assert (served.num_output_tokens, served.outcome) == (3, "length")
    assert (result.gaps.count, result.gaps.total) == (2, 2 * 1100 + 11 + 12)
    (counters,) = result.replicas
    assert (counters.num_steps, counters.num_decodes) == (3, 2)
    assert (counters.num_prefill_tokens, counters.decode_context) == (10, 11 + 12)
    assert counters.busy == result.duration - 50


def test_a_request_that_arrives_during_a_step_is_in_the_next_one() -> None:
    work = workload_of(request_of(0, 0, prompt=10, output=3), request_of(1, 2010, 20, 1))
    first, second = sorted(Fleet([engine_of()]).run(work).requests, key=lambda r: r.request_id)
    assert first.first_token == 2010, "a result, and an arrival at the same time"
    # A decode and a prefill in one step.
    assert second.last_token == 2010 + 1000 + 100 * 21 + 11 + 20
    assert first.last_token == second.last_token + 1112


def test_with_asynchronous_scheduling_an_arrival_misses_the_step_that_is_planned_already() -> None:
    work = workload_of(request_of(0, 0, prompt=10, output=4), request_of(1, 1, 20, 1))
    result = Fleet([engine_of(async_scheduling=True)]).run(work)
    requests = {each.request_id: each for each in result.requests}
    assert requests["r0"].first_token == 2010
    assert requests["r1"].first_token == 2010 + 1111 + 1000 + 100 * 21 + 12 + 20


def test_the_first_step_after_a_pause_takes_longer() -> None:
    work = workload_of(request_of(0, 40, prompt=10, output=2), request_of(1, 9000, 10, 1))
    engine = engine_of()
    engine.cost = AffineCost(per_idle=0.5)
    first, second = Fleet([engine]).run(work).requests
    assert first.first_token == 40 + 20 + 2010
    assert first.last_token == first.first_token + 1111
    assert second.first_token == 9000 + round(0.5 * (9000 - first.last_token)) + 2010


@pytest.mark.parametrize("fast", [False, True])
def test_swapped_blocks_are_copied_before_their_step_computes(fast: bool) -> None:
    work = workload_of(*(request_of(i, 0, prompt=8, output=4) for i in range(2)))
    options = {"block_size": 4, "preemption_mode": "swap", "enable_prefix_caching": False}
    engine = engine_of(5, copy_time=70, fast=fast, **options)
    result = Fleet([engine]).run(work)
    requests = {each.request_id: each for each in result.requests}
    assert result.replicas[0].num_preemptions == 1
    # Both prompts; r0 takes the last block, and two blocks of r1 leave.
    prompts = 1000 + 16 * 100 + 16
    r0_end = prompts + (2 * 70 + 1100 + 9) + (1100 + 10) + (1100 + 11)
    assert requests["r0"].last_token == r0_end
    # They come back.
    assert requests["r1"].last_token == r0_end + (2 * 70 + 1100 + 9) + (1100 + 10) + (1100 + 11)
    assert result.replicas[0].busy == result.duration


def test_stages_overlap() -> None:
    work = workload_of(*(request_of(i, 0, prompt=10, output=20) for i in range(2)))
    options = {"max_num_batched_tokens": 10, "max_num_seqs": 2}
    one = Fleet([engine_of(**options)]).run(work)
    two = Fleet([engine_of(pipeline_parallel_size=2, **options)]).run(work)
    (counters,) = two.replicas
    num_steps = counters.num_steps
    assert num_steps > one.replicas[0].num_steps, "each step computes one of the requests"
    num_tokens = counters.num_prefill_tokens + counters.num_decodes
    alone = 1000 * num_steps + 100 * num_tokens + 2 * 10 + counters.decode_context
    assert two.duration < 0.7 * alone
    assert counters.busy == two.duration, "at every time, a step runs"


def test_the_last_stage_computes_the_head() -> None:
    """Ten prompts in steps of their own: 2010 each, of which the last stage takes 1605 with a head
    of 1200. So it is the slowest, and the steps follow each other at this distance. The first one
    runs alone: the other requests arrive just after it was planned."""
    work = workload_of(*(request_of(i, 0, prompt=10, output=1) for i in range(10)))
    options = {"max_num_batched_tokens": 10, "max_num_seqs": 10, "pipeline_parallel_size": 2}
    for per_sample, slowest in ((0, 1005), (1200, 405 + 1200)):
        engine = engine_of(**options)
        engine.cost = AffineCost(per_sample=per_sample)
        assert Fleet([engine]).run(work).duration == 2010 + 2010 + 8 * slowest


def test_an_abort_takes_effect_after_the_step_in_flight() -> None:
    work = workload_of(
        request_of(0, 0, prompt=10, output=9, abort=2500),
        request_of(1, 0, prompt=10, output=2, abort=10**9),
    )
    requests = {each.request_id: each for each in Fleet([engine_of()]).run(work).requests}
    assert (requests["r0"].outcome, requests["r0"].num_output_tokens) == ("abort", 2)
    assert (requests["r1"].outcome, requests["r1"].num_output_tokens) == ("length", 2)


def test_a_prompt_that_does_not_fit_is_rejected() -> None:
    engine = engine_of(num_blocks=2, block_size=4, max_num_seqs=1)
    requests = [request_of(0, 0, prompt=8, output=2), request_of(1, 5, prompt=4, output=9)]
    rejected, served = Fleet([engine]).run(workload_of(*requests)).requests
    assert (rejected.outcome, rejected.replica, rejected.first_token) == ("rejected", -1, None)
    assert served.num_output_tokens == 4, "the pool has blocks for 8 tokens"


def test_prefixes_are_shared() -> None:
    ids = [7, 8, 9]
    work = workload_of(
        request_of(0, 0, prompt=20, output=4, prefix_ids=ids),
        request_of(1, 10**6, prompt=20, output=4, prefix_ids=[7, 8, 10]),
        prefix_block_size=8,
    )
    requests = Fleet([engine_of(block_size=4)]).run(work).requests
    assert [each.num_cached_tokens for each in requests] == [0, 16]


def test_names_of_blocks() -> None:
    def prompt_names(size: int, ids: list[int], length: int) -> list[int]:
        return RequestMaker(size, 12).prompt_names(ids, length)

    assert prompt_names(12, [5, 6, 9], 30) == [5, 6]
    assert prompt_names(4, [5, 6], 24) == [15, 16, 17, 18, 19, 20]
    assert prompt_names(4, [5, 6], 17) == [15, 16, 17, 18]
    # Blocks of 5 end at 5 and 10 (first number), 15 and 20 (second), 25 (third).
    assert prompt_names(5, [1, 2, 3], 29) == [3, 4, 6, 7, 9]
    assert prompt_names(24, [1, 2, 3], 36) == [2]
    assert prompt_names(4, [], 24) == []


def test_own_blocks_have_own_names() -> None:
    make = RequestMaker(4, 8)
    requests = [make(request_of(i, 0, prompt=10, output=10, prefix_ids=[3, 4])) for i in range(3)]
    names = [request.block_hashes for request in requests]
    assert [own[:2] for own in names] == [[6, 7]] * 3
    own = [name for each in names for name in each[2:]]
    assert len(own) == len(set(own)) == 9 and max(map(int, own)) < 0


def test_engines_are_used_in_turn_and_read_the_workload_as_they_need_it() -> None:
    fleet = Fleet([engine_of() for _ in range(3)])
    read_at = []

    def requests() -> Iterator[WorkloadRequest]:
        for i in range(6):
            read_at.append(fleet.now)
            yield request_of(i, 1000 * i, prompt=10, output=2)

    result = fleet.run(Workload(requests()))
    assert sorted((each.request_id, each.replica) for each in result.requests) == [
        (f"r{i}", i % 3) for i in range(6)
    ]
    assert read_at[-1] >= 4000, "a request is read after the arrival before it"
    assert [each.num_requests for each in result.replicas] == [2, 2, 2]


def test_requests_run_by_priority() -> None:
    requests = [request_of(i, i, prompt=10, output=2, priority=-i) for i in range(4)]
    options = {"max_num_seqs": 1, "scheduling_policy": "priority"}
    result = Fleet([engine_of(**options)]).run(workload_of(*requests))
    assert [each.request_id for each in result.requests] == ["r0", "r3", "r2", "r1"]


@pytest.mark.parametrize("is_async", [False, True])
def test_decoding_takes_few_plans(is_async: bool) -> None:
    engine = engine_of(block_size=16, async_scheduling=is_async)
    plans = []
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda: plans.append(schedule()) or plans[-1]  # type: ignore
    requests = [request_of(i, 0, prompt=10, output=400) for i in range(3)]
    result = Fleet([engine]).run(workload_of(*requests))
    assert result.replicas[0].num_steps == 401 + is_async
    assert len(plans) < 10


def test_a_run_keeps_pythons_garbage_collector_away_and_restores_it() -> None:
    seen = []

    def requests() -> Iterator[WorkloadRequest]:
        seen.append(gc.isenabled())
        yield request_of(0, 0, prompt=1, output=1)

    Fleet([engine_of()]).run(Workload(requests()))
    assert seen == [False] and gc.isenabled() and gc.get_freeze_count() == 0


def test_a_simulated_request_begins_as_a_request_does() -> None:
    params = SamplingParams(max_tokens=7, ignore_eos=True, temperature=0.0)
    request = Request(EngineRequest("r0", [0] * 5, params))
    simulated = RequestMaker(4, 4)(request_of(0, 0, 5, 7))
    for name, value in vars(request).items():
        found = getattr(simulated, name)
        if name == "token_ids":
            assert len(found) == len(found[:]) == len(value), "they are counted, not known"
        elif name == "block_hashes":
            assert len(found) == 3, "all blocks have names"
        else:
            assert found == value, name
    assert not vars(simulated), "attributes without slots take memory"


def test_a_simulated_request_counts_its_tokens_as_a_request_does() -> None:
    params = SamplingParams(max_tokens=7, ignore_eos=True, temperature=0.0)
    request = Request(EngineRequest("r0", [0] * 5, params))
    simulated = RequestMaker(4, 4)(request_of(0, 0, 5, 7))
    for computed in (0, 3, 5):
        for each in (request, simulated):
            each.token_ids.append(0)
            each.num_computed_tokens = computed
            each.num_pending_tokens = 1
            each.max_num_tokens = 12
        counts = [
            (
                len(each.token_ids),
                len(each.token_ids[4:]),
                each.num_tokens,
                each.num_output_tokens,
                each.num_missing_tokens,
                each.num_schedulable_tokens,
                each.in_prefill,
            )
            for each in (request, simulated)
        ]
        assert counts[0] == counts[1]
