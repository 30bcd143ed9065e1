"""Replays a recorded run by its times: requests arrive when they did, and steps take as long as
they did. The result compares the times of requests with the recorded ones."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from statistics import fmean, median
from typing import Literal

from nanovllm.core.schedule import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from nanovllm.simulate.recorded import RecordedRequest, recorded_requests
from nanovllm.simulate.replay import Event, ReplayedEngine, check_begin, has_failed
from nanovllm.simulate.report import Summary, summarize
from nanovllm.simulate.results import FleetResult, ServedRequest
from nanovllm.simulate.workload import SECOND
from nanovllm.trace.record import StepRecord, TracedRequest
from nanovllm.trace.trace import Trace

Begins = Literal["recorded", "median"]
# Of `summarize`, what the two runs are compared by.
COMPARED = (
    "duration",
    "completed",
    "output_throughput",
    *(
        f"{kind}_{name}_ms"
        for name in ("ttft", "tpot", "e2el")
        for kind in ("mean", "median", "p99")
    ),
)
# The shares of a step: each request, the first token that it computes, and how many.
Shares = tuple[tuple[str, int, int], ...]


def shares_of(requests: Iterable[ScheduledRequest | TracedRequest]) -> Shares:
    """Return what a step computes."""
    return tuple((share.request_id, share.start, share.num_tokens) for share in requests)


def is_woken(record: StepRecord) -> bool:
    """Return whether no request was there before those that arrived before a step."""
    return {*record.waiting, *record.running, *record.swapped} <= record.arrivals.keys()


class StepTimes:
    """The recorded times of steps.

    Attributes:
        begins: when each was planned, in seconds.
        gap: seconds from the end of a step to the next plan; the median.
        wake: seconds from the arrival of a request at an idle engine to the plan; the median.
    """

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        self.begins = [step.planned or step.start for step in steps]
        # After a preemption, a request may compute the same tokens again.
        self._durations: dict[Shares, deque[float]] = defaultdict(deque)
        by_size: dict[tuple[int, int], list[float]] = defaultdict(list)
        for step in steps:
            shares = shares_of(step.requests)
            self._durations[shares].append(step.duration)
            by_size[_size(shares)].append(step.duration)
        self._by_size = {size: fmean(durations) for size, durations in by_size.items()}
        gaps = []
        wakes = []
        ends = [0.0]
        for step, begin in zip(steps, self.begins, strict=True):
            if is_woken(step):
                wakes.append(begin - min(arrival.time for arrival in step.arrivals.values()))
            else:
                gaps.append(begin - max(end for end in ends if end <= begin))
            ends = [*ends[-8:], step.start + step.duration]
        self.wake = median(wakes)
        self.gap = median(gaps or [0.0])

    def duration(self, shares: Shares) -> float:
        """Return the time of the recorded step that computed this, once for each such step; or the
        mean time of those that are nearest in tokens and requests."""
        if not (durations := self._durations.get(shares)):
            size = _size(shares)
            nearest = min(
                self._by_size, key=lambda each: abs(each[0] - size[0]) + abs(each[1] - size[1])
            )
            return self._by_size[nearest]
        return durations.popleft()


def _size(shares: Shares) -> tuple[int, int]:
    """The numbers of tokens and of requests."""
    return sum(num_tokens for _, _, num_tokens in shares), len(shares)


class _ByTime(ReplayedEngine):
    """Gives events to the engine at their times.

    Attributes:
        replayed: the steps that it has made.
    """

    def __init__(self, trace: Trace, steps: Sequence[StepRecord], begins: Begins) -> None:
        self.replayed = Trace(settings=trace.settings)
        super().__init__(trace, self.replayed)
        self.times = StepTimes([step for step in steps if step.requests])
        self.begins = self.times.begins if begins == "recorded" else []
        self._ends: deque[float] = deque()  # of the steps in flight
        self._last_end = 0.0
        live: set[str] = set()
        happened: list[Event] = []
        before = 0.0
        for record in steps:
            events = self.events(record, live)
            planned = record.planned or record.start
            if self.begins:
                # In the recorded order: those come first that came with more steps in flight.
                events.sort(key=lambda event: -event.in_flight)
                events = [each._replace(time=planned) for each in events]
            elif not is_woken(record):
                # The recorded engine takes requests in between two steps. They have arrived since
                # the plan before: half-way, in the mean.
                events = [each._replace(time=(before + each.time) / 2) for each in events]
            happened += events
            live = (live | record.arrived.keys()) - record.finished.keys()
            if record.requests:
                before = planned
        self._events = deque(sorted(happened, key=lambda event: event.time))

    def run(self) -> list[StepRecord]:
        """Replay all events, and the steps between them; returns the steps."""
        core = self.core
        while not core.is_idle or self._events:
            begin = self._next_begin()
            while self._events and self._events[0].time <= begin:
                event = self._events.popleft()
                while self.begins and len(self._ends) > event.in_flight:
                    core.take_results()
                event.action()
            # The recorded engine has taken the results that were there before it planned.
            while self.begins and self._ends and self._ends[0] <= begin:
                core.take_results()
            self.now = max(self.now, begin)
            core.step()
        return self.replayed.steps

    def _next_begin(self) -> float:
        """Return when the next step is planned."""
        core = self.core
        if core.num_steps < len(self.begins):
            return self.begins[core.num_steps]
        if core.is_idle:
            return max(self.now, self._events[0].time + self.times.wake)
        # No recorded step is left: the last results are taken as soon as they are there.
        return self.now if self.begins else self.now + self.times.gap

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Return a function that returns a step's result when it has taken as long as recorded."""
        start = self.now
        if self.core.settings.is_one_device:
            start = max(start, self._last_end)
        end = max(self._last_end, start + self.times.duration(shares_of(plan.requests)))
        self._last_end = round(end, 6)
        self._ends.append(self._last_end)

        def wait() -> ModelRunnerOutput:
            self.now = max(self.now, self._ends.popleft())
            return self.result(plan)

        return wait


