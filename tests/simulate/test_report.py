"""The summary of a simulation: vLLM's names and formulas, goodput, replicas and prices."""

import dataclasses
import json
import random

import numpy as np
import pytest

from nanovllm.assembly.flags import parse_numbers
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.data.errors import UsageError
from nanovllm.simulate.assembly import create_engine
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.report import TIMES, percentile, summarize
from nanovllm.simulate.results import FleetResult, ReplicaCounters, ServedRequest, TokenGaps
from nanovllm.simulate.workload import SECOND
from tests.simulate.engines import AffineCost, config_of, engine_of, request_of, workload_of

MS = SECOND // 1000


@dataclasses.dataclass(frozen=True)
class Facts:
    """An engine that is limited by its steps."""

    num_kv_blocks: int = 1
    role: str = ""

    def bottleneck(self, counters: ReplicaCounters) -> str:
        return f"{counters.num_steps} steps"


def served(ttft: int, tpot: int, output: int, outcome: str = "length") -> ServedRequest:
    """A request with these times in ms."""
    return ServedRequest(
        request_id="",
        arrival=5 * MS,
        num_prompt_tokens=100,
        num_output_tokens=output,
        first_token=(5 + ttft) * MS,
        last_token=(5 + ttft + tpot * (output - 1)) * MS,
        replica=0,
        outcome=outcome,
    )


def result_of(*requests: ServedRequest) -> FleetResult:
    gaps = TokenGaps()
    gaps.add(30 * MS, 3)
    counters = ReplicaCounters(
        num_steps=4,
        num_decodes=8,
        busy=SECOND,
        num_requests=len(requests),
        num_preemptions=2,
        num_queried_tokens=400,
        num_hit_tokens=100,
    )
    return FleetResult(requests=list(requests), replicas=[counters], gaps=gaps, duration=2 * SECOND)


def test_percentiles_are_numpys() -> None:
    rng = random.Random(0)
    for size in (1, 2, 3, 10, 101):
        values = sorted(rng.random() for _ in range(size))
        for percent in (0, 50, 90, 99, 100):
            assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([], 50) == 0.0


def test_times_and_throughputs_are_vllms() -> None:
    summary = summarize(
        result_of(
            served(100, 20, 11), served(300, 40, 21), served(50, 10, 1), served(9, 9, 9, "abort")
        )
    )
    assert summary["completed"] == 3
    assert summary["outcomes"] == {"length": 3, "abort": 1}
    assert summary["total_input_tokens"] == 300
    assert summary["total_output_tokens"] == 33
    assert summary["request_throughput"] == 1.5
    assert summary["total_token_throughput"] == 333 / 2
    assert summary["mean_ttft_ms"] == pytest.approx(150)
    assert summary["median_ttft_ms"] == 100
    assert summary["p99_ttft_ms"] == pytest.approx(np.percentile([50, 100, 300], 99))
    assert summary["mean_tpot_ms"] == 30, "a single token has no time per token"
    assert summary["p90_e2el_ms"] == pytest.approx(np.percentile([300, 1100, 50], 90))
    assert summary["mean_itl_ms"] == 30
    assert summary["prefix_cache_hit_rate"] == 0.25
    assert summary["num_preemptions"] == 2
    (replica,) = summary["replicas"]
    assert (replica["utilization"], replica["mean_num_decodes"]) == (0.5, 2)
    assert json.loads(json.dumps(summary)) == summary


def test_goodput_counts_requests_that_meet_all_objectives() -> None:
    requests = [
        served(100, 20, 11),
        served(201, 20, 11),
        served(100, 51, 2),
        served(100, 999, 1),  # no second token
        served(1, 1, 1, "abort"),
    ]
    goodput = parse_numbers("--goodput", ["ttft:200", "tpot:50"], TIMES, "a time")
    summary = summarize(result_of(*requests), goodput=goodput)
    assert summary["request_goodput"] == 1.0
    assert summary["slo_attainment"] == 0.4
    assert "slo_attainment" not in summarize(result_of(*requests))


@pytest.mark.parametrize(
    "word", ["itl:3", "ttft", "ttft:", "ttft:x", "tpot:-1", "e2el:nan", "e2el:inf"]
)
def test_a_wrong_objective_is_named(word: str) -> None:
    with pytest.raises(UsageError, match=f"a name of ttft, tpot, e2el .* got '{word}'"):
        parse_numbers("--goodput", [word], TIMES, "a time")


