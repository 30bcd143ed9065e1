"""Hooks with which a feature takes part in scheduling. See README.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from nanovllm.core.request import Request
from nanovllm.core.schedule import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from nanovllm.data.outputs import EngineStats
from nanovllm.data.request import EngineOutput

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H")


class SchedulerHooks:
    """Base class of a feature's half in the scheduler. Each method does nothing.

    The scheduler asks its features in the order in which it got them. A feature gets the objects
    that it reads (`Queues`, `KVCacheManager`) when it is made. A hook may change only the feature's
    own state, its own fields of a request, and what the hook's description names.

    Attributes:
        concerns_decodes: `limit_share` or `scheduled` of this feature matter for requests that miss
            a single token, too. If they matter for none, the scheduler may use a fast path for
            these requests, which does not call them (`fill`).
    """

    concerns_decodes = True

    # ---------------------------------------------------------------- one step

    def may_plan(self) -> bool:
        """False: plan no step before the next result arrives; a step must be in flight."""
        return True

    def before_step(self, plan: SchedulerOutput) -> None:
        """A step is about to be planned; the plan is empty."""

    def limit_share(self, request: Request, share: int, plan: SchedulerOutput) -> int:
        """Return how many of these `share` tokens the request may compute in this step."""
        return share

    def scheduled(self, request: Request, scheduled: ScheduledRequest) -> None:
        """A request has its share, and blocks for it. The hook may append to `new_block_ids`.

        A feature that needs more blocks for the request takes them now: the next request may get
        the last free ones."""

    def why_not(self, request: Request, plan: SchedulerOutput) -> str:
        """Return why the next request in line cannot be admitted to this step; "" if it can. While
        no request runs, and no step is in flight, one must be admitted."""
        return ""

    def admit(self, request: Request, computed_blocks: Sequence[int]) -> str | None:
        """Admit a waiting request to another queue than `running`, with blocks of its own.

        Args:
            computed_blocks: blocks of the prefix cache, which `request.num_computed_tokens`
                counts; the request's table begins with them.

        Returns:
            "" if the feature has moved the request; the reason if it cannot move it now; None if
            the request is to run.
        """
        return None

    def planned(self, plan: SchedulerOutput) -> None:
        """The plan is complete. The hook may add what the feature's half in the runner needs."""

    # ---------------------------------------------------------------- after the step

    def arrived(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """A step's result has arrived; no request has been updated yet."""

    def sampled(
        self,
        request: Request,
        scheduled: ScheduledRequest,
        result: ModelRunnerOutput,
        output: EngineOutput,
    ) -> None:
        """A request has its new tokens, which are in `output`, and may have ended with them.
        The hook may add to the output."""

    def keeps_blocks(self, request: Request) -> bool:
        """A request ends. True: its blocks are still in use, and are held until
        `KVCacheManager.let_go`."""
        return False

    def took(self, plan: SchedulerOutput, seconds: float) -> None:
        """A step has ended, and has taken so long."""

    def add_stats(self, stats: EngineStats) -> None:
        """Add what the feature counts."""

    def check_invariants(self) -> None:
        """Check the feature's own state."""


def overriding(
    features: Sequence[H], method: Callable[Concatenate[H, P], R]
) -> tuple[Callable[P, R], ...]:
    """Return the features' own versions of a hook. A hook that a feature does not override is never
    called, and costs nothing."""
    name = method.__name__
    return tuple(
        getattr(feature, name) for feature in features if getattr(type(feature), name) is not method
    )


class SchedulerHookCalls:
    """For each of `SchedulerHooks`, the features that have something to say.

    Attributes:
        concerns_decodes: one of the features has a say about requests that miss a single token.
    """

    def __init__(self, features: Sequence[SchedulerHooks]) -> None:
        shares = (SchedulerHooks.limit_share, SchedulerHooks.scheduled)
        self.concerns_decodes = any(
            feature.concerns_decodes
            for feature in features
            if any(overriding([feature], method) for method in shares)
        )
        self.may_plan = overriding(features, SchedulerHooks.may_plan)
        self.before_step = overriding(features, SchedulerHooks.before_step)
        self.limit_share = overriding(features, SchedulerHooks.limit_share)
        self.scheduled = overriding(features, SchedulerHooks.scheduled)
        self.why_not = overriding(features, SchedulerHooks.why_not)
        self.admit = overriding(features, SchedulerHooks.admit)
        self.planned = overriding(features, SchedulerHooks.planned)
        self.arrived = overriding(features, SchedulerHooks.arrived)
        self.sampled = overriding(features, SchedulerHooks.sampled)
        self.keeps_blocks = overriding(features, SchedulerHooks.keeps_blocks)
        self.took = overriding(features, SchedulerHooks.took)
        self.add_stats = overriding(features, SchedulerHooks.add_stats)
        self.check_invariants = overriding(features, SchedulerHooks.check_invariants)
