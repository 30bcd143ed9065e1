"""What all modules of Triton operators need: arithmetic that is right in the interpreter, and which
tensors the kernels take."""

import torch
from torch import Tensor

from nanovllm.ops import triton_interpreter
from nanovllm.ops.support import is_interpreted

if is_interpreted():
    triton_interpreter.repair()

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def covers(*tensors: Tensor) -> bool:
    """Whether the kernels can take these tensors: of one known dtype, without gaps in a row,
    without gradient."""
    dtype = tensors[0].dtype
    return dtype in DTYPES and not any(
        tensor.dtype != dtype
        or tensor.stride(-1) != 1
        or (torch.is_grad_enabled() and tensor.requires_grad)
        for tensor in tensors
    )
