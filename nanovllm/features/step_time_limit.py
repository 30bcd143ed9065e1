"""`max_step_ms`: while requests decode, steps have few prompt tokens, so that they are short."""

from __future__ import annotations

from nanovllm.core.hooks import SchedulerHooks
from nanovllm.core.queues import Queues
from nanovllm.core.request import Request
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.features.step_times import StepTimes


class StepTimeLimit(SchedulerHooks):
    """Limits the prompt tokens of a step, so that requests that decode do not wait longer.

    Args:
        max_step_ms: the limit of a step, in milliseconds.
        cuts_prompts: a prompt may be computed in parts. Otherwise one that is computed at all is
            computed whole.

    Attributes:
        step_times: predicts how long a step will take, from the times of earlier ones.
    """

    concerns_decodes = False

    def __init__(self, queues: Queues, max_step_ms: float, cuts_prompts: bool) -> None:
        self.queues = queues
        self.max_step_ms = max_step_ms
        self.cuts_prompts = cuts_prompts
        self.step_times = StepTimes()
        self._max_prefill_tokens = 0  # of the step that is being planned

    def before_step(self, plan: SchedulerOutput) -> None:
        """Convert milliseconds into prompt tokens, if some request decodes."""
        self._max_prefill_tokens = plan.token_budget
        if not all(request.in_prefill for request in self.queues.running):
            self._max_prefill_tokens = self.step_times.prefill_tokens(self.max_step_ms / 1000)

    def limit_share(self, request: Request, share: int, plan: SchedulerOutput) -> int:
        """Give a prompt what is left of the step's prompt tokens."""
        if not request.in_prefill or not self.cuts_prompts:
            return share
        return min(share, self._max_prefill_tokens - plan.num_prefill_tokens)

    def why_not(self, request: Request, plan: SchedulerOutput) -> str:
        """Admit no prompt once the step's prompt tokens are used up."""
        is_used_up = plan.num_prefill_tokens >= self._max_prefill_tokens
        return "max_step_ms" if request.in_prefill and is_used_up else ""

    def planned(self, plan: SchedulerOutput) -> None:
        """Say in the plan the most tokens that the step could have computed."""
        unused = self._max_prefill_tokens - plan.num_prefill_tokens
        plan.token_budget = min(plan.token_budget, plan.num_tokens + unused)

    def took(self, plan: SchedulerOutput, seconds: float) -> None:
        """Learn what a prompt token costs."""
        self.step_times.add(plan, seconds)
