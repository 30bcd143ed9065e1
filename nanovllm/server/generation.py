"""One HTTP request as one or several engine requests: submitted together, read together, closed together.

Built by notebooks/91_llama_server.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from nanovllm.data.outputs import Logprob, OutputCollector, RequestOutput
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.engine.request_stream import RequestStream
from nanovllm.kv_transfer.pd.plan import TransferParams
from nanovllm.server.errors import APIError, describe, error_body
from nanovllm.server.protocol import ChatBody, SamplingBody
from nanovllm.server.rendering import RENDERER
from nanovllm.server.responses import PromptTokensDetails, TopLogprob, Usage
from nanovllm.server.shares import note_request, place
from nanovllm.text.long_texts import TooManyTokensError
from nanovllm.text.portions import in_portions

logger = logging.getLogger("nanovllm.server")

MAX_COMPLETIONS = 1024
# JSON has no infinity; OpenAI writes this for a token that cannot come.
SMALLEST_LOGPROB = -9999.0

Result = TypeVar("Result")


class Generation:
    """What one HTTP request has the engine generate.

    Attributes:
        id: the answer's id.
        model: the model's name in the answer.
        created: seconds since the epoch.
        prompts: token ids of each prompt.
        params: the sampling parameters, the same for all prompts.
        streams: one a prompt.
        kv_transfer_params: what the client should tell the server that goes on with it; known at the end, if at all.
    """

    def __init__(self, id: str, model: str, prompts: list[list[int]], params: SamplingParams) -> None:
        self.id = id
        self.model = model
        self.created = int(time.time())
        self.prompts = prompts
        self.params = params
        self.streams: list[RequestStream] = []
        self.kv_transfer_params: dict[str, Any] | UnsetType = UNSET
        self._num_completion_tokens = 0
        self._num_cached_tokens = [0] * len(prompts)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """News of all prompts as they come, each with the prompt's position."""
        reading = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(self.streams)}
        try:
            while reading:
                done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    i, output = reading.pop(task), task.result()
                    if not output.finished:
                        reading[asyncio.ensure_future(anext(self.streams[i]))] = i
                    self._count(i, output)
                    yield i, output
        finally:
            for task in reading:
                task.cancel()

    def _count(self, prompt_index: int, output: RequestOutput) -> None:
        self._num_completion_tokens += sum(len(piece.token_ids) for piece in output.outputs)
        self._num_cached_tokens[prompt_index] = output.num_cached_tokens
        if output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params

    async def collect(self) -> list[RequestOutput]:
        """The whole answers, in the order of the prompts."""
        collectors = [OutputCollector() for _ in self.streams]
        async for i, output in self.outputs():
            collectors[i].add(output)
        return [collector.result() for collector in collectors]

    def usage(self, num_hidden_tokens: int = 0) -> Usage:
        """Numbers of tokens so far, less those that were generated and not given to the client."""
        num_prompt_tokens = sum(map(len, self.prompts))
        num_completion_tokens = self._num_completion_tokens - num_hidden_tokens
        return Usage(
            num_prompt_tokens,
            num_completion_tokens,
            num_prompt_tokens + num_completion_tokens,
            PromptTokensDetails(sum(self._num_cached_tokens)),
        )

    def close(self) -> None:
        """End what has not ended."""
        for stream in self.streams:
            stream.close()


