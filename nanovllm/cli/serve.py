"""`nanovllm serve`: a server for one model; or, with --prefill N --decode M, several servers and a
router."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nanovllm.assembly.flags import add_flags, read_flags
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.cli import doors, vllm_flags
from nanovllm.data.checks import Count, Keywords
from nanovllm.data.config import COURSE_MODEL, EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.server.access import LIMITS, Access, api_keys, is_loopback

if TYPE_CHECKING:
    from nanovllm.engine.async_engine import AsyncEngine
    from nanovllm.server.parts import ServerParts

# When the engine dies, the server still answers requests for this time.
LAST_ANSWER_SECONDS = 0.5
LOG_INTERVAL = "VLLM_LOG_STATS_INTERVAL"
# Of `max_step_ms`: while prompts are computed, each stream still gets some five tokens per second,
# about as fast as people read.
STEP_MS = 200


@dataclass
class ServeFlags(Keywords):
    """Flags of this command alone.

    Attributes:
        api_key: a key that clients must send as 'Authorization: Bearer KEY'; may be repeated. The
            environment variable NANOVLLM_API_KEY (keys separated by commas) or VLLM_API_KEY (one
            key) does the same, invisible to ps. No key is needed for /, /web/, /docs,
            /openapi.json, /health, /metrics and /version. With several keys, each gets an equal
            share of the queue slots: --max-num-waiting divided by the number of keys
        show_text: show the prompts and outputs of all requests to every reader of GET / and /trace
        strict: reject requests with unknown fields (default: ignore the fields and warn)
        exit_with_stdin: exit when standard input is closed, for example when the parent process
            exits, and when the engine dies (default: answer 503 until stopped)
        demo: make the page send bursts of requests as soon as it is opened
        metrics_prefix: prefix of the metric names at /metrics (vllm: the names that vLLM's routers
            and dashboards read)
        prefill: number of prefill servers to start on this machine, with a router in front of all
            servers
        decode: number of decode servers to start
    """

    api_key: Sequence[str] = ()
    show_text: bool = False
    strict: bool = False
    exit_with_stdin: bool = False
    demo: bool = False
    metrics_prefix: Literal["vllm", "nanovllm"] = "vllm"
    prefill: Count = 0
    decode: Count = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="the same as --model")
    group = parser.add_argument_group("server", LIMITS)
    add_flags(Access, group)
    add_flags(ServeFlags, group)
    router_flags = doors.router_flags()
    if router_flags is not None:
        group = parser.add_argument_group("router", "with --prefill and --decode")
        add_flags(router_flags, group)
    add_flags(EngineConfig, parser.add_argument_group("engine"))
    vllm_flags.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes. Under torchrun only rank 0 listens; the other ranks compute for
    it, and end with it."""
    from nanovllm.assembly.executor import follow_rank_0

    ignored = vllm_flags.answer(arguments.vllm_flags)
    config = read_flags(EngineConfig, arguments)
    try:
        follow_rank_0(config)
    except ValueError as error:
        raise UsageError(str(error)) from error
    arguments.api_key = api_keys(arguments.api_key)
    flags = read_flags(ServeFlags, arguments)
    if ignored:
        print(f"nanovllm serve: {ignored}", file=sys.stderr)
    seconds = 0.0 if config.disable_log_stats else log_interval()
    if flags.prefill or flags.decode:
        return doors.run_fleet(config, arguments)
    listener, access = read_flags(Access, arguments).listen(arguments.api_key)
    if flags.show_text and not access.api_keys and not is_loopback(listener):
        host = listener.getsockname()[0]
        print(
            "nanovllm serve: warning: --show-text without --api-key: all who can reach "
            f"{host} can read all prompts and answers",
            file=sys.stderr,
        )
    # Until the server handles signals.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if config.model == COURSE_MODEL:
        # Before asyncio, which would wait for the import of the web framework in a thread, too.
        resolve_model(config.model, config.revision)
    asyncio.run(_serve(config, listener, access, flags, seconds))
    return 0


def log_interval() -> float:
    """Return the seconds between two lines of statistics in the log, which vLLM's environment
    variable sets.

    Raises:
        UsageError: it has no positive number.
    """
    text = os.environ.get(LOG_INTERVAL, "") or "10"
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise UsageError(f"{LOG_INTERVAL} must be a number of seconds above 0 such as 10, got {text!r}")


async def _serve(
    config: EngineConfig,
    listener: socket.socket,
    access: Access,
    flags: ServeFlags,
    log_seconds: float,
) -> None:
    from nanovllm.engine.async_engine import AsyncEngine
    from nanovllm.text.chat_template import PROCESS

    if flags.exit_with_stdin:  # the engine's process notices that its parent has ended
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), os._exit, 1)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("nanovllm").setLevel(logging.INFO)
    if config.max_step_ms is None and doors.can_limit_steps():
        config = dataclasses.replace(config, max_step_ms=STEP_MS)
    print(f"Starting {config.model}", flush=True)
    # While the engine's process imports torch and loads the weights, this process imports the web
    # framework, and the process that renders templates starts.
    parts, _, engine = await asyncio.gather(
        asyncio.to_thread(_import_server),
        asyncio.to_thread(PROCESS.start),
        AsyncEngine.start(config, flags.show_text),
    )
    if flags.exit_with_stdin:
        # The process that has started this server starts another one in its place; this one would
        # answer 503 for ever.
        _ending = asyncio.create_task(_end_with(engine))  # noqa: RUF006 (this frame refers to it)
    from nanovllm.server.app import run_server

    await run_server(
        engine,
        listener,
        access,
        demo=flags.demo,
        strict=flags.strict,
        metrics_prefix=flags.metrics_prefix,
        log_seconds=log_seconds,
        parts=parts,
    )


def _import_server() -> ServerParts:
    """Import the server; returns its parts."""
    import nanovllm.server.app  # noqa: F401

    return doors.server_parts()


async def _end_with(engine: AsyncEngine) -> None:
    await engine.died.wait()
    await asyncio.sleep(LAST_ANSWER_SECONDS)
    os._exit(1)
