"""The server through the official client: what a program that was written for OpenAI's API sees."""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import openai
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families as metric_families

from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import CompletionOutput, EngineStats, RequestOutput
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.errors import EngineDeadError
from nanovllm.engine.request_times import RequestTimes
from nanovllm.server.admission import Admission
from nanovllm.server.app import add_token_routes
from nanovllm.server.chat import ChatGeneration
from nanovllm.server.completions import CompletionEndpoint, CompletionGeneration, name_of_bytes
from nanovllm.server.metrics import Metrics
from nanovllm.server.protocol import ChatCompletionRequest, CompletionRequest
from nanovllm.text.prompts import EngineLimits
from nanovllm.text.tokenizer import Tokenizer
from tests.oracle import make_tokenizer
from tests.server_process import ServerProcess, wait_until

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "nanovllm")
    assert model.model_extra is not None and model.model_extra["max_model_len"] == 256
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_completion_tokens=6,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert (
        answer.object == "chat.completion"
        and answer.id.startswith("chatcmpl-")
        and answer.model == "tiny"
    )
    (choice,) = answer.choices
    assert (
        choice.message.role == "assistant"
        and choice.finish_reason == "length"
        and choice.logprobs is None
    )
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (
        6,
        len("<user>hello\n<assistant>"),
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6


def test_a_chat_stream_says_the_same(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 30, "temperature": 0, "n": 2}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for choice in whole.choices:
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert [piece.delta.role for piece in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(piece.delta.content or "" for piece in mine) == choice.message.content
        assert [piece.finish_reason for piece in mine if piece.finish_reason] == [
            choice.finish_reason
        ]
        assert mine[-1].finish_reason is not None, "the reason comes last"


def test_the_clients_stream_helper_builds_the_whole_answer(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": HELLO, "temperature": 0}
    # The helper takes an answer that was cut off for an error.
    options["extra_body"] = {"structured_outputs": {"choice": ["well begun"]}}
    with client.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert (
        final.choices[0].message.content
        == client.chat.completions.create(**options).choices[0].message.content
    )
    assert (kinds[0], kinds[-1]) == ("chunk", "content.done") and "content.delta" in kinds


def test_what_is_not_there_becomes_an_error_of_the_client(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    with pytest.raises(openai.NotFoundError, match="no Responses API: use /v1/chat/completions"):
        client.responses.create(model="tiny", input="hello")
    with pytest.raises(openai.NotFoundError, match="has no embeddings"):
        client.embeddings.create(model="tiny", input="hello")
    without_version = client.with_options(base_url=server.url)
    with pytest.raises(
        openai.NotFoundError, match="the route is /v1/chat/completions: give clients the base URL"
    ):
        without_version.chat.completions.create(model="tiny", messages=HELLO)
    with pytest.raises(
        openai.BadRequestError, match="maximum context length is 256 tokens"
    ) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")


async def test_the_role_comes_with_the_first_token() -> None:
    """Benchmarks take the first chunk of a chat for its first token: it must not come while the
    prompt is computed."""
    engine: Any = SimpleNamespace(name="tiny", tokenizer=None)
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}])  # type: ignore[list-item]
    generation = ChatGeneration(engine, body, [[1]], SamplingParams(n=2))
    prefilled = asyncio.Event()

    async def outputs() -> AsyncIterator[tuple[int, RequestOutput]]:
        await prefilled.wait()
        for index, text in ((1, ""), (0, "x"), (1, "y")):
            yield (
                0,
                RequestOutput("r", None, [1], [CompletionOutput(index, text, [7])], finished=False),
            )

    generation.outputs = outputs  # type: ignore[method-assign]
    choices = generation.choices()
    first = asyncio.ensure_future(anext(choices))
    await asyncio.sleep(0.05)
    assert not first.done(), "nothing comes before the first token"
    prefilled.set()
    found = [await first, *[choice async for choice in choices]]
    assert [(c.index, c.delta.role or None, c.delta.content) for c in found] == [
        (1, "assistant", ""),
        (0, "assistant", ""),
        (0, None, "x"),
        (1, None, "y"),
    ]


async def test_a_stream_has_no_line_breaks_but_its_own() -> None:
    """Some readers of server-sent events split lines at U+0085, U+2028 and U+2029, too."""
    text = "a\u2028b\u2029c\u0085d\n\r\x0b\x0c\x1c\u00c2\u00e9\u2027"
    engine: Any = SimpleNamespace(name="tiny\u2028", tokenizer=None)
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}])  # type: ignore[list-item]
    generation = ChatGeneration(engine, body, [[1]], SamplingParams())

    async def outputs() -> AsyncIterator[tuple[int, RequestOutput]]:
        yield 0, RequestOutput("r", None, [1], [CompletionOutput(0, text, [7])], finished=True)

    generation.outputs = outputs  # type: ignore[method-assign]
    events = [event async for event in generation.events()]
    for event in events:
        assert event.decode().splitlines()[1:] == [""], "one line, and an empty one"
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == text
    assert chunks[0]["model"] == engine.name


