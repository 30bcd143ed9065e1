"""From the arrival times of tokens to the figures that are reported."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

K = TypeVar("K")
T = TypeVar("T")

#: Ratios closer to 1 than this are ties, since a shared machine is no steadier.
TIE = 1.3
#: The number of pairs that must agree for a smaller ratio to count.
AGREEING_PAIRS = 3


@dataclass
class Timeline:
    """When the tokens of one request came, in seconds of any one clock.

    Attributes:
        start: when the request was sent.
        arrivals: (time, number of new tokens) of everything that came.
    """

    start: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0][0] - self.start

    @property
    def waits(self) -> list[tuple[float, float]]:
        """From one arrival to the next. Tokens that come together count as one arrival, as in
        vLLM's benchmark; counting gaps of zero between them would flatter the median."""
        return list(itertools.pairwise(time for time, _ in self.arrivals))

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: how long a reader waits."""
        return [after - before for before, after in self.waits]


@dataclass
class Figures:
    """The figures of one run; times in seconds, None where there is nothing to measure.

    Attributes:
        itl_max: worst inter-token latency.
    """

    seconds: float
    output_tokens: int
    tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float | None = None
    itl_p99: float | None = None
    itl_max: float | None = None


def figures(timelines: Sequence[Timeline]) -> Figures:
    """The figures of requests that ran together.

    Raises:
        ValueError: a request got no token.
    """
    if not timelines or not all(line.arrivals for line in timelines):
        raise ValueError("every request must have received at least one token")
    seconds = max(line.arrivals[-1][0] for line in timelines) - min(
        line.start for line in timelines
    )
    tokens = sum(line.num_tokens for line in timelines)
    first = [line.ttft for line in timelines]
    result = Figures(
        seconds, tokens, tokens / seconds, percentile(first, 50), percentile(first, 99)
    )
    gaps = [gap for line in timelines for gap in line.gaps]
    if gaps:
        result.itl_p50 = percentile(gaps, 50)
        result.itl_p99 = percentile(gaps, 99)
        result.itl_max = max(gaps)
    return result


def intruder_figures(timelines: Sequence[Timeline]) -> Figures:
    """The figures of streams and, last, a long prompt that arrived while they decoded: the time to
    first token is the late prompt's, the inter-token latencies are the streams', the worst one of
    those that its arrival can have caused."""
    *streams, intruder = timelines
    result = figures(streams)
    end = intruder.start + intruder.ttft
    waits = [
        wait
        for line in streams
        for wait in line.waits
        if wait[1] > intruder.start and wait[0] < end
    ]
    # If the streams had ended, there is nothing to measure, and nothing to compare.
    result.itl_max = max((after - before for before, after in waits), default=None)
    result.ttft_p50 = result.ttft_p99 = intruder.ttft
    return result


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation between the two nearest values."""
    return float(np.percentile(values, percent))


def compare(runs: Sequence[tuple[float, float]], higher_is_better: bool) -> tuple[list[float], str]:
    """Compare runs made in turn, pair by pair: what slows the machine down for a while slows both
    of a pair.

    A median ratio below 1.3 either way is a tie, unless three pairs or more all point the same way.
    A larger one whose pairs contradict each other is unclear.

    Returns:
        The ratio of each pair (above 1 the first engine is better), and "better", "worse", "tie" or
        "unclear" from the first engine's point of view.
    """
    pairs = [first / second if higher_is_better else second / first for first, second in runs]
    ratio = statistics.median(pairs)
    agree = min(pairs) > 1 or max(pairs) < 1
    if 1 / TIE < ratio < TIE and not (agree and len(pairs) >= AGREEING_PAIRS):
        return pairs, "tie"
    if not agree:
        return pairs, "unclear"
    return pairs, "better" if ratio > 1 else "worse"


def alternate(
    works: Mapping[K, Callable[[], T]], rounds: int, warm_up: int = 1
) -> dict[K, list[T]]:
    """Run works in turn, and return their results by round. Every other round runs in reverse
    order, so that no trend favours any of the works.

    Args:
        warm_up: rounds before those that count.
    """
    found: dict[K, list[T]] = {name: [] for name in works}
    for turn in range(warm_up + rounds):
        for name in list(works)[:: -1 if turn % 2 else 1]:
            result = works[name]()
            if turn >= warm_up:
                found[name].append(result)
    return found


def timed(*works: Callable[[], object]) -> float:
    """Run works one after another; returns the seconds of all."""
    start = time.perf_counter()
    for work in works:
        work()
    return time.perf_counter() - start


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Of each time, the slowest rank's: the others have to wait for it."""
    return np.asarray(per_rank).max(axis=0).tolist()
