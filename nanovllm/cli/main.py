"""The `nanovllm` command. What a command needs is imported when it runs, so that help and mistakes show at once."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import nanovllm
from nanovllm.data.config import COURSE_MODEL, EngineConfig
from nanovllm.data.parts import load
from nanovllm.server.access import LIMITS, OPEN_FOLDER, OPEN_PATHS, Access, add_access_arguments, api_keys
from nanovllm.server.listen import is_loopback

if TYPE_CHECKING:
    from nanovllm.engine.async_engine import AsyncEngine

# For those who still wait for an answer when the engine dies.
LAST_ANSWER_SECONDS = 0.5


@dataclass(frozen=True)
class Command:
    """A command: what it does in a line, and where to find the functions that declare its flags and that run it."""

    help: str
    add_arguments: str
    run: str

    def load(self, function: str) -> Callable[[Any], Any]:
        """Import "module:function"."""
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)

    @property
    def is_there(self) -> bool:
        """False for a command whose module is not part of this installation."""
        return importlib.util.find_spec(self.run.partition(":")[0]) is not None


COMMANDS = {
    "serve": Command(
        "serve a model through OpenAI's API", "nanovllm.cli.main:add_serve_arguments", "nanovllm.cli.main:run_serve"
    ),
    "router": Command(
        "divide requests among servers, which may prefill and decode in different places",
        "nanovllm.router.config:add_arguments",
        "nanovllm.router.run:run",
    ),
    "chat": Command("talk with a model in the terminal", "nanovllm.cli.chat:add_arguments", "nanovllm.cli.chat:run"),
    "trace": Command(
        "sum up a recorded trace, or convert it",
        "nanovllm.cli.trace:add_trace_arguments",
        "nanovllm.cli.trace:run_trace",
    ),
    "replay": Command(
        "show a recorded trace in the browser, to all who can reach the port",
        "nanovllm.cli.trace:add_replay_arguments",
        "nanovllm.cli.trace:run_replay",
    ),
    "fetch": Command("download a model", "nanovllm.cli.main:add_fetch_arguments", "nanovllm.cli.main:run_fetch"),
    "bench": Command("measure speed", "nanovllm.lab.bench:add_arguments", "nanovllm.lab.bench:run"),
    "kernels": Command(
        "show what the compiler makes of the GPU kernels",
        "nanovllm.lab.kernels:add_arguments",
        "nanovllm.lab.kernels:run",
    ),
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the full usage has forty flags and would hide it."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = {name: command for name, command in COMMANDS.items() if command.is_there}
    name = words[0] if words else ""
    if name not in commands:
        return _no_command(words, commands)
    command = commands[name]
    parser = Parser(prog=f"nanovllm {name}", description=command.help)
    command.load(command.add_arguments)(parser)
    parsed = parser.parse_args(words[1:])
    parsed.parser = parser  # for mistakes that show later
    try:
        return command.load(command.run)(parsed) or 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise  # a bug, and its traceback says where
        print(f"nanovllm {name}: error: {error}", file=sys.stderr)
        return code


def _no_command(words: list[str], commands: dict[str, Command]) -> int:
    parser = Parser(
        prog="nanovllm",
        description="An LLM inference engine that you can read.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:8}{c.help}" for name, c in commands.items()),
    )
    parser.add_argument("--version", action="version", version=nanovllm.__version__)
    parser.add_argument("command", choices=list(commands), metavar="command", help="what to do; see below")
    parser.parse_args(words)
    raise AssertionError("the parser has refused what is not a command")


def _exit_code(error: Exception) -> int | None:
    """2 for what the user can mend, 1 for an engine or a server that has failed, None for a bug."""
    from nanovllm.checkpoint.hub import ModelNotFoundError
    from nanovllm.engine.async_engine import EngineDeadError, EngineStartError

    if isinstance(error, EngineStartError | ModelNotFoundError | UsageError):
        return 2
    return 1 if isinstance(error, EngineDeadError | ServerError) else None


class UsageError(ValueError):
    """The command line asks for something that cannot be done."""


class ServerError(RuntimeError):
    """A server that we talk to has failed, or refuses."""


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's settings on a command line; a bad one ends the program with 2."""
    if arguments.model_argument is not None:
        arguments.model = arguments.model_argument
    try:
        return EngineConfig.from_arguments(arguments)
    except ValueError as error:
        return arguments.parser.error(str(error))


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Let the model be named without its flag."""
    parser.add_argument(
        "model_argument", nargs="?", metavar="model", help=f"the same as --model (default: {COURSE_MODEL})"
    )


# ---------------------------------------------------------------- serve


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `serve`."""
    add_model_argument(parser)
    group = parser.add_argument_group("server", LIMITS)
    add_address_arguments(group)
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that clients must send as 'Authorization: Bearer KEY'; may be repeated. The environment variable "
        "NANOVLLM_API_KEY (keys separated by commas) or VLLM_API_KEY (one key) does the same, unseen by ps. No key is needed for "
        f"{', '.join(sorted(OPEN_PATHS))} and {OPEN_FOLDER}. Of several keys, each has its share of the waiting places: "
        "--max-num-waiting divided by the number of keys",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may go on after the first signal (default: %(default)s)",
    )
    group.add_argument(
        "--show-text",
        action="store_true",
        help="let everybody who watches (GET / and /trace) read the prompts and answers of all requests",
    )
    group.add_argument(
        "--exit-with-stdin",
        action="store_true",
        help="end at once when standard input is closed, as by the end of the process that has started this one, and when the "
        "engine is dead (else the server answers 503 until it is ended)",
    )
    group = parser.add_argument_group(
        "prefill and decode", "start several servers on this machine, each for one of the two, and a router"
    )
    for name in ("prefill", "decode"):
        group.add_argument(
            f"--{name}", type=_count, default=0, metavar="N", help=f"servers that {name} (default: no such)"
        )
    from nanovllm.router.config import add_routing_arguments

    add_routing_arguments(group)
    EngineConfig.add_arguments(parser)