def replay_by_time(trace: Trace, begins: Begins = "median") -> Summary:
    """Replay the trace of an engine's whole life by its times; returns plain data.

    Args:
        begins: "recorded": steps are planned when they were; "median": the median gap after the end
            of the step before, or after the arrival that wakes the engine.

    Returns:
        `num_steps`, `num_replayed_steps`, and `num_equal_plans`: steps of one run in which the same
        requests compute the same tokens as in a step of the other; `median_gap_ms`; and the times
        of both runs, `recorded` and `replayed`, under the names of `summarize`.

    Raises:
        UsageError: the trace does not have what a replay needs.
    """
    check_begin(trace)
    steps = list(takewhile(lambda record: not has_failed(record), trace.steps))
    engine = _ByTime(trace, steps, begins)
    replayed = engine.run()
    plans = [
        Counter(shares_of(step.requests) for step in run if step.requests)
        for run in (steps, replayed)
    ]
    return {
        "num_steps": plans[0].total(),
        "num_replayed_steps": plans[1].total(),
        "num_equal_plans": (plans[0] & plans[1]).total(),
        "median_gap_ms": 1000 * engine.times.gap,
        "recorded": times_of(steps),
        "replayed": times_of(replayed),
    }


def times_of(steps: Sequence[StepRecord]) -> Summary:
    """Return the times of a run's requests; see `COMPARED`."""
    requests = [request for request in recorded_requests(steps) if request.samples]
    first = min((request.arrival.time for request in requests), default=0.0)
    last = max((request.samples[-1].time for request in requests), default=0.0)
    result = FleetResult(
        requests=[_served(request) for request in requests], duration=round((last - first) * SECOND)
    )
    summary = summarize(result)
    return {name: summary[name] for name in COMPARED}


def _served(request: RecordedRequest) -> ServedRequest:
    is_complete = request.reason in ("stop", "length")
    return ServedRequest(
        request_id=request.name,
        arrival=round(request.arrival.time * SECOND),
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_sampled,
        first_token=round(request.samples[0].time * SECOND),
        last_token=round(request.samples[-1].time * SECOND),
        outcome="length" if is_complete else request.reason,
    )
