"""`nanovllm quantize`: make a quantized checkpoint."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanovllm.assembly.flags import add_flags, read_flags
from nanovllm.data.checks import Keywords, Positive
from nanovllm.data.config import COURSE_MODEL
from nanovllm.data.errors import UsageError


@dataclass
class Recipe(Keywords):
    """How to quantize a checkpoint.

    Attributes:
        scheme: w4a16: 4-bit weights in groups; w8a8: 8-bit weights, and activations that each layer
            rounds to 8 bits
        method: how the integers are chosen. rtn: round to nearest; gptq: round one input after the
            other, and adjust later inputs to compensate for the error; awq: round to nearest after
            scaling the weights by the size of their inputs (auto: gptq for w4a16, rtn for w8a8)
        group_size: number of neighbouring weights in a row that share a scale, with w4a16; -1:
            whole rows (default: 64)
        asymmetric: use one zero point per group, with w4a16
        quantize_head: also quantize the output head, to 8 bits. If it shares its matrix with the
            embedding, the file then stores both
        calibration: text file to calibrate on (default: chats that the model generates)
        num_samples: number of calibration samples
        sample_length: tokens per sample
        seed: seed of the generated chats

    Raises:
        ValueError: a value that is not allowed, alone or with another; the message names the fix.
    """

    scheme: Literal["w4a16", "w8a8"] = "w4a16"
    method: Literal["auto", "rtn", "gptq", "awq"] = "auto"
    group_size: int | None = None
    asymmetric: bool = False
    quantize_head: bool = False
    calibration: str | None = None
    num_samples: Positive = 16
    sample_length: Positive = 512
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        eight = self.scheme == "w8a8"
        file = self.calibration
        if self.method == "auto":
            self.method = "rtn" if eight else "gptq"
        for wrong, what in (
            (
                eight and self.method == "awq",
                "method 'awq' is for scheme 'w4a16': with 'w8a8' use rtn or gptq",
            ),
            (
                eight and (self.group_size or self.asymmetric),
                "group_size and asymmetric are for scheme 'w4a16': do not set them",
            ),
            (
                file and self.method == "rtn",
                "calibration has no effect with method 'rtn': do not set it, or use gptq or awq",
            ),
            (
                file and not (Path(file).is_file() and Path(file).stat().st_size),
                f"there is no text in {file!r} to calibrate on: name a text file",
            ),
        ):
            if wrong:
                raise ValueError(what)
        self.group_size = self.group_size or (-1 if eight else 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "model",
        nargs="?",
        default=COURSE_MODEL,
        help="course model, local folder or hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--out", required=True, metavar="FOLDER", help="new folder for the quantized checkpoint"
    )
    add_flags(Recipe, parser)


def run(arguments: argparse.Namespace) -> None:
    """Quantize, and print the new folder.

    Raises:
        UsageError: a model, a folder or flags that do not fit; the message says what would.
    """
    recipe = read_flags(Recipe, arguments)
    from nanovllm.offline.quantize import quantize

    try:
        print(quantize(arguments.model, arguments.out, recipe))
    except ValueError as error:
        raise UsageError(str(error)) from error
