"""Several steps in flight, rule by rule; `tests/executor/test_pipeline_parallel` has the stages."""

from __future__ import annotations

import pytest

from nanovllm.core.queues import Queues
from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.distributed.pipeline_parallel import layer_range
from nanovllm.features.pipeline.scheduling import PipelineSteps
from tests.core.test_scheduler import scheduler_of


@pytest.mark.parametrize(
    ("num_layers", "stages", "sizes"),
    [
        (8, 1, [8]),
        (8, 4, [2, 2, 2, 2]),
        (9, 4, [2, 2, 3, 2]),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (3, 2, [2, 1]),
    ],
)
def test_layers_are_divided_in_order(num_layers: int, stages: int, sizes: list[int]) -> None:
    ranges = [layer_range(num_layers, stages, stage) for stage in range(stages)]
    assert [len(layers) for layers in ranges] == sizes, "layers of each stage"
    assert [layer for layers in ranges for layer in layers] == list(range(num_layers)), (
        "each layer once, in order"
    )


def test_no_stage_is_without_layers() -> None:
    with pytest.raises(ValueError, match="3"):
        layer_range(3, 4, 0)


def names(plan: SchedulerOutput) -> list[str]:
    return [share.request_id for share in plan.requests]


def finish(
    scheduler: Scheduler, plan: SchedulerOutput, token: int = 99
) -> list[tuple[str, list[int]]]:
    """The step comes back, with the same token for all of its requests; which outputs that
    makes."""
    result = ModelRunnerOutput({name: [SampledToken(token)] for name in names(plan)})
    return [
        (output.request_id, output.new_token_ids)
        for output in scheduler.update_from_output(plan, result)
    ]


def two_steps(**options: int) -> tuple[Scheduler, SchedulerOutput, SchedulerOutput]:
    """Four requests on two stages: two steps are in flight, with two requests each."""
    scheduler = scheduler_of(2, 2, 2, 2, pipeline_parallel_size=2, max_num_seqs=4, **options)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (names(first), names(second)) == (["r0", "r1"], ["r2", "r3"])
    return scheduler, first, second


def test_results_come_back_step_by_step() -> None:
    scheduler, first, second = two_steps()
    assert [r.num_pending_tokens for r in scheduler.queues.running] == [1, 1, 1, 1]
    assert finish(scheduler, first, 55) == [("r0", [55]), ("r1", [55])], (
        "an output for each request of this step"
    )
    assert [r.num_pending_tokens for r in scheduler.queues.running] == [0, 0, 1, 1], (
        "the other step's tokens are still pending"
    )
    assert [step is second for step in scheduler.queues.in_flight] == [True], (
        "only the second step is in flight"
    )


def test_a_result_may_come_after_its_request_has_ended() -> None:
    scheduler, first, _ = two_steps()
    scheduler.abort_request("r1")
    assert finish(scheduler, first) == [("r0", [99])], "r1 has ended: its token is dropped"


def test_equal_steps_are_different_steps() -> None:
    scheduler = scheduler_of(2)
    plan, twin = SchedulerOutput(), SchedulerOutput()
    scheduler.queues.in_flight = [plan, twin]
    scheduler.update_from_output(twin, ModelRunnerOutput())
    assert [step is plan for step in scheduler.queues.in_flight] == [True], (
        "the step that came back is the second one"
    )


def test_a_step_takes_its_share_of_the_running_requests() -> None:
    scheduler, first, second = two_steps()
    finish(scheduler, first)
    finish(scheduler, second)
    plan = scheduler.schedule()
    assert names(plan) == ["r0", "r1"], (
        "half of the requests on each of two stages, first come first served"
    )


def test_a_request_with_a_pending_token_lets_others_go_on() -> None:
    scheduler, _, second = two_steps()
    finish(scheduler, second)
    assert names(scheduler.schedule()) == ["r2", "r3"], (
        "r0 and r1, which come first, have no share, because their tokens are pending"
    )


