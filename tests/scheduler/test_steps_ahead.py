"""One step ahead, rule by rule: tokens that are pending, what may be planned with them, and which
results are taken."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest, Request
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.schedule import (
    ModelRunnerOutput,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from nanovllm.engine.core import EngineCore, StepInFlight
from nanovllm.kv.manager import KVCacheManager
from nanovllm.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import scheduler_of

# ------------------------------------------------------------------------ Scheduler.mark_in_flight


def test_a_step_in_flight_is_remembered_with_its_pending_tokens() -> None:
    scheduler = scheduler_of(4, 6, 3)
    r0, r1, r2 = (scheduler.requests[f"r{i}"] for i in range(3))
    # With this step.
    r0.num_computed_tokens, r1.num_computed_tokens, r2.num_computed_tokens = (4, 5, 4)
    r2.num_pending_tokens = 1
    plan = SchedulerOutput()
    plan.add(ScheduledRequest("r0", 0, 4, [], [], samples=True))
    plan.add(ScheduledRequest("r1", 0, 5, [], [], samples=False))
    plan.add(ScheduledRequest("r2", 3, 1, [], [], samples=True))
    earlier = SchedulerOutput()
    scheduler.steps_in_flight = (earlier,)
    scheduler.mark_in_flight(plan)
    assert scheduler.steps_in_flight == (earlier, plan), "the oldest step comes first"
    assert [r.num_pending_tokens for r in (r0, r1, r2)] == [1, 0, 2], (
        "a step samples a token for r0 and r2"
    )
    assert [share.last_is_pending for share in plan.requests] == [False, False, True], (
        "r2 has 3 known tokens, and this step computes its fourth, which is pending"
    )


def test_shares_that_are_counted_already_are_not_counted_again() -> None:
    scheduler = scheduler_of(4, 6)
    plan = SchedulerOutput()
    for i in range(2):
        plan.add(ScheduledRequest(f"r{i}", 0, 4, [], [], samples=True))
    scheduler.mark_in_flight(plan, 1)
    assert scheduler.steps_in_flight == (plan,)
    assert [r.num_pending_tokens for r in scheduler.requests.values()] == [0, 1]


# --------------------------------------------------------------------------------- Scheduler.share


def share(scheduler: Scheduler, planned: int = 0, **request: Any) -> int:
    """What r0 may compute, in a plan that has some tokens already."""
    plan, one = SchedulerOutput(), scheduler.requests["r0"]
    plan.add(ScheduledRequest("another", 0, planned, [], []))
    for name, value in request.items():
        setattr(one, name, value)
    return scheduler.share(one, plan)


def test_a_request_gets_what_it_misses_and_the_budget_allows() -> None:
    scheduler = scheduler_of(10, max_num_seqs=4, max_num_batched_tokens=12)
    assert share(scheduler) == 10
    assert share(scheduler, num_computed_tokens=7) == 3, "7 tokens are computed already"
    assert share(scheduler, planned=8, num_computed_tokens=0) == 4, "the rest of the budget"
    scheduler.config.long_prefill_token_threshold = 3
    assert share(scheduler) == 3, "no more per step"
    assert share(scheduler, planned=10) == 2, "the budget is a limit, too"


def test_without_chunks_a_prompt_is_computed_whole_or_not_at_all() -> None:
    scheduler = scheduler_of(10, max_num_seqs=4, max_num_batched_tokens=12)
    scheduler.config.enable_chunked_prefill = False
    assert share(scheduler) == 10 and share(scheduler, planned=2) == 10
    assert share(scheduler, planned=3) == 0


def test_a_pending_token_may_be_computed_unless_it_is_the_last() -> None:
    scheduler = scheduler_of(10, num_blocks=10, max_num_seqs=4, max_num_batched_tokens=12)
    pending = {"num_computed_tokens": 10, "num_pending_tokens": 1}
    assert share(scheduler, **pending) == 1, "the plan needs the number of tokens, not their values"
    one = scheduler.requests["r0"]
    one.token_ids += [0] * 8  # 8 of 9 output tokens are known
    assert share(scheduler, num_computed_tokens=18, num_pending_tokens=1) == 0, (
        "the pending token is the ninth, and last"
    )
    assert share(scheduler, num_computed_tokens=17, num_pending_tokens=0) == 1, (
        "8 are known, and none is pending"
    )


def test_a_pipeline_waits_for_pending_tokens() -> None:
    scheduler = scheduler_of(10, max_num_seqs=4, max_num_batched_tokens=12)
    scheduler.config.pipeline_parallel_size = 2
    assert share(scheduler, num_computed_tokens=10, num_pending_tokens=1) == 0
    assert share(scheduler, num_computed_tokens=9, num_pending_tokens=0) == 1


def test_prompts_share_what_the_plan_allows_them() -> None:
    scheduler = scheduler_of(10, max_num_seqs=4, max_num_batched_tokens=12)
    plan, one = (
        SchedulerOutput(max_prefill_tokens=6, num_prefill_tokens=2),
        scheduler.requests["r0"],
    )
    assert scheduler.share(one, plan) == 4, "other prompts have 2 of 6 tokens already"
    one.num_computed_tokens, one.num_pending_tokens, plan.num_prefill_tokens = 10, 1, 6
    assert scheduler.share(one, plan) == 1, "a request that decodes is no prompt"


# --------------------------------------------------------------------- Scheduler._continue_decoding


class WholeRule(Scheduler):
    def _continue_decoding(self, plan: SchedulerOutput) -> list[Request]:
        return self.running


class Counts(Scheduler):
    shares = served = 0  # of all plans, and by the shortcut

    def _continue_decoding(self, plan: SchedulerOutput) -> list[Request]:
        rest = super()._continue_decoding(plan)
        self.served += len(plan.requests)
        return rest

    def schedule(self) -> SchedulerOutput:
        plan = super().schedule()
        self.shares += len(plan.requests)
        return plan


def plans_of_a_life(kind: type[Scheduler], seed: int) -> tuple[list[Any], Any]:
    """All plans and outputs of a random workload in a small pool, and its scheduler."""
    draw = random.Random(seed)
    block_size, num_blocks, stages = (
        draw.choice([1, 2, 4, 16]),
        draw.choice([12, 40]),
        draw.choice([1, 1, 1, 2]),
    )
    ahead = stages - 1 or draw.randint(0, 1)
    config = EngineConfig(
        block_size=block_size,
        num_kv_blocks=num_blocks,
        pipeline_parallel_size=stages,
        max_num_seqs=draw.choice([3, 8]),
        max_num_batched_tokens=draw.choice([8, 16, 64]),
        long_prefill_token_threshold=draw.choice([0, 3]),
        max_step_ms=draw.choice([0, 20]),
        preemption_mode=draw.choice(["recompute", "swap"]),
        enable_prefix_caching=draw.random() < 0.7,
    )
    config.settle(40, num_blocks)
    scheduler = kind(
        config,
        KVCacheManager(num_blocks, block_size, config.enable_prefix_caching, draw.choice([0, 20])),
    )
    longest = config.max_request_tokens - 1
    for i in range(10):
        params = SamplingParams(
            max_tokens=draw.randint(1, 20), min_tokens=draw.choice([0, 1]), stop_token_ids=[5]
        )
        prompt = [draw.randint(0, 9) for _ in range(min(draw.randint(1, 12), longest))]
        scheduler.add_request(
            Request(EngineRequest(f"r{i}", prompt, params, [7], draw.choice([0, 0, 1])), i)
        )
    seen, in_flight = list[Any](), deque[SchedulerOutput]()
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        shares = [
            [*msgspec.structs.astuple(share)[:4], *share.new_block_ids] for share in plan.requests
        ]
        marks = [(share.samples, share.last_is_pending) for share in plan.requests]
        counts = (
            plan.num_tokens,
            plan.num_samples,
            plan.num_prefill_tokens,
            plan.max_prefill_tokens,
            plan.blocked_by,
        )
        changes = (
            plan.removed_ids,
            plan.preempted,
            plan.admitted,
            plan.resumed,
            plan.swap_out,
            plan.swap_in,
        )
        seen.append((shares, marks, counts, changes))
        if not plan.empty:
            in_flight.append(plan)
        assert in_flight, "requests wait, and no step is in flight"
        if plan.empty or len(in_flight) > ahead:
            done = in_flight.popleft()
            tokens = {
                share.request_id: SampledToken(draw.randint(0, 30))
                for share in done.requests
                if share.samples
            }
            outputs = scheduler.update_from_output(done, ModelRunnerOutput(tokens))
            seen += [
                (o.request_id, o.new_token_ids, o.finish_reason, o.stop_reason) for o in outputs
            ]
        scheduler.check_invariants()
    return seen, scheduler


@pytest.mark.parametrize("seed", range(60))
def test_the_shortcut_plans_what_the_whole_rule_plans(seed: int) -> None:
    """Chunks, priorities, both kinds of preemption, swapping, pipelines, stop tokens, in turn and
    one step ahead."""
    whole, _ = plans_of_a_life(WholeRule, seed)
    short, _ = plans_of_a_life(Scheduler, seed)
    assert short == whole


def test_the_shortcut_serves_requests_in_these_lives() -> None:
    schedulers = [plans_of_a_life(Counts, seed)[1] for seed in range(60)]
    assert (
        sum(scheduler.served for scheduler in schedulers)
        > sum(scheduler.shares for scheduler in schedulers) / 4
    )
    assert sum(scheduler.num_preemptions for scheduler in schedulers) > 20


# ------------------------------------------------------------------------- EngineCore.take_results


class Core(EngineCore):
    """An engine with three steps in flight, which took 1, 2 and 3 seconds, one after the other."""

    has_work = True  # type: ignore[assignment]

    def __init__(self, num_steps: int = 3, **config: Any) -> None:
        self.events, self.clock = list[Any](), 0.0
        self.config = SimpleNamespace(
            **({"async_scheduling": True, "check_invariants": False} | config)
        )  # type: ignore[assignment]
        self.waves = None
        self._last_results = 0.0
        self.times = list[Any]()
        self.scheduler = SimpleNamespace(  # type: ignore[assignment]
            update_from_output=self.update,
            check_invariants=lambda: self.events.append("checked"),
            speculation=None,
            step_times=SimpleNamespace(
                add=lambda plan, seconds: self.times.append((plan, round(seconds, 6)))
            ),
        )
        self.recorder = SimpleNamespace(finish=lambda *what: self.events.append(what[:2]))  # type: ignore[assignment]
        self.plans = [SchedulerOutput() for _ in range(num_steps)]
        steps = [
            StepInFlight(plan, self.waiting(i), None, float(i) / 10, 5)
            for i, plan in enumerate(self.plans)
        ]
        self._in_flight = deque(steps)

    def waiting(self, number: int) -> Any:
        def wait() -> Any:
            self.clock += number + 1
            return SimpleNamespace(number=number, anyone_unfinished=number == 0)

        return wait

    def update(self, plan: SchedulerOutput, result: Any) -> Any:
        assert plan is self.plans[result.number], "a result belongs to the plan of its step"
        return [f"tokens of step {result.number}"]

    def _now(self) -> float:
        return self.clock


def test_only_the_oldest_step_is_waited_for() -> None:
    core = Core()
    assert core.take_results(keep=3) == [], "so many may stay in flight"
    assert core.take_results(keep=2) == ["tokens of step 0"]
    assert core.take_results(keep=2) == [], "two are left"
    assert core.take_results() == ["tokens of step 1"]
    assert core.take_results(keep=1) == [] and core.take_results() == ["tokens of step 2"]
    assert Core(0).take_results() == []


def test_the_last_steps_are_all_taken_when_no_further_step_will_come() -> None:
    core = Core()
    core.has_work = False  # type: ignore[misc]
    assert core.take_results(keep=2) == [f"tokens of step {i}" for i in range(3)], (
        "without work `step` is not called any more"
    )
    assert core.take_results() == [], "none is left"


@pytest.mark.parametrize(("is_async", "seconds"), [(True, [1, 2, 3]), (False, [1, 2.9, 5.8])])
def test_a_step_begins_when_the_device_is_free(is_async: bool, seconds: list[float]) -> None:
    core = Core(async_scheduling=is_async, check_invariants=True)
    for _ in range(3):
        core.take_results()
    times = [event[1] for event in core.events if event != "checked"]
    assert times == seconds, f"seconds of each step in the record, with async_scheduling={is_async}"
    assert core.times == list(zip(core.plans, seconds, strict=True)), "the scheduler learns them"
    assert core.events.count("checked") == 3, "the invariants hold after each step"


def test_a_wave_ends_when_no_engine_has_requests() -> None:
    core, ended = Core(), list[int]()
    core.waves = SimpleNamespace(end=ended.append)  # type: ignore[assignment]
    core.take_results()
    assert ended == []
    core.take_results()
    assert ended == [5], "the wave in which the step was launched"
