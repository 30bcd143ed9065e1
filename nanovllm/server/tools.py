"""Tool calls: how a model is told of the functions that a client describes, how it calls them, and
how its answer is read.

Whatever the model, a call has the form of Hermes and Qwen, as text or with the model's own tokens
for the tags:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

A grammar holds the model to it: the name is one of the client's, and the arguments follow that
function's schema. What grammars cannot express in a schema is an error if the function is `strict`;
otherwise it is left out. With tool_choice "auto", text may come first, and everything from the
first `<tool_call>` on is calls. With "none", the answer is text without any. Otherwise it is calls
alone: at least one ("required"), or one call of the function that is named."""

from __future__ import annotations

import itertools
import json
import re
import uuid
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from nanovllm.data.json import JsonObject
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.structured_outputs import StructuredOutputsParams
from nanovllm.server.errors import APIError
from nanovllm.server.parts import Tools
from nanovllm.server.protocol import ChatBody, ChatCompletionRequest, FunctionDefinition, Tool
from nanovllm.server.responses import AssistantMessage, Delta, FunctionCall, TextReader, ToolCall
from nanovllm.text.forms import Forms
from nanovllm.text.schemas import SPELLING

if TYPE_CHECKING:
    from nanovllm.text.grammar_check import GrammarChecker

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
BEFORE_NAME = '\n{"name": "'
BEFORE_ARGUMENTS = '", "arguments": '
# A string in JSON has no line break, so arguments cannot contain this.
AFTER_ARGUMENTS = "}\n" + CLOSE
NEXT_END = {OPEN: BEFORE_ARGUMENTS, BEFORE_ARGUMENTS: AFTER_ARGUMENTS, AFTER_ARGUMENTS: OPEN}

# A statement of a chat template that uses `tools`, and the words by which Hermes' and Qwen's
# templates ask for this form.
USES_TOOLS = re.compile(r"\{%[^%]*\btools\b")
ASKS_FOR_FORM = "<function-name>"
# Qwen's words, for models whose template knows no tools, or asks for another form.
DESCRIPTION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
    "provided with function signatures within <tools></tools> XML "
    "tags:\n<tools>\n{}\n</tools>\n\nFor each function call, return a json object with function"
    ' name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{{"name":'
    ' <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}}
# The separators that models were trained on. Any whitespace elsewhere could go on for ever.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", **SPELLING}

Message = JsonObject


# ---------------------------------------------------------------- what the model reads


