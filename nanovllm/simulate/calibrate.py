"""Measures the step times of an engine on this machine. Only its functions import torch."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from nanovllm.data.config import EngineConfig
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.measured import MeasuredCost, num_pairs
from nanovllm.simulate.workload import SECOND

if TYPE_CHECKING:
    from nanovllm.data.resolved_config import ResolvedConfig
    from nanovllm.engine.llm import LLMEngine
    from nanovllm.trace.record import StepRecord

# Share of the time for steps that the fit does not see.
HELD_OUT = 0.25
WINDOW = 16
# A load: lengths of prompts and of outputs.
Load = list[tuple[int, int]]


class Timed(NamedTuple):
    """A step, and the seconds from its begin to that of the next one."""

    work: StepWork
    seconds: float


def calibrate(config: EngineConfig, seconds: float = 120.0) -> MeasuredCost:
    """Run loads of many sizes on an engine for about `seconds`, fit a cost to the times of their
    steps, and compare it with the steps of other loads.

    Raises:
        ValueError: see `LLM`.
    """
    import platform

    from nanovllm.assembly.core import create_trace
    from nanovllm.assembly.engine import Engine
    from nanovllm.engine.llm import LLMEngine

    began = time.perf_counter()
    engine = LLMEngine(config, create_trace())
    core = engine.core
    assert isinstance(core, Engine)  # there is no flag for data parallelism
    resolved = core.resolved
    numbers = random.Random(0)
    run(engine, [(32, 4), (64, 4)], numbers)  # compiles, and touches memory
    seen: list[Timed] = []
    while not seen or time.perf_counter() - began < (1 - HELD_OUT) * seconds:
        for load in loads(resolved, numbers):
            seen += run(engine, load, numbers)
            if time.perf_counter() - began > seconds:
                break  # a slow machine
    unseen: list[Timed] = []
    while not unseen or time.perf_counter() - began < seconds:
        unseen += run(engine, mixed_load(resolved, numbers), numbers)
    knots, row_seconds, others = fit(seen)
    cost = MeasuredCost(
        model=config.model_names[0],
        machine=platform.processor() or platform.machine(),
        on_gpu=core.executor.on_gpu,
        num_kv_blocks=resolved.num_kv_blocks,
        block_size=config.block_size,
        kv_bytes_per_token=core.executor.bytes_per_block / config.block_size,
        max_model_len=resolved.max_model_len,
        knots=knots,
        row_seconds=row_seconds,
        per_sample=others[0],
        per_context=others[1],
        per_pair=others[2],
    )
    return with_errors(cost, unseen)


def loads(resolved: ResolvedConfig, numbers: random.Random) -> list[Load]:
    """Return loads in random order: a prompt of several steps, others of any length, and batches of
    1 to `max_num_seqs` requests."""
    room = resolved.num_kv_blocks * resolved.given.block_size // 2
    longest = min(resolved.max_model_len - 16, room)
    budget = resolved.token_budget
    found: list[Load] = [[(min(longest, budget * 3 // 2), 2)]]
    found += [[(size_up_to(min(longest, budget), numbers), 2)] for _ in range(8)]
    count = 1
    while count <= resolved.given.max_num_seqs:
        most = max(16, min(longest, room // count, max(32, 3 * budget // count)))
        # With both, the cost of context is told from the cost of requests.
        for top in (most, max(16, most // 8)):
            sizes = [numbers.randint(top // 2, top) for _ in range(count)]
            found.append([(size, numbers.randint(8, 16)) for size in sizes])
        count *= 2
    numbers.shuffle(found)
    return found


def size_up_to(most: int, numbers: random.Random) -> int:
    """Return a number from 8 to `most`; each power of two is as likely."""
    return int(8 * (max(8, most) / 8) ** numbers.random())


def mixed_load(resolved: ResolvedConfig, numbers: random.Random) -> Load:
    """Return 32 requests of different lengths, whose prompts and decodes share steps."""
    room = resolved.num_kv_blocks * resolved.given.block_size
    most = max(16, min(256, room // 64, resolved.max_model_len // 2))
    return [(numbers.randint(most // 8, most), numbers.randint(8, most // 2)) for _ in range(32)]


def run(engine: LLMEngine, load: Load, numbers: random.Random) -> list[Timed]:
    """Serve a load, with all requests queued first; returns its steps but the last one."""
    trace = engine.core.trace
    assert trace is not None
    before = len(trace.steps)
    most = engine.core.limits.vocab_size
    for number, (prompt, output) in enumerate(load):
        ids = [numbers.randrange(most) for _ in range(prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    while engine.has_unfinished:
        engine.step()
    steps = [step for step in trace.steps[before:] if step.requests]
    return [Timed(work_of(step), after.start - step.start) for step, after in pairwise(steps)]


def work_of(step: StepRecord) -> StepWork:
    """Return what a step computed."""
    contexts = [share.start + 1 for share in step.requests if share.num_tokens == 1]
    ends = [share.start + share.num_tokens >= share.num_prompt_tokens for share in step.requests]
    return StepWork(
        num_decodes=len(contexts),
        decode_context=sum(contexts),
        prefills=[(one.start, one.num_tokens) for one in step.requests if one.num_tokens > 1],
        num_samples=sum(ends),
    )


def with_errors(cost: MeasuredCost, steps: Sequence[Timed]) -> MeasuredCost:
    """Add how well the cost predicts these steps."""
    ratios = [seconds * SECOND / cost.step(work) for work, seconds in steps]
    windows = [ratios[first : first + WINDOW] for first in range(0, len(ratios), WINDOW)]
    means = [mean(window) for window in windows]
    cuts = quantiles(means, n=20, method="inclusive") if len(means) > 1 else means
    error = median(abs(ratio - 1) for ratio in ratios)
    return msgspec.structs.replace(cost, error=error, low=cuts[0], high=cuts[-1])


def fit(steps: Sequence[Timed]) -> tuple[list[int], list[float], list[float]]:
    """Fit the cost to steps, in relative errors: returns knots, seconds there, and the prices per
    sample, context and pair. No price is negative. Steps that something else has slowed down have
    less weight (Huber 1964)."""
    import numpy as np

    tokens = [work.num_decodes + sum(n for _, n in work.prefills) for work, _ in steps]
    knots = [1]
    while knots[-1] < max(tokens):
        knots.append(min(2 * knots[-1], max(max(tokens), 2)))
    spans = [
        [min(max(count - low, 0), high - low) for count in tokens] for low, high in pairwise(knots)
    ]
    works = [work for work, _ in steps]
    others = [
        [work.num_samples for work in works],
        [work.decode_context for work in works],
        [num_pairs(work) for work in works],
    ]
    times = np.array([seconds for _, seconds in steps])
    columns = np.array([[1] * len(steps), *spans, *others], dtype=float).T / times[:, None]
    scale = np.maximum(columns.max(axis=0), 1e-30)
    columns /= scale
    weights = np.ones(len(steps))
    prices = np.zeros(len(scale))
    for _ in range(8):
        weighted = columns * weights[:, None]
        normal = weighted.T @ columns
        goal = weighted.sum(axis=0)
        for _ in range(3000):
            # One price after the other, none below 0.
            for i, row in enumerate(normal):
                prices[i] = max(0.0, prices[i] + (goal[i] - row @ prices) / max(row[i], 1e-30))
        errors = np.abs(columns @ prices - 1)
        weights = np.minimum(1, 2 * np.median(errors) / np.maximum(errors, 1e-12))
    # All steps together take as long as they did, the slow ones included.
    prices *= times.sum() / (times * (columns @ prices)).sum()
    base, *slopes = (prices / scale).tolist()
    lengths = [high - low for low, high in pairwise(knots)]
    rises = [slope * length for slope, length in zip(slopes, lengths, strict=False)]
    return knots, list(accumulate(rises, initial=base)), slopes[len(rises) :]
