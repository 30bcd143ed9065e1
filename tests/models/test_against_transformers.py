"""Greedy output in float32 is token for token that of `transformers`."""

from __future__ import annotations

import json
import pathlib
import random
import shutil
from typing import Any

import pytest
import torch
from transformers import Gemma2Config
from transformers.models.gemma2 import modeling_gemma2 as transformers_gemma2

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.layers.basic import Embedding
from nanovllm.models.config import ModelConfig, UnsupportedModelError
from nanovllm.models.gemma2 import Gemma2RMSNorm
from tests.examples import examples
from tests.oracle import (
    VARIANTS,
    greedy,
    greedy_choices,
    make_checkpoint,
    reference_model,
    reference_tokens,
)
from tests.pairwise import in_turn

TOPICS = [
    "the capital of France",
    "how rain forms",
    "a sorting algorithm in Python",
    "the number 1234567890",
    "why the sky is blue",
    "a poem about winter",
    "the history of Rome",
    "3 + 4 * 5",
    "a recipe for bread",
    "black holes",
    "photosynthesis",
    "a letter to a friend",
]
OPENINGS = [
    "Tell me about {}.",
    "{}:",
    "Question: what do you know of {}? Answer:",
    "Once upon a time, {}",
    "{} is",
]


@pytest.mark.slow
def test_course_model() -> None:
    """14 prompts (nightly 54) of 3 to 200 tokens in one batch that is chunked, cached and preempted
    as it comes."""
    llm = LLM(dtype="float32", max_model_len=512, check_invariants=True)
    tokenizer, folder = llm.get_tokenizer(), str(resolve_model("smollm2-135m"))
    texts = [opening.format(topic) for topic in TOPICS[:10] for opening in OPENINGS] + [
        " ".join(f"Item {i}: {topic}." for i in range(20)) for topic in TOPICS[8:]
    ]
    texts = texts[:: len(texts) // examples(36)]
    prompts = [tokenizer.encode(text) for text in texts]
    assert len(prompts) >= 14
    count = examples(48) + 8
    ours = greedy(llm, prompts, count)
    assert ours == greedy_choices(folder, prompts, ours, count)
    for prompt, tokens in list(zip(prompts, ours, strict=True))[5::14]:
        # With transformers' own loop and cache.
        assert tokens == reference_tokens(folder, prompt, count)


# By day each architecture with one of the backends, in turn.
@pytest.mark.parametrize(("variant", "backend"), in_turn(VARIANTS, ["torch", "cpu"]))
def test_architectures(variant: str, backend: str, tmp_path) -> None:
    folder = make_checkpoint(tmp_path, variant)
    draw = random.Random(variant)
    prompts = [
        [draw.randrange(3, 320) for _ in range(length)] for length in (1, 2, 15, 16, 17, 40, 90)
    ]
    llm = LLM(
        str(folder),
        dtype="float32",
        attention_backend=backend,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        check_invariants=True,
    )
    ours = greedy(llm, prompts, 24)
    assert ours == greedy_choices(str(folder), prompts, ours, 24)


def test_sliding_window_matters(tmp_path) -> None:
    """The window test above would pass without windows if they changed nothing."""
    plain, windowed = (
        make_checkpoint(tmp_path / "a", "mistral"),
        make_checkpoint(tmp_path / "b", "mistral-window"),
    )
    prompt = list(range(3, 80))
    assert reference_tokens(str(plain), prompt, 24) != reference_tokens(str(windowed), prompt, 24)


def changed_copy(folder: pathlib.Path, change: dict[str, Any]) -> pathlib.Path:
    """The same weights with another configuration."""
    copy = shutil.copytree(folder, folder.with_name("changed"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    return copy


@pytest.mark.parametrize(
    "change",
    [
        {"attn_logit_softcapping": None},
        {"sliding_window": 200},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"query_pre_attn_scalar": 256},
    ],
    ids=str,
)
def test_gemma2_attention_settings_matter(change: dict[str, Any], tmp_path) -> None:
    """The test of architectures would pass without them if they changed nothing."""
    folder = make_checkpoint(tmp_path / "gemma2", "gemma2")
    changed = changed_copy(folder, change)
    prompt = list(range(3, 80))
    ours = greedy(LLM(str(changed), dtype="float32"), [prompt], 24)
    assert (
        ours
        == greedy_choices(str(changed), [prompt], ours, 24)
        != greedy_choices(str(folder), [prompt], ours, 24)
    )


def test_gemma2_caps_logits(tmp_path) -> None:
    """A cap keeps the order of logits and so the greedy tokens; what it changes is their
    log-probabilities."""
    folder = make_checkpoint(tmp_path / "gemma2", "gemma2")
    prompt = list(range(3, 80))

    def logprobs(folder: pathlib.Path) -> torch.Tensor:
        """Of each prompt token but the first: transformers', once nanovllm's are found equal."""
        with torch.inference_mode():
            rows = (
                reference_model(str(folder))(torch.tensor([prompt]))
                .logits[0, :-1]
                .log_softmax(dim=-1)
            )
        expected = rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (out,) = LLM(str(folder), dtype="float32").generate([prompt], params, use_tqdm=False)
        ours = [
            entry[token].logprob
            for token, entry in zip(prompt[1:], out.prompt_logprobs[1:], strict=True)
        ]
        torch.testing.assert_close(torch.tensor(ours), expected, atol=1e-4, rtol=0)
        return expected

    capped, free = (
        logprobs(folder),
        logprobs(changed_copy(folder, {"final_logit_softcapping": None})),
    )
    assert (capped - free).abs().max() > 1


def test_gemma2_rounds_in_bfloat16_as_transformers() -> None:
    """1 + weight is not rounded, and the embeddings' factor is: sqrt(72) is 8.485, which becomes
    8.5."""
    torch.manual_seed(0)
    x, weight = (
        torch.randn(50, 72, dtype=torch.bfloat16),
        torch.randn(72, dtype=torch.bfloat16) / 50,
    )
    theirs, ours = transformers_gemma2.Gemma2RMSNorm(72, 1e-6), Gemma2RMSNorm(72, 1e-6)
    theirs.weight.data, ours.weight.data = weight, weight
    assert torch.equal(ours(x), theirs(x))
    embedding = Embedding(50, 72, factor=72**0.5)
    embedding.weight.data = x
    assert torch.equal(embedding(torch.arange(50)), x * 8.5)


def test_gemma2_configurations_may_leave_keys_out() -> None:
    """The first checkpoints do not say that the head is tied and which layers have windows."""
    full = Gemma2Config().to_dict() | {"architectures": ["Gemma2ForCausalLM"]}
    defaults = (
        "layer_types",
        "tie_word_embeddings",
        "head_dim",
        "query_pre_attn_scalar",
        "sliding_window",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_activation",
    )
    config = ModelConfig.from_dict(
        {key: value for key, value in full.items() if key not in defaults}
    )
    assert config == ModelConfig.from_dict(full)
    assert config.tie_word_embeddings and config.layer_windows == [4096, 0] * 13
    with pytest.raises(UnsupportedModelError, match=r"hidden_activation 'silu'.*gelu_pytorch_tanh"):
        ModelConfig.from_dict(full | {"hidden_activation": "silu"})


def test_sharded_checkpoint(tmp_path) -> None:
    folder = make_checkpoint(tmp_path, shards=3)
    assert len(list(folder.glob("*.safetensors"))) > 1
    prompt = list(range(3, 40))
    assert greedy(LLM(str(folder), dtype="float32"), [prompt], 16) == [
        reference_tokens(str(folder), prompt, 16)
    ]


def test_several_eos_ids_of_the_generation_config(tmp_path) -> None:
    folder = make_checkpoint(tmp_path)
    prompt = list(range(3, 40))
    free = reference_tokens(str(folder), prompt, 24)
    later = next(token for i, token in enumerate(free) if i > 3 and token not in free[:i])
    (folder / "generation_config.json").write_text(
        f'{{"eos_token_id": [319, {later}], "temperature": 0.5}}'
    )
    assert ModelConfig.from_pretrained(folder).eos_token_ids == [2, 319, later]
    llm = LLM(str(folder), dtype="float32")
    out = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[
        0
    ].outputs[0]
    assert out.token_ids == free[: free.index(later) + 1]
    assert out.finish_reason == "stop" and out.stop_reason is None
    assert llm.get_default_sampling_params().temperature == 0.5
