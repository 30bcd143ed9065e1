"""Runs workloads on engines in turn, and keeps everything that was measured."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.lab.bench.engines import (
    OFFLINE_ENGINES,
    SERVING_ENGINES,
    EngineFailed,
    EngineProcess,
    EngineSettings,
    OfflineEngine,
    Server,
    Started,
)
from nanovllm.lab.bench.machine import Limits, Noise, NoiseMeter, best, measure_limits
from nanovllm.lab.bench.metrics import Comparison, Figures, compare, figures, intruder_figures
from nanovllm.lab.bench.roofline import ModelCost, RooflineShare, Work, roofline_share, workload_work
from nanovllm.lab.bench.workloads import BenchRequest, Workload
from nanovllm.models.config import ModelConfig

# A warm-up has other tokens than any repeat.
WARM_UP = -1
WARM_UP_REQUESTS, WARM_UP_TOKENS = 4, 8

#: What engines are compared by: field of `Figures`, its title, and whether more is better.
COMPARED = (
    ("tokens_per_second", "tokens/s", True),
    ("ttft_p50", "TTFT p50", False),
    ("ttft_p99", "TTFT p99", False),
    ("itl_p50", "ITL p50", False),
    ("itl_p99", "ITL p99", False),
    ("itl_max", "worst ITL", False),
)


@dataclass
class Run:
    """One run of one workload on one engine. `work` is the least it takes, None where that has no meaning."""

    workload: str
    engine: str
    repeat: int
    figures: Figures
    noise: Noise
    work: Work | None


@dataclass
class Launch:
    """One start of one engine; starts of different engines with the same `group` belong together."""

    group: int
    engine: str
    kind: str  # "offline" or "server"
    started: Started


@dataclass
class Results:
    """Everything that was measured.

    Attributes:
        engines: their names; ratios are of the first one against each of the others.
        limits: the roofs, best of several measurements.
    """

    engines: list[str]
    repeats: int
    workloads: list[Workload]
    limits: Limits
    launches: list[Launch] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def of(self, workload: str, engine: str) -> list[Run]:
        """The runs of a workload on an engine, by repeat."""
        return [run for run in self.runs if run.workload == workload and run.engine == engine]

    def median(self, workload: str, engine: str, name: str) -> float | None:
        """The median of a figure over the repeats; None if there is none."""
        values = [getattr(run.figures, name) for run in self.of(workload, engine)]
        return statistics.median(values) if values and None not in values else None

    def roofline(self, workload: str, engine: str) -> RooflineShare | None:
        """What the median run made of the machine."""
        runs, seconds = self.of(workload, engine), self.median(workload, engine, "seconds")
        if seconds is None or runs[0].work is None:
            return None
        limits = self.limits
        return roofline_share(runs[0].work, seconds, limits.bytes_per_second, limits.flops_per_second)

    def comparisons(self) -> Iterator[tuple[str, str, str, Comparison]]:
        """(workload or kind of use, figure, other engine, comparison) of the first engine with each of the others."""
        for other in self.engines[1:]:
            for workload in self.workloads:
                yield from self._compared_runs(workload.name, other)
            for kind in ("offline", "server"):
                yield from self._compared_launches(kind, other)

    def _compared_runs(self, workload: str, other: str) -> Iterator[tuple[str, str, str, Comparison]]:
        # A suite that an engine's failure cut short has a run without its partner at the end.
        runs = list(zip(self.of(workload, self.engines[0]), self.of(workload, other), strict=False))
        for name, title, higher_is_better in COMPARED:
            pairs = [(getattr(mine.figures, name), getattr(theirs.figures, name)) for mine, theirs in runs]
            if pairs and not any(None in pair for pair in pairs):
                yield workload, title, other, compare(pairs, higher_is_better)

    def _compared_launches(self, kind: str, other: str) -> Iterator[tuple[str, str, str, Comparison]]:
        mine, theirs = (
            {launch.group: launch.started for launch in self.launches if (launch.kind, launch.engine) == key}
            for key in ((kind, self.engines[0]), (kind, other))
        )
        groups = sorted(mine.keys() & theirs.keys())
        for name, title in (("seconds", "start to first token"), ("peak_bytes", "peak memory")):
            pairs = [(getattr(mine[group], name), getattr(theirs[group], name)) for group in groups]
            if pairs:
                yield kind, title, other, compare(pairs, higher_is_better=False)


@dataclass
class Suite:
    """What to measure on what.

    Attributes:
        engines: the first is compared with each of the others.
        seed: of the workloads.
        say: is told what happens, a line at a time.
    """

    engines: Sequence[EngineSettings]
    workloads: Sequence[Workload]
    repeats: int
    seed: int
    model: ModelConfig
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)

    def timed_run(self, results: Results) -> tuple[float, EngineFailed | None]:
        """`run`; returns the seconds it took, and the failure that ended it early, if one did."""
        start = time.perf_counter()
        try:
            self.run(results)
        except EngineFailed as error:
            return time.perf_counter() - start, error
        return time.perf_counter() - start, None

    def run(self, results: Results) -> None:
        """Measure everything, adding to `results` as it goes.

        Raises:
            EngineFailed: an engine failed; what was measured before is in the results.
        """
        groups: dict[tuple[Any, ...], list[Workload]] = {}
        for workload in self.workloads:
            # Workloads with equal keys run on the same engine processes.
            key = (workload.mode == "serve", *sorted(workload.options.items()))
            groups.setdefault(key, []).append(workload)
        for number, group in enumerate(groups.values()):
            with contextlib.ExitStack() as stack:
                running = self._start(stack, results, number, group[0])
                for repeat in range(self.repeats):
                    self._take_turns(results, running, group, repeat)

    def _start(
        self, stack: contextlib.ExitStack, results: Results, number: int, workload: Workload
    ) -> list[EngineProcess]:
        """Start the engines, one after another, for this workload and others like it."""
        kind = "server" if workload.mode == "serve" else "offline"
        running: list[EngineProcess] = []
        for settings in self.engines:
            if settings.name not in (SERVING_ENGINES if kind == "server" else OFFLINE_ENGINES):
                continue
            settings = dataclasses.replace(settings, options=settings.options | workload.options)
            make = Server if kind == "server" else OfflineEngine
            engine = stack.enter_context(make(settings))
            self.say(f"{settings.name}: first token {engine.started.seconds:.1f} s after its start ({kind})")
            results.launches.append(Launch(number, settings.name, kind, engine.started))
            self._warm_up(engine, workload)
            engine.rest()
            running.append(engine)
        return running

    def _take_turns(
        self, results: Results, running: list[EngineProcess], workloads: list[Workload], repeat: int
    ) -> None:
        """Every workload once on every engine; neighbouring runs of a workload make a pair."""
        for workload in workloads:
            requests = workload.requests(self.model.vocab_size, self.seed, repeat)
            for engine in running:
                # `generate` of transformers keeps nothing from one call to the next.
                if workload.cache == "none" or engine.settings.name != "hf":
                    results.runs.append(self._run_one(results, engine, workload, requests, repeat))
        settings = self.engines[0]
        found = measure_limits(settings.options["dtype"], settings.num_threads)
        results.limits = best(results.limits, found)

    def _warm_up(self, engine: EngineProcess, workload: Workload) -> None:
        """What an engine does only once, such as compiling or growing its buffers, is done before it counts."""
        requests = workload.requests(self.model.vocab_size, self.seed, WARM_UP)[:WARM_UP_REQUESTS]
        requests = [dataclasses.replace(r, max_tokens=min(r.max_tokens, WARM_UP_TOKENS), arrival=0.0) for r in requests]
        engine.run(dataclasses.replace(workload, intruder_len=0), requests)

    def _run_one(
        self, results: Results, engine: EngineProcess, workload: Workload, requests: list[BenchRequest], repeat: int
    ) -> Run:
        name = engine.settings.name
        engine.wake()
        meter = NoiseMeter(engine.process.pid)
        timelines = engine.run(workload, requests)
        noise = meter.read()
        engine.rest()
        found = (intruder_figures if workload.intruder_len else figures)(timelines)
        cost = ModelCost.of(self.model, results.limits.bytes_per_number)
        self.say(
            f"{workload.name}, {name}, run {repeat + 1} of {self.repeats}: {found.tokens_per_second:.1f} tokens/s "
            f"(steal {noise.steal:.0%}, others {noise.others:.0%})"
        )
        return Run(workload.name, name, repeat, found, noise, workload_work(cost, workload, requests))
