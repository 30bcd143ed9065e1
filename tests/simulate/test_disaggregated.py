"""Prefill and decode on separate simulated engines."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import resolve
from nanovllm.kv_transfer.connector import KVConnectorScheduler
from nanovllm.simulate.disaggregated import DecodeConnector, DisaggregatedFleet, PrefillConnector
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import RoundRobin
from nanovllm.simulate.results import ServedRequest
from nanovllm.simulate.workload import SECOND
from tests.simulate.engines import AffineCost, request_of, workload_of

BLOCK = 4
# Bytes per token, and a byte per picosecond.
KV_BYTES = 10


def engine_of(
    kind: type[PrefillConnector] | type[DecodeConnector], num_blocks: int = 100, **options: Any
) -> SimulatedEngine:
    config = EngineConfig(
        num_kv_blocks=num_blocks, block_size=BLOCK, check_invariants=True, **options
    )
    resolved = resolve(
        config, model_max_len=4096, num_kv_blocks=num_blocks, num_host_blocks=num_blocks
    )
    connector: KVConnectorScheduler = kind(config, {}, ())
    scheduler = create_scheduler(resolved, create_manager(resolved), connector)
    return SimulatedEngine(scheduler, AffineCost(), steps_ahead=int(resolved.async_scheduling))


def fleet_of(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    num_blocks: int = 100,
    latency: int = 0,
    first_token: str = "decode",
    **options: Any,
) -> DisaggregatedFleet:
    return DisaggregatedFleet(
        [engine_of(PrefillConnector, num_blocks, **options) for _ in range(num_prefill)],
        [engine_of(DecodeConnector, num_blocks, **options) for _ in range(num_decode)],
        (RoundRobin(num_prefill), RoundRobin(num_decode)),
        bandwidths=(SECOND, SECOND),
        latency=latency,
        kv_bytes_per_token=KV_BYTES,
        first_token=first_token,
    )


def by_id(requests: list[ServedRequest]) -> dict[str, ServedRequest]:
    return {request.request_id: request for request in requests}


def check_empty(fleet: DisaggregatedFleet) -> None:
    """All blocks are free, and no request is left."""
    for engine in fleet.engines:
        pool = engine.scheduler.manager.pool
        assert pool.num_free == pool.num_blocks and not engine.scheduler.queues.requests
        engine.scheduler.check_invariants()


# With `AffineCost`, a step takes 1000, 100 per computed token, and 1 per token of context.


def test_times_of_one_request() -> None:
    fleet = fleet_of(latency=70)
    result = fleet.run(workload_of(request_of(0, 50, prompt=10, output=3)))
    (served,) = result.requests
    prefilled = 50 + 1000 + 10 * 100 + 10
    # The prompt has three blocks; its last token is computed again.
    arrived = prefilled + 70 + 3 * BLOCK * KV_BYTES
    assert served.first_token == arrived + 1000 + 100 + 10
    assert served.last_token == served.first_token + 2 * 1100 + 11 + 12
    assert (served.num_prompt_tokens, served.num_output_tokens, served.replica) == (10, 3, 1)
    assert (result.gaps.count, result.gaps.total) == (2, 2 * 1100 + 11 + 12)
    assert (fleet.links.num_transfers, fleet.links.num_bytes) == (1, 120)
    assert fleet.links.time == 190
    prefill, decode = result.replicas
    assert (prefill.num_steps, decode.num_steps) == (1, 3)
    check_empty(fleet)


def test_a_request_queues_until_the_prefill_engine_computes_it() -> None:
    fleet = fleet_of(max_num_seqs=1, async_scheduling=False)
    requests = [request_of(0, 0, prompt=10, output=3), request_of(1, 100, prompt=10, output=3)]
    served = by_id(fleet.run(workload_of(*requests)).requests)
    assert (served["r0"].scheduled, served["r1"].scheduled) == (0, 2010)


def test_the_first_token_may_come_from_the_prefill_engine() -> None:
    fleet = fleet_of(first_token="prefill")
    requests = [request_of(0, 50, prompt=10, output=3), request_of(1, 10**6, prompt=10, output=1)]
    result = fleet.run(workload_of(*requests))
    served = by_id(result.requests)
    assert served["r0"].first_token == 50 + 2010
    assert served["r0"].last_token == 50 + 2010 + 120 + 2 * 1100 + 11 + 12
    assert (served["r0"].num_prompt_tokens, served["r0"].num_output_tokens) == (10, 3)
    assert result.gaps.longest == 120 + 1111
    # A single token needs no decode engine.
    assert (served["r1"].last_token, served["r1"].replica) == (10**6 + 2010, 0)
    assert fleet.links.num_transfers == 1
    check_empty(fleet)


def test_two_transfers_share_the_link_of_their_decode_engine() -> None:
    fleet = fleet_of(num_prefill=2)
    requests = [request_of(i, 0, prompt=40, output=1) for i in range(2)]
    served = by_id(fleet.run(workload_of(*requests)).requests)
    prefilled = 1000 + 40 * 100 + 40
    # Both end at the same time, which is twice the time of one; the report of the first begins a
    # step, which the second misses.
    arrived = prefilled + 2 * 400
    assert served["r0"].last_token == arrived + 1000 + 100 + 40
    assert served["r1"].last_token == served["r0"].last_token + 1140
    assert fleet.links.time == 2 * 800


def test_a_decode_engine_reads_only_what_its_cache_lacks() -> None:
    fleet = fleet_of()
    requests = [
        request_of(0, 0, prompt=20, output=2, prefix_ids=[1, 2, 3]),
        request_of(1, 10**6, prompt=22, output=2, prefix_ids=[1, 2, 4]),
        request_of(2, 2 * 10**6, prompt=17, output=2, prefix_ids=[1, 2, 5]),
    ]
    result = fleet.run(workload_of(*requests, prefix_block_size=8))
    assert [each.num_cached_tokens for each in result.requests] == [0, 16, 16]
    # Five blocks, then the two after the shared ones; the last misses a single token.
    assert (fleet.links.num_transfers, fleet.links.num_bytes) == (2, (5 + 2) * BLOCK * KV_BYTES)
    check_empty(fleet)


def test_a_full_decode_engine_keeps_prompts_in_the_prefill_engine() -> None:
    fleet = fleet_of(num_blocks=12, max_num_batched_tokens=64, max_num_seqs=8)
    requests = [request_of(i, i, prompt=30, output=6) for i in range(4)]
    result = fleet.run(workload_of(*requests))
    assert {each.outcome for each in result.requests} == {"length"}
    assert [each.request_id for each in result.requests] == ["r0", "r1", "r2", "r3"]
    prefill = result.replicas[0]
    assert prefill.busy == 4 * 4030, "one prompt after another, since a held one fills the pool"
    ends = [each.last_token or 0 for each in result.requests]
    assert all(late - early > 6 * 1100 for early, late in itertools.pairwise(ends))
    check_empty(fleet)


def test_a_prompt_that_fits_no_engine_is_rejected_and_an_abort_frees_everything() -> None:
    fleet = fleet_of(num_blocks=10)
    requests = [
        request_of(0, 0, prompt=60, output=6),
        request_of(1, 1, prompt=20, output=9, abort=1500),  # in prefill
        request_of(2, 10**5, prompt=20, output=9, abort=10**5 + 3100),  # during the transfer
        request_of(3, 2 * 10**5, prompt=20, output=9, abort=2 * 10**5 + 6000),  # in decode
    ]
    served = by_id(fleet.run(workload_of(*requests)).requests)
    outcomes = [served[f"r{i}"].outcome for i in range(4)]
    assert outcomes == ["rejected", "abort", "abort", "abort"]
    assert served["r3"].num_output_tokens > 0
    check_empty(fleet)


@pytest.mark.parametrize("seed", range(30))
def test_random_workloads_are_served_and_leave_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)
    fleet = fleet_of(
        rng.randint(1, 3),
        rng.randint(1, 3),
        num_blocks=rng.choice([20, 40, 200]),
        latency=rng.choice([0, 500]),
        first_token=rng.choice(["decode", "prefill"]),
        max_num_seqs=rng.choice([2, 8]),
        max_num_batched_tokens=rng.choice([16, 64]),
        async_scheduling=rng.random() < 0.5,
    )
    requests = []
    at = 0
    for number in range(40):
        at += rng.randrange(6000)
        ids = [rng.randrange(3), 10 + rng.randrange(5), 100 + number]
        output = rng.randint(1, 30)
        abort = at + rng.randrange(20_000) if rng.random() < 0.2 else None
        requests.append(
            request_of(number, at, rng.randint(1, 40), output, prefix_ids=ids, abort=abort)
        )
    result = fleet.run(workload_of(*requests, prefix_block_size=8))
    served = by_id(result.requests)
    assert len(served) == len(result.requests) == 40
    for source in requests:
        request = served[source.request_id]
        assert request.num_prompt_tokens == source.num_prompt_tokens
        if request.outcome == "length":
            assert request.num_output_tokens == source.num_output_tokens
            assert request.first_token is not None and request.last_token is not None
            assert source.arrival < request.first_token <= request.last_token
        else:
            assert request.outcome == "abort" and source.abort is not None
    check_empty(fleet)
