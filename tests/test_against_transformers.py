"""Greedy output in float32 is token for token that of `transformers`."""

from __future__ import annotations

import random

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.hub import resolve_model
from nanovllm.models.config import ModelConfig
from tests.oracle import VARIANTS, greedy, make_checkpoint, reference_tokens

TOPICS = [
    "the capital of France", "how rain forms", "a sorting algorithm in Python", "the number 1234567890",
    "why the sky is blue", "a poem about winter", "the history of Rome", "3 + 4 * 5", "a recipe for bread",
    "black holes", "photosynthesis", "a letter to a friend",
]  # fmt: skip
OPENINGS = [
    "Tell me about {}.",
    "{}:",
    "Question: what do you know of {}? Answer:",
    "Once upon a time, {}",
    "{} is",
]


@pytest.mark.slow
def test_course_model() -> None:
    """54 prompts of 3 to 200 tokens, 64 tokens each, in one batch that is chunked, cached and preempted as it comes."""
    llm = LLM(dtype="float32", max_model_len=512, check_invariants=True)
    tokenizer, folder = llm.get_tokenizer(), str(resolve_model("smollm2-135m"))
    texts = [opening.format(topic) for topic in TOPICS[:10] for opening in OPENINGS] + [
        " ".join(f"Item {i}: {topic}." for i in range(20)) for topic in TOPICS[8:]
    ]
    prompts = [tokenizer.encode(text) for text in texts]
    assert len(prompts) >= 50
    ours = greedy(llm, prompts, 64)
    for text, prompt, tokens in zip(texts, prompts, ours, strict=True):
        assert tokens == reference_tokens(folder, prompt, 64), text


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_architectures(variant: str, backend: str, tmp_path) -> None:
    folder = make_checkpoint(tmp_path, variant)
    draw = random.Random(variant)
    prompts = [[draw.randrange(3, 320) for _ in range(length)] for length in (1, 2, 15, 16, 17, 40, 90)]
    llm = LLM(str(folder), dtype="float32", attention_backend=backend, max_num_batched_tokens=48, max_num_seqs=8,
              check_invariants=True)  # fmt: skip
    assert greedy(llm, prompts, 24) == [reference_tokens(str(folder), prompt, 24) for prompt in prompts]


def test_sliding_window_matters(tmp_path) -> None:
    """The window test above would pass without windows if they changed nothing."""
    plain, windowed = (
        make_checkpoint(tmp_path / "a", "mistral"),
        make_checkpoint(tmp_path / "b", "mistral-window"),
    )
    prompt = list(range(3, 80))
    assert reference_tokens(str(plain), prompt, 24) != reference_tokens(str(windowed), prompt, 24)


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
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [319, {later}], "temperature": 0.5}}')
    assert ModelConfig.from_pretrained(folder).eos_token_ids == [319, later]
    llm = LLM(str(folder), dtype="float32")
    out = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[0].outputs[0]
    assert out.token_ids == free[: free.index(later) + 1]
    assert out.finish_reason == "stop" and out.stop_reason is None
    assert llm.get_default_sampling_params().temperature == 0.5
