"""Fleets that are several things at once, such as prefill engines in lock-step that fail: with
times that can be worked out by hand, and at random."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from nanovllm.distributed.cost_model import Link
from nanovllm.kv_transfer.connector import KVConnectorScheduler
from nanovllm.kv_transfer.stores.store import HostKeys
from nanovllm.simulate.assembly import create_engine
from nanovllm.simulate.disaggregated import (
    DecodeConnector,
    DisaggregatedFleet,
    PrefillConnector,
    TieredDecodeConnector,
    TieredPrefillConnector,
)
from nanovllm.simulate.drafts import DraftingRunner
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet, RoundRobin
from nanovllm.simulate.lock_step import LockStepEngine, put_in_lock_step
from nanovllm.simulate.outages import Outage, UnreliableFleet
from nanovllm.simulate.results import ServedRequest
from nanovllm.simulate.tiers import TierConnector, Tiers
from nanovllm.simulate.workload import SECOND, Workload, WorkloadRequest
from tests.simulate.engines import AffineCost, config_of, groups_of, request_of, workload_of
from tests.simulate.exact import case_of

# Tokens per block. A token's KV has 10 bytes, and links move a byte in a picosecond.
BLOCK = 4
KV_BYTES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A fleet of small engines.

    Attributes:
        prefill: engines that only compute prompts; 0: all engines do everything.
        num_host, num_store: blocks in each engine's host memory, and in a shared store.
    """

    prefill: int = 0
    engines: int = 2
    group_size: int = 1
    in_lock_step: bool = True
    outages: Sequence[Outage] = ()
    acceptance: Sequence[float] = ()
    num_host: int = 0
    num_store: int = 0
    num_blocks: int = 100
    latency: int = 0
    first_token: str = "decode"
    swaps: bool = False
    by_priority: bool = False

    def fleet(self) -> tuple[UnreliableFleet, Tiers | None]:
        """Create the fleet, and what is below the devices."""
        store = HostKeys(self.num_store) if self.num_store else None
        has_tiers = bool(self.num_host or self.num_store)
        options: dict[str, Any] = {}
        if has_tiers:
            options = {"kv_offloading_size": 1.0} if self.num_host else {"kv_connector": "pool"}
        if self.acceptance:
            number = len(self.acceptance)
            options["speculative_config"] = json.dumps(
                {
                    "method": "eagle3",
                    "num_speculative_tokens": number,
                    "num_speculative_tokens_per_batch_size": [[1, 1000, number]],
                }
            )
        config = config_of(
            self.num_blocks,
            block_size=BLOCK,
            async_scheduling=False,
            check_invariants=True,
            preemption_mode="swap" if self.swaps else "recompute",
            scheduling_policy="priority" if self.by_priority else "fcfs",
            **options,
        )

        def create(is_prefill: bool) -> LockStepEngine:
            kinds: tuple[type[KVConnectorScheduler], type[TierConnector]] | None
            kinds = DecodeConnector, TieredDecodeConnector
            if is_prefill:
                kinds = PrefillConnector, TieredPrefillConnector
            connector: KVConnectorScheduler | None = None
            if has_tiers:
                kind = kinds[1] if self.prefill else TierConnector
                connector = kind(config.given, self.num_host, store)
            elif self.prefill:
                connector = kinds[0](config.given, {}, ())
            return create_engine(
                LockStepEngine,
                config,
                AffineCost(),
                connector=connector,
                runner=DraftingRunner(self.acceptance) if self.acceptance else None,
                fast=False,
            )

        engines = [create(i < self.prefill) for i in range(self.engines)]
        put_in_lock_step(engines, self.group_size if self.in_lock_step else 1)
        fleet = self._fleet(engines)
        link = Link("test", self.latency / SECOND, SECOND)
        sizes = [KV_BYTES * BLOCK] * self.engines
        hosts = [link] * self.engines
        return fleet, Tiers(fleet, hosts, link, sizes) if has_tiers else None

    def _fleet(self, engines: Sequence[SimulatedEngine]) -> UnreliableFleet:
        groups = groups_of(self.engines, self.group_size)
        if not self.prefill:
            router = RoundRobin(self.engines)
            return UnreliableFleet(engines, router, self.outages, groups=groups)
        return DisaggregatedFleet(
            engines[: self.prefill],
            engines[self.prefill :],
            (RoundRobin(self.prefill), RoundRobin(self.engines - self.prefill)),
            self.outages,
            bandwidths=(SECOND, SECOND),
            latency=self.latency,
            kv_bytes_per_token=KV_BYTES,
            first_token=self.first_token,
            groups=groups,
        )

    def run(self, *requests: WorkloadRequest) -> dict[str, ServedRequest]:
        """Serve requests, each of which ends once and leaves nothing behind."""
        fleet, _ = self.fleet()
        return ended(fleet, workload_of(*requests, prefix_block_size=8))


