"""`nanovllm bench gpu`: what the command line asks for, from the parts to the tables."""

from __future__ import annotations

import argparse
import datetime
import pathlib
import signal
import sys
import time

import rich.console
import rich.table

from nanovllm.lab.bench.gpu import report
from nanovllm.lab.bench.gpu.parts import Runner, plan
from nanovllm.lab.bench.gpu.results import Results


def why_no_gpu() -> str | None:
    """What stands in the way of a measurement; None if nothing does."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA: install a build for CUDA"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    return None


def run(arguments: argparse.Namespace, command: str) -> int:
    """Prove and measure; returns the exit code: 1 if a part or a check failed."""
    begin = time.perf_counter()
    runner = Runner(arguments.dry_run, begin + 60 * arguments.minutes, lambda line: print(line, file=sys.stderr))
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        outcomes = runner.run(plan(arguments.dry_run))
    finally:
        signal.signal(signal.SIGTERM, previous)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    context = {"command": command, "date": date, "seconds": time.perf_counter() - begin}
    results = Results(outcomes, context, arguments.dry_run)
    console = rich.console.Console(width=None if sys.stdout.isatty() else 160)
    for table in report.tables(results):
        shown = rich.table.Table(title=table.title, title_justify="left")
        for index, column in enumerate(table.columns):
            shown.add_column(column, justify="left" if index < table.num_labels else "right")
        for row in table.rows:
            shown.add_row(*row)
        console.print(shown)
    for line in report.lines(results):
        console.print(line, highlight=False, markup=False)
    for path, write in ((arguments.json, report.as_json), (arguments.markdown, report.markdown)):
        if path is not None:
            pathlib.Path(path).write_text(write(results), encoding="utf-8")
    return int(results.failed)
