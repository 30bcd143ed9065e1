"""How long a step will take, learned from the steps that ran: it turns `max_step_ms` into a number
of prompt tokens."""

from collections import deque
from statistics import median

from nanovllm.data.schedule import SchedulerOutput

# A limited step computes a multiple of this many prompt tokens, and at least as many: every prompt
# makes progress.
CHUNK = 32


class StepTimes:
    """Predicts that a step takes `base` + `per_token` · its prompt tokens, in seconds.

    `base` is the median time of the latest steps without prompt tokens. `per_token` is the median
    of what the latest steps with prompt tokens took beyond `base`, per prompt token. A median
    ignores the few steps that a busy machine has delayed. Few steps count for `per_token`, because
    a prompt token costs more the more context it attends to: the previous chunk's context is nearly
    the same."""

    def __init__(self) -> None:
        # until the first measurements, a limited step gets one `CHUNK`
        self.base = 0.0
        self.per_token = float("inf")
        self._decodes: deque[float] = deque(maxlen=31)
        self._per_token: deque[float] = deque(maxlen=5)

    def add(self, plan: SchedulerOutput, seconds: float) -> None:
        """Learn from a step that ran. A step with fewer prompt tokens than `CHUNK` says too little
        about them."""
        if plan.num_prefill_tokens >= CHUNK:
            # At least half of the time: as long as a step is limited by memory bandwidth, a few
            # prompt tokens seem to cost nothing, and that is not true of more of them.
            self._per_token.append(max(seconds - self.base, seconds / 2) / plan.num_prefill_tokens)
            self.per_token = median(self._per_token)
        elif plan.num_prefill_tokens == 0 and not plan.empty:
            self._decodes.append(seconds)
            self.base = median(self._decodes)

    def prefill_tokens(self, seconds: float) -> int:
        """The most prompt tokens with which a step should take at most `seconds`, in whole
        `CHUNK`s; at least one."""
        return max(1, int((seconds - self.base) / self.per_token / CHUNK)) * CHUNK
