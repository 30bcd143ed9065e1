"""Data-parallel engines that share experts: they run their steps together."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.requests import SimulatedRequest


class LockStepEngine(SimulatedEngine):
    """An engine whose steps end when the slowest engine of its group has computed.

    To its caller, a group is like one engine: the step that the first of them begins is the step of
    all, and so are its last moment and its results.

    Attributes:
        group_in_step: the engines that run their steps with this one.
    """

    group_in_step: LockStepGroup

    def begin(self, now: int) -> bool:
        """Plan and launch a step of the whole group. Returns whether a result is to come."""
        return self.group_in_step.begin(now)

    def finish(self) -> list[SimulatedRequest]:
        """Take the results of the whole group. Returns the requests that have ended."""
        return self.group_in_step.finish()

    def hold_until(self, end: int | None) -> None:
        """Let the step in flight, or the time without one, end then. None: the group is idle."""
        self.end = end
        if end is not None:
            self._stage_ends[0] = end
            for step in self._in_flight:
                self._totals.busy += end - step.end
                step.end = end


class LockStepGroup:
    """Engines in lock-step.

    A step takes as long as the slowest of its group. A request that arrives during a step waits for
    the next one, even if its own engine computes nothing.

    Args:
        engines: without steps ahead, and made with `fast=False`.
    """

    def __init__(self, engines: Sequence[LockStepEngine]) -> None:
        self.engines = engines
        for engine in engines:
            assert engine.group is None, "each step of one engine is a step of all"
            engine.group_in_step = self

    def begin(self, now: int) -> bool:
        """Let each engine plan its own step, and all of these end together."""
        end = self.engines[0].end
        if end is not None and end > now:
            return True
        computing = [engine for engine in self.engines if SimulatedEngine.begin(engine, now)]
        end = max((engine.end for engine in computing if engine.end is not None), default=None)
        for engine in self.engines:
            engine.hold_until(end)
        return bool(computing)

    def finish(self) -> list[SimulatedRequest]:
        """Take the results of all engines."""
        return [request for engine in self.engines for request in SimulatedEngine.finish(engine)]


def put_in_lock_step(engines: Sequence[LockStepEngine], group_size: int) -> None:
    """Form groups of engines after one another."""
    for first in range(0, len(engines), group_size):
        LockStepGroup(engines[first : first + group_size])
