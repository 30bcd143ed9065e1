"""The Triton products with quantized weights: against float64, against plain torch, and rows that
do not depend on their batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.layers.quantization import W8A8, QuantizedWeight, Scheme
from nanovllm.ops import quantized, reference_quantized
from nanovllm.ops import triton_quantized as ours
from tests.pairwise import in_turn
from tests.stand_ins import refuse_reference, set_constants, set_failure, set_kernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# (outputs, inputs, groups): groups of 32, 64 and 128 inputs, whole rows; outputs and parts of the
# inputs that fill no tile.
SIZES = [((48, 192, 6),), ((80, 576, 9),), ((64, 256, 2),), ((144, 320, 1),)]
TOKENS = [1, 16, 17, 65]  # one row, a whole tile, and each tile that is not full
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")


@pytest.fixture(autouse=True)
def _generator() -> None:
    torch.manual_seed(0)


@pytest.fixture
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that hands its work to plain torch would agree with plain torch."""
    refuse_reference(monkeypatch, ours, pack=reference_quantized.pack)


def weight_w4(
    outputs: int, inputs: int, groups: int, dtype: torch.dtype, has_zeros: bool
) -> list[Any]:
    words = torch.randint(-(2**31), 2**31, (outputs, inputs // 8)).to(torch.int32)
    zeros = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8) if has_zeros else None
    return [words, (torch.rand(outputs, groups) / 100).to(dtype), zeros]


def weight_w8(outputs: int, inputs: int, groups: int = 1) -> list[Tensor]:
    return [
        torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8),
        torch.rand(outputs, groups) / 100,
    ]


