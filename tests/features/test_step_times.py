"""`max_step_ms`: what `StepTimes` learns from steps that ran, and how the scheduler obeys its
prediction."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.core.request import Request
from nanovllm.core.schedule import (
    ModelRunnerOutput,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.features.step_time_limit import StepTimeLimit
from nanovllm.features.step_times import CHUNK, StepTimes
from tests.core.test_scheduler import scheduler_of

# ---------------------------------------------------------------------------------------- the model

BASES = st.floats(0.001, 0.1)
SLOPES = st.floats(0.00002, 0.005)  # seconds per prompt token
SIZES = st.integers(CHUNK, 2048)


def step(prefill: int, decodes: int = 1) -> SchedulerOutput:
    plan = SchedulerOutput(num_prefill_tokens=prefill)
    plan.add(ScheduledRequest("r", 0, prefill + decodes, [], []))
    return plan


def learned(base: float, slope: float, sizes: list[int], noise: list[float] = [1.0]) -> StepTimes:  # noqa: B006
    """From 31 decode steps, and from steps with prompts, on a machine that takes `base` and
    `slope`, times some noise."""
    times = StepTimes()
    for i in range(31):
        times.add(step(0), base * noise[i % len(noise)])
    for i, size in enumerate(sizes):
        times.add(step(size), (base + slope * size) * noise[-1 - i % len(noise)])
    return times


@given(BASES, SLOPES, st.lists(SIZES, min_size=1, max_size=9), st.floats(0, 0.5))
def test_the_largest_step_that_fits_is_found(
    base: float, slope: float, sizes: list[int], room: float
) -> None:
    # The prompt is at least half of each step.
    sizes = [max(size, int(base / slope) + 1) for size in sizes]
    tokens = learned(base, slope, sizes).prefill_tokens(base + room)
    assert tokens >= CHUNK and tokens % CHUNK == 0
    assert tokens == CHUNK or slope * tokens <= room * 1.001, "the step would take too long"
    assert slope * (tokens + CHUNK) >= room * 0.999, "a larger step would fit"


@given(
    BASES,
    SLOPES,
    st.lists(SIZES, min_size=3, max_size=3),
    st.permutations(range(31)),
    st.permutations(range(5)),
    st.lists(st.floats(0, 30), min_size=17, max_size=17),
)
def test_steps_that_were_disturbed_change_nothing_while_they_are_fewer(
    base: float,
    slope: float,
    sizes: list[int],
    decodes: list[int],
    prompts: list[int],
    wrong: list[float],
) -> None:
    # The prompt is at least half of each step.
    sizes = [max(size, int(base / slope) + 1) for size in sizes]
    expected, times = learned(base, slope, sizes), StepTimes()
    for i in decodes:  # 15 of 31 took some other time
        times.add(step(0), wrong[i] if i < 15 else base)
    assert times.base == base
    for i in prompts:  # and so did 2 of 5
        (
            times.add(step(512), wrong[15 + i])
            if i < 2
            else times.add(step(sizes[i - 2]), base + slope * sizes[i - 2])
        )
    assert times.per_token == pytest.approx(slope)
    for limit in (0.05, 0.2, 1.0):
        assert abs(times.prefill_tokens(limit) - expected.prefill_tokens(limit)) <= CHUNK


@given(
    BASES,
    SLOPES,
    st.lists(SIZES, min_size=5, max_size=5),
    st.lists(st.floats(0.9, 1.1), min_size=36, max_size=36),
    st.floats(0.01, 1),
)
def test_a_limit_holds_roughly_on_a_noisy_machine(
    base: float, slope: float, sizes: list[int], noise: list[float], room: float
) -> None:
    # The prompt is at least half of each step.
    sizes = [max(size, int(base / slope) + 1) for size in sizes]
    tokens, limit = learned(base, slope, sizes, noise).prefill_tokens(base + room), base + room
    assert tokens == CHUNK or base + slope * tokens <= 1.5 * limit


def test_a_machine_that_slows_down_is_noticed() -> None:
    times = learned(0.01, 0.0005, [512] * 5)
    assert times.prefill_tokens(0.2) == 352  # 380 would take 0.2 s
    for _ in range(16):
        times.add(step(0), 0.03)
    for _ in range(3):
        times.add(step(256), 0.03 + 256 * 0.0015)
    assert times.prefill_tokens(0.2) == 96  # 113 would
    assert times.prefill_tokens(0.001) == CHUNK, "prompts make progress whatever the limit"


def test_the_first_limited_step_is_small_and_the_next_one_is_informed() -> None:
    times = StepTimes()
    assert times.prefill_tokens(10.0) == CHUNK
    times.add(SchedulerOutput(), 9.0)  # a dummy, which waited for other engines
    times.add(step(CHUNK - 1), 9.0)  # says too little
    assert times.base == 0 and times.prefill_tokens(10.0) == CHUNK
    times.add(step(CHUNK), CHUNK * 0.001)
    assert times.prefill_tokens(0.64) == 640


@given(st.floats(0.002, 0.05), st.floats(0.00001, 0.001), st.floats(1.05, 10))
def test_prompt_tokens_that_seem_to_cost_nothing_do_not_open_the_gate(
    base: float, slope: float, ratio: float
) -> None:
    """On a machine that needs the longer of two times, one for the weights and one for the tokens,
    which is no straight line."""
    times, limit = StepTimes(), base * ratio
    times.add(step(0), base)
    for number in range(40):
        tokens = times.prefill_tokens(limit)
        seconds = max(base, slope * tokens)
        assert tokens == CHUNK or seconds <= limit * (2 if number < 12 else 1.5)
        times.add(step(tokens), seconds)


# ------------------------------------------------------------------------------ the scheduler obeys


class Says(StepTimes):
    """Predicts that a step with so many prompt tokens takes as long as it may."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def prefill_tokens(self, seconds: float) -> int:
        assert seconds == 0.05, "seconds, not milliseconds"
        return self.tokens


