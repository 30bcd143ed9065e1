"""Decides how many tokens to draft, has drafts verified, and drafts n-grams of a request's tokens.

Built by notebooks/42_speculative_decoding.ipynb: edit it there.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median
from typing import cast
from weakref import WeakKeyDictionary

from nanovllm.core.hooks import SchedulerHooks
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.queues import Queues
from nanovllm.core.request import Request
from nanovllm.core.schedule import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from nanovllm.data.outputs import EngineStats
from nanovllm.data.request import EngineOutput
from nanovllm.data.spec_decoding import SpecDecodingStats
from nanovllm.data.speculative_config import SpeculativeConfig

# In two of this many steps, the decision is reversed, to measure the alternative again.
PROBE = 128
# Steps with drafts after which the cost of a row is known.
FEW = 3
# Factor by which the weight of a drafted token falls with each later one, when the acceptance of a
# request's drafts is estimated.
MEMORY = 0.9
# The acceptance over all requests counts as much as this many drafts of the request itself.
PRIOR = 2.0


class NgramProposer:
    """Drafts by prompt lookup (Saxena 2023): finds the longest n-gram at the end of a sequence that
    has occurred before, and drafts the tokens that followed its first occurrence.

    The sequence may only grow: each n-gram is recorded once.

    Args:
        longest, shortest: lengths of the n-grams.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self.lengths = range(longest, shortest - 1, -1)
        # N-gram → the position after its first occurrence.
        self._following: dict[tuple[int, ...], int] = {}
        self._num_noted = 0

    def propose(self, token_ids: list[int], count: int) -> list[int]:
        """Return up to `count` drafts for the sequence so far; [] if no n-gram at its end has
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


# The key of this feature in the `extras` of plans and results.
DRAFTS = "speculation"


def num_drafts_wanted(plan: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens the runner is to draft after a step, by request."""
    return cast("dict[str, int]", plan.extras.get(DRAFTS, {}))


def new_drafts(result: ModelRunnerOutput) -> dict[str, list[int]]:
    """Return the tokens that the runner has drafted after a step, by request."""
    return cast("dict[str, list[int]]", result.extras.get(DRAFTS, {}))


@dataclass
class DraftHistory:
    """A request's n-grams, and the numbers of its tried and accepted drafts, in which older drafts
    count less."""

    ngrams: NgramProposer
    num_accepted: float = 0.0
    num_tried: float = 0.0


