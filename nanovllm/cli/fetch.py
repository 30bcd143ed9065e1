"""`nanovllm fetch`: download a model."""

import argparse

from nanovllm.data.config import COURSE_MODEL


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "model",
        nargs="?",
        default=COURSE_MODEL,
        help="course model, hub id, or GGUF file to convert (default: %(default)s)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")


def run(arguments: argparse.Namespace) -> None:
    """Download a model, and print its folder."""
    from nanovllm.checkpoint.hub import resolve_model

    print(resolve_model(arguments.model, arguments.revision))
