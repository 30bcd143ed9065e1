"""Structured output through the official client: `response_format`, vLLM's `structured_outputs`,
and a public suite of schemas."""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from tests.kv_fleet import KVFleet
from tests.server_process import ServerProcess
from tests.text.json_schema_suite import GROUPS

HELLO: Any = [{"role": "user", "content": "hello"}]
SHORT: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0}


class Box(pydantic.BaseModel):
    kind: Literal["small", "large"]
    sizes: list[int] = pydantic.Field(max_length=2)
    lid: bool | None


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def bias(server: ServerProcess) -> dict[str, int]:
    """Makes a random model end strings, lists and texts."""
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": '"]}'}).json()
    return {str(token): 12 for token in [*answer["tokens"], 2]}


def test_a_class_is_filled_in(client: openai.OpenAI, bias: dict[str, int]) -> None:
    for seed in range(5):
        answer = client.chat.completions.parse(
            model="tiny", messages=HELLO, response_format=Box, seed=seed, logit_bias=bias, **SHORT
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Box)


def test_log_probabilities_are_of_what_is_allowed(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "messages": HELLO,
        "logprobs": True,
        "top_logprobs": 5,
        "temperature": 0,
    }
    body = {"structured_outputs": {"choice": ["yes", "no"]}}
    choice = client.chat.completions.create(**options, extra_body=body).choices[0]
    assert choice.logprobs and choice.message.content in ("yes", "no")
    for entry in choice.logprobs.content or []:
        assert 1 <= len(entry.top_logprobs) <= 5
        assert min(other.logprob for other in entry.top_logprobs) > -1000 and entry.logprob > -1000


def test_a_stream_says_the_same(client: openai.OpenAI, bias: dict[str, int]) -> None:
    wanted: Any = {
        "type": "json_schema",
        "json_schema": {"name": "box", "schema": Box.model_json_schema()},
    }
    options: Any = {
        "model": "tiny",
        "messages": HELLO,
        "seed": 3,
        "logit_bias": bias,
        "response_format": wanted,
    }
    whole = client.chat.completions.create(**options, **SHORT).choices[0]
    pieces = [
        chunk.choices[0]
        for chunk in client.chat.completions.create(**options, **SHORT, stream=True)
    ]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
    assert pieces[-1].finish_reason == whole.finish_reason == "stop"
    Box.model_validate_json(whole.message.content or "")


def test_the_other_formats(client: openai.OpenAI, bias: dict[str, int]) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "logit_bias": bias}
    for seed in range(3):
        answer = client.chat.completions.create(
            **options, **SHORT, seed=seed, response_format={"type": "json_object"}
        )
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    plain = [
        client.chat.completions.create(**options, temperature=0, max_tokens=9, **more)
        for more in FREE
    ]
    assert len({answer.choices[0].message.content for answer in plain}) == 1


# Ways to ask for nothing.
FREE: list[dict[str, Any]] = [
    {},
    {"response_format": {"type": "text"}},
    {"extra_body": {"response_format": None, "structured_outputs": None}},
]


def test_completions_have_it_too(client: openai.OpenAI) -> None:
    more: Any = {"extra_body": {"structured_outputs": {"choice": ["red", "green"]}}}
    answer = client.completions.create(
        model="tiny", prompt=["a", "b"], n=3, temperature=9, seed=1, **more
    )
    assert {choice.text for choice in answer.choices} == {"red", "green"} and len(
        answer.choices
    ) == 6
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    more = {"extra_body": {"structured_outputs": {"regex": "[0-9]{4}"}}, "logprobs": 3}
    (choice,) = client.completions.create(model="tiny", prompt="a", temperature=0, **more).choices
    assert (
        choice.text.isdigit()
        and choice.logprobs is not None
        and len(choice.logprobs.tokens or []) == 5
    )


