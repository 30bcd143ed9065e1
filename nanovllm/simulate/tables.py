"""Tables of simulations, for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Column, Table

from nanovllm.simulate.machines import Efficiency, Machine
from nanovllm.simulate.models import ModelShape
from nanovllm.simulate.report import PERCENTILES, Summary, notes_of, num_lost
from nanovllm.simulate.sources import Selection

MAX_ENGINES = 16
# Lines about the engines of a sweep, and about their sources.
MAX_SETUPS = 4
# Of tables that are not shown in a terminal.
WIDTH = None if sys.stdout.isatty() else 120
TIME_ROWS = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2EL", "itl": "ITL", "queue_time": "queue"}
UNITS = {
    "duration": "s",
    "request_throughput": "req/s",
    "input_throughput": "tok/s",
    "output_throughput": "tok/s",
    "total_token_throughput": "tok/s",
    "goodput": "ms",
    "request_goodput": "req/s",
}
# Columns of tables, with short names.
ENGINE_COLUMNS = {
    "num_requests": "requests",
    "num_steps": "steps",
    "utilization": "busy",
    "mean_num_decodes": "decoding",
    "mean_kv_usage": "KV",
    "prefix_cache_hit_rate": "hits",
    "num_preemptions": "preempted",
    "outages": "not ready (s)",
    "bottleneck": "bottleneck",
}
MACHINE_COLUMNS = (
    *("GiB", "GB/s", "BF16", "FP8", "in a node", "between nodes", "to the host"),
    *("devices", "$/h", "corrections"),
)
MACHINE_UNITS = (
    "per device: memory in GiB and GB/s, dense TFLOP/s with BF16 and FP8, links in GB/s in one "
    "direction (of a mesh, all of a device together), and US dollars per hour; devices per node"
)
CORRECTION_UNITS = (
    "shares of a machine's numbers that programs reach; from all_to_all on, seconds (machines.py "
    "describes each)"
)
MODEL_COLUMNS = ("params", "bytes", "KV bytes", "layers", "experts", "context", "source")
MODEL_UNITS = (
    "parameters in billions, and bytes of each; KV bytes per token; experts per token, and of a "
    "layer; longest context in tokens; the source is a repository of huggingface.co"
)
SWEEP_COLUMNS = {
    "request_rate": "rate",
    "speedup": "speedup",
    "num_lost": "lost",
    "num_cut": "cut",
    "request_throughput": "req/s",
    "output_throughput": "tok/s",
    "p99_ttft_ms": "P99 TTFT (ms)",
    "p99_tpot_ms": "P99 TPOT (ms)",
    "request_goodput": "good/s",
    "slo_attainment": "SLO",
    "prefix_cache_hit_rate": "hits",
    "dollars_per_million_output_tokens": "$/M out",
    "bottleneck": "bottleneck",
}
# Columns that are shown if any row has another value than 0.
RARE_COLUMNS = "num_lost", "num_cut", "prefix_cache_hit_rate"


def print_summary(summary: Summary) -> None:
    """Print the tables of a simulation: totals, latencies, and the first engines."""
    totals = Table(Column(style="bold"), Column(justify="right"), show_header=False)
    names = ("mean", "median", *(f"p{percent}" for percent in PERCENTILES))
    latencies = Table("ms", *(Column(name, justify="right") for name in names))
    shown = {"setup", "sources", "from_trace", "e2el_growth", "rejection", "num_cut"}
    for time, label in TIME_ROWS.items():
        cells = [f"{name}_{time}_ms" for name in names]
        # As in vLLM, zeros stand for no values; but requests may really queue for no time.
        is_missing = not any(summary[cell] for cell in cells)
        is_missing = is_missing and (time != "queue_time" or not summary["completed"])
        latencies.add_row(label, *("-" if is_missing else _shown(summary[cell]) for cell in cells))
        shown.update(cells)
    for name, value in summary.items():
        if name not in shown and not isinstance(value, list):
            unit = f" ({UNITS[name]})" if name in UNITS else ""
            totals.add_row(name.replace("_", " ") + unit, _shown(value))
    replicas = summary["replicas"]
    assert isinstance(replicas, list)
    columns = {name: ENGINE_COLUMNS[name] for name in ENGINE_COLUMNS if name in replicas[0]}
    engines = Table("engine", *columns.values())
    for number, replica in enumerate(replicas[:MAX_ENGINES]):
        engine = f"{number} {replica['role']}".rstrip()
        outages = {"outages": [_outage(each) for each in replica.get("outages", [])]}
        values = {**replica, **outages}
        engines.add_row(engine, *(_shown(values[name]) for name in columns))
    console = Console(width=WIDTH, highlight=False, markup=False)
    console.print(summary["setup"], soft_wrap=True)
    console.print(_sources_line(summary["sources"]), soft_wrap=True)
    console.print(totals)
    for note in _notes(summary):
        console.print(note, soft_wrap=True)
    console.print(latencies, engines)
    if (num_more := len(replicas) - MAX_ENGINES) > 0:
        verb = "engine is" if num_more == 1 else "engines are"
        console.print(f"{num_more:,} more {verb} in the output of --json")


def _notes(summary: Summary) -> list[str]:
    """Return the reason of rejections, and what else a reader of the table might miss."""
    rejections = [f"rejected: {summary['rejection']}"] if "rejection" in summary else []
    return [*rejections, *notes_of(summary)]


def _sources_line(sources: object) -> str:
    """Say in a line where the times of steps come from. `--list` and --json have more."""
    assert isinstance(sources, dict)
    words = []
    if "machines" in sources:
        machines, corrections = (
            " and ".join(source.partition(";")[0] for source in sources[kind].values())
            for kind in ("machines", "corrections")
        )
        words.append(f"computed from {machines}, corrected by {corrections}")
    for path, each in sources.get("calibrations", {}).items():
        words.append(
            f"{path}, {each['measured']}; half are within {each['error']:.1%} of the prediction, "
            f"and 16 in a row take {each['low']:.2f} to {each['high']:.2f} of it"
        )
    return f"step times: {'; '.join(words)}"


def print_catalog(selection: Selection) -> None:
    """Print machines, their corrections, and models, with the sources of their numbers."""
    console = Console(width=WIDTH, highlight=False, markup=False)
    if selection.machines:
        _print_machines(console, selection.machines)
        _print_corrections(console, selection.corrections)
    if selection.models:
        _print_models(console, selection.models)


def _print_machines(console: Console, machines: Mapping[str, Machine]) -> None:
    table = _table("machine", *MACHINE_COLUMNS)
    for name, machine in machines.items():
        numbers = (
            machine.memory_gib,
            machine.bandwidth / 1e9,
            *(machine.flops.get(kind, 0) / 1e12 for kind in ("bf16", "fp8")),
            machine.node_bandwidth / 1e9,
            machine.between.bandwidth / 1e9,
            machine.host.bandwidth / 1e9,
            machine.devices,
            machine.price_per_hour,
        )
        table.add_row(name, *(_shown(each) if each else "" for each in numbers), machine.efficiency)
    console.print(table, MACHINE_UNITS)
    for name, machine in machines.items():
        links = machine.inside, machine.between, machine.host
        price = machine.price_source and f"; price: {machine.price_source}"
        words = f"{name}: {', '.join(link.name for link in links)}; {machine.source}{price}"
        console.print(words)


def _print_corrections(console: Console, corrections: Mapping[str, Efficiency]) -> None:
    table = _table("correction", *corrections)
    for field in Efficiency.__struct_fields__[1:]:
        values = (getattr(each, field) for each in corrections.values())
        table.add_row(field, *map(_shown, values))
    console.print("", table, CORRECTION_UNITS)
    for name, correction in corrections.items():
        console.print(f"{name}: {correction.source}")


def _print_models(console: Console, models: Mapping[str, ModelShape]) -> None:
    table = _table("model", *MODEL_COLUMNS)
    for name, model in models.items():
        moe = model.config.moe
        cells = [
            model.num_parameters / 1e9,
            model.bytes_per_weight,
            model.kv_bytes_per_token(),
            model.config.num_layers,
            f"{moe.top_k}/{moe.num_experts}" if moe else "",
            model.config.max_position_embeddings,
            model.source.removeprefix("huggingface.co/"),
        ]
        table.add_row(name, *map(_shown, cells))
    console.print("", table, MODEL_UNITS)


def _table(*columns: str) -> Table:
    """Return a table whose cells are never shortened, with numbers on the right."""
    first, *others = columns
    left = {"corrections", "source"}
    return Table(
        Column(first, overflow="fold"),
        *(
            Column(name, overflow="fold", justify="left" if name in left else "right")
            for name in others
        ),
    )


def print_sweep(points: Sequence[Mapping[str, object]], summaries: Sequence[Summary]) -> None:
    """Print the engines and their sources, a table with a row per point, where a star marks the
    frontier, notes, and the points that are impossible."""
    rows = [_sweep_row(summary) for summary in summaries]
    columns = [
        name
        for name in SWEEP_COLUMNS
        if any(row.get(name) if name in RARE_COLUMNS else name in row for row in rows)
    ]
    names = (name.replace("_", " ") for name in points[0])
    table = Table(*names, *(SWEEP_COLUMNS[name] for name in columns), "")
    console = Console(width=WIDTH, highlight=False, markup=False)
    # The places of each note.
    notes: dict[str, list[str]] = {}
    for point, summary, row in zip(points, summaries, rows, strict=True):
        is_possible = "error" not in summary
        for note in _notes(summary) if is_possible else [str(summary["error"])]:
            notes.setdefault(note, []).append(_shown(dict(point)))
        if not is_possible:
            continue
        cells = (_shown(row.get(name, "")) for name in columns)
        table.add_row(*map(_shown, point.values()), *cells, "*" * bool(summary["on_frontier"]))
    possible = [summary for summary in summaries if "error" not in summary]
    _print_once(console, [str(summary["setup"]) for summary in possible])
    _print_once(console, [_sources_line(summary["sources"]) for summary in possible])
    console.print(table)
    for note, places in notes.items():
        for place in [f"{place}: " for place in places] if len(places) < len(points) else [""]:
            console.print(f"{place}{note}", soft_wrap=True)


def _print_once(console: Console, lines: Sequence[str]) -> None:
    """Print each of the first lines that differ."""
    different = list(dict.fromkeys(lines))
    if (num_more := len(different) - MAX_SETUPS) > 0:
        different[MAX_SETUPS:] = [f"{num_more:,} more such lines are in the output of --json"]
    for line in different:
        console.print(line, soft_wrap=True)


def _sweep_row(summary: Summary) -> Summary:
    """Return what a row shows: "-" as a time that no request has, and numbers of requests."""
    if "error" in summary:
        return {}
    missing = {name: "-" for name in ("p99_ttft_ms", "p99_tpot_ms") if not summary[name]}
    return {"num_cut": 0, **summary, "num_lost": num_lost(summary), **missing}


def print_comparison(comparison: Summary) -> None:
    """Print how a replay by time (`by_time.replay_by_time`) differs from the recorded run."""
    names = ("recorded", "replayed", "difference")
    table = Table("", *(Column(name, justify="right") for name in names))
    recorded = comparison.pop("recorded")
    replayed = comparison.pop("replayed")
    assert isinstance(recorded, dict) and isinstance(replayed, dict)
    for name, value in recorded.items():
        change = f"{replayed[name] / value - 1:+.2%}" if value else ""
        table.add_row(name.replace("_", " "), _shown(value), _shown(replayed[name]), change)
    Console(width=WIDTH, highlight=False, markup=False).print(
        _shown(comparison).replace("_", " "), table
    )


def _outage(outage: Mapping[str, float | None]) -> str:
    """Say from when to when an engine was not ready."""
    begin, end = outage.values()
    return f"from {_shown(begin)}" if end is None else f"{_shown(begin)} to {_shown(end)}"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:,.0f}" if is_number else str(value)