def described(messages: list[Message], body: ChatBody, templates: dict[str, str]) -> JsonObject:
    """Tell the model of the tools, of its own calls, and of their results.

    Its chat template does so if it asks for calls of this form. If not, a system message describes
    the functions, and calls and results are texts like others.

    Args:
        messages: as templates expect them.
        templates: the model's chat templates.

    Returns:
        Arguments for `Tokenizer.apply_chat_template`.

    Raises:
        APIError: a result belongs to no call.
    """
    names: dict[str, str] = {}  # of the functions that were called, by the call's id
    for i, message in enumerate(messages):
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool":
            if message.get("tool_call_id") not in names:
                where = f"messages[{i}].tool_call_id"
                raise APIError(
                    400,
                    f"{where} must be the id of a call in an earlier message's tool_calls",
                    where,
                )
            message["name"] = names[message["tool_call_id"]]
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or NO_PARAMETERS,
            },
        }
        for tool in body.tools or ()
    ]
    name = body.chat_template or ("tool_use" if tools and "tool_use" in templates else "default")
    if ASKS_FOR_FORM in templates.get(name, "") and USES_TOOLS.search(templates[name]):
        return {"messages": messages, "tools": tools or None, "chat_template": name}
    return {
        "messages": spelled_out(
            messages, "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        )
    }


def spelled_out(messages: list[Message], tools: str) -> list[Message]:
    """Messages for a template that knows only texts. Results that follow each other become one
    message of the user, as with Qwen."""

    def texts(message: Message) -> list[str]:
        content = message["content"]
        found = [part["text"] for part in content] if isinstance(content, list) else [content]
        if message["role"] == "tool":
            found = ["<tool_response>", *found, "</tool_response>"]
        calls = (
            json.dumps(call["function"], ensure_ascii=False)
            for call in message.get("tool_calls", ())
        )
        return [*filter(None, found), *(f"{OPEN}\n{call}\n{CLOSE}" for call in calls)]

    spelled: list[tuple[str, list[str]]] = []
    for role, group in itertools.groupby(messages, lambda message: message["role"]):
        if role == "tool":
            spelled.append(("user", [text for message in group for text in texts(message)]))
        else:
            spelled += [(role, texts(message)) for message in group]
    if tools:
        if spelled[0][0] != "system":
            spelled.insert(0, ("system", []))
        spelled[0][1].append(DESCRIPTION.format(tools))
    return [{"role": role, "content": "\n".join(parts)} for role, parts in spelled]


# ---------------------------------------------------------------- what the model may write


def constrained(
    params: SamplingParams, body: ChatCompletionRequest, forms: Forms
) -> SamplingParams:
    """Sampling parameters that hold an answer to the form of calls, and to `tool_choice`.

    Args:
        params: with the form of an answer that is no call, if the client wants one.
        forms: checks schemas, and knows the special tokens.

    Raises:
        APIError: names the field that is wrong.
        GrammarError: names the part of a schema that is wrong.
    """
    tools = list(enumerate(body.tools or ()))
    choice = body.tool_choice or "auto"
    others = params.structured_outputs
    if choice == "none" and (others or not tools):
        return params
    if not tools:
        raise APIError(400, "tool_choice needs tools; only 'none' may come without", "tool_choice")
    if isinstance(choice, Tool):
        names = ", ".join(tool.function.name for _, tool in tools)
        name = choice.function.name
        tools = [(i, tool) for i, tool in tools if tool.function.name == name]
        if not tools:
            message = f"tool_choice.function.name is {name!r}, but the tools are {names}"
            raise APIError(400, message, "tool_choice.function.name")
    answer = None
    if choice == "auto" and others is not None:
        if others.field not in ("json", "json_object"):
            message = (
                "tools require tool_choice 'none' or 'required' if the output must have a format "
                "other than JSON"
            )
            raise APIError(400, message, "tools")
        answer = json.loads(others.json) if isinstance(others.json, str) else others.json
        answer = {"type": "object"} if answer is None else answer
        answer = forms.checker().prepared_schema(answer, others.place)
    functions = {f"tools[{i}].function.parameters": tool.function for i, tool in tools}
    schemas = {
        place: schema_of(function, place, forms.checker()) for place, function in functions.items()
    }
    calls = [function_call(function, schemas[place]) for place, function in functions.items()]
    several = body.parallel_tool_calls is not False and not isinstance(choice, Tool)
    tokenizer = forms.tokenizer
    size = forms.limits.vocab_size
    special = {
        tokenizer.decode_token(token): token for token in tokenizer.all_special_ids if token < size
    }
    grammar = StructuredOutputsParams(
        grammar=call_grammar(calls, choice, several, answer, special), place="tools"
    )
    if choice in ("none", "auto") and answer is None:
        grammar.free_text_before = OPEN
    forms.checker().check(grammar)
    # Special tokens are no text unless it is asked for.
    skips = params.skip_special_tokens and OPEN not in special
    return params.clone(structured_outputs=grammar, skip_special_tokens=skips)


def schema_of(function: FunctionDefinition, place: str, grammars: GrammarChecker) -> JsonObject:
    """The schema of a function's arguments, prepared for grammars: an object, with the properties
    that the function names, and no others unless it says so. Unless the function is `strict`,
    patterns that grammars do not know are left out.

    Args:
        place: where the function's schema comes from.

    Raises:
        APIError: it is no schema of an object.
        GrammarError: names the part that is wrong.
    """
    schema = {"type": "object", **(function.parameters or NO_PARAMETERS)}
    if schema["type"] != "object":
        raise APIError(
            400, f"{place}.type must be 'object', got {schema['type']!r:.100}", f"{place}.type"
        )
    return grammars.prepared_schema(schema, place, lenient=not function.strict)


def function_call(function: FunctionDefinition, schema: JsonObject) -> str:
    """The grammar of a call of one function. Unless it is `strict`, the grammar ignores keywords
    and formats that it does not know."""
    name = json.dumps(BEFORE_NAME + function.name + BEFORE_ARGUMENTS)
    return f"{name} {json_grammar(schema, lenient=not function.strict)}"


def json_grammar(schema: JsonObject, lenient: bool = False) -> str:
    """The grammar of a JSON text, in the layout of calls. `lenient`: it ignores keywords and
    formats that it does not know."""
    return f"%json {json.dumps({**schema, 'x-guidance': {**LAYOUT, 'lenient': lenient}})}"


def call_grammar(
    calls: list[str],
    choice: object,
    several: bool,
    answer: JsonObject | None,
    special: dict[str, int],
) -> str:
    """The grammar of answers, in llguidance's dialect of Lark.

    Args:
        calls: the grammars of the calls that there may be.
        choice: as `tool_choice`.
        several: whether there may be more than one call.
        answer: with "auto", the schema of an answer that is no call; None: any text.
        special: the special tokens. If the tags are among them, calls have these tokens. Texts may
            have the others.
    """
    first, last = (tag if tag in special else json.dumps(tag) for tag in (OPEN, CLOSE))
    in_texts = ",".join(str(token) for text, token in special.items() if text != OPEN)
    text = f"(TEXT? <[{in_texts}]>)*" if in_texts else ""
    more = f'("\\n" {first} call)*' if several else ""
    if choice == "none":
        start = f"{text} TEXT?"
    elif choice != "auto":
        start = f"{first} call {more}"
    elif answer is not None:
        start = f"{first} call {more} | {json_grammar(answer)}"
    elif OPEN in special:
        start = f"{text} TEXT? ({first} call {more})?"
    else:
        start = f"{text} (TEXT | TEXT_AND_TAG call {more})?"
    return f"""start: {start}
call: ({" | ".join(calls)}) "}}\\n" {last}
TEXT: /(?s:.+)/ & ~/(?s:.*{OPEN}.*)/
TEXT_AND_TAG: /(?s:.*){OPEN}/ & ~/(?s:.*{OPEN}.+)/
"""


# ---------------------------------------------------------------- what the client reads


class ToolCallReader(TextReader):
    """Divides an answer, which comes in pieces, into text and calls. The result does not depend on
    where the text is cut.

    Args:
        is_named: whether the client has named the function. Then a whole call ends with the reason
            "stop", else with "tool_calls", as in OpenAI's API and vLLM.
    """

    def __init__(self, is_named: bool = False) -> None:
        self._is_named = is_named
        self._held = ""
        self._num_calls = 0
        # Of what is being read: text, then a name, then arguments, then text again.
        self._end = OPEN

    def append(self, text: str) -> list[Delta]:
        """Take the next piece; returns what has become certain."""
        deltas: list[Delta] = []
        self._held += text
        while True:
            part, found, rest = self._held.partition(self._end)
            if not found and self._end == BEFORE_ARGUMENTS:  # a name comes as a whole
                return deltas
            if not found:  # hold back what may be the beginning of the end
                sizes = range(min(len(self._end) - 1, len(part)), -1, -1)
                cut = next(len(part) - size for size in sizes if part.endswith(self._end[:size]))
                rest = part[cut:]
                part = part[:cut]
            self._held = rest
            if self._end == BEFORE_ARGUMENTS:
                self._num_calls += 1
                name = FunctionCall(name=part.removeprefix(BEFORE_NAME))
                deltas.append(
                    self._of_call(name, id=f"call_{uuid.uuid4().hex[:24]}", type="function")
                )
            elif self._end == AFTER_ARGUMENTS and part:
                deltas.append(self._of_call(FunctionCall(arguments=part)))
            elif part and not self._num_calls:
                deltas.append(Delta(content=part))
            if not found:
                return deltas
            self._end = NEXT_END[self._end]

    def _of_call(self, function: FunctionCall, **fields: str) -> Delta:
        return Delta(tool_calls=[ToolCall(function, self._num_calls - 1, **fields)])

    def flush(self) -> list[Delta]:
        """What the last pieces have left, when the answer has ended: the beginning of a tag that
        did not follow. Of a call that has been cut off, `append` has returned all; its arguments
        are incomplete."""
        return (
            [Delta(content=self._held)]
            if self._held and self._end == OPEN and not self._num_calls
            else []
        )

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason to tell the client."""
        has_called = self._num_calls and self._end == OPEN
        return "tool_calls" if reason == "stop" and has_called and not self._is_named else reason

    def message(self, text: str) -> AssistantMessage:
        """A whole answer."""
        deltas = self.append(text) + self.flush()
        content = "".join(delta.content or "" for delta in deltas)
        calls: dict[int | UnsetType, ToolCall] = {}
        for part in (part for delta in deltas for part in delta.tool_calls or ()):
            if (call := calls.setdefault(part.index, part)) is not part:
                call.function.arguments += part.function.arguments
        for call in calls.values():
            call.index = UNSET
        return AssistantMessage(
            content if content or not calls else None, tool_calls=[*calls.values()] or UNSET
        )


# ---------------------------------------------------------------- what the server gets


class ToolCalls(Tools):
    """Tool calls in the form of Hermes and Qwen."""

    def described(
        self, messages: list[Message], body: ChatBody, templates: dict[str, str]
    ) -> JsonObject:
        """See `described`."""
        return described(messages, body, templates)

    def constrained(
        self, params: SamplingParams, body: ChatCompletionRequest, forms: Forms | None
    ) -> SamplingParams:
        """See `constrained`."""
        assert forms is not None, "belongs to the same part of the package"
        return constrained(params, body, forms)

    def create_reader(self, is_named: bool) -> TextReader:
        """See `ToolCallReader`."""
        return ToolCallReader(is_named)
