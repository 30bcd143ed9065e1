"""Fills a plan in less time, with the same result: requests that miss a single token come first.

Built by notebooks/43_async_scheduling.ipynb: edit it there.
"""

from __future__ import annotations

from nanovllm.core.request import Request
from nanovllm.core.schedule import ScheduledRequest, SchedulerOutput
from nanovllm.core.scheduler import Scheduler


def decodes_first(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """Do what `continue_then_admit` does, if no feature has a say about decodes
    (`SchedulerHooks.concerns_decodes`)."""
    scheduler.continue_running(plan, continue_decoding(scheduler, plan))
    scheduler.admit(plan)


def continue_decoding(scheduler: Scheduler, plan: SchedulerOutput) -> list[Request]:
    """Fast path of `Scheduler.continue_running` for the leading requests that each need exactly one
    token. For these, write what `Scheduler.continue_running` would:

        plan.requests                      a `ScheduledRequest` each: one token, `samples=1`, the
                                           known tokens after the first `num_sent_tokens`, new
                                           blocks, `last_is_pending` if a token is pending
        plan.num_tokens, .num_samples      the number of these requests
        request.num_computed_tokens        1 more
        request.num_pending_tokens         1 more
        request.num_sent_tokens            the number of known tokens

    A block that becomes full is cached (`cache_blocks`). A request whose pending token is the last
    one that it may have gets no share.

    Returns:
        The remaining running requests, for `continue_running`. The first of them needs more tokens,
        or the runner has no state for it, or no block is free for it.
    """
    manager = scheduler.manager
    running = scheduler.queues.running
    block_size = manager.block_size
    schedule = plan.requests.append
    count = rest = min(len(running), scheduler.settings.token_budget)
    for i in range(count):
        request = running[i]
        start = request.num_computed_tokens
        pending = request.num_pending_tokens
        num_sent = request.num_sent_tokens
        num_tokens = len(request.token_ids)
        end = start + 1
        if end != num_tokens + pending or start < request.num_prompt_tokens or num_sent == 0:
            rest = i
            break
        if pending and end >= request.max_num_tokens:
            continue  # the pending token is the last one
        blocks = () if start % block_size else manager.allocate_slots(request, end)
        if blocks is None:
            rest = i
            break
        new = request.token_ids[num_sent:]
        share = ScheduledRequest(
            request.request_id, start, 1, new, blocks, samples=1, last_is_pending=pending > 0
        )
        schedule(share)
        request.num_computed_tokens = end
        request.num_sent_tokens = num_tokens
        request.num_pending_tokens = pending + 1
        if end % block_size == 0:
            manager.cache_blocks(request, start)
    plan.num_tokens = plan.num_samples = len(plan.requests)
    return running[rest:]
