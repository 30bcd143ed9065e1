"""The parts of `bench gpu`, and its goals: both are in plan.toml."""

import pathlib
import tomllib
from collections.abc import Iterator, Sequence
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
OURS = "nanovllm"
GRAPHS = "nanovllm, graphs"

_TABLES = {"decode": DECODE, "latent": LATENT, "prefill": PREFILL, "models": MODELS, "step": STEP}
_PLAN = tomllib.loads(pathlib.Path(__file__).with_name("plan.toml").read_text(encoding="utf-8"))


def goals(rows: Sequence[Row]) -> Iterator[Row]:
    """The goals, with the worst of the rows that count."""
    for wish in _PLAN["goals"]:
        equal = wish.get("cells", {}).items()
        least = wish.get("from", {}).items()
        column = wish["column"]
        found = [
            row
            for row in rows
            if row["table"] == _TABLES[wish["table"]] and row.get(column) is not None
        ]
        found = [
            r
            for r in found
            if all(r[n] == cell for n, cell in equal) and all(r[n] >= cell for n, cell in least)
        ]
        worst: Any = min if "at_least" in wish["wanted"] else max
        yield goal(
            wish["figure"],
            worst((row[column] for row in found), default=None),
            wish["unit"],
            **wish["wanted"],
        )


def plan(dry_run: bool) -> list[Part]:
    """All parts, in order."""
    # The ceilings come first, because later parts compare with them. A dry run measures nothing, so
    # all else runs at once, and all shapes are the same tiny one.
    parts = [Part("the machine", _HERE + "machine:machine", (), 60)]
    # Two more parts run at the same time as the kernels' tests.
    shares = 1 if dry_run else max(1, min(10, len(usable_cores())) - 2)
    for part in _PLAN["parts"]:
        words = part.get("arguments", [])
        proves = part["function"] == "proofs:prove"
        if part["title"] == "kernels":
            divided = [
                (f"kernels {i + 1}/{shares}", [*words, f"{i}/{shares}"]) for i in range(shares)
            ]
        else:
            divided = [(part["title"], words)] * (not dry_run or "Llama-3.1-8B" not in words)
        parts += [
            Part(
                title=title,
                function=_HERE + part["function"],
                arguments=tuple(arguments),
                seconds=part["seconds"],
                alone=not dry_run and not proves,
            )
            for title, arguments in divided
        ]
    return parts
