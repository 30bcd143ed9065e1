"""A trace as Chrome trace events, which ui.perfetto.dev and chrome://tracing open."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from nanovllm.trace.record import StepRecord

Event = dict[str, object]


def trace_events(
    steps: Iterable[StepRecord],
    first_track: int = 1,
    arrows: Mapping[tuple[int, str], Event] | None = None,
) -> Iterator[Event]:
    """Steps as Chrome trace events: a track for the steps, one for each request (its arrival, what
    it computed when, its first token, its preemptions and its end), and counters for tokens, blocks
    and queues.

    Args:
        first_track: the number of the first request's track. Tracks from 1 to there are free.
        arrows: more fields for the span of a request in a step, by the step's number and the
            request's id: the arrows that begin or end there.
    """
    timeline = _Timeline(first_track, arrows or {})
    for step in steps:
        yield from timeline.events(step)
        yield from _counters(step)
    yield from timeline.names()


class _Timeline:
    """The tracks of the engine and of the requests, in the order in which they begin."""

    def __init__(self, first_track: int, arrows: Mapping[tuple[int, str], Event]) -> None:
        self._first_track = first_track
        self._arrows = arrows
        self._tracks = {"": 0}  # the engine's
        self._busy_until: dict[int, float] = defaultdict(float)
        self._ended: set[str] = set()

    def events(self, step: StepRecord) -> Iterator[Event]:
        """The spans and instants of a step."""
        end = step.start + step.duration
        if step.requests:
            counts = {"tokens": step.num_tokens, "requests": len(step.requests)}
            yield self._span(f"step {step.step}", 0, step, counts)
        for request_id in step.arrived:
            self._track(request_id)
            self._ended.discard(request_id)
        for request_id, arrival in step.arrivals.items():
            yield self._instant("arrived", request_id, arrival.time)
        for share in step.requests:
            details: dict[str, object] = {"start": share.start, "blocks": share.new_block_ids}
            if cached := step.admitted.get(share.request_id):
                details["cached"] = cached
            if share.num_drafts:
                details |= {"drafts": share.num_drafts, "accepted": share.num_accepted}
            track = self._track(share.request_id)
            span = self._span(f"{share.kind} {share.num_tokens}", track, step, details)
            yield span | self._arrows.get((step.step, share.request_id), {})
            if share.samples_first_token and share.request_id not in self._ended:
                yield self._instant("first token", share.request_id, end)
        for request_id, mode in step.preempted.items():
            yield self._instant(f"preempted ({mode})", request_id, step.start)
        for request_id, reason in step.finished.items():
            yield self._instant(f"finished ({reason})", request_id, end)
            self._ended.add(request_id)

    def names(self) -> Iterator[Event]:
        """The names and the order of the tracks."""
        for name, track in self._tracks.items():
            event: Event = {"ph": "M", "tid": track}
            yield {"name": "thread_name", **event, "args": {"name": name or "engine"}}
            yield {"name": "thread_sort_index", **event, "args": {"sort_index": track}}

    def _track(self, request_id: str) -> int:
        """The number of a request's track, which begins with its first event."""
        return self._tracks.setdefault(request_id, self._first_track + len(self._tracks) - 1)

    def _span(self, name: str, track: int, step: StepRecord, arguments: object) -> Event:
        # Steps of a pipeline overlap, which spans of a track must not: each is shown from the end
        # of the one before.
        begin = max(step.start, self._busy_until[track])
        end = step.start + step.duration
        self._busy_until[track] = end
        return span_event(name, track, begin, end, arguments)

    def _instant(self, name: str, request_id: str, at: float) -> Event:
        return {
            "name": name,
            "ph": "i",
            "s": "t",
            "tid": self._track(request_id),
            "ts": microseconds(at),
        }


def _counters(step: StepRecord) -> Iterator[Event]:
    """The tokens, blocks and queues of a step."""
    counters = {
        "tokens in step": step.num_tokens,
        "held KV blocks": step.num_blocks - step.num_free_blocks,
        "running requests": len(step.running),
        "waiting requests": len(step.waiting),
    }
    for name, value in counters.items():
        yield {"name": name, "ph": "C", "ts": microseconds(step.start), "args": {"value": value}}


def span_event(name: str, track: int, begin: float, end: float, arguments: object) -> Event:
    """Return a span of a track, from `begin` to `end` in seconds. Spans of a track must not
    overlap: Perfetto would not show the later one."""
    start = microseconds(begin)
    return {
        "name": name,
        "ph": "X",
        "tid": track,
        "ts": start,
        "dur": round(microseconds(end) - start, 3),
        "args": arguments,
    }


def microseconds(seconds: float) -> float:
    """Return a time in microseconds, rounded to a nanosecond as Perfetto does: so a span that
    begins where another ends does not overlap it."""
    return round(seconds * 1e6, 3)
