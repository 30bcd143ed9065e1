"""Engines that share the experts of a model run their steps together.

Built by notebooks/25_data_parallel.ipynb: edit it there.
"""

from __future__ import annotations

from collections import deque

from nanovllm.core.hooks import SchedulerHooks
from nanovllm.core.peers import Peers
from nanovllm.core.queues import Queues
from nanovllm.data.outputs import EngineStats
from nanovllm.data.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.features.data_parallel import Waves


class LockStep(SchedulerHooks, Peers):
    """Runs a step whenever any of the engines has a request, for the collectives of all.

    Attributes:
        waves: decides when this engine computes.
    """

    in_lock_step = True

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        self.waves = Waves()
        self._launched: deque[int] = deque()  # the waves of the steps in flight

    def has_work(self, has_unfinished: bool) -> bool:
        """Whether a wave runs."""
        return self.waves.running

    def launching(self, plan: SchedulerOutput) -> None:
        """Tell the other engines whether this one has requests."""
        plan.unfinished = bool(self.queues.requests)
        self._launched.append(self.waves.ended)

    def arrived(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """End the step's wave if no engine had a request."""
        wave = self._launched.popleft()
        if not result.anyone_unfinished:
            self.waves.end(wave)

    def forget_requests(self) -> None:
        """Forget the steps in flight."""
        self._launched.clear()

    def add_stats(self, stats: EngineStats) -> None:
        """Add the number of waves that have ended."""
        stats.num_waves = self.waves.ended
