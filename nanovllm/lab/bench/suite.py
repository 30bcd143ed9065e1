"""Runs workloads on engines in turn, and compares them."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.lab.bench.engines import SERVING_ENGINES, EngineProcess, EngineSettings, OfflineEngine, Server, Started
from nanovllm.lab.bench.machine import Limits, Noise, NoiseMeter, best, measure_limits
from nanovllm.lab.bench.metrics import AGREEING_PAIRS, TIE, Figures, compare, figures, intruder_figures
from nanovllm.lab.bench.report import Row, conditions
from nanovllm.lab.bench.roofline import ModelCost, Work, roofline_share, workload_work
from nanovllm.lab.bench.workloads import BenchRequest, Workload
from nanovllm.models.config import ModelConfig

# A warm-up has other tokens than any repeat.
WARM_UP, WARM_UP_REQUESTS, WARM_UP_TOKENS = -1, 4, 8

#: What engines are compared by: field of `Figures`, its title and factor, and whether more is better.
COMPARED = (
    ("tokens_per_second", "tokens/s", 1, True),
    ("ttft_p50", "TTFT p50 ms", 1000, False),
    ("ttft_p99", "TTFT p99 ms", 1000, False),
    ("itl_p50", "ITL p50 ms", 1000, False),
    ("itl_p99", "ITL p99 ms", 1000, False),
    ("itl_max", "worst ITL ms", 1000, False),
)


@dataclass
class Run:
    """One run of one workload on one engine. `work` is the least work it takes, None where that has no meaning."""

    workload: str
    engine: str
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
class Suite:
    """What to measure on what, and everything that was measured.

    Attributes:
        name: of the model, for the report.
        engines: the first is compared with each of the others.
        seed: of the workloads.
        limits: the roofs, best of several measurements.
    """

    name: str
    engines: Sequence[EngineSettings]
    workloads: Sequence[Workload]
    repeats: int
    seed: int
    model: ModelConfig
    limits: Limits
    launches: list[Launch] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    # ---------------------------------------------------------------- measuring

    def run(self) -> None:
        """Measure everything.

        Raises:
            EngineFailed: an engine failed; earlier runs are kept.
        """
        groups: dict[tuple[Any, ...], list[Workload]] = {}
        for workload in self.workloads:
            # Workloads with equal keys run on the same engine processes.
            key = (workload.mode == "serve", *sorted(workload.options.items()))
            groups.setdefault(key, []).append(workload)
        for number, group in enumerate(groups.values()):
            with contextlib.ExitStack() as stack:
                running = [self._start(stack, number, group[0], settings) for settings in self._able(group[0])]
                for repeat in range(self.repeats):
                    self._take_turns(running, group, repeat)

    def _able(self, workload: Workload) -> list[EngineSettings]:
        return [each for each in self.engines if workload.mode != "serve" or each.name in SERVING_ENGINES]

    def _start(
        self, stack: contextlib.ExitStack, number: int, workload: Workload, settings: EngineSettings
    ) -> EngineProcess:
        """Start an engine for this workload and others like it."""
        make = Server if workload.mode == "serve" else OfflineEngine
        engine = stack.enter_context(make(replace(settings, options=settings.options | workload.options)))
        say(f"{settings.name}: first token {engine.started.seconds:.1f} s after its start ({make.kind})")
        self.launches.append(Launch(number, settings.name, make.kind, engine.started))
        # What an engine does only once, such as compiling or growing its buffers, is done before it counts.
        requests = workload.requests(self.model.vocab_size, self.seed, WARM_UP)[:WARM_UP_REQUESTS]
        requests = [replace(r, max_tokens=min(r.max_tokens, WARM_UP_TOKENS), arrival=0.0) for r in requests]
        engine.run(replace(workload, intruder_len=0), requests)
        engine.rest()
        return engine

    def _take_turns(self, running: list[EngineProcess], workloads: list[Workload], repeat: int) -> None:
        """Run every workload once on every engine; neighbouring runs of a workload make a pair."""
        for workload in workloads:
            requests = workload.requests(self.model.vocab_size, self.seed, repeat)
            for engine in running:
                # `generate` of transformers keeps nothing from one call to the next.
                if workload.cache == "none" or engine.settings.name != "hf":
                    self.runs.append(self._run_one(engine, workload, requests, repeat))
        settings = self.engines[0]
        self.limits = best(self.limits, measure_limits(settings.options["dtype"], settings.num_threads))

    def _run_one(self, engine: EngineProcess, workload: Workload, requests: list[BenchRequest], repeat: int) -> Run:
        name = engine.settings.name
        engine.wake()
        meter = NoiseMeter(engine.process.pid)
        timelines = engine.run(workload, requests)
        noise = meter.read()
        engine.rest()
        found = (intruder_figures if workload.intruder_len else figures)(timelines)
        cost = ModelCost.of(self.model, self.limits.bytes_per_number)
        say(
            f"{workload.name}, {name}, run {repeat + 1} of {self.repeats}: {found.tokens_per_second:.1f} tokens/s "
            f"(steal {noise.steal:.0%}, others {noise.others:.0%})"
        )
        return Run(workload.name, name, found, noise, workload_work(cost, workload, requests))

    # ---------------------------------------------------------------- reporting

    def facts(self, seconds: float) -> list[str]:
        """The conditions, one fact per line."""
        settings, versions = self.engines[0], dict[str, dict[str, str]]()
        for launch in self.launches:
            versions.setdefault(launch.engine, {}).update(launch.started.versions)
        return [
            *conditions(f"{self.name}, {settings.options['dtype']}", settings.num_threads, seconds, versions),
            f"measured roofs: {self.limits.bytes_per_second / 1e9:.1f} GB/s read, "
            f"{self.limits.flops_per_second / 1e9:.0f} GFLOP/s in {self.limits.dtype}",
            *(f"{workload.name}: {workload.title}" for workload in self.workloads),
        ]

    def of(self, workload: str, engine: str) -> list[Run]:
        """The runs of a workload on an engine, by repeat."""
        return [run for run in self.runs if run.workload == workload and run.engine == engine]

    def rows(self) -> Iterator[Row]:
        """The tables: speed, use of the machine, starts, and ratios."""
        for workload, engine in itertools.product(self.workloads, self.engines):
            runs = self.of(workload.name, engine.name)
            label = {"workload": workload.name, "engine": engine.name}
            if not runs:
                continue
            yield {"table": "Speed"} | label | {title: _values(runs, name, f) for name, title, f, _ in COMPARED}
            shares: Any = [(None, None)]
            if runs[0].work is not None:
                rates = self.limits.bytes_per_second, self.limits.flops_per_second
                shares = [roofline_share(runs[0].work, run.figures.seconds, *rates) for run in runs]
            noises = [run.noise for run in runs]
            yield (
                {"table": "Use of the machine, by the run and by others"}
                | label
                | {
                    "% of roofline": [None if None in share else max(share) for share in shares],
                    "bandwidth %": [share[0] for share in shares],
                    "compute %": [share[1] for share in shares],
                    "cores busy": [noise.cores for noise in noises],
                    "worst steal %": 100 * max(noise.steal for noise in noises),
                    "worst others %": 100 * max(noise.others for noise in noises),
                }
            )
        for kind, engine in itertools.product(("offline", "server"), self.engines):
            if starts := [each.started for each in self.launches if (each.kind, each.engine) == (kind, engine.name)]:
                yield {
                    "table": "Start-up and memory",
                    "used as": kind,
                    "engine": engine.name,
                    "starts": len(starts),
                    "start to first token s": [start.seconds for start in starts],
                    "peak memory MiB": max(start.peak_bytes for start in starts) / 2**20,
                }
        for other in self.engines[1:]:
            for workload in self.workloads:
                for name, title, _, higher_is_better in COMPARED:
                    # If an engine's failure cut the suite short, the last run has no partner.
                    both = [_values(self.of(workload.name, each.name), name) for each in (self.engines[0], other)]
                    pairs = list(zip(*both, strict=False))
                    if pairs and not any(None in pair for pair in pairs):
                        yield self._ratio(workload.name, title, other.name, pairs, higher_is_better)
            for kind, (name, title) in itertools.product(
                ("offline", "server"), (("seconds", "start to first token"), ("peak_bytes", "peak memory"))
            ):
                mine, theirs = (
                    {s.group: getattr(s.started, name) for s in self.launches if (s.kind, s.engine) == (kind, engine)}
                    for engine in (self.engines[0].name, other.name)
                )
                if pairs := [(mine[group], theirs[group]) for group in sorted(mine.keys() & theirs.keys())]:
                    yield self._ratio(kind, title, other.name, pairs, higher_is_better=False)

    def _ratio(self, where: str, figure: str, other: str, pairs: list[Any], higher_is_better: bool) -> Row:
        first = self.engines[0].name
        ratios, verdict = compare(pairs, higher_is_better)
        return {
            "table": f"{first} against the others, pair by pair (above 1: {first} is better; below {TIE} it is a tie "
            f"unless {AGREEING_PAIRS} pairs or more agree)",
            "workload": where,
            "figure": figure,
            "against": other,
            "ratio": ratios,
            "pairs": " ".join(f"{ratio:.2f}" for ratio in ratios),
            "verdict": verdict,
        }


def _values(runs: Sequence[Run], name: str, factor: float = 1) -> list[float | None]:
    values = [getattr(run.figures, name) for run in runs]
    return [None if value is None else factor * value for value in values]


def say(line: str) -> None:
    """Tell the user about the progress."""
    print(line, file=sys.stderr, flush=True)
