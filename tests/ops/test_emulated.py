"""The CPU kernels for processors that are not here: ARM's, cross-compiled with NEON and run in
QEMU, by night and where `g++-aarch64-linux-gnu` and `qemu-user` are installed (`make neon`); and
Intel's with AMX, whose tiles `amx.h` emulates. A program, `emulated.cpp`, runs them, and ends with
an error if a result depends on the batch or the chunk."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest
import torch
from torch import Tensor

from nanovllm.ops import native_quantized, reference, reference_quantized
from nanovllm.ops.native_library import BuildError, find_compiler

CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
HERE, KERNELS = pathlib.Path(__file__).parent, pathlib.Path(reference.__file__).parent
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", params=["AMX", pytest.param("NEON", marks=pytest.mark.nightly)])
def program(request, tmp_path_factory) -> list[str]:
    """The command that runs the kernels."""
    path = str(tmp_path_factory.mktemp(request.param) / "kernels")
    if request.param == "NEON":
        if not (shutil.which(CROSS_COMPILER) and shutil.which(EMULATOR)):
            pytest.skip(f"needs {CROSS_COMPILER} and {EMULATOR}")
        command, flags = [EMULATOR, path], [CROSS_COMPILER, "-march=armv8-a", "-static"]
    else:
        cpu = pathlib.Path("/proc/cpuinfo")
        if not (cpu.exists() and "avx512_bf16" in cpu.read_text()):
            pytest.skip("a CPU with AMX has AVX512_BF16, too, which is not emulated")
        try:
            command, flags = (
                [path],
                [find_compiler(), "-march=native", "-include", str(HERE / "amx.h")],
            )
        except BuildError as error:
            pytest.skip(str(error))
    flags += [
        "-Og",
        "-std=c++17",
        "-ffp-contract=off",
        f"-I{KERNELS}",
        str(HERE / "emulated.cpp"),
        "-o",
        path,
    ]
    subprocess.run(flags, check=True, timeout=300)
    return command


def run(
    program: list[str], arguments: list[object], dtype: torch.dtype, *tensors: Tensor
) -> Tensor:
    """What the program writes; it fails if a result depends on the batch or the chunk."""
    given = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    result = subprocess.run(
        [*program, *map(str, arguments)], input=given, capture_output=True, timeout=300
    )
    assert result.returncode == 0, (
        "a result depends on its company" if result.returncode == 2 else result
    )
    return torch.frombuffer(bytearray(result.stdout), dtype=dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "inner", "outputs"), [(1, 32, 16), (11, 576, 48), (300, 96, 80)]
)
def test_linear(program, tokens, inner, outputs, dtype):
    torch.manual_seed(0)
    x, weight = (
        torch.randn(tokens, inner).to(dtype),
        (torch.randn(outputs, inner) / inner**0.5).to(dtype),
    )
    out = run(
        program,
        ["linear", str(dtype).removeprefix("torch."), tokens, inner, outputs],
        dtype,
        x,
        weight,
    )
    expected = (x.double() @ weight.double().T).expand(2, -1, -1)
    torch.testing.assert_close(
        out.view(2, tokens, outputs).double(),
        expected,
        atol=TOLERANCES[dtype],
        rtol=TOLERANCES[dtype],
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "inner", "outputs", "groups"),
    [
        (1, 32, 16, 1),
        (40, 672, 48, 7),
        (300, 576, 32, 9),
        (3, 576, 64, 18),
        (5, 96, 48, 3),
        (17, 1312, 80, 1),
    ],
)
def test_quantized_weights(program, tokens, inner, outputs, groups, dtype, monkeypatch):
    # Packing is torch's code, also without kernels.
    monkeypatch.setattr(native_quantized, "_library", lambda: "the program")
    torch.manual_seed(0)
    x, scales = torch.randn(tokens, inner).to(dtype), (torch.rand(outputs, groups) / 100).to(dtype)
    nibbles = torch.randint(-(2**31), 2**31, (outputs, inner // 8)).int()
    zeros = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8)
    weight = reference_quantized.dequantize(nibbles, scales, zeros, dtype)
    values, row_scales = (
        torch.randint(-128, 128, (outputs, inner), dtype=torch.int8),
        torch.rand(outputs, 1),
    )
    arguments = ["quantized", str(dtype).removeprefix("torch."), tokens, inner, outputs, groups]
    packed = native_quantized.pack_nibbles(nibbles, scales, zeros)
    wide = native_quantized.pack_nibbles(nibbles, scales.float())[1]
    out = run(
        program,
        arguments,
        dtype,
        x,
        weight,
        *packed,
        wide,
        native_quantized.pack_values(values),
        row_scales,
    )
    w4a16, w4a8, w8a8 = out.view(3, tokens, outputs)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(
        w4a16.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
    )
    assert torch.equal(w4a8, reference_quantized.linear_w4a8(x, nibbles, scales.float(), zeros))
    assert torch.equal(w8a8, reference_quantized.linear_w8a8(x, values, row_scales))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("tokens", [1, 20, 400])
def test_attention(program, tokens, dtype):
    torch.manual_seed(0)
    blocks = -(-tokens // 16)
    q, cache = torch.randn(tokens, 2, 64).to(dtype), torch.randn(blocks, 2, 1, 16, 64).to(dtype)
    out = run(
        program, ["attention", str(dtype).removeprefix("torch."), tokens], dtype, q, cache
    ).view_as(q)
    table, lengths, starts = (
        torch.arange(blocks)[None].int(),
        torch.tensor([tokens]).int(),
        torch.tensor([0, tokens]).int(),
    )
    expected = reference.paged_attention(q.double(), cache.double(), table, lengths, starts, 0.125)
    torch.testing.assert_close(
        out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
    )
