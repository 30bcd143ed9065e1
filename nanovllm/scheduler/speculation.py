"""Which tokens to draft, and how many: n-grams of a request's own text, and when a drafted token is
worth its row.

Built by notebooks/42_speculative_decoding.ipynb: edit it there.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median
from weakref import WeakKeyDictionary

from nanovllm.data.request import Request
from nanovllm.data.schedule import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from nanovllm.data.spec_decoding import SpecDecodingStats
from nanovllm.data.speculative_config import SpeculativeConfig
from nanovllm.kv.manager import KVCacheManager

# Of so many steps, two do the opposite of what seems best, to measure it again.
PROBE = 128
# A row's price is known after so many steps with drafts.
FEW = 3
# A drafted token counts so much less with each later one, when the acceptance of a request's drafts
# is estimated.
MEMORY = 0.9
# How much the acceptance of all requests' drafts counts for one request's: as so many drafts of its
# own.
PRIOR = 2.0


class NgramProposer:
    """Drafts what followed when a text's last tokens occurred before, for the longest such n-gram,
    the first time that it occurred (prompt
    lookup: Saxena 2023). The text may only grow; each of its n-grams is noted once.

    Args:
        longest, shortest: how many last tokens are looked up.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self.lengths = range(longest, shortest - 1, -1)
        self._following: dict[
            tuple[int, ...], int
        ] = {}  # n-gram → the place after its first occurrence
        self._num_noted = 0

    def propose(self, token_ids: list[int], count: int) -> list[int]:
        """Up to `count` drafts for the text so far; [] if not even the shortest n-gram at its end
        occurred before."""
        for end in range(self._num_noted + 1, len(token_ids)):
            for length in self.lengths:
                if length <= end:
                    self._following.setdefault(tuple(token_ids[end - length : end]), end)
        self._num_noted = max(self._num_noted, len(token_ids) - 1)
        for length in self.lengths:
            if (place := self._following.get(tuple(token_ids[-length:]))) is not None:
                return token_ids[place : place + count]
        return []


@dataclass
class DraftHistory:
    """What is known of a request's drafts: how many were accepted of those tried, where older ones
    count less; and its n-grams."""

    ngrams: NgramProposer
    num_accepted: float = 0.0
    num_tried: float = 0.0