def test_prices_are_per_million_tokens() -> None:
    summary = summarize(result_of(served(100, 20, 100)), dollars_per_hour=3600.0)
    assert summary["dollars_per_million_tokens"] == pytest.approx(2.0 / 200 * 1e6)
    assert summary["dollars_per_million_output_tokens"] == pytest.approx(2.0 / 100 * 1e6)


def test_without_output_there_is_no_price_of_it_but_a_reason() -> None:
    requests = [request_of(i, 0, prompt=9000 + i, output=1) for i in range(3)]
    result = Fleet([engine_of()]).run(workload_of(*requests))
    # Refused at once, although an engine costs money as long as it is there.
    summary = summarize(dataclasses.replace(result, duration=SECOND), dollars_per_hour=3600.0)
    assert summary["outcomes"] == {"rejected": 3}
    assert summary["rejection"] == "a prompt must have 1 to 1599 tokens here, got 9000"
    assert not any(name.startswith("dollars") for name in summary)
    assert "rejection" not in summarize(result_of(served(100, 20, 11)))


def test_a_fleet_without_requests_has_a_summary() -> None:
    summary = summarize(FleetResult(replicas=[ReplicaCounters()]), goodput={"ttft": 1.0})
    assert (summary["completed"], summary["p99_ttft_ms"], summary["slo_attainment"]) == (
        0,
        0.0,
        0.0,
    )


def test_a_summary_adds_up() -> None:
    requests = [request_of(i, i * 700, prompt=20 + i, output=1 + i % 5) for i in range(30)]
    result = Fleet([engine_of(), engine_of()]).run(workload_of(*requests))
    summary = summarize(result, engines=[Facts(), Facts()])
    assert summary["completed"] == 30
    assert sum(replica["num_requests"] for replica in summary["replicas"]) == 30
    assert summary["replicas"][0]["bottleneck"].endswith(" steps")
    ttft, tpot, e2el = (summary[f"mean_{name}_ms"] for name in ("ttft", "tpot", "e2el"))
    assert 0 < tpot < ttft < e2el


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_queues_until_the_first_step_that_computes_it_is_planned(
    async_scheduling: bool,
) -> None:
    engine = engine_of(block_size=4, max_num_seqs=1, async_scheduling=async_scheduling)
    requests = [
        request_of(0, 0, prompt=10, output=2),
        request_of(1, 100, prompt=10, output=1),
        request_of(2, 200, prompt=9000, output=1),  # rejected: it never queues
    ]
    result = Fleet([engine]).run(workload_of(*requests))
    # A step takes 1000, 100 per computed token, and 1 per token of context.
    ends = 2010 + 1111
    scheduled = {each.request_id: each.scheduled for each in result.requests}
    assert scheduled == {"r0": 0, "r1": ends, "r2": None}
    summary = summarize(result)
    assert summary["mean_queue_time_ms"] == pytest.approx((ends - 100) / 2 / MS)
    assert summary["p99_queue_time_ms"] == pytest.approx(0.99 * (ends - 100) / MS)


def test_preemption_does_not_queue_a_request_again() -> None:
    requests = [request_of(i, i, prompt=14, output=30) for i in range(3)]
    result = Fleet([engine_of(16, block_size=4)]).run(workload_of(*requests))
    assert sum(each.num_preemptions for each in result.requests) > 0
    assert all(
        each.scheduled is not None and each.scheduled < (each.first_token or 0)
        for each in result.requests
    )


class MeasuredEngine(SimulatedEngine):
    """Notes the use of the block pool as each step is planned."""

    def _launch(self, plan: SchedulerOutput, now: int) -> None:
        super()._launch(plan, now)
        vars(self).setdefault("usages", []).append(self.scheduler.manager.pool.usage)


def test_requests_with_the_same_prefix_hold_its_blocks_once() -> None:
    """Eight requests attend to more tokens than the pool has, since they share 32 of them."""
    requests = [
        request_of(i, 9000 * (i > 0), prompt=36, output=20, prefix_ids=[1]) for i in range(8)
    ]
    work = workload_of(*requests, prefix_block_size=32)
    config = config_of(num_blocks=64, block_size=4)
    singly = create_engine(MeasuredEngine, config, AffineCost(), fast=False)
    Fleet([singly]).run(work)
    usages = vars(singly)["usages"]
    assert singly.counters.decode_context > 64 * 4 * len(usages)
    result = Fleet([create_engine(SimulatedEngine, config, AffineCost())]).run(work)
    (replica,) = summarize(result, engines=[Facts(num_kv_blocks=64)])["replicas"]
    assert replica["mean_kv_usage"] == pytest.approx(sum(usages) / len(usages))
    assert max(usages) < 1
