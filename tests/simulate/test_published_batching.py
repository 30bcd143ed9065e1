"""Sarathi-Serve (Agrawal et al., OSDI 2024): what chunks and hybrid batches do to latency.

Settings, times of steps and published numbers are those of the paper and of its artifact
(microsoft/sarathi-serve, branch osdi-sarathi-serve): Yi-34B on two A100s with 80 GB, tensor
parallel. Its files of request lengths are not at hand: lengths are drawn from log-normal
distributions with the medians and 90th percentiles of the paper's Table 2."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist, median

import pytest

from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import resolve
from nanovllm.simulate.cost import StepCost, StepWork
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.machines import find_machine
from nanovllm.simulate.models import Layout, find_model
from nanovllm.simulate.results import FleetResult
from nanovllm.simulate.roofline import Roofline
from nanovllm.simulate.workload import SECOND, Workload, WorkloadRequest

NANOSECOND = SECOND // 10**9
MICROSECOND = SECOND // 10**6
BLOCK = 16
# 2 x 80 GB x 0.9 without 68.8 GB of weights; a token takes 60 layers x 2 x 8 heads x 128 x 2 bytes.
KV_TOKENS = 306_000


class YiCost(StepCost):
    """Yi-34B on two A100s.

    Steps with prompts are fitted to the artifact's chunking-overhead.csv (prompts of 2,047 to
    16,383 tokens in chunks of 512 and 2,048): 16.8 ms, 0.171 ms per token, and 7 ns per token and
    token that it attends to. A step of 32 decodes with 4,096 tokens each takes 40 ms, a fifth of
    the paper's strict limit; 64 ns of it per token of context, the time that two A100s need to read
    its keys and values (245,760 bytes at 2 x 1,935 GB/s).
    """

    prompt_base = 16_800 * MICROSECOND
    decode_base = 26_100 * MICROSECOND
    per_token = 171 * MICROSECOND
    per_context_token = 64 * NANOSECOND
    per_pair = 7 * NANOSECOND

    def step(self, work: StepWork) -> int:
        """Return the time of a step."""
        base, per_context_token = self.decode(work.num_decodes)
        time = base + per_context_token * work.decode_context
        if work.prefills:
            time += self.prompt_base - self.decode_base
        for start, count in work.prefills:
            time += self.per_token * count + self.per_pair * (count * (2 * start + count) // 2)
        return time

    def decode(self, num_decodes: int) -> tuple[int, int]:
        """Return base and price per token of context."""
        return self.decode_base + self.per_token * num_decodes, self.per_context_token


@dataclass(frozen=True)
class Lengths:
    """Median and 90th percentile of the tokens of prompts and outputs, and the most tokens of a
    request; requests with more are left out."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    longest: int


CHAT = Lengths((1730, 5696), (415, 834), 8192)  # openchat_sharegpt4
ARXIV = Lengths((7059, 12985), (208, 371), 16384)  # arxiv_summarization


def requests_of(lengths: Lengths, rate: float, count: int) -> Iterator[WorkloadRequest]:
    """Poisson arrivals. All rates have the same lengths, in the same order."""
    normal = NormalDist()
    rng = random.Random(1)
    gaps = random.Random(2)

    def draw(middle: int, p90: int) -> int:
        sigma = math.log(p90 / middle) / normal.inv_cdf(0.9)
        return max(2, round(middle * math.exp(sigma * normal.inv_cdf(rng.random()))))

    now = 0.0
    number = 0
    while number < count:
        prompt = draw(*lengths.prompt)
        output = draw(*lengths.output)
        if prompt + output <= lengths.longest:
            now -= math.log(1 - gaps.random()) / rate
            number += 1
            yield WorkloadRequest(
                request_id=str(number),
                arrival=round(now * 1e9) * NANOSECOND,
                num_prompt_tokens=prompt,
                num_output_tokens=output,
            )


