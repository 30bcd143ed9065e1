"""What the commands share: the parser, the errors that a command reports in one line, and common flags. Imports nothing heavy."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from nanovllm.data.config import COURSE_MODEL, EngineConfig
from nanovllm.data.parts import MissingPartError
from nanovllm.engine.request_stream import EngineDeadError, EngineStartError
from nanovllm.server.access import Access
from nanovllm.server.listen import bind
from nanovllm.server.options import UsageError, add_options, port, seconds


class ServerError(RuntimeError):
    """A server that this command talks to has failed or refuses. The command ends with exit code 1."""


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage, whose forty flags would hide it."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def run_command(
    name: str, help: str, add_arguments: Callable[[Any], None], run: Callable[[Any], int | None], words: Sequence[str]
) -> int:
    """Parse the words of a command and run it; returns the exit code."""
    parser = Parser(prog=f"nanovllm {name}", description=help)
    add_arguments(parser)
    arguments = parser.parse_args(words)
    try:
        return run(arguments) or 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if (code := _exit_code(error)) is None:
            raise  # a bug, whose traceback is needed
        print(f"nanovllm {name}: error: {error}", file=sys.stderr)
        return code


def _exit_code(error: Exception) -> int | None:
    """2 for what the user can mend, 1 for an engine or a server that has failed, None for a bug."""
    from nanovllm.checkpoint.hub import ModelNotFoundError

    if isinstance(error, EngineStartError | MissingPartError | ModelNotFoundError | UsageError):
        return 2
    return 1 if isinstance(error, EngineDeadError | ServerError) else None


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Let the model be named without its flag."""
    help = f"the same as --model (default: {COURSE_MODEL})"
    parser.add_argument("model_argument", nargs="?", metavar="model", help=help)


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's settings from a command line.

    Raises:
        UsageError: a setting that makes no sense.
    """
    if arguments.model_argument is not None:
        arguments.model = arguments.model_argument
    try:
        return EngineConfig.from_arguments(arguments)
    except ValueError as error:
        raise UsageError(str(error)) from error


def add_address_arguments(parser: argparse._ActionsContainer) -> None:
    """Flags for where a server listens, and for which clients."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port, default=8000, help="0: any free one (default: %(default)s)")
    add_options(Access, parser)


def add_shutdown_argument(parser: argparse._ActionsContainer) -> None:
    """How long a server waits for running requests."""
    help = "how long running requests may go on after the first signal (default: %(default)s)"
    parser.add_argument("--shutdown-timeout", type=seconds, default=30.0, metavar="SECONDS", help=help)


def listen(arguments: argparse.Namespace) -> socket.socket:
    """A socket that is bound to the address on a command line.

    Raises:
        UsageError: the address is taken, or not an address of this machine.
    """
    try:
        return bind(arguments.host, arguments.port)
    except OSError as error:
        raise UsageError(f"cannot listen on {arguments.host}:{arguments.port}: {error}") from error
