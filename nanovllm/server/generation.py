"""One HTTP request as one or several engine requests: submitted together, read together, answered
together."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from nanovllm.data.json import JsonObject
from nanovllm.data.kv_transfer import RemoteKV
from nanovllm.data.outputs import Logprob, OutputCollector, PositionLogprobs, RequestOutput
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.engine.request_stream import RequestStream
from nanovllm.server.admission import Admission
from nanovllm.server.errors import APIError, as_api_error
from nanovllm.server.parts import NO_PARTS, ServerParts
from nanovllm.server.protocol import Body, ChatBody, SamplingBody, StreamOptions
from nanovllm.server.responses import Answer, Choice, TokenLogprob, TopLogprob, Usage
from nanovllm.text.portions import in_portions

logger = logging.getLogger("nanovllm.server")

# JSON has no infinity; OpenAI writes this for a token that cannot come.
SMALLEST_LOGPROB = -9999.0
# Chat templates run in one thread at a time, so that chats wait for one another, and other requests
# do not wait for them.
RENDERING = CapacityLimiter(1)

Result = TypeVar("Result")
AnswerKind = TypeVar("AnswerKind", bound=Answer)


class Generation:
    """One HTTP request: its engine requests, one per prompt, and its answer, whole or as a stream.
    The base of all generations.

    Args:
        engine: whose tokenizer spells the tokens.
        body: the request.
        prompts: token ids of each prompt.
        params: the sampling parameters, the same for all prompts.

    Attributes:
        prefix: with which the answer's id begins.
        chunk_kind: what a stream consists of.
        hides_tokens: whether the client wants the prompt's log-probabilities alone, and gets no
            generated tokens.
        streams: one per prompt.
        kv_transfer_params: for the server that continues the request; known at the end, if at all.
    """

    prefix: str
    chunk_kind: type[Answer]
    hides_tokens = False

    def __init__(
        self,
        engine: AsyncEngine,
        body: SamplingBody,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.engine = engine
        self.body = body
        self.prompts = prompts
        self.params = params
        self.streams: list[RequestStream] = []
        self.kv_transfer_params: RemoteKV | UnsetType = UNSET
        self._num_completion_tokens = 0
        self._num_cached_tokens = [0] * len(prompts)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """The outputs of all prompts as they come, each with the prompt's index."""
        reading = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(self.streams)}
        try:
            while reading:
                done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    i = reading.pop(task)
                    output = task.result()
                    if not output.finished:
                        reading[asyncio.ensure_future(anext(self.streams[i]))] = i
                    self._num_completion_tokens += sum(
                        len(piece.token_ids) for piece in output.outputs
                    )
                    self._num_cached_tokens[i] = output.num_cached_tokens
                    if output.kv_transfer_params is not None:
                        self.kv_transfer_params = output.kv_transfer_params
                    yield i, output
        finally:
            for task in reading:
                task.cancel()

    async def collect(self) -> list[RequestOutput]:
        """The whole outputs, in the order of the prompts."""
        collectors = [OutputCollector() for _ in self.streams]
        async for i, output in self.outputs():
            collectors[i].add(output)
        return [collector.result() for collector in collectors]

    def usage(self) -> Usage:
        """Numbers of tokens so far, without generated tokens that the client does not get."""
        num_prompt = sum(map(len, self.prompts))
        num_completion = 0 if self.hides_tokens else self._num_completion_tokens
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details={"cached_tokens": sum(self._num_cached_tokens)},
        )

    def answer(
        self, kind: type[AnswerKind], choices: Sequence[Choice], **fields: Any
    ) -> AnswerKind:
        """An answer or a chunk with these choices."""
        fields |= {
            "id": self.id,
            "created": self.created,
            "model": self.engine.name,
            "choices": choices,
        }
        return kind(kv_transfer_params=self.kv_transfer_params, **fields)

    def close(self) -> None:
        """End the requests that have not ended."""
        for stream in self.streams:
            stream.close()

    def token_logprob(
        self, token_id: int, position: dict[int, Logprob], num_likeliest: int | None
    ) -> TokenLogprob:
        """A token's text, log-probability and bytes, and those of the likeliest tokens of its
        position. The chosen token is among these only if it is one of them."""

        def entry(token_id: int) -> TopLogprob:
            raw = self.engine.tokenizer.token_bytes(token_id)  # perhaps only a part of a character
            return TopLogprob(
                token=raw.decode("utf-8", "replace"),
                logprob=max(position[token_id].logprob, SMALLEST_LOGPROB),
                bytes=list(raw),
            )

        ranked = sorted((each.rank or 0, other) for other, each in position.items())
        likeliest = [entry(other) for rank, other in ranked if rank <= (num_likeliest or 0)]
        chosen = entry(token_id)
        return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top_logprobs=likeliest)

    async def prompt_logprobs(self, output: RequestOutput) -> list[PositionLogprobs] | UnsetType:
        """Prompt log-probabilities in vLLM's shape: token id -> {logprob, rank, decoded_token};
        UNSET if they were not asked for."""
        if self.body.prompt_logprobs is None:
            return UNSET
        return [
            position and encoded(position)
            async for position in in_portions(output.prompt_logprobs or ())
        ]

    def choices(self) -> AsyncIterator[Choice]:
        """The new parts of the answer's choices, as they come."""
        raise NotImplementedError

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events: one per new part of a choice, an error if there is one,
        and [DONE]. If the client wants the numbers of tokens at the end only, they are null before.
        """
        options = self.body.stream_options or StreamOptions()
        usage: Usage | UnsetType | None = None if options.include_usage else UNSET
        try:
            async for choice in self.choices():
                if options.include_usage and options.continuous_usage_stats:
                    usage = self.usage()
                yield self._event([choice], usage)
            if options.include_usage:
                yield self._event([], self.usage())
        except Exception as error:
            # The status was sent long ago, so the error is a part of the stream.
            api_error = as_api_error(error)
            if api_error.status_code == 500:
                logger.exception("a stream failed")
            yield api_error.event()
        yield b"data: [DONE]\n\n"

    def _event(self, choices: Sequence[Choice], usage: Usage | UnsetType | None) -> bytes:
        encoded = msgspec.json.encode(self.answer(self.chunk_kind, choices, usage=usage))
        return b"data: " + without_line_breaks(encoded) + b"\n\n"


class Endpoint:
    """Checks and queues requests; the base of all generating endpoints.

    Args:
        admission: decides which requests come in.
        strict: reject requests with unknown fields.
        parts: what the server has besides.
    """

    def __init__(
        self, admission: Admission, strict: bool = False, parts: ServerParts = NO_PARTS
    ) -> None:
        self.admission = admission
        self.engine = admission.engine
        self.strict = strict
        self.parts = parts

    def check(self, body: Body) -> None:
        """Refuse an unknown model and unsupported fields; if `strict`, unknown ones too.

        Raises:
            APIError: names the field.
        """
        check_model(self.engine, body.model)
        body.check_unknown_fields(self.strict)

    async def encode_chat(self, body: ChatBody, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a chat. The template writes the special tokens itself. It is a program
        that may take seconds, so the caller holds a place (`Admission.place`), which bounds how
        many chats wait for it.

        Raises:
            APIError: the model has no such template.
            ValueError: as `Tokenizer.apply_chat_template` and `AsyncEngine.encode`.
        """
        arguments = body.template_arguments()
        templates = self.engine.tokenizer.chat_templates
        if body.chat_template is not None and body.chat_template not in templates:
            names = ", ".join(sorted(templates)) or "it has none"
            raise APIError(
                400,
                "chat_template is not supported unless it names one of the model's templates: "
                f"{names}",
                "chat_template",
            )
        if body.mentions_tools:
            arguments |= self.parts.tools.described(arguments["messages"], body, templates)
        render = partial(self.engine.tokenizer.apply_chat_template, **arguments)
        text = await run_sync(render, limiter=RENDERING)
        return await self.engine.encode(text, add_special_tokens)

    def check_transfer(self, kv_transfer_params: JsonObject, num_sequences: int) -> None:
        """Refuse KV parameters from a router if this engine shares no KV, or if there would be
        several answers.

        Raises:
            ValueError: says what is needed.
        """
        roles = [each["kv_role"] for each in self.engine.limits.kv_transfer if "kv_port" in each]
        if not roles:
            raise ValueError(
                "kv_transfer_params: needs a server that runs with --kv-role producer, consumer or "
                "both"
            )
        if kv_transfer_params.get("do_remote_decode") and num_sequences > 1:
            raise ValueError(
                "kv_transfer_params: do_remote_decode needs one prompt and n = 1, not "
                f"{num_sequences}"
            )
        self.parts.check_transfer(kv_transfer_params, roles[0])

    async def submit(self, generation: Generation) -> None:
        """Queue all prompts, or none of them.

        Raises:
            ValueError: a bad prompt, or KV parameters that do not fit.
            EngineDeadError: the engine has ended.
        """
        body = generation.body
        prompts = generation.prompts
        params = generation.params
        if body.kv_transfer_params is not None:
            self.check_transfer(body.kv_transfer_params, len(prompts) * params.n)
        options = {"cache_salt": body.cache_salt, "kv_transfer_params": body.kv_transfer_params}
        try:
            for i, prompt in enumerate(prompts):
                stream = await self.engine.add_request(
                    f"{generation.id}-{i}",
                    {"prompt_token_ids": prompt, **options},
                    params,
                    body.priority or 0,
                )
                generation.streams.append(stream)
        except BaseException:
            generation.close()
            raise


