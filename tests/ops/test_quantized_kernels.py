"""The CPU kernels for quantized weights against plain torch, to the last bit, with the instructions
of this machine and of older ones."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm import LLM, ops
from nanovllm.layers.quantization import W8A8, QuantizedWeight
from nanovllm.ops import native, native_quantized, quantized, reference_quantized
from tests.oracle import greedy
from tests.stand_ins import refuse_reference

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no compiled kernels here")

FLOAT = torch.float32
DTYPES = [FLOAT, torch.bfloat16]
# (outputs, inputs): a single word, sizes of the course model, inputs that fill no vector, many
# groups, an odd number of groups.
SIZES = [(16, 4), (64, 36), (48, 100), (576, 1536), (96, 576), (80, 192)]


@pytest.fixture(autouse=True)
def _generator() -> None:
    torch.manual_seed(0)


@pytest.fixture
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to plain torch."""
    refuse_reference(
        monkeypatch,
        native_quantized,
        "reference_quantized",
        dequantize=reference_quantized.dequantize,
    )


def activations(tokens: int, inner: int, dtype: torch.dtype) -> Tensor:
    """Rows of different sizes, one of them zeros."""
    x = torch.randn(tokens, inner) * 4.0 ** torch.randint(-6, 7, (tokens, 1))
    x[tokens // 2] = 0
    return x.to(dtype)


def weight_w8a8(outputs: int, inner: int) -> tuple[Tensor, Tensor]:
    return (
        torch.randint(-128, 128, (outputs, inner), dtype=torch.int8),
        torch.rand(outputs, 1) / 100,
    )


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("outputs", "inner"), SIZES)
def test_w8a8_is_the_reference(outputs: int, inner: int, dtype: torch.dtype) -> None:
    values, scales = weight_w8a8(outputs, inner)
    packed = quantized.pack_values(values)
    assert packed.ndim == 3, "the kernel is not used"
    bias = torch.randn(outputs).to(dtype)
    for tokens in (0, 1, 2, 3, 5, 11, 12, 13, 25, 37, 70, 300):
        x = activations(tokens, inner, dtype) if tokens else torch.empty(0, inner, dtype=dtype)
        for added in (None, bias):
            expected = reference_quantized.linear_w8a8(x, values, scales, added)
            assert torch.equal(quantized.linear_w8a8(x, packed, scales, added), expected)


@pytest.mark.usefixtures("kernels_alone")
def test_w8a8_sums_are_exact_where_they_are_largest() -> None:
    """The largest integers of both signs, more of them than a float32 can add exactly: no step may
    saturate."""
    inner = 16384
    values = torch.tensor([-128, 127], dtype=torch.int8)[torch.randint(0, 2, (32, inner))]
    values[0], values[1] = -128, 127
    x = torch.tensor([-1.0, 1.0])[torch.randint(0, 2, (5, inner))]
    x[0], x[1] = 1, -1
    ones = torch.full((32, 1), 127.0)
    sums = (x.double() * 127) @ values.double().T
    expected = sums.float() * (torch.ones(5, 1) / 127) * ones.T
    assert sums.abs().max() == 128 * 127 * inner > 2**24
    assert torch.equal(quantized.linear_w8a8(x, quantized.pack_values(values), ones), expected)


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["w8a8", "w4a8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_integer_products_of_what_is_no_number_are_none(
    value: float, kind: str, dtype: torch.dtype
) -> None:
    values, scales = weight_w8a8(32, 96)
    weight = (
        [quantized.pack_values(values), scales]
        if kind == "w8a8"
        else packed_w4(*weight_w4(32, 96, 3, FLOAT, True))
    )
    product = getattr(quantized, f"linear_{kind}")
    x = activations(3, 96, dtype)
    for place in (0, 50, 95):
        broken = x.clone()
        broken[2, place] = value
        out = product(broken, *weight)
        assert out[2].isnan().all()
        assert torch.equal(out[:2], product(x[:2], *weight))


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["w8a8", "w4a8"])
def test_a_row_of_an_integer_product_does_not_depend_on_its_company_or_the_threads(
    kind: str, dtype: torch.dtype
) -> None:
    values, scales = weight_w8a8(96, 576)
    weight = (
        [quantized.pack_values(values), scales]
        if kind == "w8a8"
        else packed_w4(*weight_w4(96, 576, 9, FLOAT, True))
    )
    product, x = getattr(quantized, f"linear_{kind}"), activations(70, 576, dtype)
    alone = torch.cat([product(row, *weight) for row in x.split(1)])
    threads = torch.get_num_threads()
    try:
        for torch_threads in (1, 3):
            torch.set_num_threads(torch_threads)
            for rows in range(1, 71):
                assert torch.equal(product(x[:rows], *weight), alone[:rows])
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------- 4-bit weights

