"""`nanovllm train-eagle`: train an EAGLE-3 draft head for a model."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from nanovllm.assembly.flags import Seconds, add_flags, read_flags
from nanovllm.data.checks import Keywords, Positive
from nanovllm.data.config import COURSE_MODEL
from nanovllm.data.errors import UsageError


@dataclass
class TrainingRecipe(Keywords):
    """How to train a draft head.

    Attributes:
        data: file of chats, one JSON object per line: {"messages": [...]}, which the model answers;
            or a text file, which is used unchanged (default: chats that the model generates)
        num_samples: number of chats or of text samples
        sample_length: maximum number of tokens per sample
        steps: number of consecutive draft tokens that the head learns to predict
        draft_vocab_size: number of tokens that the head can predict: the most frequent ones in the
            data
        epochs: passes over the data
        batch_size: samples per batch
        learning_rate: maximum learning rate, after a warm-up; it then decreases along a cosine
        seed: seed of the chats, the weights and the sample order
        device: where to run (auto: a GPU if there is one)
        time_limit: minutes after which training stops and the head is written (default: no limit);
            generating chats takes at most 40 % of them
        quantize: int8: store the matrices in 8 bits, with a scale per row

    Raises:
        ValueError: a value that is not allowed; the message names the fix.
    """

    data: str | None = None
    num_samples: Positive = 2000
    sample_length: Annotated[int, Meta(ge=32)] = 512
    steps: Annotated[int, Meta(ge=1, le=16)] = 6
    draft_vocab_size: Positive = 8192
    epochs: Positive = 4
    batch_size: Positive = 16
    learning_rate: Annotated[float, Meta(gt=0, le=1)] = 1e-3
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    time_limit: Seconds | None = None
    quantize: Literal["none", "int8"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data and not (Path(self.data).is_file() and Path(self.data).stat().st_size):
            raise ValueError(
                f"{self.data!r} has nothing to train on: name a file with text, or with chats as "
                "JSON lines"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "model",
        nargs="?",
        default=COURSE_MODEL,
        help="course model, local folder or hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="FOLDER",
        help="folder for the head; run the same command again to resume from it",
    )
    add_flags(TrainingRecipe, parser)


def run(arguments: argparse.Namespace) -> None:
    """Train, and print the folder.

    Raises:
        UsageError: a model, a folder or flags that do not fit; the message says what would.
    """
    recipe = read_flags(TrainingRecipe, arguments)
    from nanovllm.offline.train_eagle import train_eagle

    try:
        print(train_eagle(arguments.model, arguments.out, recipe))
    except ValueError as error:
        raise UsageError(str(error)) from error
