"""Whether Triton kernels can run here. Imports nothing of Triton."""

import importlib.util
import os
import pathlib
import shutil

import torch

PACKAGE = pathlib.Path(__file__).parents[1]
KERNELS = (
    "ops/triton.py",
    "ops/triton_interpreter.py",
    "attention/triton.py",
    "attention/triton_kernels.py",
    "attention/triton_simple.py",
)
# cp.async and bfloat16 products begin with Ampere; the tiles were not chosen for older GPUs.
LEAST_CAPABILITY = (8, 0)
LARGEST_HEAD = 256


def is_interpreted() -> bool:
    """True if kernels run in Triton's interpreter: slowly, in NumPy, without a GPU. Triton reads
    the variable when a kernel is defined, so it has to be set before the first import."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_no_triton(device: torch.device, head_dim: int) -> str | None:
    """Why Triton kernels cannot serve a model on a device; None if they can."""
    if missing := [name for name in KERNELS if not (PACKAGE / name).is_file()]:
        return f"this copy of nanovllm does not have {', '.join(missing)}"
    if importlib.util.find_spec("triton") is None:
        return "the package 'triton' is not installed (it is not available for macOS and Windows)"
    if device.type == "cpu" and not is_interpreted():
        return "it needs a GPU (to run it in Triton's interpreter, set TRITON_INTERPRET=1)"
    if device.type == "cuda":
        if is_interpreted():
            return "TRITON_INTERPRET=1 is for machines without a GPU; unset it"
        if torch.version.cuda and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
            major, minor = torch.cuda.get_device_capability(device)
            return (
                f"the GPU has compute capability {major}.{minor}; at least 8.0 (Ampere) is required"
            )
        if not any(
            shutil.which(name) for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name
        ):
            return "it needs a C compiler for its launcher, and found none (install gcc, or set CC)"
    if head_dim > LARGEST_HEAD:
        return (
            f"heads of {head_dim} channels do not fit in a tile; at most {LARGEST_HEAD} are "
            "supported"
        )
    return None
