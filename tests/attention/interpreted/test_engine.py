"""The whole engine on Triton kernels, attention and operators, in the interpreter: the tokens of
plain torch."""

from __future__ import annotations

import random

import pytest
import torch

from nanovllm import LLM, SamplingParams, ops
from nanovllm.attention.triton import Hardware, TritonBackend
from nanovllm.layers.quantization import QuantizedWeight
from nanovllm.ops import quantized, reference_quantized, triton_quantized
from nanovllm.ops import triton as operators
from tests.examples import by_night
from tests.oracle import greedy, make_checkpoint, reference_tokens
from tests.quantized import quantize_checkpoint
from tests.stand_ins import refuse_reference, set_hardware, set_kernels

OUTPUT_LEN = 3


@pytest.fixture(autouse=True)
def few_programs(monkeypatch) -> None:
    set_hardware(monkeypatch, Hardware(1, 227 * 1024))


@pytest.fixture
def triton_operators(monkeypatch) -> None:
    set_kernels(monkeypatch, ops, operators)


def prompts() -> list[list[int]]:
    """Few and short: a program takes the interpreter as long as thousands take a GPU. Two begin
    with the same block."""
    draw = random.Random(3)
    shared = [draw.randrange(3, 320) for _ in range(19)]
    return [[draw.randrange(3, 320) for _ in range(length)] for length in (1, 15)] + [
        shared,
        shared[:17],
    ]


def generate(checkpoint, num_prompts=None, **options) -> list[list[int]]:
    llm = LLM(
        model=str(checkpoint),
        device="cpu",
        dtype="float32",
        attention_backend="triton",
        check_invariants=True,
        **({"num_kv_blocks": 64} | options),
    )
    assert isinstance(llm.engine.core.runner.forward.backend, TritonBackend)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    batch = [{"prompt_token_ids": prompt} for prompt in prompts()[:num_prompts]]
    tokens = [output.outputs[0].token_ids for output in llm.generate(batch, params, use_tqdm=False)]
    assert (llm.engine.core.stats.num_preemptions > 0) == ("preemption_mode" in options)
    return tokens


# Gemma has windows, too, and Llama's operators are those of the tests below.
@pytest.mark.parametrize(
    "variant",
    [
        "gemma2",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("mistral-window", "llama-head-dim", "qwen3")
        ),
    ],
)
def test_tokens_of_transformers(variant, tmp_path, triton_operators) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    expected = [reference_tokens(str(checkpoint), prompt, OUTPUT_LEN) for prompt in prompts()]
    assert generate(checkpoint) == expected


@pytest.mark.parametrize(
    "options",
    [
        {
            "enable_prefix_caching": False,
            "block_size": 64,
            "max_num_batched_tokens": 12,
            "max_num_seqs": 4,
        },
        {"num_kv_blocks": 4, "preemption_mode": "swap", "swap_space": 0.01},
        pytest.param({"batching_policy": "static"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_features_change_no_token(options, tmp_path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    expected = [reference_tokens(str(checkpoint), prompt, OUTPUT_LEN) for prompt in prompts()]
    assert generate(checkpoint, **options) == expected


def test_bfloat16_is_as_near_to_float32_as_torch_is(tmp_path) -> None:
    """In 16 bits tokens may differ, but one backend's roundings are no worse than another's."""
    checkpoint = make_checkpoint(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def prompt_logprobs(backend: str, dtype: str) -> torch.Tensor:
        llm = LLM(
            model=str(checkpoint),
            device="cpu",
            dtype=dtype,
            attention_backend=backend,
            num_kv_blocks=64,
        )
        [output] = llm.generate({"prompt_token_ids": list(range(40, 74))}, params, use_tqdm=False)
        return torch.tensor(
            [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
        )

    exact = prompt_logprobs("torch", "float32")
    errors = [
        (prompt_logprobs(backend, "bfloat16") - exact).norm() for backend in ("triton", "torch")
    ]
    assert 0 < errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize(
    "kind",
    [
        "w8a8",
        "asymmetric 4 bits, groups of 0",
        "gptq 8 bits, groups of 0, version 2",
        *by_night(["w4a16"]),
    ],
)
def test_quantized_weights_give_the_tokens_of_plain_torch(
    kind, tmp_path, triton_operators, monkeypatch
) -> None:
    """The kernels alone, in each layer, and in the head where it is quantized, too."""
    checkpoint, options = (
        make_checkpoint(tmp_path / "original"),
        {"quantization": kind, "quantize_head": True},
    )
    if " " in kind:
        checkpoint, options = quantize_checkpoint(checkpoint, tmp_path, kind)[0], {}
    with monkeypatch.context() as patch:
        set_kernels(patch, quantized, reference_quantized)
        llm = LLM(
            str(checkpoint),
            device="cpu",
            dtype="float32",
            attention_backend="torch",
            num_kv_blocks=64,
            **options,
        )
        expected = greedy(llm, prompts()[:2], OUTPUT_LEN)
    refuse_reference(
        monkeypatch, triton_quantized, pack=reference_quantized.pack, rows=reference_quantized.rows
    )
    set_kernels(monkeypatch, quantized, triton_quantized)
    if "8 bits" in kind:  # a CPU would dequantize them
        monkeypatch.setattr(QuantizedWeight, "pack", lambda self: None)
    calls = []
    multiply = triton_quantized._multiply
    monkeypatch.setattr(
        triton_quantized,
        "_multiply",
        lambda *tensors, **options: calls.append(kind) or multiply(*tensors, **options),
    )
    assert generate(checkpoint, num_prompts=2, **options) == expected
    assert len(calls) >= OUTPUT_LEN * (2 * 4 + bool(options))  # two layers of four matrices
