"""`nanovllm trace`: sum up a recorded trace, or convert it. Needs no model, and does not import
torch."""

import argparse
import contextlib
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from nanovllm.cli import doors
from nanovllm.data.disk import writing
from nanovllm.data.errors import UsageError
from nanovllm.trace.format import require_sizes
from nanovllm.trace.trace import Trace

# The keys of `nanovllm.lab.viz.film.VIEWS`, the default first; repeated here because that module
# needs matplotlib.
VIEWS = ("tables", "pool", "scheduler", "timeline", "attention", "batch")


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that name a trace."""
    parser.add_argument(
        "trace", type=pathlib.Path, help="a file that `nanovllm serve --trace FILE` wrote"
    )
    parser.add_argument(
        "--partial", action="store_true", help="read the complete steps of a truncated file"
    )


@contextlib.contextmanager
def mistakes(path: pathlib.Path) -> Iterator[None]:
    """Turn errors of a file into errors of the command line.

    Args:
        path: the file, for errors that do not name it.

    Raises:
        UsageError: names the file, and what is wrong with it.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename or path}: {error.strerror or error}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    add_file_arguments(parser)
    parser.add_argument(
        "--perfetto",
        type=pathlib.Path,
        metavar="FILE",
        help="write a file for https://ui.perfetto.dev",
    )
    parser.add_argument("--gif", type=gif_file, metavar="FILE.gif", help="write an animation")
    parser.add_argument(
        "--view", choices=VIEWS, help=f"view that the animation shows (default: {VIEWS[0]})"
    )
    parser.add_argument(
        "--steps",
        type=step_range,
        metavar="A:B",
        help="steps that the animation shows: A to B - 1 (default: the first 60)",
    )


def gif_file(text: str) -> pathlib.Path:
    """The file of an animation.

    Raises:
        argparse.ArgumentTypeError: it is no GIF file, or its folder does not exist.
    """
    path = pathlib.Path(text)
    if path.suffix.lower() != ".gif":
        raise argparse.ArgumentTypeError(
            f"must end in .gif, the only format of animations, got {text!r}"
        )
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def step_range(text: str) -> range:
    """ "10:20" -> range(10, 20); either number may be missing.

    Raises:
        argparse.ArgumentTypeError: not a range, or an empty one.
    """
    match = re.fullmatch(r"([0-9]*):([0-9]*)", text)
    steps = range(int(match[1] or 0), int(match[2] or sys.maxsize)) if match else range(0)
    if not steps:
        raise argparse.ArgumentTypeError(
            f"must be two step numbers such as 10:20, 10: or :20, got {text!r}"
        )
    return steps


def run(arguments: argparse.Namespace) -> None:
    """Convert a trace, or print its summary.

    Raises:
        UsageError: flags that do not go together, or a file that cannot be used.
    """
    if arguments.gif is None and (arguments.view or arguments.steps):
        raise UsageError("--view and --steps apply to animations: add --gif FILE")
    with mistakes(arguments.trace):
        trace = Trace.load(arguments.trace, arguments.partial)
        if arguments.gif is not None:
            require_sizes(trace.settings, arguments.trace)
    if arguments.perfetto is not None:
        with writing(arguments.perfetto):
            trace.to_perfetto(arguments.perfetto)
        print(f"{arguments.perfetto}: open it in https://ui.perfetto.dev")
    if arguments.gif is not None:
        content = animation(trace, arguments.view or VIEWS[0], arguments.steps)
        with writing(arguments.gif):
            arguments.gif.write_bytes(content)
        print(f"{arguments.gif}: {len(content) / 1e6:.1f} MB")
    if arguments.perfetto is None and arguments.gif is None:
        print_summary(trace, str(arguments.trace))


