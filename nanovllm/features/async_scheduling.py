"""Asynchronous scheduling: a step is planned while the one before it is still computed.

Built by notebooks/43_async_scheduling.ipynb: edit it there.
"""

from __future__ import annotations

from nanovllm.core.hooks import SchedulerHooks
from nanovllm.core.queues import Queues
from nanovllm.core.request import Request
from nanovllm.core.schedule import SchedulerOutput


class OneStepAhead(SchedulerHooks):
    """Decides whether the next step can be planned without the tokens of the step in flight.

    Args:
        needs_tokens: every request needs its newest token, since drafts are made from it.
    """

    def __init__(self, queues: Queues, needs_tokens: bool = False) -> None:
        self.queues = queues
        self.needs_tokens = needs_tokens

    def may_plan(self) -> bool:
        """Plan no step while the newest token of a running request is pending, if its penalty or
        its grammar, or drafts, depend on it."""
        return not any(
            request.num_pending_tokens and (request.looks_back or self.needs_tokens)
            for request in self.queues.running
        )

    def why_not(self, request: Request, plan: SchedulerOutput) -> str:
        """Admit no request that was preempted while a step in flight samples its token."""
        return "pipeline_parallel_size" if request.num_pending_tokens else ""
