"""Tool calls: how they are read, what a grammar allows, and what programs that were written for
OpenAI's API see."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import jsonschema
import llguidance
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from nanovllm import LLM
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.structured_outputs import GrammarError
from nanovllm.server.protocol import ChatCompletionRequest
from nanovllm.server.tools import CLOSE, OPEN, ToolCallReader, constrained, described
from nanovllm.text.forms import Forms
from nanovllm.text.grammars import to_grammar, token_trie
from nanovllm.text.prompts import EngineLimits
from nanovllm.text.tokenizer import Tokenizer
from tests.server_process import ServerProcess
from tests.text.json_schema_suite import GROUPS, NUM_FOLLOWED

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 14},
            "maxItems": 3,
        },
    },
    "required": ["city", "unit"],
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Forecast", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
QUESTION: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
PARIS = '{"city": "Paris", "unit": "celsius"}'


def call(name: str, arguments: str) -> str:
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def assistant(**function: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"} | function}
        ],
    }


# ---------------------------------------------------------------- reading

VALUES = st.recursive(
    st.one_of(
        st.integers(),
        st.booleans(),
        st.text(max_size=8),
        st.sampled_from([OPEN, CLOSE, "}\n" + CLOSE]),
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=3).map(json.dumps)
CALLS = st.lists(st.tuples(st.sampled_from(["get_weather", "now", "f-1"]), ARGUMENTS), max_size=3)
CONTENT = st.text(max_size=10) | st.sampled_from(
    ["<", "a <tool_cal", "<tool_call", "<<tool_call \n", "</tool_call>"]
)


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]], str | None]:
    """Content, calls and the finish reason from the deltas that a client joins."""
    reader, content = ToolCallReader(), ""
    names: list[str] = []
    arguments: list[str] = []
    for delta in itertools.chain(*map(reader.append, pieces), reader.flush()):
        content += delta.content or ""
        for part in delta.tool_calls or []:
            assert (part.index == len(names)) == bool(part.id) == bool(part.function.name)
            if isinstance(part.function.name, str):
                assert (
                    isinstance(part.id, str)
                    and part.id.startswith("call_")
                    and part.type == "function"
                )
                names.append(part.function.name)
                arguments.append("")
            assert part.index == len(names) - 1, "the calls come one after the other"
            arguments[-1] += part.function.arguments
    return content, list(zip(names, arguments, strict=True)), reader.finish_reason("stop")


@given(content=CONTENT, calls=CALLS, data=st.data())
def test_the_same_is_read_wherever_the_text_is_cut(
    content: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    text = content + "\n".join(call(*each) for each in calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)])]
    expected = content, calls, "tool_calls" if calls else "stop"
    assert read(pieces) == read([text]) == read(list(text)) == expected
    message = ToolCallReader().message(text)
    assert (message.content or "") == content and (message.content is None) == bool(
        calls and not content
    )
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls or []] == calls


@given(arguments=ARGUMENTS, data=st.data())
def test_a_call_that_is_cut_off_has_the_beginning_of_its_arguments(
    arguments: str, data: st.DataObject
) -> None:
    text = "Let me see. " + call("now", arguments)
    end = data.draw(st.integers(0, len(text) - 1))
    content, calls, reason = read([text[:end]])
    assert read(list(text[:end])) == (content, calls, reason) and reason == "stop"
    assert "Let me see. <tool_call>".startswith(content)
    for name, part in calls:
        assert name == "now" and arguments.startswith(part)


def test_a_named_function_ends_with_stop_as_in_openais_api() -> None:
    for is_named, expected in ((True, "stop"), (False, "tool_calls")):
        reader = ToolCallReader(is_named)
        reader.message(call("now", "{}"))
        assert reader.finish_reason("stop") == expected
        assert reader.finish_reason("length") == "length" and reader.finish_reason(None) is None


# ---------------------------------------------------------------- the grammar


class Answers:
    """Says whether an answer may be some text, for the course model's tokenizer, and as those of
    other models are: with tokens for the tags, and for thoughts."""

    def __init__(self, tokens: str) -> None:
        tokenizer = Tokenizer.from_pretrained(resolve_model("smollm2-135m"))
        tags = [
            AddedToken(tag, special=tokens == "special", normalized=False)
            for tag in (OPEN, CLOSE, "<think>")
        ]
        if tokens:
            (
                tokenizer.backend.add_special_tokens
                if tokens == "special"
                else tokenizer.backend.add_tokens
            )(tags)
        self.tokenizer = Tokenizer(
            tokenizer.backend, tokenizer.special_tokens, tokenizer.chat_templates
        )
        size = tokenizer.backend.get_vocab_size()
        self.forms = Forms(self.tokenizer, EngineLimits(1000, 1000, size))
        self.trie = token_trie(self.tokenizer, size, [])

    def may_be(self, *parts: str, **fields: Any) -> bool:
        """Whether an answer to a request with these fields may consist of these parts, each with
        tokens of its own, and end there."""
        body = ChatCompletionRequest.model_validate({"messages": QUESTION, "tools": TOOLS} | fields)
        params = constrained(body.sampling_params({}, max_tokens=None), body, self.forms)
        assert params.structured_outputs is not None
        hidden = self.tokenizer.backend.token_to_id(OPEN) in self.tokenizer.all_special_ids
        assert params.skip_special_tokens != hidden, "the reader sees the tags"
        matcher = llguidance.LLMatcher(self.trie, to_grammar(params.structured_outputs))
        assert not matcher.is_error(), matcher.get_error()
        tokens = [token for part in parts for token in self.tokenizer.encode(part)]
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.fixture(scope="module", params=["", "ordinary", "special"])
def answers(request: pytest.FixtureRequest) -> Answers:
    return Answers(request.param)


def test_a_grammar_allows_what_tool_choice_says(answers: Answers) -> None:
    paris, now = call("get_weather", PARIS), call("now", "{}")
    named = {"type": "function", "function": {"name": "now"}}
    texts = ["", "Hello, <tool.", "<repo_name>a <think>b<", "}\n" + CLOSE]
    calls = [now, paris, f"{now}\n{paris}", f"{paris}\n{now}\n{now}"]
    both = [f"Let me see.\n{now}", f"<repo_name><tool <think>{paris}"]
    allowed: Any = {"auto": texts + calls + both, "none": texts, "required": calls, "named": [now]}
    for choice, fitting in allowed.items():
        for text in texts + calls + both:
            fits = answers.may_be(text, tool_choice=named if choice == "named" else choice)
            assert fits == (text in fitting), (choice, text)
    assert answers.may_be(f"a{now}", parallel_tool_calls=False)
    assert not answers.may_be(f"{now}\n{now}", parallel_tool_calls=False)


@pytest.mark.parametrize(
    "text",
    [
        call("get_weather", '{"city": "Paris"}'),
        call("get_weather", '{"city": "Paris", "unit": "kelvin"}'),
        call("get_weather", '{"city": "Paris", "unit": "celsius", "planet": "Mars"}'),
        call("get_weather", '{"city": "Paris", "unit": "celsius", "days": [15]}'),
        call("get_weather", "{}"),
        call("now", '{"city": "Paris"}'),
        call("another", "{}"),
        call("now", "{}")[:-1],
        call("now", "{}") + " and then",
        OPEN,
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_grammar_refuses_other_calls(answers: Answers, text: str, choice: str) -> None:
    assert not answers.may_be(text, tool_choice=choice)


# What MCP servers, pydantic and zod write, and grammars cannot express.
LOOSE: Any = {
    "type": "object",
    "properties": {
        "set": {
            "type": "array",
            "items": {"type": "string"},
            "uniqueItems": True,
            "contains": {"const": "a"},
        },
        "any": {"not": {"type": "null"}},
        "map": {
            "type": "object",
            "propertyNames": {"pattern": "^a"},
            "if": {"required": ["b"]},
            "then": {"required": ["c"]},
        },
        "one": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "raw": {"type": "string", "format": "binary"},
        "email": {
            "type": "string",
            "format": "email",
            "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z.]+$",
        },
        "word": {"type": "string", "pattern": r"\bx\b"},
    },
    "required": ["raw"],
    "dependentRequired": {"raw": ["other"]},
}


def test_what_a_grammar_cannot_express_is_left_out_unless_a_function_is_strict(
    answers: Answers,
) -> None:
    loose = tool(parameters=LOOSE)
    arguments = (
        '{"set": ["b"], "any": 1, "map": {"b": 1}, "one": 1.5, "raw": "?", "email": "a@b.de",'
        ' "word": "y"}'
    )
    for choice in ("auto", "required"):
        assert answers.may_be(call("f", arguments), tools=[loose], tool_choice=choice)
        assert not answers.may_be(call("f", '{"set": "b"}'), tools=[loose], tool_choice=choice)
        assert not answers.may_be(
            call("f", arguments.replace("a@b.de", "a")), tools=[loose], tool_choice=choice
        )
    assert answers.may_be(call("f", '{"raw": "?", "other": 1}'), tools=[loose])
    for name, part in LOOSE["properties"].items():
        wrong = tool(parameters={"properties": {name: part}}, strict=True)
        with pytest.raises(GrammarError) as caught:
            answers.may_be("", tools=[loose, wrong])
        assert caught.value.place.startswith(f"tools[1].function.parameters.properties.{name}")
    with pytest.raises(GrammarError, match="dependentRequired"):
        answers.may_be(
            "", tools=[tool(parameters={"dependentRequired": {"a": ["b"]}}, strict=True)]
        )
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "array", "uniqueItems": True}},
    }
    with pytest.raises(GrammarError, match="uniqueItems"):
        answers.may_be("", tools=[loose], response_format=form)


def test_a_function_without_all_required_properties_has_more_than_those(answers: Answers) -> None:
    open_ended = tool(parameters={"properties": {"a": {"type": "integer"}}, "required": ["a", "b"]})
    assert answers.may_be(call("f", '{"a": 1, "b": null}'), tools=[open_ended])
    assert not answers.may_be(call("f", '{"a": 1}'), tools=[open_ended])
    closed = tool(parameters={"properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert not answers.may_be(call("f", '{"a": 1, "b": null}'), tools=[closed])


def test_an_answer_may_be_any_json(answers: Answers) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
    for text in ("[1, null]", '"a"', '{"a": 1}', call("now", "{}")):
        assert answers.may_be(text, response_format=form)
    assert not answers.may_be("hello", response_format=form)
    assert not answers.may_be("[1, null]", response_format={"type": "json_object"})


def test_a_text_cannot_spell_the_tag_of_a_call(answers: Answers) -> None:
    assert not answers.may_be("So: <tool", "_call", ">, then", tool_choice="auto")
    assert not answers.may_be("So: <tool", "_call", ">, then", tool_choice="none")


# ---------------------------------------------------------------- prompts

QWEN = """{%- if tools %}{{- '<tools>' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '</tools>
{"name": <function-name>, "arguments": <args-json-object>}' }}{%- endif %}
{%- for message in messages %}{{- '|' + message.role + ':' + message.content }}
{%- for call in message.tool_calls %}
{{- call.function.name + (call.function.arguments | tojson) }}{%- endfor %}{%- endfor %}"""
HISTORY: Any = [
    *QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "noon"},
]


@functools.cache
def course_tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(resolve_model("smollm2-135m"))


def prompt(template: str, **fields: Any) -> str:
    body = ChatCompletionRequest.model_validate({"messages": HISTORY, "tools": TOOLS} | fields)
    arguments = body.template_arguments()
    templates = {"default": template}
    arguments |= described(arguments["messages"], body, templates)
    return Tokenizer(course_tokenizer().backend, {}, templates).apply_chat_template(**arguments)


def test_a_template_that_knows_tools_gets_them() -> None:
    text = prompt(QWEN)
    assert text.startswith(
        '<tools>{"type": "function", "function": {"name": "get_weather", "description":'
        ' "Forecast", "parameters"'
    )
    assert text.endswith("|user:How is the weather in Paris?|assistant:now{}|tool:noon")
    assert "<tools>" not in prompt(QWEN, tools=None)


def history_of(arguments: str | None) -> list[dict[str, Any]]:
    return [
        *QUESTION,
        assistant(arguments=arguments),
        {"role": "tool", "tool_call_id": "1", "content": "?"},
    ]


def test_arguments_may_be_missing_or_cut_off() -> None:
    for arguments, seen in (
        ("", "{}"),
        (None, "{}"),
        ("{}", "{}"),
        ('{"city": "Par', r'"{\"city\": \"Par"'),
        ("[", '"["'),
    ):
        assert prompt(QWEN, messages=history_of(arguments)).endswith(
            f"|assistant:f{seen}|tool:?"
        ), arguments


def test_for_other_templates_tools_calls_and_results_are_texts() -> None:
    plain = (
        "{%- for message in messages %}{{- '|' + message.role + ':' + message.content }}{%- "
        "endfor %}"
    )
    text = prompt(
        plain,
        messages=[
            {"role": "developer", "content": "Be brief."},
            *HISTORY,
            {"role": "user", "content": "Thanks"},
        ],
    )
    assert (
        text.startswith("|system:Be brief.\n# Tools\n") and text.count('{"type": "function"') == 2
    )
    assert text.endswith(
        '|user:How is the weather in Paris?|assistant:<tool_call>\n{"name": "now", "arguments":'
        " {}}\n</tool_call>|user:<tool_response>\nnoon\n</tool_response>|user:Thanks"
    )
    texts = (
        prompt(plain, messages=history_of('{"city": "Par')),
        prompt(plain, messages=history_of("")),
    )
    assert (
        r'{"name": "f", "arguments": "{\"city\": \"Par"}' in texts[0]
        and '"arguments": {}}' in texts[1]
    )
    # Llama 3.1's template asks for calls of another form.
    assert prompt(plain + "{% if tools %}{{ tools }}{% endif %}") == prompt(plain)
    assert prompt(plain, tools=None).startswith("|user:How")


# ---------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the course model, whose chat template knows no tools."""
    fast = ["--max-model-len", "1024", "--dtype", "auto", "--attention-backend", "auto"]
    with ServerProcess(
        pathlib.Path("smollm2-135m"), tmp_path_factory.mktemp("tools"), *fast
    ) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def check_calls(calls: Any) -> None:
    for each in calls:
        assert each.type == "function" and each.id.startswith("call_")
        jsonschema.validate(json.loads(each.function.arguments), SCHEMAS[each.function.name])


def test_forced_calls_follow_the_schema(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "messages": QUESTION,
        "tools": TOOLS,
        "temperature": 1,
        "n": 2,
        "max_tokens": 200,
    }
    for choice, reason in (
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, "stop"),
    ):
        answer = client.chat.completions.create(
            **options, tool_choice=choice, parallel_tool_calls=False, seed=1
        )
        assert [choice.finish_reason for choice in answer.choices] == [reason] * 2
        for each in answer.choices:
            (made,) = each.message.tool_calls or []
            check_calls([made])
            assert each.message.content is None
        if reason == "stop":
            assert {
                c.message.tool_calls[0].function.name
                for c in answer.choices
                if c.message.tool_calls
            } == {"get_weather"}


def test_a_stream_has_the_same_calls(client: openai.OpenAI) -> None:
    options: Any = {
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    options |= {"n": 2, "seed": 3, "max_tokens": 200}
    whole = client.chat.completions.create(model="tiny", **options)
    with client.chat.completions.stream(model="tiny", **options) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    for mine, other in zip(final.choices, whole.choices, strict=True):
        assert mine.finish_reason == other.finish_reason == "tool_calls"
        ((call, same),) = zip(
            mine.message.tool_calls or (), other.message.tool_calls or (), strict=True
        )
        assert call.function.arguments == same.function.arguments
        check_calls([call])
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 2, "the arguments come in pieces"


def test_a_round_trip_with_the_result_of_a_call(client: openai.OpenAI) -> None:
    messages = list(QUESTION)
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    first = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, tool_choice=named, temperature=0
    )
    message = first.choices[0].message
    assert message.tool_calls and message.tool_calls[0].type == "function"
    messages += [
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"celsius": 21}'},
    ]
    second = client.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=TOOLS,
        tool_choice="none",
        temperature=0,
        max_tokens=30,
    )
    assert second.choices[0].message.content and not second.choices[0].message.tool_calls
    assert (
        first.usage and second.usage and second.usage.prompt_tokens > first.usage.prompt_tokens + 20
    )
    automatic = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, max_tokens=30
    )
    assert automatic.choices[0].message.content or automatic.choices[0].message.tool_calls


