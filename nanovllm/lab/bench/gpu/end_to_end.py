"""Whole models of random weights: one stream, and many requests at once."""

import gc
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from nanovllm.assembly.engine import Engine
from nanovllm.lab.bench.gpu.plan import GRAPHS, MODELS, STEP
from nanovllm.lab.bench.gpu.trace import CPU_CATEGORIES, GPU_CATEGORIES, HOST_GAP, split_steps
from nanovllm.lab.bench.local import (
    SHAPES,
    TINY,
    add_requests,
    run_requests,
    start_engine,
    write_config,
)
from nanovllm.lab.bench.metrics import Timeline, timed
from nanovllm.lab.bench.parts import Setting, reason_of
from nanovllm.lab.bench.report import Row
from nanovllm.lab.bench.roofline import ModelCost, least_work
from nanovllm.lab.bench.worker import generate_batch
from nanovllm.lab.bench.workloads import NAMED, BenchRequest, Workload, shortened
from nanovllm.models.config import ModelConfig

RunRequests = Callable[[Sequence[BenchRequest]], list[Timeline]]

MAX_MODEL_LEN = 2048
# So many tokens in a step keep the GPU busy; nano-vllm's benchmark has twice as many.
TOKEN_BUDGET = 8192
PROFILED_STEPS = 16
REPEATS = 3

STREAM = NAMED["W1"][0]
# The lengths of nano-vllm's bench.py.
MANY = Workload(
    "256 requests",
    "throughput",
    "prompts 100-1024, outputs 100-1024",
    num_prompts=256,
    input_len=(100, 1024),
    output_len=(100, 1024),
)


def workloads(setting: Setting) -> tuple[Workload, Workload]:
    """One stream, and many requests; tiny ones in a dry run."""
    if not setting.dry_run:
        return STREAM, MANY
    small: dict[str, Any] = {"num_prompts": 3, "input_len": (3, 10), "output_len": (8, 9)}
    return replace(STREAM, input_len=(4, 4), output_len=(9, 9)), replace(MANY, **small)


def model_folder(setting: Setting, shape: str, work: str) -> pathlib.Path:
    """A folder with the configuration of the shape; in a dry run, of a tiny one."""
    return write_config(pathlib.Path(work), TINY if setting.dry_run else SHAPES[shape])


def engine(setting: Setting, shape: str, mode: str, extent: str = "all") -> Iterator[Row]:
    """nanovllm on a model of this shape.

    Args:
        mode: "graphs" or "eager".
        extent: "stream" leaves out all but the single stream.
    """
    stream, many = workloads(setting)
    options: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": TOKEN_BUDGET,
    }
    if setting.dry_run:
        options = {"max_model_len": 64, "max_num_seqs": 8}
    options |= {"dtype": "bfloat16", "device": setting.device.type, "load_format": "dummy"}
    with tempfile.TemporaryDirectory() as work:
        folder = model_folder(setting, shape, work)
        core = start_engine(str(folder), enforce_eager=mode == "eager", **options)
    label: Row = {"shape": shape, "engine": f"nanovllm, {mode}"}

    def run(requests: Sequence[BenchRequest]) -> list[Timeline]:
        return run_requests(core, requests)[1]

    # Kernels are compiled for whole prompts, for mixed steps and for decodes.
    run(shortened(many.requests(core.model_config.vocab_size)))
    # as engines in a process of their own do: the collector takes 0.1 s each time that it visits
    # the model
    gc.freeze()
    for workload in (stream, many) if extent == "all" else (stream,):
        yield measured(label, workload, core.model_config, run, setting)
        yield {"table": STEP} | label | _split(core, workload, setting)


def transformers(setting: Setting, shape: str) -> Iterator[Row]:
    """`generate` of transformers on a model of this shape and the same stream."""
    import transformers as library  # slow, and nanovllm's parts do without

    library.utils.logging.set_verbosity_error()
    stream, _ = workloads(setting)
    with tempfile.TemporaryDirectory() as work:
        folder = model_folder(setting, shape, work)
        config = library.AutoConfig.from_pretrained(folder)
        model_config = ModelConfig.from_pretrained(folder)
    with setting.device:
        model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # a random model would end its text at random

    def run(requests: Sequence[BenchRequest]) -> list[Timeline]:
        return [
            Timeline(0.0, line)
            for line in generate_batch(model, [vars(request) for request in requests])
        ]

    label: Row = {"shape": shape, "engine": "transformers generate"}
    try:
        run(shortened(stream.requests(model_config.vocab_size)))
        yield measured(label, stream, model_config, run, setting)
    except Exception as error:  # that transformers cannot run is a result
        yield {"table": MODELS, **label, "workload": stream.name, "why not": reason_of(error)}


