"""`nanovllm bench watch`: what does it cost a server that a client reads its /trace?

One server is under a load that does not end, and a watcher comes and goes. Two windows of time, one after the other, of which
one is watched, make a pair; their order alternates, so that no trend favours either. Between them are control pairs without a
watcher: how far their ratio is from 1 is the error of the method.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nanovllm.lab.bench.engines import EngineFailed, Server
from nanovllm.lab.bench.machine import Noise, NoiseMeter
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.report import Row, estimate
from nanovllm.lab.bench.suite import Launch, Suite, say
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


class Watcher:
    """A process that reads a server's steps for a while, when it is told to; a context manager."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, str(pathlib.Path(__file__).with_name("watcher.py")), f"{url}/trace"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def watch(self, seconds: float) -> None:
        """Begin to watch, for so long."""
        assert self._process.stdin is not None
        try:
            print(seconds, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise EngineFailed("nanovllm does not let itself be watched") from None

    def counts(self) -> list[int]:
        """Wait for the watcher's end; returns the lines that it read each time.

        Raises:
            EngineFailed: the server showed no step.
        """
        counts = [int(line) for line in self._process.communicate()[0].splitlines()]
        if self._process.returncode or sum(counts) <= len(counts):  # a header each
            raise EngineFailed("nanovllm was watched, and showed no step")
        return counts


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
    with Server(settings) as engine, Watcher(engine.url) as watcher:
        suite.launches.append(Launch(0, settings.name, "server", engine.started))
        say(f"{settings.name}: first token {engine.started.seconds:.1f} s after its start")
        meter = NoiseMeter(os.getpid())  # the watcher is a child, too
        requests = endless_requests(workload, suite.model.vocab_size, suite.seed)
        timelines, windows = engine.keep_busy(requests, workload.num_prompts, _take_turns(watcher, pairs, seconds))
        noise, counts = meter.read(), watcher.counts()
    return compare(pairs, rates(timelines, windows), sum(counts) / (len(counts) * seconds), seconds, noise)


def endless_requests(workload: Workload, vocab_size: int, seed: int) -> Iterator[BenchRequest]:
    """The workload's requests, over and over with other tokens. The first ones have all lengths, so that the streams do not
    all end at once."""
    for i, request in enumerate(workload.requests(vocab_size, seed)):
        share = (i + 1) / workload.num_prompts
        yield replace(request, max_tokens=max(1, int(request.max_tokens * share)))
    for repeat in itertools.count(1):
        yield from workload.requests(vocab_size, seed, repeat)


async def _take_turns(watcher: Watcher, pairs: Sequence[Pair], seconds: float) -> list[tuple[float, float]]:
    """Watch or not, window by window; returns from when to when each window counts."""
    windows = []
    end = time.perf_counter()
    say(f"{len(pairs)} pairs of windows: {2 * len(pairs) * seconds / 60:.1f} minutes")
    for watched in itertools.chain.from_iterable(pair.windows for pair in pairs):
        if watched:
            watcher.watch(seconds)
        begin, end = end, end + seconds
        windows.append((begin + SETTLING * seconds, end))
        await asyncio.sleep(end - time.perf_counter())
    return windows


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
        title = f"Speed while a client watches, against {statistics.median(unwatched):.0f} tokens/s without"
        found = estimate(ratios)
        rows.append(
            {
                "table": title,
                "windows": kind,
                "pairs": len(ratios),
                "ratio": found,
                "cost": f"{1 - found['median']:.1%}",
            }
        )
    details = {"seconds per window": seconds, "left out at its begin": f"{SETTLING:.0%}"}
    details |= {
        "lines/s that the watcher read": lines_per_second,
        "tokens/s without a watcher": statistics.median(unwatched),
    }
    return [*rows, {"table": "Windows", **details, "steal %": 100 * noise.steal, "others %": 100 * noise.others}]