# What begins well: too many parts, and a rule that never ends. In what field, and where errors say
# that it is.
WIDE = "start: " + " | ".join(f'"c{i}"' for i in range(5000))
PROPERTIES = {"type": "object", "properties": {f"p{i}": {} for i in range(600)}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": PROPERTIES}}
STUCK: dict[str, tuple[dict[str, Any], str, str]] = {
    "wide": (
        {"structured_outputs": {"grammar": WIDE}},
        "structured_outputs.grammar",
        "fewer alternatives",
    ),
    "endless": (
        {"structured_outputs": {"grammar": 'start: "c" b\nb: b "c"'}},
        "structured_outputs.grammar",
        "nothing",
    ),
    "many properties": (
        {"structured_outputs": {"json": PROPERTIES}},
        "structured_outputs.json",
        "of at most 2000",
    ),
    "OpenAI's way": (
        {"response_format": FORMAT},
        "response_format.json_schema.schema",
        "such as optional properties",
    ),
}


@pytest.mark.parametrize("name", STUCK)
def test_what_fails_on_the_way_is_an_error_of_this_request(
    client: openai.OpenAI, name: str
) -> None:
    wanted, place, words = STUCK[name]
    more: Any = {"model": "tiny", "prompt": "a", "n": 2, "extra_body": wanted}
    with pytest.raises(
        openai.BadRequestError, match=f"{place}: after 1 tokens, .*{words}"
    ) as refusal:
        client.completions.create(**more)
    with pytest.raises(openai.APIError, match=f"{place}: after 1 tokens, .*{words}") as refused:
        list(client.completions.create(**more, stream=True))
    assert refusal.value.param == refused.value.param == place
    assert refused.value.type == "invalid_request_error"
    assert client.completions.create(model="tiny", prompt="a").choices[0].text


# What no finite text satisfies.
ITSELF = {
    "type": "object",
    "properties": {"a": {"$ref": "#"}},
    "required": ["a"],
    "additionalProperties": False,
}
NEVER_ENDING: dict[str, dict[str, Any]] = {
    "a property": {"json": ITSELF},
    "two properties": {
        "json": ITSELF
        | {"properties": {key: {"$ref": "#"} for key in "ab"}, "required": ["a", "b"]}
    },
    "items": {"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}},
    "one of two": {
        "json": {
            "anyOf": [
                {"$ref": "#"},
                {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
            ]
        }
    },
    "itself": {"json": {"$ref": "#"}},
    "right": {"grammar": 'start: "a" start'},
    "left": {"grammar": 'start: start "a"'},
    "middle": {"grammar": 'start: "a" start "b"'},
    "twice": {"grammar": 'start: ("a" | "b") start start'},
    "letters": {"grammar": 'start: ("a" | "b") start'},
    "words": {"grammar": "start: /[a-z]+/ start"},
    "in turns": {"grammar": 'start: "a" b\nb: "b" start | "c" b'},
}


@pytest.mark.parametrize("name", NEVER_ENDING)
async def test_what_never_ends_is_refused_or_cut_off_and_hurts_no_other(
    server: ServerProcess, name: str
) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0
    ) as client:

        async def texts(**fields: Any) -> list[str]:
            options: Any = {"model": "tiny", "prompt": "abc", "max_tokens": 100, **fields}
            answer = await client.completions.create(**options)
            assert {choice.finish_reason for choice in answer.choices} == {"length"}
            return [choice.text for choice in answer.choices]

        async def endless() -> None:
            wanted = {"structured_outputs": NEVER_ENDING[name]}
            try:
                made = await texts(n=2, seed=1, extra_body=wanted)
            except openai.BadRequestError as refusal:
                assert str(refusal.param).startswith(
                    f"structured_outputs.{next(iter(NEVER_ENDING[name]))}"
                )
            else:
                assert len({*made}) == 2 and re.fullmatch(r'[a-z[{":\s]{190,}', "".join(made)), made

        plain: Any = {"temperature": 0, "extra_body": {"ignore_eos": True}}
        alone = await texts(**plain)
        together, _ = await asyncio.gather(texts(**plain), endless())
        assert together == alone


@pytest.mark.parametrize("share", [8, pytest.param(1, marks=pytest.mark.nightly)])
async def test_all_answers_are_valid(
    server: ServerProcess, bias: dict[str, int], share: int
) -> None:
    """For schemas of the public suite: a refusal that says where, or JSON that is valid, whatever
    the random model would write."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    validator = jsonschema.Draft202012Validator
    schemas = [(name, schema) for name, schema, _ in GROUPS[::share] if isinstance(schema, dict)]
    places = asyncio.Semaphore(16)
    ends: list[str] = []

    async def ask(name: str, schema: dict[str, Any]) -> None:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "suite", "schema": schema}}
        options: Any = {
            "model": "tiny",
            "messages": HELLO,
            "n": 2,
            "seed": 7,
            "logit_bias": bias,
            "response_format": wanted,
        }
        async with places:
            try:
                answer = await client.chat.completions.create(**options, **SHORT)
            except openai.BadRequestError as refusal:
                assert str(refusal.param).startswith("response_format.json_schema.schema"), (
                    name,
                    refusal,
                )
                return
        for choice in answer.choices:
            ends.append(choice.finish_reason)
            if choice.finish_reason == "stop":
                value = json.loads(choice.message.content or "")
                validator(schema).validate(value)

    await asyncio.gather(*(ask(*schema) for schema in schemas))
    assert len(ends) > len(schemas) * 0.7 and ends.count("stop") > 0.9 * len(ends), (
        "most are followed to their end"
    )


@pytest.mark.nightly
def test_prefill_and_decode_on_two_engines(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path, client: openai.OpenAI
) -> None:
    """A router passes the fields on, and the engine that decodes follows the grammar from the first
    token on."""
    more: Any = {
        "extra_body": {"structured_outputs": {"regex": "[a-z]{5}-[0-9]{3}"}},
        "temperature": 0,
    }
    whole = client.completions.create(model="tiny", prompt="abc" * 20, **more).choices[0]
    with KVFleet(tiny_model, tmp_path, 1, 1) as fleet:
        other = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="unused", max_retries=0)
        answer = other.completions.create(model="tiny", prompt="abc" * 20, **more).choices[0]
        assert (answer.text, answer.finish_reason) == (whole.text, "stop")
        with pytest.raises(openai.BadRequestError, match="unclosed group"):
            other.completions.create(
                model="tiny", prompt="a", extra_body={"structured_outputs": {"regex": "("}}
            )


# What is wrong with a request, and where its error says that it is.
UNWRITABLE: dict[str, tuple[dict[str, Any], str]] = {
    "recursion": ({"structured_outputs": {"json": ITSELF}}, "structured_outputs.json"),
    "OpenAI's way": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": ITSELF},
            }
        },
        "response_format.json_schema.schema",
    ),
    "a required name that is forbidden": (
        {"structured_outputs": {"json": {**ITSELF, "properties": {"b": {}}}}},
        "structured_outputs.json",
    ),
    "EBNF": ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_cannot_be_written_is_refused_at_once(client: openai.OpenAI, name: str) -> None:
    wanted, place = UNWRITABLE[name]
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model="tiny", prompt="a", extra_body=wanted)
    assert refusal.value.param == place and "after" not in str(refusal.value)


def test_an_answer_ends_within_its_tokens_and_has_no_other_properties(
    client: openai.OpenAI,
) -> None:
    """Without any bias: a random model never ends a string by itself."""

    class Open(pydantic.BaseModel):
        name: str
        count: int
        parts: list[str]

    for seed in range(4):
        options: Any = {
            "model": "tiny",
            "messages": HELLO,
            "seed": seed,
            "max_tokens": 60,
            "stop": ["a", '"', ":"],
        }
        choice = client.chat.completions.parse(response_format=Open, **options).choices[0]
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Open)
        assert json.loads(choice.message.content or "").keys() == {"name", "count", "parts"}


def test_white_space_can_be_forbidden(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    for seed in range(4):
        answer = client.completions.create(
            model="tiny", prompt="a", seed=seed, max_tokens=30, extra_body=wanted
        )
        assert re.fullmatch(r'\{"a":(true|false)\}', answer.choices[0].text)
