"""Answers: OpenAI's objects as plain structures, and streams. A field that is UNSET does not appear
in the JSON."""

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from nanovllm.data.json import JsonObject
from nanovllm.data.kv_transfer import RemoteKV
from nanovllm.data.outputs import PositionLogprobs


class Usage(Struct):
    """Numbers of tokens. The details have `cached_tokens`: those of the prompt that the prefix
    cache supplied."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class TopLogprob(Struct):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The chosen token at a position, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities in the shape of chats."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    """Log-probabilities in the shape of completions: lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionCall(Struct):
    """The function that a model calls, and its arguments as JSON; in a stream, first the name and
    then parts of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(Struct):
    """One call. In a stream, the first part has the id, and all parts have the index of the
    call."""

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class AssistantMessage(Struct):
    """A whole answer; its content is null if there are only calls."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(Struct):
    """What all choices, and new parts of them, have."""

    index: int
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChoice(Choice, kw_only=True):
    """One of the `n` answers."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None = None


class Answer(Struct, kw_only=True):
    """The fields that answers and chunks share."""

    id: str
    created: int
    model: str
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: RemoteKV | UnsetType = UNSET


class ChatCompletion(Answer, kw_only=True):
    """Answer of /v1/chat/completions."""

    object: str = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: list[PositionLogprobs] | UnsetType | None = UNSET


class Delta(Struct):
    """The new part of an answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class TextReader:
    """Reads an answer, which comes in pieces, as text alone."""

    def append(self, text: str) -> list[Delta]:
        """Take the next piece; returns what has become certain."""
        return [Delta(content=text)] if text else []

    def flush(self) -> list[Delta]:
        """What the last pieces have left, when the answer has ended."""
        return []

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason to tell the client."""
        return reason

    def message(self, text: str) -> AssistantMessage:
        """A whole answer."""
        return AssistantMessage(text)


class ChatChunkChoice(Choice, kw_only=True):
    """The new part of one of the `n` answers."""

    delta: Delta
    logprobs: ChatLogprobs | None = None


class ChatChunk(Answer, kw_only=True):
    """An event in the stream of a chat."""

    object: str = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class CompletionChoice(Choice, kw_only=True):
    """One completion, or its new part."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[PositionLogprobs] | UnsetType | None = UNSET


class Completion(Answer, kw_only=True):
    """Answer of /v1/completions, and an event in its stream."""

    object: str = "text_completion"
    choices: list[CompletionChoice]


class Tokens(Struct):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class Error(Struct):
    """The answer to a request that fails: a message, its type, the field that is wrong (param), and
    a code for programs."""

    error: dict[str, str | None]


def schemas() -> JsonObject:
    """JSON schemas of the answers, by name, for the OpenAPI description."""
    _, components = msgspec.json.schema_components(
        (ChatCompletion, Completion, Tokens, Error), ref_template="#/components/schemas/{name}"
    )
    return components


def documented(
    status: int | str, answer: type[Struct], about: str = "OK"
) -> dict[int | str, JsonObject]:
    """An entry in the `responses` of a route, for the OpenAPI description."""
    schema = {"$ref": f"#/components/schemas/{answer.__name__}"}
    return {status: {"description": about, "content": {"application/json": {"schema": schema}}}}


ERRORS = {
    **documented("4XX", Error, "The request is wrong, or not allowed, or too much at the moment"),
    **documented("503", Error, "The engine has ended"),
}


class ClosingStream(StreamingResponse):
    """A stream that calls `on_close` at its end, even if the client leaves before the first piece.

    Args:
        on_close: called once; awaited if it is asynchronous.
    """

    def __init__(
        self,
        pieces: AsyncIterable[bytes],
        on_close: Callable[[], Awaitable[None] | None],
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str | None = None,
    ) -> None:
        super().__init__(pieces, status_code, headers, media_type)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if (closing := self._on_close()) is not None:
                await closing
