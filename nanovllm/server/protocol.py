"""The bodies of requests: OpenAI's, with vLLM's additional sampling fields, as pydantic models."""

import json
import logging
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, BeforeValidator, Field, Json, PrivateAttr, create_model

from nanovllm.data.checks import did_you_mean
from nanovllm.data.json import JsonObject
from nanovllm.data.sampling_params import MAX_LOGPROBS, SamplingParams
from nanovllm.data.structured_outputs import StructuredOutputsParams
from nanovllm.server.errors import APIError

logger = logging.getLogger("nanovllm.server")


# Stop validating a list at its first wrong entry, of which there may be a million.
AT_FIRST_ERROR = Field(fail_fast=True)
NOTHING_IS_EMPTY = BeforeValidator(lambda text: "{}" if text in ("", None) else text)
TokenIds = Annotated[list[int], AT_FIRST_ERROR]
Strings = Annotated[list[str], AT_FIRST_ERROR]


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Fields that would change the answer and that this server does not know, and those of their values
# that change nothing. Empty values never do. Completions have echo and add_special_tokens, which
# are unsupported elsewhere. chat_template: Jinja from strangers can keep a processor busy for ever.
UNSUPPORTED = names(
    "tools functions audio web_search_options reasoning_effort verbosity suffix use_beam_search "
    "allowed_token_ids truncate_prompt_tokens prompt_embeds documents guided_json guided_regex "
    "guided_choice guided_grammar echo add_special_tokens return_token_ids "
    "return_tokens_as_token_ids chat_template tool_choice function_call modalities best_of "
    "length_penalty"
)
NEUTRAL: dict[str, object] = {
    "tool_choice": "none",
    "function_call": "none",
    "modalities": ["text"],
    "length_penalty": 1.0,
    "reasoning_effort": "none",
}
# What to use instead of a field.
INSTEAD = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "best_of": "do not set it, or set it to the value of n",
}
# OpenAI's fields that change no answer. They are ignored like unknown ones, but never refused.
HARMLESS = names(
    "user safety_identifier metadata store service_tier prompt_cache_key parallel_tool_calls"
)
# A client may send any number of unknown names: so many of them get a line in the log, and so many
# of a request's are named.
MAX_WARNINGS = 100
MAX_NAMED = 10
_warned: set[str] = set()


class Strict(BaseModel, strict=True):
    """A part of a body. Types are strict: "5" is no number, and 1 is not true."""


class Body(Strict, extra="allow"):
    """A request's body."""

    _ignored: list[str] = PrivateAttr(default_factory=list)
    model: str | None = Field(None, description="default: the served model")

    def check_unknown_fields(self, strict: bool) -> None:
        """Refuse fields that would change the answer; warn of other unknown fields, or refuse them,
        too.

        Raises:
            APIError: names the field.
        """
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED:
                if value and value != NEUTRAL.get(name) and not self.is_neutral(name, value):
                    hint = (
                        "use structured_outputs"
                        if name.startswith("guided_")
                        else INSTEAD.get(name)
                    )
                    raise APIError(
                        400,
                        f"{name} is not supported by this server" + (f"; {hint}" if hint else ""),
                        name,
                        "unsupported_parameter",
                    )
            elif len(self._ignored) < MAX_NAMED:
                harmless = name in HARMLESS
                hint = did_you_mean(name, type(self).model_fields)
                found = repr(name[:40]) if harmless else f"{name[:40]!r} is unknown{hint}"
                if strict and not harmless:
                    raise APIError(400, f"the field {found}", name[:40], "unknown_parameter")
                self._ignored.append(found)
                if name not in _warned and len(_warned) < MAX_WARNINGS:
                    _warned.add(name)
                    logger.warning("ignored a request field: %s", found)

    def is_neutral(self, name: str, value: object) -> bool:
        """Whether this value of an unsupported field changes nothing, given the request's other
        fields."""
        return False

    @property
    def warning(self) -> dict[str, str]:
        """The header of the answer that names the ignored fields, if there are any."""
        # In quotes, and without line breaks.
        fields = json.dumps("ignored fields: " + ", ".join(self._ignored))
        return {"Warning": f"299 nanovllm {fields}"} if self._ignored else {}


