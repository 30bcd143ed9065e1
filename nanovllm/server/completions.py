"""/v1/completions: go on with a text, or several, given as text or as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from nanovllm.data.outputs import CompletionOutput, PositionLogprobs, RequestOutput
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
from nanovllm.server.protocol import CompletionRequest
from nanovllm.server.responses import Completion, CompletionChoice, CompletionLogprobs
from nanovllm.text.portions import in_portions

DEFAULT_MAX_TOKENS = 16


class CompletionEndpoint(Endpoint):
    """Turns completion requests into engine requests."""

    async def submit_request(self, body: CompletionRequest) -> CompletionWriter:
        """Check a request and queue it.

        Raises:
            APIError: what is wrong with it.
            EngineDeadError: the engine has ended.
        """
        with blaming_client():
            self.check(body)
            sources = split_prompts(body.prompt)
            # No tokens at all may be asked for to see the prompt's log-probabilities. The engine generates one anyway.
            max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
            if max_tokens == 0 and not body.echo:
                raise APIError(400, "max_tokens must be at least 1 unless echo is true", "max_tokens")
            wants_prompt = body.echo and body.logprobs is not None
            params = body.sampling_params(
                self.engine.limits.generation_defaults,
                max_tokens=max_tokens or 1,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if wants_prompt else body.prompt_logprobs,
            )
            self.check_count(len(sources), params.n)
            prompts = []
            for source in sources:
                token_ids = (
                    await self.encode_prompt(source, body.add_special_tokens) if isinstance(source, str) else source
                )
                self.check_length(len(token_ids), body.max_tokens)
                prompts.append(token_ids)
                await asyncio.sleep(0)  # a thousand prompts at once must not keep the others waiting
            generation = await self.submit("cmpl", prompts, params, body)
        return CompletionWriter(self.engine, body, sources, generation)


class CompletionWriter:
    """Writes the answer to one completion request, whole or as a stream.

    Args:
        engine: whose tokenizer spells the tokens.
        body: the request.
        sources: its prompts as they came.
        generation: what the engine makes of them.
    """

    def __init__(
        self, engine: AsyncEngine, body: CompletionRequest, sources: list[str | list[int]], generation: Generation
    ) -> None:
        self.engine = engine
        self.body = body
        self.sources = sources
        self.generation = generation
        # Characters of each choice that its log-probabilities have told of; a choice without an entry has not begun.
        self._offsets: dict[int, int] = {}

    async def complete(self) -> Completion:
        """The whole answer."""
        choices = []
        for i, output in enumerate(await self.generation.collect()):
            wants_prompt = self.body.prompt_logprobs is not None
            prompt_logprobs = await plain_prompt_logprobs(output) if wants_prompt else None
            for piece in output.outputs:
                choice = await self._choice(i, output, piece)
                if wants_prompt:
                    choice.prompt_logprobs = prompt_logprobs
                choices.append(choice)
        return self._completion(choices, with_usage=True)

    async def chunks(self) -> AsyncIterator[Completion]:
        """The answer as it comes; the choices of all prompts are mixed."""
        async for i, output in self.generation.outputs():
            for piece in output.outputs:
                if not piece.token_ids and piece.finish_reason is None:
                    continue  # the prompt is still being read: its log-probabilities so far, and nothing else
                choice = await self._choice(i, output, piece)
                if choice.text or choice.logprobs or choice.finish_reason:
                    yield self._completion([choice], with_usage=self.body.continuous_usage)
        if self.body.include_usage:
            yield self._completion([], with_usage=True)

    def _completion(self, choices: list[CompletionChoice], with_usage: bool = False) -> Completion:
        generation = self.generation
        completion = Completion(generation.id, generation.created, generation.model, choices)
        completion.kv_transfer_params = generation.kv_transfer_params
        if with_usage:
            hidden = len(generation.prompts) * generation.params.n if self.body.max_tokens == 0 else 0
            completion.usage = generation.usage(hidden)
        elif self.body.include_usage:
            completion.usage = None
        return completion

    async def _choice(self, prompt_index: int, output: RequestOutput, piece: CompletionOutput) -> CompletionChoice:
        """A piece of one completion; before its first one stands the prompt, if it is to be echoed."""
        body, index = self.body, prompt_index * self.generation.params.n + piece.index
        choice = CompletionChoice(index, piece.text, None, piece.finish_reason, piece.stop_reason)
        token_ids = piece.token_ids
        positions: list[PositionLogprobs] = list(piece.logprobs or [])
        if body.max_tokens == 0:
            token_ids, positions = [], []
            choice = CompletionChoice(index, "", None, piece.finish_reason and "length", None)
        if body.echo and index not in self._offsets:
            choice.text = self._echo(prompt_index) + choice.text
            # Those of the whole prompt, unless the request was aborted before it was read.
            known = output.prompt_logprobs or []
            token_ids = self.generation.prompts[prompt_index][: len(known)] + token_ids
            positions = [*known, *positions]
        offset = self._offsets.setdefault(index, 0)
        if body.logprobs is not None and token_ids:
            choice.logprobs = await self._logprobs(token_ids, positions, offset)
            self._offsets[index] += sum(map(len, choice.logprobs.tokens))
        return choice

    def _echo(self, prompt_index: int) -> str:
        source = self.sources[prompt_index]
        if isinstance(source, str):
            return source
        return self.engine.tokenizer.decode(source, skip_special_tokens=False)

    async def _logprobs(
        self, token_ids: list[int], positions: list[PositionLogprobs], offset: int
    ) -> CompletionLogprobs:
        lists = CompletionLogprobs([], [], [], [])
        async for token_id, position in in_portions(zip(token_ids, positions, strict=True)):
            text, _ = token_text(self.engine, token_id)
            lists.tokens.append(text)
            lists.text_offset.append(offset)
            offset += len(text)
            if position is None:  # nothing comes before the first token, so it has no probability
                lists.token_logprobs.append(None)
                lists.top_logprobs.append(None)
            else:
                logprob = max(position[token_id].logprob, SMALLEST_LOGPROB)
                top = likeliest(self.engine, position, self.body.logprobs or 0)
                lists.token_logprobs.append(logprob)
                # OpenAI's and vLLM's: the likeliest ones, and the token itself even if it is none of them.
                lists.top_logprobs.append(encoded({entry.token: entry.logprob for entry in top} | {text: logprob}))
        return lists


def split_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or several, as a list of prompts.

    Raises:
        APIError: no prompt, or an empty one; says which.
    """
    several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    prompts: list[str | list[int]] = list(prompt) if several else [prompt]  # type: ignore[arg-type, list-item]
    if not prompts:
        raise APIError(400, "prompt is empty: it must have at least one token", "prompt")
    for i, one in enumerate(prompts):
        if not one:
            which = f"prompt[{i}]" if several else "prompt"
            raise APIError(400, f"{which} is empty: it must have at least one token", "prompt")
    return prompts
