"""Chooses the runner's device and dtype, and allocates its memory."""

import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" is a CUDA GPU if torch sees one.

    Raises:
        ValueError: CUDA was asked for and is not available.
    """
    if name == "cuda" and not torch.cuda.is_available():
        fix = "check that `nvidia-smi` lists a GPU and that CUDA_VISIBLE_DEVICES includes it"
        if not torch.backends.cuda.is_built():
            fix = (
                "it is built without CUDA; install a build with CUDA "
                "(https://pytorch.org/get-started)"
            )
        raise ValueError(f"torch {torch.__version__} sees no CUDA GPU: {fix}, or use --device cpu")
    return torch.device(
        "cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu"
    )


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype called `name`; "auto" is bfloat16 where the hardware multiplies it, else float16 on
    a GPU and float32 on a CPU.

    Raises:
        ValueError: bfloat16 on a GPU that cannot multiply it.
    """
    # Older GPUs can emulate bfloat16, which costs more than it saves.
    native = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "bfloat16" and not native:
        raise ValueError(
            "this GPU cannot multiply bfloat16, which needs compute capability 8.0: use --dtype "
            "half"
        )
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if native else torch.float16
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", lambda: {})()
    return (
        torch.bfloat16
        if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
        else torch.float32
    )


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose host memory is taken page by page as they are written, so that a pool that is
    never full stays small. (`torch.zeros` writes all of them at once; the operating system's zero
    pages cost nothing.)"""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


def weight_memory(device: torch.device | str) -> Callable[[tuple[int, ...], torch.dtype], Tensor]:
    """What makes the tensors of a model's weights, without values. On a CPU they lie one behind the
    other in memory that has pages of 2 MiB, where Linux leaves that to programs: each step reads
    all weights, and has to find each page. With pages of 4 KiB, a step of one token takes 7 %
    longer."""
    if torch.device(device).type != "cpu":
        return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, 1)
    used = 1

    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nonlocal memory, used
        if not (count := math.prod(shape)):
            return torch.empty(shape, dtype=dtype)
        if used + (size := count * dtype.itemsize) > len(memory):
            # What is never written takes no memory.
            memory = mmap.mmap(-1, max(size, 1 << 30), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            used = 0
            if hasattr(mmap, "MADV_HUGEPAGE"):  # on Linux
                memory.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=used).view(shape)
        used += -(-size // ALIGNMENT) * ALIGNMENT
        return tensor

    return take


@contextmanager
def out_of_memory(what: str, advice: str) -> Iterator[None]:
    """Raise an error that names the setting to lower when the GPU runs out of memory.

    Raises:
        ValueError: in place of torch's own error, which cannot name a setting.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"the GPU does not have enough memory for {what}: {advice}") from error
