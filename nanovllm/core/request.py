"""The scheduler's view of a request.

The life of a request's tokens, as half-open intervals over `token_ids`:

    0        num_cached      num_computed           num_prompt        num_tokens
    |-- from cache --|-- computed --|-- still to compute --|-- sampled --|

The scheduler's one rule is to move `num_computed_tokens` towards `num_tokens`. A prompt that is
being read, a token that was just sampled, a prefix found in the cache and a request that was
preempted and starts again are all this rule at different distances. While a step runs, it samples
`num_pending_tokens` more, which may be scheduled before they are known."""

from __future__ import annotations

import enum

from nanovllm.data.kv_transfer import RemoteKV
from nanovllm.data.request import EngineRequest

BlockCopies = list[tuple[int, int]]  # (from block, to block)


class RequestStatus(enum.Enum):
    """In which of the scheduler's queues a request is."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"  # its blocks are being filled
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"

    __hash__ = object.__hash__  # that of `Enum` is a function in Python: slow for keys


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
        # the known tokens and samples after each. What it samples after the first wrong guess must
        # be dropped, by the feature that guesses (`RunnerHooks.after_step`).
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
    def num_schedulable_tokens(self) -> int:
        """Tokens that the next step could compute: the missing ones, and the extra ones if the
        runner has state for the request; 0 while its last token is pending."""
        pending = self.num_pending_tokens
        if pending and self.num_tokens + pending >= self.max_num_tokens:
            return 0
        num_extra = len(self.extra_token_ids) if self.num_sent_tokens else 0
        return self.num_missing_tokens + num_extra

    @property
    def in_prefill(self) -> bool:
        """True while more than the newest token has to be computed."""
        return self.num_missing_tokens > 1 or self.num_output_tokens + self.num_pending_tokens == 0