def encoded(part: Result) -> Result:
    """A part of an answer as JSON, so that a large answer is not encoded all at once when it is
    sent."""
    return msgspec.Raw(msgspec.json.encode(part))  # type: ignore[return-value]


# Characters that some readers of server-sent events take for the end of a line: NEL, LINE
# SEPARATOR, PARAGRAPH SEPARATOR. The C0 control characters are escaped in all JSON.
LINE_BREAKS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\u0085\u2028\u2029"}


def without_line_breaks(json: bytes) -> bytes:
    """The same JSON without raw line breaks. In JSON these characters occur in strings only, where
    an escape means the same."""
    for char, escape in LINE_BREAKS.items():
        json = json.replace(char, escape)
    return json


def check_model(engine: AsyncEngine, name: str | None) -> None:
    """Refuse the name of a model that is not served; no name at all means the model that is."""
    if name is not None and name not in engine.config.model_names:
        served = " and ".join(repr(each) for each in engine.config.model_names)
        raise APIError(
            404,
            f"the model {name!r} does not exist; this server has {served}",
            "model",
            "model_not_found",
        )


def json_response(answer: object, headers: dict[str, str] | None = None) -> Response:
    """An answer as JSON."""
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


async def unless_disconnected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        APIError: the client has gone, and will not read the answer.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise APIError(499, "the client has closed the connection")
    finally:
        watch.cancel()
        task.cancel()
