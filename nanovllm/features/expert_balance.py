"""Moves experts between ranks while the engine runs.

Built by notebooks/25_data_parallel.ipynb: edit it there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.core.runner_hooks import LaunchedStep, RunnerHooks, Wait

if TYPE_CHECKING:
    from nanovllm.distributed.load_balancer import LoadBalancer


class ExpertBalance(RunnerHooks):
    """Moves experts between ranks, by their load (lecture 24)."""

    def __init__(self, balancer: LoadBalancer) -> None:
        self.balancer = balancer

    def after_step(self, step: LaunchedStep, wait: Wait) -> Wait:
        """Count the step, and move experts if it is time."""
        self.balancer.after_step(was_dummy=step.plan.empty)
        return wait
