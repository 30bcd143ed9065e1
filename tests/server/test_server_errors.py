"""What clients get wrong: each mistake is answered with a 4xx that names the field, and disturbs
nobody else."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nanovllm.text.prompts import EngineLimits
from tests.server_process import ServerProcess, wait_until

HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert len(body["error"]["message"]) < 2000
    return body["error"]


@pytest.fixture(autouse=True, scope="module")
def a_request_that_goes_on(server: ServerProcess) -> Iterator[None]:
    """While all these mistakes are made, somebody generates the same text again and again."""
    expected = server.complete(max_tokens=50)["choices"]
    wrong, over = [], threading.Event()

    def generate() -> None:
        while not over.is_set():
            if server.complete(max_tokens=50)["choices"] != expected:
                wrong.append("the text has changed")

    thread = threading.Thread(target=generate)
    thread.start()
    yield
    over.set()
    thread.join()
    assert not wrong
    wait_until(server.is_idle)


# body, what the message has to contain, the field
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": 5}, "prompt", "prompt"),
    ({"prompt": None}, "prompt", "prompt"),
    ({"prompt": {"a": 1}}, "prompt", "prompt"),
    ({"prompt": ["a", 1]}, "prompt", "prompt"),
    ({"prompt": [[1], "a"]}, "prompt", "prompt"),
    ({"prompt": ""}, "prompt is empty", "prompt"),
    ({"prompt": []}, "prompt is empty", "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1] is empty", "prompt"),
    ({"prompt": [[1], []]}, "prompt[1] is empty", "prompt"),
    ({"prompt": [1.5]}, "integer", "prompt"),
    ({"prompt": [-1]}, "from 0 to 319", "prompt"),
    ({"prompt": [320]}, "from 0 to 319", "prompt"),
    ({"prompt": [10**30]}, "from 0 to 319", "prompt"),
    ({"prompt": "\ud800"}, "surrogate", ""),
    ({"prompt": ["x"] * 2000}, "1024", "prompt"),
    # They are counted before the first of them is encoded.
    ({"prompt": ["\ud800"] * 2000}, "2000 completions; at most 1024", "prompt"),
    ({"prompt": ["x"] * 20, "n": 128}, "1024", "prompt"),
    (
        {"max_tokens": 254},
        "you requested 254 output tokens, and the prompt has 3 tokens, together 257",
        "max_tokens",
    ),
    ({"max_tokens": 10**30}, "256", "max_tokens"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens", "max_tokens"),
    ({"temperature": float("nan")}, "temperature", "temperature"),
    ({"temperature": float("inf")}, "temperature", "temperature"),
    ({"temperature": -0.1}, "temperature", "temperature"),
    ({"temperature": "hot"}, "temperature", "temperature"),
    ({"temperature": True}, "temperature", "temperature"),
    ({"temperature": [1]}, "temperature", "temperature"),
    ({"top_p": 0}, "top_p", "top_p"),
    ({"top_p": 1.1}, "top_p", "top_p"),
    ({"top_k": -2}, "top_k", "top_k"),
    ({"top_k": 10**30}, "top_k", "top_k"),
    ({"min_p": 2}, "min_p", "min_p"),
    ({"n": 0}, "n must be an integer of at least 1", "n"),
    ({"n": -3}, "n must be an integer of at least 1", "n"),
    ({"n": 10**9}, "n must be an integer of at most 128", "n"),
    ({"logprobs": 21}, "at most 20", "logprobs"),
    ({"logprobs": True}, "logprobs", "logprobs"),
    ({"prompt_logprobs": -1}, "at least 0", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "stream", "prompt_logprobs"),
    ({"seed": 2**64}, "seed", "seed"),
    ({"presence_penalty": 3}, "at most 2", "presence_penalty"),
    ({"frequency_penalty": -3}, "at least -2", "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty"),
    ({"logit_bias": {"1": 101}}, "at most 100", "logit_bias"),
    ({"logit_bias": {"one": 1}}, "token ids", "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "from 0 to 319", "logit_bias"),
    ({"logit_bias": {"1": float("nan")}}, "logit_bias", "logit_bias"),
    ({"stop": ["a"] * 17}, "at most 16", "stop"),
    ({"stop": [""]}, "length of at least 1", "stop"),
    ({"stop": "a" * 1025}, "length of at most 1024", "stop"),
    ({"stop": ["a", "b" * 2_000_000], "n": 32}, "length of at most 1024", "stop"),
    ({"stop": 3}, "stop", "stop"),
    ({"stop": ["\ud800"]}, "surrogates", ""),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids"),
    ({"bad_words": "word"}, "bad_words", "bad_words"),
    ({"bad_words": [5]}, "bad_words", "bad_words"),
    ({"bad_words": [""]}, "length of at least 1", "bad_words"),
    ({"bad_words": ["a" * 257]}, "length of at most 256", "bad_words"),
    ({"bad_words": ["a"] * 129}, "at most 128", "bad_words"),
    ({"stop_token_ids": [320]}, "from 0 to 319", "stop_token_ids"),
    ({"stop_token_ids": [10**40]}, "from 0 to 319", "stop_token_ids"),
    ({"min_tokens": 17}, "min_tokens", "min_tokens"),
    ({"priority": 2**80}, "priority", "priority"),
    ({"priority": -1}, "must be 0 without --scheduling-policy priority, got -1", "priority"),
    ({"cache_salt": "\udfff"}, "unicode", "cache_salt"),
    ({"cache_salt": "x" * 257}, "at most 256 characters", "cache_salt"),
    ({"stream": "yes"}, "stream", "stream"),
    ({"stream_options": {"include_usage": True}}, "stream", "stream_options"),
    ({"suffix": "end"}, "suffix is not supported", "suffix"),
    (
        {"best_of": 3},
        "best_of is not supported by this server; do not set it, or set it to the value of n",
        "best_of",
    ),
    ({"best_of": 3, "n": 2}, "best_of is not supported", "best_of"),
    ({"best_of": 1, "n": 2}, "best_of is not supported", "best_of"),
    ({"best_of": True}, "best_of is not supported", "best_of"),
    ({"reasoning_effort": "low"}, "reasoning_effort is not supported", "reasoning_effort"),
    (
        {"guided_json": {"type": "object"}},
        "guided_json is not supported by this server; use structured",
        "guided_json",
    ),
    ({"structured_outputs": {}}, "exactly one of json, regex, choice", "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "got json, regex", "structured_outputs"),
    ({"structured_outputs": {"jsn": {}}}, "'jsn' is not one of json, regex", "structured_outputs"),
    ({"structured_outputs": {"json": 5}}, "a string or a dictionary", "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "not a JSON schema", "structured_outputs.json"),
    (
        {"structured_outputs": {"json": {"items": {"not": {}}}}},
        '"not"',
        "structured_outputs.json.items",
    ),
    (
        {"structured_outputs": {"json": {"$ref": "#"}}},
        "nothing is allowed",
        "structured_outputs.json",
    ),
    ({"structured_outputs": {"choice": []}}, "at least 1", "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "(a"}}, "unclosed group", "structured_outputs.regex"),
    (
        {"structured_outputs": {"regex": "a" * 200_000}},
        "at most 131072",
        "structured_outputs.regex",
    ),
    ({"structured_outputs": {"grammar": "start: a"}}, "unknown name", "structured_outputs.grammar"),
    ({"return_token_ids": True}, "return_token_ids is not supported", "return_token_ids"),
    (
        {"return_tokens_as_token_ids": True},
        "return_tokens_as_token_ids is not supported",
        "return_tokens_as_token_ids",
    ),
]

FAULTY = {
    "$ref": "#/$defs/person",
    "$defs": {
        "person": {
            "properties": {"name": {}, "age": {"anyOf": [{"type": "null"}, {"type": "intger"}]}}
        }
    },
}
FUNCTION = {"type": "function", "function": {"name": "f"}}
WRONG_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "messages"),
    ({"messages": None}, "messages", "messages"),
    ({"messages": "hello"}, "messages", "messages"),
    ({"messages": [5]}, "messages", "messages"),
    ({"messages": [{}]}, "messages", "messages"),
    ({"messages": [{"role": "user"}]}, "content", "messages"),
    ({"messages": [{"content": "x"}]}, "role", "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "content", "messages"),
    (
        {"messages": [{"role": "wizard", "content": "x"}]},
        "'system', 'developer', 'user', 'assistant' or 'tool'",
        "messages",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}
            ]
        },
        "messages.0.content.1.type: models of this server read text only",
        "messages",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "poem", "text": "x"}]}]},
        "messages.0.content.0.type: Input should be 'text'",
        "messages",
    ),
    (
        {"tools": [FUNCTION], "tool_choice": {"type": "x"}},
        "tool_choice.type: Input should be 'function'",
        "tool_choice",
    ),
    ({"messages": [{"role": "user", "content": "\udc00"}]}, "surrogate", ""),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "tool_calls",
        "messages",
    ),
    ({"max_completion_tokens": 250}, "max_completion_tokens is too large", "max_completion_tokens"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"top_logprobs": 2}, "logprobs to be true", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "less than or equal to 20", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "greater than or equal to 0", "top_logprobs"),
    ({"logprobs": 3}, "logprobs", "logprobs"),
    ({"functions": [{}]}, "functions is not supported", "functions"),
    ({"response_format": {"type": "xml"}}, "'json_object' or 'json_schema'", "response_format"),
    (
        {"response_format": {"type": "json_schema"}},
        "must be an object if",
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "cannot be combined",
        "response_format",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": FAULTY},
            }
        },
        "person.properties.age.anyOf[1]: Invalid type: intger",
        "response_format.json_schema.schema.$defs.person.properties.age.anyOf[1]",
    ),
    ({"modalities": ["text", "audio"]}, "modalities is not supported", "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio is not supported", "audio"),
    ({"chat_template": "{{ 1 }}"}, "chat_template is not supported unless", "chat_template"),
    ({"chat_template_kwargs": {"tools": []}}, "tools", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "'self'", "chat_template_kwargs"),
    ({"echo": True}, "echo is not supported", "echo"),
    ({"add_special_tokens": True}, "add_special_tokens is not supported", "add_special_tokens"),
    ({"return_token_ids": True}, "return_token_ids is not supported", "return_token_ids"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "exclude", ""),
]


def identify(value: Any) -> str:
    return json.dumps(value)[:60] if isinstance(value, dict) else ""


@pytest.mark.parametrize(("wrong", "words", "param"), WRONG_COMPLETIONS, ids=identify)
def test_wrong_completions(
    server: ServerProcess, wrong: dict[str, Any], words: str, param: str
) -> None:
    content = json.dumps({"prompt": "abc"} | wrong)  # httpx refuses NaN and surrogates
    response = server.post(
        COMPLETIONS, content=content, headers={"Content-Type": "application/json"}
    )
    error = error_of(response, 400)
    assert words in error["message"] and error["param"] == (param or error["param"])


@pytest.mark.parametrize(("wrong", "words", "param"), WRONG_CHATS, ids=identify)
def test_wrong_chats(server: ServerProcess, wrong: dict[str, Any], words: str, param: str) -> None:
    content = json.dumps({"messages": HELLO} | wrong)
    response = server.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    error = error_of(response, 400)
    assert words in error["message"] and error["param"] == (param or error["param"])


@pytest.mark.parametrize("length", [256, 300, 100_000])
@pytest.mark.parametrize("more", [{}, {"max_tokens": 5}])
def test_prompts_that_are_too_long(
    server: ServerProcess, length: int, more: dict[str, Any]
) -> None:
    """Whatever else is asked for, it is the prompt that has to become shorter."""
    text = "x" * length
    sources: tuple[tuple[str, str, Any], ...] = (
        (COMPLETIONS, "prompt", text),
        (COMPLETIONS, "prompt", ["a", text]),
        (COMPLETIONS, "prompt", [3] * length),
        (CHAT, "messages", [{"role": "user", "content": text}]),
    )
    for path, field, value in sources:
        error = error_of(server.post(path, {field: value} | more), 400)
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
        # litellm and others recognise the sentence, not the code.
        assert error["message"].startswith(
            "This model's maximum context length is 256 tokens. However, the "
        )


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_max_tokens_beyond_the_context_names_all_numbers(server: ServerProcess, path: str) -> None:
    source: dict[str, Any] = {"prompt": [3] * 200} if path == COMPLETIONS else {"messages": HELLO}
    error = error_of(server.post(path, source | {"max_tokens": 255}), 400)
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    length = server.post(path, source | {"max_tokens": 1}).json()["usage"]["prompt_tokens"]
    assert (
        error["message"]
        == "This model's maximum context length is 256 tokens. However, you requested 255 output "
        f"tokens, and the prompt has {length} tokens, together {length + 255}: max_tokens is "
        "too large, or the prompt too long."
    )


def test_a_small_pool_is_named_as_the_limit() -> None:
    limits = EngineLimits(max_model_len=256, max_request_tokens=64, vocab_size=320)
    assert (
        limits.context_length
        == "This model's maximum context length is 64 tokens on this server, since its KV pool has "
        "no room for more (the model takes 256; raise --kv-cache-memory)."
    )


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/responses", "this server has no Responses API: use /v1/chat/completions"),
        ("/v1/responses/resp_1/input_items", "no Responses API"),
        ("/v1/messages", "no Messages API: use /v1/chat/completions"),
        ("/v1/embeddings", "has no embeddings"),
        ("/chat/completions", "the route is /v1/chat/completions"),
        ("/v1/v1/completions", "the route is /v1/completions"),
        ("/models", "the route is /v1/models"),
        ("/v1/chat/completion", "; did you mean /v1/chat/completions?"),
        ("/v1/chatcompletions", "; did you mean /v1/chat/completions?"),
        ("/V1/Chat/Completion", "; did you mean /v1/chat/completions?"),
        ("/v1/completion", "; did you mean /v1/completions?"),
        ("/v1/model", "; did you mean /v1/models?"),
        ("/v1/tokenize", "; did you mean /tokenize?"),
        ("/metric", "; did you mean /metrics?"),
        ("/openapi", "; did you mean /openapi.json?"),
        ("/kv_transfer/releases", "; did you mean /kv_transfer/release?"),
    ],
)
def test_missing_routes_name_what_is_there(server: ServerProcess, path: str, hint: str) -> None:
    for method in ("GET", "POST"):
        error = error_of(
            server.client.request(method, path, json={} if method == "POST" else None), 404
        )
        assert f"there is no route {path}" in error["message"] and hint in error["message"]
        assert error["type"] == "not_found_error"


@pytest.mark.parametrize("path", ["/nonsense", "/v1/images/generations", "/" + "completion" * 1000])
def test_a_path_like_no_route_gets_no_hint(server: ServerProcess, path: str) -> None:
    assert error_of(server.get(path), 404)["message"] == f"there is no route {path}"[:1000] + (
        "..." if len(path) > 1000 else ""
    )


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", COMPLETIONS, "POST"),
        ("DELETE", "/tokenize", "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/v1/models/tiny", "GET"),
        ("POST", "/", "GET, HEAD"),
        ("POST", "/web/page.js", "GET, HEAD"),
        ("PATCH", "/openapi.json", "GET, HEAD"),
    ],
)
def test_a_method_that_a_route_does_not_have(
    server: ServerProcess, method: str, path: str, allowed: str
) -> None:
    response = server.client.request(method, path)
    error = error_of(response, 405)
    assert error["message"] == f"{path} does not answer {method}: send {allowed.split(', ')[0]}"
    assert error["type"] == "invalid_request_error"
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_request(server: ServerProcess, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    for content in (
        b"",
        b"{",
        b"nonsense",
        b"[1, 2]",
        b'"text"',
        b"null",
        b"5",
        b'{"prompt": "\xff\xfe"}',
        b"\x00\x01\x02",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
    ):
        error_of(server.post(path, content=content, headers=headers), 400)
    error_of(server.post(path, content=b"prompt=abc", headers={"Content-Type": "text/plain"}), 400)
    too_long = server.post(path, content=b'{"max_tokens": ' + b"9" * 5000 + b"}", headers=headers)
    assert "4300 digits" in error_of(too_long, 400)["message"]


def test_unknown_models_routes_and_methods(server: ServerProcess) -> None:
    for path, body in (
        (CHAT, {"messages": HELLO}),
        (COMPLETIONS, {"prompt": "a"}),
        ("/tokenize", {"prompt": "a"}),
    ):
        error = error_of(server.post(path, body | {"model": "gpt-5"}), 404)
        assert error["code"] == "model_not_found" and error["param"] == "model"
        assert "gpt-5" in error["message"] and "tiny" in error["message"]
    assert "/v1/nothing" in error_of(server.get("/v1/nothing"), 404)["message"]
    assert "GET" in error_of(server.get(CHAT), 405)["message"]
    error_of(server.client.delete("/v1/models"), 405)


def test_wrong_token_requests(server: ServerProcess) -> None:
    for body in (
        {},
        {"prompt": "a", "messages": HELLO},
        {"prompt": 5},
        {"prompt": "a", "add_special_tokens": "no"},
    ):
        error_of(server.post("/tokenize", body), 400)
    for tokens in ([-1], [320], [2**70], ["a"], 5, None):
        error_of(server.post("/detokenize", {"tokens": tokens}), 400)


def test_bodies_beyond_the_limit_are_refused_while_they_are_read(server: ServerProcess) -> None:
    text = b'{"prompt": "' + b"x" * 100_000_000 + b'"}'
    headers = {"Content-Type": "application/json"}
    announced = server.post(COMPLETIONS, content=text, headers=headers)
    assert "10485760 bytes" in error_of(announced, 413)["message"]

    def chunks() -> Iterator[bytes]:
        yield from (text[i : i + 2**20] for i in range(0, len(text), 2**20))

    error_of(server.post(COMPLETIONS, content=chunks(), headers=headers), 413)
    import psutil

    assert psutil.Process(server.process.pid).memory_info().rss < 600 * 2**20


def test_large_bodies_below_the_limit_get_an_answer(server: ServerProcess) -> None:
    for prompt in (
        "word " * 1_500_000,
        list(range(3)) * 500_000,
        ["a"] * 1_000_000,
        [[1]] * 1_000_000,
    ):
        error_of(server.post(COMPLETIONS, {"prompt": prompt}), 400)
    error_of(server.post(COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * 2000}), 400)
    error_of(server.post(CHAT, {"messages": HELLO * 100_000}), 400)


def test_a_connection_that_breaks_in_the_middle_of_a_body(server: ServerProcess) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(5):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
            )
    assert server.get("/health").status_code == 200
    assert "Traceback" not in server.text