def ended(fleet: Fleet, workload: Workload) -> dict[str, ServedRequest]:
    """Serve requests, each of which ends once and leaves nothing behind."""
    requests = list(workload.requests)
    result = fleet.run(workload)
    served = {each.request_id: each for each in result.requests}
    assert len(result.requests) == len(requests) == len(served)
    for source in requests:
        request = served[source.request_id]
        assert request.arrival == source.arrival
        assert request.num_prompt_tokens == source.num_prompt_tokens
        assert request.outcome in ("length", "abort", "failed")
        if request.outcome == "length":
            assert request.num_output_tokens == source.num_output_tokens
            assert request.first_token is not None and request.last_token is not None
            assert source.arrival < request.first_token <= request.last_token
        else:
            assert request.num_output_tokens <= source.num_output_tokens
        if request.first_token is not None:
            assert request.scheduled is not None
            assert source.arrival <= request.scheduled < request.first_token
        if request.outcome == "abort":
            assert source.abort is not None
    for engine in fleet.engines:
        pool = engine.scheduler.manager.pool
        assert pool.num_free == pool.num_blocks and not engine.scheduler.queues.requests
        assert engine.end is None
        engine.scheduler.check_invariants()
    return served


# With `AffineCost`, a step takes 1000, 100 per computed token, and 1 per token of context. A prompt
# of 10 tokens takes 2010, and 120 over a link.


def test_the_prompt_of_a_prefill_engine_that_fails_is_computed_by_another() -> None:
    setup = Setup(prefill=2, engines=3, outages=[Outage(0, 1000, None)])
    served = setup.run(request_of(0, 0, prompt=10, output=2))["r0"]
    # The router learns of it at 2010.
    assert served.first_token == 2010 + 2010 + 120 + 1000 + 100 + 10
    assert (served.outcome, served.last_token) == ("length", served.first_token + 1111)


def test_blocks_that_do_not_arrive_are_computed_by_the_decode_engine() -> None:
    setup = Setup(prefill=1, engines=2, outages=[Outage(0, 2100, None)], latency=70)
    served = setup.run(request_of(0, 0, prompt=10, output=2))["r0"]
    assert served.first_token == 2010 + 70 + 120 + 2010


def test_without_prefill_engines_decode_engines_compute_prompts() -> None:
    setup = Setup(prefill=1, engines=2, outages=[Outage(0, 0, 50_000)])
    requests = [request_of(i, 50 + 60_000 * i, prompt=10, output=2) for i in range(2)]
    served = setup.run(*requests)
    assert served["r0"].first_token == 50 + 2010
    assert served["r1"].first_token == 60_050 + 2010 + 120 + 1110


def test_a_prompt_that_waits_for_its_decode_engine_is_lost_with_its_prefill_engine() -> None:
    # The decode engine has no room for r1 before r0 has ended.
    setup = Setup(prefill=1, engines=2, outages=[Outage(0, 8000, None)], num_blocks=12)
    served = setup.run(*(request_of(i, 0, prompt=22, output=20) for i in range(2)))
    r0_first = 1000 + 22 * 100 + 22 + 240 + 1000 + 100 + 22
    assert served["r0"].first_token == r0_first
    assert served["r0"].last_token == r0_first + sum(1100 + 22 + i for i in range(1, 20))
    assert served["r0"].last_token > 8000
    assert served["r1"].first_token == served["r0"].last_token + 1000 + 2200 + 22


