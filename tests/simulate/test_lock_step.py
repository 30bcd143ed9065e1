"""Engines in lock-step, with times that can be worked out by hand."""

from __future__ import annotations

import random

import pytest

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import resolve
from nanovllm.simulate.fleet import Fleet, RoundRobin
from nanovllm.simulate.lock_step import LockStepEngine, put_in_lock_step
from nanovllm.simulate.workload import WorkloadRequest
from tests.simulate.engines import AffineCost, engine_of, groups_of, request_of, workload_of


def fleet_of(num_engines: int, group_size: int) -> Fleet:
    config = EngineConfig(num_kv_blocks=100, block_size=4, async_scheduling=False)
    resolved = resolve(config, model_max_len=4096, num_kv_blocks=100, num_host_blocks=0)
    engines = [
        LockStepEngine(create_scheduler(resolved, create_manager(resolved)), AffineCost())
        for _ in range(num_engines)
    ]
    put_in_lock_step(engines, group_size)
    return Fleet(engines, RoundRobin(num_engines), groups_of(num_engines, group_size))


# With `AffineCost`, a step takes 1000, 100 per computed token, and 1 per token of context.


def test_a_step_takes_as_long_as_the_slowest() -> None:
    requests = [request_of(0, 0, prompt=10, output=3), request_of(1, 5, prompt=100, output=2)]
    served = {r.request_id: r for r in fleet_of(2, 2).run(workload_of(*requests)).requests}
    # Engine 1 is idle, and yet its request waits for the next step of both.
    assert served["r0"].first_token == 2010
    assert served["r1"].first_token == 2010 + 1000 + 100 * 100 + 100
    assert served["r1"].last_token == 13_110 + 1000 + 100 + 101
    assert served["r0"].last_token == served["r1"].last_token
    # In a group of its own, each engine runs its own steps.
    served = {r.request_id: r for r in fleet_of(2, 1).run(workload_of(*requests)).requests}
    assert served["r0"].last_token == 2010 + 1111 + 1112
    assert served["r1"].first_token == 5 + 11_100


def test_an_engine_is_busy_until_the_step_of_all_has_ended() -> None:
    requests = [request_of(0, 0, prompt=10, output=3), request_of(1, 5, prompt=100, output=2)]
    result = fleet_of(2, 2).run(workload_of(*requests))
    # Engine 1 has no request in the first step, which ends at 2010.
    assert [each.busy for each in result.replicas] == [result.duration, result.duration - 2010]


def random_requests(seed: int) -> list[WorkloadRequest]:
    rng = random.Random(seed)
    at = 0
    requests = []
    for number in range(40):
        at += rng.randrange(4000)
        abort = at + rng.randrange(20_000) if rng.random() < 0.2 else None
        requests.append(request_of(number, at, rng.randint(1, 40), rng.randint(1, 20), abort=abort))
    return requests


@pytest.mark.parametrize("seed", range(10))
def test_groups_of_one_are_a_fleet(seed: int) -> None:
    work = workload_of(*random_requests(seed))
    alone = fleet_of(3, 1).run(work)
    engines = [engine_of(block_size=4, async_scheduling=False) for _ in range(3)]
    expected = Fleet(engines).run(work)
    assert (alone.requests, alone.replicas) == (expected.requests, expected.replicas)
    assert alone.gaps.buckets == expected.gaps.buckets


@pytest.mark.parametrize("seed", range(10))
def test_all_requests_are_served_in_lock_step(seed: int) -> None:
    requests = random_requests(seed)
    fleet = fleet_of(4, 2)
    result = fleet.run(workload_of(*requests))
    served = {each.request_id: each for each in result.requests}
    assert len(served) == len(result.requests) == 40
    for source in requests:
        if source.abort is None:
            assert served[source.request_id].num_output_tokens == source.num_output_tokens
    for engine in fleet.engines:
        assert not engine.scheduler.queues.requests and engine.end is None
