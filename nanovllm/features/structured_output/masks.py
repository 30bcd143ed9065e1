"""Forbids the tokens that a request's grammar does not allow next.

Each request has a matcher, which consumes the sampled tokens. A thread computes the masks while the
model runs: a mask depends on the earlier tokens, not on the logits.

Built by notebooks/19_structured_output.ipynb: edit it there.
"""

from __future__ import annotations

import functools
import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from llguidance import LLTokenizer
from torch import Tensor

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.core.device_copies import pick, upload
from nanovllm.core.sampling import SamplingRow, bad_word_ends
from nanovllm.data.config import EngineConfig
from nanovllm.data.structured_outputs import Form
from nanovllm.models.config import ModelConfig
from nanovllm.text.grammars import describe, form_of, new_matcher, token_trie
from nanovllm.text.guides import Guide, TokenTable
from nanovllm.text.tokenizer import Tokenizer

# llguidance resolves references between rules by recursion, and a grammar may have a long chain of
# them, so the thread needs a large stack.
STACK_BYTES = 256 << 20
MAX_COMPILED = 16
# The most likely tokens that `keep_end_in_sight` checks.
MAX_CANDIDATES = 32


class StructuredOutputManager:
    """Computes which tokens the grammars allow next.

    Args:
        config: names the tokenizer, unless it is the model's. The first grammar loads it.
        folder: the checkpoint.

    Attributes:
        matchers: by request, its matcher, and how many output tokens it has consumed. Only the
            thread uses them while it computes masks.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.folder = folder
        self.matchers: dict[str, tuple[Guide, int]] = {}
        self._compile = functools.lru_cache(MAX_COMPILED)(self._compile_anew)
        before = threading.stack_size(STACK_BYTES)
        self._thread = ThreadPoolExecutor(1, "nanovllm-masks")
        self._thread.submit(int).result()  # wait until it has started, with this stack size
        threading.stack_size(before)

    @functools.cached_property
    def trie(self) -> LLTokenizer:
        """The vocabulary as llguidance's trie."""
        name = self.config.tokenizer
        model = self.model_config
        tokenizer = Tokenizer.from_pretrained(self.folder if name is None else resolve_model(name))
        return token_trie(tokenizer, model.vocab_size, model.eos_token_ids)

    @functools.cached_property
    def table(self) -> TokenTable:
        """The bytes of each token."""
        return TokenTable(self.trie)

    def _compile_anew(self, form: Form) -> Guide:
        return Guide(new_matcher(form.grammar, self.trie), self.table, form)

    def start(self, rows: list[SamplingRow]) -> Callable[[Tensor], dict[str, str]]:
        """Start to compute masks, in a thread.

        Args:
            rows: one per row of logits. Those with a grammar are replaced by copies, which
                `_without_stops` may change.

        Returns:
            A function that waits for the masks and applies them in place to the logits,
            `[num_rows, vocab_size]`. It returns errors by request; the logits of these requests do
            not change.
        """
        places = [i for i, row in enumerate(rows) if row.params.structured_outputs is not None]
        for i in places:
            rows[i] = replace(rows[i])
        asking = {rows[i].request_id: rows[i] for i in places}
        computed = self._thread.submit(self.masks, asking)

        def apply(logits: Tensor) -> dict[str, str]:
            masks, errors = computed.result()
            packed = upload(masks, torch.uint8, logits.device)
            bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
            forbidden = (packed.unsqueeze(2) >> bits & 1).flatten(1)[:, : logits.shape[1]] == 0
            part = pick(logits, places)
            guides = [self.matchers[request_id][0] for request_id in asking]
            before = {i: part[i].clone() for i, guide in enumerate(guides) if guide.is_tight}
            part.masked_fill_(forbidden, float("-inf"))
            for i, original in before.items():
                keep_end_in_sight(part[i], original, guides[i])
            if part is not logits:
                logits.index_copy_(0, upload(places, torch.int64, logits.device), part)
            return errors

        return apply

    def _matcher_of(self, request_id: str, row: SamplingRow) -> tuple[Guide, int]:
        """Return a request's matcher, and how many output tokens it has consumed. A new request
        gets a copy (`deep_copy`) of the compiled one, which has consumed none."""
        if request_id not in self.matchers:
            assert row.params.structured_outputs is not None
            compiled = self._compile(form_of(row.params.structured_outputs))
            self.matchers[request_id] = compiled.deep_copy(), 0
        return self.matchers[request_id]

    def _without_bad_words(self, allowed: np.ndarray, row: SamplingRow) -> np.ndarray:
        """Return a mask without the tokens that would complete a bad word. `allowed` itself does
        not change."""
        rest = np.unpackbits(allowed, bitorder="little")
        rest[[token for token in bad_word_ends(row) if token < self.trie.vocab_size]] = 0
        return np.packbits(rest, bitorder="little")

    def masks(self, rows: dict[str, SamplingRow]) -> tuple[np.ndarray, dict[str, str]]:
        """Compute the masks of requests with a grammar.

        For each request:

        1. Take its matcher, and how many tokens that has consumed (`_matcher_of`).
        2. Have the matcher consume the output tokens that it has not consumed yet, each token once,
           even if a preempted request is computed again. Store the number in `matchers`.
        3. Take the mask from `compute_bitmask`, as bytes. Then look ahead (`look_ahead`), with the
           number of tokens that are left of `max_tokens`; None without a limit.
        4. Pass the mask through `_without_bad_words`, if the request has any, and `_without_stops`.

        Returns:
            The masks, a bit per token, `[num_rows, bytes]` uint8. `bytes` is the size of whole
            words of 32 bits for `trie.vocab_size` tokens; `compute_bitmask` may return more. Then
            errors by request: "after 4 tokens, ...", the number of its output tokens and the
            problem: `describe` for a matcher with `is_error()`, or "bad_words forbid every token
            that may follow". The row of such a request allows every token.
        """
        masks = np.full((len(rows), -(-self.trie.vocab_size // 32) * 4), 255, dtype=np.uint8)
        errors: dict[str, str] = {}
        for i, (request_id, row) in enumerate(rows.items()):
            matcher, known = self._matcher_of(request_id, row)
            new = row.token_ids[row.num_prompt_tokens + known :]
            matcher.consume_tokens([int(token) for token in new])
            allowed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)[: masks.shape[1]]
            self.matchers[request_id] = matcher, row.num_output_tokens
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

    def _without_stops(self, allowed: np.ndarray, row: SamplingRow) -> np.ndarray:
        """Return a mask without the tokens that would end the output too early. If no other token
        is allowed, the output is complete: return the same mask.

            the row's `stop_ids`      end too early with fewer than `min_tokens` output tokens
            the trie's `eos_tokens`   end too early with `ignore_eos`

        Skip ids outside of the vocabulary (`trie.vocab_size`). Set the row's `stop_ids` to (), so
        that the sampler does not forbid them again.

        Args:
            allowed: a bit per token: token i is bit i % 8, counted from the lowest, of byte i // 8.
                It does not change.
        """
        stops = set(row.stop_ids) if row.num_output_tokens < row.params.min_tokens else set()
        stops |= set(self.trie.eos_tokens) if row.params.ignore_eos else set()
        row.stop_ids = ()  # the sampler must not forbid them again
        rest = allowed.copy()
        for token in stops:
            if 0 <= token < self.trie.vocab_size:
                rest[token >> 3] &= ~(1 << (token & 7)) & 255
        return rest if rest.any() else allowed


def keep_end_in_sight(logits: Tensor, original: Tensor, guide: Guide) -> None:
    """Forbid tokens after which the output could not be completed within the request's
    `max_tokens`.

    Args:
        logits: one request's masked logits, `[vocab_size]`, changed in place.
        original: the same logits before the mask. The mask may forbid the next token of the
            shortest completion, because it spells the same text with other tokens.
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
