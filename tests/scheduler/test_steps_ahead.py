"""One step ahead, rule by rule: tokens that are pending, what may be planned with them, and which results are taken."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.data.schedule import ScheduledRequest, SchedulerOutput
from nanovllm.engine.core import EngineCore, StepInFlight
from nanovllm.scheduler.scheduler import Scheduler
from tests.scheduler.test_scheduler import scheduler_of

# ------------------------------------------------------------------------------------------- Scheduler._expect


def test_a_step_in_flight_is_remembered_with_its_pending_tokens() -> None:
    scheduler = scheduler_of(4, 6, 3)
    r0, r1, r2 = (scheduler.requests[f"r{i}"] for i in range(3))
    r0.num_computed_tokens, r1.num_computed_tokens, r2.num_computed_tokens = 4, 5, 4  # with this step
    r2.num_pending_tokens = 1
    plan = SchedulerOutput()
    plan.add(ScheduledRequest("r0", 0, 4, [], [], samples=True))
    plan.add(ScheduledRequest("r1", 0, 5, [], [], samples=False))
    plan.add(ScheduledRequest("r2", 3, 1, [], [], samples=True))
    earlier = SchedulerOutput()
    scheduler._steps_in_flight = (earlier,)
    scheduler._expect(plan)
    assert scheduler._steps_in_flight == (earlier, plan), "the oldest step comes first"
    assert [r.num_pending_tokens for r in (r0, r1, r2)] == [1, 0, 2], "a step samples a token for r0 and r2"
    assert [share.last_is_pending for share in plan.requests] == [False, False, True], (
        "r2 has 3 known tokens, and this step computes its fourth, which is pending"
    )


# -------------------------------------------------------------------------------------------- Scheduler._share


def share(scheduler: Scheduler, planned: int = 0, **request: Any) -> int:
    """What r0 may compute, in a plan that has some tokens already."""
    plan, one = SchedulerOutput(), scheduler.requests["r0"]
    plan.add(ScheduledRequest("another", 0, planned, [], []))
    for name, value in request.items():
        setattr(one, name, value)
    return scheduler._share(one, plan)


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
    assert share(scheduler, num_computed_tokens=17, num_pending_tokens=0) == 1, "8 are known, and none is pending"


def test_a_pipeline_waits_for_pending_tokens() -> None:
    scheduler = scheduler_of(10, max_num_seqs=4, max_num_batched_tokens=12)
    scheduler.config.pipeline_parallel_size = 2
    assert share(scheduler, num_computed_tokens=10, num_pending_tokens=1) == 0
    assert share(scheduler, num_computed_tokens=9, num_pending_tokens=0) == 1


def test_prompts_share_what_the_plan_allows_them() -> None:
    scheduler = scheduler_of(10, max_num_seqs=4, max_num_batched_tokens=12)
    plan, one = SchedulerOutput(max_prefill_tokens=6, num_prefill_tokens=2), scheduler.requests["r0"]
    assert scheduler._share(one, plan) == 4, "other prompts have 2 of 6 tokens already"
    one.num_computed_tokens, one.num_pending_tokens, plan.num_prefill_tokens = 10, 1, 6
    assert scheduler._share(one, plan) == 1, "a request that decodes is no prompt"


# ------------------------------------------------------------------------------------- EngineCore._take_results


class Core(EngineCore):
    """An engine with three steps in flight, which took 1, 2 and 3 seconds, one after the other."""

    has_work = True  # type: ignore[assignment]

    def __init__(self, num_steps: int = 3, **config: Any) -> None:
        self.events, self.clock = list[Any](), 0.0
        self.config = SimpleNamespace(**({"async_scheduling": True, "check_invariants": False} | config))  # type: ignore[assignment]
        self.waves = None
        self.times = list[Any]()
        self.scheduler = SimpleNamespace(  # type: ignore[assignment]
            update_from_output=self.update,
            check_invariants=lambda: self.events.append("checked"),
            step_times=SimpleNamespace(add=lambda plan, seconds: self.times.append((plan, round(seconds, 6)))),
        )
        self._recorder = SimpleNamespace(finish=lambda *what: self.events.append(what[:2]))  # type: ignore[assignment]
        self.plans = [SchedulerOutput() for _ in range(num_steps)]
        steps = [StepInFlight(plan, self.waiting(i), None, float(i) / 10, 5) for i, plan in enumerate(self.plans)]
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
    assert core._take_results(keep=3) == [], "so many may stay in flight"
    assert core._take_results(keep=2) == ["tokens of step 0"] and len(core._in_flight) == 2
    assert core._take_results() == ["tokens of step 1"] and len(core._in_flight) == 1
    assert Core(0)._take_results() == []


def test_the_last_steps_are_all_taken_when_no_further_step_will_come() -> None:
    core = Core()
    core.has_work = False  # type: ignore[misc]
    assert core._take_results(keep=2) == [f"tokens of step {i}" for i in range(3)], (
        "without work `step` is not called any more"
    )
    assert not core._in_flight


@pytest.mark.parametrize(("is_async", "seconds"), [(True, [1, 2, 3]), (False, [1, 2.9, 5.8])])
def test_a_step_begins_when_the_device_is_free(is_async: bool, seconds: list[float]) -> None:
    core = Core(async_scheduling=is_async, check_invariants=True)
    for _ in range(3):
        core._take_results()
    times = [event[1] for event in core.events if event != "checked"]
    assert times == seconds, f"seconds of each step in the record, with async_scheduling={is_async}"
    assert core.times == list(zip(core.plans, seconds, strict=True)), "the scheduler learns them"
    assert core.events.count("checked") == 3, "the invariants hold after each step"


def test_a_wave_ends_when_no_engine_has_requests() -> None:
    core, ended = Core(), list[int]()
    core.waves = SimpleNamespace(end=ended.append)  # type: ignore[assignment]
    core._take_results()
    assert ended == []
    core._take_results()
    assert ended == [5], "the wave in which the step was launched"
