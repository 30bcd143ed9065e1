"""Replicas that fail, and replicas that start late."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nanovllm.data.errors import UsageError
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.requests import RequestMaker, SimulatedRequest
from nanovllm.simulate.results import FleetResult
from nanovllm.simulate.routers import PolicyRouter
from nanovllm.simulate.workload import SECOND, Workload, WorkloadRequest


class Outage(NamedTuple):
    """A time in which a replica serves nothing: it has failed, or has not started yet.

    Attributes:
        replica: its number.
        begin: when it fails, in picoseconds; 0: it starts late.
        end: when it, or its replacement, is ready: after the cold start. None: never.
    """

    replica: int
    begin: int
    end: int | None


def parse_outages(
    words: str | Sequence[str] | None, cold_start: float | None, num_replicas: int
) -> list[Outage]:
    """Read failures such as "0@60": replica 0 fails after 60 seconds.

    Args:
        cold_start: seconds until a replacement is ready; None: there is none.

    Raises:
        UsageError: something else, or a replica that does not exist.
    """
    outages = []
    for word in [words] if isinstance(words, str) else words or []:
        found = re.fullmatch(r"(\d{1,9})@(\d{1,9}(?:\.\d+)?)", word)
        if found is None or int(found[1]) >= num_replicas:
            raise UsageError(
                f"--failures must be an engine from 0 to {num_replicas - 1} and a time in seconds, "
                f"such as 0@60, got {word!r}"
            )
        begin = round(float(found[2]) * SECOND)
        end = None if cold_start is None else begin + round(cold_start * SECOND)
        outages.append(Outage(int(found[1]), begin, end))
    return outages


class UnreliableFleet(Fleet):
    """A fleet with outages, which the router notices when the step in flight should have ended.

    As with `nanovllm router`, requests of which the client has no token yet are sent to another
    replica; those with tokens fail. Requests that arrive while no replica is ready fail, too.

    Args:
        engines, router, by_priority: see `Fleet`.
        outages: those of one replica do not overlap.
        retries: send lost requests to another replica.

    Attributes:
        restarted: called with the number of a replica that is ready again.
    """

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        router: PolicyRouter,
        outages: Sequence[Outage],
        *,
        retries: bool = True,
        by_priority: bool = False,
    ) -> None:
        super().__init__(engines, router, by_priority)
        self.policy_router = router
        self.retries = retries
        self.restarted: Callable[[int], None] = lambda replica: None
        self._make: RequestMaker
        self._sources: dict[str, WorkloadRequest] = {}
        # Requests of a failed replica, until its step in flight should have ended.
        self._lost: set[str] = set()
        for outage in outages:
            self.at(outage.begin, functools.partial(self._stop, outage))

    def run(self, workload: Workload) -> FleetResult:
        """Serve all requests of a workload. A fleet runs once."""
        result = super().run(workload)
        # An outage may be over long after the last request.
        ends = [request.last_token or request.arrival for request in result.requests]
        return dataclasses.replace(result, duration=max(ends, default=0))

    def _stop(self, outage: Outage) -> None:
        replica = outage.replica
        self.policy_router.available &= ~(1 << replica)
        engine = self.engines[replica]
        for request_id in list(engine.scheduler.queues.requests):
            self._lost.add(request_id)
            if engine.abort(request_id, self.now):
                self._await(replica)
        if outage.end is not None:
            self.at(outage.end, functools.partial(self._start, replica))

    def _start(self, replica: int) -> None:
        """A replica is ready; its cache is empty."""
        self.engines[replica].scheduler.manager.pool.reset_prefix_cache()
        self.policy_router.router.state.sent.forget(replica)
        self.policy_router.available |= 1 << replica
        self.restarted(replica)

    def _arrive(self, source: WorkloadRequest, make: RequestMaker) -> None:
        self._make = make
        if self.policy_router.available:
            self._sources[source.request_id] = source
            super()._arrive(source, make)
            return
        request = make(source)
        request.replica = -1
        request.finish_reason = "failed"
        super()._end(request)

    def _end(self, request: SimulatedRequest) -> None:
        name = request.request_id
        source = self._sources.pop(name)
        is_lost = name in self._lost and request.finish_reason == "abort"
        self._lost.discard(name)
        if is_lost and (source.abort is None or source.abort > self.now):
            if self.retries and request.first_token is None and self.policy_router.available:
                self._arrive(source, self._make)
                return
            request.finish_reason = "failed"
        super()._end(request)
