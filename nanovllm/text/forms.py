"""Prepares the form that a request wants its output to have (structured output, lecture 19)."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from nanovllm.data.sampling_params import SamplingParams
from nanovllm.text.prompts import EngineLimits
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.text.grammar_check import GrammarChecker


class Forms:
    """Checks the grammars of requests, and completes their sampling parameters."""

    def __init__(self, tokenizer: Tokenizer, limits: EngineLimits) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._checker: GrammarChecker | None = None
        self._creating_checker = threading.Lock()

    def checker(self) -> GrammarChecker:
        """The checker of grammars. The first request that needs it creates it, which takes a
        quarter of a second."""
        from nanovllm.text.grammar_check import GrammarChecker

        with self._creating_checker:
            if self._checker is None:
                self._checker = GrammarChecker(
                    self.tokenizer, self.limits.vocab_size, self.limits.eos_token_ids
                )
            return self._checker

    def prepare(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling parameters of an output with a form; without a form, they stay as
        they are.

        The grammar is checked and prepared. No stop string and no token of the form's text ends the
        output; text before a form may end with a stop string or a special token.

        Raises:
            GrammarError: the grammar cannot be followed; names the place.
        """
        wanted = params.structured_outputs
        if wanted is None:
            return params
        if self.limits.disable_any_whitespace:
            wanted = replace(wanted, disable_any_whitespace=True, whitespace_pattern=None)
        wanted = replace(wanted, form=self.checker().check(wanted))
        stop = params.stop if wanted.free_text_before else []
        special_ids = self.tokenizer.all_special_ids
        stop_token_ids = [token for token in params.stop_token_ids if token in special_ids]
        return params.clone(structured_outputs=wanted, stop=stop, stop_token_ids=stop_token_ids)
