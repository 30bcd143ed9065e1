"""/v1/completions: continue one or several prompts, given as text or as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from nanovllm.data.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from nanovllm.server.errors import APIError, blaming_client
from nanovllm.server.generation import Endpoint, Generation, encoded
from nanovllm.server.protocol import CompletionRequest
from nanovllm.server.responses import Completion, CompletionChoice, CompletionLogprobs
from nanovllm.text.portions import in_portions

DEFAULT_MAX_TOKENS = 16
MAX_COMPLETIONS = 1024


class CompletionEndpoint(Endpoint):
    """Turns completion requests into engine requests."""

    async def submit_request(self, body: CompletionRequest) -> CompletionGeneration:
        """Check a request and queue it.

        Raises:
            APIError: the request is wrong.
            EngineDeadError: the engine has ended.
        """
        with blaming_client():
            self.check(body)
            sources = split_prompts(body.prompt)
            # With max_tokens 0 a client asks for the prompt's log-probabilities alone. The engine generates one token anyway.
            max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
            if max_tokens == 0 and not body.echo:
                raise APIError(400, "max_tokens must be at least 1 unless echo is true", "max_tokens")
            of_prompt = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
            own = {"max_tokens": max_tokens or 1, "logprobs": body.logprobs, "prompt_logprobs": of_prompt}
            params = body.sampling_params(self.engine.limits.generation_defaults, **own)
            if (count := len(sources) * params.n) > MAX_COMPLETIONS:
                message = f"prompt and n request {count} completions; at most {MAX_COMPLETIONS} are allowed"
                raise APIError(400, message, "prompt")
            prompts = []
            for source in sources:
                if isinstance(source, str):
                    source = await self.engine.encode(source, body.add_special_tokens)
                self.check_length(len(source), body.max_tokens)
                prompts.append(source)
                await asyncio.sleep(0)  # a thousand prompts must not block the event loop
            return await self.submit(CompletionGeneration(self.engine, body, prompts, params))


class CompletionGeneration(Generation):
    """One completion request, and its answer; see `Generation`."""

    body: CompletionRequest
    prefix, chunk_kind = "cmpl", Completion

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hides_tokens = self.body.max_tokens == 0
        # Characters of each choice whose log-probabilities have been sent; a choice without an entry has not begun.
        self._offsets: dict[int, int] = {}

    async def complete(self) -> Completion:
        """The whole answer."""
        choices = []
        for i, output in enumerate(await self.collect()):
            prompt_logprobs = await self.prompt_logprobs(output)
            for piece in output.outputs:
                choice = await self._choice(i, output, piece)
                choice.prompt_logprobs = prompt_logprobs
                choices.append(choice)
        return self.answer(Completion, choices, usage=self.usage())

    async def choices(self) -> AsyncIterator[CompletionChoice]:
        """The choices of all prompts, mixed."""
        async for i, output in self.outputs():
            for piece in output.outputs:
                if not piece.token_ids and piece.finish_reason is None:
                    continue  # the prompt is still being read, and the output has only its log-probabilities so far
                choice = await self._choice(i, output, piece)
                if choice.text or choice.logprobs or choice.finish_reason:
                    yield choice

    async def _choice(self, prompt_index: int, output: RequestOutput, piece: CompletionOutput) -> CompletionChoice:
        """A piece of one completion. The first one begins with the prompt, if it is to be echoed."""
        body, index = self.body, prompt_index * self.params.n + piece.index
        if self.hides_tokens:
            piece = CompletionOutput(piece.index, finish_reason=piece.finish_reason and "length")
        choice = CompletionChoice(index, piece.finish_reason, piece.stop_reason, text=piece.text)
        token_ids, positions = piece.token_ids, [*(piece.logprobs or ())]
        if body.echo and index not in self._offsets:
            source = split_prompts(body.prompt)[prompt_index]
            decode = self.engine.tokenizer.decode
            choice.text = (source if isinstance(source, str) else decode(source, False)) + choice.text
            # The log-probabilities of the whole prompt, unless the request was aborted before it was read.
            known = output.prompt_logprobs or []
            token_ids = self.prompts[prompt_index][: len(known)] + token_ids
            positions = known + positions
        offset = self._offsets.setdefault(index, 0)
        if body.logprobs is not None and token_ids:
            choice.logprobs = await self._logprobs(token_ids, positions, offset)
            self._offsets[index] += sum(map(len, choice.logprobs.tokens))
        return choice

    async def _logprobs(self, tokens: list[int], positions: list[PositionLogprobs], offset: int) -> CompletionLogprobs:
        rows: list[Any] = []
        async for token_id, position in in_portions(zip(tokens, positions, strict=True)):
            if position is None:  # the first token, which nothing precedes, has no probability
                text = self.engine.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
                logprob, likeliest = None, None
            else:
                entry = self.token_logprob(token_id, position, self.body.logprobs)
                text, logprob = entry.token, entry.logprob
                # As in OpenAI's API and vLLM: the likeliest tokens, and the token itself even if it is none of them.
                likeliest = encoded({each.token: each.logprob for each in entry.top_logprobs} | {text: logprob})
            rows.append((text, logprob, likeliest, offset))
            offset += len(text)
        return CompletionLogprobs(*map(list, zip(*rows, strict=True)))


def split_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or several, as a list of prompts.

    Raises:
        APIError: no prompt, or an empty one; says which.
    """
    several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    prompts: list[str | list[int]] = list(prompt) if several else [prompt]  # type: ignore[arg-type, list-item]
    empty = [i for i, each in enumerate(prompts) if not each]
    if empty or not prompts:
        which = f"prompt[{empty[0]}]" if several and empty else "prompt"
        raise APIError(400, f"{which} is empty: it must have at least one token", "prompt")
    return prompts
