"""`nanovllm fetch`: download a model."""

from __future__ import annotations

import argparse

from nanovllm.data.config import COURSE_MODEL
from nanovllm.server.commandline import add_model_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    add_model_argument(parser)
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")


def run(arguments: argparse.Namespace) -> None:
    """Download a model, and print its folder."""
    from nanovllm.checkpoint.hub import resolve_model

    print(resolve_model(arguments.model_argument or COURSE_MODEL, arguments.revision))