class StreamOptions(Strict):
    """How a stream ends."""

    include_usage: bool | None = Field(
        default=None, description="send a last chunk with the token counts"
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="with include_usage: also send the counts so far in every chunk"
    )


class ResponseFormat(Strict):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    # The schema's name, description and `strict` change nothing: it is always followed.
    json_schema: JsonObject | None = None

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """What the output must match.

        Raises:
            APIError: the schema is missing, or there is one that would be ignored.
        """
        schema = (self.json_schema or {}).get("schema")
        place = "response_format.json_schema.schema"
        if isinstance(schema, dict) != (self.type == "json_schema"):
            raise APIError(
                400, f"{place} must be an object if, and only if, the type is 'json_schema'", place
            )
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True, place="response_format")
        return None if schema is None else StructuredOutputsParams(json=schema, place=place)


# Sampling parameters that need no conversion. Each is a field of the same name and type; None: not
# given.
HINTS = get_type_hints(SamplingParams)
PASSED_ON = [
    name
    for name in HINTS
    if name not in ("logit_bias", "logprobs", "structured_outputs", "bad_words_token_ids")
]
_FIELDS: Any = {name: (HINTS[name] | None, None) for name in PASSED_ON}
SamplingFields: Any = create_model("SamplingFields", __base__=Body, **_FIELDS)


class SamplingBody(SamplingFields):  # type: ignore[misc]
    """The fields that completions and chats share: those of `SamplingParams`, and these. None: not
    given."""

    logit_bias: JsonObject | None = Field(None, max_length=1024)
    structured_outputs: JsonObject | None = Field(
        None, description="one of vLLM's json, regex, choice and grammar"
    )
    response_format: ResponseFormat | None = None
    stop: str | Strings | None = None
    stop_token_ids: TokenIds | None = Field(None, max_length=1024)
    bad_words: Strings | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, max_length=256)
    kv_transfer_params: JsonObject | None = Field(
        None, description="source or destination of the prompt's KV"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def is_neutral(self, name: str, value: object) -> bool:
        """See `Body`. The best `n` of `n` answers are all of them."""
        return name == "best_of" and type(value) is int and value == (self.n or 1)

    def sampling_params(self, defaults: JsonObject, **values: Any) -> SamplingParams:
        """The given values, else those that the checkpoint recommends (`defaults`), else OpenAI's.

        Raises:
            ValueError: a value out of its range; names the field and the range.
        """
        given = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            if not all(key.isascii() and key.isdigit() for key in self.logit_bias):
                raise ValueError("logit_bias must be an object whose keys are token ids")
            given["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        formatted = self.response_format and self.response_format.structured_outputs()
        if formatted and self.structured_outputs is not None:
            raise APIError(
                400,
                "response_format cannot be combined with structured_outputs: set only one of them",
                "response_format",
            )
        given["structured_outputs"] = formatted or self.structured_outputs
        if self.stream and self.prompt_logprobs is not None:
            raise APIError(
                400,
                "prompt_logprobs cannot be combined with stream: set only one of them",
                "prompt_logprobs",
            )
        if self.stream_options and not self.stream:
            raise APIError(400, "stream_options requires stream to be true", "stream_options")
        return SamplingParams(**{**defaults, **given, **values})


class CompletionRequest(SamplingBody):
    """Body of /v1/completions."""

    prompt: str | Strings | TokenIds | Annotated[list[TokenIds], AT_FIRST_ERROR]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool = True


class TextPart(Strict):
    """A part of a message. Other types than "text" are refused."""

    type: Literal["text"]
    text: str


class FunctionDefinition(Strict):
    """What a function does, and which arguments it takes."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: JsonObject | None = Field(
        None, description="JSON Schema of an object; default: no arguments"
    )
    strict: bool | None = Field(
        None, description="true: reject a schema that is not fully supported"
    )


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionCall(Strict):
    """The function that the model has called."""

    name: str
    # As in vLLM, "" means no arguments. What is no JSON object, such as arguments cut off at
    # max_tokens, reaches the model as text.
    arguments: Annotated[
        Json[JsonObject] | str, Field(union_mode="left_to_right"), NOTHING_IS_EMPTY
    ]


class ToolCall(Strict):
    """A call that the model has made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Strict, extra="allow"):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], AT_FIRST_ERROR] | None = Field(
        None, description="or tool_calls"
    )
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], AT_FIRST_ERROR] | None = Field(
        None, description="calls by the assistant"
    )
    tool_call_id: str | None = Field(None, description="the call whose result is in a tool message")

    def plain(self) -> JsonObject:
        """The message as templates expect it."""
        message = self.model_dump(
            include={"role", "content", "name", "tool_calls", "tool_call_id"}, exclude_none=True
        )
        # OpenAI's newer name of the system role, which few templates know.
        return {"content": "", **message} | ({"role": "system"} if self.role == "developer" else {})