def test_usage_is_left_out_of_streams_unless_asked_for(server: ServerProcess) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "abc"}),
    ):
        events = server.events(path, body | {"max_tokens": 3})
        assert all("usage" not in event for event in events)
        assert all(len(event["choices"]) == 1 for event in events)


def test_chat_logprobs(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 5,
        "temperature": 0,
        "logprobs": True,
    }
    options["extra_body"] = {"ignore_eos": True}
    whole = client.chat.completions.create(**options, top_logprobs=3).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    assert len(whole.logprobs.content) == 5
    for entry in whole.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob, "the likeliest token was taken"
        assert (
            entry.bytes is not None and bytes(entry.bytes).decode("utf-8", "replace") == entry.token
        )
    stream = client.chat.completions.create(**options, top_logprobs=3, stream=True)
    pieces = [chunk.choices[0].logprobs for chunk in stream]
    assert [e for piece in pieces if piece for e in piece.content or []] == whole.logprobs.content
    bare = client.chat.completions.create(**options).choices[0]
    assert bare.logprobs is not None and bare.logprobs.content is not None
    assert bare.logprobs.content[0].top_logprobs == []


def test_completions_of_texts_and_token_ids(client: openai.OpenAI, server: ServerProcess) -> None:
    options: Any = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    ids = {
        text: server.post("/tokenize", {"prompt": text}).json()["tokens"] for text in ("abc", "de")
    }
    alone = {
        text: client.completions.create(prompt=text, **options).choices[0].text for text in ids
    }
    several = client.completions.create(prompt=["abc", "de"], n=2, **options)
    assert several.object == "text_completion"
    assert [(c.index, c.text) for c in several.choices] == list(
        enumerate([alone["abc"]] * 2 + [alone["de"]] * 2)
    )
    assert several.usage is not None and several.usage.prompt_tokens == 5
    as_ids = client.completions.create(prompt=ids["abc"], **options)
    assert [c.text for c in as_ids.choices] == [alone["abc"]]
    lists = client.completions.create(prompt=list(ids.values()), **options)
    assert [c.text for c in lists.choices] == list(alone.values())
    streamed = ["", ""]
    for chunk in client.completions.create(prompt=["abc", "de"], stream=True, **options):
        assert chunk.object == "text_completion"
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == list(alone.values())


def test_sixteen_tokens_by_default_and_the_rest_of_the_context_in_a_chat(
    server: ServerProcess,
) -> None:
    assert server.complete(ignore_eos=True)["usage"]["completion_tokens"] == 16
    body = {"messages": HELLO, "ignore_eos": True, "temperature": 0}
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    assert usage["total_tokens"] == 256


def test_echo_and_logprobs_of_completions(server: ServerProcess) -> None:
    answer = server.complete(prompt="abcde", echo=True, logprobs=2, max_tokens=3, ignore_eos=True)
    (choice,) = answer["choices"]
    lists = choice["logprobs"]
    assert choice["text"].startswith("abcde")
    assert lists["tokens"][:5] == list("abcde") and len(lists["tokens"]) == 8
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert all(value < 0 for value in lists["token_logprobs"][1:])
    assert lists["text_offset"][:6] == [0, 1, 2, 3, 4, 5]
    check_offsets(choice)
    told = list(zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True))[
        1:
    ]
    assert all(2 <= len(top) <= 3 and top[token] == logprob for token, logprob, top in told)
    assert any(len(top) == 3 for _, _, top in told), (
        "a token that is not one of the two likeliest ones"
    )

    only = server.complete(prompt=["abcde", "xy"], echo=True, logprobs=2, max_tokens=0)
    assert [c["text"] for c in only["choices"]] == ["abcde", "xy"]
    again = only["choices"][0]["logprobs"]["token_logprobs"]
    assert again[0] is None and again[1:] == pytest.approx(lists["token_logprobs"][1:5], abs=1e-3)
    assert (
        only["usage"]["completion_tokens"] == 0 and only["choices"][0]["finish_reason"] == "length"
    )

    body = {
        "prompt": "abcde",
        "echo": True,
        "logprobs": 2,
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
    }
    pieces = [event["choices"][0] for event in server.events("/v1/completions", body)]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    for name in ("tokens", "text_offset"):
        assert [
            v for piece in pieces if piece["logprobs"] for v in piece["logprobs"][name]
        ] == lists[name]


