"""Synthetic workloads, under the names of `vllm bench serve`. A seed gives the same requests with
every version of Python: of its random numbers, only `random()` is promised to stay as it is."""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice, repeat
from random import Random
from typing import Annotated

from msgspec import Meta

from nanovllm.data.checks import Keywords
from nanovllm.simulate.workload import SECOND, Length, OutputLength, Workload, WorkloadRequest

# Arrivals are in whole nanoseconds, so that the last digit of a logarithm, which differs between
# mathematical libraries, does not matter.
NANOSECOND = SECOND // 10**9
# More blocks than one session has.
OWN_BLOCKS = 2**40
# With a larger shape, times between arrivals differ by less than floating-point numbers do.
EQUAL_TIMES = 1e32


@dataclass(frozen=True)
class SyntheticWorkload(Keywords):
    """Settings of a synthetic workload. Each attribute that is described here is a command-line
    flag, and the description is its help.

    Attributes:
        request_rate: requests per second (inf: all at time 0)
        burstiness: shape of the gamma distribution of the times between arrivals (1: Poisson; less:
            burstier; inf: equal times)
        burst_size: requests, or sessions, that arrive at the same time
        num_prompts: number of requests
        random_input_len: mean length of a prompt, or of each turn of a session, in tokens
        random_output_len: mean length of an answer, in tokens
        random_range_ratio: lengths are drawn uniformly from [mean x (1 - ratio), mean x (1 +
            ratio)]
        random_prefix_len: tokens before the prompt that other prompts share
        num_prefixes: number of such prefixes, of which each request or session takes one
        num_turns: turns of a session, each of which is a request. Its prompt begins with the prompt
            and the answer of the turn before
        turn_interval: mean time between the turns of a session, in seconds
        seed: seed of arrivals and lengths
    """

    request_rate: Annotated[float, Meta(ge=1e-6)] = 1.0
    burstiness: Annotated[float, Meta(ge=1e-3)] = 1.0
    burst_size: Annotated[int, Meta(ge=1, le=10**9)] = 1
    num_prompts: Annotated[int, Meta(ge=1, le=10**9)] = 1000
    random_input_len: Length = 1024
    random_output_len: Length = 128
    random_range_ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    random_prefix_len: OutputLength = 0
    num_prefixes: Annotated[int, Meta(ge=1, le=10**9)] = 1
    num_turns: Annotated[int, Meta(ge=1, le=10**4)] = 1
    turn_interval: Annotated[float, Meta(ge=0, le=1e9)] = 10.0
    seed: int = 0


def create_workload(settings: SyntheticWorkload, block_size: int) -> Workload:
    """Create the workload. Its requests are made while they are needed.

    Args:
        block_size: tokens per number in `WorkloadRequest.prefix_ids`; that of the engine tells it
            all that prompts share.
    """
    return Workload(
        requests=islice(_requests(settings, block_size), settings.num_prompts),
        prefix_block_size=block_size,
        names_outputs=settings.num_turns > 1,
    )


def _requests(settings: SyntheticWorkload, block_size: int) -> Iterator[WorkloadRequest]:
    """The turns of all sessions in the order of their arrivals."""
    rng = Random(f"lengths {settings.seed}")  # the same ones at every rate
    turns: list[tuple[int, int, int, WorkloadRequest]] = []
    for number, start in enumerate(_starts(settings)):
        while turns and turns[0][0] <= start:
            yield heapq.heappop(turns)[-1]
        for turn, request in enumerate(_session(settings, block_size, number, start, rng)):
            heapq.heappush(turns, (request.arrival, number, turn, request))
    while turns:
        yield heapq.heappop(turns)[-1]


def _starts(settings: SyntheticWorkload) -> Iterator[int]:
    """When sessions begin. As in vLLM, the times are stretched so that the mean rate is exact."""
    rng = Random(f"arrivals {settings.seed}")
    num_bursts = -(-settings.num_prompts // (settings.num_turns * settings.burst_size))
    gaps = array("d", (_gamma(rng, settings.burstiness) for _ in range(num_bursts)))
    stretch = settings.num_prompts / settings.request_rate / (sum(gaps) or 1.0)
    for time in accumulate(gaps):
        yield from repeat(round(time * stretch * 1e9) * NANOSECOND, settings.burst_size)


def _session(
    settings: SyntheticWorkload, block_size: int, number: int, start: int, rng: Random
) -> Iterator[WorkloadRequest]:
    num_shared = settings.random_prefix_len // block_size
    prefix = int(rng.random() * settings.num_prefixes) * num_shared
    shares_blocks = num_shared > 0 or settings.num_turns > 1
    own = max(OWN_BLOCKS, settings.num_prefixes * num_shared) + OWN_BLOCKS * number
    num_tokens = settings.random_prefix_len
    arrival = start
    for turn in range(settings.num_turns):
        num_tokens += _length(settings.random_input_len, settings.random_range_ratio, rng)
        num_output_tokens = _length(settings.random_output_len, settings.random_range_ratio, rng)
        num_own = -(-(num_tokens + num_output_tokens) // block_size) - num_shared
        yield WorkloadRequest(
            request_id=f"{number}-{turn}" if settings.num_turns > 1 else str(number),
            arrival=arrival,
            num_prompt_tokens=num_tokens,
            num_output_tokens=num_output_tokens,
            prefix_ids=(
                [*range(prefix, prefix + num_shared), *range(own, own + num_own)]
                if shares_blocks
                else ()
            ),
        )
        num_tokens += num_output_tokens
        arrival += round(_gamma(rng, 1.0) * settings.turn_interval * 1e9) * NANOSECOND


def _length(mean: int, ratio: float, rng: Random) -> int:
    """Draw a length as `vllm bench serve` does, which is 1 at least."""
    low = max(1, math.floor(mean * (1 - ratio)))
    return low + int(rng.random() * (math.ceil(mean * (1 + ratio)) - low + 1))


def _gamma(rng: Random, shape: float) -> float:
    """Draw from a gamma distribution of scale 1 (Marsaglia and Tsang 2000), up to a factor: 1 for
    a shape of `EQUAL_TIMES`."""
    if shape >= EQUAL_TIMES:
        return 1.0
    if shape < 1:
        return _gamma(rng, shape + 1) * math.pow(1 - rng.random(), 1 / shape)
    d = shape - 1 / 3
    while True:
        normal = math.sqrt(-2 * math.log(1 - rng.random())) * math.cos(math.tau * rng.random())
        v = (1 + normal / math.sqrt(9 * d)) ** 3
        if v > 0 and math.log(1 - rng.random()) < normal**2 / 2 + d * (1 - v + math.log(v)):
            return d * v
