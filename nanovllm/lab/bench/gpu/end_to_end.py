"""Whole models of random weights: one stream, and many requests at once."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nanovllm.engine.core import EngineCore
from nanovllm.lab.bench.gpu import trace
from nanovllm.lab.bench.gpu.engine import add_requests, run_requests, start_engine
from nanovllm.lab.bench.gpu.setting import Row, Setting
from nanovllm.lab.bench.gpu.shapes import SHAPES, TINY, write_config
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.roofline import ModelCost, least_work
from nanovllm.lab.bench.workloads import NAMED, BenchRequest, Workload
from nanovllm.models.config import ModelConfig

RunRequests = Callable[[Sequence[BenchRequest]], list[Timeline]]

MAX_MODEL_LEN = 2048
# So many tokens in a step keep the GPU busy; nano-vllm's benchmark has twice as many.
TOKEN_BUDGET = 8192
PROFILED_STEPS = 16
REPEATS = 3

STREAM = NAMED["W1"][0]
# The lengths of nano-vllm's bench.py.
MANY = Workload("256 requests", "throughput", "prompts 100-1024, outputs 100-1024", 256, (100, 1024), (100, 1024))
#: Short enough for transformers to be done in time, too.
SOME = Workload("64 requests", "throughput", "prompts 100-1024, outputs 32-256", 64, (100, 1024), (32, 256))


def workloads(setting: Setting) -> tuple[Workload, Workload, Workload]:
    """One stream, many requests, and what transformers runs instead of these; tiny ones in a dry run."""
    if not setting.dry_run:
        return STREAM, MANY, SOME
    small: dict[str, Any] = {"num_prompts": 3, "input_len": (3, 10), "output_len": (5, 6)}
    stream = dataclasses.replace(STREAM, input_len=(4, 4), output_len=(6, 6))
    return stream, dataclasses.replace(MANY, **small), dataclasses.replace(SOME, **small)


def model_folder(setting: Setting, shape: str, work: str) -> pathlib.Path:
    """A folder with the configuration of the shape; in a dry run, of a tiny one."""
    return write_config(pathlib.Path(work), TINY if setting.dry_run else SHAPES[shape])


def engine(setting: Setting, shape: str, mode: str, extent: str = "all") -> Iterator[Row]:
    """nanovllm on a model of this shape.

    Args:
        mode: "graphs" or "eager".
        extent: "stream" leaves out all but the single stream.
    """
    stream, many, some = workloads(setting)
    options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": TOKEN_BUDGET}
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
    yield label | measured(stream, core.model_config, run, setting)
    yield label | _split(core, stream, setting)
    if extent == "all":
        yield label | measured(many, core.model_config, run, setting)
        yield label | _split(core, many, setting)
        yield label | measured(some, core.model_config, run, setting)


def shortened(requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    """The same requests with few tokens of output, to warm up."""
    return [dataclasses.replace(request, max_tokens=min(request.max_tokens, 8)) for request in requests]


def measured(workload: Workload, model: ModelConfig, run: RunRequests, setting: Setting) -> Row:
    """The median of up to `REPEATS` runs, fewer where they are long; each has new prompts of the same lengths."""
    begin, timelines, times = time.perf_counter(), [], []
    for repeat in range(1, REPEATS + 1):
        requests = workload.requests(model.vocab_size, repeat=repeat)
        found = run(requests)
        timelines += found
        times.append(max(line.arrivals[-1][0] for line in found) - found[0].start)
        spent = time.perf_counter() - begin
        if spent * (repeat + 1) / repeat > setting.seconds / 5:
            break
    cost = ModelCost.of(model, 2)
    work = least_work(cost, requests)
    row = {
        "table": "end_to_end",
        "workload": workload.name,
        "tokens": sum(request.max_tokens for request in requests),
        "seconds": statistics.median(times),
        "runs": times,
        "num_bytes": work.num_bytes,
        "flops": work.flops,
    }
    gaps = [gap for line in timelines for gap in line.gaps]
    if workload.num_prompts == 1 and gaps:  # transformers tells only when all is done
        row |= {"weight_bytes": round(cost.step_bytes(1)), "step_seconds": statistics.median(gaps)}
    return row


def _split(core: EngineCore, workload: Workload, setting: Setting) -> Row:
    """Where the time of a decode step goes while all requests run.

    The profiler itself costs time, on the host above all.
    """
    on_gpu = setting.device.type == "cuda"
    warm_up, steps = (1, 2) if setting.dry_run else (3, PROFILED_STEPS)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    requests = workload.requests(core.model_config.vocab_size)
    num_preemptions = core.stats.num_preemptions
    add_requests(core, requests)
    # A preemption says that the memory holds no more requests than those that run.
    while core.stats.num_waiting and core.stats.num_preemptions == num_preemptions:
        core.step()
    while any(request.in_prefill for request in core.scheduler.running):
        core.step()
    with tempfile.TemporaryDirectory() as work:
        path = pathlib.Path(work) / "trace.json"
        with torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=warm_up, active=steps, repeat=1),
            on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
        ) as profile:
            for index in range(warm_up + steps):
                core.step()
                if on_gpu and index == warm_up + steps - 1:
                    torch.cuda.synchronize()
                profile.step()
        num_running = core.stats.num_running
        for index in range(len(requests)):
            core.abort_request(str(index))
        events = trace.read_trace(path)
    categories = trace.GPU_CATEGORIES if on_gpu else trace.CPU_CATEGORIES
    row: Row = {"table": "step_split", "workload": workload.name, "running": num_running, "steps": steps}
    return row | dataclasses.asdict(trace.split_steps(events, categories))