def bytes_of(name: str) -> bytes:
    """The bytes of a token in OpenAI's spelling: a text, or bytes that are no text by
    themselves."""
    if name.startswith("token_id:"):  # the model has more ids than the tokenizer
        return b""
    if not name.startswith("bytes:"):
        return name.encode()
    return re.sub(
        rb"\\x(..)",
        lambda found: bytes.fromhex(found[1].decode()),
        name.removeprefix("bytes:").encode(),
    )


def test_names_of_tokens_in_openais_spelling() -> None:
    names = [
        name_of_bytes(spelled)
        for spelled in (b" the", "é".encode(), b"\xe6\x97", b" \xe2\x88", b"\\\n\x9c")
    ]
    assert names == [" the", "é", r"bytes:\xe6\x97", r"bytes: \xe2\x88", r"bytes:\x5c\x0a\x9c"]
    assert bytes_of(names[-1]) == b"\\\n\x9c"


def check_offsets(choice: dict[str, Any]) -> None:
    """Each token begins in the returned text where its offset says; a part of a character where the
    character begins."""
    lists, text = choice["logprobs"], choice["text"]
    spelled = [
        b"" if name in ("<pad>", "<s>", "</s>") else bytes_of(name) for name in lists["tokens"]
    ]
    assert b"".join(spelled).decode(errors="replace") == text
    for i, (token, offset) in enumerate(zip(spelled, lists["text_offset"], strict=True)):
        before, rest = b"".join(spelled[:i]), b"".join(spelled[i:])
        # Of a text that is cut inside a character, one more character is there than before the cut.
        is_cut = len(before.decode(errors="replace")) + len(rest.decode(errors="replace")) > len(
            text
        )
        if token:  # a special token is not part of the text
            assert offset == len(before.decode(errors="replace")) - is_cut, (i, lists["tokens"])
        if not lists["tokens"][i].startswith("bytes:"):  # others are text
            assert text[offset:].startswith(token.decode())


JAPANESE, EMOJI = "日本語", "a👩‍🚀é"


@pytest.mark.parametrize("text", [JAPANESE, EMOJI])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 12])
def test_logprobs_of_completions_outside_english(
    server: ServerProcess, text: str, as_ids: bool, max_tokens: int
) -> None:
    ids = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    body: dict[str, Any] = {
        "prompt": ids if as_ids else text,
        "echo": True,
        "logprobs": 5,
        "temperature": 0,
    }
    body |= {"max_tokens": max_tokens, "ignore_eos": True}
    (choice,) = server.complete(**body)["choices"]
    lists = choice["logprobs"]
    assert choice["text"].startswith(text)
    assert lists["tokens"][: len(ids)] == [
        chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}" for byte in text.encode()
    ], "the tiny model's tokens are bytes"
    expected = [i for i, character in enumerate(text) for _ in character.encode()]
    assert lists["text_offset"][: len(ids)] == expected
    check_offsets(choice)
    assert lists["top_logprobs"][0] is None
    assert all(len(top) in (5, 6) for top in lists["top_logprobs"][1:]), (
        "five that are told apart, and the chosen one"
    )
    for name, logprob, top in list(
        zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True)
    )[1:]:
        assert top[name] == logprob
    pieces = [event["choices"][0] for event in server.events("/v1/completions", body)]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [
            v for piece in pieces if piece["logprobs"] for v in piece["logprobs"][key]
        ] == lists[key]


