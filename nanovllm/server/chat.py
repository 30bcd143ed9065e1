"""/v1/chat/completions: answer a conversation.

Built by notebooks/91_llama_server.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from nanovllm.data.outputs import CompletionOutput
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.server.errors import APIError, blaming_client
from nanovllm.server.generation import (
    SMALLEST_LOGPROB,
    Endpoint,
    Generation,
    encoded,
    likeliest,
    plain_prompt_logprobs,
    token_text,
)
from nanovllm.server.protocol import ChatCompletionRequest
from nanovllm.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    TokenLogprob,
)
from nanovllm.text.portions import in_portions


class ChatEndpoint(Endpoint):
    """Turns chats into engine requests."""

    async def submit_request(self, body: ChatCompletionRequest) -> ChatWriter:
        """Check a request and queue it.

        Raises:
            APIError: what is wrong with it.
            EngineDeadError: the engine has ended.
        """
        with blaming_client():
            self.check(body)
            if body.top_logprobs is not None and not body.logprobs:
                raise APIError(400, "top_logprobs must be left out unless logprobs is true", "top_logprobs")
            name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
            max_tokens = getattr(body, name)
            if max_tokens is not None and max_tokens < 1:
                raise APIError(400, f"{name} must be an integer of at least 1, got {max_tokens}", name)
            params = body.sampling_params(
                self.engine.limits.generation_defaults,
                max_tokens=max_tokens,  # None: the rest of the context
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            )
            token_ids = await self.encode_chat(body)
            self.check_length(len(token_ids), max_tokens, name, "messages")
            generation = await self.submit("chatcmpl", [token_ids], params, body)
        return ChatWriter(self.engine, body, generation)


class ChatWriter:
    """Writes the answer to one chat request, whole or as a stream.

    Args:
        engine: whose tokenizer spells the tokens.
        body: the request.
        generation: what the engine makes of it.
    """

    def __init__(self, engine: AsyncEngine, body: ChatCompletionRequest, generation: Generation) -> None:
        self.engine = engine
        self.body = body
        self.generation = generation

    async def complete(self) -> ChatCompletion:
        """The whole answer."""
        (output,) = await self.generation.collect()
        choices = [
            ChatChoice(
                piece.index,
                AssistantMessage(piece.text),
                await self._logprobs(piece),
                piece.finish_reason,
                piece.stop_reason,
            )
            for piece in output.outputs
        ]
        generation = self.generation
        answer = ChatCompletion(generation.id, generation.created, generation.model, choices, generation.usage())
        answer.kv_transfer_params = generation.kv_transfer_params
        if self.body.prompt_logprobs is not None:
            answer.prompt_logprobs = await plain_prompt_logprobs(output)
        return answer

    async def chunks(self) -> AsyncIterator[ChatChunk]:
        """The answer as it comes: first the role of each choice, then text, then why it ended."""
        for index in range(self.generation.params.n):
            yield self._chunk(ChatChunkChoice(index, Delta(role="assistant", content="")))
        async for _, output in self.generation.outputs():
            for piece in output.outputs:
                logprobs = await self._logprobs(piece)
                if piece.text or (logprobs and logprobs.content):
                    yield self._chunk(ChatChunkChoice(piece.index, Delta(content=piece.text), logprobs))
                if piece.finish_reason:
                    reasons = piece.finish_reason, piece.stop_reason
                    yield self._chunk(ChatChunkChoice(piece.index, Delta(), None, *reasons))
        if self.body.include_usage:
            yield self._chunk(None)

    def _chunk(self, choice: ChatChunkChoice | None) -> ChatChunk:
        """A chunk with news of one choice, or the last one, which has the numbers of tokens instead."""
        generation = self.generation
        chunk = ChatChunk(generation.id, generation.created, generation.model, [choice] if choice else [])
        chunk.kv_transfer_params = generation.kv_transfer_params
        if self.body.include_usage:
            hidden = choice is not None and not self.body.continuous_usage
            chunk.usage = None if hidden else generation.usage()
        return chunk

    async def _logprobs(self, piece: CompletionOutput) -> ChatLogprobs | None:
        if piece.logprobs is None:
            return None
        content = []
        async for token_id, position in in_portions(zip(piece.token_ids, piece.logprobs, strict=True)):
            text, raw = token_text(self.engine, token_id)
            logprob = max(position[token_id].logprob, SMALLEST_LOGPROB)
            top = likeliest(self.engine, position, self.body.top_logprobs or 0)
            content.append(encoded(TokenLogprob(text, logprob, raw, top)))
        return ChatLogprobs(content)