class Speculation:
    """Decides how many tokens are drafted for a request, drafts n-grams, and counts.

    A drafted token costs a row of the next step. In a step of n requests that takes T seconds
    without drafts, a row of r seconds pays if the probability p that it becomes a token is more
    than what the same time yields otherwise: p > r · n / T. T and r are measured, by the number of
    requests; p of a request's j-th draft is its acceptance to the power of j. This is why drafts
    cease where the batch is large, and where a text cannot be foreseen.

    Attributes:
        stats: what became of drafts.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self.most = config.num_speculative_tokens or 0
        self.stats = SpecDecodingStats(num_accepted_tokens_per_pos=[0] * self.most)
        # By the number of requests, rounded up to a power of two: seconds of steps without drafts;
        # and of a drafted row, beyond them.
        self._plain: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=15))
        self._row: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=15))
        self._num_steps = 0
        self._paused = False
        self._history: WeakKeyDictionary[Request, DraftHistory] = WeakKeyDictionary()

    def limit(self, request: Request) -> int:
        """How many tokens may be drafted for a request at most, whatever it costs: its own limit, a
        grammar's (none), and what it may still generate beyond the token that each step samples."""
        params = request.sampling_params
        own = (
            self.most
            if params.num_speculative_tokens is None
            else min(self.most, params.num_speculative_tokens)
        )
        if params.structured_outputs is not None:
            return 0  # the mask of a row would depend on the drafts before it
        return max(0, min(own, request.max_num_tokens - request.num_tokens - 1))

    def begin_step(
        self, running: list[Request], others_wait: bool, manager: KVCacheManager
    ) -> None:
        """Drop drafts where prompts have use for the step's budget: no row is free beside them. And
        where memory is short: nobody is preempted in favour of drafts."""
        # Of each request: drafts to verify, and to make.
        blocks = len(running) * (1 + manager.blocks_for(2 * self.most))
        prompts_wait = others_wait or any(request.in_prefill for request in running)
        self._paused = prompts_wait or manager.pool.num_free < blocks
        if self._paused:
            for request in running:
                request.draft_token_ids = []

    def num_drafts_to_make(self, request: Request, num_requests: int) -> int:
        """How many tokens the runner shall draft; 0 if it has nothing to draft with."""
        return 0 if self.config.method == "ngram" else self.count(request, num_requests)

    def count(self, request: Request, num_requests: int) -> int:
        """How many tokens to draft for a request, beside so many requests that decode.

        At most `limit(request)`; none while the step is `_paused`. If the settings name a number
        for this many requests (`num_speculative_tokens_per_batch_size`: first, last, number), that
        one, or 0 if they name others. Otherwise drafts pay one after the other, as long as their
        chance is above `_price(num_requests)`: the chance of the first is `acceptance(request)`, of
        each other that much less than the one before. In two steps in a row of every `PROBE`, where
        `_num_steps` leaves a remainder of 0 or 1, it tries the
        opposite: 0 if any pays, else 1, or 2 of a single request. (The first of them still verifies
        what was drafted before.)"""
        limit = 0 if self._paused else self.limit(request)
        if limit == 0:
            return 0
        if (sizes := self.config.num_speculative_tokens_per_batch_size) is not None:
            return min(
                limit, next((k for first, last, k in sizes if first <= num_requests <= last), 0)
            )
        price = self._price(num_requests)
        acceptance = self.acceptance(request)
        paying = 0
        chance = acceptance
        while paying < limit and chance > price:
            paying = paying + 1
            chance = chance * acceptance
        if self._num_steps % PROBE < 2:
            return 0 if paying else min(limit, 1 + (num_requests == 1))
        return paying

    def _price(self, num_requests: int) -> float:
        """The least probability with which a drafted row pays. Without a step that had no drafts,
        nothing pays; then all do, until a few steps had some."""
        size = num_requests.bit_length()
        if not self._plain[size] or len(self._row[size]) < FEW:
            return 0.0 if self._plain[size] else math.inf
        return max(0.0, median(self._row[size])) * num_requests / median(self._plain[size])

    def acceptance(self, request: Request) -> float:
        """The probability that the next drafted token of a request is accepted, if those before it
        are."""
        num_accepted = self.stats.num_accepted_tokens
        everywhere = (num_accepted + 1) / (num_accepted + self.stats.num_drafts + 1)
        history = self._history_of(request)
        return (history.num_accepted + PRIOR * everywhere) / (history.num_tried + PRIOR)

    def _history_of(self, request: Request) -> DraftHistory:
        if (history := self._history.get(request)) is None:
            ngrams = NgramProposer(
                self.config.prompt_lookup_max or 1, self.config.prompt_lookup_min or 1
            )
            history = self._history[request] = DraftHistory(ngrams)
        return history

    def end_step(
        self,
        request: Request,
        scheduled: ScheduledRequest,
        result: ModelRunnerOutput,
        num_new: int,
        num_requests: int,
    ) -> None:
        """Count what became of a request's drafts, and give it new ones: what the runner has
        drafted, or an n-gram.

        Args:
            num_new: tokens that the request got in the step; all but the last one had been drafted.
            num_requests: that run.
        """
        if scheduled.draft_token_ids:
            self._count_accepted(request, len(scheduled.draft_token_ids), num_new - 1)
        if request.finish_reason is not None:
            return
        if self.config.method != "ngram":
            request.draft_token_ids = result.draft_token_ids.get(request.request_id, [])[
                : self.limit(request)
            ]
        else:
            count = self.count(request, num_requests)
            request.draft_token_ids = (
                self._history_of(request).ngrams.propose(request.token_ids, count) if count else []
            )

    def _count_accepted(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.stats.add(1, num_drafts, [1] * num_accepted)
        # A rejected draft ends the trial: those after it were not tried.
        history = self._history_of(request)
        tried = min(num_accepted + 1, num_drafts)
        history.num_accepted = history.num_accepted * MEMORY**tried + num_accepted
        history.num_tried = history.num_tried * MEMORY**tried + tried

    def add(self, plan: SchedulerOutput, seconds: float) -> None:
        """Learn from a step that ran how long steps and rows take."""
        if plan.num_prefill_tokens or plan.empty:
            return
        self._num_steps += 1
        size = len(plan.requests).bit_length()
        counts = [len(r.draft_token_ids) for r in plan.requests]
        if not any(counts) and not any(r.num_drafts for r in plan.requests):
            self._plain[size].append(seconds)
        # A single draft would have to pay for what all drafts of a step need.
        elif self._plain[size] and sum(counts) >= min(2, self.most):
            self._row[size].append((seconds - median(self._plain[size])) / sum(counts))
