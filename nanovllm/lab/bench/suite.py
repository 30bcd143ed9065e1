"""Runs workloads on engines in turn, and compares them."""

import contextlib
import functools
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.lab.bench.engines import (
    ENGINES,
    KINDS,
    EngineProcess,
    EngineSettings,
    OfflineEngine,
    Server,
    Started,
)
from nanovllm.lab.bench.machine import Limits, Noise, NoiseMeter, best, measure_limits
from nanovllm.lab.bench.metrics import (
    AGREEING_PAIRS,
    TIE,
    Figures,
    compare,
    figures,
    intruder_figures,
)
from nanovllm.lab.bench.report import Row, conditions
from nanovllm.lab.bench.roofline import ModelCost, Work, roofline_share, workload_work
from nanovllm.lab.bench.workloads import BenchRequest, Workload, shortened
from nanovllm.models.config import ModelConfig

# A warm-up has other tokens than any repeat.
WARM_UP = -1
WARM_UP_REQUESTS = 4

#: What engines are compared by: field of `Figures`, its title and factor, and whether more is
# better.
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
    """One run of one workload on one engine. `work` is the least work it takes, None where that has
    no meaning."""

    workload: str
    engine: str
    figures: Figures
    noise: Noise
    work: Work | None


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
    starts: list[Started] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @functools.cached_property
    def cost(self) -> ModelCost | None:
        """The bytes and FLOPs of the model; None if a part of it is quantized, since that has fewer
        bytes and another peak."""
        chosen = {name for engine in self.engines for name in engine.options}
        if self.model.quantization is not None or chosen & {
            "quantization",
            "quantize_head",
            "kv_cache_dtype",
        }:
            return None
        return ModelCost.of(self.model, self.limits.bytes_per_number)

    # ---------------------------------------------------------------- measuring

    def run(self) -> None:
        """Measure everything.

        Raises:
            EngineFailed: an engine failed; earlier runs are kept.
        """
        groups: dict[tuple[Any, ...], list[Workload]] = {}
        for workload in self.workloads:
            # Workloads with equal keys run on the same engine processes.
            key = (workload.kind, *sorted(workload.options.items()))
            groups.setdefault(key, []).append(workload)
        for (kind, *_), group in groups.items():
            able = [each for each in self.engines if kind in ENGINES[each.name]]
            with contextlib.ExitStack() as stack:
                running = [self._start(stack, group[0], settings) for settings in able]
                for repeat in range(self.repeats):
                    self._take_turns(running, group, repeat)

    def _start(
        self, stack: contextlib.ExitStack, workload: Workload, settings: EngineSettings
    ) -> EngineProcess:
        """Start an engine for this workload and others like it."""
        make = Server if workload.kind == "server" else OfflineEngine
        engine = stack.enter_context(
            make(replace(settings, options=settings.options | workload.options))
        )
        started = engine.started
        say(
            f"{started.engine}: first token {started.seconds:.1f} s after its start "
            f"({started.kind})"
        )
        self.starts.append(started)
        # What an engine does only once, such as compiling or growing its buffers, is done before it
        # counts.
        requests = workload.requests(self.model.vocab_size, self.seed, WARM_UP)[:WARM_UP_REQUESTS]
        engine.run(replace(workload, intruder_len=0), shortened(requests))
        engine.rest()
        return engine

    def _take_turns(
        self, running: list[EngineProcess], workloads: list[Workload], repeat: int
    ) -> None:
        """Run every workload once on every engine; neighbouring runs of a workload make a pair."""
        for workload in workloads:
            requests = workload.requests(self.model.vocab_size, self.seed, repeat)
            for engine in running:
                # `generate` of transformers keeps nothing from one call to the next.
                if workload.cache == "none" or engine.settings.name != "hf":
                    self.runs.append(self._run_one(engine, workload, requests, repeat))
        settings = self.engines[0]
        self.limits = best(
            self.limits, measure_limits(settings.options["dtype"], settings.num_threads)
        )

    def _run_one(
        self, engine: EngineProcess, workload: Workload, requests: list[BenchRequest], repeat: int
    ) -> Run:
        name = engine.settings.name
        engine.wake()
        meter = NoiseMeter(engine.process.pid)
        timelines = engine.run(workload, requests)
        noise = meter.read()
        engine.rest()
        found = (intruder_figures if workload.intruder_len else figures)(timelines)
        say(
            f"{workload.name}, {name}, run {repeat + 1} of {self.repeats}: "
            f"{found.tokens_per_second:.1f} tokens/s (steal {noise.steal:.0%}, others "
            f"{noise.others:.0%})"
        )
        return Run(workload.name, name, found, noise, workload_work(self.cost, workload, requests))

    # ---------------------------------------------------------------- reporting

    def facts(self, seconds: float) -> list[str]:
        """The conditions, one fact per line."""
        settings = self.engines[0]
        versions = dict[str, dict[str, str]]()
        for start in self.starts:
            versions.setdefault(start.engine, {}).update(start.versions)
        return [
            *conditions(
                f"{self.name}, {settings.options['dtype']}", settings.num_threads, seconds, versions
            ),
            (
                f"measured roofs: {self.limits.bytes_per_second / 1e9:.1f} GB/s read, "
                f"{self.limits.flops_per_second / 1e9:.0f} GFLOP/s in {self.limits.dtype}"
            ),
            *(f"{workload.name}: {workload.title}" for workload in self.workloads),
            *(f"{engine.name}: {engine.note}" for engine in self.engines if engine.note),
        ]

    def of(self, workload: str, engine: str) -> list[Run]:
        """The runs of a workload on an engine, by repeat."""
        return [run for run in self.runs if run.workload == workload and run.engine == engine]

    def under_the_roof(self) -> dict[str, dict[str, tuple[float, float]]]:
        """By engine and workload: FLOPs per byte of the least work, and the median of FLOPs per
        second."""
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for workload, engine in itertools.product(self.workloads, self.engines):
            runs = self.of(workload.name, engine.name)
            if runs and (work := runs[0].work) is not None:
                rate = statistics.median(work.flops / run.figures.seconds for run in runs)
                found.setdefault(engine.name, {})[workload.name] = (
                    work.flops / work.num_bytes,
                    rate,
                )
        return found

    def rows(self) -> Iterator[Row]:
        """The tables: speed, use of the machine, starts, and ratios."""
        for workload, engine in itertools.product(self.workloads, self.engines):
            if not (runs := self.of(workload.name, engine.name)):
                continue
            label = {"workload": workload.name, "engine": engine.name}
            yield (
                {"table": "Speed"}
                | label
                | {title: _values(runs, name, f) for name, title, f, _ in COMPARED}
            )
            shares: Any = [(None, None)]
            if runs[0].work is not None:
                rates = self.limits.bytes_per_second, self.limits.flops_per_second
                shares = [roofline_share(runs[0].work, run.figures.seconds, *rates) for run in runs]
            yield (
                {"table": "Use of the machine, by the run and by others"}
                | label
                | {
                    "% of roofline": [None if None in share else max(share) for share in shares],
                    "bandwidth %": [share[0] for share in shares],
                    "compute %": [share[1] for share in shares],
                    "cores busy": [run.noise.cores for run in runs],
                    "worst steal %": 100 * max(run.noise.steal for run in runs),
                    "worst others %": 100 * max(run.noise.others for run in runs),
                }
            )
        for kind, engine in itertools.product(KINDS, self.engines):
            if starts := self._starts(kind, engine.name):
                yield {
                    "table": "Start-up and memory",
                    "used as": kind,
                    "engine": engine.name,
                    "starts": len(starts),
                    "start to first token s": [start.seconds for start in starts],
                    "peak memory MiB": max(start.peak_bytes for start in starts) / 2**20,
                }
        for other in self.engines[1:]:
            yield from self._ratios(other.name)

    def _starts(self, kind: str, engine: str) -> list[Started]:
        """The starts of an engine, in order: every engine that can be used in this way is started
        as often."""
        return [start for start in self.starts if (start.kind, start.engine) == (kind, engine)]

    def _ratios(self, other: str) -> Iterator[Row]:
        """The first engine against another one."""
        first = self.engines[0].name
        row: Row = {
            "table": (
                f"{first} against the others, pair by pair (above 1: {first} is better; below "
                f"{TIE} it is a tie unless {AGREEING_PAIRS} pairs or more agree)"
            )
        }
        compared: list[tuple[str, str, list[list[Any]], bool]] = []
        for workload, (name, title, _, more_is_better) in itertools.product(
            self.workloads, COMPARED
        ):
            both = [_values(self.of(workload.name, engine), name) for engine in (first, other)]
            compared.append((workload.name, title, both, more_is_better))
        titles = {"seconds": "start to first token", "peak_bytes": "peak memory"}
        for kind, (name, title) in itertools.product(KINDS, titles.items()):
            both = [
                [getattr(start, name) for start in self._starts(kind, engine)]
                for engine in (first, other)
            ]
            compared.append((kind, title, both, False))
        for where, figure, both, more_is_better in compared:
            # If an engine's failure cut the suite short, the last one has no partner.
            pairs = list(zip(*both, strict=False))
            if pairs and not any(None in pair for pair in pairs):
                ratios, verdict = compare(pairs, more_is_better)
                shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
                row |= {
                    "workload": where,
                    "figure": figure,
                    "against": other,
                    "ratio": ratios,
                    "pairs": shown,
                }
                yield row | {"verdict": verdict}


def _values(runs: Sequence[Run], name: str, factor: float = 1) -> list[float | None]:
    values = [getattr(run.figures, name) for run in runs]
    return [None if value is None else factor * value for value in values]


def say(line: str) -> None:
    """Tell the user about the progress."""
    print(line, file=sys.stderr, flush=True)
