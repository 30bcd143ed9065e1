"""The results as tables for a terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from nanovllm.lab.bench.gpu.results import OTHERS, OURS, Results
from nanovllm.lab.bench.report import Table

DRY_RUN = "DRY RUN ON A CPU WITH TINY SIZES: NOT A MEASUREMENT"


def number(value: float | None, factor: float = 1.0) -> str:
    """Three digits, or a dash for nothing."""
    if value is None:
        return "–"
    value *= factor
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def tables(results: Results) -> list[Table]:
    """The tables that have rows."""
    found = [_targets(results), _parts(results), _decode(results), _latent(results), _prefill(results)]
    found += [_collectives(results), _end_to_end(results), _split(results), _checks(results)]
    return [table for table in found if table.rows]


def _targets(results: Results) -> Table:
    words = {None: "dry run" if results.dry_run else "not measured", True: "yes", False: "no"}
    rows = [[t.metric, t.goal, number(t.measured), words[t.reached]] for t in results.targets()]
    return Table("Targets, set for an H200", ["metric", "goal", "measured", "reached"], rows, num_labels=1)


def _parts(results: Results) -> Table:
    rows = [[o.title, o.status, o.reason, f"{o.seconds:.0f}"] for o in results.outcomes]
    return Table("Parts", ["part", "status", "why", "s"], rows, num_labels=3)


def _decode(results: Results) -> Table:
    rows = []
    for row in results.rows("decode"):
        rate = row["num_bytes"] / row["seconds"] if "seconds" in row else None
        cells = [str(row["batch"]), str(row["context"]), number(row.get("seconds"), 1e6), number(rate, 1e-9)]
        rows.append([*cells, number(row.get("percent_of_copy")), row.get("reason", "")])
    columns = ["sequences", "context", "µs", "GB/s", "% of copy", ""]
    return Table("Decode attention, 32/8 heads of 128, bf16, blocks of 16", columns, rows, num_labels=0)


def _latent(results: Results) -> Table:
    rows = []
    for row in results.rows("latent"):
        rate, speed = (row[name] / row["seconds"] if "seconds" in row else None for name in ("num_bytes", "flops"))
        cells = [*(str(row[name]) for name in ("heads", "batch", "context")), number(row.get("seconds"), 1e6)]
        cells += [number(rate, 1e-9), number(row.get("percent_of_copy"))]
        rows.append([*cells, number(speed, 1e-12), number(row.get("percent_of_peak")), row.get("reason", "")])
    columns = ["heads", "sequences", "context", "µs", "GB/s", "% of copy", "TFLOP/s", "% of peak", ""]
    return Table("Latent decode, absorbed, latents of 512 + 64, bf16, blocks of 16", columns, rows, num_labels=0)


def _prefill(results: Results) -> Table:
    ratios = {other: results.prefill_ratios(other) for other in OTHERS}
    missing = {
        (row["implementation"], row["query_len"], row["context"]): row["reason"]
        for row in results.rows("prefill")
        if "reason" in row
    }
    rows = []
    for row in results.rows("prefill"):
        if row["implementation"] == OURS:
            key = (row["query_len"], row["context"])
            cells = [*map(str, key), number(row["seconds"], 1e3), number(row["flops"] / row["seconds"], 1e-12)]
            cells += [number(row.get("percent_of_peak"))]
            rows.append(cells + [number(ratios[other].get(key)) for other in OTHERS])
            reasons = [f"{o}: {missing[o, *key][:80]}" for o in OTHERS if (o, *key) in missing]
            rows[-1].append("; ".join(reasons))
    columns = ["new tokens", "before them", "ms", "TFLOP/s", "% of peak", *(f"{o} ÷" for o in OTHERS), ""]
    title = "Prefill attention, the same shape, causal FLOPs; then the others' time over nanovllm's"
    return Table(title, columns, rows, num_labels=0)


def _collectives(results: Results) -> Table:
    rows = []
    for row in results.rows("collectives"):
        cells = [row["operation"], str(row["num_bytes"]), number(row["seconds"], 1e6)]
        cells += [number(row["bus_bytes"] / row["seconds"], 1e-9)]
        for name in ("predicted_seconds", "fitted_seconds"):
            seconds = row.get(name)
            cells += [number(seconds, 1e6), number(seconds and seconds / row["seconds"])]
        rows.append(cells)
    columns = ["operation", "bytes a rank", "µs", "GB/s sent"]
    columns += ["data sheet: µs", "÷ measured", "best fit: µs", "÷ measured"]
    title = "Collectives on 2 GPUs, and what the cost model says of the link"
    return Table(title, columns, rows, num_labels=1)


def _end_to_end(results: Results) -> Table:
    rows = []
    for row in results.rows("end_to_end"):
        names = ("tokens_per_second", "percent_of_roofline")
        cells = [row["shape"], row["workload"], row["engine"], *(number(row.get(name)) for name in names)]
        cells += [number(row.get("step_seconds"), 1e3), number(row.get("percent_of_weight_bandwidth"))]
        rows.append([*cells, number(results.end_to_end_ratio(row)), row.get("reason", "")])
    columns = ["shape", "workload", "engine", "tokens/s", "% of roofline", "step ms", "% of weight bandwidth"]
    title = "End to end, random weights, bf16; last, nanovllm with graphs over this engine"
    return Table(title, [*columns, "ratio", ""], rows, num_labels=3)


def _split(results: Results) -> Table:
    found = results.rows("step_split")
    kinds = list(found[0]["shares"]) if found else []
    rows = []
    for row in found:
        shares = [*(row["shares"][kind] for kind in kinds), row["launch_gaps"], row["host_gaps"]]
        cells = [row["shape"], row["engine"], row["workload"], str(row["running"])]
        cells.append(number(row["seconds"] / row["steps"], 1e3))
        rows.append(cells + [number(share, 100) for share in shares])
    columns = [
        "shape",
        "engine",
        "workload",
        "running",
        "step ms",
        *(f"{kind} %" for kind in kinds),
        "between kernels %",
        "host gap %",
    ]
    title = "Where the time of a decode step goes, under torch's profiler"
    return Table(title, columns, rows, num_labels=3)


def _checks(results: Results) -> Table:
    words = {None: "skipped", True: "yes", False: "NO"}
    rows = [
        [row["name"], words[row["passed"]], number(row.get("error")), number(row.get("tolerance")), row.get("reason", "")]
        for row in results.rows("checks")
    ]  # fmt: skip
    columns = ["check", "passed", "error", "allowed", ""]
    return Table("Right or wrong: kernels against float64, tokens in float32", columns, rows, num_labels=2)


def lines(results: Results) -> list[str]:
    """What was run where, one fact a line."""
    facts = ", ".join(f"{row['name']} {row['value']}" for row in results.rows("facts"))
    found = [DRY_RUN] if results.dry_run else []
    found.append(f"{results.context['date']}, {results.context['seconds'] / 60:.1f} minutes")
    found += [facts] if facts else []
    if {"bytes_per_second", "flops_per_second"} <= results.limits.keys():
        found.append(
            f"measured ceilings: {results.limits['bytes_per_second'] / 1e9:.0f} GB/s of copying (read and written), "
            f"{results.limits['flops_per_second'] / 1e12:.3g} TFLOP/s in bfloat16"
        )
    return found


def markdown(results: Results) -> str:
    """The results as a Markdown document."""
    parts = [f"    {results.context['command']}", "\n".join(f"- {line}" for line in lines(results))]
    for table in tables(results):
        rule = [":---" if index < table.num_labels else "---:" for index in range(len(table.columns))]
        rows = [[cell.replace("|", "/") for cell in row] for row in table.rows]
        text = ["| " + " | ".join(row) + " |" for row in (table.columns, rule, *rows)]
        parts.append(f"**{table.title}**\n\n" + "\n".join(text))
    return "\n\n".join(parts) + "\n"


def as_json(results: Results) -> str:
    """Everything as JSON."""
    names = ("facts", "limits", "checks", "decode", "latent", "prefill", "collectives", "end_to_end", "step_split")
    found = {"dry_run": results.dry_run, "context": results.context, "failed": results.failed}
    found |= {"targets": [asdict(target) for target in results.targets()]}
    found |= {"parts": [{k: v for k, v in asdict(o).items() if k != "rows"} for o in results.outcomes]}
    found |= {name: [{k: v for k, v in r.items() if k != "table"} for r in results.rows(name)] for name in names}
    found["prefill_ratios"] = [
        {"against": other, "query_len": key[0], "context": key[1], "ratio": ratio}
        for other in OTHERS
        for key, ratio in results.prefill_ratios(other).items()
    ]
    found["end_to_end_ratios"] = [
        {name: row[name] for name in ("shape", "workload", "engine")} | {"ratio": ratio}
        for row in results.rows("end_to_end")
        if (ratio := results.end_to_end_ratio(row)) is not None
    ]
    return json.dumps(found, indent=1, allow_nan=False) + "\n"
