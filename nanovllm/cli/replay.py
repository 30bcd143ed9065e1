"""`nanovllm replay`: show a recorded trace in the browser. Needs no model, and does not import
torch."""

import argparse
import asyncio

from nanovllm.assembly.flags import add_flags, read_flags
from nanovllm.cli.trace import add_file_arguments, mistakes
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.server.access import Access, url_of
from nanovllm.trace.format import header_line, require_sizes
from nanovllm.trace.trace import read_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    add_file_arguments(parser)
    add_flags(Access, parser)


def run(arguments: argparse.Namespace) -> None:
    """Serve the page on a recorded trace until a signal comes.

    Raises:
        UsageError: a file that cannot be used.
    """
    listener, access = read_flags(Access, arguments).listen()
    with mistakes(arguments.trace):
        settings, lines, records = read_trace(arguments.trace, arguments.partial)
        require_sizes(settings, arguments.trace)
        # Every line is checked, but no record is kept in memory.
        steps = [record.step for record in records]
    from nanovllm.server.page import create_replay
    from nanovllm.server.signalled import SignalledServer

    app = create_replay(header_line(settings | TraceSettings(live=False)), lines, access)
    what = f"steps {steps[0]:,} to {steps[-1]:,}" if steps else "a record without steps"
    server = SignalledServer(
        app,
        f"{arguments.trace}: watch {what} at {url_of(listener)}/ (Ctrl-C ends this)",
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    asyncio.run(server.serve([listener]))