def test_offsets_of_completions_with_stop_strings(server: ServerProcess) -> None:
    ids = {c: server.post("/tokenize", {"prompt": c}).json()["tokens"] for c in "a語"}
    bias = {str(ids["a"][0]): 100}
    body: dict[str, Any] = {
        "prompt": JAPANESE,
        "echo": True,
        "logprobs": 1,
        "logit_bias": bias,
        "ignore_eos": True,
    }
    (choice,) = server.complete(**body, max_tokens=5, stop=["aaa"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (JAPANESE, "stop")
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 5], (
        "where they are before the cut"
    )
    (choice,) = server.complete(**body, max_tokens=3, stop=["語"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (JAPANESE + "aaa", "length"), (
        "an echo is not searched"
    )


@pytest.mark.parametrize("split", [1, 2, 3])
@pytest.mark.parametrize("echo", [False, True])
def test_a_character_that_the_prompt_begins_is_completed(
    server: ServerProcess, split: int, echo: bool
) -> None:
    """Whatever the model samples: the bias makes the next byte of the character certain."""
    prompt = server.post("/tokenize", {"prompt": "a👩"}).json()["tokens"]
    given, byte = prompt[: 1 + split], prompt[1 + split]
    options: dict[str, Any] = {
        "prompt": given,
        "echo": echo,
        "logprobs": 0,
        "ignore_eos": True,
        "max_tokens": 1,
    }
    (choice,) = server.complete(**options, logit_bias={str(byte): 100})["choices"]
    before = "a" if echo else ""
    assert choice["text"] == before + ("👩" if split == 3 else "\ufffd")
    assert choice["logprobs"]["text_offset"][-1] == len(before)
    letter = server.post("/tokenize", {"prompt": "b"}).json()["tokens"][0]
    (choice,) = server.complete(**options, logit_bias={str(letter): 100})["choices"]
    before = "a\ufffd" if echo else ""
    assert choice["text"] == before + "b", "what no byte continues is the prompt's"
    assert choice["logprobs"]["text_offset"][-1] == len(before)
    if echo:
        (choice,) = server.complete(**options | {"max_tokens": 0})["choices"]
        assert choice["text"] == "a\ufffd"


def test_a_form_does_not_complete_the_prompts_character(server: ServerProcess) -> None:
    prompt = server.post("/tokenize", {"prompt": "a👩"}).json()["tokens"][:-1]
    body = {
        "prompt": prompt,
        "echo": True,
        "logprobs": 0,
        "max_tokens": 8,
        "structured_outputs": {"choice": ["été"]},
    }
    (choice,) = server.complete(**body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a\ufffdété", "stop")
    body["echo"] = False
    assert server.complete(**body)["choices"][0]["text"] == "été"


def test_an_echo_with_logprobs_waits_for_a_prompt_of_several_steps(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    body: dict[str, Any] = {
        "prompt": ["abcdefgh" * 12, "x" * 90],
        "echo": True,
        "logprobs": 1,
        "n": 2,
    }
    body |= {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
    options = ["--max-num-batched-tokens", "16", "--max-num-seqs", "4"]
    with ServerProcess(tiny_model, tmp_path, *options) as server:
        for changes in ({}, {"max_tokens": 0}):
            whole = server.complete(**body | changes)["choices"]
            pieces = [
                event["choices"][0] for event in server.events("/v1/completions", body | changes)
            ]
            for choice in whole:
                mine = [piece for piece in pieces if piece["index"] == choice["index"]]
                assert "".join(piece["text"] for piece in mine) == choice["text"]
                for name in ("tokens", "text_offset"):
                    told = [
                        v for piece in mine if piece["logprobs"] for v in piece["logprobs"][name]
                    ]
                    assert told == choice["logprobs"][name]


def test_top_logprobs_of_completions_have_the_sampled_token(server: ServerProcess) -> None:
    # Token 68 is "b". Only the bias makes it likely, and log-probabilities are those before any
    # bias.
    options: dict[str, Any] = {"logit_bias": {"68": 100}, "max_tokens": 4, "ignore_eos": True}
    for count in (0, 1, 3):
        lists = server.complete(**options, logprobs=count)["choices"][0]["logprobs"]
        assert lists["tokens"] == ["b"] * 4
        for logprob, top in zip(lists["token_logprobs"], lists["top_logprobs"], strict=True):
            assert top["b"] == logprob and count <= len(top) <= count + 1


def test_prompt_logprobs(server: ServerProcess) -> None:
    entries = server.complete(prompt="abc", prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert entries[0] is None and len(entries) == 3
    assert all(
        {"logprob", "rank", "decoded_token"} == set(e) for p in entries[1:] for e in p.values()
    )
    body = {"messages": HELLO, "prompt_logprobs": 0, "max_tokens": 1}
    assert len(server.post("/v1/chat/completions", body).json()["prompt_logprobs"]) == 23


def test_a_request_id_that_a_client_uses_again(server: ServerProcess) -> None:
    """A client that leaves, and asks again under the same X-Request-Id, gets the answer to its
    second question."""
    body = {"prompt": "abc", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {"X-Request-Id": "again"}
    expected = server.complete(**body)["choices"][0]["text"]
    for _ in range(10):
        long = {"prompt": "another text", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with server.client.stream(
            "POST", "/v1/completions", json=long, headers=headers
        ) as response:
            next(response.iter_bytes())
        answer = server.client.post("/v1/completions", json=body, headers=headers).json()
        assert answer["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("stop", "length"),
        ("length", "length"),
        ("abort", "abort"),
        ("error", "error"),
        (None, None),
    ],
)
async def test_why_a_completion_without_tokens_ended(reason: str | None, told: str | None) -> None:
    """With max_tokens 0 the engine generates a token that the client does not get; but an abort is
    an abort."""
    body = CompletionRequest(prompt="abc", max_tokens=0, echo=True)
    engine: Any = SimpleNamespace(name="tiny", tokenizer=Tokenizer(make_tokenizer()))
    generation = CompletionGeneration(engine, body, [[5, 6, 7]], SamplingParams())
    piece = CompletionOutput(0, text="x", token_ids=[8], finish_reason=reason)
    choice = await generation._choice(
        0, RequestOutput("r", None, [5, 6, 7], [piece], bool(reason)), piece
    )
    assert (choice.finish_reason, choice.text) == (told, "abc")


def test_stop_strings_and_stop_tokens(server: ServerProcess) -> None:
    body = {"max_tokens": 40, "ignore_eos": True}
    text = server.complete(**body)["choices"][0]["text"]
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable())
    before = text[: text.index(stop)]
    for extra, expected in (({}, before), ({"include_stop_str_in_output": True}, before + stop)):
        choice = server.complete(**body, stop=[stop], **extra)["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
            expected,
            "stop",
            stop,
        )
    events = server.events(
        "/v1/completions", {"prompt": "abc", "temperature": 0, "stop": stop, **body}
    )
    assert "".join(event["choices"][0]["text"] for event in events) == before
    token = server.post("/tokenize", {"prompt": stop}).json()["tokens"][0]
    choice = server.complete(**body, stop_token_ids=[token])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        before,
        "stop",
        token,
    )


def test_sampling_options_reach_the_engine(server: ServerProcess) -> None:
    def text(**options: Any) -> str:
        return server.complete(**{"max_tokens": 12, "ignore_eos": True} | options)["choices"][0][
            "text"
        ]

    assert text(temperature=1, seed=1) == text(temperature=1, seed=1) != text(temperature=1, seed=2)
    assert (
        text(temperature=1, top_k=1)
        == text(temperature=1, min_p=1.0)
        == text(temperature=1, top_p=1e-9)
        == text()
    )
    assert text(logit_bias={"68": 100}) == "b" * 12
    assert text(logit_bias={"68": 100, "69": 50}, bad_words=["bb"]) == "bc" * 6
    assert text(repetition_penalty=0.01) != text()
    biased = {"logit_bias": {"68": 10}}
    assert text(**biased, frequency_penalty=2, presence_penalty=2).count("b") < text(
        **biased
    ).count("b")


def test_equal_prompts_share_cached_tokens_unless_salted(server: ServerProcess) -> None:
    def cached(**options: Any) -> int:
        usage = server.complete(prompt="a prompt that is long enough to fill a block", **options)[
            "usage"
        ]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") == 32
    assert cached(cache_salt="yours") == 0


def test_the_assistants_message_can_be_continued(server: ServerProcess) -> None:
    chat = [*HELLO, {"role": "assistant", "content": "I am"}]
    for options, end in (
        ({"continue_final_message": True}, "<assistant>I am"),
        ({"add_generation_prompt": False}, "<assistant>I am\n"),
        ({}, "<assistant>I am\n<assistant>"),
    ):
        tokens = server.post("/tokenize", {"messages": chat, **options}).json()["tokens"]
        assert (
            server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "<user>hello\n" + end
        )
        answer = server.post("/v1/chat/completions", {"messages": chat, "max_tokens": 2, **options})
        assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
    parts = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        }
    ]
    tokens = server.post("/tokenize", {"messages": parts}).json()["tokens"]
    assert (
        server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        == "<system>a\nb\n<assistant>"
    )


def test_tokenize_and_detokenize(server: ServerProcess) -> None:
    answer = server.post(
        "/tokenize", {"model": "tiny", "prompt": "héllo", "return_token_strs": True}
    ).json()
    assert answer["count"] == len(answer["tokens"]) == 6 and answer["max_model_len"] == 256
    assert answer["token_strs"] == ["h", "Ã", "©", "l", "l", "o"]
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "héllo"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


async def test_long_conversions_do_not_run_on_the_event_loop() -> None:
    threads = []

    def convert(*_: Any, **__: Any) -> list[str]:
        threads.append(threading.get_ident())
        return ["a"]

    tokenizer = SimpleNamespace(
        convert_ids_to_tokens=convert, backend=SimpleNamespace(decode_batch=convert)
    )
    limits = EngineLimits(max_model_len=256, max_request_tokens=256, vocab_size=320)
    engine = SimpleNamespace(tokenizer=tokenizer, limits=limits)
    app = FastAPI()
    encode = AsyncMock(return_value=[3])
    engine.encode = encode
    endpoint: Any = SimpleNamespace(engine=engine, check=lambda body: None)
    add_token_routes(app, endpoint)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        text = (await client.post("/detokenize", json={"tokens": [3]})).json()
        strings = (
            await client.post("/tokenize", json={"prompt": "a", "return_token_strs": True})
        ).json()
    assert text == {"prompt": "a"} and strings["token_strs"] == ["a"]
    assert len(threads) == 2 and threading.get_ident() not in threads


async def test_others_get_their_turn_between_a_requests_prompts() -> None:
    turns = []

    async def encode(text: str, add_special_tokens: bool) -> list[int]:
        turns.append("prompt")
        return [3]

    async def somebody_else() -> None:
        while True:
            turns.append("other")
            await asyncio.sleep(0)

    limits = EngineLimits(max_model_len=256, max_request_tokens=256, vocab_size=320)
    engine: Any = SimpleNamespace(name="tiny", limits=limits, encode=encode)
    engine.num_requests = 0  # so that any number may come in
    engine.config = SimpleNamespace(max_num_waiting=1)

    async def add_request(*arguments: Any) -> None:
        raise EngineDeadError("all that matters here is over by now")

    engine.add_request = add_request
    other = asyncio.create_task(somebody_else())
    endpoint = CompletionEndpoint(Admission(engine))
    with pytest.raises(EngineDeadError):
        await endpoint.submit_request(CompletionRequest(prompt=["a"] * 5))
    other.cancel()
    assert turns.count("prompt") == 5 and turns.count("other") >= 4


def test_harmless_and_empty_fields_change_nothing(server: ServerProcess) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
    }
    empty: dict[str, Any] = {
        "tools": [],
        "tool_choice": "none",
        "functions": None,
        "response_format": {"type": "text"},
    }
    empty |= {
        "modalities": ["text"],
        "audio": None,
        "suffix": None,
        "best_of": 1,
        "reasoning_effort": "none",
        "echo": False,
        "add_special_tokens": False,
        "return_token_ids": None,
        "return_tokens_as_token_ids": False,
        "logit_bias": None,
        "stop": None,
    }
    body = {"messages": HELLO, "max_tokens": 4, "temperature": 0}
    plain = server.post("/v1/chat/completions", body).json()["choices"]
    assert server.post("/v1/chat/completions", body | harmless | empty).json()["choices"] == plain
    for _ in range(3):
        assert server.complete(never_heard_of=1)["choices"]
    assert server.text.count("never_heard_of") == 1, "one warning a field"


def test_best_of_may_equal_n_and_seed_may_be_none(server: ServerProcess) -> None:
    both = server.complete(max_tokens=3, n=2, best_of=2)["choices"]
    assert [choice["index"] for choice in both] == [0, 1]
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 5, "ignore_eos": True}
    drawn = {server.complete(seed=-1, **options)["choices"][0]["text"] for _ in range(3)}
    assert len(drawn) == 3, "-1 is no seed"
    repeated = {server.complete(seed=-2, **options)["choices"][0]["text"] for _ in range(3)}
    assert len(repeated) == 1, "other numbers below 0 are seeds"


async def test_the_asynchronous_client_runs_many_at_once(server: ServerProcess) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)

    async def one(i: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"{i}"}],
            max_tokens=20,
            temperature=0,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    together = await asyncio.gather(*(one(i) for i in range(12)))
    assert [await one(i) for i in range(12)] == together
    await client.close()


