"""Options that choose the next token of a request and decide when it ends: plain data, checked when
created.

Built by notebooks/16_sampling.ipynb: edit it there.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta

from nanovllm.data.checks import Amount, Count, Keywords, check_fields
from nanovllm.data.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
# Each of the n completions prepares a search for every stop string.
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
# Each step compares the end of the output with every bad word.
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]


@dataclass
class SamplingParams(Keywords):
    """Sampling options of one request, under vLLM's names and with its defaults.

    Args:
        n: number of independent completions, 1 to 128.
        temperature: divides the logits; 0 means greedy.
        top_k: sample among the k most likely tokens; 0 or -1: no limit.
        top_p: sample among the fewest tokens whose probabilities add up to p, 0 < p <= 1
            (nucleus sampling, Holtzman et al. 2020).
        min_p: drop tokens less likely than `min_p` times the most likely one, 0 to 1.
        repetition_penalty: > 1 makes tokens of prompt and output less likely (CTRL, Keskar et al.
            2019).
        presence_penalty: subtracted once from the logit of each token in the output, -2 to 2.
        frequency_penalty: subtracted once per occurrence in the output, -2 to 2.
        logit_bias: added to the logits of these token ids, -100 to 100.
        seed: makes the draws repeatable, independent of the batch. None or -1: the engine picks
            one.
        stop: strings that end the request; not part of the text unless
            `include_stop_str_in_output`.
        stop_token_ids: token ids that end the request.
        bad_words: strings that the output never contains, up to 128: a token that would complete
            one of their token sequences, with or without a leading space, is not sampled. The same
            string in other tokens is possible.
        bad_words_token_ids: the same as token ids. The front end adds the sequences of `bad_words`.
        ignore_eos: continue after an end-of-sequence token.
        max_tokens: maximum number of output tokens; None: up to the context length.
        min_tokens: no end-of-sequence token, stop token or stop string before this number of output
            tokens.
        logprobs: report the log-probabilities of the k likeliest tokens and the chosen one, 0 to
            20.
        prompt_logprobs: the same for each prompt token.
        skip_special_tokens: leave special tokens out of the text.
        num_speculative_tokens: drafts per step, at most (lecture 42); 0: none. None: what the
            engine's speculative_config says.
        structured_outputs: what the output must match (lecture 19); a dictionary becomes
            `StructuredOutputsParams`.

    Raises:
        ValueError: a value out of its range; the message names the field and the range.
    """

    n: Annotated[int, Meta(ge=1, le=128)] = 1
    temperature: Amount = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=sys.float_info.max)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[Count, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[StopString], Meta(max_length=16)] | str = field(default_factory=list)
    stop_token_ids: list[Count] = field(default_factory=list)
    bad_words: Annotated[list[BadWord], Meta(max_length=128)] = field(default_factory=list)
    bad_words_token_ids: list[Annotated[list[Count], Meta(min_length=1)]] = field(
        default_factory=list
    )
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: Annotated[int, Meta(ge=1)] | None = 16
    min_tokens: Count = 0
    logprobs: LogprobCount | None = None
    prompt_logprobs: LogprobCount | None = None
    skip_special_tokens: bool = True
    num_speculative_tokens: Count | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        self.stop_token_ids = self.stop_token_ids or []
        self.bad_words = self.bad_words or []
        self.bad_words_token_ids = self.bad_words_token_ids or []
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        check_fields(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.top_k == -1:
            self.top_k = 0

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def changes_logits(self) -> bool:
        """True when biases, bad words, `min_tokens` or penalties can change the largest logit."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        return bool(
            self.logit_bias or self.bad_words_token_ids or self.min_tokens or any(penalties)
        )

    @property
    def looks_back(self) -> bool:
        """True when a token cannot be sampled before all earlier tokens are known: penalties,
        grammars and bad words of several tokens need them."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        has_long_words = any(len(token_ids) > 1 for token_ids in self.bad_words_token_ids)
        return any(penalties) or self.structured_outputs is not None or has_long_words

    def clone(self, **changes: object) -> SamplingParams:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]