def limited(*prompts: int, tokens: int, **options: Any) -> Scheduler:
    scheduler = scheduler_of(
        *prompts, num_blocks=64, **{"max_step_ms": 50, "max_num_seqs": 4} | options
    )
    for feature in scheduler.features:
        if isinstance(feature, StepTimeLimit):
            feature.step_times = Says(tokens)
    return scheduler


def add(scheduler: Scheduler, name: str, length: int, priority: int = 0) -> Request:
    """One more request, with a prompt that no other one begins with."""
    tokens, number = [ord(name[0])] * length, len(scheduler.queues.requests) + 1
    request = Request(
        EngineRequest(name, tokens, SamplingParams(max_tokens=9), priority=priority), number
    )
    scheduler.add_request(request)
    return request


def run_step(scheduler: Scheduler) -> tuple[SchedulerOutput, dict[str, int]]:
    """One step, in which every request that may samples a 7; also each request's share."""
    plan = scheduler.schedule()
    scheduler.update_from_output(
        plan,
        ModelRunnerOutput({r.request_id: [SampledToken(7)] for r in plan.requests if r.samples}),
    )
    scheduler.check_invariants()
    return plan, {r.request_id: r.num_tokens for r in plan.requests}


def test_a_step_without_decoding_requests_gets_the_whole_budget() -> None:
    scheduler = limited(30, 20, tokens=4)
    plan, shares = run_step(scheduler)
    assert shares == {"r0": 30, "r1": 20} and plan.num_prefill_tokens == 50, (
        "no request decodes yet"
    )


def test_beside_decoding_requests_prompts_get_what_should_fit() -> None:
    scheduler = limited(3, tokens=4)
    run_step(scheduler)
    add(scheduler, "a", 9)
    add(scheduler, "b", 2)
    found = [run_step(scheduler) for _ in range(4)]
    assert [shares for _, shares in found] == [
        {"r0": 1, "a": 4},
        {"r0": 1, "a": 4},
        {"r0": 1, "a": 1, "b": 2},
        {"r0": 1, "a": 1, "b": 1},
    ]
    assert [plan.blocked_by for plan, _ in found] == ["max_step_ms", "max_step_ms", "", ""]


@pytest.mark.parametrize("max_step_ms", [None, 0])
def test_there_may_be_no_limit(max_step_ms: float | None) -> None:
    scheduler = limited(3, tokens=4, max_step_ms=max_step_ms)
    run_step(scheduler)
    add(scheduler, "late", 30)
    assert run_step(scheduler)[1] == {"r0": 1, "late": 30}


def test_a_prompt_in_front_leaves_decoding_requests_their_token() -> None:
    scheduler = limited(3, tokens=4, scheduling_policy="priority")
    run_step(scheduler)
    urgent = add(scheduler, "urgent", 30, priority=-1)
    run_step(scheduler)
    assert scheduler.queues.running[0] is urgent and run_step(scheduler)[1] == {
        "urgent": 4,
        "r0": 1,
    }


@pytest.mark.parametrize("policy", ["prefill_first", "static"])
def test_a_policy_that_never_mixes_keeps_whole_steps(policy: str) -> None:
    scheduler = limited(3, tokens=4, batching_policy=policy)
    run_step(scheduler)  # it has sampled one token: the static batch is still open
    add(scheduler, "late", 30)
    assert run_step(scheduler)[1] == {"late": 30}, "a step without decoding requests"


def test_no_prompt_starves() -> None:
    """While a request decodes, each step gives the first prompt that is not computed a share, and
    all end."""
    scheduler, prompts = limited(1, tokens=2), ["a", "b", "c"]
    run_step(scheduler)
    for length, name in enumerate(prompts, 7):
        add(scheduler, name, length)
    steps = 0
    while any(
        scheduler.queues.requests[name].num_output_tokens == 0
        for name in prompts
        if name in scheduler.queues.requests
    ):
        first = next(
            name for name in prompts if scheduler.queues.requests[name].num_output_tokens == 0
        )
        decoding = "r0" in scheduler.queues.requests
        plan, shares = run_step(scheduler)
        steps += 1
        assert shares[first] >= 1 and (plan.num_prefill_tokens <= 2 or not decoding)
        assert not decoding or "r0" in shares, "the decoding request goes on"
    assert steps <= 12  # 24 prompt tokens, 2 per step at least
