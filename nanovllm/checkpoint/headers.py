"""Checks a checkpoint by the headers of its safetensors files, before memory is allocated."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from nanovllm.checkpoint.files import ModelFileError


class CheckpointHeaders:
    """Iterates over the names of all tensors, each with a meta tensor of its shape.

    As a context manager, it adds the name of the file that is being read to a ValueError.
    """

    def __init__(self, files: Sequence[pathlib.Path]) -> None:
        self.files = files
        self._where = files[0].parent

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for file in self.files:
            self._where = file
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118  (a safe_open handle is not a dictionary)
                        yield name, torch.empty(tensors.get_slice(name).get_shape(), device="meta")
            except SafetensorError as error:
                raise ModelFileError(f"it cannot be read ({error}); download it again") from error
        self._where = self.files[0].parent

    def __enter__(self) -> CheckpointHeaders:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            raise type(error)(f"{self._where}: {error}") from error


def check_memory(model: nn.Module, dtype: torch.dtype, device: torch.device | str, num_rotary_numbers: int) -> None:
    """Check that the host has memory for a model that is on the meta device. (A GPU reports an error itself.)

    Raises:
        ModelFileError: it does not; the message names both sizes.
    """
    needed = 4 * num_rotary_numbers
    if torch.device(device).type == "cpu":
        needed += sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    there = psutil.virtual_memory().total
    if needed > there:
        raise ModelFileError(
            f"config.json: the model takes {needed / 2**30:.1f} GiB, and this machine has {there / 2**30:.1f} GiB: "
            f"use a smaller model, --dtype or --max-model-len, or divide it (--tensor-parallel-size)"
        )
