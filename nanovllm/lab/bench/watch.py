"""`nanovllm bench watch`: what does it cost an engine that somebody watches it?

One server, under a load that does not end, and a watcher that comes and goes: two windows of time, one after the other,
of which one is watched, make a pair. Which of them comes first alternates, so that no trend favours either. In between
stand pairs that nobody watches: how far their ratio is from 1 is the error of the method.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nanovllm.lab.bench.engines import EngineFailed, Server
from nanovllm.lab.bench.machine import Noise, NoiseMeter
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.report import Context, Table
from nanovllm.lab.bench.suite import Launch, Results, Suite
from nanovllm.lab.bench.workloads import BenchRequest, Workload

#: After the watcher has come or gone, nothing counts for this share of a window.
SETTLING = 0.25
#: The first pairs of each kind do not count: the load begins.
WARM_UP_PAIRS = 2
_RESAMPLES = 10_000
_WATCHER = pathlib.Path(__file__).with_name("watcher.py")


@dataclass
class Pair:
    """Two windows of time, one after the other.

    Attributes:
        watched: somebody looks on in one of them; else it is a control.
        swapped: the one that would be watched is the second.
    """

    watched: bool
    swapped: bool

    @property
    def windows(self) -> tuple[bool, bool]:
        """Whether somebody looks on, in the first and in the second."""
        return self.watched and not self.swapped, self.watched and self.swapped


def plan(num_pairs: int) -> list[Pair]:
    """So many watched pairs and as many controls, in turn, and each kind in both orders in turn."""
    return [Pair(watched, bool(i % 2)) for i in range(num_pairs) for watched in (True, False)]


@dataclass
class Estimate:
    """What pairs say together: how fast the watched window is, with the other one's speed as 1.

    Attributes:
        ratio: the median.
        low, high: its 95 % confidence interval, from resampling the pairs.
    """

    ratio: float
    low: float
    high: float
    pairs: list[float]

    @classmethod
    def of(cls, pairs: Sequence[float]) -> Estimate:
        """The estimate from these ratios; equal ones give an equal estimate."""
        drawn = np.random.default_rng(0).choice(pairs, (_RESAMPLES, len(pairs)))
        low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
        return cls(float(np.median(pairs)), float(low), float(high), list(pairs))


@dataclass
class Watched:
    """Everything that was measured.

    Attributes:
        tokens_per_second: median over the windows that nobody watched.
        lines_per_second: what a watcher read, of lines, a step each.
    """

    tokens_per_second: float
    lines_per_second: float
    watched: Estimate
    control: Estimate
    window_seconds: float
    noise: Noise

    def table(self) -> Table:
        """The estimates."""
        title = f"Speed while somebody watches, against {self.tokens_per_second:.0f} tokens/s while nobody does"
        kinds = {"watched / unwatched": self.watched, "unwatched / unwatched": self.control}
        rows = [
            [name, str(len(e.pairs)), f"{e.ratio:.3f}", f"{e.low:.3f} – {e.high:.3f}", f"{1 - e.ratio:.1%}"]
            for name, e in kinds.items()
        ]
        return Table(title, ["windows", "pairs", "median ratio", "95 % interval", "cost"], rows, num_labels=1)

    def lines(self, context: Context, workload: Workload) -> list[str]:
        """For a reader, one fact a line."""
        return [
            context.machine_line(),
            f"model {context.model}, {context.dtype}; {workload.title}",
            f"pairs of windows of {self.window_seconds:g} s, the first {SETTLING:.0%} of each left out; the watcher read "
            f"{self.lines_per_second:.0f} lines/s; steal {self.noise.steal:.0%}, others {self.noise.others:.0%}; "
            f"all of it took {context.seconds / 60:.1f} minutes",
            context.engine_line("nanovllm"),
        ]

    def as_json(self, context: Context) -> str:
        """Everything as JSON."""
        found = {"context": dataclasses.asdict(context)} | dataclasses.asdict(self)
        return json.dumps(found, indent=1, allow_nan=False) + "\n"


class Watcher:
    """A process that reads a server's steps for a while, whenever it is told to; a context manager."""

    def __init__(self, url: str) -> None:
        command, pipe = [sys.executable, str(_WATCHER), f"{url}/trace"], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def watch(self, seconds: float) -> None:
        """Begin to look on, for so long."""
        assert self._process.stdin is not None
        try:
            print(seconds, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise EngineFailed("nanovllm does not let itself be watched") from None

    def counts(self) -> list[int]:
        """Wait until it has obeyed; the lines that it read, each time.

        Raises:
            EngineFailed: there was nothing to see.
        """
        counts = [int(line) for line in self._process.communicate()[0].splitlines()]
        if self._process.returncode or sum(counts) <= len(counts):  # a header each
            raise EngineFailed("nanovllm was watched, and showed no step")
        return counts


def measure(suite: Suite, results: Results, num_pairs: int, seconds: float) -> Watched:
    """Start the server, put it under load, and watch it every now and then.

    Args:
        suite: its first engine and its only workload are taken.
        results: gets the server's start.
        seconds: length of a window.

    Raises:
        EngineFailed: the server failed, or showed nothing.
    """
    (workload,), settings = suite.workloads, suite.engines[0]
    pairs = plan(num_pairs + WARM_UP_PAIRS)
    with Server(settings) as engine, Watcher(engine.url) as watcher:
        results.launches.append(Launch(0, settings.name, "server", engine.started))
        suite.say(f"{settings.name}: first token {engine.started.seconds:.1f} s after its start")
        meter = NoiseMeter(os.getpid())  # of which the watcher is a child, too
        requests = endless_requests(workload, suite.model.vocab_size, suite.seed)
        turns = _take_turns(watcher, pairs, seconds, suite.say)
        timelines, windows = engine.keep_busy(requests, workload.num_prompts, turns)
        noise, counts = meter.read(), watcher.counts()
    speeds = rates(timelines, windows)
    return summarize(pairs, speeds, sum(counts) / (len(counts) * seconds), seconds, noise)


def endless_requests(workload: Workload, vocab_size: int, seed: int) -> Iterator[BenchRequest]:
    """The workload's requests, over and over with other tokens. The first ones are of all lengths, so that the streams do
    not all end at once for ever after."""
    for i, request in enumerate(workload.requests(vocab_size, seed)):
        share = (i + 1) / workload.num_prompts
        yield dataclasses.replace(request, max_tokens=max(1, int(request.max_tokens * share)))
    for repeat in itertools.count(1):
        yield from workload.requests(vocab_size, seed, repeat)


async def _take_turns(
    watcher: Watcher, pairs: Sequence[Pair], seconds: float, say: Callable[[str], None]
) -> list[tuple[float, float]]:
    """Look on and look away, pair by pair; from when to when the windows count."""
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
    """Tokens a second in each window: from the last step that ended before it to the last one in it, since a window is
    not so long that a step more or less would not show. Where no step ended, in it or before, the rate is not a number.
    """
    arrivals = np.array(sorted(arrival for line in timelines for arrival in line.arrivals)).reshape(-1, 2)
    times, counts = arrivals[:, 0], np.cumsum(arrivals[:, 1])
    # The tokens of a step come one after another: a window has the last of them, and so has the gap before the next.
    first, last = (np.searchsorted(times, edges, side="right") - 1 for edges in zip(*windows, strict=True))
    seconds = np.where((first == last) | (first < 0), np.nan, times[last] - times[first])
    return ((counts[last] - counts[first]) / seconds).tolist()


def summarize(
    pairs: Sequence[Pair], speeds: Sequence[float], lines_per_second: float, seconds: float, noise: Noise
) -> Watched:
    """What the windows' speeds, two for each pair, say. The first pairs were to warm up; those that miss a speed are left out.

    Raises:
        EngineFailed: no pair is left.
    """
    by_pair = list(zip(pairs, speeds[::2], speeds[1::2], strict=True))[2 * WARM_UP_PAIRS :]
    by_pair = [(p, first, second) for p, first, second in by_pair if not np.isnan([first, second]).any()]
    ratios = [(p.watched, second / first if p.swapped else first / second) for p, first, second in by_pair]
    watched, control = ([ratio for kind, ratio in ratios if kind == wanted] for wanted in (True, False))
    if not watched or not control:
        raise EngineFailed("steps took longer than windows: make them longer, with --window")
    unwatched = [s for p, *both in by_pair for seen, s in zip(p.windows, both, strict=True) if not seen]
    speed = statistics.median(unwatched)
    return Watched(speed, lines_per_second, Estimate.of(watched), Estimate.of(control), seconds, noise)