# (outputs, inputs, groups): one group, groups of 8, 32 and 64 inputs, groups of 96, whose ends are
# no ends of parts.
SIZES_W4 = [(16, 32, 1), (48, 96, 12), (96, 576, 9), (64, 1536, 48), (80, 960, 10), (32, 224, 1)]


def weight_w4(
    outputs: int, inner: int, groups: int, dtype: torch.dtype, has_zeros: bool
) -> list[Any]:
    words = torch.randint(-(2**31), 2**31, (outputs, inner // 8)).to(torch.int32)
    zeros = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8) if has_zeros else None
    return [words, (torch.rand(outputs, groups) / 100).to(dtype), zeros]


def packed_w4(nibbles: Tensor, scales: Tensor, zeros: Tensor | None) -> list[Any]:
    """The same, packed."""
    packed = quantized.pack_nibbles(nibbles, scales, *([] if zeros is None else [zeros]))
    return [*packed, *([None] if zeros is None else [])]


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("outputs", "inner", "groups"), SIZES_W4)
def test_w4a16_is_the_product_with_the_dequantized_weight(
    outputs: int, inner: int, groups: int, has_zeros: bool, dtype: torch.dtype
) -> None:
    nibbles, scales, zeros = weight_w4(outputs, inner, groups, dtype, has_zeros)
    packed = packed_w4(nibbles, scales, zeros)
    weight = ops.pack_weight(reference_quantized.dequantize(nibbles, scales, zeros, dtype))
    assert packed[0].ndim == 3 and weight.ndim == 4, "the kernels are not used"
    bias = torch.randn(outputs).to(dtype)
    for tokens in (0, 1, 2, 3, 5, 11, 12, 13, 25, 33, 70, 300):
        x = activations(tokens, inner, dtype) if tokens else torch.empty(0, inner, dtype=dtype)
        for added in (None, bias):
            assert torch.equal(
                quantized.linear_w4a16(x, *packed, added), ops.linear(x, weight, added)
            )


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("outputs", "inner", "groups"), SIZES_W4)
def test_w4a8_is_the_reference(
    outputs: int, inner: int, groups: int, has_zeros: bool, dtype: torch.dtype
) -> None:
    nibbles, scales, zeros = weight_w4(outputs, inner, groups, torch.float32, has_zeros)
    packed = packed_w4(nibbles, scales, zeros)
    assert packed[0].ndim == 3, "the kernel is not used"
    bias = torch.randn(outputs).to(dtype)
    for tokens in (0, 1, 2, 3, 5, 11, 12, 13, 25, 33, 70, 300):
        x = activations(tokens, inner, dtype) if tokens else torch.empty(0, inner, dtype=dtype)
        for added in (None, bias):
            expected = reference_quantized.linear_w4a8(x, nibbles, scales, zeros, added)
            assert torch.equal(quantized.linear_w4a8(x, *packed, added), expected)


