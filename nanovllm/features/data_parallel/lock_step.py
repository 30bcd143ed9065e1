"""Engines that share the experts of a model run their steps together: the scheduler's half, and the
runner's.

Built by notebooks/25_data_parallel.ipynb: edit it there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.core.batch import Batch
from nanovllm.core.device_copies import start_fetch, upload
from nanovllm.core.hooks import SchedulerHooks
from nanovllm.core.peers import Peers
from nanovllm.core.queues import Queues
from nanovllm.core.runner_hooks import LaunchedStep, RunnerHooks, Wait
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.outputs import EngineStats
from nanovllm.distributed.groups import get_dp_group
from nanovllm.features.data_parallel.waves import Waves

if TYPE_CHECKING:
    from nanovllm.core.runner import ModelRunner

# The name under which the two halves tell each other whether an engine has requests.
LOCK_STEP = "lock_step"


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
        """Return whether a wave runs."""
        return self.waves.running

    def launching(self, plan: SchedulerOutput) -> None:
        """Tell the other engines whether this one has requests."""
        plan.extras[LOCK_STEP] = bool(self.queues.requests)
        self._launched.append(self.waves.ended)

    def arrived(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """End the step's wave if no engine had a request."""
        wave = self._launched.popleft()
        if not result.extras[LOCK_STEP]:
            self.waves.end(wave)

    def forget_requests(self) -> None:
        """Forget the steps in flight."""
        self._launched.clear()

    def add_stats(self, stats: EngineStats) -> None:
        """Add the number of waves that have ended."""
        stats.num_waves = self.waves.ended


class LockStepRunner(RunnerHooks):
    """Takes part in the other engines' collectives, also in a step that computes nothing here."""

    runner: ModelRunner

    def allocated(self, runner: ModelRunner) -> None:
        """Use this runner, which owns this object: a cycle would keep its GPU's memory until
        Python's garbage collection."""
        self.runner = weakref.proxy(runner)

    def after_step(self, step: LaunchedStep, wait: Wait) -> Wait:
        """Run a padding token if there is nothing else, and find out whether any engine has
        unfinished requests."""
        if step.plan.empty:
            self.runner.forward(self._padding())
        if not self.runner.forward.samples:
            return wait
        anyone = any_unfinished(bool(step.plan.extras[LOCK_STEP]), self.runner.device)

        def wait_for_all() -> ModelRunnerOutput:
            result = wait()
            result.extras[LOCK_STEP] = anyone()
            return result

        return wait_for_all

    def _padding(self) -> Batch:
        """Return a batch of no request, and one token of padding."""
        buffers = self.runner.buffers
        buffers.wait()
        buffers.pad(0, 1)
        inputs = buffers.inputs(1, 1, 1, 1, upload=True)
        last_rows, due_rows = buffers.upload_picks(0, 0)
        nothing = np.zeros(0, dtype=np.int64)
        return Batch(
            rows=nothing,
            num_scheduled=nothing,
            due_ids=[],
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            metadata=inputs.metadata,
            last_rows=last_rows,
            due_rows=due_rows,
        )


def any_unfinished(unfinished: bool, device: torch.device) -> Callable[[], bool]:
    """Find out whether any engine in lock-step has unfinished requests. All engines get the same
    answer for the same step.

    In a group of one, the answer is `unfinished`, without any collective. Otherwise, without
    waiting: upload `[unfinished]` as float32 (`upload`), all-reduce it, and start to fetch the sum
    (`start_fetch`, whose result waits and returns `[[sum]]`). The answer is whether the sum is
    above 0.

    Args:
        unfinished: this engine has unfinished requests.

    Returns:
        A function that waits for the answer.
    """
    group = get_dp_group()
    if group.world_size == 1:
        return lambda: unfinished
    arrive = start_fetch(group.all_reduce(upload([unfinished], torch.float32, device)))
    return lambda: arrive() != [[0.0]]