def in_turns() -> Callable[[Scheduler, SchedulerOutput], None]:
    """Chunks without hybrid batches, as the artifact's SimpleChunkingScheduler: a step computes
    prompts or decodes, in turn if there are both."""
    last_was_prompts = False

    def fill(scheduler: Scheduler, plan: SchedulerOutput) -> None:
        nonlocal last_was_prompts
        running = scheduler.queues.running

        def prompts() -> None:
            scheduler.continue_running(plan, [each for each in running if each.in_prefill])
            scheduler.admit(plan)

        def decodes() -> None:
            scheduler.continue_running(plan, [each for each in running if not each.in_prefill])

        for part in (decodes, prompts) if last_was_prompts else (prompts, decodes):
            if plan.empty:
                part()
        last_was_prompts = plan.num_prefill_tokens > 0

    return fill


def serve(
    lengths: Lengths, rate: float, count: int, budget: int, policy: str, max_num_seqs: int = 128
) -> FleetResult:
    """Serve requests.

    Args:
        budget: tokens per step; 0: the longest request.
        policy: of batching; "in_turns": see there.
    """
    options: dict[str, int | bool | str] = {
        "num_kv_blocks": KV_TOKENS // BLOCK,
        "block_size": BLOCK,
        "enable_prefix_caching": False,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget or lengths.longest,
        "async_scheduling": False,
    }
    if policy == "prefill_first":
        options |= {"batching_policy": policy, "enable_chunked_prefill": False}
    config = resolve(
        EngineConfig(**options),  # type: ignore[arg-type]
        model_max_len=lengths.longest,
        num_kv_blocks=KV_TOKENS // BLOCK,
        num_host_blocks=0,
    )
    scheduler = create_scheduler(config, create_manager(config))
    if policy == "in_turns":
        scheduler.fill = in_turns()
    engine = SimulatedEngine(scheduler, YiCost())
    return Fleet([engine]).run(Workload(requests_of(lengths, rate, count)))


def median_ttft(result: FleetResult) -> float:
    """Seconds."""
    return median((each.first_token or 0) - each.arrival for each in result.requests) / SECOND


def p99_tbt(result: FleetResult) -> float:
    """Seconds."""
    return result.gaps.quantile(0.99) / SECOND


@pytest.mark.parametrize(
    ("lengths", "rate", "published"),
    [
        (CHAT, 1.0, [(0.53, 0.68), (1.04, 0.17), (0.76, 0.14)]),
        (ARXIV, 0.5, [(3.78, 1.38), (5.38, 0.20), (3.90, 0.17)]),
    ],
    ids=["chat", "arxiv"],
)
def test_hybrid_batches_chunks_and_both(
    lengths: Lengths, rate: float, published: list[tuple[float, float]]
) -> None:
    """Table 4: median TTFT and 99th percentile of TBT, in seconds. Hybrid batches alone have the
    best TTFT and the worst TBT, chunks alone the reverse, and both together nearly the best TTFT
    and the best TBT. Rates, and chunks of 512 tokens, are those of the artifact's
    scheduling_ablation.sh; the paper's text says 1,024.

                 published                       here
        chat     0.53/0.68 1.04/0.17 0.76/0.14   0.64/0.68 1.15/0.16 0.83/0.12
        arxiv    3.78/1.38 5.38/0.20 3.90/0.17   2.83/3.32 7.90/0.18 4.51/0.15

    At arxiv's rate, the GPUs are busy all the time, so that TTFT depends on the draw of the 128
    requests (chunks alone: 8 to 37 s with other seeds), and only its order is checked. TBT of
    hybrid batches is longer here: a step admits prompts of up to 16,384 tokens together, 3.3 s,
    which 1.38 s, the time of 7,000, rules out for the measurement."""
    results = [
        serve(lengths, rate, 128, budget=0, policy="chunked"),
        serve(lengths, rate, 128, budget=512, policy="in_turns"),
        serve(lengths, rate, 128, budget=512, policy="chunked"),
    ]
    hybrid, chunks, both = ((median_ttft(each), p99_tbt(each)) for each in results)
    assert hybrid[0] < both[0] < chunks[0]
    assert both[1] < chunks[1] < hybrid[1]
    assert hybrid[1] > 3 * chunks[1]
    for mine, (_, tbt) in zip((chunks, both), published[1:], strict=True):
        assert mine[1] == pytest.approx(tbt, rel=0.2)
    if lengths is CHAT:
        for mine, (ttft, _) in zip((hybrid, chunks, both), published, strict=True):
            assert mine[0] == pytest.approx(ttft, rel=0.25)


