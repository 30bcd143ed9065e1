"""The page's suggestions and the README's question have right answers, whatever setting of the
README the server has."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from tests.examples import by_night

ROOT = pathlib.Path(__file__).parents[2]
CHAT = (ROOT / "nanovllm/server/web/chat.js").read_text(encoding="utf-8")

# A word of the right answer.
RIGHT = {
    "What is the capital of Japan?": "Tokyo",
    "What is the chemical symbol for water?": "H2O",
    "What is the capital of England?": "London",
}

W8A8 = {"quantization": "w8a8", "quantize_head": True}
W4A8 = {"quantization": "w4a8", "quantize_head": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "float32": {"dtype": "float32"},
    "quantize-head": {"quantize_head": True},
    "w8a8": {"quantization": "w8a8"},
    "w8a8, quantize-head": W8A8,
    "w4a8": {"quantization": "w4a8"},
    "w4a8, quantize-head": W4A8,
    "w4a16": {"quantization": "w4a16"},
    "kv int8": {"kv_cache_dtype": "int8"},
    "w8a8, quantize-head, kv int8": W8A8 | {"kv_cache_dtype": "int8"},
    "eagle3": {"speculative_config": {"method": "eagle3"}},
    "ngram": {"speculative_config": {"method": "ngram"}},
}


def suggestions() -> list[str]:
    """Return the questions that the page suggests."""
    questions = re.search(r"const SUGGESTIONS = (\[.*?\]);", CHAT, re.DOTALL)
    assert questions
    return json.loads(questions[1].replace(",\n]", "\n]"))


def readme_question() -> str:
    """Return the question of the README's first request."""
    request = re.search(
        r"-d '(\{\"messages\".*?\})'", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    assert request
    body = json.loads(request[1])
    assert body["temperature"] == 0
    return body["messages"][0]["content"]


def suggested_params() -> SamplingParams:
    """Return the sampling parameters with which the page asks its suggestions."""
    values = re.search(r"const SUGGESTED = \{ temperature: (\d+), max_tokens: (\d+) \};", CHAT)
    assert values
    temperature, max_tokens = values.groups()
    return SamplingParams(temperature=float(temperature), max_tokens=int(max_tokens))


def test_suggestions_are_greedy_short_and_known() -> None:
    params = suggested_params()
    assert params.temperature == 0
    assert params.max_tokens <= 64
    assert set(suggestions()) == set(RIGHT)
    assert readme_question() in RIGHT


# By day each setting once, alone or with others.
BY_DAY = [
    "default",
    "w8a8, quantize-head, kv int8",
    "w4a8, quantize-head",
    "w4a16",
    "eagle3",
    "ngram",
]


@pytest.mark.parametrize(
    "name", [*BY_DAY, *by_night(name for name in SETTINGS if name not in BY_DAY)]
)
def test_every_setting_answers_right(name: str) -> None:
    llm = LLM("smollm2-135m", max_model_len=256, num_kv_blocks=64, **SETTINGS[name])
    for question in suggestions():
        [answer] = llm.chat(
            [{"role": "user", "content": question}], suggested_params(), use_tqdm=False
        )
        assert RIGHT[question] in answer.outputs[0].text, question
