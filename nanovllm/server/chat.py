"""/v1/chat/completions: answer a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from nanovllm.data.outputs import CompletionOutput
from nanovllm.data.parts import load
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
            APIError: the request is wrong.
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
            if body.tools or body.tool_choice not in (None, "none"):
                constrained = load("nanovllm.server.tools:constrained", "tools")
                params = await asyncio.to_thread(
                    constrained, params, body, self.engine.input_processor
                )
            token_ids = await self.encode_chat(body)
            self.check_length(len(token_ids), max_tokens, name)
            return await self.submit(ChatGeneration(self.engine, body, [token_ids], params))


class ChatGeneration(Generation):
    """One chat request, and its answer; see `Generation`."""

    body: ChatCompletionRequest
    prefix = "chatcmpl"
    chunk_kind = responses.ChatChunk

    async def complete(self) -> responses.ChatCompletion:
        """The whole answer."""
        (output,) = await self.collect()
        choices = []
        for piece in output.outputs:
            reader = self._reader()
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
                    readers[piece.index] = self._reader()
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

    def _reader(self) -> responses.TextReader:
        if not self.body.tools or self.body.tool_choice == "none":
            return responses.TextReader()
        create = load("nanovllm.server.tools:ToolCallReader", "tools")
        reader: responses.TextReader = create(isinstance(self.body.tool_choice, Tool))
        return reader

    async def _logprobs(self, piece: CompletionOutput) -> responses.ChatLogprobs | None:
        if piece.logprobs is None:
            return None
        entries = in_portions(zip(piece.token_ids, piece.logprobs, strict=True))
        count = self.body.top_logprobs
        return responses.ChatLogprobs(
            [encoded(self.token_logprob(*entry, count)) async for entry in entries]
        )
