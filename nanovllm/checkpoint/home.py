"""The folder of the models that this package has downloaded."""

import os
from pathlib import Path


class ModelNotFoundError(ValueError):
    """A model could not be found or fetched; the message says what to do about it."""


def nanovllm_home() -> Path:
    """The cache folder: `$NANOVLLM_HOME`, or `~/.cache/nanovllm`."""
    return Path(os.environ.get("NANOVLLM_HOME") or "~/.cache/nanovllm").expanduser()
