"""The parts of `bench gpu`, and the goals, which were set for an H200."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nanovllm.lab.bench.machine import usable_cores
from nanovllm.lab.bench.parts import Part
from nanovllm.lab.bench.report import Row, goal

_HERE = "nanovllm.lab.bench.gpu."
DECODE = "Decode attention, 32/8 heads of 128, bf16, blocks of 16"
LATENT = "Latent decode, absorbed, latents of 512 + 64, bf16, blocks of 16"
PREFILL = "Prefill attention, the same shape, causal FLOPs"
MODELS = "Whole models of random weights"
STEP = "Where the time of a decode step goes, under torch's profiler"
OURS, FLASH, GRAPHS = "nanovllm", "SDPA flash", "nanovllm, graphs"

#: What is wanted of the worst row: figure, unit, goal, table, column, and the rows that count.
GOALS: list[tuple[str, str, dict[str, float], str, str, Callable[[Row], bool]]] = [
    (
        "decode attention from 64 × 8k up, of copy bandwidth", "%", {"at_least": 85}, DECODE, "% of copy",
        lambda row: row["sequences"] >= 64 and row["context"] >= 8192,
    ),
    (
        "latent decode, 16 heads, from 64 × 8k up, of copy bandwidth", "%", {"at_least": 80}, LATENT, "% of copy",
        lambda row: row["heads"] == 16 and row["sequences"] >= 64 and row["context"] >= 8192,
    ),
    (
        "prefill attention of 8k, of the bf16 matrix peak", "%", {"at_least": 60}, PREFILL, "% of peak",
        lambda row: (row["implementation"], row["new tokens"], row["before them"]) == (OURS, 8192, 0),
    ),
    (
        "prefill attention: time of torch's flash SDPA over nanovllm's", "×", {"at_least": 1 / 1.1}, PREFILL, "÷ nanovllm",
        lambda row: row["implementation"] == FLASH,
    ),
    (
        "8B shape, decode step of one stream, of the weight-bandwidth limit", "%", {"at_least": 85}, MODELS,
        "% of weight bandwidth",
        lambda row: (row["shape"], row["engine"], row["workload"]) == ("Llama-3.1-8B", GRAPHS, "W1"),
    ),
    (
        "1B shape, 256 requests, of the roofline", "%", {"at_least": 60}, MODELS, "% of roofline",
        lambda row: (row["shape"], row["engine"], row["workload"]) == ("Llama-3.2-1B", GRAPHS, "256 requests"),
    ),
    (
        "host gap in a decode step, with graphs", "%", {"at_most": 5}, STEP, "host gap %",
        lambda row: row["engine"] == GRAPHS,
    ),
]  # fmt: skip


def goals(rows: Sequence[Row]) -> Iterator[Row]:
    """The goals, with the worst of the rows that count."""
    for figure, unit, wanted, table, column, counts in GOALS:
        values = [row[column] for row in rows if row["table"] == table and row.get(column) is not None and counts(row)]
        worst: Any = min if "at_least" in wanted else max
        yield goal(figure, worst(values, default=None), unit, **wanted)


def plan(dry_run: bool) -> list[Part]:
    """All parts, in order: proofs first, then measurements, then comparisons."""
    # The kernels' proofs spend most of their time in the compiler; two more parts run beside them.
    shares = 1 if dry_run else max(1, min(10, len(usable_cores())) - 2)
    small, large = "Llama-3.2-1B", "Llama-3.1-8B"
    parts: list[tuple[str, str, tuple[str, ...], float]] = [
        *(
            (f"kernels {i + 1}/{shares}", "proofs:prove", ("test_kernels.py", f"{i}/{shares}"), 150)
            for i in range(shares)
        ),
        ("compute-sanitizer", "proofs:prove", ("test_sanitizer.py",), 120),
        ("greedy tokens", "proofs:prove", ("test_tokens.py",), 120),
        ("two GPUs, greedy tokens", "proofs:prove", ("test_divided.py",), 180),
        ("decode attention", "attention:decode", (), 60),
        ("latent attention", "attention:latent", (), 60),
        ("prefill attention", "attention:prefill", (), 90),
        ("two GPUs, NCCL", "nccl:nccl", (), 180),
        (f"{small}, graphs", "end_to_end:engine", (small, "graphs"), 75),
        (f"{large}, graphs", "end_to_end:engine", (large, "graphs"), 110),
        (f"{small}, eager", "end_to_end:engine", (small, "eager"), 75),
        (f"{large}, eager", "end_to_end:engine", (large, "eager", "stream"), 45),
        (f"{small}, transformers", "hugging_face:transformers", (small,), 75),
        (f"{large}, transformers", "hugging_face:transformers", (large,), 75),
    ]
    if dry_run:  # all shapes are the same tiny one
        parts = [part for part in parts if large not in part[2]]
    # The ceilings come first, because later parts compare with them. A dry run measures nothing, so all else runs at once.
    return [Part("the machine", _HERE + "machine:machine", (), 60)] + [
        Part(title, _HERE + function, arguments, seconds, not dry_run and function != "proofs:prove")
        for title, function, arguments, seconds in parts
    ]
