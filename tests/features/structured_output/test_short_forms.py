"""Structured output that ends in time: six schemas, many seeds, a small `max_tokens`, and the
course model at temperature 1."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

import jsonschema
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.data.outputs import CompletionOutput
from tests.examples import by_night

SCHEMAS: dict[str, dict[str, Any]] = json.loads(
    (pathlib.Path(__file__).parent / "six_schemas.json").read_text("utf-8")
)
LIMIT = 200


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        "smollm2-135m", dtype="bfloat16", max_model_len=320, max_num_seqs=256, num_kv_blocks=4000
    )


def without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    assert len(made) == len(pairs), f"a key comes twice: {[key for key, _ in pairs]}"
    return made


def answers(
    llm: LLM, cases: list[tuple[dict[str, Any], int]], limit: int = LIMIT
) -> list[CompletionOutput]:
    """Answers to one question, one per form and seed."""
    chat: Any = [{"role": "user", "content": "Give me an example, as JSON, with many details."}]
    params = [
        SamplingParams(temperature=1.0, max_tokens=limit, seed=seed, structured_outputs=wanted)
        for wanted, seed in cases
    ]
    outputs = llm.chat([chat] * len(cases), params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def check_answers(llm: LLM, names: Iterable[str], seeds: range) -> None:
    cases = [(name, seed) for name in names for seed in seeds]
    outputs = answers(llm, [({"json": SCHEMAS[name]}, seed) for name, seed in cases])
    cut = []
    for (name, seed), answer in zip(cases, outputs, strict=True):
        if answer.finish_reason != "stop":
            cut.append((name, seed, answer.finish_reason, answer.text))
            continue
        value = json.loads(answer.text, object_pairs_hook=without_repeated_keys)
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(value)
    assert not cut


def test_every_answer_is_complete_and_valid(llm: LLM) -> None:
    check_answers(llm, SCHEMAS, range(2))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_to_300_seeds_is_complete_and_valid(llm: LLM, name: str) -> None:
    check_answers(llm, [name], range(300))


# What has no schema, and the tokens that must do.
OTHERS: dict[str, tuple[dict[str, Any], int]] = {
    "an object": ({"json_object": True}, 30),
    "a regular expression": ({"regex": r"[a-z]+( [a-z]+)*\. -- [A-Z][a-z]+"}, 40),
    "a grammar": ({"grammar": 'root ::= "(" root ")" root | [0-9]+'}, 40),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms_end_too(llm: LLM, name: str) -> None:
    wanted, limit = OTHERS[name]
    for answer in answers(llm, [(wanted, seed) for seed in range(12)], limit):
        assert answer.finish_reason == "stop", answer.text


@pytest.mark.parametrize("seeds", [[0], *by_night([[1, 2, 3]])], ids=str)
def test_white_space_can_be_forbidden(llm: LLM, seeds: list[int]) -> None:
    wanted = {"json": SCHEMAS["order"], "disable_any_whitespace": True}
    for answer in answers(llm, [(wanted, seed) for seed in seeds]):
        value = json.loads(answer.text)
        assert answer.text == json.dumps(
            value, separators=(",", ":"), ensure_ascii=False
        ) or " " in str(value)
        assert not answer.text.startswith(("{ ", "{\n"))
