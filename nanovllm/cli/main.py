"""The `nanovllm` command. Each command's module is imported when it runs, so that help and mistakes
show at once."""

import signal
import sys
from collections.abc import Sequence

import nanovllm
from nanovllm.checkpoint.hub import ModelNotFoundError
from nanovllm.data.disk import REMEDIES
from nanovllm.data.flags import Parser, ServerError, UsageError
from nanovllm.data.parts import MissingPartError, load
from nanovllm.engine.request_stream import EngineDeadError, EngineStartError

# For each command: what it does, and the module whose `add_arguments` declares its flags and whose
# `run` runs it.
COMMANDS = {
    "serve": ("serve a model through OpenAI's API", "nanovllm.cli.serve"),
    "router": (
        "route requests to several servers, with prefill and decode together or separate",
        "nanovllm.router.command",
    ),
    "chat": ("chat with a model in the terminal", "nanovllm.cli.chat"),
    "trace": ("summarise a recorded trace, or convert it", "nanovllm.cli.trace"),
    "replay": (
        "replay a recorded trace in the browser, for anyone who can reach the port",
        "nanovllm.cli.replay",
    ),
    "fetch": ("download a model", "nanovllm.cli.fetch"),
    "quantize": ("make a quantized checkpoint", "nanovllm.offline.command"),
    "train-eagle": (
        "train a draft head for speculative decoding",
        "nanovllm.offline.eagle_command",
    ),
    "bench": ("measure speed", "nanovllm.lab.bench"),
    "kernels": (
        "compile the GPU kernels, and show their registers, shared memory and spills",
        "nanovllm.lab.kernels",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
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
            load(f"{COMMANDS[name][1]}:add_arguments", f"nanovllm {name}")(commands.choices[name])
        parsed = parser.parse_args(words)
        return load(f"{COMMANDS[name][1]}:run", f"nanovllm {name}")(parsed) or 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
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