def test_the_roofline_predicts_the_artifact_s_prompts() -> None:
    """Milliseconds of a prompt in chunks, in the artifact's chunking-overhead.csv. Our prediction
    has the A100's data sheet and corrections that were measured on another GPU with another
    program. It misses what small chunks cost more: 5 to 10 % at 512, against 6 to 10 % too much
    at 2,048."""
    yi = find_model("yi-34b")
    cost = Roofline(yi, find_machine("A100"), Layout(tensor_parallel_size=2))
    measured = {
        512: {2047: 435.7, 4095: 922.0, 8191: 1958.5, 16_383: 4512.8},
        2048: {2047: 377.7, 4095: 793.9, 8191: 1643.4, 16_383: 3651.6},
    }
    for chunk, times in measured.items():
        for length, time in times.items():
            steps = [(start, min(chunk, length - start)) for start in range(0, length, chunk)]
            predicted = sum(cost.step(StepWork(0, 0, [step], 1)) for step in steps)
            assert predicted / SECOND * 1000 == pytest.approx(time, rel=0.12)


def sustains(rate: float, slo: float, budget: int, max_num_seqs: int = 128) -> bool:
    """Return whether 256 chats at this rate keep the paper's limits: 99 % of the gaps between
    tokens are within the SLO, and the median delay before the first step is at most 2 s. The delay
    is TTFT without the time that the prompt alone takes.

    Args:
        slo: in seconds.
        budget: of chunks in hybrid batches; 0: whole prompts first, as in vLLM 0.2.
    """
    policy = "chunked" if budget else "prefill_first"
    result = serve(CHAT, rate, 256, budget, policy, max_num_seqs)
    cost = YiCost()
    delays = []
    for each in result.requests:
        length = each.num_prompt_tokens
        chunk = budget or length
        steps = [(start, min(chunk, length - start)) for start in range(0, length, chunk)]
        alone = sum(cost.step(StepWork(0, 0, [step], 1)) for step in steps)
        delays.append((each.first_token or 0) - each.arrival - alone)
    return p99_tbt(result) <= slo and median(delays) <= 2 * SECOND


def test_capacity_under_the_strict_limit() -> None:
    """Figures 10 and 12, chat, 0.2 s: a budget of 512 has 3.5 to 3.7 times the capacity of vLLM,
    which is the same for all batch sizes, since prompts stall decodes. Here: 1.40 requests per
    second against 0.44 with batches of 32 and of 128, 3.2 times."""
    assert sustains(1.35, slo=0.2, budget=512)
    assert sustains(0.42, slo=0.2, budget=0, max_num_seqs=32)
    assert not sustains(0.47, slo=0.2, budget=0, max_num_seqs=128)


def test_capacity_under_the_relaxed_limit() -> None:
    """Figure 12, chat, 1 s: a budget of 2,048 has 1.65 times the capacity of vLLM, whose larger
    batches help now. Here: 1.73 requests per second against 1.16 with batches of 128, 1.5 times,
    and 0.96 with 32. A budget of 512 costs capacity: 1.40."""
    assert sustains(1.65, slo=1.0, budget=2048)
    assert not sustains(1.65, slo=1.0, budget=512)
    assert not sustains(1.25, slo=1.0, budget=0)
    assert sustains(1.1, slo=1.0, budget=0)
    assert not sustains(1.1, slo=1.0, budget=0, max_num_seqs=32)
