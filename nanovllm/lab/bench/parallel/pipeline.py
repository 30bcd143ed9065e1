"""The bubble of a pipeline: the share of their time in which stages wait, by the number of
micro-batches."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.assembly.executor import allocate, read_model_config
from nanovllm.assembly.runner import create_worker
from nanovllm.assembly.scheduling import create_manager, create_scheduler
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.core.request import Request
from nanovllm.core.schedule import ModelRunnerOutput, SampledToken
from nanovllm.core.scheduler import Scheduler
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.data.resolved_config import resolve
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.distributed.groups import Grid, get_world_group
from nanovllm.executor.base import Executor
from nanovllm.executor.uniproc import UniProcExecutor
from nanovllm.features.pipeline.stage import StageForward
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, goal
from nanovllm.lab.bench.workloads import Workload
from nanovllm.lab.processes import run_ranks
from nanovllm.models.config import ModelConfig

STAGES = 2
MICRO_BATCHES = (1, 2, 4, 8)
TOLERANCE = 0.15


class Stopwatch:
    """Counts the time that a function takes, from now on."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        self._function = getattr(owner, name)
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
        computing: how long the stage computed each of them, without the time that it waited, sent
            and received.
    """

    begin: float
    end: float
    computing: list[float]


def theory(micro_batches: int, stages: int = STAGES) -> float:
    """The bubble of stages that take equally long: the first one is idle at the end, the last one
    at the beginning."""
    return (stages - 1) / (micro_batches + stages - 1)


def whole(stages: list[Passage]) -> float:
    """From the first stage's begin to the last one's end."""
    return max(stage.end for stage in stages) - min(stage.begin for stage in stages)


def bubble(stages: list[Passage]) -> float:
    """The share of their time in which stages did not compute."""
    return 1 - sum(sum(stage.computing) for stage in stages) / (len(stages) * whole(stages))


def with_free_lines(stages: list[Passage]) -> list[Passage]:
    """The same computations if sending took no time: each begins as soon as its stage is free and
    the stage before has finished the micro-batch. Steps of uneven length move the bubble away from
    theory, mostly up."""
    arrived = [0.0] * len(stages[0].computing)
    passages = []
    for stage in stages:
        free = 0.0
        for i, seconds in enumerate(stage.computing):
            free = arrived[i] = max(free, arrived[i]) + seconds
        passages.append(Passage(0.0, free, stage.computing))
    return passages


def start_stage(config: EngineConfig, model_config: ModelConfig, executor: Executor) -> Scheduler:
    """Allocate memory, and return a scheduler that plans as if this stage were a whole engine: that
    of a pipeline would wait for results."""
    resolved = resolve(
        replace(config, pipeline_parallel_size=1),
        model_max_len=model_config.max_position_embeddings,
        num_kv_blocks=executor.num_blocks,
        num_host_blocks=0,
    )
    allocate(executor, resolved)
    return create_scheduler(resolved, create_manager(resolved))


def run_stage(options: dict[str, Any], tokens: int, rounds: int) -> list[Passage]:
    """On each stage: prompts of so many tokens, one per micro-batch, as fast as they come; `rounds`
    times for each number of micro-batches.

    Every stage has a scheduler of its own, and all make the same plans: no orders are sent, so only
    the pipeline is measured."""
    config = EngineConfig(
        max_num_batched_tokens=tokens,
        max_num_seqs=max(MICRO_BATCHES),
        num_kv_blocks=2 * max(MICRO_BATCHES) * tokens // 16,
        pipeline_parallel_size=STAGES,
        **options,
    )
    folder = resolve_model(config.model)
    model_config = read_model_config(config, folder)
    executor = UniProcExecutor(config, model_config, folder, create_worker)
    scheduler = start_stage(config, model_config, executor)
    forward = executor.runner.forward
    assert isinstance(forward, StageForward), "there are several stages"
    receiving = Stopwatch(forward.link, "receive")
    sending = Stopwatch(forward.link, "send")
    found = []
    for turn in range(rounds + 1):
        for count in MICRO_BATCHES:
            work = Workload(
                "",
                "throughput",
                "",
                num_prompts=count,
                input_len=(tokens, tokens),
                output_len=(1, 1),
            )
            for index, request in enumerate(work.requests(model_config.vocab_size, repeat=turn)):
                params = SamplingParams(temperature=0, max_tokens=1)
                source = EngineRequest(str(index), request.prompt_token_ids, params)
                scheduler.add_request(Request(source, index))
            plans = [scheduler.schedule() for _ in range(count)]
            assert all(plan.num_tokens == tokens for plan in plans), "a prompt per step"
            get_world_group().barrier()
            begin = time.perf_counter()
            computing = []
            for plan in plans:
                started = time.perf_counter()
                on_the_line = receiving.seconds + sending.seconds
                executor.launch(plan)()
                on_the_line = receiving.seconds + sending.seconds - on_the_line
                computing.append(time.perf_counter() - started - on_the_line)
            end = time.perf_counter()
            forward.link.flush()
            if turn:  # the first round is to warm up
                found.append(Passage(begin, end, computing))
            for plan in plans:
                # Ended with the same token on every stage; only the last one knows the right one.
                ends = {r.request_id: [SampledToken(0)] for r in plan.requests}
                scheduler.update_from_output(plan, ModelRunnerOutput(ends))
    return found


def pipeline(setting: Setting) -> Iterator[Row]:
    """Two stages, and 1 to 8 prompts: long steps, which have the goals because disturbances are
    small beside them, and short ones."""
    rounds = 1 if setting.dry_run else 2 * setting.repeats
    threads = max(1, setting.threads // STAGES)
    for long_steps, tokens, dtype in ((True, 512, "float32"), (False, 256, setting.dtype)):
        tokens = 16 if setting.dry_run else tokens
        options = setting.options(max_model_len=2 * tokens, dtype=dtype)
        stages = run_ranks(
            run_stage, Grid(pipeline=STAGES), options, tokens, rounds, threads=threads
        )
        yield from compare(
            stages,
            f"{'long' if long_steps else 'short'} steps: {tokens} tokens, {dtype}",
            long_steps,
        )


def compare(stages: list[list[Passage]], of_what: str, has_goal: bool) -> Iterator[Row]:
    """Compare the measured bubbles with theory; see `run_stage`."""
    rounds = [list(each) for each in zip(*stages, strict=True)]
    for count in MICRO_BATCHES:
        of_count = [each for each in rounds if len(each[0].computing) == count]
        measured = [100 * bubble(each) for each in of_count]
        expected = 100 * theory(count)
        if has_goal:
            figure = f"pipeline bubble, {count} micro-batch{'es' * (count > 1)} on {STAGES} stages"
            yield goal(figure, statistics.median(measured), "%", near=expected, tolerance=TOLERANCE)
        computing = {
            f"stage {s} computes, ms": [1e3 * sum(x[s].computing) for x in of_count]
            for s in range(STAGES)
        }
        yield {
            "table": (
                f"{STAGES} stages, {of_what}, one prompt per micro-batch, medians of "
                f"{len(of_count)}"
            ),
            "micro-batches": count,
            "ms": [1e3 * whole(each) for each in of_count],
            **computing,
            "bubble %": measured,
            "bubble % with free transfers": [
                100 * bubble(with_free_lines(each)) for each in of_count
            ],
            "theory %": expected,
        }