def test_a_call_that_is_cut_off_says_so(client: openai.OpenAI) -> None:
    options: Any = {
        "messages": QUESTION,
        "tools": TOOLS[:1],
        "tool_choice": "required",
        "temperature": 0,
        "logprobs": True,
    }
    for length in (3, 20):
        choice = client.chat.completions.create(model="tiny", max_tokens=length, **options).choices[
            0
        ]
        assert (
            choice.finish_reason == "length"
            and choice.logprobs
            and len(choice.logprobs.content or []) == length
        )
        assert len(choice.message.tool_calls or []) == (length == 20)
    whole = client.chat.completions.create(model="tiny", **options).choices[0].message.tool_calls
    assert whole and whole[0].function.arguments.startswith(
        choice.message.tool_calls[0].function.arguments
    )
    chunks = [
        c.choices[0]
        for c in client.chat.completions.create(model="tiny", max_tokens=20, stream=True, **options)
    ]
    assert sum(len(chunk.logprobs.content or []) for chunk in chunks if chunk.logprobs) == 20
    stopped = (
        client.chat.completions.create(model="tiny", stop=["arguments"], **options)
        .choices[0]
        .message.tool_calls
    )
    assert stopped and stopped[0].function == whole[0].function, (
        "a stop string in a call does not end it"
    )


