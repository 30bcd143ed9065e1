"""How tokens are drafted before the model verifies them: plain data, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from nanovllm.data.checks import Keywords, Positive, check_fields, set_fields
from nanovllm.data.json import JsonObject

if TYPE_CHECKING:
    from nanovllm.data.config import EngineConfig

# vLLM's limit, too: of drafts in one step.
DraftCount = Annotated[int, Meta(ge=1, le=128)]
# N-grams cost nothing to draft, and where a text is copied, many are right.
DEFAULT_DRAFTS = 3
DEFAULT_NGRAM = 8
DEFAULT_LOOKUP = 5


@dataclass(frozen=True)
class SpeculativeConfig(Keywords):
    """Settings of speculative decoding.

    Attributes:
        method: who drafts. ngram: the request's own text, where its last tokens occurred before;
            draft_model: a small model; eagle, eagle3: a head that reads the model's hidden states.
            By default "draft_model" if there is a `model`.
        model: of the drafts: course model, folder or hub id. With "eagle3" it may be missing if a
            head comes with the course.
        num_speculative_tokens: drafts per request and step, at most; by default 8 of ngram, 3 of
        others. prompt_lookup_max, prompt_lookup_min: how many last tokens "ngram" looks up; each is
        the other one, or 5, if missing.
        quantization: of the draft model while it is loaded, as for the model: w8a8, w4a8 or w4a16.
        draft_sample_method: greedy: the likeliest token; probabilistic: drawn, which is verified by
            rejection sampling.
        num_speculative_tokens_per_batch_size: [first, last, drafts] for numbers of running
            requests. By default, the engine drafts what pays by its own measurements
            (`features.speculation`).

    Raises:
        ValueError: a value that makes no sense; the message names the fix.
    """

    method: Literal["ngram", "draft_model", "eagle", "eagle3"] | None = None
    model: str | None = None
    num_speculative_tokens: DraftCount | None = None
    prompt_lookup_max: Positive | None = None
    prompt_lookup_min: Positive | None = None
    quantization: Literal["w8a8", "w4a8", "w4a16"] | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.method is None and self.model is None:
            raise ValueError('speculative_config needs a method, such as {"method": "ngram"}')
        method = self.method or ("ngram" if self.model == "ngram" else "draft_model")
        most = DEFAULT_NGRAM if method == "ngram" else DEFAULT_DRAFTS
        longest = self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP
        shortest = self.prompt_lookup_min or longest
        set_fields(
            self,
            method=method,
            num_speculative_tokens=self.num_speculative_tokens or most,
            prompt_lookup_max=longest,
            prompt_lookup_min=shortest,
        )
        if shortest > longest:
            raise ValueError(
                f"prompt_lookup_min ({shortest}) is above prompt_lookup_max ({longest}): lower it"
            )
        if self.method in ("draft_model", "eagle") and self.model is None:
            raise ValueError(f'method {self.method!r} needs a model that drafts: add "model"')
        if self.quantization and self.method != "draft_model":
            raise ValueError("quantization applies only to method 'draft_model': do not set it")
        if self.draft_sample_method == "probabilistic" and self.method == "ngram":
            raise ValueError(
                "method 'ngram' does not sample its drafts: do not set draft_sample_method"
            )

    @property
    def counts(self) -> str:
        """Settings, as JSON, with which a scheduler wants as many drafts; without the model."""
        counts = replace(self, model="", quantization=None, draft_sample_method="greedy")
        return msgspec.json.encode(counts).decode()

    @classmethod
    def of(cls, config: EngineConfig) -> SpeculativeConfig:
        """What the flag of an `EngineConfig` asks for.

        Raises:
            ValueError: `speculative_config` is no JSON, has a value that makes no sense, or does
                not go with another setting.
        """
        try:
            speculative = cls(
                **msgspec.json.decode(config.speculative_config or "{}", type=JsonObject)
            )
        except (TypeError, msgspec.DecodeError) as error:
            raise ValueError(
                f'speculative_config must be JSON such as {{"method": "ngram"}}: {error}'
            ) from error
        if speculative.method != "ngram" and config.pipeline_parallel_size > 1:
            raise ValueError(
                f"speculative_config: method {speculative.method!r} needs all layers on one "
                "stage; use pipeline_parallel_size 1 or method 'ngram'"
            )
        if config.enable_expert_parallel and speculative.method != "ngram":
            raise ValueError(
                "speculative_config: with enable_expert_parallel only method 'ngram' drafts"
            )
        if config.batching_policy == "static":
            raise ValueError(
                "speculative_config needs batching_policy 'chunked' or 'prefill_first'"
            )
        return speculative
