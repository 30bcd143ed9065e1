"""Decides what runs in the next step: one token budget, a queue for each status, one rule.

Built by notebooks/13_scheduler.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanovllm.core.block_pool import InvariantError
from nanovllm.core.hooks import SchedulerHookCalls, SchedulerHooks
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.queues import Queues
from nanovllm.core.request import Request, RequestStatus
from nanovllm.core.schedule import (
    ModelRunnerOutput,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
)
from nanovllm.data.outputs import EngineStats
from nanovllm.data.request import EngineOutput


@dataclass(frozen=True)
class SchedulerSettings:
    """The settings of the scheduler.

    Attributes:
        token_budget: the most tokens that a step computes.
        max_num_seqs: the most requests that hold blocks on the device.
        max_request_tokens: the most tokens of one request, prompt and output.
        swaps: preempted requests go to host memory, unless it is full.
    """

    token_budget: int
    max_num_seqs: int
    max_request_tokens: int
    swaps: bool = False


class Scheduler:
    """Divides each step's token budget among requests. It works on numbers only, without tensors.

    There is no prefill phase and no decode phase. Each request has `num_computed_tokens` and
    `num_tokens`, and every step moves the first towards the second. A request samples a token
    whenever the two meet.

    All queues are sorted by `Request.order` (priority, then arrival). The scheduler preempts the
    last running request, which then becomes the first in its queue.

    Args:
        features: have a say in each step, and are asked in this order.
        fill: puts shares into an empty plan; by default `continue_then_admit`.
        choose_victim: returns the running request to preempt so that a request gets blocks for a
            number of tokens, or None if this request has to wait; by default `last_running`.

    Attributes:
        num_queried_tokens, num_hit_tokens: tokens that were looked up in the prefix cache, and
            found.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        queues: Queues,
        manager: KVCacheManager,
        features: Sequence[SchedulerHooks] = (),
        fill: Callable[[Scheduler, SchedulerOutput], None] | None = None,
        choose_victim: Callable[[Request, int, list[Request]], Request | None] | None = None,
    ) -> None:
        self.settings = settings
        self.queues = queues
        self.manager = manager
        self.features = tuple(features)
        self.hooks = SchedulerHookCalls(features)
        self.fill = fill or continue_then_admit
        self.choose_victim = choose_victim or last_running
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    # ---------------------------------------------------------------- in and out

    def add_request(self, request: Request) -> None:
        """Put a request into the waiting queue.

        Raises:
            ValueError: its id is in use, or its prompt is too long to run even alone.
        """
        queues = self.queues
        limit = self.settings.max_request_tokens
        name = request.request_id
        if name in queues.requests or name in self.manager.held or queues.is_in_flight(name):
            raise ValueError(f"request id {name!r} is in use")
        if not 0 < request.num_tokens < limit:
            raise ValueError(
                f"a prompt must have 1 to {limit - 1} tokens here, got {request.num_tokens}"
            )
        max_tokens = request.sampling_params.max_tokens or limit
        request.max_num_tokens = min(request.num_prompt_tokens + max_tokens, limit)
        queues.add(request)

    @property
    def has_unfinished(self) -> bool:
        """True while some request has not ended."""
        return bool(self.queues.requests)

    def finish(self, request: Request, reason: str, stop_reason: int | None = None) -> None:
        """End a request. Free its blocks, unless a feature keeps them."""
        request.finish_reason = reason
        request.stop_reason = stop_reason
        if any([keeps_blocks(request) for keeps_blocks in self.hooks.keeps_blocks]):
            self.manager.hold(request, request.request_id)
        else:
            self.manager.free(request)
        self.queues.move(request, RequestStatus.FINISHED)

    def abort_request(self, request_id: str) -> bool:
        """End a request; returns False if it has ended already.

        A step in flight may still write to its freed blocks. The device runs steps in order, so
        their next owner writes later."""
        request = self.queues.requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request is not None

    def forget_requests(self) -> list[str]:
        """Forget all requests, block tables and cached prefixes, after a failed step; returns the
        requests' ids. The counters stay."""
        self.manager.forget_requests()
        return self.queues.clear()

    # ---------------------------------------------------------------- one step

    def schedule(self) -> SchedulerOutput:
        """Plan the next step, and count its tokens as computed. The plan is empty if nothing can be
        computed, or only after the next result arrives."""
        plan = SchedulerOutput(token_budget=self.settings.token_budget)
        if not all(may_plan() for may_plan in self.hooks.may_plan):
            return plan
        # Requests that this very step preempts are added to the same list.
        plan.removed_ids = self.queues.removed_ids
        for before_step in self.hooks.before_step:
            before_step(plan)
        self.fill(self, plan)
        if not plan.empty:
            # An empty plan is not run, so the next one has to carry its removed ids.
            self.queues.removed_ids = []
            self.queues.in_flight.append(plan)
        elif plan.swap_out or plan.swap_in:
            raise InvariantError("an empty plan swaps blocks, and would not be run")
        for planned in self.hooks.planned:
            planned(plan)
        return plan

    def continue_running(self, plan: SchedulerOutput, candidates: Sequence[Request]) -> None:
        """Schedule each candidate's `share`, in order. Preempt other requests if no block is free.

        Skip a candidate that this plan has preempted, and one whose share is 0. For any other,
        allocate slots with `manager.allocate_slots(request, num_computed_tokens + share)`, and pass
        the new blocks to `_schedule`. While this returns None, because no block is free:

        - If the plan is empty and steps are in flight, return: their results may free blocks.
        - Otherwise preempt `choose_victim(request, tokens, running)`, usually the last running
          request. If the victim is the request itself, or None, skip the request; else try
          again.
        """
        running = self.queues.running
        for request in list(candidates):
            if request.request_id in plan.preempted:
                continue  # for an earlier request of this loop
            share = self.share(request, plan)
            if share == 0:
                continue
            wanted = request.num_computed_tokens + share
            while (blocks := self.manager.allocate_slots(request, wanted)) is None:
                if plan.empty and self.queues.in_flight:
                    # Their results may free blocks. The engine would not run a plan that only
                    # preempts.
                    return
                victim = self.choose_victim(request, wanted, running)
                if victim is not None:
                    self._preempt(victim, plan)
                if victim is None or victim is request:
                    break
            else:
                self._schedule(request, share, blocks, plan)

    def admit(self, plan: SchedulerOutput) -> None:
        """Admit swapped and waiting requests, strictly in order, while token budget, running slots
        and blocks last.

        The next request is `queues.next_in_line`. `_why_not` returns the reason why no request may
        be admitted now, or "". If it is "", `_admit_swapped` or `_admit_waiting` admits the request
        and returns "", or returns the reason why it cannot. Admission ends with the first reason,
        so that no later request overtakes this one. `plan.blocked_by` is the last answer: "" if all
        requests were admitted."""
        while (request := self.queues.next_in_line) is not None:
            is_swapped = request.status is RequestStatus.SWAPPED
            admit = self._admit_swapped if is_swapped else self._admit_waiting
            plan.blocked_by = self._why_not(request, plan) or admit(request, plan)
            if plan.blocked_by:
                return

    def share(self, request: Request, plan: SchedulerOutput) -> int:
        """Return how many tokens of the request this step may compute.

        It is `min(missing, left)`, which each feature may lower (`limit_share`).

            missing  request.num_schedulable_tokens
            left     settings.token_budget - plan.num_tokens
        """
        left = self.settings.token_budget - plan.num_tokens
        share = min(request.num_schedulable_tokens, left)
        for limit_share in self.hooks.limit_share:
            share = limit_share(request, share, plan)
        return share

    def _why_not(self, request: Request, plan: SchedulerOutput) -> str:
        if plan.preempted:
            return "preemption"  # the next step would preempt a request that is admitted now
        if self.queues.num_seated >= self.settings.max_num_seqs:
            return "max_num_seqs"
        if plan.num_tokens >= self.settings.token_budget:
            return "max_num_batched_tokens"
        for why_not in self.hooks.why_not:
            if reason := why_not(request, plan):
                return reason
        return ""

    def _admit_waiting(self, request: Request, plan: SchedulerOutput) -> str:
        computed = self.manager.get_computed_blocks(request)
        num_hit_tokens = len(computed) * self.manager.block_size
        request.num_computed_tokens = num_hit_tokens
        for admit in self.hooks.admit:
            if (reason := admit(request, computed)) is not None:
                break
        else:
            reason = self._run_waiting(request, computed, plan)
        if reason:
            request.num_computed_tokens = 0
        else:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += num_hit_tokens
        return reason

    def _run_waiting(self, request: Request, computed: list[int], plan: SchedulerOutput) -> str:
        share = self.share(request, plan)
        if share == 0:
            return "max_num_batched_tokens"
        end = request.num_computed_tokens + share
        if self.manager.allocate_slots(request, end, computed) is None:
            return "kv blocks"
        self.queues.move(request, RequestStatus.RUNNING)
        self._schedule(request, share, [], plan)
        return ""

    def _admit_swapped(self, request: Request, plan: SchedulerOutput) -> str:
        share = self.share(request, plan)
        if share == 0:
            return "max_num_batched_tokens"
        copies = self.manager.swap_in(request, request.num_computed_tokens + share)
        if copies is None:
            return "kv blocks"
        plan.swap_in += copies
        plan.resumed.append(request.request_id)
        self.queues.move(request, RequestStatus.RUNNING)
        self._schedule(request, share, [], plan)
        return ""

    def _schedule(
        self, request: Request, share: int, new_blocks: list[int], plan: SchedulerOutput
    ) -> None:
        start = request.num_computed_tokens
        scheduled = ScheduledRequest.of(request, share, new_blocks)
        for notify in self.hooks.scheduled:
            notify(request, scheduled)
        if request.num_sent_tokens == 0:
            # The runner has no state for the request, so it needs the whole block table.
            scheduled.new_block_ids = list(self.manager.tables[request.request_id])
            scheduled.sampling_params = request.sampling_params
            scheduled.num_prompt_tokens = request.num_prompt_tokens
            if request.request_id not in plan.resumed:
                plan.admitted[request.request_id] = start
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = start
        if request.in_prefill:
            plan.num_prefill_tokens += share
        plan.add(scheduled)
        request.num_computed_tokens += share
        request.num_pending_tokens += scheduled.samples
        request.num_sent_tokens = request.num_tokens
        self.manager.cache_blocks(request, start)

    # ---------------------------------------------------------------- after the step

    def update_from_output(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[EngineOutput]:
        """Append the tokens that the step sampled, and end finished requests. Results arrive in the
        order of the steps.

        Remove the plan from `queues.in_flight`, by identity: another plan may be equal to it. Tell
        the features that the result has arrived. For each share of the plan whose request has not
        ended, subtract `scheduled.samples` from `request.num_pending_tokens`, then call `_update`.

        Returns:
            What the calls of `_update` returned, without None.
        """
        self.queues.in_flight = [step for step in self.queues.in_flight if step is not plan]
        for arrived in self.hooks.arrived:
            arrived(plan, result)
        outputs = []
        for scheduled in plan.requests:
            request = self.queues.requests.get(scheduled.request_id)
            if request is not None:
                request.num_pending_tokens -= scheduled.samples
                if (output := self._update(request, scheduled, result)) is not None:
                    outputs.append(output)
        return outputs

    def _update(
        self, request: Request, scheduled: ScheduledRequest, result: ModelRunnerOutput
    ) -> EngineOutput | None:
        sampled = result.sampled.get(scheduled.request_id)
        prompt_logprobs = result.prompt_logprobs.get(scheduled.request_id)
        if sampled is None and prompt_logprobs is None:
            return None
        output = EngineOutput(request.request_id, num_cached_tokens=request.num_cached_tokens)
        if prompt_logprobs is not None:
            output.prompt_logprobs = prompt_logprobs
            output.prompt_logprobs_start = scheduled.start + 1
        if sampled is not None and sampled[0].error:
            self.finish(request, "error")
            output.finish_reason = "error"
            output.error = sampled[0].error
            output.error_kind = "request"
        elif sampled is not None:
            self._append_tokens(request, scheduled, sampled, output)
            for notify in self.hooks.sampled:
                notify(request, scheduled, result, output)
        return output

    def _append_tokens(
        self,
        request: Request,
        scheduled: ScheduledRequest,
        sampled: list[SampledToken],
        output: EngineOutput,
    ) -> None:
        """Append sampled tokens to a request and to its output, up to the one that ends it."""
        token_ids = request.token_ids
        if scheduled.extra_token_ids:
            # Some extra tokens may be wrong. Later tokens overwrite the KV that they have left.
            known = len(token_ids) + len(sampled) - 1
            request.num_computed_tokens = min(request.num_computed_tokens, known)
        for token in sampled:
            token_id = token.token_id
            token_ids.append(token_id)
            output.new_token_ids.append(token_id)
            if token.logprobs is not None:
                output.logprobs = [*(output.logprobs or ()), token.logprobs]
            num_tokens = len(token_ids)
            if num_tokens % self.manager.block_size == 0:
                self._cache_completed_block(request)
            stops = token_id in request.stop_reasons
            if stops and request.num_output_tokens >= request.min_tokens:
                self.finish(request, "stop", request.stop_reasons[token_id])
            elif num_tokens >= request.max_num_tokens:
                self.finish(request, "length")
            if request.finish_reason is not None:
                output.finish_reason = request.finish_reason
                output.stop_reason = request.stop_reason
                return

    def _cache_completed_block(self, request: Request) -> None:
        """Cache the block that a request's newest token completes, if the token is computed: while
        a step is in flight, it can be computed before it is known."""
        num_tokens = request.num_tokens
        is_computed = request.num_computed_tokens >= num_tokens
        if is_computed and request.status is RequestStatus.RUNNING:
            self.manager.cache_blocks(request, num_tokens - 1)

    def took(self, plan: SchedulerOutput, seconds: float) -> None:
        """Tell the features how long a step has taken."""
        for took in self.hooks.took:
            took(plan, seconds)

    @property
    def stats(self) -> EngineStats:
        """Queue lengths, memory and counters."""
        stats = EngineStats(
            num_running=len(self.queues.running),
            num_waiting=len(self.queues.waiting),
            num_swapped=len(self.queues.swapped),
            kv_cache_usage=self.manager.pool.usage,
            num_preemptions=self.num_preemptions,
            num_queried_tokens=self.num_queried_tokens,
            num_hit_tokens=self.num_hit_tokens,
        )
        for add_stats in self.hooks.add_stats:
            add_stats(stats)
        return stats

    # ---------------------------------------------------------------- when blocks run out

    def _preempt(self, victim: Request, plan: SchedulerOutput) -> None:
        """Take all blocks from a running request; it keeps the tokens that it has sampled.

        If the settings allow it (`swaps`), `manager.swap_out` returns a list of block copies to
        host memory, or None if host memory is full. Otherwise there are no copies.

            copies    plan.swap_out         num_computed_tokens  move to  plan.preempted[request_id]
            a list    extended by copies    unchanged            SWAPPED  "swap"
            none      unchanged             0 (`manager.free`)   WAITING  "recompute"

        Increment `num_preemptions` of the request and of the scheduler."""
        copies = self.manager.swap_out(victim) if self.settings.swaps else None
        if copies is not None:
            plan.swap_out += copies
            plan.preempted[victim.request_id] = "swap"
            self.queues.move(victim, RequestStatus.SWAPPED)
        else:
            self.manager.free(victim)
            victim.num_computed_tokens = 0
            plan.preempted[victim.request_id] = "recompute"
            self.queues.move(victim, RequestStatus.WAITING)
        victim.num_preemptions += 1
        self.num_preemptions += 1

    # ---------------------------------------------------------------- is everything in order?

    def check_invariants(self) -> None:
        """Check queues, requests and block tables against each other; see
        `KVCacheManager.check_invariants`."""
        self.queues.check_invariants()
        for request_id, request in self.queues.requests.items():
            status = request.status
            assert request.num_missing_tokens >= 0, f"computed the unknown: {request}"
            holds_blocks = status not in (RequestStatus.WAITING, RequestStatus.SWAPPED)
            assert holds_blocks == (request_id in self.manager.tables), f"table of {request_id}"
            is_swapped = status is RequestStatus.SWAPPED
            assert is_swapped == (request_id in self.manager.host_tables), "host tables"
            if status is RequestStatus.WAITING:
                computed = request.num_computed_tokens
                assert computed == 0, f"{request_id} waits, but computed {computed} tokens"
        assert self.queues.num_seated <= self.settings.max_num_seqs
        self.manager.check_invariants(list(self.queues.requests.values()))
        for check_invariants in self.hooks.check_invariants:
            check_invariants()


def continue_then_admit(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """Fill a plan: first the running requests, then those in line."""
    scheduler.continue_running(plan, scheduler.queues.running)
    scheduler.admit(plan)


def last_running(request: Request, num_tokens: int, running: list[Request]) -> Request:
    """The victim if `request` gets no blocks for `num_tokens` tokens: the last running request."""
    return running[-1]
