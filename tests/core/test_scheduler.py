"""Admission and preemption, rule by rule; `test_scheduler_machine` has the random lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanovllm.assembly.scheduling import create_scheduler
from nanovllm.core.block_pool import InvariantError
from nanovllm.core.hooks import SchedulerHookCalls, SchedulerHooks
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.core.scheduler import Scheduler, continue_then_admit
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.resolved_config import resolve
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.features.decodes_first import decodes_first

Fill = Callable[[Scheduler, SchedulerOutput], None]


def scheduler_of(
    *prompts: int, num_blocks: int = 8, host_blocks: int = 0, **options: Any
) -> Scheduler:
    """A scheduler with waiting requests r0, r1, ... of so many prompt tokens, all different; blocks
    have 2 tokens."""
    config = EngineConfig(block_size=2, num_kv_blocks=num_blocks, **options)
    resolved = resolve(config, model_max_len=40, num_kv_blocks=num_blocks)
    scheduler = create_scheduler(resolved, KVCacheManager(num_blocks, 2, True, host_blocks))
    for number, length in enumerate(prompts):
        tokens = [10 * number + i for i in range(length)]
        scheduler.add_request(
            Request(EngineRequest(f"r{number}", tokens, SamplingParams(max_tokens=9)), number)
        )
    return scheduler


def test_requests_are_admitted_in_order_until_one_has_to_wait() -> None:
    scheduler = scheduler_of(4, 4, 2, max_num_seqs=4, max_num_batched_tokens=6)
    plan = scheduler.schedule()
    assert [(share.request_id, share.num_tokens) for share in plan.requests] == [
        ("r0", 4),
        ("r1", 2),
    ]
    assert plan.blocked_by == "max_num_batched_tokens", "the plan says why r2 has to wait"
    assert [request.request_id for request in scheduler.queues.waiting] == ["r2"]


def test_no_request_overtakes_one_that_has_to_wait() -> None:
    scheduler = scheduler_of(4, 8, 2, num_blocks=5, max_num_seqs=4, max_num_batched_tokens=40)
    plan = scheduler.schedule()
    assert list(plan.admitted) == ["r0"], "r2 would fit, and r1 is before it"
    assert plan.blocked_by == "kv blocks"


def test_the_plan_blames_nothing_when_all_are_admitted() -> None:
    scheduler = scheduler_of(2, 2, max_num_seqs=4, max_num_batched_tokens=40)
    plan = scheduler.schedule()
    assert list(plan.admitted) == ["r0", "r1"] and plan.blocked_by == ""


def preempted(mode: str, host_blocks: int) -> tuple[Scheduler, Request, SchedulerOutput]:
    """Two requests fill the pool; for the next token of the first one, the later one is
    preempted."""
    options = {"num_blocks": 4, "host_blocks": host_blocks, "preemption_mode": mode}
    scheduler = scheduler_of(4, 4, **options)
    tokens = {name: [SampledToken(5)] for name in ("r0", "r1")}
    scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(tokens))
    victim, plan = scheduler.queues.running[1], scheduler.schedule()
    scheduler.check_invariants()
    assert [share.request_id for share in plan.requests] == ["r0"], (
        "r0 is older and needs a block: r1 gives up its blocks, and r0 advances"
    )
    assert plan.blocked_by == "preemption", "a request admitted now would be the next victim"
    assert victim.num_preemptions == scheduler.num_preemptions == 1, (
        "the request and the scheduler count it"
    )
    assert scheduler.manager.pool.num_free == 1, "its two blocks are free, and r0 has taken one"
    return scheduler, victim, plan


@pytest.mark.parametrize(
    ("mode", "host_blocks"),
    [("recompute", 8), ("swap", 1)],
    ids=["recompute", "host memory is full"],
)
def test_a_preempted_request_begins_again(mode: str, host_blocks: int) -> None:
    scheduler, victim, plan = preempted(mode, host_blocks)
    assert plan.preempted == {"r1": "recompute"} and not plan.swap_out
    assert victim.status is RequestStatus.WAITING and scheduler.queues.waiting == [victim]
    assert victim.num_computed_tokens == 0, "it holds no block: all its tokens are computed again"


def test_a_preempted_request_keeps_its_blocks_in_host_memory() -> None:
    scheduler, victim, plan = preempted("swap", 8)
    assert plan.preempted == {"r1": "swap"} and plan.swap_out == [(2, 0), (3, 1)]
    assert victim.status is RequestStatus.SWAPPED and scheduler.queues.swapped == [victim]
    assert victim.num_computed_tokens == 4


def test_a_swapped_request_goes_before_later_ones_that_wait() -> None:
    scheduler, _, plan = preempted("swap", 8)
    scheduler.add_request(Request(EngineRequest("r2", [7], SamplingParams(max_tokens=9)), 2))
    scheduler.update_from_output(plan, ModelRunnerOutput({"r0": [SampledToken(5)]}))
    scheduler.abort_request("r0")
    plan = scheduler.schedule()
    assert [share.request_id for share in plan.requests] == ["r1", "r2"]
    assert plan.resumed == ["r1"] and not plan.preempted
    assert plan.swap_in == [(1, 3)], "r0 had its second block; the first one is still there"


def steps_of_the_oldest(num_later: int) -> Iterator[SchedulerOutput]:
    """Plan the steps of r0, a long request, until it ends, in a pool that is too small. Shorter
    requests arrive all the time."""
    scheduler = scheduler_of(24, num_blocks=18, max_num_seqs=8, max_num_batched_tokens=12)
    requests = scheduler.queues.requests
    for step in range(400):
        if step % 2 == 0 and step < 2 * num_later:
            source = EngineRequest(f"r{step // 2 + 1}", [step] * 4, SamplingParams(max_tokens=9))
            scheduler.add_request(Request(source, step + 1))
        yield (plan := scheduler.schedule())
        for share in [each for each in plan.requests if each.request_id in plan.preempted]:
            plan.requests.remove(share)  # it cannot be computed
            requests[share.request_id].num_pending_tokens -= share.samples
        sampled = {each.request_id: [SampledToken(5)] for each in plan.requests if each.samples}
        scheduler.update_from_output(plan, ModelRunnerOutput(sampled))
        if "r0" not in requests:
            return


def test_the_oldest_request_advances_in_every_step() -> None:
    for number, plan in enumerate(steps_of_the_oldest(num_later=9)):
        shares = [share.request_id for share in plan.requests]
        assert "r0" in shares and "r0" not in plan.preempted, (
            f"step {number} computes nothing for r0, the oldest request. While its blocks go to "
            "later requests, nothing bounds how long it takes."
        )


def test_no_request_loses_its_blocks_in_a_step_that_computes_it() -> None:
    for number, plan in enumerate(steps_of_the_oldest(num_later=9)):
        both = [each.request_id for each in plan.requests if each.request_id in plan.preempted]
        assert not both, (
            f"step {number} computes a token of {both[0]} and takes its blocks away: the token's "
            "keys and values would overwrite those of another request. Shares are given out from "
            "the oldest to the youngest, so only a request that is younger has none yet."
        )


def test_later_requests_do_not_delay_the_oldest() -> None:
    few, many = (sum(1 for _ in steps_of_the_oldest(count)) for count in (3, 30))
    assert many <= few, (
        f"if 3 requests arrive behind it, r0 takes {few} steps, and if 30 arrive, {many}: it "
        "starves for as long as new requests keep coming."
    )


@pytest.mark.parametrize("fill", [continue_then_admit, decodes_first])
def test_running_requests_get_their_shares_before_waiting_ones(fill: Fill) -> None:
    scheduler = scheduler_of(4, num_blocks=20, max_num_seqs=4, max_num_batched_tokens=6)
    scheduler.fill = fill
    plan = scheduler.schedule()
    assert [(share.request_id, share.num_tokens) for share in plan.requests] == [("r0", 4)], (
        "a request has one share of a step: the token that it samples is known after it"
    )
    scheduler.add_request(Request(EngineRequest("r1", [*range(90, 110)], SamplingParams()), 1))
    for _ in range(3):
        scheduler.update_from_output(plan, ModelRunnerOutput({"r0": [SampledToken(5)]}))
        plan = scheduler.schedule()
        assert [(share.request_id, share.num_tokens) for share in plan.requests] == [
            ("r0", 1),
            ("r1", 5),
        ], "a long prompt gets what is left, and the output of r0 does not pause"


def admit_then_continue(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    scheduler.admit(plan)
    scheduler.continue_running(plan, scheduler.queues.running)


def test_invariants_find_a_second_share_and_a_share_without_blocks() -> None:
    scheduler = scheduler_of(4)
    scheduler.fill = admit_then_continue
    scheduler.schedule()
    with pytest.raises(AssertionError, match=r"two shares of a step: \['r0', 'r0'\]"):
        scheduler.check_invariants()
    scheduler = scheduler_of(4, 4, num_blocks=5)
    tokens = ModelRunnerOutput({name: [SampledToken(5)] for name in ("r0", "r1")})
    scheduler.update_from_output(scheduler.schedule(), tokens)
    scheduler.choose_victim = lambda request, num_tokens, running: running[0]
    scheduler.schedule()  # r0 gets the last block, and r1 needs one more
    with pytest.raises(AssertionError, match=r"whose blocks it takes away: \{'r0'\}"):
        scheduler.check_invariants()


def test_invariants_name_a_request_that_waits_and_keeps_its_count() -> None:
    scheduler, victim, _ = preempted("recompute", 0)
    victim.num_computed_tokens = 3
    with pytest.raises(AssertionError, match="r1 waits, but computed 3 tokens"):
        scheduler.check_invariants()


class Withholds(SchedulerHooks):
    """Gives one request no share."""

    def limit_share(self, request: Request, share: int, plan: SchedulerOutput) -> int:
        return 0 if request.request_id == "r0" else share


def test_blocks_are_not_swapped_in_a_plan_that_is_not_run() -> None:
    """A feature withholds the first request's share, and the second one finds no free block: its
    blocks would be given away without having been copied."""
    scheduler = scheduler_of(4, 4, num_blocks=4, host_blocks=8, preemption_mode="swap")
    tokens = {name: [SampledToken(5)] for name in ("r0", "r1")}
    scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(tokens))
    scheduler.hooks = SchedulerHookCalls([Withholds()])
    scheduler.fill = continue_then_admit
    with pytest.raises(InvariantError, match="an empty plan swaps blocks"):
        scheduler.schedule()
