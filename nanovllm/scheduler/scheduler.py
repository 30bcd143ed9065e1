"""Decides what runs in the next step: one token budget, a queue for each status, one rule.

Built by notebooks/13_scheduler.ipynb and 23, 42, 43: edit it there.
"""

from __future__ import annotations

from bisect import insort
from functools import cached_property
from typing import TYPE_CHECKING, cast

from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import load
from nanovllm.data.request import EngineOutput, Request, RequestStatus
from nanovllm.data.schedule import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from nanovllm.kv.manager import KVCacheManager
from nanovllm.kv.no_connector import NoConnector
from nanovllm.scheduler.step_times import StepTimes

if TYPE_CHECKING:
    from nanovllm.kv.connector import KVConnectorScheduler
    from nanovllm.scheduler.speculation import Speculation


class Scheduler:
    """Divides each step's token budget among requests. It works on numbers only, without tensors.

    There is no prefill phase and no decode phase. Each request has `num_computed_tokens` and
    `num_tokens`, and every step moves the first towards the second. A request samples a token
    whenever the two meet.

    All queues are sorted by `Request.order` (priority, then arrival). The scheduler preempts the
    last running request, which then becomes the first in its queue.

    Args:
        connector: transfers KV from and to other engines or stores (lecture 31); by default a
            `NoConnector`.

    Attributes:
        waiting: requests without computed tokens.
        receiving: requests whose blocks on the device the connector is filling.
        running: requests that hold blocks on the device.
        swapped: preempted requests that hold blocks in host memory.
        queues: the queue of each status; the queue of finished requests stays empty.
        steps_in_flight: plans whose results are still missing, oldest first.
        step_times: predicts how long a step will take, from the step times that the engine reports.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        connector: KVConnectorScheduler | NoConnector | None = None,
    ) -> None:
        self.config = config
        self.manager = manager
        self.connector = connector or NoConnector()
        self.requests: dict[str, Request] = {}
        self.queues: dict[RequestStatus, list[Request]] = {status: [] for status in RequestStatus}
        self.waiting = self.queues[RequestStatus.WAITING]
        self.receiving = self.queues[RequestStatus.WAITING_FOR_REMOTE_KVS]
        self.running = self.queues[RequestStatus.RUNNING]
        self.swapped = self.queues[RequestStatus.SWAPPED]
        self.num_preemptions = 0
        self.num_queried_tokens = self.num_hit_tokens = 0  # of the prefix cache
        self.num_external_queried_tokens = self.num_external_hit_tokens = 0  # of the connector
        self._removed_ids: list[str] = []
        self.step_times = StepTimes()
        self.steps_in_flight: tuple[SchedulerOutput, ...] = ()  # the results are still missing

    @cached_property
    def speculation(self) -> Speculation | None:
        """Drafts tokens, or decides how many tokens the runner drafts; None without
        `config.speculative`."""
        if self.config.speculative is None:
            return None
        create = load("nanovllm.scheduler.speculation:Speculation", "speculative_config")
        return cast("Speculation", create(self.config.speculative))

    # ---------------------------------------------------------------- in and out

    def add_request(self, request: Request) -> None:
        """Put a request into the waiting queue.

        Raises:
            ValueError: its id is in use, or its prompt is too long to run even alone.
        """
        limit = self.config.max_request_tokens
        computed = (
            scheduled.request_id for plan in self.steps_in_flight for scheduled in plan.requests
        )
        if any(request.request_id in used for used in (self.requests, self.manager.held, computed)):
            raise ValueError(f"request id {request.request_id!r} is in use")
        if not 0 < request.num_tokens < limit:
            raise ValueError(
                f"a prompt must have 1 to {limit - 1} tokens here, got {request.num_tokens}"
            )
        self.requests[request.request_id] = request
        request.max_num_tokens = min(
            request.num_prompt_tokens + (request.sampling_params.max_tokens or limit), limit
        )
        insort(self.waiting, request, key=lambda r: r.order)

    @property
    def has_unfinished(self) -> bool:
        """True while some request has not ended."""
        return bool(self.requests)

    def move(self, request: Request, status: RequestStatus) -> None:
        """Put a request into the queue of another status. If the runner has state for the request,
        the next step tells it to drop this state."""
        self.queues[request.status].remove(request)
        if request.num_sent_tokens:
            self._removed_ids.append(request.request_id)
            request.num_sent_tokens = 0
        request.status = status
        if status is not RequestStatus.FINISHED:
            insort(self.queues[status], request, key=lambda r: r.order)

    def finish(self, request: Request, reason: str, stop_reason: int | None = None) -> None:
        """End a request. Free its blocks, unless the connector still reads or writes them."""
        request.finish_reason = reason
        request.stop_reason = stop_reason
        table = self.manager.tables.get(request.request_id, [])
        in_use, request.remote_kv = self.connector.request_finished(request, table)
        if in_use or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            self.manager.hold(request, request.request_id)
        else:
            self.manager.free(request)
        self.move(request, RequestStatus.FINISHED)
        del self.requests[request.request_id]

    def abort_request(self, request_id: str) -> bool:
        """End a request; returns False if it has ended already.

        A step in flight may still write to its freed blocks. The device runs steps in order, so
        their next owner writes later."""
        request = self.requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request is not None

    # ---------------------------------------------------------------- one step

    def schedule(self) -> SchedulerOutput:
        """Plan the next step, and count its tokens as computed. The plan is empty if the step has
        to wait for pending tokens."""
        if self.waits_for_tokens:
            return SchedulerOutput()
        plan = SchedulerOutput(removed_ids=self._removed_ids)
        self._removed_ids = plan.removed_ids  # preemptions of this very step belong to it too
        if self.speculation is not None:
            seats = self.config.max_num_seqs - len(self.running) - len(self.receiving)
            self.speculation.begin_step(
                self.running, bool(self.waiting or self.swapped) and seats > 0, self.manager
            )
        # Otherwise, a step is all prefill or all decode.
        chunked = self.config.batching_policy == "chunked"
        if chunked and self.config.max_step_ms and not all(r.in_prefill for r in self.running):
            plan.max_prefill_tokens = self.step_times.prefill_tokens(self.config.max_step_ms / 1000)
        candidates = (
            self._continue_decoding(plan) if chunked else [r for r in self.running if r.in_prefill]
        )
        plan.num_tokens = plan.num_samples = num_decoding = len(plan.requests)
        self._continue_running(plan, candidates)
        self._admit(plan)
        if plan.empty and not chunked:
            self._continue_running(plan, self.running)
        # The engine does not run an empty plan, so the next plan has to carry its removed ids.
        self._removed_ids = plan.removed_ids if plan.empty else []
        if not plan.empty:
            self.mark_in_flight(plan, num_decoding)
        plan.connector_metadata = self.connector.build_connector_meta(plan, self.manager.tables)
        return plan

    @property
    def waits_for_tokens(self) -> bool:
        """True if the next step has to wait for pending tokens because a penalty, a grammar or
        drafts depend on them."""
        ahead = bool(self.steps_in_flight) and not self._in_stages
        return ahead and any(
            (r.looks_back or self.speculation) and r.num_pending_tokens for r in self.running
        )

    def _continue_decoding(self, plan: SchedulerOutput) -> list[Request]:
        """Fast path of `_continue_running` for the leading requests that each need exactly one
        token.

        Returns:
            The remaining running requests, for `_continue_running`. The first of them needs more
            tokens, or the runner has no state for it, or no block is free for it. With pipeline
            stages or speculation, all running requests.
        """
        leaves_all = self._in_stages or self.speculation is not None
        block_size = self.manager.block_size
        count = 0 if leaves_all else self.config.token_budget
        for i, request in enumerate(self.running[:count]):
            start = request.num_computed_tokens
            pending = request.num_pending_tokens
            num_sent = request.num_sent_tokens
            num_tokens = len(request.token_ids)
            end = start + 1
            if end != num_tokens + pending or start < request.num_prompt_tokens or num_sent == 0:
                return self.running[i:]
            if pending and end >= request.max_num_tokens:
                continue  # the pending token is the last one
            blocks = () if start % block_size else self.manager.allocate_slots(request, end)
            if blocks is None:
                return self.running[i:]
            name = request.request_id
            new = request.token_ids[num_sent:]
            plan.requests.append(
                ScheduledRequest(
                    name, start, 1, new, blocks, samples=1, last_is_pending=pending > 0
                )
            )
            request.num_computed_tokens = end
            request.num_sent_tokens = num_tokens
            request.num_pending_tokens = pending + 1
            if end % block_size == 0:
                self.manager.cache_blocks(request, start)
        return self.running[count:]

    def share(self, request: Request, plan: SchedulerOutput) -> int:
        """Return how many tokens of the request this step may compute. The first row that applies:

            0                                     tokens are pending, and there are pipeline stages
                                                  (`_in_stages`) or the last token is pending
            min(missing + drafts, left)           the runner has state for the request
                                                  (`num_sent_tokens`), and it has drafts
            missing if missing <= left else 0     without `config.enable_chunked_prefill`
            min(missing, left, threshold, prefill_left)                                 otherwise

            missing       request.num_missing_tokens
            drafts        len(request.draft_token_ids)
            left          config.token_budget - plan.num_tokens
            threshold     config.long_prefill_token_threshold, if it is above 0
            prefill_left  plan.max_prefill_tokens - plan.num_prefill_tokens, if request.in_prefill

        The last token is pending if `num_tokens + num_pending_tokens >= max_num_tokens`."""
        is_last = request.num_tokens + request.num_pending_tokens >= request.max_num_tokens
        if request.num_pending_tokens and (self._in_stages or is_last):
            # The first stage needs the token that the last stage has not sampled yet; or the
            # request ends with the pending token.
            return 0
        wanted = request.num_missing_tokens
        budget = self.config.token_budget - plan.num_tokens
        if request.draft_token_ids and request.num_sent_tokens:
            return min(wanted + len(request.draft_token_ids), budget)
        if not self.config.enable_chunked_prefill:
            return wanted if wanted <= budget else 0
        if self.config.long_prefill_token_threshold > 0:
            wanted = min(wanted, self.config.long_prefill_token_threshold)
        if request.in_prefill:
            budget = min(budget, plan.max_prefill_tokens - plan.num_prefill_tokens)
        return min(wanted, budget)

    @property
    def _in_stages(self) -> bool:
        return self.config.pipeline_parallel_size > 1

    def _is_full(self, plan: SchedulerOutput, num_requests: int) -> bool:
        """True once the step samples for ⌈num_requests / pipeline_parallel_size⌉ requests. The
        others are for the steps that keep the other pipeline stages busy."""
        return self._in_stages and plan.num_samples >= -(
            -num_requests // self.config.pipeline_parallel_size
        )

    def _continue_running(self, plan: SchedulerOutput, candidates: list[Request]) -> None:
        """Schedule each candidate's `share`, in order. Preempt other requests if no block is free.

        Stop once the step is full for all running requests (`_is_full`). Skip a candidate that this
        plan has preempted, and one whose share is 0. For any other, allocate slots with
        `manager.allocate_slots(request, num_computed_tokens + share)`, and pass the new blocks to
        `_schedule`. While this returns None, because no block is free:

        - If the plan is empty and steps are in flight, return: their results may free blocks.
        - Otherwise preempt `connector.choose_victim(request, tokens, running, manager)`, usually
          the last running request. If the victim is the request itself, or None, skip the request;
          else try again.
        """
        for request in list(candidates):
            if request.request_id in plan.preempted:
                continue  # for an earlier request of this loop
            if self._is_full(plan, len(self.running)):
                return
            share = self.share(request, plan)
            if share == 0:
                continue
            wanted = request.num_computed_tokens + share
            while (blocks := self.manager.allocate_slots(request, wanted)) is None:
                if plan.empty and self.steps_in_flight:
                    # Their results may free blocks. The engine would not run a plan that only
                    # preempts.
                    return
                if (
                    victim := self.connector.choose_victim(
                        request, wanted, self.running, self.manager
                    )
                ) is not None:
                    self._preempt(victim, plan)
                if victim is None or victim is request:
                    break
            else:
                self._schedule(request, share, blocks, plan)

    def _admit(self, plan: SchedulerOutput) -> None:
        """Admit swapped and waiting requests, strictly in order, while token budget, running slots
        and blocks last.

        The next request is the head of `swapped` or of `waiting`, whichever has the lower `order`.
        `_why_not` returns the reason why no request may be admitted now, or "". If it is "",
        `_admit_swapped` or `_admit_waiting` admits the request and returns "", or returns the
        reason why it cannot. Admission ends with the first reason, so that no later request
        overtakes this one. `plan.blocked_by` is the last answer: "" if all requests were
        admitted."""
        while queue := min(
            (q for q in (self.swapped, self.waiting) if q), key=lambda q: q[0].order, default=None
        ):
            admit = self._admit_swapped if queue is self.swapped else self._admit_waiting
            plan.blocked_by = self._why_not(queue[0], plan) or admit(queue[0], plan)
            if plan.blocked_by:
                return

    def _why_not(self, request: Request, plan: SchedulerOutput) -> str:
        if plan.preempted:
            return "preemption"  # the next step would preempt a request that is admitted now
        if len(self.running) + len(self.receiving) >= self.config.max_num_seqs:
            return "max_num_seqs"
        if plan.num_tokens >= self.config.token_budget:
            return "max_num_batched_tokens"
        if request.in_prefill and plan.num_prefill_tokens >= plan.max_prefill_tokens:
            return "max_step_ms"
        # A request that was preempted while a step was in flight waits with a pending token. And
        # the other steps in flight need requests, too.
        if request.num_pending_tokens or self._is_full(
            plan, min(len(self.requests), self.config.max_num_seqs)
        ):
            return "pipeline_parallel_size"
        if self.config.batching_policy == "static" and any(
            r.num_output_tokens + r.num_pending_tokens > 1 for r in self.running
        ):
            # The batch has begun to decode: no request joins until all have finished.
            return "static batch"
        return ""

    def _admit_waiting(self, request: Request, plan: SchedulerOutput) -> str:
        computed = self.manager.get_computed_blocks(request)
        request.num_computed_tokens = len(computed) * self.manager.block_size
        num_external = 0
        if request.sampling_params.prompt_logprobs is None:
            # Log-probabilities need the hidden states of the whole prompt.
            num_external, _ = self.connector.get_num_new_matched_tokens(
                request, request.num_computed_tokens
            )
        share = num_external or self.share(request, plan)
        blocks = (
            self.manager.allocate_slots(request, request.num_computed_tokens + share, computed)
            if share
            else None
        )
        if blocks is None:
            request.num_computed_tokens = 0
            return "kv blocks" if share else "max_num_batched_tokens"
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += request.num_computed_tokens
        if num_external:
            request.num_external_tokens = num_external
            self.num_external_queried_tokens += num_external
            self.move(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
            self.connector.update_state_after_alloc(request, blocks, num_external)
        else:
            self.move(request, RequestStatus.RUNNING)
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
        self.move(request, RequestStatus.RUNNING)
        self._schedule(request, share, [], plan)
        return ""

    def _schedule(
        self, request: Request, share: int, new_blocks: list[int], plan: SchedulerOutput
    ) -> None:
        before = request.num_computed_tokens
        new_tokens = request.token_ids[request.num_sent_tokens :]
        scheduled = ScheduledRequest(request.request_id, before, share, new_tokens, new_blocks)
        scheduled.draft_token_ids = request.draft_token_ids[
            : max(0, share - request.num_missing_tokens)
        ]
        if request.num_missing_tokens + len(scheduled.draft_token_ids) == share:
            scheduled.samples = 1 + len(scheduled.draft_token_ids)
        if self.speculation is not None and scheduled.samples:
            scheduled.num_drafts = self.speculation.num_drafts_to_make(request, len(self.running))
            # Drafts need slots, too: the draft model's KV is in the same blocks.
            room = self.manager.allocate_slots(request, before + share + scheduled.num_drafts)
            scheduled.num_drafts *= room is not None
            scheduled.new_block_ids = [*new_blocks, *(room or ())]
        if request.num_sent_tokens == 0:
            # The runner has no state for the request, so it needs the whole block table.
            scheduled.new_block_ids = list(self.manager.tables[request.request_id])
            scheduled.sampling_params = request.sampling_params
            scheduled.num_prompt_tokens = request.num_prompt_tokens
            if request.request_id not in plan.resumed:
                plan.admitted[request.request_id] = before
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = before
        plan.num_prefill_tokens += share if request.in_prefill else 0
        plan.add(scheduled)
        request.num_computed_tokens += share
        request.num_sent_tokens = request.num_tokens
        self.manager.cache_blocks(request, before)

    def mark_in_flight(self, plan: SchedulerOutput, first: int = 0) -> None:
        """Append a step to `steps_in_flight` (a tuple) until its result arrives, and count the
        tokens that it samples as pending. `_continue_decoding` has counted the plan's first shares
        already; for each share `scheduled` from number `first` on:

            scheduled.last_is_pending   = num_computed_tokens - number of drafts > num_tokens
            request.num_pending_tokens += scheduled.samples

        The request's `num_computed_tokens` includes this step. Draft tokens
        (`scheduled.draft_token_ids`) are computed, but neither known nor pending."""
        self.steps_in_flight += (plan,)
        for scheduled in plan.requests[first:]:
            request = self.requests[scheduled.request_id]
            num_drafts = len(scheduled.draft_token_ids)
            scheduled.last_is_pending = (
                request.num_computed_tokens - num_drafts > request.num_tokens
            )
            request.num_pending_tokens += scheduled.samples

    # ---------------------------------------------------------------- after the step

    def update_from_output(
        self, plan: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[EngineOutput]:
        """Append the tokens that the step sampled, and end finished requests. Results arrive in the
        order of the steps.

        Remove the plan from `steps_in_flight`, by identity: another plan may be equal to it. Pass
        `result.connector_output`, unless it is None, to `connector.update_connector_output`. For
        each share of the plan whose request has not ended, subtract `scheduled.samples` from
        `request.num_pending_tokens`, then call `_update`.

        Returns:
            What the calls of `_update` returned, without None.
        """
        self.steps_in_flight = tuple(step for step in self.steps_in_flight if step is not plan)
        if result.connector_output is not None:
            self.connector.update_connector_output(result.connector_output)
        outputs = []
        for scheduled in plan.requests:
            request = self.requests.get(scheduled.request_id)
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
        if sampled is not None and sampled.error:
            self.finish(request, "error")
            output.finish_reason = "error"
            output.grammar_error = sampled.error
        elif sampled is not None:
            tokens = [sampled, *result.sampled_after.get(scheduled.request_id, ())]
            if scheduled.draft_token_ids:  # later tokens overwrite the KV of rejected drafts
                known = request.num_tokens + len(tokens) - 1
                request.num_computed_tokens = min(request.num_computed_tokens, known)
            for token in tokens:
                self._append_token(request, token.token_id)
                output.new_token_ids.append(token.token_id)
                if token.logprobs is not None:
                    output.logprobs = [*(output.logprobs or ()), token.logprobs]
                if request.finish_reason is not None:
                    break
            if self.speculation is not None:
                self.speculation.end_step(
                    request, scheduled, result, len(output.new_token_ids), len(self.running)
                )
            if request.finish_reason is not None:
                output.finish_reason = request.finish_reason
                output.stop_reason = request.stop_reason
                output.kv_transfer_params = request.remote_kv
        return output

    def _append_token(self, request: Request, token_id: int) -> None:
        """Append a sampled token, and end the request if this is its last token."""
        request.token_ids.append(token_id)
        num_tokens = len(request.token_ids)
        params = request.sampling_params
        is_computed = (
            request.num_computed_tokens >= num_tokens and request.status is RequestStatus.RUNNING
        )
        if is_computed and num_tokens % self.manager.block_size == 0:
            self.manager.cache_blocks(request, num_tokens - 1)  # this token completes a block
        # When the output is complete, a grammar allows only tokens that end the request.
        if token_id in request.stop_reasons and (
            request.num_output_tokens >= params.min_tokens or params.structured_outputs is not None
        ):
            self.finish(request, "stop", request.stop_reasons[token_id])
        elif num_tokens >= request.max_num_tokens:
            self.finish(request, "length")

    # ---------------------------------------------------------------- when blocks run out

    def _preempt(self, victim: Request, plan: SchedulerOutput) -> None:
        """Take all blocks from a running request; it keeps the tokens that it has sampled.

        With `config.preemption_mode` "swap", `manager.swap_out` returns a list of block copies to
        host memory, or None if host memory is full. With any other mode there are no copies.

            copies    plan.swap_out         num_computed_tokens  move to  plan.preempted[request_id]
            a list    extended by copies    unchanged            SWAPPED  "swap"
            none      unchanged             0 (`manager.free`)   WAITING  "recompute"

        Increment `num_preemptions` of the request and of the scheduler."""
        copies = self.manager.swap_out(victim) if self.config.preemption_mode == "swap" else None
        if copies is not None:
            plan.swap_out += copies
            plan.preempted[victim.request_id] = "swap"
            self.move(victim, RequestStatus.SWAPPED)
        else:
            self.manager.free(victim)
            victim.num_computed_tokens = 0
            plan.preempted[victim.request_id] = "recompute"
            self.move(victim, RequestStatus.WAITING)
        victim.num_preemptions += 1
        self.num_preemptions += 1

    # ---------------------------------------------------------------- is everything in order?

    def check_invariants(self) -> None:
        """Check queues, requests and block tables against each other; see
        `KVCacheManager.check_invariants`."""
        queued = [request for queue in self.queues.values() for request in queue]
        assert len(queued) == len(self.requests), "a request is in no queue, or in two"
        for request in queued:
            status = request.status
            request_id = request.request_id
            assert self.requests[request_id] is request and request in self.queues[status]
            assert request.num_missing_tokens >= 0, f"computed the unknown: {request}"
            holds_blocks = status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)
            assert holds_blocks == (request_id in self.manager.tables), (
                f"{request_id} is {status.value}: has it blocks?"
            )
            assert (status is RequestStatus.SWAPPED) == (request_id in self.manager.host_tables), (
                "host tables"
            )
            assert status is not RequestStatus.WAITING or request.num_computed_tokens == 0, (
                "waits, but computed"
            )
        for queue in self.queues.values():
            assert queue == sorted(queue, key=lambda r: r.order), "a queue is out of order"
        assert len(self.running) + len(self.receiving) <= self.config.max_num_seqs
        self.manager.check_invariants(queued)