def test_an_empty_step_preempts_no_request_while_another_is_in_flight() -> None:
    scheduler = scheduler_of(2, 2, num_blocks=2, pipeline_parallel_size=2, max_num_seqs=2)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (names(first), names(second)) == (["r0"], ["r1"]), (
        "their blocks are full, and no other is free"
    )
    finish(scheduler, first)
    plan = scheduler.schedule()
    assert plan.empty and not plan.preempted, (
        "the step in flight may free blocks: wait for its result"
    )
    finish(scheduler, second)
    plan = scheduler.schedule()
    assert plan.preempted == {"r1": "recompute"}, (
        "no step is in flight: the last request gives its block to the first"
    )
    assert names(plan) == ["r0"] and scheduler.manager.tables["r0"] == [0, 1]


def test_a_request_preempts_itself_if_it_is_the_last() -> None:
    scheduler = scheduler_of(2, 2, 2, num_blocks=3, max_num_seqs=3)
    finish(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert names(plan) == ["r0"], (
        "r0 has the block of r2; r1 finds none, and a preempted request is not continued"
    )
    assert list(plan.preempted) == ["r2", "r1"]
    scheduler.check_invariants()


# ---------------------------------------------------------------- PipelineSteps by itself


def steps_of(running: int, waiting: int, **sizes: int) -> tuple[PipelineSteps, list[Request]]:
    """The feature, and so many running and waiting requests."""
    queues = Queues()
    requests = [
        Request(EngineRequest(f"r{i}", [i], SamplingParams()), i) for i in range(running + waiting)
    ]
    for request in requests:
        queues.add(request)
    for request in requests[:running]:
        queues.move(request, RequestStatus.RUNNING)
    return PipelineSteps(queues, **{"num_stages": 2, "max_num_seqs": 16} | sizes), requests


def step_of(num_samples: int) -> SchedulerOutput:
    """A plan that samples for so many requests."""
    plan = SchedulerOutput()
    plan.num_samples = num_samples
    return plan


@pytest.mark.parametrize(
    ("num_running", "num_stages", "most"), [(6, 2, 3), (7, 2, 4), (7, 3, 3), (2, 4, 1), (1, 2, 1)]
)
def test_a_step_is_full_of_running_requests(num_running: int, num_stages: int, most: int) -> None:
    feature, requests = steps_of(num_running, 5, num_stages=num_stages)
    full = [feature.is_full(step_of(n), requests[0]) for n in range(most + 2)]
    assert full == [False] * most + [True, True], "waiting requests do not count"


@pytest.mark.parametrize(("max_num_seqs", "most"), [(16, 5), (8, 4)])
def test_admission_counts_all_unfinished_requests(max_num_seqs: int, most: int) -> None:
    feature, requests = steps_of(3, 7, max_num_seqs=max_num_seqs)
    assert not feature.is_full(step_of(most - 1), requests[-1])
    assert feature.is_full(step_of(most), requests[-1]), (
        "no more than `max_num_seqs` requests ever run"
    )
    assert feature.is_full(step_of(2), requests[0]), "3 requests run"


def test_a_share_needs_known_tokens_and_a_place_in_the_step() -> None:
    feature, (request, _) = steps_of(2, 0)
    assert feature.limit_share(request, 7, SchedulerOutput()) == 7
    assert feature.limit_share(request, 7, step_of(1)) == 0, "the step is full"
    request.num_pending_tokens = 1
    assert feature.limit_share(request, 7, SchedulerOutput()) == 0, "its token is not sampled yet"


def test_admission_needs_known_tokens_and_a_place_in_the_step() -> None:
    feature, (*_, request) = steps_of(0, 4)
    assert feature.why_not(request, step_of(1)) == ""
    assert feature.why_not(request, step_of(2)) == "pipeline_parallel_size"
    request.num_pending_tokens = 1
    assert feature.why_not(request, SchedulerOutput()) == "pipeline_parallel_size", (
        "it was preempted while a step in flight samples its token"
    )


def test_no_request_samples_in_two_steps_in_flight() -> None:
    scheduler, first, second = two_steps()
    scheduler.check_invariants()
    second.requests.append(first.requests[0])
    with pytest.raises(AssertionError, match="two steps sample"):
        scheduler.check_invariants()
