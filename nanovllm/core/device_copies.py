"""Asynchronous copies between host and device.

Built by notebooks/16_sampling.ipynb: edit it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor


def is_asynchronous(device: torch.device) -> bool:
    """True if the device computes while Python continues, so that reading a number from it must
    wait."""
    return device.type != "cpu"


def upload(
    numbers: Sequence[float] | np.ndarray, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy numbers to the device without waiting. The source is pinned memory on a GPU, which
    copies asynchronously only from there."""
    tensor = torch.as_tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def start_copy(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to the host.

    Returns:
        A function that waits for the copy, but not for any work launched after this call.
    """
    if not tensor.is_cuda:
        return lambda: tensor
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    here.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> Tensor:
        arrived.synchronize()
        return here

    return wait


def start_fetch(*tensors: Tensor) -> Callable[[], list[list[float]]]:
    """Start to copy tensors to the host, flattened, in one copy of float64, which represents every
    float32 and every token id exactly.

    Returns:
        A function that waits for the numbers, but not for any work launched after this call.
    """
    arrive = start_copy(torch.cat([tensor.flatten().double() for tensor in tensors]))
    sizes = [tensor.numel() for tensor in tensors]

    def wait() -> list[list[float]]:
        numbers = iter(arrive().tolist())
        return [list(islice(numbers, size)) for size in sizes]

    return wait


def pick(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return a copy of some rows, given in ascending order; the tensor itself for all rows."""
    if len(rows) == len(tensor):
        return tensor
    return tensor.index_select(0, upload(rows, torch.int64, tensor.device))
