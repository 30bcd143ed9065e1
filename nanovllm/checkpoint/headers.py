"""Checks that a model fits into memory, before it is allocated."""

import psutil
import torch
from torch import Tensor, nn

from nanovllm.checkpoint.files import ModelFileError


def dtype_of(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor of a model of this dtype; a layer may mark a parameter with one that it
    keeps, as `kept_dtype`."""
    kept: torch.dtype = getattr(tensor, "kept_dtype", dtype)
    return kept


def check_memory(
    model: nn.Module, dtype: torch.dtype, device: torch.device | str, num_rotary_numbers: int
) -> None:
    """Check that the host has memory for a model that is on the meta device. (A GPU reports an
    error itself.)

    Raises:
        ModelFileError: it does not; the message names both sizes.
    """
    needed = 4 * num_rotary_numbers
    if torch.device(device).type == "cpu":
        needed += sum(p.numel() * dtype_of(p, dtype).itemsize for p in model.parameters())
    there = psutil.virtual_memory().total
    if needed > there:
        raise ModelFileError(
            f"config.json: the model needs {needed / 2**30:.1f} GiB, and this machine has "
            f"{there / 2**30:.1f} GiB: use a smaller model, --dtype or --max-model-len, or divide "
            "it (--tensor-parallel-size)"
        )
