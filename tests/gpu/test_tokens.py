"""The engine's greedy tokens, which no device, attention backend or CUDA graph may change in
float32."""

from __future__ import annotations

import functools
import itertools
import pathlib
import random
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanovllm.checkpoint.home import nanovllm_home
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.config import COURSE_MODEL
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.features.cuda_graphs.graphs import GraphForward
from nanovllm.lab.bench.local import TINY, run_requests, start_engine, write_checkpoint
from nanovllm.lab.bench.workloads import BenchRequest
from nanovllm.models.eagle import shipped_head
from tests.gpu.setting import DRY_RUN, TINY_DEEPSEEK, TINY_MIXTRAL

REFERENCE = {"device": "cpu", "attention_backend": "torch"}
_GRAPHS = {"device": "cuda", "attention_backend": "triton", "enforce_eager": False}
ON_GPU: dict[str, dict[str, Any]] = {
    "torch attention": {"device": "cuda", "attention_backend": "torch", "enforce_eager": True},
    "Triton attention": {"device": "cuda", "attention_backend": "triton", "enforce_eager": True},
    "the smallest Triton kernel": {
        "device": "cuda",
        "attention_backend": "triton_simple",
        "enforce_eager": True,
    },
    "Triton attention, CUDA graphs": _GRAPHS,
    "Triton attention, CUDA graphs, each step waited for": _GRAPHS | {"async_scheduling": False},
}
ON_CPU: dict[str, dict[str, Any]] = {
    "compiled loops": {"device": "cpu", "attention_backend": "cpu"},
    "compiled loops, a step ahead": {
        "device": "cpu",
        "attention_backend": "cpu",
        "async_scheduling": True,
    },
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
            assert isinstance(core.runner.forward, GraphForward), "the engine has recorded no graph"
        return run_requests(core, requests)[0]
    finally:
        core.close()


def requests_of(lengths: tuple[int, ...], output_len: int, vocab_size: int) -> list[BenchRequest]:
    draw = random.Random(0)
    return [
        BenchRequest([draw.randrange(vocab_size) for _ in range(length)], output_len)
        for length in lengths
    ]


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
        pytest.skip(
            "a dry run" if DRY_RUN else f"{COURSE_FOLDER} is not there (`nanovllm fetch` makes it)"
        )
    folder, requests, options, expected = expected_of(model)
    assert tokens_of(folder, requests, **options, **VARIANTS[variant]) == expected


@pytest.mark.parametrize("quantization", ["w4a16", "w8a8"])
def test_tokens_of_quantized_weights_are_those_of_the_cpu(quantization: str) -> None:
    folder, requests, options, _ = expected_of("tiny model")
    quantized: dict[str, Any] = options | {"quantization": quantization, "quantize_head": True}
    expected = tokens_of(folder, requests, **quantized, **REFERENCE)
    for variant in list(VARIANTS.values())[-1:] if DRY_RUN else VARIANTS.values():
        assert tokens_of(folder, requests, **quantized, **variant) == expected


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_drafts_change_no_token(method: str) -> None:
    """The model drafts for itself, then its 8-bit copy does. The head is the course model's, and
    its matrices have 8 bits."""
    its_own: dict[str, Any] = {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 256, 3]],
    }
    if method == "eagle3":
        if DRY_RUN or not (COURSE_FOLDER / "config.json").is_file():
            pytest.skip(
                "a dry run"
                if DRY_RUN
                else f"{COURSE_FOLDER} is not there (`nanovllm fetch` makes it)"
            )
        folder, requests, options, expected = expected_of(COURSE_MODEL)
        ways: list[dict[str, Any]] = [{"model": str(shipped_head(COURSE_MODEL))}]
    else:
        folder, _, options, _ = expected_of("tiny model")
        # Prompts with every token: wherever the output goes, there are n-grams to look up.
        size = 64 if DRY_RUN else TINY["vocab_size"]
        requests = [
            BenchRequest([i * step % size for i in range(size)], 4 if DRY_RUN else 48)
            for step in (3, 7)
        ]
        expected = tokens_of(folder, requests, **options, **REFERENCE)
        copies = [{"model": folder}, {"model": folder, "quantization": "w8a8"}]
        ways = copies if method == "draft_model" else [{"prompt_lookup_min": 1}]
    variants = list(VARIANTS.values())[-1:] if DRY_RUN else [VARIANTS["Triton attention"], _GRAPHS]
    for way, variant in itertools.product(ways, variants):
        core = start_engine(
            folder,
            dtype="float32",
            num_kv_blocks=128,
            speculative_config={"method": method} | its_own | way,
            **options,
            **variant,
        )
        assert run_requests(core, requests)[0] == expected
        stats = core.stats.spec_decoding
        assert stats.num_drafts > 0 or (DRY_RUN and method == "ngram")
        assert method == "ngram" or stats.num_accepted_tokens > 0
        core.close()


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