def test_the_reference_of_w4a8_is_the_product_of_integers() -> None:
    """By another way, in numpy's integers; and near the product of the floats that they stand
    for."""
    nibbles, scales, zeros = weight_w4(48, 96, 3, torch.float32, True)
    x = activations(7, 96, torch.float32)
    numbers, row_scales = reference_quantized.quantize_rows(x)
    weight = (
        reference_quantized.unpack(nibbles).numpy().reshape(48, 3, 32).astype(int)
        - zeros.numpy()[..., None]
    )
    sums = np.einsum("tgk,ogk->tog", numbers.numpy().reshape(7, 3, 32).astype(int), weight)
    exact = (sums * scales.double().numpy()).sum(-1) * row_scales.double().numpy()
    found = reference_quantized.linear_w4a8(x, nibbles, scales, zeros)
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-5, atol=1e-6 * np.abs(exact).max())
    near = x @ reference_quantized.dequantize(nibbles, scales, zeros, torch.float32).T
    assert (found - near).norm() < 0.02 * near.norm()


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("groups", [1, 256])
def test_w4a8_sums_are_exact_where_they_are_largest(groups: int) -> None:
    """The largest integers of both signs, in one group more of them than a float32 can add exactly:
    no step may saturate."""
    inner = 16384
    numbers = torch.tensor([0, 15])[torch.randint(0, 2, (32, inner))]
    numbers[0], numbers[1] = 0, 15
    x = torch.tensor([-1.0, 1.0])[torch.randint(0, 2, (5, inner))]
    x[0], x[1] = 1, -1
    for zero in (None, 0, 15):
        zeros = None if zero is None else torch.full((32, groups), zero, dtype=torch.uint8)
        packed = packed_w4(
            reference_quantized.pack(numbers), torch.full((32, groups), 127.0), zeros
        )
        sums = (x.double() * 127) @ (numbers - (8 if zero is None else zero)).double().T
        assert groups > 1 or zero is None or sums.abs().max() == 15 * 127 * inner > 2**24
        expected = reference_quantized.linear_w4a8(
            x, reference_quantized.pack(numbers), torch.full((32, groups), 127.0), zeros
        )
        found = quantized.linear_w4a8(x, *packed)
        assert torch.equal(found, expected)
        if groups == 1:
            assert torch.equal(found, sums.float() * 127 * (torch.ones(5, 1) / 127))


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_w4a16_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    weight, x = weight_w4(96, 576, 9, dtype, True), activations(70, 576, dtype)
    packed = packed_w4(*weight)
    alone = torch.cat([quantized.linear_w4a16(row, *packed) for row in x.split(1)])
    for rows in range(1, 71):
        assert torch.equal(quantized.linear_w4a16(x[:rows], *packed), alone[:rows])


@pytest.mark.parametrize(("outputs", "inner"), [(40, 64), (16, 48)])
def test_4_bit_weights_that_fill_no_groups_are_left_to_torch(outputs: int, inner: int) -> None:
    nibbles, scales, zeros = weight_w4(outputs, inner, 2, torch.float32, True)
    assert all(
        a is b
        for a, b in zip(packed_w4(nibbles, scales, zeros), (nibbles, scales, zeros), strict=True)
    )
    x = activations(4, inner, torch.float32)
    for product in ("linear_w4a16", "linear_w4a8"):
        expected = getattr(reference_quantized, product)(x, nibbles, scales, zeros)
        assert torch.equal(getattr(quantized, product)(x, nibbles, scales, zeros), expected)


def test_inputs_that_no_w4_kernel_takes_are_left_to_torch() -> None:
    nibbles, scales, zeros = weight_w4(48, 64, 2, torch.float32, True)
    packed, x = packed_w4(nibbles, scales, zeros), activations(4, 128, torch.float32)
    for each in (x[:, :64].double(), x[:, :64].bfloat16(), x[:, :64], x[:, ::2]):
        for product in ("linear_w4a16", "linear_w4a8"):
            expected = getattr(reference_quantized, product)(each, nibbles, scales, zeros)
            assert torch.equal(getattr(quantized, product)(each, *packed), expected)
    ids = torch.tensor([0, 47, 17, 17])
    expected = reference_quantized.rows(ids, nibbles, scales, zeros, torch.bfloat16)
    assert torch.equal(quantized.rows(ids, *packed, torch.bfloat16), expected)


# ---------------------------------------------------------------- what no kernel takes


@pytest.mark.parametrize(("outputs", "inner"), [(40, 64), (16, 30)])
def test_sizes_that_fill_no_words_are_left_to_torch(outputs: int, inner: int) -> None:
    values, scales = weight_w8a8(outputs, inner)
    assert quantized.pack_values(values) is values
    x = activations(4, inner, torch.float32)
    assert torch.equal(
        quantized.linear_w8a8(x, values, scales), reference_quantized.linear_w8a8(x, values, scales)
    )


def test_inputs_that_no_kernel_takes_are_left_to_torch() -> None:
    """Another dtype, rows that lie apart, a bias of another dtype, a gradient that is asked for."""
    values, scales = weight_w8a8(48, 64)
    packed, x = quantized.pack_values(values), activations(4, 128, torch.float32)
    for each in (x[:, :64].double(), x[:, :64].half(), x[:, :64], x[:, ::2]):
        expected = reference_quantized.linear_w8a8(each, values, scales)
        assert torch.equal(quantized.linear_w8a8(each, packed, scales), expected)
    bias, x = torch.randn(48).bfloat16(), x[:, 64:].contiguous()
    expected = reference_quantized.linear_w8a8(x, values, scales, bias)
    assert torch.equal(quantized.linear_w8a8(x, packed, scales, bias), expected)
    scales.requires_grad_()
    assert quantized.linear_w8a8(x, packed, scales).grad_fn is not None
    with pytest.raises(RuntimeError):
        quantized.linear_w8a8(x[:, :32].contiguous(), packed, scales)


