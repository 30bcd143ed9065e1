"""The bubble of a pipeline: how much of their time stages wait, with so many micro-batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from nanovllm.bench.gpu.engine import add_requests, start_engine
from nanovllm.bench.parallel.findings import Finding, Found, number
from nanovllm.bench.parallel.setting import Setting
from nanovllm.bench.ranks import run_ranks
from nanovllm.bench.report import Table
from nanovllm.bench.workloads import Workload
from nanovllm.distributed.groups import Grid, get_world_group
from nanovllm.engine import EngineCore
from nanovllm.scheduler import SampledToken, Schedule, StepResult

STAGES, MICRO_BATCHES = 2, (1, 2, 4, 8)
TOLERANCE = 0.15


class Stopwatch:
    """Counts the time that a function takes, from now on."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds, self._function = 0.0, getattr(owner, name)
        setattr(owner, name, self._timed)

    def _timed(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._function(*arguments)
        finally:
            self.seconds += time.perf_counter() - start


def theory(micro_batches: int, stages: int = STAGES) -> float:
    """The share of the stages' time that nobody can use: the first one has nothing to do at the end, the last one at the
    beginning. For stages that take equally long."""
    return (stages - 1) / (micro_batches + stages - 1)


def bubble(spans: list[tuple[float, float, float]]) -> float:
    """The share of their time in which stages did not compute.

    Args:
        spans: of each stage, when it began, when it had done its last micro-batch, and how long it computed in between,
            in seconds of one clock.
    """
    whole = max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
    return 1 - sum(busy for _, _, busy in spans) / (len(spans) * whole)


def run_stage(
    folder: str, options: dict[str, Any], tokens: int, rounds: int
) -> list[tuple[int, tuple[float, float, float]]]:
    """On each stage: prompts of so many tokens, one a micro-batch, as fast as they come; see `bubble` for the answer.

    Every stage has a scheduler of its own, and all come to the same plans: nobody has to be told, so there is nothing but the
    pipeline to be seen.
    """
    core = start_engine(folder, max_num_batched_tokens=tokens, max_num_seqs=max(MICRO_BATCHES), **options)
    receiving, sending = Stopwatch(core.runner.link, "receive"), Stopwatch(core.runner.link, "send")
    found = []
    for turn in range(rounds + 1):
        for count in MICRO_BATCHES:
            work = Workload("", "throughput", "", count, (tokens, tokens), (1, 1))
            add_requests(core, work.requests(core.model_config.vocab_size, repeat=turn))
            plans = [core.scheduler.schedule() for _ in range(count)]
            assert all(plan.num_tokens == tokens for plan in plans), "a prompt a step"
            get_world_group().barrier()
            begin, waited = time.perf_counter(), receiving.seconds + sending.seconds
            results = [core.executor.launch(plan) for plan in plans]
            _take(results)
            end = time.perf_counter()
            waited = receiving.seconds + sending.seconds - waited
            core.runner.link.flush()
            if turn:  # the first one is to warm up
                found.append((count, (begin, end, end - begin - waited)))
            _forget(core, plans)
    return found


def _take(results: list[Callable[[], StepResult]]) -> None:
    for result in results:
        result()


def _forget(core: EngineCore, plans: list[Schedule]) -> None:
    """End the requests, with a token that is the same on every stage; only the last one knows the right one."""
    for plan in plans:
        core.scheduler.update(plan, StepResult({r.request_id: SampledToken(0) for r in plan.requests}))


def pipeline(setting: Setting) -> Found:
    """Two stages, and 1 to 8 prompts."""
    tokens, rounds = (16, 1) if setting.dry_run else (256, 2 * setting.repeats)
    arguments = str(setting.folder), setting.options(max_model_len=2 * tokens), tokens, rounds
    threads = max(1, setting.threads // STAGES)
    stages = run_ranks(run_stage, Grid(pipeline=STAGES), *arguments, threads=threads)
    return report_bubbles(stages, tokens)


def report_bubbles(stages: list[list[tuple[int, tuple[float, float, float]]]], tokens: int) -> Found:
    """What the stages' times say; see `run_stage`."""
    found, rows = Found(data={"seconds": stages}), []
    rounds = [
        (first[0], [span for _, span in each]) for each in zip(*stages, strict=True) for first in each[:1]
    ]
    for count in MICRO_BATCHES:
        spans = [each for number_of, each in rounds if number_of == count]
        measured, expected = statistics.median(map(bubble, spans)), theory(count)
        figure = f"pipeline bubble, {count} micro-batch{'es' * (count > 1)} on {STAGES} stages"
        found.findings.append(Finding.near(figure, 100 * measured, " %", 100 * expected, TOLERANCE))
        busy = [statistics.median(each[stage][2] for each in spans) for stage in range(STAGES)]
        whole = statistics.median(max(e for _, e, _ in s) - min(b for b, _, _ in s) for s in spans)
        cells = [str(count), number(1e3 * whole), *(number(1e3 * seconds) for seconds in busy)]
        rows.append([*cells, number(100 * measured), number(100 * expected)])
    columns = [
        "micro-batches",
        "ms",
        *(f"stage {s} computes, ms" for s in range(STAGES)),
        "bubble %",
        "theory %",
    ]
    title = f"{STAGES} stages, prompts of {tokens} tokens, a prompt a micro-batch, medians of {len(rounds) // len(MICRO_BATCHES)}"
    found.tables.append(Table(title, columns, rows, num_labels=0))
    return found
