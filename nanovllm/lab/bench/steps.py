"""What a step costs the host: the scheduler alone, also beside vLLM's; every part of a decode step;
and what an executor adds."""

import itertools
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np

from nanovllm.assembly.engine import Engine
from nanovllm.data.config import EngineConfig
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.distributed.groups import Grid
from nanovllm.engine.llm import LLMEngine
from nanovllm.engine.process import Report
from nanovllm.features.cuda_graphs.graphs import GraphForward
from nanovllm.lab.bench.engines import EngineSettings, SchedulerAlone
from nanovllm.lab.bench.local import TINY, add_requests, start_engine, write_config
from nanovllm.lab.bench.metrics import alternate, timed
from nanovllm.lab.bench.parallel.pipeline import Stopwatch
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, estimate, goal, paired
from nanovllm.lab.bench.workloads import BenchRequest
from nanovllm.lab.processes import run_ranks

RUNNING = (1, 32, 256, 1024, 4096)
HISTORIES = (64, 4096)
BATCHES = (1, 32, 256, 1024)
CALLS = ("schedule", "update", "both")
HOST_TIME = "Host time of a decode step by part, µs, medians"


def scheduler(setting: Setting) -> Iterator[Row]:
    """Steps in which all requests decode; the engines take turns."""
    sizes = itertools.product(HISTORIES, RUNNING)
    steps = 50
    rounds = setting.repeats
    if setting.dry_run:
        sizes = itertools.product((8, 40), (1, 3))
        steps = 6
        rounds = 1
    pythons = {"nanovllm": sys.executable, **setting.peers}
    with ExitStack() as stack:
        engines = {}
        for name, python in pythons.items():
            settings = EngineSettings(
                name, pathlib.Path(setting.folder), {}, setting.threads, python
            )
            engine = stack.enter_context(SchedulerAlone(settings))
            engines[f"{name} {engine.started.versions.get(name, '')}"] = engine
        for history, running in sizes:
            # One in 16 fills a block in each step, as in an engine.
            requests = [BenchRequest([i] * (history + i % 16), steps) for i in range(running)]
            works = {name: partial(engine.ask, requests) for name, engine in engines.items()}
            for name, found in alternate(works, rounds, warm_up=0).items():
                # For each round, the medians of the two calls and of their sum.
                times = 1e6 * np.median(
                    [[(*step, sum(step)) for step in line] for (line,) in found], axis=1
                )
                row: Row = {
                    "table": "The scheduler in a decode step, µs, medians",
                    "tokens per request": history,
                }
                row |= {"running": running, "engine": name} | dict(
                    zip(CALLS, times.T.tolist(), strict=True)
                )
                yield row | {"both, per request": (times[:, 2] / running).tolist()}


def time_parts(
    options: dict[str, Any], batches: Sequence[int], steps: int
) -> dict[int, dict[str, list[float]]]:
    """By the number of requests that decode: seconds that each part takes in each step; the model
    is a part, too."""
    engine = LLMEngine(EngineConfig(**options))
    decode = msgspec.msgpack.Decoder(Report).decode
    core = cast(Engine, engine.core)
    runner = core.runner
    pipe = SimpleNamespace(
        carry=lambda outputs: decode(msgspec.msgpack.encode(Report(outputs, core.stats))).outputs
    )
    # On a GPU, a step of decoding requests is the replay of a graph.
    forward = "replay" if isinstance(runner.forward, GraphForward) else "run"
    functions: dict[str, list[tuple[Any, str]]] = {
        "scheduler": [(core.scheduler, "schedule"), (core.scheduler, "update_from_output")],
        "batch building": [(runner, "prepare_inputs"), (runner, "_sampling_rows")],
        "sampling": [(runner.sampler, "start")],
        "message to the front end": [(pipe, "carry")],
        "output processing": [(engine.output_processor, "process")],
        "model": [(runner.forward, forward), (runner.model, "compute_logits")],
    }
    watches = {
        part: [Stopwatch(owner, name) for owner, name in those] for part, those in functions.items()
    }
    parts: dict[int, dict[str, list[float]]] = {}

    def step() -> int:
        return len(engine.output_processor.process(pipe.carry(core.step()))[0])

    for batch in batches:
        params = SamplingParams(temperature=0, max_tokens=options["max_model_len"], ignore_eos=True)
        for i in range(batch):
            engine.add_request(str(i), [3 + i % 64] * 16, params)
        while step() < batch:  # until all decode
            pass
        found = parts[batch] = {part: [] for part in (*watches, "rest")}
        for _ in range(steps):
            for watch in itertools.chain(*watches.values()):
                watch.seconds = 0.0
            whole = timed(step)
            for part, those in watches.items():
                found[part].append(sum(watch.seconds for watch in those))
            found["rest"].append(whole - sum(found[part][-1] for part in watches))
        for i in range(batch):
            engine.abort_request(str(i))
    return parts