class Endpoint:
    """What all generating endpoints need of the engine.

    Args:
        engine: the engine.
        model: the name of the model that is served.
    """

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self.engine = engine
        self.model = model
        longest_token = max(map(len, engine.tokenizer.backend.get_vocab()))
        # Four times: a tokenizer may join characters (é from e and an accent) before it looks for tokens.
        self._most_tokens = 4 * engine.limits.max_request_tokens
        self._longest_text = self._most_tokens * longest_token

    def check(self, body: Any) -> None:
        """Refuse an unknown model and unsupported fields.

        Raises:
            APIError: names the field.
        """
        if body.model is not None and body.model != self.model:
            message = f"the model {body.model!r} does not exist; this server has {self.model!r}"
            raise APIError(404, message, "model", "model_not_found")
        body.check_unknown_fields()

    async def encode_prompt(self, text: str, add_special_tokens: bool, source: str = "prompt") -> list[int]:
        """The token ids of a prompt. One that is far too long is refused before it costs seconds to find out how much.

        Raises:
            APIError: far too long; names the field that it comes from (`source`).
            ValueError: not valid Unicode.
        """
        try:
            if len(text) > self._longest_text:
                raise TooManyTokensError(f"the text has {len(text)} characters")
            return await self.engine.encode(text, add_special_tokens, self._most_tokens)
        except TooManyTokensError as error:
            message = f"{error}, which can never fit into {self.engine.limits.max_request_tokens} tokens"
            raise APIError(400, message, source, "context_length_exceeded") from error

    async def encode_chat(self, body: ChatBody, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a chat. The template writes the special tokens itself."""
        arguments = body.template_arguments()
        # A template is a program that may take seconds: chats wait for one another, and other requests for none of them.
        text = await RENDERER.render(self.engine, arguments)
        return await self.encode_prompt(text, add_special_tokens, "messages")

    def check_count(self, num_prompts: int, n: int) -> None:
        """Refuse too many completions; asked before any prompt is encoded.

        Raises:
            APIError: names their number and the limit.
        """
        if num_prompts * n > MAX_COMPLETIONS:
            raise APIError(
                400,
                f"prompt and n ask for {num_prompts * n} completions; at most {MAX_COMPLETIONS} are allowed",
                "prompt",
            )

    def check_length(
        self, num_prompt_tokens: int, max_tokens: int | None, name: str = "max_tokens", source: str = "prompt"
    ) -> None:
        """Refuse a prompt, from the field `source`, that leaves no room for so many tokens, or for any.

        Raises:
            APIError: names the field to blame, the numbers and the limit.
        """
        limits = self.engine.limits
        limit = limits.max_request_tokens
        what = "context length" if limit == limits.max_model_len else "KV pool's size"
        if num_prompt_tokens >= limit:
            raise APIError(
                400,
                f"the prompt has {num_prompt_tokens} tokens and leaves no room for an answer, "
                f"since the {what} is {limit} tokens",
                source,
                "context_length_exceeded",
            )
        if max_tokens is not None and max_tokens >= 0 and num_prompt_tokens + max_tokens > limit:
            raise APIError(
                400,
                f"{name} is too large: the prompt has {num_prompt_tokens} tokens and {name} is {max_tokens}, together "
                f"{num_prompt_tokens + max_tokens}, but the {what} is {limit} tokens",
                name,
                "context_length_exceeded",
            )

    def check_transfer(self, kv_transfer_params: dict[str, Any] | None, num_sequences: int) -> None:
        """Refuse what a router says of KV if this engine shares none, or if there would be several answers to it.

        Raises:
            APIError: says what is needed.
        """
        if kv_transfer_params is None:
            return
        roles = [each["kv_role"] for each in self.engine.limits.kv_transfer if "kv_port" in each]
        if not roles:
            message = "kv_transfer_params needs a server that runs with --kv-role producer, consumer or both"
            raise APIError(400, message, "kv_transfer_params")
        try:
            TransferParams.check(kv_transfer_params, roles[0])
        except ValueError as error:
            raise APIError(400, str(error), "kv_transfer_params") from error
        if kv_transfer_params.get("do_remote_decode") and num_sequences > 1:
            message = f"do_remote_decode needs one prompt and n = 1; this would be {num_sequences} sequences"
            raise APIError(400, message, "kv_transfer_params")

    async def submit(
        self, prefix: str, prompts: list[list[int]], params: SamplingParams, body: SamplingBody
    ) -> Generation:
        """Queue all prompts, or none of them.

        Raises:
            APIError: too many wait already (429), or what the request says of KV does not fit.
            ValueError: a bad prompt.
            EngineDeadError: the engine has ended.
        """
        self.check_transfer(body.kv_transfer_params, len(prompts) * params.n)
        generation = Generation(f"{prefix}-{uuid.uuid4().hex}", self.model, prompts, params)
        try:
            with place(self.engine, len(prompts) * params.n):
                for i, prompt in enumerate(prompts):
                    source = {
                        "prompt_token_ids": prompt,
                        "cache_salt": body.cache_salt,
                        "kv_transfer_params": body.kv_transfer_params,
                    }
                    request_id = f"{generation.id}-{i}"
                    stream = await self.engine.add_request(request_id, source, params, body.priority or 0)
                    generation.streams.append(stream)
                    note_request(stream, params.n)
        except BaseException:
            generation.close()
            raise
        return generation


def token_text(engine: AsyncEngine, token_id: int) -> tuple[str, list[int]]:
    """A token's text, and its bytes, which may be only a part of a character."""
    raw = engine.tokenizer.token_bytes(token_id)
    return raw.decode("utf-8", "replace"), list(raw)


def likeliest(engine: AsyncEngine, position: dict[int, Logprob], count: int) -> list[TopLogprob]:
    """The `count` likeliest tokens of a position. The chosen token is among them only if it is one of them."""
    ranked = sorted((entry.rank or 0, token_id) for token_id, entry in position.items())
    return [
        TopLogprob(text, max(position[token_id].logprob, SMALLEST_LOGPROB), raw)
        for rank, token_id in ranked
        if rank <= count
        for text, raw in [token_text(engine, token_id)]
    ]


def encoded(part: Result) -> Result:
    """A part of an answer as JSON. What is encoded part by part need not be encoded at once when the answer is sent."""
    return msgspec.Raw(msgspec.json.encode(part))  # type: ignore[return-value]


async def plain_prompt_logprobs(output: RequestOutput) -> list[Any] | None:
    """Prompt log-probabilities in vLLM's shape: token id -> {logprob, rank, decoded_token}."""
    if output.prompt_logprobs is None:
        return None
    return [
        position and encoded({str(token_id): entry for token_id, entry in position.items()})
        async for position in in_portions(output.prompt_logprobs)
    ]


# ---------------------------------------------------------------- answers


class EventStream(StreamingResponse):
    """Server-sent events: one a chunk, an error if there is one, and [DONE].

    Starlette stops the iteration when the client goes away, even before the first chunk: `on_close` is called
    whatever happens.
    """

    def __init__(self, chunks: AsyncIterator[Any], on_close: Callable[[], None]) -> None:
        super().__init__(self._events(chunks), media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-cache"
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()

    @staticmethod
    async def _events(chunks: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
        except Exception as error:  # the status is long sent: only the stream itself can tell
            details = describe(error)
            if details[0] == 500:
                logger.exception("a stream failed")
            yield b"data: " + msgspec.json.encode(error_body(*details)) + b"\n\n"
        yield b"data: [DONE]\n\n"


def json_response(answer: Any) -> Response:
    """An answer as JSON."""
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def unless_disconnected(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes away.

    Raises:
        APIError: the client has gone; nobody will read the answer.
    """

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise APIError(499, "the client has closed the connection")
    finally:
        watch.cancel()
        task.cancel()
