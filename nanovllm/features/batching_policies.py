"""Other ways to fill a step than the default: policies of older engines, and limits for prompts."""

from __future__ import annotations

from nanovllm.core.hooks import SchedulerHooks
from nanovllm.core.queues import Queues
from nanovllm.core.request import Request
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.core.scheduler import Scheduler


class WholePrompts(SchedulerHooks):
    """Without `enable_chunked_prefill`: a prompt is computed whole in one step, or not yet."""

    concerns_decodes = False

    def limit_share(self, request: Request, share: int, plan: SchedulerOutput) -> int:
        """Give a prompt all that it misses, or nothing."""
        is_part = request.in_prefill and share < request.num_missing_tokens
        return 0 if is_part else share


class LongPrompts(SchedulerHooks):
    """`long_prefill_token_threshold`: no prompt gets more tokens of a step."""

    concerns_decodes = False

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold

    def limit_share(self, request: Request, share: int, plan: SchedulerOutput) -> int:
        """Give a prompt at most the threshold."""
        return min(share, self.threshold) if request.in_prefill else share


class StaticBatch(SchedulerHooks):
    """`batching_policy="static"`: no request joins a batch that has begun to decode."""

    def __init__(self, queues: Queues) -> None:
        self.queues = queues

    def why_not(self, request: Request, plan: SchedulerOutput) -> str:
        """Admit no request once a running one has sampled its second token, or is about to."""
        now = {scheduled.request_id: scheduled.samples for scheduled in plan.requests}
        has_begun = any(
            running.num_output_tokens + running.num_pending_tokens
            > 1 + now.get(running.request_id, 0)
            for running in self.queues.running
        )
        return "static batch" if has_begun else ""


def prefill_first(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """Fill a plan with prompts only or, if there are none, with decodes only."""
    running = scheduler.queues.running
    scheduler.continue_running(plan, [request for request in running if request.in_prefill])
    scheduler.admit(plan)
    if plan.empty:
        scheduler.continue_running(plan, running)
