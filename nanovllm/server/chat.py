"""/v1/chat/completions: answer a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

from nanovllm.data.outputs import CompletionOutput
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.server import responses
from nanovllm.server.errors import APIError, blaming_client
from nanovllm.server.generation import Endpoint, Generation, encoded
from nanovllm.server.protocol import ChatCompletionRequest, Tool
from nanovllm.text.portions import in_portions


class ChatEndpoint(Endpoint):
    """Turns chats into engine requests."""

    async def submit_request(self, body: ChatCompletionRequest) -> ChatGeneration:
        """Check a request and queue it.

        Raises:
            APIError: the request is wrong, or too many are already waiting (429).
            EngineDeadError: the engine has ended.
        """
        with blaming_client("messages"):
            self.check(body)
            if body.top_logprobs is not None and not body.logprobs:
                raise APIError(400, "top_logprobs requires logprobs to be true", "top_logprobs")
            name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
            max_tokens = getattr(body, name)  # None: the rest of the context
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            defaults = self.engine.limits.generation_defaults
            params = body.sampling_params(defaults, max_tokens=max_tokens, logprobs=logprobs)
            create_reader: Callable[[], responses.TextReader] = responses.TextReader
            if body.tools and body.tool_choice != "none":
                is_named = isinstance(body.tool_choice, Tool)
                create_reader = partial(self.parts.tools.create_reader, is_named)
            with self.admission.place(params.n) as streams:
                if body.tools or body.tool_choice not in (None, "none"):
                    constrain = self.parts.tools.constrained
                    forms = self.engine.preparation.forms
                    params = await asyncio.to_thread(constrain, params, body, forms)
                token_ids = await self.encode_chat(body)
                self.engine.limits.check_length(len(token_ids), max_tokens, name)
                chat = ChatGeneration(self.engine, body, [token_ids], params, create_reader)
                await self.queue(chat)
                streams += chat.streams
            return chat


class ChatGeneration(Generation):
    """One chat request, and its answer; see `Generation`.

    Args:
        create_reader: creates what reads one of the `n` answers.
    """

    body: ChatCompletionRequest
    prefix = "chatcmpl"
    chunk_kind = responses.ChatChunk

    def __init__(
        self,
        engine: AsyncEngine,
        body: ChatCompletionRequest,
        prompts: list[list[int]],
        params: SamplingParams,
        create_reader: Callable[[], responses.TextReader] = responses.TextReader,
    ) -> None:
        super().__init__(engine, body, prompts, params)
        self._create_reader = create_reader

    async def complete(self) -> responses.ChatCompletion:
        """The whole answer."""
        (output,) = await self.collect()
        choices = []
        for piece in output.outputs:
            reader = self._create_reader()
            logprobs = await self._logprobs(piece)
            message = reader.message(piece.text)
            choices.append(
                responses.ChatChoice(
                    piece.index,
                    finish_reason=reader.finish_reason(piece.finish_reason),
                    stop_reason=piece.stop_reason,
                    message=message,
                    logprobs=logprobs,
                )
            )
        of_prompt = await self.prompt_logprobs(output)
        return self.answer(
            responses.ChatCompletion, choices, usage=self.usage(), prompt_logprobs=of_prompt
        )

    async def choices(self) -> AsyncIterator[responses.ChatChunkChoice]:
        """For each choice: its role when its first token is there, then text and calls, then why it
        ended.

        Benchmarks take the first chunk, which has the role, for the first token.
        """
        readers: dict[int, responses.TextReader] = {}
        first = responses.Delta("assistant", None if self.body.tools else "")
        async for _, output in self.outputs():
            for piece in output.outputs:
                if piece.index not in readers:
                    if not piece.token_ids and piece.finish_reason is None:
                        continue
                    readers[piece.index] = self._create_reader()
                    yield responses.ChatChunkChoice(piece.index, delta=first)
                reader = readers[piece.index]
                logprobs = await self._logprobs(piece)
                deltas = reader.append(piece.text)
                if piece.finish_reason:
                    deltas += reader.flush()
                if logprobs and logprobs.content and not deltas:
                    deltas = [responses.Delta(content="")]
                for delta in deltas:
                    yield responses.ChatChunkChoice(piece.index, delta=delta, logprobs=logprobs)
                    logprobs = None
                if piece.finish_reason:
                    yield responses.ChatChunkChoice(
                        piece.index,
                        finish_reason=reader.finish_reason(piece.finish_reason),
                        stop_reason=piece.stop_reason,
                        delta=responses.Delta(),
                    )

    async def _logprobs(self, piece: CompletionOutput) -> responses.ChatLogprobs | None:
        if piece.logprobs is None:
            return None
        entries = in_portions(zip(piece.token_ids, piece.logprobs, strict=True))
        count = self.body.top_logprobs
        return responses.ChatLogprobs(
            [encoded(self.token_logprob(*entry, count)) async for entry in entries]
        )
