"""A trace as Chrome trace events, which ui.perfetto.dev and chrome://tracing open."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from nanovllm.trace.record import StepRecord

MICROSECONDS = 1e6

Event = dict[str, object]


def trace_events(steps: Iterable[StepRecord]) -> Iterator[Event]:
    """Steps as Chrome trace events: a track for the steps, one for each request (what it computed
    when, its first token, its preemptions and its end), and counters for tokens, blocks and queues.
    """
    timeline = _Timeline()
    for step in steps:
        yield from timeline.events(step)
        yield from _counters(step)
    yield from timeline.names()


class _Timeline:
    """The tracks of the engine and of the requests, in the order in which they begin."""

    def __init__(self) -> None:
        self._tracks = {"": 0}  # the engine's
        self._busy_until: dict[int, float] = defaultdict(float)

    def events(self, step: StepRecord) -> Iterator[Event]:
        """The spans and instants of a step."""
        end = step.start + step.duration
        if step.requests:
            counts = {"tokens": step.num_tokens, "requests": len(step.requests)}
            yield self._span(f"step {step.step}", 0, step, counts)
        for request_id in step.arrived:
            self._track(request_id)
        for share in step.requests:
            details: dict[str, object] = {"start": share.start, "blocks": share.new_block_ids}
            if cached := step.admitted.get(share.request_id):
                details["cached"] = cached
            if share.num_drafts:
                details |= {"drafts": share.num_drafts, "accepted": share.num_accepted}
            track = self._track(share.request_id)
            yield self._span(f"{share.kind} {share.num_tokens}", track, step, details)
            if share.samples_first_token:
                yield self._instant("first token", share.request_id, end)
        for request_id, mode in step.preempted.items():
            yield self._instant(f"preempted ({mode})", request_id, step.start)
        for request_id, reason in step.finished.items():
            yield self._instant(f"finished ({reason})", request_id, end)

    def names(self) -> Iterator[Event]:
        """The names and the order of the tracks."""
        for name, track in self._tracks.items():
            event: Event = {"ph": "M", "tid": track}
            yield {"name": "thread_name", **event, "args": {"name": name or "engine"}}
            yield {"name": "thread_sort_index", **event, "args": {"sort_index": track}}

    def _track(self, request_id: str) -> int:
        """The number of a request's track, which begins with its first event."""
        return self._tracks.setdefault(request_id, len(self._tracks))

    def _span(self, name: str, track: int, step: StepRecord, arguments: object) -> Event:
        # Steps of a pipeline overlap, which spans of a track must not: each is shown from the end
        # of the one before.
        begin = max(step.start, self._busy_until[track])
        end = step.start + step.duration
        self._busy_until[track] = end
        return {
            "name": name,
            "ph": "X",
            "tid": track,
            "ts": begin * MICROSECONDS,
            "dur": (end - begin) * MICROSECONDS,
            "args": arguments,
        }

    def _instant(self, name: str, request_id: str, at: float) -> Event:
        return {
            "name": name,
            "ph": "i",
            "s": "t",
            "tid": self._track(request_id),
            "ts": at * MICROSECONDS,
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
        yield {"name": name, "ph": "C", "ts": step.start * MICROSECONDS, "args": {"value": value}}