def test_a_stop_string_ends_the_text_before_a_call_and_no_call(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "messages": QUESTION,
        "tools": TOOLS[:1],
        "temperature": 0,
        "max_tokens": 100,
    }
    text = (
        client.chat.completions.create(**options, tool_choice="none").choices[0].message.content
        or ""
    )
    stopped = client.chat.completions.create(
        **options, tool_choice="none", stop=[text[3:5]]
    ).choices[0]
    assert stopped.finish_reason == "stop" and text.startswith(stopped.message.content or "")
    assert len(stopped.message.content or "") < len(text)


# What must not change a call.
COMBINATIONS: dict[str, dict[str, Any]] = {
    "asynchronous": {"async_scheduling": True},
    "chunks of 5, a budget of 16": {
        "long_prefill_token_threshold": 5,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 9,
    },
    "a small pool": {"num_kv_blocks": 20},
    "a small pool, swapped, asynchronous": {
        "num_kv_blocks": 20,
        "preemption_mode": "swap",
        "swap_space": 0.01,
        "async_scheduling": True,
    },
    "two ranks": {"tensor_parallel_size": 2},
    "two ranks, asynchronous, a small pool": {
        "tensor_parallel_size": 2,
        "async_scheduling": True,
        "num_kv_blocks": 20,
    },
}


