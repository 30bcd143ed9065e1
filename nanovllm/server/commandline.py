"""What the commands share: the parser, the errors that a command reports in one line, and common flags. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from nanovllm.data.config import COURSE_MODEL


class ServerError(RuntimeError):
    """A server that this command talks to has failed or refuses. The command ends with exit code 1."""


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage, whose forty flags would hide it."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        """Refuse unknown words here: argparse would hand a command's to the parser above, whose help does not explain them."""
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Let the model be named without its flag."""
    help = f"the same as --model (default: {COURSE_MODEL})"
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=help)