def test_rows_of_a_packed_embedding() -> None:
    values, scales = weight_w8a8(160, 96)
    ids = torch.tensor([0, 159, 17, 17, 16, 15])
    packed = quantized.pack_values(values)
    expected = reference_quantized.rows(ids, values, scales, None, torch.bfloat16)
    assert torch.equal(quantized.rows(ids, packed, scales, None, torch.bfloat16), expected)


@pytest.mark.usefixtures("kernels_alone")
def test_packed_experts_are_multiplied_by_their_own_weights() -> None:
    weight = QuantizedWeight.empty((3, 48, 64), W8A8, torch.device("cpu"))
    values, scales = zip(*(weight_w8a8(48, 64) for _ in range(3)), strict=True)
    weight.values.copy_(torch.stack(values))
    weight.scales.copy_(torch.stack(scales))
    weight.pack()
    x = activations(5, 64, torch.float32)
    for expert in range(3):
        expected = reference_quantized.linear_w8a8(x, values[expert], scales[expert])
        assert torch.equal(weight[expert](x), expected)


# ---------------------------------------------------------------- the engine, and other machines

ENGINE = """
import sys
from tests.ops.test_quantized_kernels import engine_tokens
print(engine_tokens(*sys.argv[1:]))
"""


def engine_tokens(folder: str, quantization: str) -> list[list[int]]:
    llm = LLM(
        folder, dtype="float32", num_kv_blocks=64, quantization=quantization, quantize_head=True
    )
    return greedy(llm, [[1, 2, 3], list(range(5, 60)), [7] * 17], 24)


def run(code: str, *arguments: str, **environment: str) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_greedy_tokens_are_the_same_with_and_without_kernels(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = []
    multiply = native_quantized.linear_w8a8

    def counting(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        packed.append(values.ndim == 3)
        return multiply(x, values, scales, bias)

    monkeypatch.setattr(native_quantized, "linear_w8a8", counting)
    tokens = engine_tokens(str(tiny_model), "w8a8")
    assert packed and all(packed)
    assert run(ENGINE, str(tiny_model), "w8a8", NANOVLLM_NATIVE="0") == f"{tokens}\n"


def run_this_file(flags: str, after: str = "status") -> None:
    """Its tests, with kernels that are compiled with these flags; then the Python expression
    `after` must be 0."""
    code = (
        "import ctypes, pytest, sys; from nanovllm.ops import native, native_quantized; "
        "native.is_available() or sys.exit(9); "
    )
    code += f"status = pytest.main(sys.argv[1:]); sys.exit({after})"
    chosen = "not older and not emulated and not greedy"
    report = run(code, "-q", "-p", "no:cacheprovider", __file__, "-k", chosen, CXXFLAGS=flags)
    assert " passed" in report and "skipped" not in report


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instructions of x86")
@pytest.mark.parametrize(
    "flags",
    # By day all of this file runs as with AVX2, too.
    [
        "-mno-avx512vnni -O1",
        pytest.param("-mno-avx512f -O1", marks=pytest.mark.nightly),
        "-march=x86-64 -O1",
    ],
)
def test_older_machines_compute_the_same(flags: str) -> None:
    run_this_file(flags)


def test_emulated_amx_computes_the_same() -> None:
    cpu, tiles = Path("/proc/cpuinfo"), Path(__file__).parent / "amx.h"
    if not (cpu.exists() and {"avx512_bf16", "avx512_vnni"} <= {*cpu.read_text().split()}):
        pytest.skip("a CPU with AMX has AVX512_BF16 and VNNI, too, which are not emulated")
    digest = hashlib.sha256(
        tiles.read_bytes()
    ).hexdigest()  # the cache keeps a library for each version of the emulation
    count = "ctypes.c_int64.in_dll(native_quantized._library(), 'emulated_byte_products').value"
    run_this_file(f"-O1 -include {tiles} -DEMULATION=0x{digest}", f"status or {count} == 0")
