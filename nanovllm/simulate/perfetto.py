"""A simulated fleet as Chrome trace events, which ui.perfetto.dev opens: steps and requests, KV on
links, and failures."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.disk import writing
from nanovllm.data.request import EngineOutput
from nanovllm.simulate.disaggregated import DisaggregatedFleet
from nanovllm.simulate.fleet import Fleet
from nanovllm.simulate.links import Links, Transfer
from nanovllm.simulate.outages import UnreliableFleet, client_id
from nanovllm.simulate.report import MILLISECOND
from nanovllm.simulate.workload import SECOND
from nanovllm.trace.perfetto import Event, span_event, trace_events
from nanovllm.trace.record import StepRecord
from nanovllm.trace.recorder import StepRecorder
from nanovllm.trace.trace import Trace

# Where KV comes from that is no other engine's, by the name of its link.
SOURCES = {"host link": "host memory", "store": "store"}


class Downtime(msgspec.Struct):
    """A time in which an engine serves nothing, in picoseconds.

    Attributes:
        failures: when it failed, first and while its replacement started; 0: it starts late.
        ready: when it serves requests again; None: never.
    """

    failures: list[int]
    ready: int | None = None

    @property
    def label(self) -> str:
        """Its name in a timeline."""
        if self.ready is None:
            return "failed"
        return "failed, replacement starting" if self.failures[0] else "starting"


class FleetStepRecorder(StepRecorder):
    """Records the steps of a simulated engine. A request that ends between two steps is recorded
    immediately: the next step may come much later, or never."""

    def __init__(self, trace: Trace, fleet: Fleet, replica: int) -> None:
        super().__init__(trace, fleet.engines[replica].scheduler)
        self._fleet = fleet

    def ended(self, request_id: str, reason: str) -> None:
        """See `Recorder.ended`."""
        super().ended(request_id, reason)
        record = self.begin(SchedulerOutput(), -1, self._fleet.now / SECOND)
        self.finish(record, 0.0, ModelRunnerOutput(), [])

    def finish(
        self,
        record: StepRecord | None,
        duration: float,
        result: ModelRunnerOutput,
        outputs: Iterable[EngineOutput],
    ) -> None:
        """See `StepRecorder.finish`. A step without a duration was dropped: it computed nothing."""
        if record is not None and record.requests and not duration:
            record.requests, record.running, record.waiting = [], [], []
            record.preempted = {}
            record.num_free_blocks = self.scheduler.manager.pool.num_free
        super().finish(record, duration, result, outputs)


class FleetRecorder:
    """Records in memory what happens in a fleet.

    Args:
        fleet: has not run yet, and makes its steps one by one.
        links: over which its KV is sent, by the names that `summarize` knows.
    """

    def __init__(self, fleet: Fleet, links: Mapping[str, Links]) -> None:
        self._fleet = fleet
        self._traces = [Trace() for _ in fleet.engines]
        # By engine: what it has received, with the name of where it comes from.
        self._received: list[list[tuple[str, Transfer]]] = [[] for _ in fleet.engines]
        self._downtimes: list[list[Downtime]] = [[] for _ in fleet.engines]
        for replica, engine in enumerate(fleet.engines):
            engine.recorder = FleetStepRecorder(self._traces[replica], fleet, replica)
        for name, each in links.items():
            each.watch = functools.partial(self._receive, name)
        if isinstance(fleet, UnreliableFleet):
            fleet.stopped.append(self._stop)
            fleet.restarted.append(self._restart)

    def _receive(self, link: str, sent: Transfer) -> None:
        source = SOURCES.get(link, f"engine {sent.source}")
        self._received[sent.target].append((source, sent))

    def _stop(self, replica: int) -> None:
        downtimes = self._downtimes[replica]
        if not downtimes or downtimes[-1].ready is not None:
            downtimes.append(Downtime([]))
        downtimes[-1].failures.append(self._fleet.now)

    def _restart(self, replica: int) -> None:
        self._downtimes[replica][-1].ready = self._fleet.now

    def write(self, path: Path, duration: int) -> None:
        """Write everything to a file, each engine as a process.

        Args:
            duration: of the simulation, in picoseconds. A later downtime is not shown.
        """
        encode = msgspec.json.encode
        arrows = arrows_of(self._traces, [[kv for _, kv in each] for each in self._received])
        with writing(path), open(path, "wb") as file:
            separator = b'{"traceEvents": [\n'
            for replica in range(len(self._traces)):
                for event in self._events(replica, arrows[replica], duration):
                    file.write(separator + encode({"pid": replica + 1, **event}))
                    separator = b",\n"
            file.write(b"\n]}\n")

    def _events(
        self, replica: int, arrows: Mapping[tuple[int, str], Event], duration: int
    ) -> Iterator[Event]:
        yield {"ph": "M", "name": "process_name", "args": {"name": self._name_of(replica)}}
        lanes = Lanes()
        for downtime in self._downtimes[replica]:
            begin = downtime.failures[0]
            end = min(duration, duration if downtime.ready is None else downtime.ready)
            details: dict[str, object] = {
                "failures_s": [time / SECOND for time in downtime.failures],
                "ready_s": None if downtime.ready is None else downtime.ready / SECOND,
            }
            if begin < end:
                yield lanes.span("failures", downtime.label, begin, end, details)
        received = self._received[replica]
        for number in sorted(range(len(received)), key=lambda number: received[number][1].begin):
            source, sent = received[number]
            details = {
                "from": source,
                "to": f"engine {replica}",
                "bytes": sent.num_bytes,
                "alone_ms": sent.alone / MILLISECOND,
                "sharing_ms": (sent.end - sent.begin - sent.alone) / MILLISECOND,
            }
            span = lanes.span(f"KV from {source}", sent.request_id, sent.begin, sent.end, details)
            yield span | arrows.get((-1 - number, sent.request_id), {})
        yield from lanes.names()
        yield from trace_events(self._traces[replica], lanes.first_free, arrows)

    def _name_of(self, replica: int) -> str:
        fleet = self._fleet
        if not isinstance(fleet, DisaggregatedFleet):
            return f"engine {replica}"
        return f"engine {replica} ({'prefill' if replica < fleet.router.num_prefill else 'decode'})"


class Lanes:
    """Tracks with names, after the engine's. Spans that overlap get a track each: Perfetto does not
    show a span that begins inside another one of its track, and names no tracks of asynchronous
    events."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._ends: list[int] = []

    def span(
        self, name: str, label: str, begin: int, end: int, details: Mapping[str, object]
    ) -> Event:
        """Return a span on the first free track of this name. Times are in picoseconds; a span
        begins no earlier than the one before on tracks of this name."""
        free = (
            lane
            for lane, (other, busy_until) in enumerate(zip(self._names, self._ends, strict=True))
            if other == name and busy_until <= begin
        )
        lane = next(free, len(self._names))
        if lane == len(self._names):
            self._names.append(name)
            self._ends.append(end)
        self._ends[lane] = end
        return span_event(label, 1 + lane, begin / SECOND, end / SECOND, details)

    @property
    def first_free(self) -> int:
        """The number of the first track after these."""
        return 1 + len(self._names)

    def names(self) -> Iterator[Event]:
        """The names and the order of the tracks: those of a name next to each other."""
        names = self._names
        order = sorted(range(len(names)), key=lambda lane: names.index(names[lane]))
        for place, lane in enumerate(order, start=1):
            event: Event = {"ph": "M", "tid": 1 + lane}
            yield {"name": "thread_name", **event, "args": {"name": names[lane]}}
            yield {"name": "thread_sort_index", **event, "args": {"sort_index": place}}