def activations(tokens: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Rows of different sizes in a wider tensor, whose other columns are poison."""
    wide = torch.full((tokens, inputs + 3), float("nan"), dtype=dtype)
    wide[:, :inputs] = torch.randn(tokens, inputs) * 4.0 ** torch.randint(-3, 4, (tokens, 1))
    return wide[:, :inputs]


def assert_near(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within the rounding of the result, and of sums in float32 relative to the sizes of their
    addends."""
    expected, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    expected += 0 if bias is None else bias.double()
    bound = (
        torch.finfo(x.dtype).eps * expected.abs()
        + 2**-21 * sizes
        + torch.finfo(x.dtype).smallest_normal
    )
    assert out.dtype == x.dtype and ((out.double() - expected).abs() <= bound).all()


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize(
    ("size", "has_zeros", "dtype"), in_turn(SIZES, [False, True], DTYPES, one_in=4), ids=str
)
def test_w4a16(size: tuple[int, int, int], has_zeros: bool, dtype: torch.dtype) -> None:
    outputs, inputs, groups = size
    nibbles, scales, zeros = weight_w4(outputs, inputs, groups, dtype, has_zeros)
    weight, packed = (
        reference_quantized.dequantize(nibbles, scales, zeros, dtype),
        ours.pack_nibbles(nibbles)[0],
    )
    bias = torch.randn(outputs).to(dtype)
    for tokens, added in zip(TOKENS, (None, bias, bias, None), strict=True):
        x = activations(tokens, inputs, dtype)
        assert_near(ours.linear_w4a16(x, packed, scales, zeros, added), x, weight, added)


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize(
    ("size", "dtype"), in_turn([*SIZES, ((33, 96, 3),), ((40, 50, 1),)], DTYPES), ids=str
)
def test_w8a16(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    outputs, inputs, groups = size
    values, scales = weight_w8(outputs, inputs, groups)
    scales, bias = scales.to(dtype), torch.randn(outputs).to(dtype)
    weight = reference_quantized.dequantize(values, scales, None, dtype)
    for tokens, added in zip(TOKENS, (None, bias, bias, None), strict=True):
        x = activations(tokens, inputs, dtype)
        assert_near(ours.linear_w8a16(x, values, scales, added), x, weight, added)


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_the_dequantized_ones_to_the_last_bit(bits: int, dtype: torch.dtype) -> None:
    """A product with the unit matrix is the weight. All integers of a group, zero points, and
    scales down to the smallest."""
    scales = 2.0 ** torch.linspace(-20 if dtype == torch.float16 else -120, 6, 64).view(16, 4) * (
        1 + torch.rand(16, 4)
    )
    scales, x = scales.to(dtype), torch.eye(128, dtype=dtype)
    if bits == 4:
        nibbles, _, zeros = weight_w4(16, 128, 4, dtype, True)
        out = ours.linear_w4a16(x, ours.pack_nibbles(nibbles)[0], scales, zeros)
        expected = reference_quantized.dequantize(nibbles, scales, zeros, dtype)
    else:
        values, _ = weight_w8(16, 128)
        out, expected = (
            ours.linear_w8a16(x, values, scales),
            reference_quantized.dequantize(values, scales, None, dtype),
        )
    assert torch.equal(out.T, expected)


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"), in_turn([(40, 50), (80, 576), (144, 200)], DTYPES), ids=str
)
def test_w8a8_is_the_reference(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    values, scales = weight_w8(outputs, inputs)
    bias = torch.randn(outputs).to(dtype)
    for tokens, added in zip(TOKENS, (None, bias, bias, None), strict=True):
        x = activations(tokens, inputs, dtype)
        x[tokens // 2] = 0
        expected = reference_quantized.linear_w8a8(x, values, scales, added)
        assert torch.equal(ours.linear_w8a8(x, values, scales, added), expected)


@pytest.mark.usefixtures("kernels_alone")
def test_w8a8_sums_are_exact_where_they_are_largest() -> None:
    inputs = 4096
    values = torch.tensor([-128, 127], dtype=torch.int8)[torch.randint(0, 2, (16, inputs))]
    values[0], values[1] = -128, 127
    x = torch.tensor([-1.0, 1.0])[torch.randint(0, 2, (3, inputs))]
    x[0], x[1] = 1, -1
    sums = (x.double() * 127) @ values.double().T
    assert sums.abs().max() == 128 * 127 * inputs > 2**24
    expected = sums.float() * (torch.ones(3, 1) / 127) * torch.full((16,), 127.0)
    assert torch.equal(ours.linear_w8a8(x, values, torch.full((16, 1), 127.0)), expected)


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize(("width", "dtype"), in_turn([1, 50, 1024, 20000], DTYPES), ids=str)
def test_rows_are_quantized_as_the_reference_does(width: int, dtype: torch.dtype) -> None:
    x = activations(5, width, dtype)
    x[1], x[2, 0] = 0, 127
    # With a scale of 1: halves.
    x[2, 1:7] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])[: width - 1]
    x[2, 7:] = 0
    expected = reference_quantized.quantize_rows(x)
    assert all(map(torch.equal, ours.quantize_rows(x), expected))
    assert width == 1 or expected[0][2, :7].tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_w8a8_of_what_is_no_number_is_none(value: float) -> None:
    values, scales = weight_w8(16, 100)
    x = activations(3, 100, torch.float32)
    x[2, 50] = value
    out = ours.linear_w8a8(x, values, scales)
    assert out[2].isnan().all() and torch.equal(out[:2], ours.linear_w8a8(x[:2], values, scales))


# ---------------------------------------------------------------- rows and their batch


@pytest.fixture
def order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's product may add in another order if a tile has another size; here the addends of
    `tl.dot` are added one by one. So bits differ if the kernels' own order does."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from nanovllm.ops.triton_interpreter import _widened

    def dot(
        self: Any, a: TensorHandle, b: TensorHandle, total: TensorHandle, *others: Any
    ) -> TensorHandle:
        left, right, sums = _widened(a).data, _widened(b).data, total.data
        for inner in range(left.shape[1]):
            sums = sums + left[:, inner, None].astype(sums.dtype) * right[None, inner].astype(
                sums.dtype
            )
        return TensorHandle(sums, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.mark.usefixtures("kernels_alone", "order_of_sums")
@pytest.mark.parametrize(("bits", "dtype"), in_turn([4, 8], DTYPES[::-1]), ids=str)
def test_a_row_depends_neither_on_its_batch_nor_on_who_shares_its_sums(
    bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    nibbles, scales, zeros = weight_w4(80, 320, 5, dtype, True)
    bias, x = torch.randn(80).to(dtype), activations(65, 320, dtype)
    weight = (
        (ours.pack_nibbles(nibbles)[0], scales, zeros)
        if bits == 4
        else (weight_w8(80, 320)[0], scales)
    )
    product = ours.linear_w4a16 if bits == 4 else ours.linear_w8a16
    alone = torch.cat([product(row, *weight, bias) for row in x[:3].split(1)])
    for few_programs in (ours.FEW_PROGRAMS, 0):
        set_constants(monkeypatch, ours, FEW_PROGRAMS=few_programs)
        for tokens in (3, 17, 65):  # each tile
            assert torch.equal(product(x[:tokens], *weight, bias)[:3], alone)
        assert torch.equal(product(x.flip(0)[-20:], *weight, bias).flip(0)[:3], alone)


# ---------------------------------------------------------------- layouts, and what no kernel takes


def test_packed_nibbles_are_where_the_module_says() -> None:
    nibbles, scales, zeros = weight_w4(48, 192, 6, torch.float32, True)
    packed, whole = ours.pack_nibbles(nibbles)[0], reference_quantized.unpack(nibbles)
    assert packed.shape == (3, 3, 512) and packed.dtype == torch.uint8
    for output, unit, byte in ((0, 0, 0), (17, 2, 31), (47, 1, 5)):
        pair = packed[output // 16, unit, output % 16 * 32 + byte].item()
        assert [pair & 15, pair >> 4] == whole[
            output, [64 * unit + byte, 64 * unit + byte + 32]
        ].tolist()
    ids = torch.tensor([0, 47, 17, 17])
    expected = reference_quantized.rows(ids, nibbles, scales, zeros, torch.bfloat16)
    assert torch.equal(ours.rows(ids, packed, scales, zeros, torch.bfloat16), expected)
    values, scales = weight_w8(48, 192)
    expected = reference_quantized.rows(ids, values, scales, None, torch.bfloat16)
    assert torch.equal(
        ours.rows(ids, ours.pack_values(values), scales, None, torch.bfloat16), expected
    )


@pytest.mark.parametrize(
    "case", ["float64", "gaps", "gradient", "groups of 16", "inputs", "outputs", "no rows"]
)
def test_fallback_for_what_no_kernel_covers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_failure(monkeypatch, ours, "_multiply", AssertionError("a kernel was called"))
    dtype = torch.float64 if case == "float64" else torch.float32
    outputs, inputs = 40 if case == "outputs" else 48, 96 if case == "inputs" else 128
    nibbles, scales, zeros = weight_w4(
        outputs, inputs, 8 if case == "groups of 16" else 1, dtype, True
    )
    x = torch.randn(0 if case == "no rows" else 3, 2 * inputs).to(dtype)
    x = x[:, ::2] if case == "gaps" else x[:, :inputs]
    scales.requires_grad = case == "gradient"
    out = ours.linear_w4a16(x, ours.pack_nibbles(nibbles)[0], scales, zeros)
    assert torch.equal(out, reference_quantized.linear_w4a16(x, nibbles, scales, zeros))
    assert out.requires_grad == (case == "gradient")
    if case in ("float64", "gaps", "gradient", "no rows"):
        values, scales = weight_w8(48, inputs)
        scales.requires_grad = case == "gradient"
        expected = reference_quantized.linear_w8a8(x, values, scales)
        assert torch.equal(ours.linear_w8a8(x, values, scales), expected)
        assert expected.requires_grad == (case == "gradient")


def test_rows_beyond_two_to_the_31() -> None:
    """Offsets of rows have 64 bits. Only two rows of the 4 GiB are ever touched."""
    row = 2**31
    x = torch.empty(row + 64, dtype=torch.bfloat16).as_strided((2, 64), (row, 1))
    x.copy_(activations(2, 64, torch.bfloat16))
    nibbles, scales, _ = weight_w4(16, 64, 1, torch.bfloat16, False)
    packed = ours.pack_nibbles(nibbles)[0]
    assert torch.equal(
        ours.linear_w4a16(x, packed, scales), ours.linear_w4a16(x.clone(), packed, scales)
    )
    values, scales = weight_w8(16, 64)
    assert torch.equal(
        ours.linear_w8a8(x, values, scales), reference_quantized.linear_w8a8(x, values, scales)
    )


@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("scheme", [Scheme(4, 32, has_zeros=True), W8A8], ids=str)
def test_packed_experts_are_multiplied_by_their_own_weights(
    scheme: Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_kernels(monkeypatch, quantized, ours)
    weight = QuantizedWeight.empty((3, 32, 64), scheme, torch.device("cpu"))
    for tensor in weight.parameters():
        tensor.copy_(
            torch.randint(0, 16, tensor.shape)
        ) if tensor.dtype != torch.float32 else tensor.uniform_(0.1, 1)
    whole, x = weight.dequantize(), activations(5, 64, torch.float32)
    stored = list(zip(weight.values, weight.scales, strict=True))
    weight.pack()
    for expert in range(3):
        out = weight[expert](x)
        if scheme == W8A8:
            assert torch.equal(out, reference_quantized.linear_w8a8(x, *stored[expert]))
        else:
            assert_near(out, x, whole[expert], None)