def add_address_arguments(parser: argparse._ActionsContainer) -> None:
    """Where to listen, and for whom."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="0: any free one (default: %(default)s)")
    add_access_arguments(parser)


def listen(arguments: argparse.Namespace) -> socket.socket:
    """A socket at the address on a command line.

    Raises:
        UsageError: it is taken, or not ours.
    """
    from nanovllm.server.listen import bind

    try:
        return bind(arguments.host, arguments.port)
    except OSError as error:
        raise UsageError(f"cannot listen on {arguments.host}:{arguments.port}: {error}") from error


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes. Under torchrun only rank 0 listens; the others compute for it, and end when it ends."""
    from nanovllm.executor.base import is_follower

    config = engine_config(arguments)
    if is_follower(config):
        _follow(config)
    arguments.api_key = keys_of(arguments, arguments.api_key)
    if arguments.prefill or arguments.decode:
        from nanovllm.router.fleet import run_fleet

        return run_fleet(config, arguments)
    listener = listen(arguments)
    if arguments.show_text and not arguments.api_key and not is_loopback(listener):
        host = listener.getsockname()[0]
        warning = f"--show-text without --api-key: all who can reach {host} can read all prompts and answers"
        print(f"nanovllm serve: warning: {warning}", file=sys.stderr)
    try:
        asyncio.run(_serve(config, listener, arguments))
    except asyncio.CancelledError:  # a signal came while the engine was starting
        return 128 + signal.SIGTERM
    return 0


def keys_of(arguments: argparse.Namespace, given: Sequence[str]) -> list[str]:
    """The API keys of a command line or of the environment; a bad one ends the program with 2."""
    try:
        return api_keys(given)
    except ValueError as error:
        return arguments.parser.error(str(error))


def _follow(config: EngineConfig) -> None:
    try:
        load("nanovllm.executor.torchrun:follow_to_the_end", "torchrun")(config)
    except ValueError as error:
        raise UsageError(str(error)) from error


async def _serve(config: EngineConfig, listener: socket.socket, arguments: argparse.Namespace) -> None:
    from nanovllm.engine.async_engine import AsyncEngine
    from nanovllm.text.chat_template import PROCESS

    this_task = asyncio.current_task()
    assert this_task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, this_task.cancel)
    if arguments.exit_with_stdin:  # the engine's process notices that its parent is gone
        loop.add_reader(sys.stdin.fileno(), os._exit, 1)
    # The web framework is imported here, and the process that renders templates starts, while the engine's process
    # imports torch and loads the weights.
    server, _, engine = await asyncio.gather(
        asyncio.to_thread(importlib.import_module, "nanovllm.server.run"),
        asyncio.to_thread(PROCESS.start),
        AsyncEngine.start(config, arguments.show_text),
    )
    # Who has started this server starts another one in its place; it would answer 503 for ever.
    ending = asyncio.create_task(_end_with(engine)) if arguments.exit_with_stdin else None
    name = config.served_model_name or config.model
    access = Access.from_arguments(arguments, listener, arguments.api_key)
    try:
        await server.run_server(engine, listener, name, access, arguments.shutdown_timeout)
    finally:
        if ending is not None:
            ending.cancel()


async def _end_with(engine: AsyncEngine) -> None:
    await engine.died.wait()
    await asyncio.sleep(LAST_ANSWER_SECONDS)
    os._exit(1)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a number of servers, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A flag's value: a time, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, 0 or more, got {text!r}")
    return value


def positive_seconds(text: str) -> float:
    """A flag's value: a time above 0."""
    if not seconds(text):
        raise argparse.ArgumentTypeError(f"must be above 0 seconds, got {text!r}")
    return seconds(text)


# ---------------------------------------------------------------- fetch


def add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `fetch`."""
    add_model_argument(parser)
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")


def run_fetch(arguments: argparse.Namespace) -> int:
    """Download a model, and print where it is."""
    from nanovllm.checkpoint.hub import resolve_model

    print(resolve_model(arguments.model_argument or COURSE_MODEL, arguments.revision))
    return 0
