"""A trace for other people's viewers: Chrome trace events, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING, Any

from nanovllm.trace.record import StepRecord, TracedRequest

if TYPE_CHECKING:
    from nanovllm.trace.trace import Trace

# The named colours of chrome://tracing that come nearest to the palette of `nanovllm.lab.viz`, in its order. (Perfetto's own
# viewer takes its colours from the names of the slices and lets no file choose them.)
REQUEST_COLORS = (
    "rail_response",
    "rail_idle",
    "rail_load",
    "thread_state_uninterruptible",
    "thread_state_runnable",
    "rail_animation",
)
MICROSECONDS = 1e6


def write_events(trace: Trace, path: str | pathlib.Path) -> None:
    """Write a trace as Chrome trace events: a track for the steps, one for each request (what it computed when, its first
    token, its preemptions and its end), and counters for tokens, blocks and queues."""
    tracks: dict[str, int] = {}
    busy_until: dict[int, float] = {}
    events = []
    for step in trace.steps:
        if step.requests:
            arguments = {"tokens": step.num_tokens, "requests": len(step.requests)}
            events.append(_slice(f"step {step.step}", 0, step, busy_until, arguments))
        for request_id in step.arrived:
            tracks.setdefault(request_id, len(tracks) + 1)
        for share in step.requests:
            track = tracks.setdefault(share.request_id, len(tracks) + 1)
            events.append(_share_slice(share, track, step, busy_until))
            if share.samples_first_token:
                events.append(_instant("first token", track, step.start + step.duration))
        for request_id, mode in step.preempted.items():
            track = tracks.setdefault(request_id, len(tracks) + 1)
            events.append(_instant(f"preempted ({mode})", track, step.start))
        for request_id, reason in step.finished.items():
            track = tracks.setdefault(request_id, len(tracks) + 1)
            events.append(_instant(f"finished ({reason})", track, step.start + step.duration))
        events += _counters(step)
    for name, track in {"engine": 0, **tracks}.items():
        events.append(_about("thread_name", track, name=name))
        events.append(_about("thread_sort_index", track, sort_index=track))
    pathlib.Path(path).write_text(json.dumps({"traceEvents": events}))


def _slice(
    name: str, track: int, step: StepRecord, busy_until: dict[int, float], arguments: dict[str, Any]
) -> dict[str, Any]:
    # Steps of a pipeline overlap, which slices of a track may not: each is shown from where the one before it ends.
    begin, end = max(step.start, busy_until.get(track, 0.0)), step.start + step.duration
    busy_until[track] = end
    times = {"ts": begin * MICROSECONDS, "dur": (end - begin) * MICROSECONDS}
    return {"name": name, "ph": "X", "pid": 1, "tid": track, **times, "args": arguments}


def _share_slice(share: TracedRequest, track: int, step: StepRecord, busy_until: dict[int, float]) -> dict[str, Any]:
    arguments: dict[str, Any] = {"start": share.start, "blocks": share.new_block_ids}
    if step.admitted.get(share.request_id):
        arguments["cached"] = step.admitted[share.request_id]
    event = _slice(f"{share.kind} {share.num_tokens}", track, step, busy_until, arguments)
    return event | {"cname": REQUEST_COLORS[(track - 1) % len(REQUEST_COLORS)]}


def _about(what: str, track: int, **arguments: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": track, "args": arguments}


def _instant(name: str, track: int, at: float) -> dict[str, Any]:
    return {"name": name, "ph": "i", "s": "t", "pid": 1, "tid": track, "ts": at * MICROSECONDS}


def _counters(step: StepRecord) -> list[dict[str, Any]]:
    counters = {
        "tokens in step": step.num_tokens,
        "held KV blocks": step.num_blocks - step.num_free_blocks,
        "running requests": len(step.running),
        "waiting requests": len(step.waiting),
    }
    common = {"ph": "C", "pid": 1, "ts": step.start * MICROSECONDS}
    return [{"name": name, **common, "args": {"value": value}} for name, value in counters.items()]
