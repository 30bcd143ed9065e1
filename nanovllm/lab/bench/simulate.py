"""How fast `nanovllm simulate` is: requests per second of one core, for a trace and for a fleet."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from nanovllm.assembly.flags import words_of
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import resolve
from nanovllm.lab.bench.metrics import alternate
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, estimate, goal, paired
from nanovllm.lab.processes import python_environment
from nanovllm.simulate.arrivals import SyntheticWorkload, create_workload
from nanovllm.simulate.assembly import create_engine
from nanovllm.simulate.cost import StepCost, StepWork
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.traces import read_workload
from nanovllm.simulate.workload import SECOND, Workload, WorkloadRequest

MICROSECOND = SECOND // 10**6
TRACE = "mooncake_conversation.jsonl.gz"
KV_TOKENS = 3_000_000
# Lengths and rate of the public trace, for machines without it.
LIKE_THE_TRACE = SyntheticWorkload(
    request_rate=3.4,
    num_prompts=12_000,
    random_input_len=12_000,
    random_output_len=343,
    random_range_ratio=0.9,
)
SHORT_PROMPTS = SyntheticWorkload(
    random_input_len=768, random_output_len=128, random_range_ratio=0.9
)


class AffineCost(StepCost):
    """Steps of a medium-sized model: 12 ms, 40 µs per prompt token, 20 ns per token of context."""

    def step(self, work: StepWork) -> int:
        """Return the time of a step."""
        base, per_context = self.decode(work.num_decodes)
        prompt = sum(count for _, count in work.prefills)
        context = work.decode_context + sum(start + count for start, count in work.prefills)
        return base + 40 * MICROSECOND * prompt + per_context * context

    def decode(self, num_decodes: int) -> tuple[int, int]:
        """Return base and price per token of context."""
        return 12_000 * MICROSECOND, MICROSECOND // 50


def _requests(setting: Setting) -> Sequence[WorkloadRequest]:
    folder = os.environ.get("NANOVLLM_TRACES")
    if folder and not setting.dry_run:
        return list(read_workload(pathlib.Path(folder) / TRACE).requests)
    num_prompts = 20 if setting.dry_run else LIKE_THE_TRACE.num_prompts
    workload = create_workload(replace(LIKE_THE_TRACE, num_prompts=num_prompts), 512)
    return list(workload.requests)


def _seconds(
    requests: Sequence[WorkloadRequest],
    *,
    num_engines: int,
    block_size: int,
    is_async: bool,
    fast: bool = True,
    budget: int = 8192,
) -> float:
    """Serve a workload; returns the time of this process per request, in seconds."""
    num_blocks = KV_TOKENS // block_size
    config = EngineConfig(
        block_size=block_size,
        num_kv_blocks=num_blocks,
        max_num_batched_tokens=budget,
        async_scheduling=is_async,
    )
    resolved = resolve(config, model_max_len=2**20, num_kv_blocks=num_blocks)
    engines = [
        create_engine(SimulatedEngine, resolved, AffineCost(), fast=fast)
        for _ in range(num_engines)
    ]
    fleet = Fleet(engines)
    start = time.process_time()
    fleet.run(Workload(requests, 512))
    return (time.process_time() - start) / len(requests)


def trace(setting: Setting) -> Iterator[Row]:
    """A trace of long prompts on eight engines: many steps in one call, and step by step."""
    requests = _requests(setting)
    cases = [(1, 512, False), (6, 512, False), (1, 16, False), (1, 512, True)]
    for load, block_size, is_async in cases:
        loaded = [msgspec.structs.replace(each, arrival=each.arrival // load) for each in requests]
        measure = partial(_seconds, num_engines=8, block_size=block_size, is_async=is_async)
        works = {
            True: partial(measure, loaded),
            # An eighth of the requests shows the difference.
            False: partial(measure, loaded[: len(loaded) // 8], fast=False),
        }
        found = alternate(works, setting.repeats, warm_up=0)
        rates = [1 / seconds for seconds in found[True]]
        yield {
            "table": "Simulated requests per second of one core; 8 engines, token budget 8,192",
            "arrival rate": f"{load}x",
            "block size": block_size,
            "asynchronous scheduling": "yes" if is_async else "no",
            "requests/s": estimate(rates),
            "x step by step": paired(found[True], found[False]),
        }


def command(setting: Setting) -> Iterator[Row]:
    """The whole command with its default model and machine, its start included."""
    cases = {(1, 512): 8000, (6, 512): 6000, (1, 16): 1300}
    reached = []
    for (load, block_size), wanted in cases.items():
        words = _workload_flags(setting, load)
        words += ["--replicas", "8", "--block-size", str(block_size)]
        words += ["--max-num-batched-tokens", "8192", "--json"]
        rates = [_command_rate(words) for _ in range(setting.repeats)]
        found = estimate(rates)
        yield {
            "table": "Requests per second of `nanovllm simulate`; 8 engines, token budget 8,192",
            "arrival rate": f"{load}x",
            "block size": block_size,
            "requests/s": found,
        }
        figure = f"simulated requests/s of the command at {load}x, block size {block_size}"
        reached.append(goal(figure, found["median"], at_least=wanted))
    yield from reached


def _workload_flags(setting: Setting, load: int) -> list[str]:
    folder = os.environ.get("NANOVLLM_TRACES")
    if folder and not setting.dry_run:
        return ["--workload", str(pathlib.Path(folder) / TRACE), "--speedup", str(load)]
    num_prompts = 20 if setting.dry_run else LIKE_THE_TRACE.num_prompts
    rate = load * LIKE_THE_TRACE.request_rate
    return words_of(replace(LIKE_THE_TRACE, num_prompts=num_prompts, request_rate=rate))


def _command_rate(words: Sequence[str]) -> float:
    """Run the command; returns the requests per second of its processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "nanovllm", "simulate", *words],
        env=python_environment(),
        stdout=subprocess.PIPE,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return float(json.loads(done.stdout)["completed"] / seconds)


def fleet(setting: Setting) -> Iterator[Row]:
    """1,250 engines with 40 short prompts per second each, for 3 s."""
    num_engines = 2 if setting.dry_run else 1250
    rate = 40 * num_engines
    settings = replace(SHORT_PROMPTS, request_rate=rate, num_prompts=3 * rate)
    requests = list(create_workload(settings, 512).requests)
    seconds = _seconds(
        requests, num_engines=num_engines, block_size=512, is_async=False, budget=2048
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield {
        "table": "A fleet for 3 s of 768 tokens in and 128 out",
        "engines": num_engines,
        "requests": len(requests),
        "µs per request": 1e6 * seconds,
        "GiB": peak / 2 ** (30 if sys.platform == "darwin" else 20),
    }
    yield goal("minutes for 60 s of 50,000 requests/s", seconds * 3e6 / 60, at_most=10)