def answers_with_calls(model: pathlib.Path, **options: Any) -> tuple[list[str], int]:
    """Two answers for each of four prompts, and how often the engine has preempted a request."""
    defaults = {
        "dtype": "float32",
        "attention_backend": "torch",
        "check_invariants": True,
        "num_kv_blocks": 200,
    }
    llm = LLM(str(model), **(defaults | options))
    try:
        fields = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
        body = ChatCompletionRequest.model_validate({"messages": QUESTION} | fields)
        forms = Forms(llm.get_tokenizer(), llm.engine.core.limits)
        params = constrained(body.sampling_params({}, n=2, seed=4, max_tokens=220), body, forms)
        outputs = llm.generate([[7 + i] * (9 * i + 3) for i in range(4)], params, use_tqdm=False)
        return [
            each.text for output in outputs for each in output.outputs
        ], llm.engine.core.stats.num_preemptions
    finally:
        llm.engine.core.close()


@pytest.fixture(scope="module")
def expected_answers(tiny_model: pathlib.Path) -> list[str]:
    answers, _ = answers_with_calls(tiny_model)
    check_calls(
        [call for text in answers for call in ToolCallReader().message(text).tool_calls or ()]
    )
    assert len({*answers}) == 8 and all(text.endswith(CLOSE) for text in answers)
    return answers