@pytest.mark.parametrize("leave", ["in a stream", "while waiting for the whole answer"])
def test_clients_that_go_away_free_their_blocks(server: ServerProcess, leave: str) -> None:
    wait_until(server.is_idle)
    body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "n": 4}
    # This model needs a few hundred milliseconds for the whole answer: on a busy machine it may be
    # there before the client has left, and the attempt shows nothing. It never shows anything if
    # leaving does not abort.
    aborted = 'request_success_total{finished_reason="abort"}'
    for _ in range(20):
        before = server.metrics()[aborted]
        if leave == "in a stream":
            with server.client.stream(
                "POST", "/v1/completions", json=body | {"stream": True}
            ) as response:
                next(response.iter_lines())
        else:
            post_and_leave(server, json.dumps(body).encode())
        wait_until(server.is_idle, 60)
        if server.metrics()[aborted] == before + 4:
            return
    raise AssertionError("nobody noticed that the client had left")


def post_and_leave(server: ServerProcess, content: bytes) -> None:
    """Send a request for a whole answer, and hang up once it runs."""
    host, port = server.url.removeprefix("http://").split(":")
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        f"application/json\r\nContent-Length: {len(content)}"
    )
    before = server.metrics()["generation_tokens_total"]
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + content)
        wait_until(lambda: server.metrics()["generation_tokens_total"] > before)


