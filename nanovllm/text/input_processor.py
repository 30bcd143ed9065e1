"""The first half of the engine's front end: checks prompts and turns them into engine requests, for
offline and served requests alike."""

from __future__ import annotations

import random
from collections.abc import Callable

from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.text.prompts import EngineLimits, Prompt, check_request, encode_bad_words, read_prompt
from nanovllm.text.tokenizer import Tokenizer


class InputProcessor:
    """Checks a prompt and turns it into engine requests, one per completion.

    Args:
        seed: seeds the requests that have no seed of their own.
        prepare: completes a request's sampling parameters once they are checked; raises ValueError.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        seed: int = 0,
        prepare: Callable[[SamplingParams], SamplingParams] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._prepare = prepare
        self._seeds = random.Random(seed)
        # The tokenizer's end-of-sequence token, unless the model's files name it or the model
        # cannot sample it.
        eos = tokenizer.eos_token_id
        known = limits.eos_token_ids
        self._tokenizer_eos = (
            [] if eos is None or eos >= limits.vocab_size or eos in known else [eos]
        )

    def process(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> tuple[str | None, list[EngineRequest]]:
        """The prompt's text, if it came as text, and `params.n` engine requests.

        Raises:
            ValueError: an empty or too long prompt, a token id outside the vocabulary, a priority
                that the scheduling policy would ignore, or a grammar that cannot be followed
                (`GrammarError`); the message names the limit or the place.
        """
        text, token_ids, fields = read_prompt(prompt, self.tokenizer)
        check_request(token_ids, params, priority, self.limits)
        if self._prepare is not None:
            params = self._prepare(params)
        room = self.limits.max_request_tokens - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = self._seeds.getrandbits(62) if params.seed in (None, -1) else params.seed
        # The ranks know the model's own ids. As a stop token, the tokenizer's id obeys `min_tokens`
        # too.
        stop_token_ids = params.stop_token_ids + ([] if params.ignore_eos else self._tokenizer_eos)
        eos_token_ids = self.limits.eos_token_ids + self._tokenizer_eos
        bad_words = params.bad_words_token_ids
        if params.bad_words:
            bad_words = bad_words + encode_bad_words(params.bad_words, self.tokenizer)
        requests = []
        for index in range(params.n):
            own_seed = (seed + index + 2**63) % 2**64 - 2**63  # wrapped around to 64 signed bits
            own_params = params.clone(
                n=1,
                max_tokens=max_tokens,
                min_tokens=min(params.min_tokens, max_tokens),
                bad_words_token_ids=bad_words,
                seed=own_seed,
                stop_token_ids=stop_token_ids,
            )
            sequence_id = request_id if params.n == 1 else f"{request_id}-{index}"
            requests.append(
                EngineRequest(
                    request_id=sequence_id,
                    prompt_token_ids=token_ids,
                    sampling_params=own_params,
                    eos_token_ids=eos_token_ids,
                    priority=priority,
                    cache_salt=fields.get("cache_salt"),
                    kv_transfer_params=fields.get("kv_transfer_params"),
                )
            )
        return text, requests
