"""Measures the step times of an engine on this machine. Only its functions import torch."""

from __future__ import annotations

import itertools
import platform
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec
import psutil

from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.executor.virtual_clock import VIRTUAL_CLOCK
from nanovllm.processes.starvation import thread_times
from nanovllm.simulate.decoding import work_of
from nanovllm.simulate.fit import Timed, fit, fit_head
from nanovllm.simulate.measured import MeasuredCost
from nanovllm.simulate.workload import SECOND

if TYPE_CHECKING:
    from nanovllm.core.schedule import SchedulerOutput
    from nanovllm.data.resolved_config import ResolvedConfig
    from nanovllm.engine.llm import LLMEngine

# Shares of the time: for steps that the fit does not see, and for pauses.
HELD_OUT = 0.2
IDLE = 0.2
# Seconds.
PAUSES = (0.03, 0.1, 0.3, 1.0, 3.0)
WINDOW = 16
# Of loads whose requests arrive one after another: the most that decode, and steps per request.
MAX_JOINED = 32
JOINED_STEPS = 20
# All loads are within such a context.
MIN_MODEL_LEN = 128


class LoadRequest(NamedTuple):
    """A request of a load.

    Attributes:
        step: it arrives before this step of the load.
        num_shared: tokens at the beginning of its prompt that other prompts have, too.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    step: int = 0
    num_shared: int = 0


Load = list[LoadRequest]


def calibrate(config: EngineConfig, seconds: float = 120.0) -> MeasuredCost:
    """Run loads of many sizes on an engine for about `seconds`, fit a cost to the times of their
    steps, and compare it with the steps of other loads.

    Raises:
        UsageError: the context is too short for the loads.
        ValueError: see `LLM`.
    """
    from nanovllm.engine.llm import LLMEngine

    engine = LLMEngine(config)
    if (length := engine.core.limits.max_model_len) < MIN_MODEL_LEN:
        engine.core.close()
        raise UsageError(
            f"--calibrate runs requests of {MIN_MODEL_LEN} tokens, got --max-model-len {length}: "
            "raise it, or choose a model with a longer context"
        )
    timer = StepTimer(engine)
    begin = processor_times()
    timer.measure(seconds)
    ran, waited = (after - before for before, after in zip(begin, processor_times(), strict=True))
    timer.core.close()
    # Except on Linux, both are 0.
    share = waited / (ran + waited) if waited > 0 else 0.0
    return msgspec.structs.replace(timer.create_cost(), waited=share)


def processor_times() -> tuple[float, float]:
    """Return for how many seconds the threads of this process and of its ranks have run, and have
    waited for a processor. Only Linux tells."""
    threads = [
        times
        for each in (psutil.Process(), *psutil.Process().children(recursive=True))
        for times in thread_times(each.pid).values()
    ]
    return sum(each.used for each in threads), sum(each.delay for each in threads)


class StepTimer:
    """Runs loads on an engine, and times their steps. There is no trace, which takes time, too.

    The seconds of a step are those from the result of the step before to its own result: all that
    the engine did for this step, and for requests that arrived before it.

    Attributes:
        numbers: draws loads and tokens.
        seen, unseen: steps for the fit, and others.
        full: steps of a full pipeline.
        woken: by length of the pause before it, the first steps after pauses.
    """

    def __init__(self, engine: LLMEngine) -> None:
        from nanovllm.assembly.engine import Engine

        core = engine.core
        assert isinstance(core, Engine)  # there is no flag for data parallelism
        self.engine = engine
        self.core = core
        self.numbers = random.Random(0)
        self.seen: list[Timed] = []
        self.unseen: list[Timed] = []
        self.full: list[Timed] = []
        self.woken: dict[float, list[Timed]] = {}
        self._shared = self._draw_tokens(core.limits.max_model_len)
        self._ended: list[tuple[SchedulerOutput, float]] = []
        self._num_stages = core.config.pipeline_parallel_size
        hooks = core.scheduler.hooks
        hooks.took = (*hooks.took, self._took)

        self.run([LoadRequest(32, 4), LoadRequest(64, 4)])  # compiles, and touches memory
        self._loads: list[Load] = []
        self._full_loads: list[Load] = []
        self._pauses = itertools.cycle(PAUSES)

    def measure(self, seconds: float) -> None:
        """Run loads for about `seconds`. Each call continues where the last one ended."""
        began = time.perf_counter()
        # Only steps advance a virtual clock: a pause takes no time there.
        while self.core.virtual_clock is None and time.perf_counter() - began < IDLE * seconds:
            self._pause(next(self._pauses))
        while not self._has_seen_all or time.perf_counter() - began < (1 - HELD_OUT) * seconds:
            self._loads = self._loads or loads(self.core.resolved, self.numbers)
            self.seen += self.run(self._loads.pop())
            if self._num_stages > 1 and len(self._loads) % 2:
                self._full_loads = self._full_loads or full_loads(self.core.resolved, self.numbers)
                self.full += self.run_full(self._full_loads.pop())
        while not self.unseen or time.perf_counter() - began < seconds:
            self.unseen += self.run(mixed_load(self.core.resolved, self.numbers))

    @property
    def _has_seen_all(self) -> bool:
        return bool(self.seen) and (bool(self.full) or self._num_stages == 1)

    def create_cost(self) -> MeasuredCost:
        """Fit a cost to the steps so far."""
        config = self.core.config
        resolved = self.core.resolved
        executor = self.core.executor
        knots, row_seconds, others = fit(self.seen)
        pauses = sorted(self.woken)
        cost = MeasuredCost(
            model=config.model_names[0],
            machine=platform.processor() or platform.machine(),
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            on_gpu=executor.on_gpu,
            num_kv_blocks=resolved.num_kv_blocks,
            block_size=config.block_size,
            kv_bytes_per_token=executor.bytes_per_block / config.block_size,
            max_model_len=resolved.max_model_len,
            knots=knots,
            row_seconds=row_seconds,
            per_sample=others[0],
            per_context=others[1],
            per_pair=others[2],
            per_prompt=others[3],
        )
        if self._num_stages > 1:
            cost = msgspec.structs.replace(cost, head_cost=fit_head(cost, self.full))
        idle_seconds = [mean(extra_seconds(cost, self.woken[pause])) for pause in pauses]
        cost = msgspec.structs.replace(
            cost, pauses=pauses, idle_seconds=[max(0.0, each) for each in idle_seconds]
        )
        return with_errors(cost, self.unseen)

    def now(self) -> float:
        """Return the time in seconds."""
        clock = self.core.virtual_clock
        return time.perf_counter() if clock is None else clock.now / SECOND

    def run(self, load: Load) -> list[Timed]:
        """Serve a load; returns its steps. In a pipeline, it is served by one step at a time,
        through all stages: the time between the results of two steps in flight belongs to
        neither."""
        usual = self.core.settings
        if self._num_stages > 1:
            self.core.settings = replace(usual, steps_ahead=0)
        try:
            return self._run(load)
        finally:
            self.core.settings = usual

    def run_full(self, load: Load) -> list[Timed]:
        """Serve a load with a step in flight for each stage; returns those of `full_steps`."""
        return full_steps(self._run(load), self._num_stages)

    def _run(self, load: Load) -> list[Timed]:
        """Draw all prompts before the first step: to draw them later would count as time of
        steps."""
        in_order = sorted(load, key=lambda request: request.step)
        waiting = deque((request, self._draw_prompt(request)) for request in in_order)
        self._ended.clear()
        begin = self.now()
        for step in itertools.count():
            while waiting and waiting[0][0].step <= step:
                request, prompt = waiting.popleft()
                self._add(str(len(waiting)), request, prompt)
            if not waiting and not self.engine.has_unfinished:
                break
            self.engine.step()
        if self.core.virtual_clock is not None:  # its order of the first step ends the idle time
            begin = cast(int, self._ended[0][0].extras[VIRTUAL_CLOCK]) / SECOND
        ends = [begin, *(end for _, end in self._ended)]
        times = [end - start for start, end in pairwise(ends)]
        works = [work_of(plan) for plan, _ in self._ended]
        return [Timed(work, took) for work, took in zip(works, times, strict=True)]

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)
        most = min(256, self.core.limits.max_model_len - 16)
        first, *_ = self.run([LoadRequest(size_up_to(most, self.numbers), 2)])
        self.woken.setdefault(seconds, []).append(first)

    def _took(self, plan: SchedulerOutput, seconds: float) -> None:
        self._ended.append((plan, self.now()))

    def _draw_prompt(self, request: LoadRequest) -> list[int]:
        own = self._draw_tokens(request.num_prompt_tokens - request.num_shared)
        return self._shared[: request.num_shared] + own

    def _add(self, request_id: str, request: LoadRequest, prompt: list[int]) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True
        )
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def _draw_tokens(self, number: int) -> list[int]:
        return [self.numbers.randrange(self.core.limits.vocab_size) for _ in range(number)]


def loads(resolved: ResolvedConfig, numbers: random.Random) -> list[Load]:
    """Return loads in random order: a prompt of several steps, others of any length, batches of 1
    to `max_num_seqs` requests, and requests that arrive while others decode."""
    room = resolved.num_kv_blocks * resolved.given.block_size // 2
    longest = min(resolved.max_model_len - 16, room)
    budget = resolved.token_budget
    # A round should be short, since machines drift, and slow ones complete few rounds: a step of a
    # few tokens takes a share of the time of a long one, and tells as much.
    found: list[Load] = [[LoadRequest(min(longest, budget * 5 // 4), 2)]]
    found += [[LoadRequest(size_up_to(min(longest, budget), numbers), 2)] for _ in range(8)]
    count = 1
    while count <= resolved.given.max_num_seqs:
        most = max(16, min(longest, room // count, max(32, budget // (2 * count))))
        # With both, the cost of context is told from the cost of requests.
        for top in (most, max(16, most // 8)):
            sizes = [numbers.randint(top // 2, top) for _ in range(count)]
            found.append([LoadRequest(size, numbers.randint(8, 16)) for size in sizes])
        if count <= MAX_JOINED:
            found.append(joining_load(resolved, numbers, count))
        count *= 2
    numbers.shuffle(found)
    return found


def joining_load(resolved: ResolvedConfig, numbers: random.Random, running: int) -> Load:
    """Return requests that arrive one after another, until about `running` others decode. Half of
    the prompts begin with cached tokens."""
    room = resolved.num_kv_blocks * resolved.given.block_size // (2 * running)
    most = max(16, min(512, room // 2, resolved.max_model_len // 3))
    found = []
    for number in range(max(4, running)):
        shared = numbers.choice([0, size_up_to(most, numbers)])
        size = shared + size_up_to(most, numbers)
        step = number * JOINED_STEPS // running
        found.append(LoadRequest(size, numbers.randint(8, 2 * JOINED_STEPS - 8), step, shared))
    return found


def full_loads(resolved: ResolvedConfig, numbers: random.Random) -> list[Load]:
    """Return loads in random order that fill a pipeline with equal steps: prompts that arrive one
    after another, and batches of requests that decode, 1 to `max_num_seqs` of them."""
    stages = resolved.given.pipeline_parallel_size
    room = resolved.num_kv_blocks * resolved.given.block_size // 2
    longest = min(resolved.max_model_len - 16, room // stages, resolved.token_budget // 4)
    found = []
    for _ in range(3):
        size = size_up_to(longest, numbers)
        found.append([LoadRequest(size, 1, step) for step in range(4 * stages)])
    count = stages
    while count <= resolved.given.max_num_seqs:
        most = min(longest, room // count, resolved.token_budget // count)
        found.append([LoadRequest(size_up_to(most, numbers), 12)] * count)
        count *= 2
    numbers.shuffle(found)
    return found


def full_steps(steps: Sequence[Timed], num_stages: int) -> list[Timed]:
    """Return the steps of a full pipeline, each with the mean seconds between the last results, one
    of each stage. Equal steps come before these, two per stage: the first of them have filled the
    pipeline, and results then arrive as fast as the slowest stage computes."""
    found = []
    for last in range(2 * num_stages, len(steps)):
        window = steps[last - 2 * num_stages : last + 1]
        works = [work for work, _ in window]
        kinds = {(work.num_decodes, tuple(work.prefills), work.num_samples) for work in works}
        if len(kinds) == 1:
            seconds = mean(each.seconds for each in window[-num_stages:])
            found.append(Timed(works[-1], seconds))
    return found


def size_up_to(most: int, numbers: random.Random) -> int:
    """Return a number from 8 to `most`; each power of two is as likely."""
    return int(8 * (max(8, most) / 8) ** numbers.random())


def mixed_load(resolved: ResolvedConfig, numbers: random.Random) -> Load:
    """Return 32 requests of different lengths that arrive at random, whose prompts and decodes
    share steps."""
    room = resolved.num_kv_blocks * resolved.given.block_size
    most = max(16, min(256, room // 64, resolved.max_model_len // 2))
    last = numbers.choice([0, 64, 256])
    return [
        LoadRequest(
            numbers.randint(most // 8, most),
            numbers.randint(8, most // 2),
            numbers.randint(0, last),
            numbers.choice([0, most // 8]),
        )
        for _ in range(32)
    ]


def extra_seconds(cost: MeasuredCost, steps: Sequence[Timed]) -> list[float]:
    """Return by how much steps took longer than the cost predicts."""
    return [seconds - cost.step(work) / SECOND for work, seconds in steps]


def with_errors(cost: MeasuredCost, steps: Sequence[Timed]) -> MeasuredCost:
    """Add how well the cost predicts these steps.

    Raises:
        UsageError: some would take no time, or a number of tokens longer than a file may state, so
            that the measured times make no sense.
    """
    predicted = [cost.step(work) for work, _ in steps]
    if not all(predicted) or max(cost.row_seconds) > 1e9:
        raise UsageError(
            "--calibrate: the measured times do not tell what a step takes: run it again while no "
            "other program runs"
        )
    ratios = [seconds * SECOND / time for (_, seconds), time in zip(steps, predicted, strict=True)]
    windows = [ratios[first : first + WINDOW] for first in range(0, len(ratios), WINDOW)]
    means = [mean(window) for window in windows]
    cuts = quantiles(means, n=20, method="inclusive") if len(means) > 1 else means
    error = median(abs(ratio - 1) for ratio in ratios)
    return msgspec.structs.replace(cost, error=error, low=cuts[0], high=cuts[-1])