def test_metrics_have_names_and_move(server: ServerProcess) -> None:
    before = server.metrics()
    usage = server.complete(prompt="m" * 64, max_tokens=7, ignore_eos=True)["usage"]
    after = server.metrics()
    grown = {name: after[name] - before[name] for name in after}
    assert grown["prompt_tokens_total"] == usage["prompt_tokens"] == 64
    assert grown["generation_tokens_total"] == 7
    assert grown['request_success_total{finished_reason="length"}'] == 1
    assert (
        grown["time_to_first_token_seconds_count"]
        == grown["e2e_request_latency_seconds_count"]
        == 1
    )
    assert grown["inter_token_latency_seconds_count"] == 6
    assert (
        0 < grown["time_to_first_token_seconds_sum"] < grown["e2e_request_latency_seconds_sum"] < 60
    )
    assert grown["prefix_cache_queries_total"] == 64
    server.complete(prompt="m" * 64)
    assert server.metrics()["prefix_cache_hits_total"] - after["prefix_cache_hits_total"] == 48
    assert {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
    } <= set(after)


def test_metrics_say_which_engine(server: ServerProcess) -> None:
    samples = [s for family in metric_families(server.get("/metrics").text) for s in family.samples]
    assert {(s.labels["model_name"], s.labels["engine"]) for s in samples} == {("tiny", "0")}

    each = [
        EngineStats(3, 1, kv_cache_usage=0.5, num_hit_tokens=7, num_waves=2),
        EngineStats(4, kv_cache_usage=0.75, num_waves=3),
    ]
    stats = EngineStats.together(each)
    assert (stats.num_running, stats.kv_cache_usage, stats.num_waves) == (7, 0.625, 3)
    engine: Any = SimpleNamespace(
        config=EngineConfig("tiny", data_parallel_size=2), stats=stats, name="tiny"
    )
    engine.limits, engine.trace_settings = SimpleNamespace(max_model_len=256), []
    metrics = Metrics(engine)
    times, last = (
        RequestTimes(0.0, 5),
        CompletionOutput(0, "a", [1, 2], finish_reason="stop", engine=1),
    )
    metrics.tokens(times, CompletionOutput(1, "b", [3]), 1.0)
    metrics.tokens(times, last, 2.0)
    metrics.tokens(times, CompletionOutput(0, finish_reason="error"), 3.0)
    metrics.finished(times, last, 2.0)
    found: dict[str, dict[str, float]] = {}
    for family in metric_families(bytes(metrics.response().body).decode()):
        for s in family.samples:
            if s.labels.get("finished_reason", "stop") == "stop" and "le" not in s.labels:
                found.setdefault(s.name.removeprefix("vllm:"), {})[s.labels["engine"]] = s.value
    for name, values in {
        "num_requests_running": (3, 4),
        "num_requests_waiting": (1, 0),
        "kv_cache_usage_perc": (0.5, 0.75),
        "prefix_cache_hits_total": (7, 0),
        "generation_tokens_total": (1, 2),
        "request_success_total": (0, 1),
        "e2e_request_latency_seconds_sum": (0, 2),
    }.items():
        assert found[name] == dict(zip("01", values, strict=True)), name


