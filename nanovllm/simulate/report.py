"""Sums up a simulation: plain data under the names of `vllm bench serve`, and a table."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from nanovllm.data.errors import UsageError
from nanovllm.simulate.results import FleetResult, ReplicaCounters, ServedRequest
from nanovllm.simulate.workload import SECOND

MILLISECOND = SECOND // 1000
PERCENTILES = (90, 95, 99)
MAX_ENGINES = 16
# Of tables that are not shown in a terminal.
WIDTH = None if sys.stdout.isatty() else 120
# Columns of tables, with short names.
ENGINE_COLUMNS = {
    "num_requests": "requests",
    "num_steps": "steps",
    "utilization": "busy",
    "mean_num_decodes": "decoding",
    "mean_kv_usage": "KV",
    "prefix_cache_hit_rate": "hits",
    "num_preemptions": "preempted",
    "bottleneck": "bottleneck",
}
SWEEP_COLUMNS = {
    "request_rate": "rate",
    "speedup": "speedup",
    "request_throughput": "req/s",
    "output_throughput": "tok/s",
    "p99_ttft_ms": "P99 TTFT",
    "p99_tpot_ms": "P99 TPOT",
    "request_goodput": "good/s",
    "dollars_per_million_output_tokens": "$/M out",
    "bottleneck": "bottleneck",
}
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


def parse_goodput(words: str | Sequence[str] | None) -> dict[str, float]:
    """Read objectives, one or several, such as "ttft:200", in milliseconds.

    Raises:
        UsageError: something else; lists the names.
    """
    objectives = {}
    for word in [words] if isinstance(words, str) else words or []:
        name, _, limit = word.partition(":")
        try:
            objectives[name] = float(limit)
        except ValueError:
            objectives[name] = 0.0
        if name not in TIMES or not 0 < objectives[name] < float("inf"):
            raise UsageError(
                f"--goodput must be a name of {', '.join(TIMES)} and a time in ms, such as "
                f"ttft:200, got {word!r}"
            )
    return objectives


def summarize(
    result: FleetResult,
    *,
    goodput: Mapping[str, float] | None = None,
    bottleneck: Callable[[ReplicaCounters], str] | None = None,
    kv_tokens: int = 0,
    dollars_per_hour: float = 0.0,
) -> Summary:
    """Return the result as plain data. Times are in milliseconds, except `duration` in seconds.

    Args:
        goodput: the longest time in ms, by name, of a request that counts in `request_goodput`.
        bottleneck: names what limits an engine.
        kv_tokens: capacity of an engine's KV pool, in tokens.
        dollars_per_hour: cost of all machines.
    """
    done = [each for each in result.requests if each.outcome == "length"]
    seconds = max(result.duration, 1) / SECOND
    num_input = sum(each.num_prompt_tokens for each in done)
    num_output = sum(each.num_output_tokens for each in done)
    dollars = dollars_per_hour * seconds / 3600
    queried = sum(each.num_queried_tokens for each in result.replicas)
    hit = sum(each.num_hit_tokens for each in result.replicas)
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
        "prefix_cache_hit_rate": hit / max(1, queried),
        "num_preemptions": sum(each.num_preemptions for each in result.replicas),
        "bottleneck": _bottleneck(max(result.replicas, key=lambda each: each.busy), bottleneck),
        "replicas": [
            {
                **_replica(each, max(1, result.duration), kv_tokens),
                "bottleneck": _bottleneck(each, bottleneck),
            }
            for each in result.replicas
        ],
    }
    if result.num_transfers:
        summary["num_transfers"] = result.num_transfers
        summary["num_transferred_bytes"] = result.num_transferred_bytes
        summary["mean_transfer_ms"] = result.transfer_time / result.num_transfers / MILLISECOND
    if dollars:
        summary["dollars_per_million_output_tokens"] = dollars / max(1, num_output) * 1e6
        summary["dollars_per_million_tokens"] = dollars / max(1, num_input + num_output) * 1e6
    return summary


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
    times = {name: sorted(map(time, done)) for name, time in TIMES.items()}
    times["tpot"] = sorted(time for each in done if (time := time_per_token(each)) is not None)
    summary: Summary = {}
    for name, values in times.items():
        summary[f"mean_{name}_ms"] = sum(values) / max(1, len(values)) / MILLISECOND
        summary[f"median_{name}_ms"] = percentile(values, 50) / MILLISECOND
        for percent in PERCENTILES:
            summary[f"p{percent}_{name}_ms"] = percentile(values, percent) / MILLISECOND
    summary["mean_itl_ms"] = result.gaps.mean / MILLISECOND
    summary["median_itl_ms"] = result.gaps.quantile(0.5) / MILLISECOND
    for percent in PERCENTILES:
        summary[f"p{percent}_itl_ms"] = result.gaps.quantile(percent / 100) / MILLISECOND
    return summary


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, interpolated as by numpy; 0.0 without values."""
    if not values:
        return 0.0
    place = (len(values) - 1) * percent / 100
    index = min(int(place), max(0, len(values) - 2))
    upper = values[min(index + 1, len(values) - 1)]
    return values[index] + (upper - values[index]) * (place - index)


