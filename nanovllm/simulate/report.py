"""Sums up a simulation: plain data under the names of `vllm bench serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from nanovllm.simulate.results import FleetResult, ReplicaCounters, ServedRequest
from nanovllm.simulate.workload import SECOND

if TYPE_CHECKING:
    from nanovllm.simulate.engine_plan import EnginePlan
    from nanovllm.simulate.links import Links

MILLISECOND = SECOND // 1000
# The name of the links between prefill and decode engines.
KV_LINK = "KV link"
# Links that are busy for a larger share of the time have no room for more transfers.
BUSY = 0.8
PERCENTILES = (90, 95, 99)
Summary = dict[str, object]
# Times of a request in picoseconds, by vLLM's names.
TIMES: dict[str, Callable[[ServedRequest], float]] = {
    "ttft": lambda served: (served.first_token or 0) - served.arrival,
    "tpot": lambda served: time_per_token(served) or 0.0,
    "e2el": lambda served: (served.last_token or 0) - served.arrival,
}


def time_per_token(served: ServedRequest) -> float | None:
    """Return the mean time between the tokens of a request; None: it has a single one."""
    if served.first_token is None or served.last_token is None or served.num_output_tokens < 2:
        return None
    return (served.last_token - served.first_token) / (served.num_output_tokens - 1)


def summarize(
    result: FleetResult,
    *,
    goodput: Mapping[str, float] | None = None,
    engines: Sequence[EnginePlan] = (),
    links: Mapping[str, Links] | None = None,
    dollars_per_hour: float = 0.0,
) -> Summary:
    """Return the result as plain data. Times are in milliseconds, except `duration` in seconds.

    Args:
        goodput: the longest time in ms, by name, of a request that counts in `request_goodput`.
        engines: the plan of each engine, if there is one.
        links: over which KV was sent, by name.
        dollars_per_hour: cost of all machines.
    """
    links = links or {}
    done = [each for each in result.requests if each.outcome == "length"]
    seconds = max(result.duration, 1) / SECOND
    num_input = sum(each.num_prompt_tokens for each in done)
    num_output = sum(each.num_output_tokens for each in done)
    dollars = dollars_per_hour * seconds / 3600
    queried = sum(each.num_queried_tokens for each in result.replicas)
    hit = sum(each.num_hit_tokens for each in result.replicas)
    replicas = [
        _replica(counters, engine, max(1, result.duration))
        for counters, engine in zip_longest(result.replicas, engines)
    ]
    summary: Summary = {
        "duration": seconds,
        "completed": len(done),
        "outcomes": dict(Counter(each.outcome for each in result.requests)),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / seconds,
        "input_throughput": num_input / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        **_goodput(result.requests, goodput or {}, seconds),
        **_latencies(result, done),
        "e2el_growth": _growth(done),
        "prefix_cache_hit_rate": hit / max(1, queried),
        "num_preemptions": sum(each.num_preemptions for each in result.replicas),
        "bottleneck": _slow_link(result, done, links) or _bottleneck(result.replicas, engines),
        "replicas": replicas,
    }
    kv_link = links.get(KV_LINK)
    if kv_link is not None and kv_link.num_transfers:
        summary["num_transfers"] = kv_link.num_transfers
        summary["num_transferred_bytes"] = kv_link.num_bytes
        summary["mean_transfer_ms"] = kv_link.time / kv_link.num_transfers / MILLISECOND
    if dollars and num_output:
        summary["dollars_per_million_output_tokens"] = dollars / num_output * 1e6
        summary["dollars_per_million_tokens"] = dollars / (num_input + num_output) * 1e6
    if rejections := [each.rejection for each in result.requests if each.rejection]:
        summary["rejection"] = rejections[0]
    if num_cut := sum(each.is_cut for each in done):
        summary["num_cut"] = num_cut
    return summary


def num_lost(summary: Summary) -> int:
    """Return the number of requests that a simulation has not completed."""
    outcomes = summary["outcomes"]
    completed = summary["completed"]
    assert isinstance(outcomes, dict) and isinstance(completed, int)
    return sum(outcomes.values()) - completed


def notes_of(summary: Summary) -> list[str]:
    """Return what else a reader of the summary might miss."""
    notes = summary.get("notes", [])
    assert isinstance(notes, list)
    return notes


def _goodput(
    requests: Sequence[ServedRequest], objectives: Mapping[str, float], seconds: float
) -> Summary:
    """How many requests meet all objectives. As in vLLM, one with a single token has TPOT 0."""
    if not objectives:
        return {}
    num_good = sum(
        each.outcome == "length"
        and all(TIMES[name](each) <= limit * MILLISECOND for name, limit in objectives.items())
        for each in requests
    )
    return {
        "goodput": dict(objectives),
        "request_goodput": num_good / seconds,
        "slo_attainment": num_good / max(1, len(requests)),
    }


def _latencies(result: FleetResult, done: Sequence[ServedRequest]) -> Summary:
    times: dict[str, list[float]] = {
        "ttft": sorted(map(TIMES["ttft"], done)),
        "tpot": sorted([time for each in done if (time := time_per_token(each)) is not None]),
        "e2el": sorted(map(TIMES["e2el"], done)),
        "queue_time": sorted(
            [each.scheduled - each.arrival for each in done if each.scheduled is not None]
        ),
    }
    summary: Summary = {}
    for name, values in times.items():
        mean = sum(values) / max(1, len(values))
        summary |= _spread(name, mean, partial(percentile, values))
    gaps = result.gaps
    return summary | _spread("itl", gaps.mean, lambda percent: gaps.quantile(percent / 100))


def _growth(done: Sequence[ServedRequest]) -> float:
    """Return by how many seconds requests take longer for each second by which they arrive later:
    the slope of a line through all of them."""
    middle = sum(each.arrival for each in done) / max(1, len(done))
    square = sum((each.arrival - middle) ** 2 for each in done)
    return sum((each.arrival - middle) * TIMES["e2el"](each) for each in done) / max(1, square)


def _spread(name: str, mean: float, at: Callable[[float], float]) -> Summary:
    """Return mean, median and percentiles of a kind of times.

    Args:
        at: returns a percentile, in picoseconds, like `mean`.
    """
    found = {f"mean_{name}_ms": mean, f"median_{name}_ms": at(50)}
    found |= {f"p{percent}_{name}_ms": at(percent) for percent in PERCENTILES}
    return {key: time / MILLISECOND for key, time in found.items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, interpolated as by numpy; 0.0 without values."""
    if not values:
        return 0.0
    place = (len(values) - 1) * percent / 100
    index = min(int(place), max(0, len(values) - 2))
    upper = values[min(index + 1, len(values) - 1)]
    return values[index] + (upper - values[index]) * (place - index)


