"""The engine's greedy tokens, which no device, attention backend, CUDA graph or division may change in float32."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pathlib
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nanovllm.checkpoint.hub import nanovllm_home
from nanovllm.data.config import COURSE_MODEL
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.lab.bench.local import TINY, TINY_DEEPSEEK, TINY_MIXTRAL, run_requests, start_engine, write_checkpoint
from nanovllm.lab.bench.workloads import BenchRequest, Workload
from tests.gpu.setting import DEVICE, DRY_RUN

REFERENCE = {"device": "cpu", "attention_backend": "torch"}
_GRAPHS = {"device": "cuda", "attention_backend": "triton", "enforce_eager": False}
ON_GPU: dict[str, dict[str, Any]] = {
    "torch attention": {"device": "cuda", "attention_backend": "torch", "enforce_eager": True},
    "Triton attention": {"device": "cuda", "attention_backend": "triton", "enforce_eager": True},
    "Triton attention, CUDA graphs": _GRAPHS,
    "Triton attention, CUDA graphs, each step waited for": _GRAPHS | {"async_scheduling": False},
}
ON_CPU: dict[str, dict[str, Any]] = {
    "compiled loops": {"device": "cpu", "attention_backend": "cpu"},
    "compiled loops, a step ahead": {"device": "cpu", "attention_backend": "cpu", "async_scheduling": True},
    "Triton attention, interpreted": {"device": "cpu", "attention_backend": "triton"},
}
VARIANTS = ON_CPU if DRY_RUN else ON_GPU
COURSE_FOLDER = nanovllm_home() / "models" / COURSE_MODEL


@functools.cache
def tiny(kind: str = "llama") -> str:
    shape = {"llama": TINY, "mixtral": TINY_MIXTRAL, "deepseek": TINY_DEEPSEEK}[kind]
    return str(write_checkpoint(pathlib.Path(tempfile.mkdtemp(prefix="nanovllm-gpu-")), shape))


def tokens_of(folder: str, requests: list[BenchRequest], **options: Any) -> list[list[int]]:
    core = start_engine(folder, dtype="float32", num_kv_blocks=128, **options)
    try:
        if options.get("enforce_eager") is False:
            assert core.runner.graphs is not None, "the engine has recorded no graph"
        return run_requests(core, requests)[0]
    finally:
        core.close()


def requests_of(lengths: tuple[int, ...], output_len: int, vocab_size: int) -> list[BenchRequest]:
    draw = random.Random(0)
    return [BenchRequest([draw.randrange(vocab_size) for _ in range(length)], output_len) for length in lengths]


@functools.cache
def expected_of(model: str) -> tuple[str, list[BenchRequest], dict[str, Any], list[list[int]]]:
    if model == COURSE_MODEL:
        folder, requests = str(COURSE_FOLDER), requests_of((5, 40, 130), 32, 49152)
        options = {"max_model_len": 512, "max_num_seqs": 8}
    else:
        lengths, output_len = ((1, 18, 5), 3) if DRY_RUN else ((1, 15, 16, 17, 90, 150, 7, 64), 48)
        folder, requests = tiny(), requests_of(lengths, output_len, TINY["vocab_size"])
        # A small budget: prompts come in chunks, beside requests that decode.
        options = {"max_num_batched_tokens": 16 if DRY_RUN else 64, "max_num_seqs": len(lengths)}
    return folder, requests, options, tokens_of(folder, requests, **options, **REFERENCE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", ["tiny model", COURSE_MODEL])
def test_tokens_are_those_of_torch_on_the_cpu(model: str, variant: str) -> None:
    if model == COURSE_MODEL and (DRY_RUN or not (COURSE_FOLDER / "config.json").is_file()):
        pytest.skip("a dry run" if DRY_RUN else f"{COURSE_FOLDER} is not there (`nanovllm fetch` makes it)")
    folder, requests, options, expected = expected_of(model)
    assert tokens_of(folder, requests, **options, **VARIANTS[variant]) == expected


@pytest.mark.skipif(DRY_RUN, reason="a dry run")
def test_launching_a_step_waits_for_nothing() -> None:
    """Torch raises an error if launching a step, with any sampling, waits for the GPU."""
    core = start_engine(tiny(), device="cuda", num_kv_blocks=128, max_num_seqs=8)
    launch = core.runner.launch

    def watched(plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    core.runner.launch = watched  # type: ignore[method-assign]
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


# ---------------------------------------------------------------- divided engines

_TENSOR, _DATA = {"tensor_parallel_size": 2}, {"data_parallel_size": 2}
_WHOLE = {"enable_expert_parallel": True}
# Every fifth step, experts move to where the last four steps would have needed them.
_MOVING: dict[str, Any] = _WHOLE | {
    "enable_eplb": True,
    "eplb_config": {"window_size": 4, "step_interval": 5, "num_redundant_experts": 2, "log_balancedness": True},
}
DIVISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor parallel": ("llama", _TENSOR),
    "tensor parallel, eager": ("llama", _TENSOR | {"enforce_eager": True}),
    "pipeline parallel": ("llama", {"pipeline_parallel_size": 2}),
    "Mixtral, tensor parallel, whole experts": ("mixtral", _TENSOR | _WHOLE),
    "Mixtral, tensor parallel, experts that move": ("mixtral", _TENSOR | _MOVING),
    "Mixtral, data parallel, whole experts": ("mixtral", _DATA | _WHOLE),
    "Mixtral, data parallel, experts that move": ("mixtral", _DATA | _MOVING),
    "DeepSeek-V3, tensor parallel": ("deepseek", _TENSOR),
}
# Enough for a dry run to go through this code; other tests have the other divisions on a CPU.
_DRY = [name for name in DIVISIONS if name == "pipeline parallel" or name.endswith("experts that move")]


@functools.cache
def undivided(kind: str) -> tuple[list[BenchRequest], dict[str, Any], list[list[int]]]:
    count, lengths, outputs = (3, (3, 20), (9, 9)) if DRY_RUN else (8, (5, 150), (48, 48))
    requests = Workload("", "throughput", "", count, lengths, outputs).requests(TINY["vocab_size"])
    options = {"device": DEVICE.type, "max_num_seqs": count, "max_num_batched_tokens": 16 if DRY_RUN else 64}
    return requests, options, tokens_of(tiny(kind), requests, **options)


@pytest.mark.parametrize("name", _DRY if DRY_RUN else DIVISIONS)
def test_two_ranks_sample_the_tokens_of_one(name: str) -> None:
    if DEVICE.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("it needs 2 GPUs")
    kind, division = DIVISIONS[name]
    requests, options, expected = undivided(kind)
    moves_experts = "enable_eplb" in division
    with log_of_ranks() if moves_experts else contextlib.nullcontext([""]) as said:
        assert tokens_of(tiny(kind), requests, **options, **division) == expected
    if moves_experts:
        moves = [int(count) for count in re.findall(r"now .*; (\d+) bytes moved", said[0])]
        assert any(moves) and len(moves) % 2 == 0, "experts have not moved on both ranks"


@contextlib.contextmanager
def log_of_ranks() -> Iterator[list[str]]:
    """Collects what the processes of the ranks log (one text, afterwards) and passes it on."""
    said: list[str] = []
    logger, own_error = logging.getLogger("nanovllm"), os.dup(2)
    level = logger.level
    with tempfile.TemporaryFile("w+") as file:
        logger.setLevel(logging.INFO)
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(own_error, 2)
            os.close(own_error)
            logger.setLevel(level)
            file.seek(0)
            said.append(file.read())
            sys.stderr.write(said[0])