class Speculation(SchedulerHooks):
    """Decides how many tokens to draft for each request, drafts n-grams, and keeps statistics.

    A request's drafts are its `extra_token_ids`: the next step computes them after the known
    tokens, and samples after each of them.

    A drafted token costs one row of the next step. It pays if

        p > r · n / T    p  probability that the draft is accepted: acceptance ** j for draft j
                         r  seconds of one drafted row
                         n  requests in the step
                         T  seconds of a step without drafts, which yields n tokens

    r and T are measured for each size of the batch. Drafting stops for large batches, where r · n
    is large, and for unpredictable text, where p is small.

    Attributes:
        stats: numbers of drafted and accepted tokens.
    """

    def __init__(
        self, config: SpeculativeConfig, queues: Queues, manager: KVCacheManager, max_num_seqs: int
    ) -> None:
        self.config = config
        self.queues = queues
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.most = config.num_speculative_tokens or 0
        self.stats = SpecDecodingStats(num_accepted_tokens_per_pos=[0] * self.most)
        # By the number of requests, rounded up to a power of two: seconds of steps without drafts,
        # and the additional seconds per drafted row.
        self._plain: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=15))
        self._row: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=15))
        self._num_steps = 0
        self._paused = False
        # By request, the number of drafts for the runner to make in the step that is being planned.
        self._wanted: dict[str, int] = {}
        self._history: WeakKeyDictionary[Request, DraftHistory] = WeakKeyDictionary()

    def limit(self, request: Request) -> int:
        """Return the most tokens that may be drafted for a request: 0 with a grammar; otherwise the
        lowest of the engine's limit, the request's limit, and the tokens that it may still generate
        after the one that the step samples."""
        params = request.sampling_params
        own = (
            self.most
            if params.num_speculative_tokens is None
            else min(self.most, params.num_speculative_tokens)
        )
        if params.structured_outputs is not None:
            return 0  # the mask of a row depends on the drafts before it
        return max(0, min(own, request.max_num_tokens - request.num_tokens - 1))

    def before_step(self, plan: SchedulerOutput) -> None:
        """Drop all drafts, and draft nothing in this step, if prompts can use the step's token
        budget, or if drafts could exhaust the free blocks and so cause a preemption."""
        queues = self.queues
        running = queues.running
        others_wait = bool(queues.waiting or queues.swapped)
        prompts_wait = others_wait and queues.num_seated < self.max_num_seqs
        prompts_run = any(request.in_prefill for request in running)
        # Each request may need blocks for drafts to verify and drafts to make.
        blocks = len(running) * (1 + self.manager.blocks_for(2 * self.most))
        self._wanted = {}
        self._paused = prompts_wait or prompts_run or self.manager.pool.num_free < blocks
        if self._paused:
            for request in running:
                request.extra_token_ids = []

    def scheduled(self, request: Request, scheduled: ScheduledRequest) -> None:
        """Ask the runner for new drafts, if there are slots for them: the draft model's KV is in
        the request's blocks. Near the request's end, the runner makes as many as have slots."""
        if not scheduled.samples:
            return
        num_drafts = self.num_drafts_to_make(request, len(self.queues.running))
        end = scheduled.start + scheduled.num_tokens + num_drafts
        blocks = self.manager.allocate_slots(request, min(end, request.max_num_tokens))
        if blocks is not None and num_drafts:
            self._wanted[request.request_id] = num_drafts
            scheduled.new_block_ids = [*scheduled.new_block_ids, *blocks]

    def planned(self, plan: SchedulerOutput) -> None:
        """Tell the runner how many tokens to draft for each request."""
        if self._wanted:
            plan.extras[DRAFTS] = self._wanted

    def num_drafts_to_make(self, request: Request, num_requests: int) -> int:
        """Return how many tokens the runner drafts; 0 if it has no draft model."""
        return 0 if self.config.method == "ngram" else self.count(request, num_requests)

    def count(self, request: Request, num_requests: int) -> int:
        """Return how many tokens to draft for a request in a batch of `num_requests`.

        The first row that applies, with `paying`, the largest j up to `limit` for which
        `acceptance(request) ** j > _price(num_requests)`:

            0                                    the step is `_paused`
            min(limit, k for num_requests)       `num_speculative_tokens_per_batch_size` is set: a
                                                 list of (first, last, k); 0 if no range matches
            0 if paying else                     in a probe: `_num_steps % PROBE < 2`
              min(limit, 1 + (num_requests == 1))
            min(limit, paying)                   otherwise

        `limit` is `limit(request)`. A probe takes two steps, because the first one still verifies
        earlier drafts."""
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
        """Return the probability of acceptance above which a drafted row pays. It is infinite until
        a step without drafts was measured, and then 0 until `FEW` steps with drafts were."""
        size = num_requests.bit_length()
        if not self._plain[size] or len(self._row[size]) < FEW:
            return 0.0 if self._plain[size] else math.inf
        return max(0.0, median(self._row[size])) * num_requests / median(self._plain[size])

    def acceptance(self, request: Request) -> float:
        """Estimate the probability that a drafted token of a request is accepted if all drafts
        before it are."""
        num_accepted = self.stats.num_accepted_tokens
        everywhere = (num_accepted + 1) / (num_accepted + self.stats.num_drafts + 1)
        history = self.history_of(request)
        return (history.num_accepted + PRIOR * everywhere) / (history.num_tried + PRIOR)

    def history_of(self, request: Request) -> DraftHistory:
        """Return what is known of a request's drafts."""
        if (history := self._history.get(request)) is None:
            ngrams = NgramProposer(
                self.config.prompt_lookup_max or 1, self.config.prompt_lookup_min or 1
            )
            history = self._history[request] = DraftHistory(ngrams)
        return history

    def sampled(
        self,
        request: Request,
        scheduled: ScheduledRequest,
        result: ModelRunnerOutput,
        output: EngineOutput,
    ) -> None:
        """Count a request's accepted drafts, and give it new ones: the runner's, or an n-gram. All
        new tokens but the last one were drafts."""
        if scheduled.extra_token_ids:
            num_accepted = len(output.new_token_ids) - 1
            self._count_accepted(request, len(scheduled.extra_token_ids), num_accepted)
        if request.finish_reason is not None:
            return
        if self.config.method != "ngram":
            drafts = new_drafts(result).get(request.request_id, [])
            request.extra_token_ids = drafts[: self.limit(request)]
        else:
            count = self.count(request, len(self.queues.running))
            ngrams = self.history_of(request).ngrams
            request.extra_token_ids = ngrams.propose(request.token_ids, count) if count else []

    def _count_accepted(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.stats.add(1, num_drafts, [1] * num_accepted)
        # The drafts after a rejected one were not tried.
        history = self.history_of(request)
        tried = min(num_accepted + 1, num_drafts)
        history.num_accepted = history.num_accepted * MEMORY**tried + num_accepted
        history.num_tried = history.num_tried * MEMORY**tried + tried

    def took(self, plan: SchedulerOutput, seconds: float) -> None:
        """Record the time of a finished step."""
        if plan.num_prefill_tokens or plan.empty:
            return
        self._num_steps += 1
        size = len(plan.requests).bit_length()
        counts = [len(r.extra_token_ids) for r in plan.requests]
        if not any(counts) and not num_drafts_wanted(plan):
            self._plain[size].append(seconds)
        # With a single draft, the fixed cost of verification would count as the cost of one row.
        elif self._plain[size] and sum(counts) >= min(2, self.most):
            self._row[size].append((seconds - median(self._plain[size])) / sum(counts))

    def add_stats(self, stats: EngineStats) -> None:
        """Add the numbers of drafted and accepted tokens."""
        stats.spec_decoding = self.stats
