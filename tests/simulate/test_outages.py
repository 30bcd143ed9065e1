"""Replicas that fail or start late, with times that can be worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from nanovllm.core.recorder import Recorder
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.request import EngineOutput
from nanovllm.router.policies import Router, RouterState
from nanovllm.simulate.assembly import create_engine
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.outages import Outage, UnreliableFleet
from nanovllm.simulate.requests import RequestMaker
from nanovllm.simulate.results import FleetResult, ServedRequest
from nanovllm.simulate.routers import PolicyRouter
from nanovllm.simulate.workload import WorkloadRequest
from nanovllm.trace.record import StepRecord
from tests.simulate.engines import (
    AffineCost,
    config_of,
    engine_of,
    groups_of,
    request_of,
    workload_of,
)

# With `AffineCost`, a step takes 1000, 100 per computed token, and 1 per token of context.


def fleet_of(
    outages: list[Outage],
    num_replicas: int = 2,
    policy: str = "round_robin",
    retries: bool = True,
    group_size: int = 1,
    **options: int,
) -> UnreliableFleet:
    engines: list[SimulatedEngine] = [
        engine_of(block_size=4, async_scheduling=False, **options) for _ in range(num_replicas)
    ]
    maker = RequestMaker(4, 8)
    router = PolicyRouter(
        Router(policy, RouterState(num_replicas, capacity=100)),
        engines,
        lambda r: maker.prompt_names(r.prefix_ids, r.num_prompt_tokens),
    )
    groups = groups_of(num_replicas, group_size)
    return UnreliableFleet(engines, router, outages, retries=retries, groups=groups)


def run(fleet: UnreliableFleet, *requests: WorkloadRequest) -> dict[str, ServedRequest]:
    result: FleetResult = fleet.run(workload_of(*requests, prefix_block_size=8))
    assert len(result.requests) == len(requests)
    return {request.request_id: request for request in result.requests}


def test_a_request_without_tokens_is_served_elsewhere_and_one_with_tokens_fails() -> None:
    requests = [
        request_of(0, 0, prompt=10, output=9),  # replica 0; its first token comes at 2010
        request_of(1, 0, prompt=10, output=9),  # replica 1
        request_of(2, 100, prompt=20, output=2),  # replica 0, from 2010 to 5141
    ]
    served = run(fleet_of([Outage(0, 2500, None)]), *requests)
    assert (served["r0"].outcome, served["r0"].num_output_tokens) == ("failed", 2)
    assert (served["r1"].outcome, served["r1"].replica) == ("length", 1)
    # The step in flight would have ended at 2010 + 1000 + 100 * 21 + 11 + 20: it computes the whole
    # prompt of r2, and samples its first token, too.
    assert served["r2"].outcome == "failed"
    served = run(fleet_of([Outage(0, 1500, None)]), *requests)
    # At 2010, r2 is sent to replica 1, whose step ends at the same time.
    assert (served["r2"].outcome, served["r2"].replica) == ("length", 1)
    assert served["r2"].first_token == 2010 + 1000 + 100 * 21 + 11 + 20
    assert served["r2"].arrival == 100, "its client has waited since then"
    served = run(fleet_of([Outage(0, 1500, None)], retries=False), *requests)
    assert served["r2"].outcome == "failed"


def test_a_replica_that_starts_late_gets_no_requests_before() -> None:
    requests = [request_of(i, 10_000 * i, prompt=10, output=2) for i in range(6)]
    served = run(fleet_of([Outage(1, 0, 35_000)]), *requests)
    assert [served[f"r{i}"].replica for i in range(6)] == [0, 0, 0, 0, 1, 0]


def test_a_replica_that_starts_late_gets_no_request_at_0() -> None:
    requests = [request_of(i, 0, prompt=10, output=2) for i in range(2)]
    served = run(fleet_of([Outage(0, 0, 35_000)], retries=False), *requests)
    assert [(each.outcome, each.replica) for each in served.values()] == [("length", 1)] * 2


def test_a_group_is_ready_when_the_last_step_of_all_its_engines_has_ended() -> None:
    requests = [
        request_of(0, 0, prompt=10, output=1),  # replica 0, until 2010
        request_of(1, 5, prompt=100, output=1),  # replica 1, until 11105
        request_of(2, 5000, prompt=10, output=1),
        request_of(3, 12_000, prompt=10, output=1),
    ]
    served = run(fleet_of([Outage(0, 3000, 4000)], group_size=2), *requests)
    assert [served[f"r{i}"].outcome for i in range(4)] == ["length", "length", "failed", "length"]


def test_without_any_replica_requests_fail() -> None:
    outages = [Outage(0, 5_000, 25_000), Outage(1, 0, None)]
    requests = [request_of(i, 10_000 * i, prompt=10, output=2) for i in range(4)]
    served = run(fleet_of(outages), *requests)
    assert [served[f"r{i}"].outcome for i in range(4)] == ["length", "failed", "failed", "length"]
    assert (served["r1"].replica, served["r1"].num_output_tokens) == (-1, 0)


@pytest.mark.parametrize("policy", ["estimated", "precise"])
def test_a_replacement_has_an_empty_cache(policy: str) -> None:
    fleet = fleet_of([Outage(0, 50_000, 55_000), Outage(1, 0, None)], policy=policy)
    requests = [
        request_of(i, 20_000 * i, prompt=20, output=2, prefix_ids=[1, 2, 3]) for i in range(5)
    ]
    served = run(fleet, *requests)
    assert [served[f"r{i}"].num_cached_tokens for i in range(5)] == [0, 16, 16, 0, 16]
    assert isinstance(fleet.router, PolicyRouter)
    state = fleet.router.router.state
    assert all(servers == 1 for servers in state.cached.where.values())


def test_the_duration_ends_with_the_last_token() -> None:
    fleet = fleet_of([Outage(0, 10**9, 2 * 10**9)])
    result = fleet.run(workload_of(request_of(0, 50, prompt=10, output=1)))
    assert result.duration == 50 + 2010


def test_the_duration_contains_the_steps_of_requests_that_fail() -> None:
    fleet = fleet_of(
        [Outage(0, 500, None)], num_replicas=1, max_num_seqs=4, max_num_batched_tokens=4
    )
    # Its step in flight computes a part of the prompt.
    result = fleet.run(workload_of(request_of(0, 0, prompt=10, output=9)))
    assert (result.requests[0].outcome, result.requests[0].first_token) == ("failed", None)
    assert result.duration == result.replicas[0].busy == 1000 + 4 * 100 + 4


@pytest.mark.parametrize("fast", [False, True])
def test_a_step_that_was_planned_ahead_of_a_failure_never_runs(fast: bool) -> None:
    config = config_of(block_size=4, async_scheduling=True)
    engine = create_engine(SimulatedEngine, config, AffineCost(), fast=fast)
    fleet = UnreliableFleet([engine], None, [Outage(0, 2500, 3200)])
    requests = [request_of(0, 0, prompt=10, output=9), request_of(1, 3500, prompt=10, output=1)]
    result = fleet.run(workload_of(*requests))
    # The second step takes from 2010 to 3121. The third one would take until 4233.
    failed, after = result.requests
    assert (failed.outcome, failed.num_output_tokens) == ("failed", 2)
    assert (after.outcome, after.first_token) == ("length", 3500 + 2010), "its replacement is ready"
    assert result.duration == 5510
    (counters,) = result.replicas
    assert counters.busy == 3121 + 2010
    assert (counters.num_steps, counters.num_prefill_tokens) == (3, 10 + 10)
    # One decode, which attends to 11 tokens; it holds 3 blocks, as each of the prompts does.
    assert (counters.num_decodes, counters.decode_context) == (1, 11)
    assert counters.num_held_blocks == 3 * 3


class PlanKeeper(Recorder):
    """Keeps the plans of the steps that have run."""

    def __init__(self) -> None:
        self.plans: list[SchedulerOutput] = []

    def begin(self, plan: SchedulerOutput, step: int, start: float) -> StepRecord | None:
        """Let the plan take the place of a record."""
        return plan  # type: ignore[return-value]

    def finish(
        self,
        record: object,
        duration: float,
        result: ModelRunnerOutput,
        outputs: Sequence[EngineOutput],
    ) -> None:
        """Keep the plan of a step that was not dropped."""
        if duration:
            assert isinstance(record, SchedulerOutput)
            self.plans.append(record)


@pytest.mark.parametrize("seed", range(8))
def test_the_totals_are_those_of_the_steps_that_have_run(seed: int) -> None:
    rng = random.Random(seed)
    config = config_of(
        block_size=4, max_num_seqs=8, max_num_batched_tokens=8, pipeline_parallel_size=3
    )
    engine = create_engine(SimulatedEngine, config, AffineCost(), fast=False)
    engine.recorder = keeper = PlanKeeper()
    fleet = UnreliableFleet([engine], None, [Outage(0, rng.randint(3000, 9000), None)])
    requests = [request_of(i, 10 * i, rng.randint(4, 20), 9) for i in range(6)]
    (counters,) = fleet.run(workload_of(*requests)).replicas
    assert counters.num_steps == len(keeper.plans)
    num_tokens = sum(plan.num_tokens for plan in keeper.plans)
    assert counters.num_prefill_tokens + counters.num_decodes == num_tokens


@pytest.mark.parametrize("seed", range(20))
def test_failures_count_equally_when_steps_are_made_in_one_call(seed: int) -> None:
    totals = []
    for fast in (False, True):
        rng = random.Random(seed)
        config = config_of(
            num_blocks=rng.choice([20, 100]),
            block_size=4,
            async_scheduling=True,
            max_num_seqs=rng.choice([3, 8]),
            max_num_batched_tokens=rng.choice([8, 64]),
        )
        engines = [create_engine(SimulatedEngine, config, AffineCost(), fast=fast) for _ in "ab"]
        outages = [Outage(i, rng.randint(3000, 40_000), [None, 45_000][i]) for i in range(2)]
        requests = [
            request_of(i, 1500 * i, rng.randint(2, 30), rng.randint(1, 30)) for i in range(20)
        ]
        result = UnreliableFleet(engines, None, outages).run(workload_of(*requests))
        totals.append(result.replicas)
    assert totals[0] == totals[1]


@pytest.mark.parametrize("seed", range(20))
def test_every_request_has_one_outcome(seed: int) -> None:
    rng = random.Random(seed)
    outages = []
    for replica in range(3):
        begin = rng.randrange(100_000)
        outages.append(Outage(replica, begin, rng.choice([None, begin + rng.randrange(90_000)])))
    fleet = fleet_of(outages, 3, rng.choice(["random", "load", "precise"]), rng.random() < 0.8)
    requests = []
    at = 0
    for number in range(60):
        at += rng.randrange(5000)
        abort = at + rng.randrange(20_000) if rng.random() < 0.2 else None
        ids = [rng.randrange(4), number]
        requests.append(
            request_of(
                number, at, rng.randint(8, 16), rng.randint(1, 20), prefix_ids=ids, abort=abort
            )
        )
    served = run(fleet, *requests)
    assert set(served) == {request.request_id for request in requests}
    for request in served.values():
        assert request.outcome in ("length", "abort", "failed")
    for engine in fleet.engines:
        assert not engine.scheduler.queues.requests
        assert engine.scheduler.manager.pool.num_free == 100