# By day those that have the others in them.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.nightly] * (name in ("asynchronous", "a small pool", "two ranks")),
        )
        for name in COMBINATIONS
    ],
)
def test_no_option_changes_a_call(
    name: str, tiny_model: pathlib.Path, expected_answers: list[str]
) -> None:
    answers, num_preemptions = answers_with_calls(tiny_model, **COMBINATIONS[name])
    assert answers == expected_answers
    assert (num_preemptions > 0) == ("num_kv_blocks" in COMBINATIONS[name])


# Why a function is refused even if it is not strict: nothing satisfies its schema, or no grammar
# can be made of it.
REFUSED = re.compile(
    "Unsatisfiable|not present in a registry|not disjoint|Expected positive integer|too many digits"
)


def as_parameters(schema: Any) -> dict[str, Any]:
    """A schema of the public suite as that of a function's arguments, which must be an object."""
    if isinstance(schema, dict) and schema.get("type") == "object":
        return schema
    if '"$id"' not in (text := json.dumps(schema)):  # its references move with it
        schema = json.loads(re.sub(r'(?<="\$ref": "#)(?=[/"])', "/properties/value", text))
    return {"type": "object", "properties": {"value": schema}, "required": ["value"]}


@pytest.fixture(scope="module")
def random_server(
    tiny_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of a random model that has room for the description of a function."""
    folder = tmp_path_factory.mktemp("random")
    shutil.copytree(tiny_model, folder / "model")
    config = folder / "model" / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096})
    )
    with ServerProcess(folder / "model", folder) as running:
        yield running


@pytest.mark.parametrize("share", [48, pytest.param(1, marks=pytest.mark.nightly)])
async def test_all_calls_are_valid(random_server: ServerProcess, share: int) -> None:
    """For schemas of the public suite: calls with valid arguments, the same in a stream; or a
    refusal that says where."""
    client = openai.AsyncOpenAI(base_url=f"{random_server.url}/v1", api_key="unused", max_retries=0)
    # Which makes a random model write objects and short strings.
    wanted = dict.fromkeys("foobar", 10) | {"{": 15, '"': 13, "}": 12, "]": 12}
    tokens = random_server.post("/tokenize", {"prompt": "".join(wanted)}).json()["tokens"]
    bias = {
        str(token): weight
        for token, weight in zip([*tokens, 2], [*wanted.values(), 12], strict=True)
    }
    places = asyncio.Semaphore(16)
    options: Any = {
        "model": "tiny",
        "messages": QUESTION,
        "parallel_tool_calls": False,
        "logit_bias": bias,
    }
    named = {"type": "function", "function": {"name": "f"}}
    ends: list[str] = []

    async def answer(stream: bool, **fields: Any) -> tuple[str, str | None, list[str], str]:
        """The finish reason, content, and names and arguments of the calls."""
        made = await client.chat.completions.create(**options, **fields, stream=stream)
        parts = [chunk.choices[0] async for chunk in made] if stream else made.choices
        messages = [part.delta if stream else part.message for part in parts]
        functions = [call.function for message in messages for call in message.tool_calls or ()]
        contents = [message.content for message in messages if message.content is not None]
        names = [function.name for function in functions if function.name]
        arguments = "".join(function.arguments for function in functions)
        return parts[-1].finish_reason, "".join(contents) if contents else None, names, arguments

    async def ask(seed: int, name: str, schema: dict[str, Any]) -> bool:
        """Whether the function is accepted if it is strict."""
        async with places:
            try:
                for choice, reason, temperature in (
                    ("required", "tool_calls", 0),
                    (named, "stop", 1),
                ):
                    tools = [tool(parameters=schema, strict=True)]
                    fields = {
                        "tools": tools,
                        "tool_choice": choice,
                        "max_tokens": 300,
                        "temperature": temperature,
                        "seed": seed,
                    }
                    end, content, names, arguments = whole = await answer(False, **fields)
                    assert whole == await answer(True, **fields), name
                    ends.append(end)
                    if end != "length":
                        assert (end, content, names) == (reason, None, ["f"]), name
                        jsonschema.Draft202012Validator(schema).validate(json.loads(arguments))
                return True
            except openai.BadRequestError as refusal:
                assert str(refusal.param).startswith("tools[0].function.parameters"), (
                    name,
                    refusal,
                )
            try:
                await client.chat.completions.create(
                    **options, tools=[tool(parameters=schema)], tool_choice="required", max_tokens=1
                )
            except openai.BadRequestError as refusal:
                assert REFUSED.search(str(refusal)), (name, refusal)
                assert str(refusal.param).startswith("tools[0].function.parameters"), (
                    name,
                    refusal,
                )
            return False

    async with client:
        groups = [
            (name, as_parameters(schema))
            for name, schema, _ in GROUPS[::share]
            if isinstance(schema, dict)
        ]
        followed = await asyncio.gather(*(ask(seed, *group) for seed, group in enumerate(groups)))
    assert sum(followed) == NUM_FOLLOWED or (share > 1 and sum(followed) > 0.3 * len(followed))
    assert ends.count("length") < 0.1 * len(ends), "most calls come to their end"


def test_arguments_that_never_end_are_refused(random_server: ServerProcess) -> None:
    """Refused before anything is generated: no finite text satisfies the schema."""
    client = openai.OpenAI(base_url=f"{random_server.url}/v1", api_key="unused", max_retries=0)

    def choices(*names: str) -> Any:
        deeper = [{"properties": {name: {"$ref": "#"}}, "required": [name]} for name in names]
        schema = {"type": "object", "anyOf": [{"type": "object", **each} for each in deeper]}
        options: Any = {
            "tools": [tool(parameters=schema)],
            "tool_choice": "required",
            "n": 2,
            "max_tokens": 200,
        }
        return client.chat.completions.create(model="tiny", messages=QUESTION, **options).choices

    for names in (["a", "b"], ["a"]):
        with pytest.raises(
            openai.BadRequestError, match=r"no finite text|nothing is allowed"
        ) as refusal:
            choices(*names)
        assert refusal.value.param == "tools[0].function.parameters"


def test_an_answer_in_a_schema_or_a_call(client: openai.OpenAI) -> None:
    answer = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": answer}}
    made = client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        tools=TOOLS,
        response_format=form,
        n=4,
        parallel_tool_calls=False,
        max_tokens=200,
    )
    for choice in made.choices:
        check_calls(choice.message.tool_calls or ())
        if choice.message.content is not None:
            jsonschema.validate(json.loads(choice.message.content), answer)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "auto"}, "tool_choice needs tools", "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice needs tools", "tool_choice"),
    ({"tool_choice": "sometimes", "tools": TOOLS}, "'none', 'auto' or 'required'", "tool_choice"),
    (
        {"tool_choice": tool(), "tools": TOOLS},
        "'f', but the tools are get_weather, now",
        "tool_choice.function.name",
    ),
    ({"tools": [{"type": "function"}]}, "tools.0.function: Field required", "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "'function'", "tools"),
    ({"tools": [tool(name="a b")]}, "tools.0.function.name", "tools"),
    (
        {"tools": [tool(parameters={"type": "string"})]},
        "must be 'object'",
        "tools[0].function.parameters.type",
    ),
    (
        {"tools": [tool(parameters={"properties": {"x": {"type": "strin"}}})]},
        "strin",
        "tools[0].function.parameters.properties.x",
    ),
    (
        {"tools": [tool(parameters={"properties": {"x": 5}})]},
        "schema",
        "tools[0].function.parameters",
    ),
    (
        {
            "tools": [
                tool(
                    description="x" * 10,
                    parameters={"properties": {str(i): {"const": "x" * 1000} for i in range(140)}},
                )
            ]
        },
        "characters; at most",
        "tools[0].function.parameters",
    ),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "a format other than JSON", "tools"),
    ({"functions": [{"name": "f"}]}, "use tools", "functions"),
    ({"function_call": "auto"}, "use tool_choice", "function_call"),
    (
        {"messages": [{"role": "user", "content": "x", "function_call": {"name": "f"}}]},
        "function_call",
        "messages",
    ),
    ({"messages": [*QUESTION, {"role": "assistant"}]}, "messages[1] must have content", "messages"),
    (
        {"messages": [*QUESTION, assistant(arguments={})]},
        "messages.1.tool_calls.0.function.arguments: JSON input should be string",
        "messages",
    ),
    (
        {"messages": [*QUESTION, assistant() | {"role": "user"}]},
        "messages[1] must have content",
        "messages",
    ),
    (
        {"messages": [*HISTORY[:2], {"role": "tool", "tool_call_id": "2", "content": "x"}]},
        "the id of a call",
        "messages[2].tool_call_id",
    ),
    (
        {"messages": [*QUESTION, {"role": "tool", "content": "x"}]},
        "the id of a call",
        "messages[1].tool_call_id",
    ),
]


@pytest.mark.parametrize(("wrong", "words", "param"), WRONG, ids=str)
def test_wrong_requests(
    server: ServerProcess, wrong: dict[str, Any], words: str, param: str
) -> None:
    response = server.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 2} | wrong)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (
        words in error["message"]
        and error["param"] == param
        and error["type"] == "invalid_request_error"
    )


def test_tokens_of_a_chat_with_tools_are_those_of_its_prompt(server: ServerProcess) -> None:
    body = {"messages": HISTORY, "tools": TOOLS}
    count = server.post("/tokenize", body).json()["count"]
    answer = server.post("/v1/chat/completions", body | {"max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == count > 100


def test_completions_know_no_tools(server: ServerProcess) -> None:
    assert (
        "tools is not supported"
        in server.post("/v1/completions", {"prompt": "a", "tools": TOOLS}).text
    )
