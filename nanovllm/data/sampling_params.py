"""Options that choose the next token of a request and decide when it ends: plain data, checked when created.

Built by notebooks/16_sampling.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from typing import Any

MAX_SEQUENCES_PER_REQUEST = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # in characters; each of the n completions prepares a search for every stop string


@dataclass
class SamplingParams:
    """Sampling options of one request, under vLLM's names and with its defaults.

    Args:
        n: number of independent completions, 1 to 128.
        temperature: divides the logits; 0 means greedy.
        top_k: sample among the k most likely tokens; 0 or -1: no limit.
        top_p: sample among the fewest tokens whose probabilities add up to p, 0 < p <= 1
            (nucleus sampling, Holtzman et al. 2020).
        min_p: drop tokens less likely than `min_p` times the most likely one, 0 to 1.
        repetition_penalty: > 1 makes tokens of prompt and output less likely (CTRL, Keskar et al. 2019).
        presence_penalty: subtracted once from the logit of each token in the output, -2 to 2.
        frequency_penalty: subtracted once per occurrence in the output, -2 to 2.
        logit_bias: added to the logits of these token ids, -100 to 100.
        seed: makes the draws repeatable, independent of the batch. None: the engine picks one.
        stop: strings that end the request; not part of the text unless `include_stop_str_in_output`.
        stop_token_ids: token ids that end the request.
        ignore_eos: continue after an end-of-sequence token.
        max_tokens: maximum number of output tokens; None: up to the context length.
        min_tokens: no end-of-sequence token, stop token or stop string before this number of output tokens.
        logprobs: report the log-probabilities of the k likeliest tokens and the chosen one, 0 to 20.
        prompt_logprobs: the same for each prompt token.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ValueError: a value out of its range; the message names the field and the range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: list[str] | str = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else self._as_list("stop", "strings")
        self.stop_token_ids = self._as_list("stop_token_ids", "token ids")
        self._check_integers()
        self._check_numbers()
        self._check_the_rest()
        if self.top_k == -1:
            self.top_k = 0

    def _check_integers(self) -> None:
        ranges: dict[str, tuple[int, float]] = {
            "n": (1, MAX_SEQUENCES_PER_REQUEST),
            "top_k": (-1, 2**63 - 1),
            "max_tokens": (1, math.inf),
            "min_tokens": (0, math.inf),
            "logprobs": (0, MAX_LOGPROBS),
            "prompt_logprobs": (0, MAX_LOGPROBS),
            "seed": (-(2**63), 2**63 - 1),
        }
        optional = ("max_tokens", "logprobs", "prompt_logprobs", "seed")
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if type(value) is not int or not low <= value <= high:  # a bool is an int, too
                limit = f"from {low} to {high}" if high != math.inf else f"of at least {low}"
                raise ValueError(f"{name} must be an integer {limit}, got {value!r}")

    def _check_numbers(self) -> None:
        ranges = {
            "temperature": (0.0, sys.float_info.max),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (0.0, sys.float_info.max),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
        }
        positive = ("top_p", "repetition_penalty")
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not _is_number(value, low, high) or (name in positive and value == 0):
                limit = f"from {low:g} to {high:g}" if high < sys.float_info.max else "of at least 0"
                but_not = " but not 0" if name in positive else ""
                raise ValueError(f"{name} must be a finite number {limit}{but_not}, got {value!r}")
            setattr(self, name, float(value))

    def _check_the_rest(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if len(self.stop) > MAX_STOP_STRINGS or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop must be at most {MAX_STOP_STRINGS} strings, none of them empty")
        if (longest := max(map(len, self.stop), default=0)) > MAX_STOP_LENGTH:
            raise ValueError(f"stop must have no string of over {MAX_STOP_LENGTH} characters, got one of {longest}")
        if not all(type(token) is int and token >= 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be token ids, got {self.stop_token_ids!r}")
        if self.logit_bias is not None and not isinstance(self.logit_bias, dict):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token, bias in (self.logit_bias or {}).items():
            if type(token) is not int or token < 0 or not _is_number(bias, -100, 100):
                raise ValueError(f"logit_bias must map token ids to numbers from -100 to 100, got {token!r}: {bias!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")

    def _as_list(self, name: str, what: str) -> list[Any]:
        value = getattr(self, name)
        if value is not None and not isinstance(value, list | tuple | set | frozenset):
            raise ValueError(f"{name} must be a list of {what}, got {value!r}")
        return list(value or ())

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        """True when earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def clone(self, **changes: object) -> SamplingParams:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _is_number(value: object, low: float, high: float) -> bool:
    """Whether a value is a number in a range. NaN is in no range, and a bool is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
