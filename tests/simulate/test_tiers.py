"""KV in host memory and in a shared store, with times that can be worked out by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from nanovllm.data.errors import UsageError
from nanovllm.distributed.cost_model import Link
from nanovllm.kv_transfer.stores.store import HostKeys
from nanovllm.simulate.assembly import create_engine
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.machines import find_machine
from nanovllm.simulate.results import FleetResult
from nanovllm.simulate.simulation import simulate
from nanovllm.simulate.tiers import TierConnector, Tiers
from nanovllm.simulate.traces import read_workload
from nanovllm.simulate.workload import SECOND, WorkloadRequest
from tests.simulate.engines import AffineCost, config_of, engine_of, request_of, workload_of
from tests.simulate.test_hit_rates import BLOCK, tree_trace, whole

# A block takes 10 bytes, and a link moves a byte in a picosecond, unless a test says otherwise.
BLOCK_BYTES = 10
ENDLESS = 10**5
IN_NO_TIME = 10**9 * SECOND


def tiered(
    *,
    num_engines: int = 1,
    num_blocks: int = 12,
    num_host: int = 0,
    num_store: int = 0,
    block_size: int = 4,
    bandwidth: float = SECOND,
    latency: float = 0.0,
) -> tuple[Fleet, Tiers]:
    """Engines with small pools, and links of this bandwidth to what is below them."""
    size = {"kv_offloading_size": 1.0} if num_host else {"kv_connector": "pool"}
    config = config_of(num_blocks, 10**5, block_size=block_size, async_scheduling=False, **size)
    store = HostKeys(num_store) if num_store else None
    engines = [
        create_engine(
            SimulatedEngine,
            config,
            AffineCost(),
            connector=TierConnector(config.given, num_host, store),
        )
        for _ in range(num_engines)
    ]
    fleet = Fleet(engines)
    link = Link("test", latency / SECOND, bandwidth)
    return fleet, Tiers(fleet, [link] * num_engines, link, [BLOCK_BYTES] * num_engines)


def ttfts(result: FleetResult) -> list[int]:
    served = sorted(result.requests, key=lambda each: each.request_id)
    return [(each.first_token or 0) - each.arrival for each in served]


def asked_again() -> list[WorkloadRequest]:
    """A prompt of 5 blocks and a token, one that takes the whole pool, and the first one again."""
    ids = [[1, 2, 3], [10, 11, 12, 13, 14], [1, 2, 3]]
    prompts = [21, 47, 21]
    return [
        request_of(i, 10**6 * i, prompt, output=1, prefix_ids=prefix_ids)
        for i, (prompt, prefix_ids) in enumerate(zip(prompts, ids, strict=True))
    ]


# With `AffineCost`, a step takes 1000, 100 per computed token, and 1 per token of context.
COMPUTED = 1000 + 21 * 100 + 21
HIT = 1000 + 100 + 21


def test_a_block_that_left_the_device_is_loaded_from_host_memory() -> None:
    fleet, tiers = tiered(num_host=50, latency=7)
    times = ttfts(fleet.run(workload_of(*asked_again(), prefix_block_size=8)))
    assert times[0] == COMPUTED
    assert times[2] == 7 + 5 * BLOCK_BYTES + HIT
    assert (tiers.num_host_blocks, tiers.num_store_blocks) == (5, 0)
    assert tiers.summary(4, 82) == {
        "host_hit_rate": 20 / 82,
        "num_host_loads": 1,
        "num_host_loaded_bytes": 50,
        "mean_host_load_ms": pytest.approx(57e-9),
    }


def test_host_memory_that_is_too_small_moves_blocks_to_the_store() -> None:
    fleet, tiers = tiered(num_host=10, num_store=50, latency=7)
    times = ttfts(fleet.run(workload_of(*asked_again(), prefix_block_size=8)))
    # They come over both links.
    assert tiers.summary(4, 82)["store_hit_rate"] == 20 / 82
    assert times[2] == 2 * (7 + 5 * BLOCK_BYTES) + HIT
    assert (tiers.num_host_blocks, tiers.num_store_blocks) == (0, 5)
    # Without a store, they are lost.
    fleet, tiers = tiered(num_host=10)
    assert ttfts(fleet.run(workload_of(*asked_again(), prefix_block_size=8)))[2] == COMPUTED


def test_an_engine_loads_from_the_store_what_another_one_has_computed() -> None:
    fleet, tiers = tiered(num_engines=2, num_store=50)
    first, _, again = asked_again()
    # Round robin: the same prompt, on the other engine.
    again = request_of(1, 10**6, prompt=21, output=1, prefix_ids=again.prefix_ids)
    result = fleet.run(workload_of(first, again, prefix_block_size=8))
    assert [each.replica for each in result.requests] == [0, 1]
    assert ttfts(result) == [COMPUTED, 2 * 5 * BLOCK_BYTES + HIT]
    assert tiers.num_store_blocks == 5


def test_the_store_has_no_block_before_the_step_that_computes_it_has_ended() -> None:
    fleet, tiers = tiered(num_engines=2, num_store=50)
    requests = [request_of(i, i * 100, prompt=21, output=1, prefix_ids=[1, 2, 3]) for i in range(2)]
    assert ttfts(fleet.run(workload_of(*requests, prefix_block_size=8))) == [COMPUTED, COMPUTED]
    assert tiers.num_store_blocks == 0
    assert tiers.summary(4, 42)["store_hit_rate"] == 0.0, "a store that is not read has a row, too"


def test_simultaneous_loads_share_a_link() -> None:
    fleet, tiers = tiered(num_engines=1, num_blocks=30, num_host=99, bandwidth=SECOND / 100)
    requests = [
        request_of(0, 0, prompt=21, output=1, prefix_ids=[1, 2, 3]),
        request_of(1, 10**6, prompt=21, output=1, prefix_ids=[4, 5, 6]),
        request_of(2, 2 * 10**6, prompt=119, output=1, prefix_ids=list(range(10, 25))),
        request_of(3, 3 * 10**6, prompt=21, output=1, prefix_ids=[1, 2, 3]),
        request_of(4, 3 * 10**6, prompt=21, output=1, prefix_ids=[4, 5, 6]),
    ]
    times = ttfts(fleet.run(workload_of(*requests, prefix_block_size=8)))
    alone = 5 * BLOCK_BYTES * 100
    assert tiers.host.time == 2 * (2 * alone)
    # The report of the first load begins a step, which the second misses.
    assert times[3:] == [2 * alone + HIT, 2 * alone + 2 * HIT]


@pytest.mark.parametrize("tiers_of", [{"num_host": 99}, {"num_store": 99}])
def test_a_load_is_worth_it_until_its_bytes_take_as_long_as_its_tokens(
    tiers_of: dict[str, int],
) -> None:
    num_links = 1 + ("num_store" in tiers_of)
    # A tier saves the time of 20 tokens in the step, and of the context nothing.
    break_even = num_links * 5 * BLOCK_BYTES * SECOND / (20 * 100)
    for factor in (0.01, 0.5, 0.999, 1.001, 2, 1000, IN_NO_TIME):
        fleet, _ = tiered(bandwidth=break_even * factor, **tiers_of)
        loaded = ttfts(fleet.run(workload_of(*asked_again(), prefix_block_size=8)))[2]
        assert (loaded < COMPUTED) == (factor > 1), factor
        assert loaded == pytest.approx(HIT + (COMPUTED - HIT) / factor, abs=2)


@pytest.mark.parametrize("tiers_of", [{"num_host": ENDLESS}, {"num_store": ENDLESS}])
def test_endless_tiers_with_endless_bandwidth_are_an_endless_cache(
    tmp_path: Path, tiers_of: dict[str, int]
) -> None:
    requests = [whole(each) for each in read_workload(tree_trace(tmp_path)).requests]
    # Far apart, so that no two requests share a step.
    requests = [
        request_of(i, 10**10 * i, each.num_prompt_tokens, 1, prefix_ids=each.prefix_ids)
        for i, each in enumerate(requests)
    ]
    work = workload_of(*requests, prefix_block_size=BLOCK)
    engine = engine_of(ENDLESS, 10**5, block_size=BLOCK, async_scheduling=False)
    endless = Fleet([engine]).run(work)
    fleet, tiers = tiered(num_blocks=12, block_size=BLOCK, bandwidth=IN_NO_TIME, **tiers_of)
    result = fleet.run(work)
    assert ttfts(result) == ttfts(endless)
    (counters,) = result.replicas
    found = counters.num_hit_tokens + BLOCK * (tiers.num_host_blocks + tiers.num_store_blocks)
    assert found == endless.replicas[0].num_hit_tokens == (810 - 86) * BLOCK
    assert counters.num_hit_tokens < found


def random_requests(rng: random.Random, count: int) -> list[WorkloadRequest]:
    arrivals = itertools.accumulate(rng.randrange(6000) for _ in range(count))
    return [
        request_of(
            number,
            at,
            rng.randint(1, 40),
            rng.randint(1, 20),
            prefix_ids=[rng.randrange(3), 10 + rng.randrange(9), 100 + number],
            abort=at + rng.randrange(20_000) if rng.random() < 0.2 else None,
        )
        for number, at in enumerate(arrivals)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_random_workloads_are_served_and_leave_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    num_host = rng.choice([0, 15, 60])
    fleet, _ = tiered(
        num_engines=rng.randint(1, 3),
        num_blocks=rng.choice([20, 40]),
        num_host=num_host,
        num_store=rng.choice([20, 500]) if not num_host else rng.choice([0, 100]),
        bandwidth=rng.choice([SECOND, SECOND / 100, IN_NO_TIME]),
        latency=rng.choice([0, 900]),
    )
    requests = random_requests(rng, 60)
    result = fleet.run(workload_of(*requests, prefix_block_size=8))
    assert {each.request_id for each in result.requests} == {each.request_id for each in requests}
    for each in result.requests:
        assert each.outcome in ("length", "abort")
    for engine in fleet.engines:
        pool = engine.scheduler.manager.pool
        assert pool.num_free == pool.num_blocks and not engine.scheduler.queues.requests
        engine.scheduler.check_invariants()


# ---------------------------------------------------------------- settings


SHARED: dict[str, object] = {
    "num_prompts": 60,
    "request_rate": 4.0,
    "random_prefix_len": 3000,
    "num_prefixes": 20,
    "random_input_len": 100,
    "random_output_len": 8,
    "num_kv_blocks": 1500,
}


def number(summary: dict[str, object], name: str) -> float:
    value = summary[name]
    assert isinstance(value, int | float)
    return value


def test_flags_of_tiers() -> None:
    plain = simulate(SHARED)
    assert "host_hit_rate" not in plain
    host = simulate(SHARED | {"kv_offloading_size": 20.0})
    assert number(host, "host_hit_rate") > 0.2
    assert number(host, "mean_ttft_ms") < 0.8 * number(plain, "mean_ttft_ms")
    slow = simulate(SHARED | {"kv_offloading_size": 20.0, "kv_offloading_bandwidth": 1.0})
    assert number(slow, "mean_ttft_ms") > number(host, "mean_ttft_ms")
    store = simulate(SHARED | {"kv_store_size": 20.0, "replicas": 2})
    assert store["host_hit_rate"] == 0.0 and number(store, "store_hit_rate") > 0
    both = simulate(SHARED | {"kv_store_size": 20.0, "kv_offloading_size": 5.0})
    assert number(both, "store_hit_rate") > 0 and number(both, "host_hit_rate") > 0
    assert ", and 10,240 in host memory; router" in str(host["setup"])
    lost = simulate(
        SHARED | {"kv_offloading_size": 20.0, "failures": "0@8", "cold_start": 0.5, "replicas": 1}
    )
    assert 0 < number(lost, "host_hit_rate") < number(host, "host_hit_rate")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offloading_size": 1e-6}, "has no room for a KV block of 2,097,152 bytes: raise it"),
        ({"kv_store_size": 1.0, "enable_prefix_caching": False}, "needs --enable-prefix-caching"),
    ],
)
def test_mistakes(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simulate(settings)


def test_machines_know_their_link_to_host_memory() -> None:
    names: Sequence[str] = ("A100", "L40S", "H100", "H200", "B200")
    assert [find_machine(name).host.bandwidth for name in names] == [32e9, 32e9, 64e9, 64e9, 64e9]
