"""Forbids the tokens that a request's grammar does not allow next.

Each request has a matcher, which consumes the tokens that were sampled. A thread computes the masks
while the model runs: they depend on the tokens before the one to be sampled, not on its logits.

Built by notebooks/19_structured_output.ipynb: edit it there.
"""

from __future__ import annotations

import functools
import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLTokenizer
from torch import Tensor

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import EngineConfig
from nanovllm.data.structured_outputs import Form
from nanovllm.models.config import ModelConfig
from nanovllm.runner.device_copies import pick, upload
from nanovllm.runner.sampling import SampleKey, SamplingRow, bad_word_ends
from nanovllm.text.grammars import describe, form_of, new_matcher, token_trie
from nanovllm.text.guides import Guide, TokenTable
from nanovllm.text.tokenizer import Tokenizer

# llguidance follows references from rule to rule by recursion, and a grammar may be a long chain of
# them.
STACK_BYTES = 256 << 20
MAX_COMPILED = 16
# How many of the likeliest tokens may come where the end has to be kept in sight.
MAX_CANDIDATES = 32

# Request id → matcher, and how many output tokens it has consumed.
Matchers = dict[SampleKey, tuple[Guide, int]]


class StructuredOutputManager:
    """Computes which tokens the grammars allow next.

    Args:
        config: names the tokenizer, if it is not the model's. It is loaded with the first grammar.
        folder: the checkpoint.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.folder = folder
        self._compile = functools.lru_cache(MAX_COMPILED)(self._compile_anew)
        before = threading.stack_size(STACK_BYTES)
        self._thread = ThreadPoolExecutor(1, "nanovllm-masks")
        self._thread.submit(int).result()  # it has started, with this stack
        threading.stack_size(before)

    @functools.cached_property
    def trie(self) -> LLTokenizer:
        """The vocabulary's."""
        name = self.config.tokenizer
        model = self.model_config
        tokenizer = Tokenizer.from_pretrained(self.folder if name is None else resolve_model(name))
        return token_trie(tokenizer, model.vocab_size, model.eos_token_ids)

    @functools.cached_property
    def table(self) -> TokenTable:
        """How its tokens are spelled."""
        return TokenTable(self.trie)

    def _compile_anew(self, form: Form) -> Guide:
        return Guide(new_matcher(form.grammar, self.trie), self.table, form)

    def start(
        self, rows: dict[SampleKey, SamplingRow], matchers: Matchers
    ) -> Callable[[Tensor], dict[SampleKey, str]]:
        """Start to compute masks, in a thread.

        Args:
            rows: by request id, in the order of the logits. Those without a grammar are left alone.
            matchers: of these requests; new ones are added. They belong to the thread until the
                masks are there.

        Returns:
            A function that waits for the masks and applies them to the logits,
            `[num_rows, vocab_size]`, in place. It returns what went wrong, by request; such a
            request's logits are as they were.
        """
        places = [
            i for i, row in enumerate(rows.values()) if row.params.structured_outputs is not None
        ]
        asking = {
            request_id: row
            for request_id, row in rows.items()
            if row.params.structured_outputs is not None
        }
        computed = self._thread.submit(self.masks, asking, matchers)

        def apply(logits: Tensor) -> dict[SampleKey, str]:
            masks, errors = computed.result()
            packed = upload(masks, torch.uint8, logits.device)
            bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
            forbidden = (packed.unsqueeze(2) >> bits & 1).flatten(1)[:, : logits.shape[1]] == 0
            part = pick(logits, places)
            guides = [matchers[request_id][0] for request_id in asking]
            before = {i: part[i].clone() for i, guide in enumerate(guides) if guide.is_tight}
            part.masked_fill_(forbidden, float("-inf"))
            for i, original in before.items():
                keep_end_in_sight(part[i], original, guides[i])
            if part is not logits:
                logits.index_copy_(0, upload(places, torch.int64, logits.device), part)
            return errors

        return apply

    def masks(
        self, rows: dict[SampleKey, SamplingRow], matchers: Matchers
    ) -> tuple[np.ndarray, dict[SampleKey, str]]:
        """Compute the masks of requests with a grammar.

        A request without a matcher gets a copy (`deep_copy`) of the compiled one (`_compile`, of
        `form_of` its `structured_outputs`), which has consumed no token. Each matcher consumes the
        output tokens that it has not consumed yet: none twice, although a preempted request is
        computed again. `matchers` notes how many it has consumed now. Then it looks ahead
        (`look_ahead`), with the number of tokens that are left of `max_tokens`.

        Returns:
            A bit per token, `[num_rows, bytes]` uint8, passed through `_without_stops`: the first
            bytes that `compute_bitmask` returns, as many as whole words of 32 bits for
            `trie.vocab_size` tokens have (it may return more). And by request what went wrong
            (`describe`) in a matcher with `is_error()`: "after 4 tokens, ...", the number of its
            output tokens; the same if bad words (`_without_bad_words`) forbid every token that the
            grammar allows. Such a request's row allows every token.
        """
        masks = np.full((len(rows), -(-self.trie.vocab_size // 32) * 4), 255, dtype=np.uint8)
        errors: dict[SampleKey, str] = {}
        for i, (request_id, row) in enumerate(rows.items()):
            assert row.params.structured_outputs is not None
            if request_id not in matchers:
                matchers[request_id] = (
                    self._compile(form_of(row.params.structured_outputs)).deep_copy(),
                    0,
                )
            matcher, known = matchers[request_id]
            matcher.consume_tokens(
                [int(token) for token in row.token_ids[row.num_prompt_tokens + known :]]
            )
            allowed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)[: masks.shape[1]]
            matchers[request_id] = matcher, row.num_output_tokens
            limit = row.params.max_tokens
            matcher.look_ahead(None if limit is None else limit - row.num_output_tokens)
            if row.params.bad_words_token_ids:
                allowed = self._without_bad_words(allowed, row)
            if matcher.is_error():
                errors[request_id] = f"after {row.num_output_tokens} tokens, {describe(matcher)}"
            elif not allowed.any():
                errors[request_id] = (
                    f"after {row.num_output_tokens} tokens, bad_words forbid every token that may "
                    "follow"
                )
            else:
                masks[i] = self._without_stops(allowed, row)
        return masks, errors

    def _without_bad_words(self, allowed: np.ndarray, row: SamplingRow) -> np.ndarray:
        """The mask without tokens that would complete a bad word. The mask that is given is not
        changed."""
        rest = np.unpackbits(allowed, bitorder="little")
        rest[[token for token in bad_word_ends(row) if token < self.trie.vocab_size]] = 0
        return np.packbits(rest, bitorder="little")

    def _without_stops(self, allowed: np.ndarray, row: SamplingRow) -> np.ndarray:
        """The mask without tokens that would end the output too early. If no other token is
        allowed, the output is complete, and the mask stays as it is.

        These are the row's `stop_ids` while it has fewer than `min_tokens` output tokens, and the
        trie's `eos_tokens` if it has `ignore_eos`; ids outside of the vocabulary
        (`trie.vocab_size`) are skipped. The row's `stop_ids` become (): nothing is left to do for
        the sampler.

        Args:
            allowed: a bit per token: bit i % 8, counted from the lowest, of byte i // 8. It is not
                changed.
        """
        stops = set(row.stop_ids) if row.num_output_tokens < row.params.min_tokens else set()
        stops |= set(self.trie.eos_tokens) if row.params.ignore_eos else set()
        row.stop_ids = ()  # nothing is left to do for the sampler
        rest = allowed.copy()
        for token in stops:
            if 0 <= token < self.trie.vocab_size:
                rest[token >> 3] &= ~(1 << (token & 7)) & 255
        return rest if rest.any() else allowed


def keep_end_in_sight(logits: Tensor, original: Tensor, guide: Guide) -> None:
    """Forbid tokens after which the output could not be completed within the request's
    `max_tokens`.

    Args:
        logits: of one request, masked, `[vocab_size]`. Changed in place.
        original: the same before the mask. The mask may forbid the next token of the short way to
            the end, for another spelling.
    """
    values, likely = logits.topk(min(MAX_CANDIDATES, len(logits)))
    candidates = [
        token
        for token, value in zip(likely.tolist(), values.tolist(), strict=True)
        if value > float("-inf")
    ]
    first, *others = guide.fitting(candidates)
    kept = [token for token in candidates if token in {first, *others}] or [first]
    chosen = torch.tensor(kept, device=logits.device)
    values = original[chosen]
    logits.fill_(float("-inf"))
    logits[chosen] = values
