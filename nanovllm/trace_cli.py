"""`nanovllm trace` and `nanovllm replay`: what one can do with a recorded trace. Neither needs a model, nor imports torch."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nanovllm.cli import UsageError, add_address_arguments, listen
from nanovllm.trace import Trace, TraceError, check_lines
from nanovllm.trace_format import header_line

if TYPE_CHECKING:
    from rich.table import Table


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Which trace."""
    parser.add_argument("trace", type=pathlib.Path, help="a file that `nanovllm serve --trace FILE` wrote")
    parser.add_argument(
        "--partial", action="store_true", help="of a file that was cut off, take the whole steps"
    )


@contextlib.contextmanager
def mistakes() -> Iterator[None]:
    """A file that cannot be used is the user's to mend.

    Raises:
        UsageError: names the file, and what is wrong with it.
    """
    try:
        yield
    except TraceError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error


# ---------------------------------------------------------------- trace


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `trace`."""
    add_file_arguments(parser)
    parser.add_argument(
        "--perfetto", type=pathlib.Path, metavar="FILE", help="write it for https://ui.perfetto.dev"
    )
    parser.add_argument("--gif", type=pathlib.Path, metavar="FILE", help="write an animation")
    parser.add_argument(
        "--view",
        default="tables",
        help="what the animation shows: tables, pool, scheduler, timeline, attention or batch (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=step_range,
        metavar="A:B",
        help="which steps it shows: from A to B - 1 (default: the first)",
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
    """Convert a trace, or print its summary."""
    with mistakes():
        trace = Trace.load(arguments.trace, arguments.partial)
        if arguments.perfetto is not None:
            trace.to_perfetto(arguments.perfetto)
            print(f"{arguments.perfetto}: open it in https://ui.perfetto.dev")
        if arguments.gif is not None:
            content = animation(trace, arguments.view, arguments.steps)
            arguments.gif.write_bytes(content)
            print(f"{arguments.gif}: {len(content) / 1e6:.1f} MB")
    if arguments.perfetto is None and arguments.gif is None:
        from rich.console import Console

        Console().print(summary_table(trace, str(arguments.trace)))
    return 0


def animation(trace: Trace, view: str, steps: tuple[int, int | None] | None) -> bytes:
    """A GIF.

    Raises:
        UsageError: nothing can be drawn here, or there is no such view, or there are no such steps.
    """
    try:
        from nanovllm.viz.animation.animate import animate
    except ModuleNotFoundError as error:
        raise UsageError(
            f"pictures need {error.name}, which is not installed: pip install 'nanovllm[course]'"
        ) from error
    chosen = None
    if steps is not None:
        begin, end = steps
        chosen = [
            record.step for record in trace if record.step >= begin and (end is None or record.step < end)
        ]
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
    peak = max(
        (1 - record.num_free_blocks / record.num_blocks for record in steps if record.num_blocks), default=0.0
    )
    ttft = sorted(_first_token_times(trace).values())
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
        "time to first token, p50": f"{_percentile(ttft, 50):.3f} {unit}" if ttft else "-",
        "time to first token, p99": f"{_percentile(ttft, 99):.3f} {unit}" if ttft else "-",
        "prompt tokens from the prefix cache": f"{hit:,} of {queried:,}"
        + (f" ({hit / queried:.0%})" if queried else ""),
        "preemptions": f"{sum(len(record.preempted) for record in trace):,}",
        "KV blocks held at most": f"{peak:.0%} of {trace.settings.get('num_blocks', '?')}",
    }
    return found


def _prefix_hits(trace: Trace) -> tuple[int, int]:
    """Tokens that were looked for in the prefix cache when requests were admitted first, and those that were found."""
    queried = hit = 0
    seen: set[str] = set()
    for record in trace:
        seen -= record.arrived.keys()
        for share in record.requests:
            if share.request_id in record.admitted and share.request_id not in seen:
                seen.add(share.request_id)
                queried += share.num_prompt_tokens
                hit += record.admitted[share.request_id]
    return queried, hit


def _first_token_times(trace: Trace) -> dict[str, float]:
    """From the beginning of the first step after a request came to the end of the one that sampled its first token."""
    arrived: dict[str, float] = {}
    times: dict[str, float] = {}
    for record in trace:
        arrived |= dict.fromkeys(record.arrived, record.start)
        for share in record.requests:
            if share.sampled and share.request_id in arrived:
                end = record.start + record.duration
                times.setdefault(share.request_id, end - arrived[share.request_id])
    return times


def _percentile(ordered: list[float], percent: int) -> float:
    """The smallest value that at least `percent` % of the values do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


# ---------------------------------------------------------------- replay


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `replay`."""
    add_file_arguments(parser)
    add_address_arguments(parser)


def run_replay(arguments: argparse.Namespace) -> int:
    """Serve the page on a recorded trace until a signal comes."""
    with mistakes():
        settings, lines = check_lines(arguments.trace, arguments.partial)
    listener = listen(arguments)
    from nanovllm.server.listen import url_of
    from nanovllm.server.page import ReplayServer, create_replay

    app = create_replay(header_line(settings | {"live": False}), lines)
    banner = f"{arguments.trace}: watch its {len(lines):,} records at {url_of(listener)}/ (Ctrl-C ends this)"
    asyncio.run(ReplayServer(app, banner).serve([listener]))
    return 0
