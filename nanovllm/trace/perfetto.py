"""A trace as Chrome trace events, which ui.perfetto.dev and chrome://tracing open."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from nanovllm.trace.record import StepRecord

MICROSECONDS = 1e6


def trace_events(steps: Iterable[StepRecord]) -> Iterator[dict[str, Any]]:
    """Steps as Chrome trace events: a track for the steps, one for each request (what it computed
    when, its first token, its preemptions and its end), and counters for tokens, blocks and queues.
    """
    tracks: dict[str, int] = defaultdict(lambda: len(tracks))
    tracks[""] = 0  # the engine
    busy_until: dict[int, float] = defaultdict(float)

    def span(name: str, track: int, step: StepRecord, **arguments: Any) -> dict[str, Any]:
        # Steps of a pipeline overlap, which spans of a track must not: each is shown from the end
        # of the one before.
        begin = max(step.start, busy_until[track])
        end = step.start + step.duration
        busy_until[track] = end
        times = {"ts": begin * MICROSECONDS, "dur": (end - begin) * MICROSECONDS}
        return {"name": name, "ph": "X", "tid": track, **times, "args": arguments}

    def instant(name: str, request_id: str, at: float) -> dict[str, Any]:
        return {
            "name": name,
            "ph": "i",
            "s": "t",
            "tid": tracks[request_id],
            "ts": at * MICROSECONDS,
        }

    for step in steps:
        end = step.start + step.duration
        if step.requests:
            yield span(
                f"step {step.step}", 0, step, tokens=step.num_tokens, requests=len(step.requests)
            )
        for request_id in step.arrived:
            tracks[request_id]
        for share in step.requests:
            track = tracks[share.request_id]
            cached = {"cached": found} if (found := step.admitted.get(share.request_id)) else {}
            drafts = (
                {"drafts": share.num_drafts, "accepted": share.num_accepted}
                if share.num_drafts
                else {}
            )
            name = f"{share.kind} {share.num_tokens}"
            yield span(
                name, track, step, start=share.start, blocks=share.new_block_ids, **cached, **drafts
            )
            if share.samples_first_token:
                yield instant("first token", share.request_id, end)
        for request_id, mode in step.preempted.items():
            yield instant(f"preempted ({mode})", request_id, step.start)
        for request_id, reason in step.finished.items():
            yield instant(f"finished ({reason})", request_id, end)
        counters = {
            "tokens in step": step.num_tokens,
            "held KV blocks": step.num_blocks - step.num_free_blocks,
            "running requests": len(step.running),
            "waiting requests": len(step.waiting),
        }
        for name, value in counters.items():
            yield {
                "name": name,
                "ph": "C",
                "ts": step.start * MICROSECONDS,
                "args": {"value": value},
            }
    for name, track in tracks.items():
        yield {"name": "thread_name", "ph": "M", "tid": track, "args": {"name": name or "engine"}}
        yield {"name": "thread_sort_index", "ph": "M", "tid": track, "args": {"sort_index": track}}
