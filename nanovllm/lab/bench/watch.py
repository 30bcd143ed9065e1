"""`nanovllm bench watch`: what does it cost a server that a client reads its /trace?

One server is under a load that does not end, and a watcher comes and goes. Two windows of time, one after the other, of which
one is watched, make a pair; their order alternates, so that no trend favours either. Between them are control pairs without a
watcher: how far their ratio is from 1 is the error of the method.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import httpx
import numpy as np

from nanovllm.lab.bench.engines import EngineFailed, Server
from nanovllm.lab.bench.machine import Noise, NoiseMeter
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.report import Row, estimate
from nanovllm.lab.bench.suite import Suite, say
from nanovllm.lab.bench.workloads import BenchRequest, Workload

#: After the watcher has come or gone, nothing counts for this share of a window.
SETTLING = 0.25
#: The first pairs of each kind do not count: the load begins.
WARM_UP_PAIRS = 2


class Pair(NamedTuple):
    """Two windows of time, one after the other.

    Attributes:
        watched: one of them is watched; else it is a control pair.
        swapped: the second one is (or would be) watched.
    """

    watched: bool
    swapped: bool

    @property
    def windows(self) -> tuple[bool, bool]:
        """Whether the first and the second window are watched."""
        return self.watched and not self.swapped, self.watched and self.swapped


def plan(num_pairs: int) -> list[Pair]:
    """So many watched pairs and as many controls, in turn, and each kind in both orders in turn."""
    return [Pair(watched, bool(i % 2)) for i in range(num_pairs) for watched in (True, False)]


async def read_steps(url: str, until: float) -> int:
    """Read the stream of a server's steps, as the live page does, and throw it away; returns the number of its lines: the
    header, and one per step."""
    count, seconds = 0, until - time.perf_counter()
    with contextlib.suppress(TimeoutError):
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(timeout=seconds) as client,
            client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as stream,
        ):
            async for chunk in stream.aiter_raw():
                count += chunk.count(b"\n")
    return count


def measure(suite: Suite, num_pairs: int, seconds: float) -> list[Row]:
    """Start the server, put it under load, and watch it in every other window.

    Args:
        suite: its first engine and its only workload are taken.
        seconds: length of a window.

    Raises:
        EngineFailed: the server failed, or showed no step.
    """
    (workload,), settings = suite.workloads, suite.engines[0]
    pairs = plan(num_pairs + WARM_UP_PAIRS)
    with Server(settings) as engine:
        suite.note_start(engine.started)
        meter = NoiseMeter(engine.process.pid)
        requests = endless_requests(workload, suite.model.vocab_size, suite.seed)
        turns = _take_turns(f"{engine.url}/trace", pairs, seconds)
        timelines, (windows, num_lines) = engine.keep_busy(requests, workload.num_prompts, turns)
        noise = meter.read()
    watched = sum(pair.watched for pair in pairs)
    if num_lines <= watched:  # a header each
        raise EngineFailed("nanovllm was watched, and showed no step")
    return compare(pairs, rates(timelines, windows), num_lines / (watched * seconds), seconds, noise)


def endless_requests(workload: Workload, vocab_size: int, seed: int) -> Iterator[BenchRequest]:
    """The workload's requests, over and over with other tokens. The first ones have all lengths, so that the streams do not
    all end at once."""
    for i, request in enumerate(workload.requests(vocab_size, seed)):
        share = (i + 1) / workload.num_prompts
        yield replace(request, max_tokens=max(1, int(request.max_tokens * share)))
    for repeat in itertools.count(1):
        yield from workload.requests(vocab_size, seed, repeat)


async def _take_turns(url: str, pairs: Sequence[Pair], seconds: float) -> tuple[list[tuple[float, float]], int]:
    """Watch or not, window by window; returns from when to when each window counts, and the lines of the stream."""
    windows, num_lines, end = [], 0, time.perf_counter()
    say(f"{len(pairs)} pairs of windows: {2 * len(pairs) * seconds / 60:.1f} minutes")
    for watched in itertools.chain.from_iterable(pair.windows for pair in pairs):
        begin, end = end, end + seconds
        windows.append((begin + SETTLING * seconds, end))
        if watched:
            num_lines += await read_steps(url, end)
        await asyncio.sleep(end - time.perf_counter())
    return windows, num_lines


def rates(timelines: Sequence[Timeline], windows: Sequence[tuple[float, float]]) -> list[float]:
    """Tokens per second in each window: from the last step that ended before it to the last one in it, because in a short
    window a step more or less would show. The rate is not a number if no step ended in a window, or before it."""
    arrivals = np.array(sorted(arrival for line in timelines for arrival in line.arrivals)).reshape(-1, 2)
    times, counts = arrivals[:, 0], np.cumsum(arrivals[:, 1])
    # The tokens of a step come one after another: a window has the last of them, and so has the gap before the next.
    first, last = (np.searchsorted(times, edges, side="right") - 1 for edges in zip(*windows, strict=True))
    seconds = np.where((first == last) | (first < 0), np.nan, times[last] - times[first])
    return ((counts[last] - counts[first]) / seconds).tolist()


def compare(
    pairs: Sequence[Pair], speeds: Sequence[float], lines_per_second: float, seconds: float, noise: Noise
) -> list[Row]:
    """Compare the windows' speeds, two for each pair, without the warm-up pairs and those that miss a speed.

    Raises:
        EngineFailed: no pair is left.
    """
    by_pair = list(zip(pairs, speeds[::2], speeds[1::2], strict=True))[2 * WARM_UP_PAIRS :]
    by_pair = [(p, first, second) for p, first, second in by_pair if not np.isnan([first, second]).any()]
    unwatched = [s for p, *both in by_pair for seen, s in zip(p.windows, both, strict=True) if not seen]
    rows: list[Row] = []
    for kind, watched in (("watched / unwatched", True), ("unwatched / unwatched", False)):
        ratios = [
            second / first if p.swapped else first / second for p, first, second in by_pair if p.watched == watched
        ]
        if not ratios:
            raise EngineFailed("steps took longer than windows: make them longer, with --window")
        found, unseen = estimate(ratios), statistics.median(unwatched)
        title = f"Speed while a client watches, against {unseen:.0f} tokens/s without"
        row = {"table": title, "windows": kind, "pairs": len(ratios), "ratio": found}
        rows.append(row | {"cost": f"{1 - found['median']:.1%}"})
    windows: Row = {"table": "Windows", "seconds per window": seconds, "left out at its begin": f"{SETTLING:.0%}"}
    windows |= {"lines/s that the watcher read": lines_per_second, "tokens/s without a watcher": unseen}
    return [*rows, windows | {"steal %": 100 * noise.steal, "others %": 100 * noise.others}]