# Arguments of `apply_chat_template` that are set here or not supported. "self" is one of every
# method that is called on the way, and in Jinja the template itself.
TEMPLATE_VARIABLES_IN_USE = names(
    "messages conversations tools documents chat_template add_generation_prompt "
    "continue_final_message return_assistant_tokens_mask self tokenize"
)


class ChatBody(Body):
    """A chat that is to be rendered by the model's template."""

    messages: Annotated[list[ChatMessage], AT_FIRST_ERROR] = Field(min_length=1)
    add_generation_prompt: bool | None = Field(
        None, description="default: true, unless continue_final_message is true"
    )
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = Field(
        None, description="template variables, such as enable_thinking"
    )
    chat_template: str | None = Field(None, description="name of one of the model's chat templates")
    tools: Annotated[list[Tool], AT_FIRST_ERROR] | None = Field(None, max_length=128)

    @property
    def mentions_tools(self) -> bool:
        """Whether the model has to be told of functions, of calls or of their results."""
        return bool(
            self.tools
            or any(message.tool_calls or message.role == "tool" for message in self.messages)
        )

    def template_arguments(self) -> JsonObject:
        """Arguments for `Tokenizer.apply_chat_template`.

        Raises:
            APIError: a message without content, or with what is not supported; or a template
                variable that has another meaning.
        """
        for i, message in enumerate(self.messages):
            for name in ("function_call", "audio"):
                if (message.model_extra or {}).get(name):
                    raise APIError(
                        400, f"messages[{i}].{name} is not supported by this server", "messages"
                    )
            has_calls = message.tool_calls and message.role == "assistant"
            if not has_calls and (message.content is None or message.tool_calls):
                raise APIError(
                    400,
                    f"messages[{i}] must have content; only the assistant's has tool_calls",
                    "messages",
                )
        variables = self.chat_template_kwargs or {}
        if taken := TEMPLATE_VARIABLES_IN_USE & variables.keys():
            raise APIError(
                400,
                f"chat_template_kwargs must not have {sorted(taken)[0]!r}",
                "chat_template_kwargs",
            )
        continued = bool(self.continue_final_message)
        prompted = self.add_generation_prompt
        return {
            **variables,
            "messages": [message.plain() for message in self.messages],
            "add_generation_prompt": not continued if prompted is None else prompted,
            "continue_final_message": continued,
            "chat_template": self.chat_template,
        }


class ChatCompletionRequest(SamplingBody, ChatBody):
    """Body of /v1/chat/completions."""

    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: int | None = Field(None, ge=1)
    tool_choice: Literal["none", "auto", "required"] | Tool | None = Field(
        None, description="default: auto"
    )
    parallel_tool_calls: bool | None = Field(None, description="allow several calls; default: true")


class TokenizeRequest(ChatBody):
    """Body of /tokenize: a text as `prompt`, or a chat as `messages`."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], AT_FIRST_ERROR] = Field(default_factory=list)
    add_special_tokens: bool | None = Field(
        None, description="default: true for completions, false for chats"
    )
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    tokens: TokenIds


class KVReleaseRequest(Strict):
    """Body of /kv_transfer/release."""

    remote_request_id: str = Field(
        max_length=1000, description="request id from the prefill server's kv_transfer_params"
    )