def test_a_request_of_a_decode_engine_that_fails_begins_again() -> None:
    request = request_of(0, 0, prompt=10, output=3)
    # During the transfer, which occupies the link until 2130; the engine is idle.
    served = Setup(prefill=1, engines=3, outages=[Outage(1, 2050, None)]).run(request)["r0"]
    assert served.first_token == 2050 + 2010 + 120 + 1110
    assert (served.outcome, served.replica) == ("length", 2)
    # With a token, it fails: the second one comes with the step in flight.
    served = Setup(prefill=1, engines=3, outages=[Outage(1, 3500, None)]).run(request)["r0"]
    assert (served.outcome, served.num_output_tokens) == ("failed", 2)
    # Without another one, too.
    served = Setup(prefill=1, engines=2, outages=[Outage(1, 2050, None)]).run(request)["r0"]
    assert (served.outcome, served.num_output_tokens) == ("failed", 0)


def test_a_group_fails_together() -> None:
    requests = [request_of(i, 5 * i, prompt=10, output=2) for i in range(4)]
    setup = Setup(engines=4, group_size=2, outages=[Outage(1, 1000, None)])
    served = setup.run(*requests)
    # At 2010, r0 has its first token, and r1 waits for the second step.
    assert (served["r0"].outcome, served["r0"].num_output_tokens) == ("failed", 1)
    # r1 goes to engine 2, whose group ends a step at 2020. Its next step takes the longest: a token
    # of r2, and the prompt of r1.
    assert served["r1"].first_token == 2020 + 1000 + 1100 + 11 + 10
    assert served["r3"].first_token == served["r1"].first_token
    assert [served[f"r{i}"].replica for i in (1, 2, 3)] == [2, 2, 3]


def test_idle_engines_of_a_group_that_fails_lose_their_requests_at_once() -> None:
    requests = [request_of(i, 0, prompt=10, output=3) for i in range(2)]
    setup = Setup(
        prefill=2, engines=6, group_size=2, in_lock_step=False, outages=[Outage(2, 2050, None)]
    )
    served = setup.run(*requests)
    # During the transfers of both. The links of the prefill engines are occupied until 2130.
    assert served["r0"].first_token == served["r1"].first_token == 2050 + 2010 + 120 + 1110
    assert [served[f"r{i}"].replica for i in range(2)] == [4, 5]


def test_prefill_engines_in_lock_step() -> None:
    requests = [request_of(0, 0, prompt=10, output=3), request_of(1, 5, prompt=100, output=1)]
    served = Setup(prefill=2, engines=4, group_size=2).run(*requests)
    assert served["r0"].last_token == 2010 + 120 + 1110 + 1111 + 1112
    prefilled = 2010 + 1000 + 100 * 100 + 100
    assert served["r1"].first_token == prefilled + 1000 + 1000 + 100 + 100


def test_decode_engines_in_lock_step() -> None:
    requests = [request_of(0, 0, prompt=10, output=9), request_of(1, 2010, prompt=10, output=1)]
    served = Setup(prefill=2, engines=4, group_size=2).run(*requests)
    # r0's steps end at 3240, 4351, 5463. The prompt of r1 is computed at 4020, its engine begins to
    # read it at 4351, and its step at 5463 takes as long as that of r0.
    assert served["r1"].first_token == 5463 + 1113


def test_drafts_in_lock_step() -> None:
    requests = [request_of(0, 0, prompt=10, output=9), request_of(1, 5, prompt=100, output=1)]
    served = Setup(group_size=2, acceptance=[1.0, 1.0]).run(*requests)
    assert served["r1"].last_token == 2010 + 11_100
    # Its second step takes as long as the prompt of r1; two tokens are drafted after it.
    steps = [1300 + 14, 1300 + 17, 1100 + 18]
    assert served["r0"].last_token == 2010 + 11_100 + sum(steps)


