"""`nanovllm kernels`: what the recorder notes of a launch, what the compiler makes of it, and which
results are faults."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from nanovllm.cli import main as cli

pytest.importorskip("triton")

import triton
import triton.language as tl

from nanovllm.lab import kernel_launches, kernels
from nanovllm.lab.kernel_compiler import (
    TARGETS,
    Launch,
    compile_launch,
    record_launches,
    specialise,
)
from nanovllm.ops.support import is_interpreted
from tests.stand_ins import set_installed

if is_interpreted():
    pytest.skip("the interpreter stands in the compiler's place", allow_module_level=True)


@triton.jit
def copy_kernel(
    x_ptr, y_ptr, size, stride, scale, bias_ptr, BLOCK: tl.constexpr, ADD: tl.constexpr = False
):
    offset = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset * stride, mask=offset < size) * scale
    if bias_ptr is not None:
        x += tl.load(bias_ptr + offset)
    tl.store(y_ptr + offset, x, mask=offset < size)


@triton.jit
def spilling_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """More values than 32 threads have registers for, all needed until the end."""
    offset = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset)
    tl.store(y_ptr + offset, x / tl.sum(x, 0))


@triton.jit
def large_kernel(x_ptr, y_ptr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr):
    """A product of matrices that lie in shared memory as a whole."""
    row = tl.arange(0, TILE_ROWS)[:, None]
    key = tl.arange(0, TILE_KEYS)
    x = tl.load(x_ptr + row * TILE_KEYS + key[None, :])
    y = tl.load(y_ptr + key[:, None] * TILE_ROWS + tl.arange(0, TILE_ROWS)[None, :])
    tl.store(y_ptr + row * TILE_ROWS + tl.arange(0, TILE_ROWS)[None, :], tl.dot(x, y).to(y.dtype))


@triton.jit
def broken_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 1, "only one fits")
    tl.store(x_ptr, BLOCK)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_of(kernel: Any, *arguments: Any, **options: Any) -> Launch:
    (launch,) = record_launches(lambda: kernel[(1,)](*arguments, **options))
    return launch


def copy_signature(
    *arguments: Any, target: str = "sm_90"
) -> tuple[dict[str, str], dict[str, Any], set[str]]:
    """(types, constants, names of what is divisible by 16) of a launch of `copy_kernel`."""
    source, _ = specialise(launch_of(copy_kernel, *arguments, BLOCK=32), TARGETS[target])
    names = copy_kernel.arg_names
    constants = {names[index]: value for (index,), value in source.constants.items()}
    aligned = {
        names[index]
        for (index,), attributes in source.attrs.items()
        if ["tt.divisibility", 16] in attributes
    }
    return source.signature, constants, aligned


def test_launches_are_noted_in_order_and_do_not_run() -> None:
    x, y = torch.ones(32), torch.zeros(32)

    def run() -> None:
        copy_kernel[(1,)](x, y, 32, 1, 2.0, None, BLOCK=32, num_warps=1)
        spilling_kernel[(2, 3)](x, y, BLOCK=32)

    first, second = record_launches(run)
    assert (first.function, second.function) == (copy_kernel, spilling_kernel)
    assert first.constants == {"BLOCK": 32, "ADD": False} and second.constants == {"BLOCK": 32}
    assert first.options["num_warps"] == 1 and first.dtype == "float32"
    assert not y.any()


def test_recording_ends_with_an_error() -> None:
    before = triton.runtime.jit.JITFunction.run
    with pytest.raises(ZeroDivisionError):
        record_launches(lambda: 1 // 0)
    assert triton.runtime.jit.JITFunction.run is before


def test_types_of_tensors_and_numbers() -> None:
    types, _, _ = copy_signature(tensor(64, dtype=torch.bfloat16), tensor(64), 2**40, 3, 0.5, None)
    assert types["x_ptr"] == "*bf16" and types["y_ptr"] == "*fp32"
    assert types["size"] == "i64" and types["stride"] == "i32" and types["scale"] == "fp32"


def test_one_and_none_are_constants() -> None:
    types, constants, _ = copy_signature(tensor(64), tensor(64), 7, 1, 0.5, None)
    assert constants == {"stride": 1, "bias_ptr": None, "BLOCK": 32, "ADD": False}
    assert types["stride"] == types["bias_ptr"] == "constexpr"
    assert "bias_ptr" not in copy_signature(tensor(64), tensor(64), 7, 1, 0.5, tensor(64))[1]


def test_what_is_divisible_by_16() -> None:
    whole = tensor(65)
    _, _, aligned = copy_signature(whole, whole[1:], 48, 24, 16.0, whole[4:])
    assert aligned == {"x_ptr", "size", "bias_ptr"}  # an address counts in bytes


def test_recorded_launches_compile_as_they_would_run() -> None:
    """A stride of 1 is known, so the loads are of 16 bytes; with any other they are not."""
    together = launch_of(
        copy_kernel, tensor(1024), tensor(1024), 1024, 1, 2.0, None, BLOCK=1024, num_warps=4
    )
    apart = launch_of(
        copy_kernel, tensor(1024), tensor(1024), 1024, 3, 2.0, None, BLOCK=1024, num_warps=4
    )
    for target in ("sm_80", "sm_90", "gfx942"):
        compiled = compile_launch(together, target)
        assert compiled["instructions"]["16-byte load"] > 0, target
        assert compile_launch(apart, target)["instructions"]["16-byte load"] == 0, target
        assert (
            compiled["num_warps"] == 4
            and compiled["registers"] > 4
            and compiled["spilled_bytes"] == 0
        )


SPILLING = (spilling_kernel, (tensor(16384), tensor(16384)), {"BLOCK": 16384, "num_warps": 1})
LARGE = (
    large_kernel,
    (tensor(128, 512, dtype=torch.bfloat16), tensor(512, 128, dtype=torch.bfloat16)),
    {"TILE_ROWS": 128, "TILE_KEYS": 512, "num_warps": 8},
)
BROKEN = (broken_kernel, (tensor(1),), {"BLOCK": 2})


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_spill_is_a_fault(target: str) -> None:
    kernel, arguments, options = SPILLING
    found = kernels.examine(launch_of(kernel, *arguments, **options), target)
    assert found["spilled_bytes"] > 1000
    assert found["problems"] == [f"spills {found['spilled_bytes']} bytes per thread"]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_too_much_shared_memory_is_a_fault(target: str) -> None:
    kernel, arguments, options = LARGE
    found, limit = (
        kernels.examine(launch_of(kernel, *arguments, **options), target),
        TARGETS[target].shared_memory,
    )
    assert found["shared_memory"] > limit
    assert (
        f"needs {found['shared_memory']} bytes of shared memory; {limit} is the limit"
        in found["problems"]
    )


def test_a_large_tile_without_wgmma_is_a_fault() -> None:
    @triton.jit
    def no_product_kernel(x_ptr, TILE_ROWS: tl.constexpr):
        tl.store(x_ptr + tl.arange(0, TILE_ROWS), 0.0)

    half, single = tensor(64, dtype=torch.bfloat16), tensor(64)
    fault = ["has tiles of 64 rows and no wgmma"]
    assert (
        kernels.examine(launch_of(no_product_kernel, half, TILE_ROWS=64), "sm_90")["problems"]
        == fault
    )
    for x, rows, target in ((half, 32, "sm_90"), (single, 64, "sm_90"), (half, 64, "sm_80")):
        assert (
            kernels.examine(launch_of(no_product_kernel, x, TILE_ROWS=rows), target)["problems"]
            == []
        )


def test_keys_that_are_waited_for_are_a_fault() -> None:
    @triton.jit
    def waiting_kernel(
        x_ptr, BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr
    ):
        tl.store(x_ptr + tl.arange(0, TILE_KEYS), BLOCK_SIZE)

    launch = launch_of(waiting_kernel, tensor(16), BLOCK_SIZE=16, TILE_ROWS=16, TILE_KEYS=16)
    assert kernels.examine(launch, "sm_80")["problems"] == [
        "waits for each tile of keys: no cp.async"
    ]
    assert kernels.examine(launch, "gfx942")["problems"] == []  # which has no such instruction


def test_what_does_not_compile_is_a_fault() -> None:
    kernel, arguments, options = BROKEN
    found = kernels.examine(launch_of(kernel, *arguments, **options), "sm_90")
    assert found["problems"] == ["does not compile: only one fits"] and "registers" not in found


@pytest.mark.parametrize(
    "fault", [SPILLING, LARGE, BROKEN], ids=["spill", "shared memory", "broken"]
)
def test_a_fault_ends_the_command_with_1(
    fault: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
) -> None:
    kernel, arguments, options = fault
    good = launch_of(copy_kernel, tensor(512), tensor(512), 512, 1, 2.0, None, BLOCK=512)
    bad = launch_of(kernel, *arguments, **options)
    launches = [good, bad]
    monkeypatch.setattr(kernel_launches, "engine_launches", lambda *_: launches)
    assert cli.main(["kernels", "--target", "sm_90", "--json", str(tmp_path / "numbers.json")]) == 1
    shown = capsys.readouterr().out
    assert "2 configurations, 1 with problems" in shown
    assert any(line.startswith(f"sm_90 {kernel.__name__} ") for line in shown.splitlines())
    numbers = json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8"))
    assert [bool(entry["problems"]) for entry in numbers] == [False, True]
    assert (
        numbers[0]["constants"]["BLOCK"] == 512 and numbers[0]["instructions"]["16-byte load"] == 1
    )
    del launches[1]
    assert cli.main(["kernels", "--target", "sm_90"]) == 0


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nanovllm", "kernels", *words],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"} | environment,
    )


def test_mistakes_on_the_command_line() -> None:
    result = command("--target", "sm_90", "sm_91")
    assert result.returncode == 2
    assert result.stderr.startswith(
        "nanovllm kernels: error: argument --target: invalid choice: 'sm_91' (choose from 'sm_80', "
    )
    assert command("--head-dim", "48").returncode == 2
    result = command(TRITON_INTERPRET="1")
    assert result.returncode == 2 and "unset it" in result.stderr


def test_without_triton(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_installed(monkeypatch, triton=False)
    assert cli.main(["kernels"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("nanovllm kernels: error: the package 'triton' is not installed")


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 128), ("float32", 80)])
def test_the_smallest_backend_compiles_for_nvidias_gpus(
    target: str, dtype: str, head_dim: int
) -> None:
    launches = record_launches(lambda: kernel_launches.launch_simple_attention(dtype, [head_dim]))
    names = [launch.function.__name__ for launch in launches]
    assert names == ["write_kv_kernel", "paged_decode_kernel"]
    found = [kernels.examine(launch, target) for launch in launches]
    assert [row["problems"] for row in found] == [[], []]
    assert found[1]["spilled_bytes"] == 0
    assert found[1]["instructions"]["16-byte load"] > 0


def test_every_size_occurs_and_no_launch_twice() -> None:
    launches = kernel_launches.engine_launches("sm_90", kernels.DTYPES, kernels.HEAD_DIMS)
    attention = [launch for launch in launches if {"TILE_ROWS", "GROUP"} <= launch.constants.keys()]
    for name, values in (
        ("HEAD_DIM", kernels.HEAD_DIMS),
        ("GROUP", kernel_launches.GROUPS),
        ("BLOCK_SIZE", kernel_launches.BLOCK_SIZES),
        ("WINDOWED", (False, True)),
        ("CAPPED", (False, True)),
    ):
        assert {launch.constants[name] for launch in attention} == set(values)
    pairs = {(launch.dtype, launch.constants["HEAD_DIM"]) for launch in attention}
    assert pairs > {(dtype, dim) for dtype in ("bfloat16", "float32") for dim in kernels.HEAD_DIMS}
    assert ("float16", 128) in pairs
    sources = [specialise(launch, TARGETS["sm_90"]) for launch in launches]
    assert len({(source.hash(), options.hash()) for source, options in sources}) == len(launches)