def measured(
    label: Row, workload: Workload, model: ModelConfig, run: RunRequests, setting: Setting
) -> Row:
    """The median of up to `REPEATS` runs, fewer where they are long; each has new prompts of the
    same lengths."""
    begin = time.perf_counter()
    gaps = list[float]()
    times = list[float]()
    for repeat in range(1, REPEATS + 1):
        requests = workload.requests(model.vocab_size, repeat=repeat)
        found = run(requests)
        gaps += [gap for line in found for gap in line.gaps]
        times.append(max(line.arrivals[-1][0] for line in found) - found[0].start)
        if (time.perf_counter() - begin) * (repeat + 1) / repeat > setting.seconds / 5:
            break
    cost = ModelCost.of(model, 2)
    work = least_work(cost, requests)
    seconds = statistics.median(times)
    tokens = sum(request.max_tokens for request in requests)
    shares = [
        setting.percent_of("bytes_per_second", work.num_bytes / seconds),
        setting.percent_of("flops_per_second", work.flops / seconds),
    ]
    row: Row = {
        "table": MODELS,
        **label,
        "workload": workload.name,
        "s": times,
        "tokens/s": tokens / seconds,
    }
    row["% of roofline"] = (
        None if None in shares else max(share for share in shares if share is not None)
    )
    if workload.num_prompts == 1 and gaps:  # transformers returns all tokens at once
        step = statistics.median(gaps)
        row |= {
            "ms per step": 1e3 * step,
            "% of weight bandwidth": setting.percent_of(
                "bytes_per_second", cost.step_bytes(1) / step
            ),
        }
    same = {"table": MODELS, "shape": label["shape"], "workload": workload.name, "engine": GRAPHS}
    own = next(
        (
            other
            for other in setting.before
            if same.items() <= other.items() and "tokens/s" in other
        ),
        None,
    )
    return row | {"nanovllm's speed ÷": own["tokens/s"] / row["tokens/s"] if own else None}


def _split(core: Engine, workload: Workload, setting: Setting) -> Row:
    """Where the time of a decode step goes while all requests run: the profiler tells how long
    kernels take, on a GPU from its own events alone. It slows the host down, so the steps before
    are timed without it, and what is left of their time is the host's gap."""
    on_gpu = setting.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    warm_up, steps = (1, 2) if setting.dry_run else (3, PROFILED_STEPS)
    num_preemptions = core.stats.num_preemptions
    add_requests(core, workload.requests(core.model_config.vocab_size))
    # A preemption shows that the memory holds no more requests than those that run.
    while core.stats.num_waiting and core.stats.num_preemptions == num_preemptions:
        core.step()
    while any(request.in_prefill for request in core.scheduler.queues.running):
        core.step()
    # A step waits for the results of the one before.
    step_ms = 1e3 * timed(lambda: [core.step() for _ in range(steps)]) / steps
    with tempfile.TemporaryDirectory() as work:
        path = pathlib.Path(work) / "trace.json"
        with torch.profiler.profile(
            activities=[activity.CUDA if on_gpu else activity.CPU],
            schedule=torch.profiler.schedule(wait=0, warmup=warm_up, active=steps, repeat=1),
            on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
        ) as profile:
            for index in range(warm_up + steps):
                core.step()
                if on_gpu and index == warm_up + steps - 1:
                    torch.cuda.synchronize()
                profile.step()
        num_running = core.stats.num_running
        for index in range(workload.num_prompts):
            core.abort_request(str(index))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    split = split_steps(events, GPU_CATEGORIES if on_gpu else CPU_CATEGORIES)
    slower = split.pop("ms") / steps / step_ms
    shares = {
        name: share * slower
        for name, share in split.items()
        if name.endswith(" %") and name != HOST_GAP
    }
    split |= shares | {HOST_GAP: max(0.0, 100 - sum(shares.values()))}
    return {
        "workload": workload.name,
        "running": num_running,
        "step ms": step_ms,
        "× under the profiler": slower,
    } | split
