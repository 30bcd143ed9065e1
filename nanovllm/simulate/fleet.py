"""Several engines and their router, on one virtual clock.

Built by notebooks/51_what_if.ipynb: edit it there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Protocol

from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.requests import RequestMaker, SimulatedRequest
from nanovllm.simulate.results import FleetResult, ServedRequest, TokenGaps
from nanovllm.simulate.workload import Workload, WorkloadRequest

# Events at the same time: arrivals come first, then actions, then results of steps.
_ACTION = 0
RESULT = 1


class ReplicaRouter(Protocol):
    """Chooses the engine for each request."""

    @property
    def available(self) -> int:
        """The set of the engines that may be chosen; engine i is bit i."""

    def choose(self, request: WorkloadRequest, now: int) -> int:
        """Return the number of an engine."""

    def set_load(self, replica: int, engine: SimulatedEngine, now: int) -> None:
        """The load of an engine may have changed."""

    def set_available(self, replica: int, is_available: bool) -> None:
        """An engine has failed, or its replacement is ready."""


class RoundRobin:
    """Sends requests to the engines round robin."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.available = (1 << num_replicas) - 1
        self._next = -1

    def choose(self, request: WorkloadRequest, now: int) -> int:
        """Return the available engine after the last one."""
        self._next = (self._next + 1) % self.num_replicas
        while not self.available >> self._next & 1:
            self._next = (self._next + 1) % self.num_replicas
        return self._next

    def set_load(self, replica: int, engine: SimulatedEngine, now: int) -> None:
        """Do nothing: loads do not matter."""

    def set_available(self, replica: int, is_available: bool) -> None:
        """An engine has failed, or its replacement is ready."""
        self.available = self.available & ~(1 << replica) | is_available << replica


class Fleet:
    """Engines of one block size, and their router.

    Args:
        engines: idle. `run` gives them the same `gaps`.
        router: by default, round robin.
        groups: for each engine, the engines of its group. They fail together. If they share
            experts, they are `LockStepEngine`s. By default, each engine is alone.

    Attributes:
        now: the time of the last event, in picoseconds.
        last_end: when the last step or request has ended, in picoseconds.
    """

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        router: ReplicaRouter | None = None,
        groups: Sequence[range] = (),
    ) -> None:
        self.engines = engines
        self.router = router or RoundRobin(len(engines))
        self.now = 0
        self.last_end = 0
        self.groups = groups or [range(number, number + 1) for number in range(len(engines))]
        self._make: RequestMaker
        self._served: list[ServedRequest] = []
        # (time, kind, number of the action or engine, version of the engine's event)
        self._events: list[tuple[int, int, int, int]] = []
        self._versions = [0] * len(engines)
        self._actions: dict[int, Callable[[], None]] = {}
        self._num_actions = 0

    def run(self, workload: Workload) -> FleetResult:
        """Serve all requests of a workload. A fleet runs once."""
        gaps = TokenGaps()
        for engine in self.engines:
            engine.gaps = gaps
        first = self.engines[0]
        self._make = RequestMaker(
            first.scheduler.manager.block_size,
            workload.prefix_block_size,
            first.by_priority,
            workload.names_outputs,
        )
        with _collecting_less():
            self._run(iter(workload.requests))
        return FleetResult(
            requests=self._served,
            replicas=[engine.counters for engine in self.engines],
            gaps=gaps,
            duration=self.last_end,
        )

    def at(self, time: int, action: Callable[[], None]) -> None:
        """Call `action` when the clock reaches a time."""
        self._num_actions += 1
        self._actions[self._num_actions] = action
        heappush(self._events, (time, _ACTION, self._num_actions, 0))

    def _run(self, arrivals: Iterator[WorkloadRequest]) -> None:
        """Handle arrivals and events in the order of their times, until there are none.

        First set `now` to the time of each. If an arrival and an event have the same time, the
        arrival comes first (`_arrive`). The event of an action ends in a call of the action, which
        is then forgotten. The event of an engine is void if its version is not the engine's in
        `_versions`: it changes nothing, not even `now`. Otherwise, see `_advance`.
        """
        events = self._events
        request = next(arrivals, None)
        while request is not None or events:
            if request is not None and (not events or request.arrival <= events[0][0]):
                self.now = request.arrival
                self._arrive(request)
                request = next(arrivals, None)
                continue
            time, kind, number, version = heappop(events)
            if kind == _ACTION:
                self.now = time
                self._actions.pop(number)()
            elif version == self._versions[number]:
                self.now = time
                self._advance(number)

    def _arrive(self, source: WorkloadRequest) -> None:
        """A client sends a request."""
        self._begin(source)

    def _begin(self, source: WorkloadRequest) -> None:
        """Choose the first engine for a request."""
        self._send(source, self._make(source), self.router.choose(source, self.now))

    def _send(self, source: WorkloadRequest, request: SimulatedRequest, replica: int) -> None:
        """Give a request to an engine."""
        request.replica = replica
        engine = self.engines[replica]
        try:
            has_changed = engine.arrive(request, self.now)
        except ValueError as error:
            request.finish_reason = "rejected"
            request.rejection = str(error)
            request.replica = -1
            self._end(request)
            return
        if has_changed:
            self._await(replica)
        if source.abort is not None:
            self.at(source.abort, lambda: self._abort(request))
        self.router.set_load(replica, engine, self.now)

    def _abort(self, request: SimulatedRequest) -> None:
        replica = request.replica
        engine = self.engines[replica]
        if engine.abort(request.request_id, self.now):
            self._await(replica)
        elif engine.end is None:
            self._advance(replica)

    def _advance(self, replica: int) -> None:
        engine = self.engines[replica]
        if engine.end is not None:
            self.last_end = self.now
        for request in engine.finish():
            self._end(request)
        if engine.begin(self.now):
            self._await(replica)
        for each in self.groups[replica]:
            self.router.set_load(each, self.engines[each], self.now)

    def wake(self, replica: int) -> None:
        """Let an engine plan again, if it is idle: a KV transfer has ended."""
        engine = self.engines[replica]
        if engine.wake(self.now):
            self._await(replica)
        self.router.set_load(replica, engine, self.now)

    def _await(self, replica: int) -> None:
        """Put the engine's next result into the heap; one that is there already is void."""
        version = self._versions[replica] = self._versions[replica] + 1
        end = self.engines[replica].end
        assert end is not None
        heappush(self._events, (end, RESULT, replica, version))

    def _end(self, request: SimulatedRequest) -> None:
        self.last_end = self.now
        self._served.append(request.served())


@contextmanager
def _collecting_less() -> Iterator[None]:
    """Keep Python's garbage collector away from what a simulation has created: it creates no cycles
    that are worth a visit to millions of objects."""
    enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