def step_parts(setting: Setting) -> Iterator[Row]:
    """Decode steps of a whole engine with a tiny model, whose time is subtracted, and with the true
    model's vocabulary."""
    batches, steps = ((1, 3), 3) if setting.dry_run else (BATCHES, 50 * setting.repeats)
    with tempfile.TemporaryDirectory() as work:
        tiny = write_config(pathlib.Path(work), TINY | {"vocab_size": setting.model.vocab_size})
        options = setting.options(model=str(tiny), tokenizer=setting.folder, load_format="dummy")
        options |= {
            "max_num_seqs": max(batches),
            "max_model_len": 64 + steps,
            "enable_prefix_caching": True,
            "device": setting.fastest_device,
        }
        found = run_ranks(time_parts, Grid(), options, batches, steps, threads=setting.threads)[0]
    for batch, parts in found.items():
        model = parts.pop("model")
        parts["together"] = [sum(times) for times in zip(*parts.values(), strict=True)]
        row: Row = {"table": HOST_TIME, "running": batch}
        row |= {part: [1e6 * seconds for seconds in times] for part, times in parts.items()}
        row["together, per request"] = [each / batch for each in row["together"]]
        yield row | {"tiny model, subtracted": [1e6 * seconds for seconds in model]}


# ---------------------------------------------------------------- executors

EXECUTOR_BATCHES = (1, 16)


def time_steps(
    options: dict[str, Any], steps: int, rounds: int
) -> dict[int, dict[str, list[float]]]:
    """Seconds of a decode step, the median of each round, by the number of requests and by
    executor; they take turns."""
    length = 32 + steps * (rounds + 2)
    options = options | {"max_model_len": length, "max_num_seqs": max(EXECUTOR_BATCHES)}
    found: dict[int, dict[str, list[float]]] = {}
    start = partial(start_engine, **options)
    with (
        closing(start(distributed_executor_backend="uni")) as uni,
        closing(start(distributed_executor_backend="mp")) as mp,
    ):
        cores = {"uni": uni, "mp": mp}
        for batch in EXECUTOR_BATCHES:
            for core in cores.values():
                add_requests(core, [BenchRequest([3 + i] * 16, length - 16) for i in range(batch)])
                core.step()  # the prompts
            found[batch] = alternate(
                {name: partial(_median_step, core, steps) for name, core in cores.items()}, rounds
            )
            for core in cores.values():
                for index in range(batch):
                    core.abort_request(str(index))
    return found


def _median_step(core: Engine, steps: int) -> float:
    return statistics.median(timed(core.step) for _ in range(steps))


def executor(setting: Setting) -> Iterator[Row]:
    """The same engine with its only rank in its own process, and in another one."""
    steps, rounds = (2, 1) if setting.dry_run else (10, 6 * setting.repeats)
    with tempfile.TemporaryDirectory() as tiny:
        write_config(pathlib.Path(tiny), TINY)
        models = {
            # A step so short that it hides nothing that is added to it; it has no use for a second
            # core.
            "tiny model": (1, setting.options(load_format="dummy", model=tiny)),
            pathlib.Path(setting.folder).name: (setting.threads, setting.options()),
        }
        for name, (threads, options) in models.items():
            [times] = run_ranks(time_steps, Grid(), options, steps, rounds, threads=threads)
            yield from compare_executors(name, times)


def compare_executors(model: str, times: dict[int, dict[str, list[float]]]) -> Iterator[Row]:
    """Compare the steps of the two executors, round by round; see `time_steps`."""
    for batch, both in times.items():
        more = estimate([1e6 * (mp - uni) for uni, mp in zip(both["uni"], both["mp"], strict=True)])
        ratio = paired(both["uni"], both["mp"])
        where = f"mp vs uni executor, {model}, {batch} request{'s' * (batch > 1)}"
        yield goal(f"{where}: extra time per step", more["median"], "µs")
        yield goal(f"{where}: step time ratio", ratio["median"], "×")
        yield {
            "table": (
                "One rank in a separate process (mp) vs in-process (uni): decode steps, 95 % "
                "intervals"
            ),
            "model": model,
            "requests": batch,
            "uni, ms per step": [1e3 * seconds for seconds in both["uni"]],
            "mp, extra µs per step": more,
            "mp / uni": ratio,
        }
