"""The router's policies in front of simulated engines."""

from __future__ import annotations

import random

import pytest

from nanovllm.router.policies import POLICIES, Router, RouterState, Weights
from nanovllm.simulate.assembly import create_engine
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.requests import RequestMaker
from nanovllm.simulate.routers import PolicyRouter
from nanovllm.simulate.workload import Workload
from tests.simulate.engines import AffineCost, config_of, engine_of, request_of, workload_of
from tests.simulate.exact import Case, case_of, state_of


def router_of(
    policy: str, engines: list[SimulatedEngine], refresh: int = 0, weights: Weights | None = None
) -> PolicyRouter:
    router = Router(policy, RouterState(len(engines), capacity=100, weights=weights))
    maker = RequestMaker(block_size=4, prefix_block_size=8)
    return PolicyRouter(
        router, engines, lambda r: maker.prompt_names(r.prefix_ids, r.num_prompt_tokens), refresh
    )


def sessions(seed: int, count: int = 60) -> Workload:
    """Requests of some sessions, each of which has a prefix of its own."""
    rng = random.Random(seed)
    requests = []
    arrival = 0
    for number in range(count):
        arrival += rng.randrange(4000)
        session = rng.randrange(9)
        length = rng.randrange(1, 5)
        ids = [10 * session + i for i in range(length)]
        prompt = 8 * length + rng.randrange(8)
        requests.append(request_of(number, arrival, prompt, rng.randrange(1, 9), prefix_ids=ids))
    return workload_of(*requests, prefix_block_size=8)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_a_workload_the_same_way_each_time(policy: str) -> None:
    results = []
    for _ in range(2):
        engines = [engine_of(num_blocks=30, block_size=4) for _ in range(3)]
        results.append(Fleet(engines, router_of(policy, engines)).run(sessions(1)))
    assert results[0].requests == results[1].requests
    assert {each.outcome for each in results[0].requests} == {"length"}
    assert {each.replica for each in results[0].requests} == {0, 1, 2}


def test_precise_knows_what_the_engines_have_cached() -> None:
    engines = [engine_of(num_blocks=30, block_size=4) for _ in range(3)]
    router = router_of("precise", engines)
    result = Fleet(engines, router).run(sessions(2, count=200))
    assert sum(each.num_evictions for each in result.replicas) > 100
    where = router.router.state.cached.where
    for replica, engine in enumerate(engines):
        cached = {name for name, servers in where.items() if servers >> replica & 1}
        assert cached == set(engine.scheduler.manager.pool.cached_blocks)


def test_estimated_sends_a_session_to_one_engine() -> None:
    engines = [engine_of() for _ in range(4)]
    requests = [
        request_of(i, 10**6 * i, prompt=40, output=2, prefix_ids=[i % 3, 100 + i, 200 + i])
        for i in range(12)
    ]
    work = workload_of(*requests, prefix_block_size=8)
    result = Fleet(engines, router_of("estimated", engines)).run(work)
    assert {(int(r.request_id[1:]) % 3, r.replica) for r in result.requests} == {
        (0, 0),
        (1, 1),
        (2, 2),
    }


@pytest.mark.parametrize(("refresh", "last"), [(0, 1), (700, 1), (1000, 0)])
def test_a_router_with_stale_metrics(refresh: int, last: int) -> None:
    """Request r1 ends at 2210, so a router that knows its engines sends r2 to engine 1 at 2900. One
    that looks every 1000 has seen equal loads at 2000, and takes its turn: engine 0."""
    engines = [engine_of() for _ in range(2)]
    requests = [
        request_of(0, 100, prompt=10, output=9),
        request_of(1, 200, prompt=10, output=1),
        request_of(2, 2900, prompt=10, output=1),
    ]
    result = Fleet(engines, router_of("load", engines, refresh)).run(workload_of(*requests))
    served = {each.request_id: each for each in result.requests}
    assert served["r1"].last_token == 2210
    assert [served[f"r{i}"].replica for i in range(3)] == [0, 1, last]


def test_weights_look_at_waiting_requests_and_memory() -> None:
    engines = [engine_of(num_blocks=30, block_size=4) for _ in range(2)]
    router = router_of("load", engines, weights=Weights(prefix=0, kv=1, queue=1))
    requests = [
        request_of(0, 0, prompt=60, output=50),  # engine 0, half of whose memory it takes
        request_of(1, 2000, prompt=10, output=50),
        request_of(2, 4000, prompt=10, output=50),
        request_of(3, 6000, prompt=10, output=50),
    ]
    result = Fleet(engines, router).run(workload_of(*requests))
    assert [r.replica for r in sorted(result.requests, key=lambda r: r.request_id)] == [0, 1, 1, 1]


def serve_by(router: Router, case: Case, refresh: int, fast: bool) -> dict[str, object]:
    """Serve a random workload on three engines; returns what is left."""
    config = config_of(**case.options)
    engines = [create_engine(SimulatedEngine, config, AffineCost(), fast=fast) for _ in range(3)]
    maker = RequestMaker(
        config.given.block_size, case.prefix_block_size, names_outputs=case.names_outputs
    )
    by_policy = PolicyRouter(
        router, engines, lambda r: maker.prompt_names(r.prefix_ids, r.num_prompt_tokens), refresh
    )
    fleet = Fleet(engines, by_policy)
    workload = Workload(case.requests, case.prefix_block_size, names_outputs=case.names_outputs)
    return state_of(fleet, fleet.run(workload))


@pytest.mark.parametrize(
    ("policy", "weights", "refresh"),
    [
        ("load", Weights(prefix=0, kv=1, queue=1), 0),
        ("estimated", Weights(prefix=1, kv=2, queue=1), 700),
        ("precise", Weights(prefix=3, kv=2, queue=2), 0),
    ],
)
def test_weights_see_block_pools_in_the_middle_of_steps_at_once(
    policy: str, weights: Weights, refresh: int
) -> None:
    """Steps made at once lead to the same choices, pools and times as steps made one by one."""
    for seed in range(60):
        singly, at_once = (
            serve_by(
                Router(policy, RouterState(3, capacity=100, weights=weights)),
                case_of(seed),
                refresh,
                fast,
            )
            for fast in (False, True)
        )
        assert at_once == singly, f"case {seed}"


@pytest.mark.parametrize("fast", [False, True])
def test_precise_sees_evictions_in_the_middle_of_steps_at_once(fast: bool) -> None:
    """When r3 arrives, r2 has just taken the last of the blocks that r3 would find on engine 0, and
    still decodes. So engine 1, which is idle, is the better one."""
    engines = [engine_of(num_blocks=11, block_size=4, fast=fast) for _ in range(2)]
    requests = [
        request_of(0, 0, prompt=16, output=1, prefix_ids=[1, 2]),
        request_of(1, 10_000, prompt=4, output=41),
        request_of(2, 20_000, prompt=4, output=41),
        request_of(3, 65_000, prompt=20, output=1, prefix_ids=[1, 2, 3]),
    ]
    work = workload_of(*requests, prefix_block_size=8)
    result = Fleet(engines, router_of("precise", engines)).run(work)
    served = {each.request_id: each for each in result.requests}
    assert [served[f"r{i}"].replica for i in range(4)] == [0, 1, 0, 1]
    assert (served["r2"].last_token or 0) > 65_000
