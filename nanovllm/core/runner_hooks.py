"""Hooks with which a feature takes part in running a step. See README.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from nanovllm.core.batch import Batch
from nanovllm.core.hooks import overriding
from nanovllm.core.sampling import SamplingRow
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from nanovllm.core.runner import ModelRunner

# Waits for the result of a step.
Wait = Callable[[], ModelRunnerOutput]


@dataclass
class LaunchedStep:
    """A step whose work has been launched.

    Attributes:
        batch: None for an empty plan, which computes nothing.
        hidden: the hidden states of its tokens, `[num_tokens, hidden_size]`, valid until the next
            step; None for an empty plan, or if another runner continues from here.
    """

    plan: SchedulerOutput
    batch: Batch | None = None
    hidden: Tensor | None = None


class RunnerHooks:
    """Base class of a feature's half in the runner. Each method does nothing.

    The runner asks its features in the order in which it got them.
    """

    # ---------------------------------------------------------------- memory

    def cache_shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        """Return the shapes of the KV caches that the feature adds to the model's. They have the
        same blocks, and are swapped with them: this is why the runner must know them."""
        return []

    def allocated(self, runner: ModelRunner) -> None:
        """The runner has its caches and buffers; no step has run."""

    # ---------------------------------------------------------------- one step

    def before_step(self, plan: SchedulerOutput) -> None:
        """A step begins. Its plan may be empty."""

    def removed(self, request_id: str) -> None:
        """A request has ended or was preempted: its state can be dropped."""

    def rows_ready(self, plan: SchedulerOutput, rows: list[SamplingRow]) -> None:
        """It is known what the step samples, and the model has not run. The hook may replace rows,
        and start work for `logits_ready` that is done while the model runs. The next step gets the
        same row objects, so the hook must not change them."""

    def logits_ready(self, logits: Tensor, rows: Sequence[SamplingRow]) -> dict[str, str]:
        """Change logits, `[num_rows, vocab_size]`, in place, before the sampler sees them.

        Returns:
            By request, why it cannot continue: it ends with this error.
        """
        return {}

    def after_step(self, step: LaunchedStep, wait: Wait) -> Wait:
        """A step was launched.

        Args:
            wait: waits for its result.

        Returns:
            What the engine calls instead of `wait`: it may change the result, or add to it.
        """
        return wait

    # ---------------------------------------------------------------- the end

    def forget_requests(self) -> None:
        """Stop everything that is under way, after a failed step."""

    def close(self) -> None:
        """Free everything."""


class RunnerHookCalls:
    """For each of `RunnerHooks`, the features that have something to say."""

    def __init__(self, features: Sequence[RunnerHooks]) -> None:
        self.cache_shapes = overriding(features, RunnerHooks.cache_shapes)
        self.allocated = overriding(features, RunnerHooks.allocated)
        self.before_step = overriding(features, RunnerHooks.before_step)
        self.removed = overriding(features, RunnerHooks.removed)
        self.rows_ready = overriding(features, RunnerHooks.rows_ready)
        self.logits_ready = overriding(features, RunnerHooks.logits_ready)
        self.after_step = overriding(features, RunnerHooks.after_step)
        self.forget_requests = overriding(features, RunnerHooks.forget_requests)
        self.close = overriding(features, RunnerHooks.close)