def _replica(counters: ReplicaCounters, duration: int, kv_tokens: int) -> Summary:
    num_steps = max(1, counters.num_steps)
    return {
        "num_requests": counters.num_requests,
        "num_steps": counters.num_steps,
        "utilization": counters.busy / duration,
        "mean_num_decodes": counters.num_decodes / num_steps,
        # The share of the KV pool that decoding requests attend to in the mean step.
        "mean_kv_usage": counters.decode_context / num_steps / max(1, kv_tokens),
        "prefix_cache_hit_rate": counters.num_hit_tokens / max(1, counters.num_queried_tokens),
        "num_preemptions": counters.num_preemptions,
        "num_evictions": counters.num_evictions,
    }


def _bottleneck(
    counters: ReplicaCounters, bottleneck: Callable[[ReplicaCounters], str] | None
) -> str:
    return bottleneck(counters) if bottleneck is not None and counters.num_steps else "none"


def print_summary(summary: Summary) -> None:
    """Print the tables of a simulation: totals, latencies, and the first engines."""
    from rich.console import Console
    from rich.table import Column, Table

    totals = Table(Column(style="bold"), Column(justify="right"), show_header=False)
    for name, value in summary.items():
        if not name.endswith("_ms") and not isinstance(value, list):
            totals.add_row(name.replace("_", " "), _shown(value))
    names = ("mean", "median", *(f"p{percent}" for percent in PERCENTILES))
    latencies = Table("ms", *(Column(name, justify="right") for name in names))
    for time in (*TIMES, "itl"):
        latencies.add_row(time.upper(), *(_shown(summary[f"{name}_{time}_ms"]) for name in names))
    replicas = summary["replicas"]
    assert isinstance(replicas, list)
    engines = Table("engine", *ENGINE_COLUMNS.values())
    for number, replica in enumerate(replicas[:MAX_ENGINES]):
        engines.add_row(str(number), *(_shown(replica[name]) for name in ENGINE_COLUMNS))
    Console(width=WIDTH).print(totals, latencies, engines)


def print_sweep(points: Sequence[Mapping[str, object]], summaries: Sequence[Summary]) -> None:
    """Print a table with a row per point, where a star marks the frontier, and then the points that
    are impossible."""
    from rich.console import Console
    from rich.table import Table

    columns = [name for name in SWEEP_COLUMNS if any(name in summary for summary in summaries)]
    names = (name.replace("_", " ") for name in points[0])
    table = Table(*names, *(SWEEP_COLUMNS[name] for name in columns), "")
    console = Console(width=WIDTH)
    errors = []
    for point, summary in zip(points, summaries, strict=True):
        if "error" in summary:
            errors.append(f"{_shown(dict(point))}: {summary['error']}")
            continue
        row = (_shown(summary[name]) for name in columns)
        table.add_row(*map(_shown, point.values()), *row, "*" * bool(summary["on_frontier"]))
    console.print(table, *errors, highlight=False)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:,.0f}" if is_number else str(value)