def animation(trace: Trace, view: str, steps: range | None) -> bytes:
    """A GIF.

    Raises:
        UsageError: a package or Chromium is missing, or there are no such steps.
    """
    from rich.console import Console
    from rich.progress import track

    chosen = None if steps is None else [record.step for record in trace if record.step in steps]
    progress = partial(track, description="Filming", console=Console(stderr=True), transient=True)
    try:
        return doors.animate(trace, view, chosen, progress)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"pictures need {error.name}: pip install 'nanovllm[course]' playwright"
        ) from error
    except (ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from error


def print_summary(trace: Trace, title: str) -> None:
    """Print a trace in numbers, one row for each."""
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(Column(style="bold"), Column(justify="right"), title=title, show_header=False)
    for row in summary(trace).items():
        table.add_row(*row)
    Console().print(table)


def summary(trace: Trace) -> dict[str, str]:
    """A trace in numbers, each with its unit: steps, requests, tokens, speed, waiting times,
    memory."""
    steps = [record for record in trace if record.requests]
    unit = trace.settings.time_unit
    begin = trace.steps[0].start if trace.steps else 0.0
    duration = max((record.start + record.duration for record in trace), default=0.0) - begin
    counted = _count(trace)
    ttft = counted.times_to_first_token
    num_generated = counted.num_outputs.total()
    held, pool = max(
        ((r.num_blocks - r.num_free_blocks, r.num_blocks) for r in steps), default=(0, 0)
    )
    ends = {
        request_id: reason for record in trace for request_id, reason in record.finished.items()
    }
    speed = f"{num_generated / duration:,.1f}" if duration > 0 else "-"
    # As the page shows them.
    numbers = f"{trace.steps[0].step:,} to {trace.steps[-1].step:,}" if len(trace) else "none"
    drafts = [share for record in steps for share in record.requests if share.num_drafts]
    num_drafts = sum(s.num_drafts for s in drafts)
    accepted = sum(s.num_accepted for s in drafts)
    length = f"{1 + accepted / max(1, len(drafts)):.2f} tokens per step"
    drafted = {"drafts accepted": f"{accepted:,} of {num_drafts:,} ({length})"} if drafts else {}
    ranks = {p: max(0, -(-len(ttft) * p // 100) - 1) for p in (50, 99)}
    times = {
        f"time to first token, p{p}": f"{ttft[i]:.3f} {unit}" if ttft else "-"
        for p, i in ranks.items()
    }
    return {
        "model": trace.settings.model or "?",
        "steps": f"{numbers} ({len(steps):,} compute)",
        "requests": f"{len(counted.num_outputs):,}",
        "ended": ", ".join(
            f"{number} {reason}" for reason, number in sorted(Counter(ends.values()).items())
        )
        or "none",
        "duration": f"{duration:,.3f} {unit}",
        "tokens computed": f"{sum(record.num_tokens for record in steps):,}",
        "tokens generated": f"{num_generated:,}",
        **drafted,
        f"generated per {'second' if unit == 's' else 'unit'}": speed,
        **times,
        "prompt tokens from the prefix cache": _share_of(counted.num_hit, counted.num_queried),
        "preemptions": f"{sum(len(record.preempted) for record in trace):,}",
        "KV blocks held at most": _share_of(held, pool),
    }


def _share_of(part: int, whole: int) -> str:
    """Both numbers, and the percentage if there is one."""
    return f"{part:,} of {whole:,}" + (f" ({part / whole:.0%})" if whole else "")


@dataclass(frozen=True)
class Counted:
    """Counts of the requests in a trace.

    Attributes:
        num_outputs: request id to the tokens that it has got.
        times_to_first_token: from each arrival in the trace, in ascending order.
        num_queried, num_hit: tokens that were looked up in the prefix cache, and found, at every
            admission. Like the engine's counters, these include admissions after a preemption.
    """

    num_outputs: Counter[str]
    times_to_first_token: list[float]
    num_queried: int
    num_hit: int


def _count(trace: Trace) -> Counted:
    """Count a trace's tokens, and measure its times to the first token."""
    num_outputs: Counter[str] = Counter()
    arrivals: dict[str, float] = {}
    ttft: list[float] = []
    queried = hit = 0
    for record in trace:
        arrivals |= dict.fromkeys(record.arrived, record.start)
        num_outputs.update(dict.fromkeys(record.arrived, 0))
        for share in record.requests:
            if share.request_id in record.admitted:
                known = share.num_prompt_tokens + num_outputs[share.request_id]
                # Its beginning may not be in the trace.
                queried += max(known, share.start + share.num_tokens)
                hit += record.admitted[share.request_id]
            if share.sampled and share.request_id in arrivals:
                ttft.append(record.start + record.duration - arrivals.pop(share.request_id))
            num_outputs[share.request_id] += len(share.sampled)
    return Counted(num_outputs, sorted(ttft), num_queried=queried, num_hit=hit)
