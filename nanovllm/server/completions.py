"""/v1/completions: continue one or several prompts, given as text or as token ids."""

from __future__ import annotations

import asyncio
import string
from collections.abc import AsyncIterator

from nanovllm.data.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.server.errors import APIError, blaming_client
from nanovllm.server.generation import SMALLEST_LOGPROB, Endpoint, Generation, encoded
from nanovllm.server.protocol import CompletionRequest
from nanovllm.server.responses import Completion, CompletionChoice, CompletionLogprobs
from nanovllm.text.detokenizer import TextOffsets, continues_prompt, whole_characters
from nanovllm.text.portions import in_portions
from nanovllm.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
MAX_COMPLETIONS = 1024
# Written as they are among bytes.
PLAIN_CHARACTERS = {*string.printable} - {*string.whitespace, "\\"} | {" "}


class CompletionEndpoint(Endpoint):
    """Turns completion requests into engine requests."""

    async def submit_request(self, body: CompletionRequest) -> CompletionGeneration:
        """Check a request and queue it.

        Raises:
            APIError: the request is wrong, or too many are already waiting (429).
            EngineDeadError: the engine has ended.
        """
        with blaming_client():
            self.check(body)
            sources = split_prompts(body.prompt)
            # With max_tokens 0 a client asks for the prompt's log-probabilities alone. The engine
            # generates one token anyway.
            max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
            if max_tokens == 0 and not body.echo:
                raise APIError(
                    400, "max_tokens must be at least 1 unless echo is true", "max_tokens"
                )
            of_prompt = (
                body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
            )
            params = body.sampling_params(
                self.engine.limits.generation_defaults,
                max_tokens=max_tokens or 1,
                logprobs=body.logprobs,
                prompt_logprobs=of_prompt,
            )
            if (count := len(sources) * params.n) > MAX_COMPLETIONS:
                raise APIError(
                    400,
                    f"prompt and n request {count} completions; at most {MAX_COMPLETIONS} are "
                    "allowed",
                    "prompt",
                )
            with self.admission.place(count) as streams:
                prompts = []
                for source in sources:
                    if isinstance(source, str):
                        source = await self.engine.encode(source, body.add_special_tokens)
                    self.engine.limits.check_length(len(source), body.max_tokens)
                    prompts.append(source)
                    await asyncio.sleep(0)  # a thousand prompts must not block the event loop
                completion = CompletionGeneration(self.engine, body, prompts, params)
                await self.queue(completion)
                streams += completion.streams
            return completion


