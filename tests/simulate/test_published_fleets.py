"""Fleets that others have measured or simulated: their inputs give their order, and about their
figures."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import resolve
from nanovllm.router.policies import Router, RouterState, Weights
from nanovllm.simulate.arrivals import SyntheticWorkload, create_workload
from nanovllm.simulate.cost import StepCost, StepWork
from nanovllm.simulate.disaggregated import DecodeConnector, DisaggregatedFleet, PrefillConnector
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet, RoundRobin
from nanovllm.simulate.requests import RequestMaker
from nanovllm.simulate.results import ServedRequest
from nanovllm.simulate.routers import PolicyRouter
from nanovllm.simulate.traces import read_workload
from nanovllm.simulate.workload import SECOND, Workload, WorkloadRequest
from tests.simulate.engines import engine_of

MILLISECOND = SECOND // 1000
MICROSECOND = SECOND // 10**6


class PlainCost:
    """A step takes `base`, and more per computed token of prompts and per token of context.

    Args: in picoseconds.
    """

    def __init__(self, base: int, per_prompt_token: int, per_context_token: int) -> None:
        self.base = base
        self.per_prompt_token = per_prompt_token
        self.per_context_token = per_context_token

    def step(self, work: StepWork) -> int:
        """Return the time of a step."""
        context = work.decode_context + sum(start + count for start, count in work.prefills)
        computed = sum(count for _, count in work.prefills)
        return self.base + self.per_prompt_token * computed + self.per_context_token * context

    def decode(self, num_decodes: int) -> tuple[int, int]:
        """Return base and price per token of context."""
        return self.base, self.per_context_token


def engines_of(
    count: int, cost: PlainCost, kv_tokens: int, block_size: int, **options: int | bool | str
) -> list[SimulatedEngine]:
    """Engines of equal settings."""
    engines = [
        engine_of(kv_tokens // block_size, 2**20, block_size=block_size, **options)
        for _ in range(count)
    ]
    for engine in engines:
        engine.cost = cost
    return engines


def mean_ttft(requests: list[ServedRequest]) -> float:
    """The mean time to the first token, in seconds."""
    times = [r.first_token - r.arrival for r in requests if r.first_token is not None]
    assert len(times) == len(requests)
    return sum(times) / len(times) / SECOND


# ---------------------------------------------------------------- llm-d


@dataclass(frozen=True)
class Routed:
    """A stage of llm-d's benchmark: output tokens per second, and seconds."""

    throughput: float
    mean_ttft: float
    num_preemptions: int


LLMD_BLOCK = 64
LLMD_PROMPT = 7200