class Place(NamedTuple):
    """A span at which an arrow begins or ends.

    Attributes:
        time: when it begins, in seconds.
        replica: the engine that computes or receives.
        number: of the step; -1, -2, ... for the KV that the engine has received.
    """

    time: float
    number: int
    replica: int
    request_id: str

    def is_share(self, replica: int, request_id: str) -> bool:
        """Whether it is a share of a step of this engine, for this request."""
        return self.number >= 0 and (self.replica, self.request_id) == (replica, request_id)


def arrows_of(
    traces: Sequence[Trace], received: Sequence[Sequence[Transfer]]
) -> list[dict[tuple[int, str], Event]]:
    """Join what happens to each request on several engines and links: the last step of an engine
    that computes it, its KV on a link, the step that waits for this, and the first step of the next
    engine.

    Args:
        traces: of each engine.
        received: the KV that each engine has received.

    Returns:
        For each engine, the fields of spans with an arrow. Their keys are the number of a step, or
        -1 - the index of the KV; and the request's id.
    """
    shares: dict[str, list[Place]] = defaultdict(list)
    for replica, trace in enumerate(traces):
        for step in trace:
            for share in step.requests:
                place = Place(step.start, step.step, replica, share.request_id)
                shares[client_id(share.request_id)].append(place)
    ways: dict[str, set[Place]] = defaultdict(set)
    for name, places in shares.items():
        places.sort()
        for one, other in pairwise(places):
            if not one.is_share(other.replica, other.request_id):
                ways[name] |= {one, other}
    for replica, transfers in enumerate(received):
        for index, sent in enumerate(transfers):
            name = client_id(sent.request_id)
            kv = Place(sent.begin / SECOND, -1 - index, replica, sent.request_id)
            before = [p for p in shares[name] if p.is_share(sent.source, sent.request_id)]
            after = [p for p in shares[name] if p.is_share(replica, sent.request_id)]
            ways[name] |= {
                kv,
                *[place for place in before if place.time < kv.time][-1:],
                *[place for place in after if place.time >= sent.end / SECOND][:1],
            }
    arrows: list[dict[tuple[int, str], Event]] = [{} for _ in traces]
    for number, way in enumerate(ways.values()):
        *begins, last = sorted(way)
        for place in way if begins else ():
            fields = {"bind_id": hex(number), "flow_out": place != last}
            fields["flow_in"] = place != begins[0]
            arrows[place.replica][place.number, place.request_id] = fields
    return arrows
