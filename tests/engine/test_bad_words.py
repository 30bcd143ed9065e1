"""Bad words: strings that an output never contains, as in vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import COURSE_MODEL
from nanovllm.data.outputs import RequestOutput
from nanovllm.data.structured_outputs import GrammarError
from nanovllm.text.prompts import encode_bad_words
from nanovllm.text.tokenizer import Tokenizer
from tests.engine.test_features import FEATURES, OUTPUT_LEN, prompts, run
from tests.oracle import greedy, make_checkpoint, reference_model, reference_tokens

PROMPTS = [[5 + i * 7 % 300 for i in range(length)] for length in (3, 16, 43)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(resolve_model(COURSE_MODEL))


def engine(checkpoint: str, **options: Any) -> LLM:
    return LLM(
        checkpoint, **({"dtype": "float32", "num_kv_blocks": 64, "max_model_len": 128} | options)
    )


@torch.inference_mode()
def reference(checkpoint: str, prompt: list[int], words: list[list[int]], count: int) -> list[int]:
    """Greedy tokens by transformers, whose NoBadWordsLogitsProcessor sees the output alone, as
    vLLM's rule does."""
    from transformers.generation.logits_process import NoBadWordsLogitsProcessor

    model = reference_model(checkpoint)
    forbid = NoBadWordsLogitsProcessor(words)
    tokens: list[int] = []
    for _ in range(count):
        logits = model(torch.tensor([prompt + tokens])).logits[:, -1]
        tokens.append(int(forbid(torch.tensor([tokens], dtype=torch.long), logits).argmax()))
    return tokens


def test_tokens_are_those_of_transformers(checkpoint: str) -> None:
    llm = engine(checkpoint)
    free = greedy(llm, PROMPTS, 24)
    for prompt, tokens in zip(PROMPTS, free, strict=True):
        words = [
            tokens[:1],
            tokens[4:6],
            tokens[8:12],
            [tokens[10], tokens[3]],
            prompt[-1:] + tokens[1:2],
        ]
        found = greedy(llm, [prompt], 24, bad_words_token_ids=words)[0]
        assert found == reference(checkpoint, prompt, words, 24) != tokens


@pytest.fixture(scope="module")
def with_words(checkpoint: str) -> tuple[list[list[int]], list[list[int]]]:
    """Bad words that change the answer to most prompts of `test_features`, and the answers by
    transformers."""
    free = [reference_tokens(checkpoint, prompt, OUTPUT_LEN) for prompt in prompts()]
    words = [tokens[i : i + 2] for tokens in free for i in (0, 3)] + [
        tokens[5:6] for tokens in free[:2]
    ]
    expected = [reference(checkpoint, prompt, words, OUTPUT_LEN) for prompt in prompts()]
    assert (
        sum(tokens != other for tokens, other in zip(free, expected, strict=True)) > len(free) / 2
    )
    return words, expected


@pytest.mark.parametrize("feature", FEATURES)
def test_no_feature_changes_a_token(
    feature: str, checkpoint: str, with_words: tuple[list[list[int]], list[list[int]]]
) -> None:
    words, expected = with_words
    _, tokens = run(checkpoint, (feature,), bad_words_token_ids=words)
    assert tokens == [[want] * FEATURES[feature].get("n", 1) for want in expected]


def test_a_word_that_begins_in_the_prompt_is_allowed(checkpoint: str) -> None:
    """As in vLLM: the rule is about the output."""
    llm = engine(checkpoint)
    [tokens] = greedy(llm, PROMPTS[:1], 8)
    assert greedy(llm, PROMPTS[:1], 8, bad_words_token_ids=[[PROMPTS[0][-1], tokens[0]]]) == [
        tokens
    ]


def test_words_are_encoded_with_and_without_a_leading_space(tokenizer: Tokenizer) -> None:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    assert encode_bad_words(["Paris"], tokenizer) == [encode("Paris"), encode(" Paris")]
    assert encode_bad_words(["  New York", "New York"], tokenizer) == [
        encode("New York"),
        encode(" New York"),
    ]
    assert encode_bad_words(["\n", "\n\n"], tokenizer) == [encode("\n"), encode("\n\n")]
    # vLLM leaves the form with a space out where it has another number of tokens, and then
    # generates the word.
    odd = next(
        word
        for word in ("cat", "qwerty", "Zurich", "Xylo")
        if len(encode(word)) != len(encode(f" {word}"))
    )
    assert encode_bad_words([odd], tokenizer) == [encode(odd), encode(f" {odd}")]


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_course_model_never_says_the_word(temperature: float) -> None:
    llm = LLM(COURSE_MODEL, num_kv_blocks=256, max_model_len=256)
    prompt = "The capital of France is"
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=24, n=1 if temperature == 0 else 6
    )
    words = ["Paris", "city", " the", "."]

    def texts(params: SamplingParams) -> list[str]:
        return [answer.text for answer in llm.generate([prompt], params, use_tqdm=False)[0].outputs]

    assert any(word in text for text in texts(params) for word in words)
    for text in texts(params.clone(bad_words=words)):
        assert (
            text.strip() and "Paris" not in text and " city" not in text and " the " not in text
        ), text


def test_a_choice_that_is_a_bad_word_is_not_taken(checkpoint: str) -> None:
    llm = engine(checkpoint)

    def answer(**options: Any) -> RequestOutput:
        params = SamplingParams(
            temperature=0, max_tokens=20, structured_outputs={"choice": ["ab", "cd"]}, **options
        )
        return llm.generate([PROMPTS[0]], params, use_tqdm=False)[0]

    first = answer().outputs[0].text
    other = {"ab": "cd", "cd": "ab"}[first]
    assert answer(bad_words=[first[0]]).outputs[0].text == other
    # The whole word forbids its second letter, when the grammar allows nothing else.
    for words in ([first], ["a", "c"]):
        failed = answer(bad_words=words)
        num_tokens = len(words[0]) - 1
        assert failed.outputs[0].finish_reason == "error" and isinstance(failed.error, GrammarError)
        assert f"after {num_tokens} tokens, bad_words forbid every token that may follow" in str(
            failed.error
        )


def test_ids_outside_of_the_vocabulary_are_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="bad_words_token_ids must be from 0 to 319"):
        engine(checkpoint).generate(
            [[5]], SamplingParams(bad_words_token_ids=[[5], [6, 320]]), use_tqdm=False
        )


async def test_they_are_encoded_outside_of_the_event_loop(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from nanovllm.data.config import EngineConfig
    from nanovllm.engine import async_engine
    from nanovllm.text import input_processor

    threads: list[threading.Thread] = []

    def encode(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
        threads.append(threading.current_thread())
        return encode_bad_words(words, tokenizer)

    monkeypatch.setattr(input_processor, "encode_bad_words", encode)
    config = EngineConfig(checkpoint, dtype="float32", num_kv_blocks=64, max_model_len=128)
    running = await async_engine.AsyncEngine.start(config)
    try:
        params = SamplingParams(temperature=0, max_tokens=4, bad_words=["a"])
        tokens = [
            token
            async for part in running.generate("hello", params, "1")
            for token in part.outputs[0].token_ids
        ]
    finally:
        await running.shutdown()
    assert tokens and threads and threads[0] is not threading.main_thread()
