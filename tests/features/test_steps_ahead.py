"""One step ahead, rule by rule: tokens that are pending, what may be planned with them, and which
results are taken."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.core.engine import EngineCore, EngineSettings, StepInFlight
from nanovllm.core.queues import Queues
from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import (
    ModelRunnerOutput,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from nanovllm.core.scheduler import Scheduler, continue_then_admit
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.resolved_config import resolve
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.features.async_scheduling import OneStepAhead
from nanovllm.features.data_parallel.lock_step import LOCK_STEP, LockStep
from nanovllm.features.decodes_first import continue_decoding, decodes_first
from nanovllm.features.step_time_limit import StepTimeLimit
from tests.core.test_scheduler import scheduler_of

# ---------------------------------------------------------------------- Scheduler.schedule, results


FILLS = pytest.mark.parametrize(
    "fill", [continue_then_admit, decodes_first], ids=["whole rule", "shortcut"]
)


@FILLS
def test_a_step_in_flight_is_remembered_with_its_pending_tokens(fill: Any) -> None:
    scheduler = scheduler_of(4, 6, 3, num_blocks=20, max_num_seqs=4, max_num_batched_tokens=12)
    scheduler.fill = fill
    requests = [scheduler.queues.requests[f"r{i}"] for i in range(3)]
    earlier = scheduler.schedule()
    assert [r.num_pending_tokens for r in requests] == [1, 1, 0], (
        "a step samples a token for r0 and r1; r2 misses one more token of its prompt"
    )
    assert [share.last_is_pending for share in earlier.requests] == [False, False, False]
    plan = scheduler.schedule()
    oldest, newest = scheduler.queues.in_flight
    assert oldest is earlier and newest is plan, "the oldest step comes first"
    assert [r.num_pending_tokens for r in requests] == [2, 2, 1]
    assert [share.last_is_pending for share in plan.requests] == [True, True, False], (
        "r0 has 4 known tokens, and this step computes its fifth, which is pending; r2's are known"
    )


# --------------------------------------------------------------------------------- Scheduler.share


def share(scheduler: Scheduler, planned: int = 0, **request: Any) -> int:
    """What r0 may compute, in a plan that has some tokens already."""
    plan, one = SchedulerOutput(), scheduler.queues.requests["r0"]
    plan.add(ScheduledRequest("another", 0, planned, [], []))
    for name, value in request.items():
        setattr(one, name, value)
    return scheduler.share(one, plan)


def test_a_request_gets_what_it_misses_and_the_budget_allows() -> None:
    scheduler = scheduler_of(10, max_num_seqs=4, max_num_batched_tokens=12)
    assert share(scheduler) == 10, "the whole prompt: the budget is 12, and nothing else needs it"
    assert share(scheduler, num_computed_tokens=7) == 3, "7 tokens are computed already"
    assert share(scheduler, planned=8, num_computed_tokens=0) == 4, "the rest of the budget"


def test_no_step_has_more_tokens_of_a_prompt_than_the_threshold() -> None:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "long_prefill_token_threshold": 3}
    scheduler = scheduler_of(10, **sizes)
    assert share(scheduler) == 3, "no more per step"
    assert share(scheduler, planned=10) == 2, "the budget is a limit, too"


def test_without_chunks_a_prompt_is_computed_whole_or_not_at_all() -> None:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "enable_chunked_prefill": False}
    scheduler = scheduler_of(10, max_model_len=12, **sizes)
    assert share(scheduler) == 10 and share(scheduler, planned=2) == 10, "the whole prompt fits"
    assert share(scheduler, planned=3) == 0, "9 of 10 tokens fit, and they would be a chunk"


def test_a_pending_token_may_be_computed_unless_it_is_the_last() -> None:
    scheduler = scheduler_of(10, num_blocks=10, max_num_seqs=4, max_num_batched_tokens=12)
    pending = {"num_computed_tokens": 10, "num_pending_tokens": 1}
    assert share(scheduler, **pending) == 1, "the plan needs the number of tokens, not their values"
    one = scheduler.queues.requests["r0"]
    one.token_ids += [0] * 8  # 8 of 9 output tokens are known
    assert share(scheduler, num_computed_tokens=18, num_pending_tokens=1) == 0, (
        "the pending token is the ninth and last: a step after it would sample a tenth, wasted"
    )
    assert share(scheduler, num_computed_tokens=17, num_pending_tokens=0) == 1, (
        "8 are known, and none is pending"
    )


def test_a_pipeline_waits_for_pending_tokens() -> None:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "pipeline_parallel_size": 2}
    scheduler = scheduler_of(10, **sizes)
    assert share(scheduler, num_computed_tokens=10, num_pending_tokens=1) == 0
    assert share(scheduler, num_computed_tokens=9, num_pending_tokens=0) == 1


def test_prompts_share_what_the_plan_allows_them() -> None:
    scheduler = scheduler_of(10, max_num_seqs=4, max_num_batched_tokens=12, max_step_ms=20)
    (limit,) = (each for each in scheduler.features if isinstance(each, StepTimeLimit))
    limit._max_prefill_tokens = 6
    plan, one = SchedulerOutput(num_prefill_tokens=2), scheduler.queues.requests["r0"]
    assert scheduler.share(one, plan) == 4, "other prompts have 2 of 6 tokens already"
    one.num_computed_tokens, one.num_pending_tokens, plan.num_prefill_tokens = 10, 1, 6
    assert scheduler.share(one, plan) == 1, "a request that decodes is no prompt"


# ------------------------------------------------------------------------------------ OneStepAhead


def one_step_ahead(needs_tokens: bool = False) -> tuple[OneStepAhead, Request, Request]:
    """The feature, a running request and a waiting one."""
    queues = Queues()
    running, waiting = (Request(EngineRequest(f"r{i}", [i], SamplingParams()), i) for i in range(2))
    queues.add(running)
    queues.add(waiting)
    queues.move(running, RequestStatus.RUNNING)
    return OneStepAhead(queues, needs_tokens), running, waiting


def test_a_step_is_planned_ahead_if_no_request_looks_back() -> None:
    feature, running, waiting = one_step_ahead()
    running.num_pending_tokens = 1
    waiting.looks_back = True
    waiting.num_pending_tokens = 1
    assert feature.may_plan(), "the plan needs the number of tokens; and r1 does not run"
    running.looks_back = True
    assert not feature.may_plan(), "the penalties of the next token depend on the pending one"
    running.num_pending_tokens = 0
    assert feature.may_plan(), "no token is pending"


def test_drafts_need_every_token() -> None:
    feature, running, _ = one_step_ahead(needs_tokens=True)
    assert feature.may_plan(), "no token is pending"
    running.num_pending_tokens = 1
    assert not feature.may_plan()


def test_a_request_is_admitted_when_its_tokens_are_known() -> None:
    feature, _, waiting = one_step_ahead()
    assert feature.why_not(waiting, SchedulerOutput()) == ""
    waiting.num_pending_tokens = 1
    assert feature.why_not(waiting, SchedulerOutput()) != "", (
        "it was preempted while a step in flight samples its token"
    )


def test_no_token_is_sampled_before_those_that_it_depends_on() -> None:
    scheduler = scheduler_of(4, 4, max_num_seqs=4, async_scheduling=True)
    scheduler.fill = continue_then_admit
    scheduler.queues.requests["r0"].looks_back = True
    first = scheduler.schedule()
    ahead = scheduler.schedule()
    assert "r0" not in [share.request_id for share in ahead.requests], (
        "r0 has a penalty: its next token cannot be sampled before the pending one is known"
    )
    tokens = {name: [SampledToken(5)] for name in ("r0", "r1")}
    scheduler.update_from_output(first, ModelRunnerOutput(tokens))
    assert "r0" in [share.request_id for share in scheduler.schedule().requests], (
        "its token has come, so none is pending, and r0 continues"
    )


def test_the_plan_is_empty_until_the_result_has_come() -> None:
    scheduler = scheduler_of(4, max_num_seqs=4, async_scheduling=True)
    scheduler.queues.requests["r0"].looks_back = True
    first = scheduler.schedule()
    assert scheduler.schedule().empty, (
        "r0 has a penalty: its next token cannot be sampled before the pending one is known"
    )
    scheduler.update_from_output(first, ModelRunnerOutput({"r0": [SampledToken(5)]}))
    shares = [share.new_token_ids for share in scheduler.schedule().requests]
    assert shares == [[5]], "the token has come, so no token of r0 is pending, and it continues"


# -------------------------------------------------------------------------------- continue_decoding


class Counts:
    """Fills plans by the shortcut, and counts its shares."""

    shares = served = 0  # of all plans, and by the shortcut

    def fill(self, scheduler: Scheduler, plan: SchedulerOutput) -> None:
        rest = continue_decoding(scheduler, plan)
        self.served += len(plan.requests)
        scheduler.continue_running(plan, rest)
        scheduler.admit(plan)


def plans_of_a_life(seed: int, fill: Any = None, counts: Counts | None = None) -> tuple[Any, Any]:
    """All plans and outputs of a random workload in a small pool, and its scheduler.

    Args:
        fill: fills the plans; by default the scheduler's own choice.
        counts: counts all shares, and fills the plans where the scheduler chooses the shortcut.
    """
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
    resolved = resolve(
        config, model_max_len=40, num_kv_blocks=num_blocks, num_host_blocks=draw.choice([0, 20])
    )
    scheduler = create_scheduler(resolved, create_manager(resolved))
    assert (scheduler.fill is decodes_first) == (stages == 1)
    if counts is not None and stages == 1:
        scheduler.fill = counts.fill
    scheduler.fill = fill or scheduler.fill
    longest = resolved.max_request_tokens - 1
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
        sizes = (
            plan.num_tokens,
            plan.num_samples,
            plan.num_prefill_tokens,
            plan.token_budget,
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
        seen.append((shares, marks, sizes, changes))
        if counts is not None:
            counts.shares += len(plan.requests)
        if not plan.empty:
            in_flight.append(plan)
        assert in_flight, "requests wait, and no step is in flight"
        if plan.empty or len(in_flight) > ahead:
            done = in_flight.popleft()
            tokens = {
                share.request_id: [SampledToken(draw.randint(0, 30))]
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
    whole, _ = plans_of_a_life(seed, continue_then_admit)
    short, _ = plans_of_a_life(seed)
    assert short == whole


def test_the_shortcut_serves_requests_in_these_lives() -> None:
    counts = Counts()
    schedulers = [plans_of_a_life(seed, counts=counts)[1] for seed in range(60)]
    assert counts.served > counts.shares / 4
    assert sum(scheduler.num_preemptions for scheduler in schedulers) > 20


# --------------------------------------------------------------------- EngineCore.take_results


class Core(EngineCore):
    """An engine with three steps in flight, which took 1, 2 and 3 seconds, one after the other."""

    has_work = True  # type: ignore[assignment]

    def __init__(self, num_steps: int = 3, **settings: Any) -> None:
        self.events, self.clock = list[Any](), 0.0
        self.times = list[Any]()
        scheduler = SimpleNamespace(
            update_from_output=self.update,
            check_invariants=lambda: self.events.append("checked"),
            took=lambda plan, seconds: self.times.append((plan, round(seconds, 6))),
        )
        super().__init__(scheduler, SimpleNamespace(), EngineSettings(**settings))  # type: ignore[arg-type]
        self.recorder = SimpleNamespace(finish=lambda *what: self.events.append(what[:2]))  # type: ignore[assignment]
        self.plans = [SchedulerOutput() for _ in range(num_steps)]
        self._in_flight = deque(
            StepInFlight(plan, self.waiting(i), None, float(i) / 10, True)
            for i, plan in enumerate(self.plans)
        )

    def waiting(self, number: int) -> Any:
        def wait() -> Any:
            self.clock += number + 1
            return SimpleNamespace(number=number)

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


@pytest.mark.parametrize(("is_one", "seconds"), [(True, [1, 2, 3]), (False, [1, 2.9, 5.8])])
def test_a_step_begins_when_the_device_is_free(is_one: bool, seconds: list[float]) -> None:
    core = Core(is_one_device=is_one, check_invariants=True)
    for _ in range(3):
        core.take_results()
    times = [event[1] for event in core.events if event != "checked"]
    assert times == seconds, f"seconds of each step in the record, with is_one_device={is_one}"
    assert core.times == list(zip(core.plans, seconds, strict=True)), "the scheduler learns them"
    assert core.events.count("checked") == 3, "the invariants hold after each step"


def test_a_failed_step_ends_no_wave_later() -> None:
    lock_step = LockStep(Queues())
    lock_step.waves.start(0)
    lock_step.launching(SchedulerOutput())
    lock_step.forget_requests()
    lock_step.waves.end(0)
    lock_step.waves.start(1)
    lock_step.launching(plan := SchedulerOutput())
    lock_step.arrived(plan, ModelRunnerOutput(extras={LOCK_STEP: False}))
    assert lock_step.waves.ended == 2, "the wave of this step, not that of the step that failed"


def test_an_engine_says_that_it_has_requests_until_they_have_ended() -> None:
    scheduler = scheduler_of(4)
    lock_step = LockStep(scheduler.queues)

    def says() -> bool:
        lock_step.launching(plan := SchedulerOutput())
        return bool(plan.extras[LOCK_STEP])

    assert says(), "r0 waits: without this engine's word the wave may end before r0 has begun"
    scheduler.schedule()
    assert says(), "r0 runs: if its engine says that it has none, a wave may end before r0 has"
    scheduler.abort_request("r0")
    assert not says(), "it has no request: if it says that it has one, the wave never ends"


def test_a_wave_ends_when_no_engine_has_requests() -> None:
    lock_step = LockStep(Queues())
    for wave in range(5):
        lock_step.waves.end(wave)
    lock_step.waves.start(5)
    plans = [SchedulerOutput() for _ in range(2)]
    for plan in plans:
        lock_step.launching(plan)
    lock_step.arrived(plans[0], ModelRunnerOutput(extras={LOCK_STEP: True}))
    assert lock_step.waves.running and lock_step.waves.ended == 5, (
        "an engine has requests, perhaps another one: all of them need this engine's experts"
    )
    lock_step.arrived(plans[1], ModelRunnerOutput(extras={LOCK_STEP: False}))
    assert not lock_step.waves.running, "the wave in which the step was launched has ended"
    assert lock_step.waves.ended == 6