def test_a_prefill_engine_loads_a_prompt_from_host_memory() -> None:
    ids = [[1, 2, 3], [10, 11, 12, 13, 14], [1, 2, 3]]
    requests = [
        request_of(i, 10**6 * i, prompt, output=1, prefix_ids=prefix_ids)
        for i, (prompt, prefix_ids) in enumerate(zip([21, 47, 21], ids, strict=True))
    ]
    hit = 1000 + 100 + 21
    for num_host, prefill in ((50, 7 + 5 * BLOCK * KV_BYTES + hit), (0, 1000 + 2100 + 21)):
        # The second prompt fills the pools of both engines.
        setup = Setup(prefill=1, num_blocks=12, num_host=num_host, num_store=2, latency=7)
        served = setup.run(*requests)["r2"]
        assert served.first_token is not None
        transfer = 7 + 6 * BLOCK * KV_BYTES
        assert served.first_token - served.arrival == prefill + transfer + hit


def test_prefill_engines_load_what_decode_engines_have_generated() -> None:
    # The second prompt is the first one with its output.
    requests = [
        request_of(0, 0, prompt=8, output=13, prefix_ids=[1, 2, 3]),
        request_of(1, 10**6, prompt=25, output=1, prefix_ids=[1, 2, 3, 4]),
    ]
    fleet, tiers = Setup(prefill=1, num_store=50).fleet()
    ended(fleet, Workload(requests, prefix_block_size=8, names_outputs=True))
    # Two of five blocks are in the prefill engine's pool.
    assert tiers is not None and tiers.num_store_blocks == 3


def random_outages(rng: random.Random, num_engines: int) -> list[Outage]:
    begins = [rng.randrange(150_000) for _ in range(rng.randint(1, 4))]
    return [
        Outage(
            rng.randrange(num_engines),
            begin,
            rng.choice([None, begin + rng.choice([0, 500, 90_000])]),
        )
        for begin in begins
    ]


@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_once_in_every_combination(seed: int) -> None:
    rng = random.Random(seed)
    group_size = rng.choice([1, 2, 2])
    prefill = group_size * rng.choice([0, 1, 2])
    engines = prefill + group_size * rng.randint(1, 2)
    num_host = rng.choice([0, 0, 15, 60])
    setup = Setup(
        prefill=prefill,
        engines=engines,
        group_size=group_size,
        outages=random_outages(rng, engines) if rng.random() < 0.7 else [],
        acceptance=rng.choice([[], [], [0.8, 0.4]]),
        num_host=num_host,
        num_store=rng.choice([0, 30, 500]),
        num_blocks=rng.choice([24, 40, 200]),
        latency=rng.choice([0, 500]),
        first_token=rng.choice(["decode", "prefill"]) if prefill else "decode",
        swaps=seed % 2 == 1,
        by_priority=seed % 4 > 1,
    )
    at = 0
    requests = []
    for number in range(40):
        at += rng.randrange(6000)
        ids = [rng.randrange(3), 10 + rng.randrange(5), 100 + number]
        abort = at + rng.randrange(20_000) if rng.random() < 0.2 else None
        prompt = rng.randint(1, 40)
        output = rng.randint(1, 30)
        options = {"prefix_ids": ids, "abort": abort, "priority": number * 7 % 3}
        requests.append(request_of(number, at, prompt, output, **options))
    served = setup.run(*requests)
    if not setup.outages:
        assert "failed" not in {each.outcome for each in served.values()}
    assert served == setup.run(*requests), "the same every time"


@pytest.mark.parametrize("seed", range(60))
def test_with_failures_steps_at_once_are_equal_to_steps_one_by_one(seed: int) -> None:
    case = case_of(seed)
    outages = random_outages(random.Random(seed), 2)
    config = config_of(**case.options)
    results = []
    for fast in (False, True):
        engines = [
            create_engine(SimulatedEngine, config, AffineCost(), fast=fast) for _ in range(2)
        ]
        fleet = UnreliableFleet(engines, RoundRobin(2), outages)
        result = fleet.run(
            Workload(case.requests, case.prefix_block_size, names_outputs=case.names_outputs)
        )
        assert len(result.requests) == len(case.requests)
        results.append((result.requests, result.replicas, vars(result.gaps), result.duration))
    assert results[0] == results[1]
