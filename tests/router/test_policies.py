"""Policies of routers, as functions of plain state."""

from __future__ import annotations

import collections
import random
import subprocess
import sys
import time
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.features.data_parallel.router import EngineRouter
from nanovllm.router.policies import (
    MAX_IMBALANCE,
    POLICIES,
    ROUTED_BLOCKS,
    Router,
    RouterState,
    Weights,
)

Names = Sequence[Hashable]


def first(server: int) -> int:
    """The set of one server."""
    return 1 << server


def state_of(loads: Sequence[int], **options: int) -> RouterState:
    state = RouterState(len(loads), **options)
    for server, load in enumerate(loads):
        state.set_load(server, load)
    return state


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts with some of twenty common beginnings."""
    return [
        [rng.randrange(20)] * rng.randrange(40)
        + [rng.randrange(10**6) for _ in range(rng.randrange(90))]
        + [0]
        for _ in range(count)
    ]


@pytest.mark.parametrize("size", [1, 3, 8, 70])
def test_estimated_chooses_as_the_engine_router_does(size: int) -> None:
    rng = random.Random(size)
    engines = EngineRouter(size, block_size=2, capacity=300)
    router = Router("estimated", RouterState(size, capacity=300))
    names_of = engines._block_hashes
    loads = [0] * size
    for number, prompt in enumerate(prompts_of(rng, 1000)):
        for _ in range(2):
            server = rng.randrange(size)
            loads[server] = max(0, loads[server] + rng.choice([-3, -1, 0, 1, 2]))
            router.state.set_load(server, loads[server])
        request = EngineRequest(str(number), prompt, SamplingParams())
        expected = engines.choose(request, loads)
        assert router.choose(names_of(request)) == expected
        loads[expected] += 1
        router.state.set_load(expected, loads[expected])
        if number % 400 == 399:
            engines.forget()
            for server in range(size):
                router.state.sent.forget(server)
    assert router.state.loads == [(load, 0) for load in loads]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(0, 3)), max_size=40))
def test_servers_are_grouped_by_load(changes: list[tuple[int, int, int]]) -> None:
    state = RouterState(6)
    for server, load, kv_percent in changes:
        state.set_load(server, load, kv_percent)
        groups = collections.defaultdict(int)
        for each, key in enumerate(state.loads):
            groups[key] |= first(each)
        assert state.at == groups and state.levels == sorted(groups)


BLOCKS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=40)


@given(BLOCKS, st.integers(1, 63), st.lists(st.integers(0, 6), max_size=5, unique=True))
def test_an_index_finds_the_longest_prefixes(
    blocks: list[tuple[int, int]], servers: int, names: list[int]
) -> None:
    index = RouterState(6).cached
    kept = set()
    for block in blocks:
        server, name = block
        if block in kept:
            index.remove(server, [name])
        else:
            index.add(server, name)
        kept ^= {block}
    for each in range(7):
        assert index.where.get(each, 0) == sum(first(s) for s, there in kept if there == each)

    def length(server: int) -> int:
        return next((i for i, name in enumerate(names) if (server, name) not in kept), len(names))

    candidates = [server for server in range(6) if servers & first(server)]
    expected = collections.defaultdict(int)
    for server in candidates:
        expected[length(server)] |= first(server)
    assert index.lengths(names, servers) == sorted(expected.items(), reverse=True)
    assert index.longest(names, servers) == expected[max(expected)]


def test_each_policy_on_a_small_fleet() -> None:
    state = state_of([5, 3, 3, 20], capacity=8)
    state.sent.remember(0, "abc")
    state.sent.remember(3, "abcd")
    for server in (1, 3):
        state.cached.add(server, "a")
    state.cached.add(0, "b")  # without the first block, the second is of no use
    state.turn = 2
    everyone = state.everyone

    def chosen(policy: str, names: Names = "abcd", servers: int = everyone) -> int:
        return POLICIES[policy](state, names, servers)

    assert chosen("round_robin") == 2
    assert chosen("round_robin", servers=0b0011) == 0
    assert chosen("load") == 2, "the next one of those with the lowest load"
    assert chosen("load", servers=0b1001) == 0
    assert chosen("estimated") == 0, "server 3 has a longer prefix, but is too busy"
    assert chosen("estimated", servers=0b1000) == 3
    assert chosen("estimated", "xyz") == 2
    assert chosen("precise") == 1
    assert chosen("precise", "bcd") == 0
    state.set_load(3, 3 + MAX_IMBALANCE)
    assert chosen("estimated") == 3


def test_what_was_sent_is_forgotten_by_age() -> None:
    state = state_of([0, 0], capacity=3)
    state.sent.remember(1, "abc")
    state.sent.remember(1, "x")
    assert "c" not in state.sent.where, "the last block first"
    state.sent.remember(1, "ab")
    state.sent.remember(1, "y")
    assert sorted(state.sent.where) == ["a", "b", "y"]
    state.sent.forget(1)
    assert not state.sent.where


def test_scores_are_weighed_as_llm_d_weighs_them() -> None:
    weights = Weights(prefix=3, kv=2, queue=2)
    state = RouterState(3, weights=weights)
    state.set_load(0, 4, kv_percent=90)
    state.set_load(1, 2, kv_percent=50)
    for name in "abcd":
        state.cached.add(0, name)
    state.cached.add(1, "a")
    # Server 0: 3 * 4/4 + 2 * 0.1 + 2 * 0; server 1: 3 * 1/4 + 2 * 0.5 + 2 * 0.5; server 2: 2 + 2.
    assert POLICIES["precise"](state, "abcd", state.everyone) == 2
    state.set_load(2, 4, kv_percent=60)
    # Server 0 as before, 3.2; server 1: 0.75 + 1 + 2 = 3.75; server 2: 0.8.
    assert POLICIES["precise"](state, "abcd", state.everyone) == 1
    assert POLICIES["precise"](state, "abcd", 0b101) == 0
    assert POLICIES["load"](state, "abcd", 0b101) == 2


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=6),
    BLOCKS,
    st.integers(1, 5),
)
def test_the_highest_score_is_chosen(
    loads: list[tuple[int, int]], blocks: list[tuple[int, int]], weight: int
) -> None:
    size = len(loads)
    state = RouterState(size, weights=Weights(prefix=weight, kv=2, queue=3))
    for server, (load, kv) in enumerate(loads):
        state.set_load(server, load, kv_percent=25 * kv)
    for server, name in blocks:
        if server < size:
            state.cached.add(server, name)
    names = range(5)
    least, most = min(loads)[0], max(loads)[0]

    def score(server: int) -> float:
        load, kv = loads[server]
        has = [bool(state.cached.where.get(name, 0) & first(server)) for name in names]
        queue = (most - load) / (most - least) if most > least else 1
        return weight * [*has, False].index(False) / 5 + 2 * (1 - kv / 4) + 3 * queue

    chosen = POLICIES["precise"](state, names, state.everyone)
    assert score(chosen) == pytest.approx(max(map(score, range(size))))


def test_random_is_even_and_the_same_for_a_seed() -> None:
    servers = 0b1101_0110
    draws = []
    for seed in (0, 0, 1):
        router = Router("random", RouterState(8, seed=seed))
        draws.append([router.choose((), servers) for _ in range(5000)])
    assert draws[0] == draws[1] != draws[2]
    counts = collections.Counter(draws[0])
    assert sorted(counts) == [1, 2, 4, 6, 7]
    assert all(abs(count - 1000) < 120 for count in counts.values()), "4 standard deviations"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_choice_does_not_look_at_each_server(policy: str) -> None:
    """A choice among 1,250 servers takes less than ten times as long as one among 8, for which a
    loop over the servers would take 156 times."""
    prompts = prompts_of(random.Random(0), 300)

    def seconds(size: int) -> float:
        router = Router(policy, RouterState(size, capacity=300))
        start = time.process_time()
        for prompt in prompts:
            names = prompt[:ROUTED_BLOCKS]
            chosen = router.choose(names)
            router.state.set_load(chosen, router.state.loads[chosen][0] + 1)
        return time.process_time() - start

    assert min(seconds(1250) for _ in range(5)) < 10 * min(seconds(8) for _ in range(5))


@pytest.mark.started
def test_policies_import_neither_http_nor_torch() -> None:
    script = "import sys, nanovllm.router.policies as p; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    modules = set(done.stdout.split())
    assert "nanovllm.router.policies" in modules
    assert not modules & {"torch", "numpy", "httpcore", "starlette", "asyncio"}
