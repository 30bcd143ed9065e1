"""Data-parallel engines that share experts: they run their steps together."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush

from nanovllm.router.policies import random_bits
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import RESULT, Fleet, ReplicaRouter


class LockStepEngine(SimulatedEngine):
    """An engine whose steps end when the slowest engine of its group has computed."""

    @property
    def is_computing(self) -> bool:
        """A step is in flight; otherwise the engine only takes part in those of others."""
        return bool(self._in_flight)

    def hold_until(self, end: int) -> None:
        """Let the step in flight, or the time without one, end then."""
        self.end = self._stage_ends[0] = end
        if self._in_flight:
            self._in_flight[0].end = end


class LockStepFleet(Fleet):
    """Groups of engines in lock-step.

    A step takes as long as the slowest of its group. Its experts are unevenly loaded: they take up
    to `imbalance` longer than evenly loaded ones, a share that is uniformly distributed. A request
    that arrives during a step waits for the next one, even if its own engine computes nothing.

    Args:
        engines: without steps ahead; `group_size` after one another form a group.
        router: see `Fleet`.
        imbalance: the largest share by which a step is longer.
        seed: of these shares.
    """

    def __init__(
        self,
        engines: Sequence[LockStepEngine],
        router: ReplicaRouter | None,
        group_size: int,
        *,
        imbalance: float = 0.0,
        seed: int = 0,
        by_priority: bool = False,
    ) -> None:
        super().__init__(engines, router, by_priority)
        self.group_size = group_size
        self.imbalance = imbalance
        self.seed = seed
        self._members = engines
        self._num_draws = 0

    def _advance(self, replica: int) -> None:
        group = range(replica, replica + self.group_size)
        for engine in self._members[replica : group.stop]:
            if engine.is_computing:
                for request in engine.finish():
                    self._end(request)
            engine.end = None
        # All of them begin: each plans its own step.
        if any([engine.begin(self.now) for engine in self._members[replica : group.stop]]):
            self._await(replica)
        for each in group:
            self.router.set_load(each, self.engines[each], self.now)

    def _await(self, replica: int) -> None:
        """Let the steps that have just begun in a group end together."""
        first = replica - replica % self.group_size
        group = self._members[first : first + self.group_size]
        end = max(self._end_of(engine) for engine in group if engine.is_computing)
        for engine in group:
            engine.hold_until(end)
        self._versions[first] += 1
        heappush(self._events, (end, RESULT, first, self._versions[first]))

    def _end_of(self, engine: SimulatedEngine) -> int:
        assert engine.end is not None
        self._num_draws += 1
        share = self.imbalance * random_bits(self.seed, self._num_draws) / 2**64
        return engine.end + round((engine.end - self.now) * share)
