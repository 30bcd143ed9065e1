"""The bubble of a pipeline: how much of their time stages wait, with so many micro-batches."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from nanovllm.data.schedule import ModelRunnerOutput, SampledToken, SchedulerOutput
from nanovllm.distributed.groups import Grid, get_world_group
from nanovllm.engine.core import EngineCore
from nanovllm.lab.bench.gpu.engine import add_requests, start_engine
from nanovllm.lab.bench.parallel.findings import Finding, Found, number
from nanovllm.lab.bench.parallel.setting import Setting
from nanovllm.lab.bench.ranks import run_ranks
from nanovllm.lab.bench.report import Table
from nanovllm.lab.bench.workloads import Workload

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


@dataclass(frozen=True)
class Passage:
    """All micro-batches, as one stage saw them; in seconds of one clock.

    Attributes:
        begin, end: before the first micro-batch, and after the last one.
        computing: how long the stage computed for each of them, without what it waited, sent and received.
    """

    begin: float
    end: float
    computing: list[float]

    @property
    def busy(self) -> float:
        """How long it computed."""
        return sum(self.computing)


def theory(micro_batches: int, stages: int = STAGES) -> float:
    """The share of the stages' time that nobody can use: the first one has nothing to do at the end, the last one at the
    beginning. For stages that take equally long."""
    return (stages - 1) / (micro_batches + stages - 1)


def whole(stages: list[Passage]) -> float:
    """From the first stage's begin to the last one's end."""
    return max(stage.end for stage in stages) - min(stage.begin for stage in stages)


def bubble(stages: list[Passage]) -> float:
    """The share of their time in which stages did not compute."""
    return 1 - sum(stage.busy for stage in stages) / (len(stages) * whole(stages))


def with_free_lines(stages: list[Passage]) -> list[Passage]:
    """The same computations, each as soon as the stage is free and the one before it has done with the micro-batch: what
    is left of the bubble if nothing takes time on the way. Uneven steps move it away from theory, mostly up."""
    arrived, passages = [0.0] * len(stages[0].computing), []
    for stage in stages:
        free = 0.0
        for i, seconds in enumerate(stage.computing):
            free = arrived[i] = max(free, arrived[i]) + seconds
        passages.append(Passage(0.0, free, stage.computing))
    return passages


def run_stage(folder: str, options: dict[str, Any], tokens: int, rounds: int) -> list[Passage]:
    """On each stage: prompts of so many tokens, one a micro-batch, as fast as they come; `rounds` times for each number of
    micro-batches.

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
            begin, computing = time.perf_counter(), []
            for plan in plans:
                started, on_the_line = time.perf_counter(), receiving.seconds + sending.seconds
                core.executor.launch(plan)()
                on_the_line = receiving.seconds + sending.seconds - on_the_line
                computing.append(time.perf_counter() - started - on_the_line)
            end = time.perf_counter()
            core.runner.link.flush()
            if turn:  # the first one is to warm up
                found.append(Passage(begin, end, computing))
            _forget(core, plans)
    return found


def _forget(core: EngineCore, plans: list[SchedulerOutput]) -> None:
    """End the requests, with a token that is the same on every stage; only the last one knows the right one."""
    for plan in plans:
        core.scheduler.update_from_output(
            plan, ModelRunnerOutput({r.request_id: SampledToken(0) for r in plan.requests})
        )


def pipeline(setting: Setting) -> Found:
    """Two stages, and 1 to 8 prompts: long steps, for which the goal is, since what else happens on the machine is small
    beside them; and short ones."""
    found, rounds = Found(), 1 if setting.dry_run else 2 * setting.repeats
    threads = max(1, setting.threads // STAGES)
    for long_steps, tokens, dtype in ((True, 512, "float32"), (False, 256, setting.dtype)):
        tokens = 16 if setting.dry_run else tokens
        options = setting.options(max_model_len=2 * tokens, dtype=dtype)
        work = (str(setting.folder), options, tokens, rounds)
        stages = run_ranks(run_stage, Grid(pipeline=STAGES), *work, threads=threads)
        of_what = f"{'long' if long_steps else 'short'} steps: prompts of {tokens} tokens, {dtype}"
        found += report_bubbles(stages, of_what, has_goal=long_steps)
    return found


def report_bubbles(stages: list[list[Passage]], of_what: str, has_goal: bool) -> Found:
    """What the stages' times say; see `run_stage`."""
    found, rows = Found(data={of_what: [[asdict(each) for each in stage] for stage in stages]}), []
    rounds = [list(each) for each in zip(*stages, strict=True)]
    for count in MICRO_BATCHES:
        of_count = [each for each in rounds if len(each[0].computing) == count]
        measured, expected = statistics.median(map(bubble, of_count)), theory(count)
        if has_goal:
            figure = f"pipeline bubble, {count} micro-batch{'es' * (count > 1)} on {STAGES} stages"
            found.findings.append(Finding.near(figure, 100 * measured, " %", 100 * expected, TOLERANCE))
        milliseconds = [statistics.median(map(whole, of_count))]
        milliseconds += [statistics.median(each[stage].busy for each in of_count) for stage in range(STAGES)]
        uneven = statistics.median(bubble(with_free_lines(each)) for each in of_count)
        shares = (measured, uneven, expected)
        rows.append([str(count), *(number(1e3 * s) for s in milliseconds), *(number(100 * s) for s in shares)])
    computing = [f"stage {s} computes, ms" for s in range(STAGES)]
    columns = ["micro-batches", "ms", *computing, "bubble %", "with free lines %", "theory %"]
    repeats = len(rounds) // len(MICRO_BATCHES)
    title = f"{STAGES} stages, {of_what}, a prompt a micro-batch, medians of {repeats}"
    found.tables.append(Table(title, columns, rows, num_labels=0))
    return found
