"""Latencies from a trace, in steps, tokens or its unit of time."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

from nanovllm.trace.trace import StepRecord, Trace

StepScale = Literal["step", "tokens", "time"] | Callable[[StepRecord], float]


def step_edges(trace: Trace, x: StepScale = "step") -> list[tuple[float, float]]:
    """Where each step begins and ends on the x axis.

    Args:
        x: "step": every step has width 1, and steps without work leave a gap; "tokens": a step is
            as wide as its number of tokens, which approximates time and is the same on every
            machine; "time": as recorded; or a function from a step record to its width. Records
            without requests have no width.
    """
    if x == "step":
        return [(float(s.step), float(s.step + bool(s.requests))) for s in trace]
    if x == "time":
        return [(s.start, s.start + s.duration) for s in trace]
    if x != "tokens" and not callable(x):
        raise ValueError(f"x must be 'step', 'tokens', 'time' or a function of a step, got {x!r}")
    edges = []
    position = 0.0
    for step in trace:
        width = x(step) if callable(x) and step.requests else step.num_tokens
        edges.append((position, position + width))
        position += width
    return edges


def request_metrics(trace: Trace, cost: StepScale = "step") -> dict[str, dict[str, Any]]:
    """Latencies of each request, in steps, tokens or seconds.

    Args:
        cost: what a step costs, see `step_edges`. With "step" or "tokens" the result does not
            depend on the machine.

    Returns:
        For each request id, in order of appearance: `arrival` (beginning of the first step after it
        came), `ttft` (time from there to the end of the step that sampled its first token; None if
        none did), `itl` (the times between consecutive tokens), `latency` (arrival to end; None if
        it has not ended), `num_preemptions`. Of a request that came before the trace began, `ttft`
        and `latency` are None.
    """
    metrics: dict[str, dict[str, Any]] = {}
    newest: dict[str, float] = {}
    seen_coming: set[str] = set()

    def of(request_id: str, begin: float) -> dict[str, Any]:
        fresh: dict[str, Any] = {
            "arrival": begin,
            "ttft": None,
            "itl": [],
            "latency": None,
            "num_preemptions": 0,
        }
        return metrics.setdefault(request_id, fresh)

    for step, (begin, end) in zip(trace, step_edges(trace, cost), strict=True):
        seen_coming |= step.arrived.keys()
        for request_id in step.arrived:
            of(request_id, begin)
        for request_id in step.preempted:
            of(request_id, begin)["num_preemptions"] += 1
        for share in step.requests:
            entry = of(share.request_id, begin)
            for _ in share.sampled:
                if share.request_id in newest:
                    entry["itl"].append(end - newest[share.request_id])
                elif share.request_id in seen_coming:
                    entry["ttft"] = end - entry["arrival"]
                newest[share.request_id] = end
        for request_id in step.finished:
            entry = of(request_id, begin)
            if request_id in seen_coming:
                entry["latency"] = newest.get(request_id, begin) - entry["arrival"]
    return metrics


def percentile(values: Iterable[float | None], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank); None
    values are left out.

    Raises:
        ValueError: there is no value.
    """
    present = sorted(v for v in values if v is not None)
    if not present:
        raise ValueError("a percentile of no values")
    rank = -(-len(present) * percent // 100)
    return present[max(0, int(rank) - 1)]
