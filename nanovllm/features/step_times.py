"""Predicts step times from earlier steps, to convert `max_step_ms` into a number of prompt
tokens."""

from collections import deque
from statistics import median

from nanovllm.core.schedule import SchedulerOutput

# A step with a time limit computes a multiple of this many prompt tokens, but at least this many,
# so that every prompt makes progress.
CHUNK = 32


class StepTimes:
    """Predicts step times, in seconds:

        step time = base + per_token · prompt tokens

        base       median time of recent steps without prompt tokens
        per_token  median of (step time - base) / prompt tokens over recent steps with prompt tokens

    A median ignores the few steps that a busy machine has delayed. `per_token` uses only a few
    steps, because the cost of a prompt token grows with its context, and the latest chunks have
    nearly the same context."""

    def __init__(self) -> None:
        # Before the first measurement, a step with a time limit gets one `CHUNK`.
        self.base = 0.0
        self.per_token = float("inf")
        self._decodes: deque[float] = deque(maxlen=31)
        self._per_token: deque[float] = deque(maxlen=5)

    def add(self, plan: SchedulerOutput, seconds: float) -> None:
        """Record a finished step. Skip one with fewer prompt tokens than `CHUNK`, whose time per
        prompt token would not be accurate."""
        if plan.num_prefill_tokens >= CHUNK:
            # At least half of the time: while memory bandwidth limits a step, a few prompt tokens
            # seem to cost nothing, but more of them do cost time.
            self._per_token.append(max(seconds - self.base, seconds / 2) / plan.num_prefill_tokens)
            self.per_token = median(self._per_token)
        elif plan.num_prefill_tokens == 0 and not plan.empty:
            self._decodes.append(seconds)
            self.base = median(self._decodes)

    def prefill_tokens(self, seconds: float) -> int:
        """Return the most prompt tokens for a step of at most `seconds`: a multiple of `CHUNK`, and
        at least one `CHUNK`."""
        return max(1, int((seconds - self.base) / self.per_token / CHUNK)) * CHUNK
