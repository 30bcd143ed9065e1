"""Requests to the engine, and its outputs, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from nanovllm.data.json import JsonObject
from nanovllm.data.kv_transfer import RemoteKV
from nanovllm.data.sampling_params import SamplingParams


@dataclass
class EngineRequest:
    """What the front end hands to the engine: token ids in, one sequence out.

    Attributes:
        request_id: unique among unfinished requests.
        prompt_token_ids: at least one token id.
        sampling_params: with `max_tokens` and `seed` already filled in, and `n == 1`.
        eos_token_ids: ids that end the sequence unless `ignore_eos`.
        priority: smaller runs earlier (with the `priority` policy).
        cache_salt: requests with different salts never share cached blocks.
        kv_transfer_params: where another engine has, or wants, the request's keys and values; see
            `TransferParams`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: list[int] = field(default_factory=list)
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer_params: JsonObject | None = None


@dataclass
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token first, then the likeliest ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the chosen token; 1 is the likeliest


class EngineOutput(msgspec.Struct, gc=False, omit_defaults=True):
    """What one step computed for one request.

    Attributes:
        new_token_ids: tokens sampled in this step.
        logprobs: one entry per new token, if asked for.
        prompt_logprobs: entries for the prompt tokens from position `prompt_logprobs_start` on.
        finish_reason: "stop", "length", "abort" or "error" when the request has ended.
        stop_reason: the stop token id that ended it, if one did.
        num_cached_tokens: prompt tokens that came from the prefix cache, or whose keys and values
            came from elsewhere.
        engine: which of several engines computes the request.
        kv_transfer_params: what the client should tell the engine that goes on with the request.
        error: what went wrong, if the finish reason is "error".
        error_kind: whose fault that is: "server", or "request" if what it asks of its output could
            not be followed any further.
    """

    request_id: str
    new_token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs_start: int = 0
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    engine: int = 0
    kv_transfer_params: RemoteKV | None = None
    error: str = ""
    error_kind: Literal["server", "request"] = "server"

    def by_token(self) -> list[EngineOutput]:
        """The same as an output for each new token; the last one has all else."""
        tokens = self.new_token_ids
        logprobs = self.logprobs
        parts = [
            EngineOutput(self.request_id, [t], logprobs and [logprobs[i]])
            for i, t in enumerate(tokens[:-1])
        ]
        return [
            *parts,
            msgspec.structs.replace(
                self, new_token_ids=tokens[-1:], logprobs=logprobs and logprobs[-1:]
            ),
        ]
