"""The engine's greedy tokens, which no device, attention backend or CUDA graph may change in float32."""

from __future__ import annotations

import pathlib
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nanovllm.checkpoint.hub import nanovllm_home
from nanovllm.data.config import COURSE_MODEL
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.lab.bench.gpu.engine import run_requests, start_engine
from nanovllm.lab.bench.gpu.setting import Row, Setting, reason_of
from nanovllm.lab.bench.gpu.shapes import TINY, write_checkpoint
from nanovllm.lab.bench.workloads import BenchRequest

REFERENCE = {"device": "cpu", "attention_backend": "torch"}
ON_GPU: dict[str, dict[str, Any]] = {
    "torch attention": {"device": "cuda", "attention_backend": "torch", "enforce_eager": True},
    "Triton attention": {"device": "cuda", "attention_backend": "triton", "enforce_eager": True},
    "Triton attention, CUDA graphs": {"device": "cuda", "attention_backend": "triton", "enforce_eager": False},
    "Triton attention, CUDA graphs, each step waited for": {
        "device": "cuda",
        "attention_backend": "triton",
        "enforce_eager": False,
        "async_scheduling": False,
    },
}
ON_CPU: dict[str, dict[str, Any]] = {
    "compiled loops": {"device": "cpu", "attention_backend": "cpu"},
    "compiled loops, a step ahead": {"device": "cpu", "attention_backend": "cpu", "async_scheduling": True},
    "Triton attention, interpreted": {"device": "cpu", "attention_backend": "triton"},
}


def tokens(setting: Setting) -> Iterator[Row]:
    """Compare all variants with torch on the CPU, on a tiny model and, if it is there, on the course model."""
    variants = ON_CPU if setting.dry_run else ON_GPU
    with tempfile.TemporaryDirectory() as work:
        tiny = write_checkpoint(pathlib.Path(work), TINY)
        lengths, output_len = ((1, 18, 5), 3) if setting.dry_run else ((1, 15, 16, 17, 90, 150, 7, 64), 48)
        # A small budget: prompts come in chunks, beside requests that decode.
        budget = {"max_num_batched_tokens": 16 if setting.dry_run else 64, "max_num_seqs": len(lengths)}
        yield from _compare("tiny model", tiny, variants, lengths, output_len, budget)
        yield _never_waits(tiny, setting.dry_run)
    course = nanovllm_home() / "models" / COURSE_MODEL
    if setting.dry_run or not (course / "config.json").is_file():
        reason = "a dry run" if setting.dry_run else f"{course} is not there (`nanovllm fetch` makes it)"
        yield {"table": "checks", "name": f"greedy tokens, {COURSE_MODEL}", "passed": None, "reason": reason}
        return
    yield from _compare(COURSE_MODEL, course, variants, (5, 40, 130), 32, {"max_model_len": 512, "max_num_seqs": 8})


def _never_waits(folder: pathlib.Path, dry_run: bool) -> Row:
    """Whether launching steps, whatever their requests ask of sampling, leaves the GPU alone until it has finished."""
    row: Row = {"table": "checks", "name": "launching a step waits for nothing"}
    if dry_run:
        return row | {"passed": None, "reason": "a dry run"}
    try:
        _launch_watched(folder)
    except Exception as error:  # the course model may tell more
        return row | {"passed": False, "reason": reason_of(error)}
    return row | {"passed": True}


def _launch_watched(folder: pathlib.Path) -> None:
    """Run requests while torch raises an error wherever launching a step would wait for the GPU."""
    core = start_engine(str(folder), device="cuda", num_kv_blocks=128, max_num_seqs=8)
    launch = core.runner.launch

    def watched(plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    core.runner.launch = watched  # type: ignore[assignment]
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 1},
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0, "repetition_penalty": 1.2, "logit_bias": {5: 2.0}, "min_tokens": 3},
    ]
    for index, option in enumerate(options):
        params = SamplingParams(max_tokens=8, ignore_eos=True, **option)
        core.add_request(EngineRequest(str(index), list(range(20 + index)), params))
    while core.has_unfinished:
        core.step()


def _compare(
    model: str,
    folder: pathlib.Path,
    variants: dict[str, dict[str, Any]],
    lengths: tuple[int, ...],
    output_len: int,
    options: dict[str, Any],
) -> Iterator[Row]:
    draw = random.Random(0)
    common = {"dtype": "float32", "num_kv_blocks": 128} | options
    try:
        core = start_engine(str(folder), **common, **REFERENCE)
        vocabulary = core.model_config.vocab_size
        requests = [BenchRequest([draw.randrange(vocabulary) for _ in range(length)], output_len) for length in lengths]
        expected, _ = run_requests(core, requests)
    except Exception as error:  # nothing to compare with; what follows may tell more
        name = f"greedy tokens, {model}: torch on the CPU, the reference"
        yield {"table": "checks", "name": name, "passed": False, "reason": reason_of(error)}
        return
    for name, variant in variants.items():
        row: Row = {"table": "checks", "name": f"greedy tokens, {model}: {name} as torch on the CPU"}
        try:
            core = start_engine(str(folder), **common, **variant)
            if core.runner.graphs is None and not variant.get("enforce_eager", True):
                raise RuntimeError("the engine has recorded no graph")
            found, _ = run_requests(core, requests)
        except Exception as error:  # the next variant may tell more
            yield row | {"passed": False, "reason": reason_of(error)}
            continue
        wrong = [index for index, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
        yield row | {"passed": not wrong} | ({"reason": f"requests {wrong} differ"} if wrong else {})