def llmd_requests(rate: float, seconds: float, num_output_tokens: int) -> Iterator[WorkloadRequest]:
    """15 requests per second for 50 s, which fill the caches, and after a pause the
    stage."""
    rng = random.Random(1)
    users = [(group, user) for group in range(150) for user in range(5)]
    rng.shuffle(users)
    number = 0
    begin = 0
    for stage, (stage_rate, length) in enumerate([(15.0, 50.0), (rate, seconds)]):
        at = begin + int(rng.expovariate(stage_rate) * SECOND)
        while at < begin + length * SECOND:
            group, user = users[number % len(users)]
            number += 1
            ids = [1000 * group + i for i in range(6000 // LLMD_BLOCK)]
            own = 10**6 + 1000 * (5 * group + user)
            ids += [own + i for i in range(-(-LLMD_PROMPT // LLMD_BLOCK) - len(ids))]
            yield WorkloadRequest(
                request_id=f"{stage}-{number}",
                arrival=at,
                num_prompt_tokens=LLMD_PROMPT,
                num_output_tokens=num_output_tokens if stage else 50,
                prefix_ids=ids,
            )
            at += int(rng.expovariate(stage_rate) * SECOND)
        begin += int((length + 60) * SECOND)


def llmd_stage(policy: str, weights: Weights | None, max_blocks: int) -> Routed:
    cost = PlainCost(12_000 * MICROSECOND, 66 * MICROSECOND, MICROSECOND // 20)
    engines = engines_of(8, cost, 307_328, LLMD_BLOCK, max_num_batched_tokens=8192)
    maker = RequestMaker(LLMD_BLOCK, LLMD_BLOCK)
    state = RouterState(8, capacity=31_250 * 16 // LLMD_BLOCK, weights=weights)
    router = PolicyRouter(
        Router(policy, state, max_blocks),
        lambda r: maker.prompt_names(r.prefix_ids, r.num_prompt_tokens),
        refresh=SECOND // 20,
    )
    if policy == "precise":
        router.watch(engines)
    requests = llmd_requests(rate=60, seconds=25, num_output_tokens=430)
    result = Fleet(engines, router).run(Workload("llm-d", requests, LLMD_BLOCK))
    stage = [request for request in result.requests if request.request_id.startswith("1-")]
    begin = min(request.arrival for request in stage)
    tokens = sum(request.num_output_tokens for request in stage)
    return Routed(
        throughput=tokens / (result.duration - begin) * SECOND,
        mean_ttft=mean_ttft(stage),
        num_preemptions=sum(each.num_preemptions for each in result.replicas),
    )


def test_llm_d_routes_in_its_published_order() -> None:
    """llm-d's benchmark "73-capacity" (llm-d-kv-cache-manager, 2025), stage of 60 requests per
    second: 8 servers with 307,328 KV tokens each, 150 groups of 5 users, 6,000 tokens per group and
    1,200 per user. Published: output tokens per second and mean TTFT in seconds of

        precise 10,497 and 0.28    estimated 7,248 and 24.3
        random   4,835 and 57.4    load      4,745 and 58.5

    The weights of the scorers are llm-d's. What is not given: the GPU, which follows from the KV
    memory (two H100s per server: 2 x 80 GB x 0.9 less 65.5 GB of weights), from whose data sheet
    the costs follow; and the lengths of outputs, 430 tokens, since 200 to 230 were seen alive per
    running request. The estimated prefix is counted in blocks of 64 characters, which are 16
    tokens, and ends after 256 blocks, so that it tells groups, but no users.

    Our TTFTs are shorter where a server does not saturate: HTTP and tokenization take no time."""
    precise = llmd_stage("precise", Weights(prefix=3, kv=2, queue=2), max_blocks=256)
    estimated = llmd_stage(
        "estimated", Weights(prefix=1, kv=1, queue=1), max_blocks=256 * 16 // LLMD_BLOCK
    )
    load = llmd_stage("load", Weights(prefix=0, kv=1, queue=1), max_blocks=0)
    chance = llmd_stage("random", None, max_blocks=0)
    assert precise.throughput > 1.3 * estimated.throughput
    assert estimated.throughput > 1.3 * max(load.throughput, chance.throughput)
    assert abs(load.throughput - chance.throughput) < 0.15 * chance.throughput
    assert 0.8 < chance.throughput / 4835 < 1.2 and 0.8 < load.throughput / 4745 < 1.2
    assert 0.7 < precise.throughput / 10_497 < 1.5 and 0.7 < estimated.throughput / 7248 < 1.4
    assert precise.mean_ttft < 0.3
    assert 2 < estimated.mean_ttft < 0.5 * min(load.mean_ttft, chance.mean_ttft)
    assert abs(load.mean_ttft - chance.mean_ttft) < 0.15 * chance.mean_ttft
    assert 40 < chance.mean_ttft < 75
    assert not precise.num_preemptions and chance.num_preemptions


# ---------------------------------------------------------------- DistServe

# Of ShareGPT's prompts and outputs, in tokens of OPT: each twentieth of the requests is between two
# numbers. From the 798 requests of DistServe's artifact, simdistserve/benchmarks/alignment.
SHAREGPT_PROMPTS = [
    *(2, 26, 85, 165, 243, 322, 376, 451, 505, 584, 666),
    *(756, 849, 936, 1068, 1153, 1307, 1421, 1525, 1722, 2003),
]
SHAREGPT_OUTPUTS = [
    *(1, 5, 9, 11, 14, 18, 23, 31, 40, 59, 81),
    *(118, 170, 219, 262, 315, 356, 404, 492, 623, 1809),
]


@dataclass(frozen=True)
class DistServeCost:
    """The cost model of DistServe's simulator: milliseconds of a step.

    Attributes:
        prefill: a, b, c of `a + b * (sum of prompts) + c * (sum of their squares)`.
        small, large: a, b, c of `a + b * context + c * requests`, for less than 95 requests, and
            for more.
        kv_tokens: capacity of an engine.
    """

    prefill: tuple[float, float, float]
    small: tuple[float, float, float]
    large: tuple[float, float, float]
    kv_tokens: int

    def step(self, work: StepWork) -> int:
        """Return the time of a step."""
        if not work.prefills:
            base, per_context = self.decode(work.num_decodes)
            return base + per_context * work.decode_context
        counts = [count for _, count in work.prefills]
        a, b, c = self.prefill
        # A pipeline adds 1 ms, and Ray 2 ms and 0.1 us per token.
        time = a + 3 + (b + 1e-4) * sum(counts) + c * sum(count**2 for count in counts)
        return round(time * MILLISECOND)

    def decode(self, num_decodes: int) -> tuple[int, int]:
        """Return base and price per token of context."""
        a, b, c = self.small if num_decodes < 95 else self.large
        return round((a + 2 + c * num_decodes) * MILLISECOND), round((b + 1e-4) * MILLISECOND)


# OPT-13B on A100s, by tensor-parallel size.
DISTSERVE = {
    1: DistServeCost(
        prefill=(18.10, 0.10191, 7.122e-6),
        small=(19.93, 6.269e-4, 3.851e-2),
        large=(7.166, 5.798e-4, 0.15831),
        kv_tokens=66_144,
    ),
    2: DistServeCost(
        prefill=(14.74, 0.06858, 2.450e-6),
        small=(13.29, 3.411e-4, 6.296e-2),
        large=(10.64, 3.118e-4, 8.563e-2),
        kv_tokens=163_008,
    ),
}


def draw_length(table: list[int], rng: random.Random) -> int:
    """A length between two numbers of the table."""
    place = rng.random() * (len(table) - 1)
    before = int(place)
    return round(table[before] + (table[before + 1] - table[before]) * (place - before))


def sharegpt_requests(rate: float, seed: int) -> Iterator[WorkloadRequest]:
    """300 requests. DistServe's decode engine generates the output; its prefill engine one token
    more."""
    rng = random.Random(seed)
    at = 0
    for number in range(300):
        yield WorkloadRequest(
            request_id=str(number),
            arrival=at,
            num_prompt_tokens=draw_length(SHAREGPT_PROMPTS, rng),
            num_output_tokens=draw_length(SHAREGPT_OUTPUTS, rng) + 1,
        )
        at += round(rng.expovariate(1) / rate * SECOND)


def distserve_engine(
    kind: type[PrefillConnector] | type[DecodeConnector], cost: DistServeCost
) -> SimulatedEngine:
    config = EngineConfig(
        num_kv_blocks=cost.kv_tokens // 16,
        max_num_batched_tokens=cost.kv_tokens,
        max_num_seqs=1024,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    resolved = resolve(
        config, model_max_len=4096, num_kv_blocks=cost.kv_tokens // 16, num_host_blocks=0
    )
    scheduler = create_scheduler(resolved, create_manager(resolved), kind(config))
    step_cost: StepCost = cost
    return SimulatedEngine(scheduler, step_cost)


def meets_targets(tp_prefill: int, tp_decode: int, rate_per_gpu: float, runs: int) -> bool:
    """Of all runs' requests, 90 % have a TTFT below 200 ms, and 90 % a TPOT below 100 ms."""
    first = []
    per_token = []
    for seed in range(runs):
        fleet = DisaggregatedFleet(
            [distserve_engine(PrefillConnector, DISTSERVE[tp_prefill])],
            [distserve_engine(DecodeConnector, DISTSERVE[tp_decode])],
            (RoundRobin(1), RoundRobin(1)),
            bandwidth=1e18,  # DistServe's simulator transfers in no time
            latency=0,
            kv_bytes_per_token=1,
            first_token="prefill",
        )
        requests = sharegpt_requests(rate_per_gpu * (tp_prefill + tp_decode), seed)
        for served in fleet.run(Workload("ShareGPT", requests)).requests:
            assert served.first_token is not None and served.last_token is not None
            first.append(served.first_token - served.arrival)
            decoding = served.last_token - served.first_token
            per_token.append(decoding / (served.num_output_tokens - 1))
    ninetieth = len(first) * 9 // 10 - 1
    return (
        sorted(first)[ninetieth] < 200 * MILLISECOND
        and sorted(per_token)[ninetieth] < 100 * MILLISECOND
    )


def test_distserve_serves_at_its_published_rate() -> None:
    """DistServe's simulator (OSDI 2024, simdistserve/README.md): OPT-13B on 4 A100s, ShareGPT,
    Poisson, 300 requests. Published: the best placement is tensor parallel 2 for prefill and 1 for
    decode, with 1.56 requests per second per GPU.

    With 300 requests and its bisection, that number depends on the seed: from 1.25 to 2.03 here,
    with a median of 1.56 of ten. So this test looks at four runs together. Lengths are drawn from
    the distribution of the published requests, prompts and outputs independently (their
    correlation is -0.12)."""
    assert meets_targets(2, 1, 1.56 - 0.25, runs=4)
    assert not meets_targets(2, 1, 1.56 + 0.25, runs=4)


def test_distserve_s_best_placement_is_the_best() -> None:
    """See above. At 1.56 requests per second per GPU, no other placement meets the targets; those
    that prefill on one GPU do not even at 0.8."""
    assert not meets_targets(2, 2, 1.56, runs=2)
    assert not meets_targets(1, 1, 0.8, runs=2)
    assert not meets_targets(1, 2, 0.8, runs=2)


# ---------------------------------------------------------------- Mooncake


def mooncake_workload(name: str) -> Workload:
    """3,000 requests of a public trace, or of sessions of about the same sizes."""
    if name == "sessions":
        settings = SyntheticWorkload(
            request_rate=3.4,
            num_prompts=3000,
            random_input_len=5000,
            random_output_len=343,
            random_range_ratio=0.9,
            num_turns=4,
            turn_interval=60,
        )
        return create_workload(settings, 512)
    folder = os.environ.get("NANOVLLM_TRACES")
    if folder is None:
        pytest.skip("set NANOVLLM_TRACES to a folder with the public Mooncake traces")
    return read_workload(Path(folder) / f"mooncake_{name}.jsonl.gz", limit=3000)


def mooncake_prefill(policy: str, name: str) -> tuple[float, float]:
    """Mean TTFT, and the time of all steps, in seconds: 10 prefill engines with 3 million KV tokens
    each, of LLaMA3-70B on 8 A800s (half of 312 TFLOP/s, 0.8 of 2.04 TB/s)."""
    cost = PlainCost(30_000 * MICROSECOND, 113 * MICROSECOND, MICROSECOND // 40)
    engines = engines_of(10, cost, 3_000_000, 512, max_num_batched_tokens=8192)
    router = PolicyRouter(
        Router(policy, RouterState(10, capacity=5859), max_blocks=256), lambda r: r.prefix_ids
    )
    workload = mooncake_workload(name)
    prompts = (msgspec.structs.replace(r, num_output_tokens=1) for r in workload.requests)
    result = Fleet(engines, router).run(Workload(name, prompts))
    return mean_ttft(result.requests), sum(each.busy for each in result.replicas) / SECOND


@pytest.mark.parametrize("name", ["sessions", "conversation", "synthetic"])
def test_mooncake_routes_in_its_published_order(name: str) -> None:
    """Mooncake (FAST 2025): routing by cached prefixes has shorter TTFTs than balancing the load,
    which has shorter ones than random routing.

    Published for 10 prefill nodes with 3 million tokens each: a global cache takes 0.76
    (conversation) and 0.52 (synthetic) of the prefill time of local caches. We have no global
    cache; routing by prefix has a similar effect: about 0.75 and 0.7 of the time of balancing
    the load."""
    by_prefix, prefill_time = mooncake_prefill("estimated", name)
    by_load, time_without = mooncake_prefill("load", name)
    by_chance, _ = mooncake_prefill("random", name)
    assert by_prefix < 0.95 * by_load < 0.7 * by_chance
    assert 0.4 < prefill_time / time_without < 0.85