class CompletionGeneration(Generation):
    """One completion request, and its answer; see `Generation`."""

    body: CompletionRequest
    prefix = "cmpl"
    chunk_kind = Completion

    def __init__(
        self,
        engine: AsyncEngine,
        body: CompletionRequest,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> None:
        super().__init__(engine, body, prompts, params)
        self.hides_tokens = body.max_tokens == 0
        # Of each choice that has begun, where the next token begins in its text.
        self._offsets: dict[int, TextOffsets] = {}

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
                    # the prompt is still being read, and the output has only its log-probabilities
                    # so far
                    continue
                choice = await self._choice(i, output, piece)
                if choice.text or choice.logprobs or choice.finish_reason:
                    yield choice

    async def _choice(
        self, prompt_index: int, output: RequestOutput, piece: CompletionOutput
    ) -> CompletionChoice:
        """A piece of one completion. The first one begins with the prompt, if it is to be
        echoed."""
        body = self.body
        index = prompt_index * self.params.n + piece.index
        if self.hides_tokens:
            # The client asked for no token, so an end of the one that was generated means that the
            # length ran out.
            ended = piece.finish_reason in ("stop", "length")
            piece = CompletionOutput(
                piece.index, finish_reason="length" if ended else piece.finish_reason
            )
        choice = CompletionChoice(index, piece.finish_reason, piece.stop_reason, text=piece.text)
        token_ids = piece.token_ids
        positions: list[PositionLogprobs] = [*(piece.logprobs or ())]
        offsets: list[int] = []
        tokenizer = self.engine.tokenizer
        if index not in self._offsets:
            prompt = self.prompts[prompt_index]
            continued = prompt if self._is_continued(prompt, piece.token_ids) else []
            echoed = self._echoed(prompt_index, bool(continued)) if body.echo else ""
            choice.text = echoed + choice.text
            skips = self.params.skip_special_tokens
            self._offsets[index] = TextOffsets(tokenizer, skips, continued, len(echoed))
            if body.echo:
                # The log-probabilities of the whole prompt, unless the request was aborted before
                # it was read.
                known = output.prompt_logprobs or []
                token_ids = prompt[: len(known)] + token_ids
                positions = known + positions
                if known:
                    offsets = await asyncio.to_thread(
                        prompt_offsets, tokenizer, prompt[: len(known)], echoed
                    )
        if body.logprobs is not None and token_ids:
            offsets += map(self._offsets[index].next, piece.token_ids)
            choice.logprobs = await self._logprobs(token_ids, positions, offsets)
        return choice

    def _is_continued(self, prompt: list[int], token_ids: list[int]) -> bool:
        """True if the completion continues the prompt's last character. Structured output continues
        nothing."""
        if self.hides_tokens or self.params.structured_outputs is not None:
            return False
        return continues_prompt(self.engine.tokenizer, prompt, token_ids)

    def _echoed(self, prompt_index: int, is_continued: bool) -> str:
        """The prompt's text; without its last character, if the completion continues that."""
        source = split_prompts(self.body.prompt)[prompt_index]
        tokenizer = self.engine.tokenizer
        if isinstance(source, str):
            return source
        return (
            whole_characters(tokenizer, source) if is_continued else tokenizer.decode(source, False)
        )

    async def _logprobs(
        self, tokens: list[int], positions: list[PositionLogprobs], offsets: list[int]
    ) -> CompletionLogprobs:
        """Lists of the tokens and their log-probabilities; no two tokens that differ in text have
        one name."""
        lists = CompletionLogprobs([], [], [], offsets)
        async for token_id, position in in_portions(zip(tokens, positions, strict=True)):
            name = self._name(token_id)
            lists.tokens.append(name)
            if position is None:  # the first token, which nothing precedes, has no probability
                lists.token_logprobs.append(None)
                lists.top_logprobs.append(None)
                continue
            logprob = {
                each: max(entry.logprob, SMALLEST_LOGPROB) for each, entry in position.items()
            }
            # As in OpenAI's API and vLLM: the likeliest tokens, and the token itself even if it is
            # none of them.
            ranked = sorted((entry.rank or 0, each) for each, entry in position.items())
            likeliest: dict[str, float] = {}
            for rank, each in ranked:
                if rank <= (self.body.logprobs or 0):
                    likeliest.setdefault(self._name(each), logprob[each])
            lists.token_logprobs.append(logprob[token_id])
            lists.top_logprobs.append(encoded(likeliest | {name: logprob[token_id]}))
        return lists

    def _name(self, token_id: int) -> str:
        """A token's text. A token without any is named as vLLM does where it returns ids:
        "token_id:300"."""
        return name_of_bytes(self.engine.tokenizer.token_bytes(token_id)) or f"token_id:{token_id}"


def name_of_bytes(spelled: bytes) -> str:
    r"""The token's text; of a token that is no valid UTF-8, its bytes, as OpenAI writes them:
    "bytes:\xe6\x97"."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(
            chr(b) if chr(b) in PLAIN_CHARACTERS else f"\\x{b:02x}" for b in spelled
        )


def prompt_offsets(tokenizer: Tokenizer, token_ids: list[int], text: str) -> list[int]:
    """At which character of a prompt's text each of its tokens begins.

    The text may lack what the tokens have in front: a beginning token, and SentencePiece's space.
    Tokens that the text lacks begin where the next one does."""
    spelled = b"".join(map(tokenizer.token_bytes, token_ids)).decode(errors="replace")
    counter = TextOffsets(tokenizer, skip_special_tokens=False, start=-max(0, spelled.find(text)))
    return [min(max(0, counter.next(token)), len(text)) for token in token_ids]


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
