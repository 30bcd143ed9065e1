"""Engines that fail, and engines that start late."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from nanovllm.data.errors import UsageError
from nanovllm.simulate.engine import SimulatedEngine
from nanovllm.simulate.fleet import Fleet, ReplicaRouter
from nanovllm.simulate.requests import SimulatedRequest
from nanovllm.simulate.results import FleetResult
from nanovllm.simulate.workload import SECOND, Workload, WorkloadRequest

# What is appended to the id of a request each time that it is sent again.
_AGAIN = ", again"


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

    def __str__(self) -> str:
        return f"{self.replica}@{self.begin / SECOND:.12g}"


def client_id(request_id: str) -> str:
    """Return the id that the client of a request knows, also if it was sent again."""
    return request_id.partition(_AGAIN)[0]


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


def idle_outages(outages: Sequence[Outage], groups: Sequence[range], duration: int) -> list[str]:
    """Describe the failures without effect: after the end of the run, or of an engine that serves
    nothing then.

    Args:
        groups: for each engine, those that fail with it.
        duration: of the run, in picoseconds.
    """
    notes = []
    late = [str(each) for each in outages if each.begin > duration]
    if late:
        verb = "has" if len(late) == 1 else "have"
        notes.append(
            f"--failures {' '.join(late)} {verb} no effect: the run ends after "
            f"{duration / SECOND:.4g} s"
        )
    for number, each in enumerate(outages):
        for other_number, other in enumerate(outages):
            is_earlier = (other.begin, other_number) < (each.begin, number)
            lasts = other.end is None or other.end > each.begin
            is_same = groups[other.replica] == groups[each.replica]
            if is_earlier and lasts and is_same and each.begin <= duration:
                notes.append(f"--failures {each}: the engine is not ready then, because of {other}")
                break
    return notes


class UnreliableFleet(Fleet):
    """A fleet with outages.

    The router sends nothing to an engine that has failed, and notices what it has lost when the
    step in flight should have ended; the results of that step still count. Steps that were planned
    to follow it are dropped then. As with `nanovllm router`, requests of which the client has no
    token yet are sent to another engine; those with tokens fail. Requests that arrive while no
    engine is ready fail, too.

    Args:
        engines, router, groups: see `Fleet`. A group fails as a whole.
        outages: an engine is ready when none of its outages lasts.
        retries: send lost requests to another engine.

    Attributes:
        stopped: called with the number of an engine that has failed, or has not started yet.
        restarted: called with the number of an engine that is ready again.
    """

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        router: ReplicaRouter | None = None,
        outages: Sequence[Outage] = (),
        *,
        retries: bool = True,
        groups: Sequence[range] = (),
    ) -> None:
        super().__init__(engines, router, groups)
        self.outages = outages
        self.retries = retries
        self.stopped: list[Callable[[int], None]] = []
        self.restarted: list[Callable[[int], None]] = []
        self._num_outages: Counter[int] = Counter()  # that last, by engine
        self._sources: dict[str, WorkloadRequest] = {}
        # Requests of a failed engine, until its step in flight should have ended.
        self._lost: set[str] = set()

    def run(self, workload: Workload) -> FleetResult:
        """Serve all requests of a workload. A fleet runs once."""
        for outage in self.outages:
            if outage.begin > 0:
                self.at(outage.begin, functools.partial(self._stop, outage))
            else:
                self._stop(outage)  # before the first request arrives
        return super().run(workload)

    def _stop(self, outage: Outage) -> None:
        """A group fails."""
        group = self.groups[outage.replica]
        self._num_outages.update(group)
        for replica in group:
            for stopped in self.stopped:
                stopped(replica)
            self.router.set_available(replica, False)
            engine = self.engines[replica]
            for request_id in list(engine.scheduler.queues.requests):
                self._lost.add(request_id)
                if engine.abort(request_id, self.now):
                    self._await(replica)
        for replica in group:
            if self.engines[replica].end is None:
                self._advance(replica)
        if outage.end is not None:
            self.at(outage.end, functools.partial(self._start, group))

    def _start(self, group: range) -> None:
        """A group is ready, with empty caches, but not before its last steps have ended."""
        ends = [end for replica in group if (end := self.engines[replica].end) is not None]
        if ends:
            self.at(max(ends) + 1, functools.partial(self._start, group))
            return
        self._num_outages.subtract(group)
        for replica in group:
            if not self._num_outages[replica]:
                self.engines[replica].scheduler.manager.pool.reset_prefix_cache()
                self.router.set_available(replica, True)
                for restarted in self.restarted:
                    restarted(replica)

    def _advance(self, replica: int) -> None:
        super()._advance(replica)
        engine = self.engines[replica]
        if self._num_outages[replica] and not engine.scheduler.queues.requests:
            engine.drop_steps(self.now)
            self._versions[replica] += 1  # no result is to come

    def _arrive(self, source: WorkloadRequest) -> None:
        if self.router.available:
            self._sources[source.request_id] = source
            super()._arrive(source)
            return
        request = self._make(source)
        request.replica = -1
        request.finish_reason = "failed"
        self._tell(request)

    def _end(self, request: SimulatedRequest) -> None:
        name = request.request_id
        source = self._sources.pop(name)
        is_lost = name in self._lost and request.finish_reason == "abort"
        self._lost.discard(name)
        if is_lost and (source.abort is None or source.abort > self.now):
            if self.retries and request.first_token is None and self.router.available:
                self._arrive(msgspec.structs.replace(source, request_id=name + _AGAIN))
                return
            request.finish_reason = "failed"
        self._tell(request)

    def _tell(self, request: SimulatedRequest) -> None:
        """Tell the client what has become of its request."""
        request.request_id = client_id(request.request_id)
        super()._end(request)
