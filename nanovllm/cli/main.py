"""The `nanovllm` command. Each command's module is imported when it runs, so that help and mistakes
show at once."""

import os
import select
import signal
import sys
from collections.abc import Sequence

import nanovllm
from nanovllm.assembly.flags import Parser
from nanovllm.checkpoint.home import ModelNotFoundError
from nanovllm.cli.doors import COMMANDS, load_command
from nanovllm.data.disk import REMEDIES
from nanovllm.data.errors import ServerError, UsageError
from nanovllm.data.parts import MissingPartError
from nanovllm.engine.errors import EngineDeadError, EngineStartError

STDOUT = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code. If the reader of its output has left, such as
    `head`, it ends without a message, with the code that a shell reports for other programs."""
    if sys.stdout is None:  # the caller has closed it
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _has_lost_reader():
            raise  # it was another pipe, or a socket
        return 128 + signal.SIGPIPE
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return 128 + signal.SIGPIPE  # rich, which prints tables, would exit with 1


def _has_lost_reader() -> bool:
    output = select.poll()
    output.register(STDOUT, 0)
    if not output.poll(0):
        return False
    # Python will write once more what is left in its buffer.
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    return True


def _run(arguments: Sequence[str] | None) -> int:
    """Run a command line; returns the exit code: 2 for what the user can mend, 1 for an engine or a
    server that has failed."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog="nanovllm", description="An LLM inference engine that you can read.")
    parser.add_argument("--version", action="version", version=nanovllm.__version__)
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for name, (help, _) in COMMANDS.items():
        commands.add_parser(name, help=help, description=help)
    name = words[0] if words and words[0] in COMMANDS else ""
    try:
        if name:
            load_command(name).add_arguments(commands.choices[name])
        parsed = parser.parse_args(words)
        return load_command(name).run(parsed) or 0
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        # A copy names the file that it reads first, and then the one that it writes.
        file = error.filename if error.filename2 is None else error.filename2
        where = f"{file}: " if file else ""
        print(
            f"nanovllm {name}: error: {where}{error.strerror}: {REMEDIES[error.errno]}",
            file=sys.stderr,
        )
        return 1
    except (
        EngineStartError,
        MissingPartError,
        ModelNotFoundError,
        UsageError,
        EngineDeadError,
        ServerError,
    ) as error:
        print(f"nanovllm {name}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