def _bottleneck(replicas: Sequence[ReplicaCounters], engines: Sequence[EnginePlan]) -> str:
    """Name what limits the engine where requests wait in the largest share of its steps; or the
    busiest one, if they wait nowhere."""
    pairs = [pair for pair in zip(replicas, engines, strict=False) if pair[0].num_steps]
    if not pairs:
        return "none"
    counters, engine = max(
        pairs, key=lambda pair: (pair[0].waits.total() / pair[0].num_steps, pair[0].busy)
    )
    return f"{engine.role}: {engine.bottleneck(counters)}".removeprefix(": ")


def _slow_link(
    result: FleetResult, done: Sequence[ServedRequest], links: Mapping[str, Links]
) -> str:
    """Name links that are busy most of the time, or on which requests spend most of the time to
    their first tokens; "": there are none."""
    waiting = sum(map(TIMES["ttft"], done)) if links else 0
    for name, each in links.items():
        if each.utilization(result.duration) > BUSY or each.time > waiting / 2:
            return name
    return ""


def _replica(counters: ReplicaCounters, engine: EnginePlan | None, duration: int) -> Summary:
    num_steps = max(1, counters.num_steps)
    num_kv_blocks = 1 if engine is None else engine.num_kv_blocks
    return {
        "role": "" if engine is None else engine.role,
        "num_requests": counters.num_requests,
        "num_steps": counters.num_steps,
        "utilization": counters.busy / duration,
        "mean_num_decodes": counters.num_decodes / num_steps,
        # The share of the KV pool that requests hold in the mean step.
        "mean_kv_usage": counters.num_held_blocks / num_steps / num_kv_blocks,
        "prefix_cache_hit_rate": counters.num_hit_tokens / max(1, counters.num_queried_tokens),
        "num_preemptions": counters.num_preemptions,
        "num_evictions": counters.num_evictions,
        "bottleneck": engine.bottleneck(counters) if engine and counters.num_steps else "none",
    }