def test_health_version_and_description(server: ServerProcess) -> None:
    import nanovllm

    assert server.get("/health").status_code == 200
    assert server.get("/version").json() == {"version": nanovllm.__version__}
    paths = server.get("/openapi.json").json()["paths"]
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/metrics",
    } <= set(paths)


def test_the_course_model_answers_the_line_that_is_printed(tmp_path: pathlib.Path) -> None:
    """The whole way, with the curl line taken from the server's own words."""
    import subprocess

    with ServerProcess(pathlib.Path("smollm2-135m"), tmp_path, "--num-kv-blocks", "64") as server:
        line = server.text[server.text.index("  curl ") :].split("\n\n")[0]
        answer = subprocess.run(
            ["bash", "-c", line], capture_output=True, timeout=60, check=True
        ).stdout
        assert "Tokyo" in json.loads(answer)["choices"][0]["message"]["content"]
        model, tokens = (
            server.get("/v1/models").json()["data"][0],
            server.post("/tokenize", {"prompt": "a"}).json(),
        )
        assert model["max_model_len"] == tokens["max_model_len"] == 64 * 16, (
            "the pool is smaller than the model's context"
        )
        assert server.stop() == 0


@pytest.fixture(scope="module")
def strict(
    tiny_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A strict server of a model that recommends greedy sampling."""
    folder = tmp_path_factory.mktemp("strict")
    model = shutil.copytree(tiny_model, folder / "model")
    (model / "generation_config.json").write_text('{"temperature": 0}')
    with ServerProcess(
        model, folder, "--strict", "--served-model-name", "tiny", "other/name"
    ) as running:
        yield running


def test_a_model_has_several_names(strict: ServerProcess) -> None:
    body = {"prompt": "abc", "max_tokens": 1}
    assert [entry["id"] for entry in strict.get("/v1/models").json()["data"]] == [
        "tiny",
        "other/name",
    ]
    assert strict.get("/v1/models/other/name").json()["id"] == "other/name"
    for name in ("tiny", "other/name", None):
        answer = strict.post("/v1/completions", body | {"model": name})
        assert answer.json()["model"] == "tiny"
    message = strict.post("/v1/completions", body | {"model": "third"}).json()["error"]["message"]
    assert message == "the model 'third' does not exist; this server has 'tiny' and 'other/name'"
    assert 'model_name="tiny"' in strict.get("/metrics").text


def test_a_request_without_temperature_has_the_models(
    strict: ServerProcess, server: ServerProcess
) -> None:
    body: dict[str, Any] = {"prompt": "abc", "max_tokens": 12, "ignore_eos": True, "n": 4}

    def texts(where: ServerProcess, **more: Any) -> list[str]:
        return [
            choice["text"]
            for choice in where.post("/v1/completions", body | more).json()["choices"]
        ]

    greedy = texts(server, temperature=0)
    assert texts(strict) == texts(strict, temperature=None) == greedy
    assert len({*texts(strict, temperature=1, seed=1)}) == 4, "its own wins"
    assert len({*texts(server, seed=1)}) == 4, "without a recommendation it is 1, as in vLLM"


def test_unknown_fields_are_named_in_a_header_and_once_in_the_log(server: ServerProcess) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "abc", "max_tokens": 1, "temprature": 0},
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1, "temprature": 0},
        "/tokenize": {"prompt": "abc", "promt": 1},
        "/detokenize": {"tokens": [5], "tokns": 1},
    }
    for path, body in bodies.items():
        name = list(body)[-1]
        right = {"temprature": "temperature", "promt": "prompt", "tokns": "tokens"}[name]
        for stream in (False, True):
            response = server.post(
                path, body | ({"stream": True} if stream and "v1" in path else {})
            )
            assert response.status_code == 200
            found = f"299 nanovllm \"ignored fields: '{name}' is unknown; did you mean {right}?\""
            assert response.headers["warning"] == found
        assert (
            server.text.count(
                f"ignored a request field: '{name}' is unknown; did you mean {right}?"
            )
            == 1
        )
        plain = server.post(path, {key: value for key, value in body.items() if key != name})
        assert "warning" not in plain.headers
    harmless = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 1, "user": "me"})
    assert harmless.headers["warning"] == "299 nanovllm \"ignored fields: 'user'\""
    many = {f'unknown{i}\n\u20ac"': i for i in range(3000)} | {"warning": 1, "_ignored": 2}
    flood = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 1} | many)
    assert flood.status_code == 200 and len(flood.headers["warning"]) < 2000


def test_a_strict_server_refuses_unknown_fields(strict: ServerProcess) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "abc", "max_tokens": 1},
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
        "/tokenize": {"prompt": "abc", "model": None},
    }
    for path, body in bodies.items():
        response = strict.post(path, body | {"modell": "tiny"})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (
            400,
            "modell",
            "unknown_parameter",
        )
        assert error["message"] == "the field 'modell' is unknown; did you mean model?"
        assert strict.post(path, body | {"user": "me"}).status_code == 200, (
            "OpenAI's own, which changes no answer"
        )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_continuous_usage_counts_up(server: ServerProcess, path: str) -> None:
    body = {"max_tokens": 6, "ignore_eos": True, "temperature": 0, "stream": True}
    body |= (
        {"prompt": "abc"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "abc"}]}
    )
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    with server.client.stream("POST", path, json=body) as response:
        events = [
            line.removeprefix("data: ")
            for line in response.iter_lines()
            if line.startswith("data: {")
        ]
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] <= 1 and counts[-1] == 6
