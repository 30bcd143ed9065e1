"""The `nanovllm` command. Each command's module is imported when it runs, so that help and mistakes show at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import nanovllm
from nanovllm.data.parts import MissingPartError, load
from nanovllm.server.commandline import Parser, run_command

# For each command: what it does, and the module whose `add_arguments` declares its flags and whose `run` runs it.
COMMANDS = {
    "serve": ("serve a model through OpenAI's API", "nanovllm.cli.serve"),
    "router": (
        "divide requests among servers, which may prefill and decode in different places",
        "nanovllm.router.command",
    ),
    "chat": ("talk with a model in the terminal", "nanovllm.cli.chat"),
    "trace": ("sum up a recorded trace, or convert it", "nanovllm.cli.trace"),
    "replay": ("show a recorded trace in the browser, to all who can reach the port", "nanovllm.cli.replay"),
    "fetch": ("download a model", "nanovllm.cli.fetch"),
    "bench": ("measure speed", "nanovllm.lab.bench"),
    "kernels": ("show what the compiler makes of the GPU kernels", "nanovllm.lab.kernels"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        return _no_command(words)
    name, feature = words[0], f"nanovllm {words[0]}"
    help, module = COMMANDS[name]
    try:
        add_arguments, run = load(f"{module}:add_arguments", feature), load(f"{module}:run", feature)
    except MissingPartError as error:
        print(f"nanovllm: error: {error}", file=sys.stderr)
        return 2
    return run_command(name, help, add_arguments, run, words[1:])


def _no_command(words: list[str]) -> int:
    parser = Parser(
        prog="nanovllm",
        description="An LLM inference engine that you can read.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:8}{help}" for name, (help, _) in COMMANDS.items()),
    )
    parser.add_argument("--version", action="version", version=nanovllm.__version__)
    parser.add_argument("command", choices=list(COMMANDS), metavar="command", help="what to do; see below")
    parser.parse_args(words)
    raise AssertionError("the parser has refused what is not a command")
