"""A request on its way through the engine: plain data, no tensor, no queue.

The life of a request's tokens, as half-open intervals over `token_ids`:

    0        num_cached      num_computed           num_prompt        num_tokens
    |-- from cache --|-- computed --|-- still to compute --|-- sampled --|

The scheduler's one rule is to move `num_computed_tokens` towards `num_tokens`. A prompt that is
being read, a token that was just sampled, a prefix found in the cache and a request that was
preempted and starts again are all this rule at different distances. While a step runs, it samples
`num_pending_tokens` more, which may be scheduled before they are known."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from nanovllm.data.json import JsonObject
from nanovllm.data.kv_transfer import RemoteKV
from nanovllm.data.sampling_params import SamplingParams

BlockCopies = list[tuple[int, int]]  # (from block, to block)


class RequestStatus(enum.Enum):
    """In which of the scheduler's queues a request is."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"  # its blocks are being filled
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


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


class Request:
    """The scheduler's view of one sequence."""

    def __init__(self, source: EngineRequest, arrival_index: int = 0) -> None:
        params = source.sampling_params
        # First what every step reads, which then shares a few cache lines.
        self.request_id = source.request_id
        self.token_ids = list(source.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0  # to be sampled by steps whose results have not come back
        # Guesses which tokens come next, no part of token_ids. The next step computes them after
        # the known tokens and samples after each: so far as the samples agree, they are right.
        self.extra_token_ids: list[int] = []
        # How many of token_ids the runner knows; 0: it does not know the request.
        self.num_sent_tokens = 0
        self.num_prompt_tokens = len(source.prompt_token_ids)
        self.max_num_tokens = 0  # prompt and output, at most; the scheduler sets it
        self.num_cached_tokens = -1  # -1: not admitted yet
        self.finish_reason: str | None = None
        # The tokens that end it, and the stop reason that its client gets: none for an
        # end-of-sequence token.
        self.stop_reasons: dict[int, int | None] = {
            token_id: token_id for token_id in params.stop_token_ids
        }
        self.min_tokens = params.min_tokens
        if params.structured_outputs is not None:
            # When such an output is complete, only tokens that end the request are left.
            self.min_tokens = 0
        if not params.ignore_eos or params.structured_outputs is not None:
            self.stop_reasons |= dict.fromkeys(source.eos_token_ids)
        self.looks_back = params.looks_back
        self.sampling_params = params
        self.cache_salt = source.cache_salt
        self.kv_transfer_params = source.kv_transfer_params
        # Requests run, wait and are preempted in the order of this key.
        self.order = (source.priority, arrival_index)
        self.status = RequestStatus.WAITING
        # Keys and values behind them are approximate; None: all are exact.
        self.num_exact_tokens: int | None = None
        # Tokens behind the cached prefix whose keys and values come from outside this engine.
        self.num_external_tokens = 0
        self.num_preemptions = 0
        self.block_hashes: list[bytes] = []
        self.stop_reason: int | None = None
        # Once it has ended, where the engine that continues it finds its keys and values.
        self.remote_kv: RemoteKV | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens, known or pending, whose keys and values are not computed yet."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def in_prefill(self) -> bool:
        """True while more than the newest token has to be computed."""
        return self.num_missing_tokens > 1 or self.num_output_tokens + self.num_pending_tokens == 0


@dataclass
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token first, then the likeliest ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the chosen token; 1 is the likeliest


class EngineOutput(msgspec.Struct, gc=False):
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
