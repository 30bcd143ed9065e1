"""`nanovllm trace` and `nanovllm replay`: what one can do with a recorded trace. Neither needs a model, nor imports torch."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import pathlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nanovllm.cli.main import UsageError, add_address_arguments, listen
from nanovllm.trace.format import header_line, require_sizes
from nanovllm.trace.metrics import percentile, request_metrics
from nanovllm.trace.trace import Trace, TraceError, check_lines

if TYPE_CHECKING:
    from rich.table import Table

# Those of `nanovllm.lab.viz.animation.animate`, the default first; said here because that needs matplotlib.
VIEWS = ("tables", "pool", "scheduler", "timeline", "attention", "batch")


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Which trace."""
    parser.add_argument("trace", type=pathlib.Path, help="a file that `nanovllm serve --trace FILE` wrote")
    parser.add_argument("--partial", action="store_true", help="of a file that was cut off, take the whole steps")


@contextlib.contextmanager
def mistakes(path: pathlib.Path) -> Iterator[None]:
    """A file that cannot be used is the user's to mend.

    Args:
        path: the file, which not every error names.

    Raises:
        UsageError: names the file, and what is wrong with it.
    """
    try:
        yield
    except TraceError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error.filename or path}: {error.strerror or error}") from error


# ---------------------------------------------------------------- trace


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `trace`."""
    add_file_arguments(parser)
    parser.add_argument("--perfetto", type=pathlib.Path, metavar="FILE", help="write it for https://ui.perfetto.dev")
    parser.add_argument("--gif", type=pathlib.Path, metavar="FILE", help="write an animation")
    parser.add_argument(
        "--view", choices=VIEWS, help=f"what the animation shows: {', '.join(VIEWS)} (default: {VIEWS[0]})"
    )
    parser.add_argument(
        "--steps", type=step_range, metavar="A:B", help="which steps it shows: from A to B - 1 (default: the first 60)"
    )


def step_range(text: str) -> tuple[int, int | None]:
    """ "10:20" -> (10, 20); either number may be missing.

    Raises:
        argparse.ArgumentTypeError: not a range, or an empty one.
    """
    match = re.fullmatch(r"([0-9]*):([0-9]*)", text)
    begin, end = (int(match[1] or 0), int(match[2]) if match[2] else None) if match else (0, 0)
    if end is not None and begin >= end:
        raise argparse.ArgumentTypeError(f"must be two step numbers such as 10:20, 10: or :20, got {text!r}")
    return begin, end


def run_trace(arguments: argparse.Namespace) -> int:
    """Convert a trace, or print its summary.

    Raises:
        UsageError: flags that do not go together, or a file that cannot be used.
    """
    if arguments.gif is None and (arguments.view or arguments.steps):
        raise UsageError("--view and --steps say what an animation shows: they need --gif FILE")
    with mistakes(arguments.trace):
        trace = Trace.load(arguments.trace, arguments.partial)
        if arguments.gif is not None:
            require_sizes(trace.settings, arguments.trace)
    if arguments.perfetto is not None:
        with mistakes(arguments.perfetto):
            trace.to_perfetto(arguments.perfetto)
        print(f"{arguments.perfetto}: open it in https://ui.perfetto.dev")
    if arguments.gif is not None:
        content = animation(trace, arguments.view or VIEWS[0], arguments.steps)
        with mistakes(arguments.gif):
            arguments.gif.write_bytes(content)
        print(f"{arguments.gif}: {len(content) / 1e6:.1f} MB")
    if arguments.perfetto is None and arguments.gif is None:
        from rich.console import Console

        Console().print(summary_table(trace, str(arguments.trace)))
    return 0


def animation(trace: Trace, view: str, steps: tuple[int, int | None] | None) -> bytes:
    """A GIF.

    Raises:
        UsageError: nothing can be drawn here, or there are no such steps.
    """
    try:
        from nanovllm.lab.viz.animation.animate import animate
    except ModuleNotFoundError as error:
        raise UsageError(
            f"pictures need {error.name}, which is not installed: pip install 'nanovllm[course]'"
        ) from error
    chosen = None
    if steps is not None:
        begin, end = steps
        chosen = [record.step for record in trace if record.step >= begin and (end is None or record.step < end)]
    try:
        return animate(trace, view, chosen)
    except ValueError as error:
        raise UsageError(str(error)) from error


def summary_table(trace: Trace, title: str) -> Table:
    """A trace in numbers, with a row for each."""
    from rich.table import Table

    table = Table(title=title, show_header=False)
    table.add_column("what", style="bold")
    table.add_column("value", justify="right")
    for name, value in summary(trace).items():
        table.add_row(name, value)
    return table


def summary(trace: Trace) -> dict[str, str]:
    """A trace in numbers, each with its unit: steps, requests, tokens, speed, waiting times, memory."""
    steps = [record for record in trace if record.requests]
    unit = trace.settings.get("time_unit", "s")
    begin = trace.steps[0].start if trace.steps else 0.0
    end = max((record.start + record.duration for record in trace), default=0.0)
    num_generated = sum(len(share.sampled) for record in steps for share in record.requests)
    queried, hit = _prefix_hits(trace)
    peak = max((1 - record.num_free_blocks / record.num_blocks for record in steps if record.num_blocks), default=0.0)
    ttft = [each["ttft"] for each in request_metrics(trace, "time").values() if each["ttft"] is not None]
    reasons: dict[str, str] = {request_id: r for record in trace for request_id, r in record.finished.items()}
    counts = [f"{list(reasons.values()).count(r)} {r}" for r in sorted(set(reasons.values()))]
    requests = {share.request_id for record in steps for share in record.requests}
    requests |= {request_id for record in trace for request_id in record.arrived}
    found = {
        "model": str(trace.settings.get("model", "?")),
        "steps": f"{len(steps):,}",
        "requests": f"{len(requests):,}",
        "ended": ", ".join(counts) or "none",
        "duration": f"{end - begin:,.3f} {unit}",
        "tokens computed": f"{sum(record.num_tokens for record in steps):,}",
        "tokens generated": f"{num_generated:,}",
        "generated per " + ("second" if unit == "s" else "unit"): (
            f"{num_generated / (end - begin):,.1f}" if end > begin else "-"
        ),
        "time to first token, p50": f"{percentile(ttft, 50):.3f} {unit}" if ttft else "-",
        "time to first token, p99": f"{percentile(ttft, 99):.3f} {unit}" if ttft else "-",
        "prompt tokens from the prefix cache": f"{hit:,} of {queried:,}"
        + (f" ({hit / queried:.0%})" if queried else ""),
        "preemptions": f"{sum(len(record.preempted) for record in trace):,}",
        "KV blocks held at most": f"{peak:.0%} of {trace.settings.get('num_blocks', '?')}",
    }
    return found


def _prefix_hits(trace: Trace) -> tuple[int, int]:
    """Tokens that were looked for in the prefix cache, and those that were found: at every admission, those after a
    preemption included, as the engine's own counters have it."""
    queried = hit = 0
    num_outputs: Counter[str] = Counter()
    for record in trace:
        for request_id in record.arrived:
            num_outputs[request_id] = 0
        for share in record.requests:
            if share.request_id in record.admitted:
                known = share.num_prompt_tokens + num_outputs[share.request_id]
                queried += max(known, share.start + share.num_tokens)  # its beginning may not be in the trace
                hit += record.admitted[share.request_id]
            num_outputs[share.request_id] += len(share.sampled)
    return queried, hit


# ---------------------------------------------------------------- replay


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `replay`."""
    add_file_arguments(parser)
    add_address_arguments(parser)


def run_replay(arguments: argparse.Namespace) -> int:
    """Serve the page on a recorded trace until a signal comes.

    Raises:
        UsageError: a file that cannot be used.
    """
    with mistakes(arguments.trace):
        settings, lines = check_lines(arguments.trace, arguments.partial)
    listener = listen(arguments)
    from nanovllm.server.access import Access
    from nanovllm.server.listen import url_of
    from nanovllm.server.page import ReplayServer, create_replay

    access = Access.from_arguments(arguments, listener)
    app = create_replay(header_line(settings | {"live": False}), lines, access)
    banner = f"{arguments.trace}: watch its {len(lines):,} records at {url_of(listener)}/ (Ctrl-C ends this)"
    asyncio.run(ReplayServer(app, banner).serve([listener]))
    return 0
