"""The CPU kernels on ARM: cross-compiled with NEON, and run in QEMU's emulation of the processor. By night, where
`g++-aarch64-linux-gnu` and `qemu-user` are installed (`make neon`)."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest
import torch
from torch import Tensor

from nanovllm.ops import reference

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
HERE, KERNELS = pathlib.Path(__file__).parent, pathlib.Path(reference.__file__).parent
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}"
    ),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("neon") / "kernels")
    flags = ["-O2", "-std=c++17", "-march=armv8-a", "-static", f"-I{KERNELS}"]
    subprocess.run([COMPILER, *flags, str(HERE / "neon.cpp"), "-o", path], check=True, timeout=300)
    return path


def run(program: str, arguments: list[object], dtype: torch.dtype, *tensors: Tensor) -> Tensor:
    """What the program writes; it fails if a result depends on the batch or the chunk."""
    given = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    result = subprocess.run([EMULATOR, program, *map(str, arguments)], input=given, capture_output=True, timeout=300)
    assert result.returncode == 0, "a result depends on its company" if result.returncode == 2 else result
    return torch.frombuffer(bytearray(result.stdout), dtype=dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("tokens", "inner", "outputs"), [(1, 32, 16), (11, 576, 48), (300, 96, 80)])
def test_linear(program, tokens, inner, outputs, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, inner).to(dtype), (torch.randn(outputs, inner) / inner**0.5).to(dtype)
    out = run(program, ["linear", str(dtype).removeprefix("torch."), tokens, inner, outputs], dtype, x, weight)
    expected = (x.double() @ weight.double().T).expand(2, -1, -1)
    torch.testing.assert_close(
        out.view(2, tokens, outputs).double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("tokens", [1, 20, 400])
def test_attention(program, tokens, dtype):
    torch.manual_seed(0)
    blocks = -(-tokens // 16)
    q, cache = torch.randn(tokens, 2, 64).to(dtype), torch.randn(blocks, 2, 1, 16, 64).to(dtype)
    out = run(program, ["attention", str(dtype).removeprefix("torch."), tokens], dtype, q, cache).view_as(q)
    table, lengths, starts = (
        torch.arange(blocks)[None].int(),
        torch.tensor([tokens]).int(),
        torch.tensor([0, tokens]).int(),
    )
    expected = reference.paged_attention(q.double(), cache.double(), table, lengths, starts, 0.125)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
