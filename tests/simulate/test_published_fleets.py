"""Fleets that others have measured or simulated: their inputs give their order, and about their
figures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import resolve
from nanovllm.router.policies import Router, RouterState, Weights
from nanovllm.simulate.cost import StepCost, StepWork
from nanovllm.simulate.disaggregated import DecodeConnector, DisaggregatedFleet, PrefillConnector
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet, RoundRobin
from nanovllm.simulate.machines import find_machine
from nanovllm.simulate.models import Layout, find_model
from nanovllm.simulate.requests import RequestMaker
from nanovllm.simulate.roofline import Roofline
from nanovllm.simulate.routers import PolicyRouter
from nanovllm.simulate.workload import SECOND, Workload, WorkloadRequest
from tests.simulate.engines import engine_of

MILLISECOND = SECOND // 1000

# ---------------------------------------------------------------- llm-d

LLMD_BLOCK = 64
LLMD_PROMPT = 7200
# Weights of the scorers, and blocks of 64 tokens that are compared. Estimated prefixes are counted
# in blocks of 64 characters, about 16 tokens, and end after 256: they tell groups, but no users.
LLMD_POLICIES = {
    "precise": (Weights(prefix=3, kv=2, queue=2), 256),
    "estimated": (Weights(prefix=1, kv=1, queue=1), 256 * 16 // LLMD_BLOCK),
    "load": (Weights(prefix=0, kv=1, queue=1), 0),
    "random": (None, 0),
}
# Requests per second, and for how many seconds.
LLMD_STAGES = {15: 20.0, 20: 38.0, 30: 25.0, 40: 38.0, 60: 25.0}


@dataclass(frozen=True)
class Routed:
    """A stage of llm-d's benchmark: output tokens per second, and seconds."""

    throughput: float
    mean_ttft: float


def llmd_requests(rate: int) -> Iterator[WorkloadRequest]:
    """15 requests per second for 50 s, which fill the caches, and after a pause the stage."""
    rng = random.Random(1)
    users = [(group, user) for group in range(150) for user in range(5)]
    rng.shuffle(users)
    number = 0
    begin = 0
    for stage_rate, length in ((15, 50.0), (rate, LLMD_STAGES[rate])):
        at = begin + int(rng.expovariate(stage_rate) * SECOND)
        while at < begin + length * SECOND:
            group, user = users[number % len(users)]
            number += 1
            ids = [1000 * group + i for i in range(6000 // LLMD_BLOCK)]
            own = 10**6 + 1000 * (5 * group + user)
            ids += [own + i for i in range(-(-LLMD_PROMPT // LLMD_BLOCK) - len(ids))]
            yield WorkloadRequest(
                request_id=str(number),
                arrival=at,
                num_prompt_tokens=LLMD_PROMPT,
                num_output_tokens=1000,
                prefix_ids=ids,
            )
            at += int(rng.expovariate(stage_rate) * SECOND)
        begin += int((length + 90) * SECOND)


def llmd_stage(policy: str, rate: int) -> Routed:
    """Serve a stage of the benchmark: 8 servers of two H100s each, whose cost is predicted from the
    data sheet, with Qwen3-32B and the published 307,328 KV tokens. Loads are looked up every 50 ms.
    """
    cost = Roofline(find_model("qwen3-32b"), find_machine("H100"), Layout(tensor_parallel_size=2))
    engines = [
        engine_of(
            num_blocks=307_328 // LLMD_BLOCK,
            model_max_len=2**15,
            block_size=LLMD_BLOCK,
            max_num_batched_tokens=8192,
        )
        for _ in range(8)
    ]
    for engine in engines:
        engine.cost = cost
    make = RequestMaker(LLMD_BLOCK, LLMD_BLOCK)
    weights, max_blocks = LLMD_POLICIES[policy]
    state = RouterState(8, capacity=31_250 * 16 // LLMD_BLOCK, weights=weights)
    router = PolicyRouter(
        Router(policy, state, max_blocks),
        engines,
        lambda r: make.prompt_names(r.prefix_ids, r.num_prompt_tokens),
        refresh=SECOND // 20,
    )
    result = Fleet(engines, router).run(Workload(llmd_requests(rate), LLMD_BLOCK))
    stage = [request for request in result.requests if request.arrival > 100 * SECOND]
    begin = min(request.arrival for request in stage)
    times = [(request.first_token or 0) - request.arrival for request in stage]
    return Routed(
        throughput=sum(each.num_output_tokens for each in stage)
        / (result.duration - begin)
        * SECOND,
        mean_ttft=sum(times) / len(times) / SECOND,
    )


@pytest.mark.parametrize(
    ("policy", "rate", "published", "shortest", "longest"),
    [
        ("random", 15, 3791, 0.5, 5),
        ("random", 20, 4933, 15, 30),
        ("random", 60, 4835, 50, 95),
        ("load", 15, 3348, 0.2, 5),
        ("load", 20, 4902, 15, 30),
        ("load", 60, 4745, 50, 95),
        ("estimated", 30, 8436, 0.1, 5),
        ("estimated", 40, 8046, 10, 40),
        ("estimated", 60, 7248, 15, 40),
        ("precise", 60, 10_497, 0.05, 0.3),
    ],
)
def test_llm_d_routers_break_where_they_did(
    policy: str, rate: int, published: int, shortest: float, longest: float
) -> None:
    """llm-d's benchmark "73-capacity" (llm-d-kv-cache-manager, 2025): 150 groups of 5 users, 6,000
    prompt tokens per group and 1,200 per user, 1,000 output tokens. All inputs are published, but
    for the GPUs, which follow from the KV memory and llm-d's guide. Mean TTFT in seconds, and
    output tokens per second, at some of its rates:

                         published        here
        random     15     1.3    3,791     1.1    5,434
                   20    25.1    4,933    23.3    5,585
                   60    57.4    4,835    86.4    5,706
        load       15     4.0    3,348     0.6    5,970
                   20    29.2    4,902    22.2    6,037
                   60    58.5    4,745    88.0    6,415
        estimated  30     0.4    8,436     3.9    8,326
                   40    13.2    8,046    34.2    9,451
                   60    24.3    7,248    32.7    9,842
        precise    60     0.3   10,497     0.1   11,359

    So random routing and load balancing, which is no better than chance, break between 15 and 20
    requests per second, estimated prefixes between 30 and 40, and precise ones not at all. The
    ranges keep this order.

    Where nothing queues, TTFT is shorter here: HTTP and tokenization take no time. Where much does,
    it is longer: 1,500 requests of 1,000 tokens at 4,835 tokens per second take 310 s, so they
    cannot have had the published 106 s as the 90th percentile of TTFT, unless many ended early."""
    found = llmd_stage(policy, rate)
    assert shortest < found.mean_ttft < longest
    if rate > 15:  # the engines are busy
        assert 0.95 < found.throughput / published < 1.4


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
class DistServeCost(StepCost):
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
    scheduler = create_scheduler(resolved, create_manager(resolved), kind(config, {}, ()))
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
            bandwidths=(1e18, 1e18),  # DistServe's simulator transfers in no time
            latency=0,
            kv_bytes_per_token=1,
            first_token="prefill",
        )
        requests = sharegpt_requests(rate_per_gpu * (tp_prefill + tp_decode), seed)
        for served in fleet.run(Workload(requests)).requests:
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
