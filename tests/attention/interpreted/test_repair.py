"""What the repair of Triton's interpreter changes, and that it still is needed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from nanovllm.ops.triton_interpreter import REPAIRS, narrow, repair, widen


@pytest.fixture
def unrepaired() -> Iterator[None]:
    """Triton's own interpreter."""
    repair()
    with pytest.MonkeyPatch.context() as patch:
        for name in REPAIRS:
            patch.setattr(InterpreterBuilder, name, vars(InterpreterBuilder)[name].args[0])
        yield


@pytest.fixture
def repaired() -> None:
    repair()


@triton.jit
def convert_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    offset = tl.arange(0, SIZE)
    tl.store(out_ptr + offset, tl.load(x_ptr + offset).to(out_ptr.dtype.element_ty))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    a = tl.load(a_ptr + row * SIZE + column)
    b = tl.load(b_ptr + row * SIZE + column)
    tl.store(out_ptr + row * SIZE + column, tl.dot(a, b))


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, smaller_ptr, SIZE: tl.constexpr):
    offset = tl.arange(0, SIZE)
    x = tl.load(x_ptr + offset)
    y = tl.load(y_ptr + offset)
    tl.store(out_ptr + offset, x + y)
    tl.store(out_ptr + SIZE + offset, x * y)
    tl.store(out_ptr + 2 * SIZE + offset, -x)
    tl.store(out_ptr + 3 * SIZE + offset, tl.where((x < y) & (x != y), x, y))
    tl.store(smaller_ptr + offset, (x < y).to(tl.int8))


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    size = triton.next_power_of_2(len(x))
    padded = torch.nn.functional.pad(x, (0, size - len(x)))
    out = torch.empty(size, dtype=dtype)
    convert_kernel[(1,)](padded, out, SIZE=size)
    return out[: len(x)]


def same(ours: Tensor, expected: Tensor) -> bool:
    """Bit by bit, but for which NaN it is."""
    numbers = ~expected.isnan()
    bits = torch.int16 if ours.dtype == torch.bfloat16 else torch.int32
    return torch.equal(ours.isnan(), ~numbers) and torch.equal(
        ours[numbers].view(bits), expected[numbers].view(bits)
    )


def every_bfloat16() -> Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


def borders() -> Tensor:
    """float32 numbers at, and one step from, the middle between two bfloat16 numbers, and special
    ones."""
    patterns = torch.randint(
        -(2**31), 2**31 - 1, (3000,), generator=torch.Generator().manual_seed(0)
    )
    middles = patterns & ~0xFFFF | 0x8000
    special = torch.tensor(
        [0, -(2**31), 1, 0x7F7FFFFF, 0x7F800000, -0x800000, 0x7F800001, -1, 0x7FFFFFFF, 0x8000]
    )
    return (
        torch.cat((patterns, middles, middles - 1, middles + 1, special))
        .to(torch.int32)
        .view(torch.float32)
    )


def dot_error() -> float:
    torch.manual_seed(0)
    a, b = torch.randn(2, 16, 16, dtype=torch.bfloat16)
    out = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, out, SIZE=16)
    return (out.double() - a.double() @ b.double()).abs().max().item()


def test_rounding_is_to_nearest_even(repaired: None) -> None:
    assert same(convert(borders(), torch.bfloat16), borders().to(torch.bfloat16))


def test_widening_is_exact_for_every_number(repaired: None) -> None:
    assert same(convert(every_bfloat16(), torch.float32), every_bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.float64])
def test_other_dtypes_are_converted_by_value(repaired: None, dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, -3, 255, 257, -1000, 40000 if dtype != torch.float16 else 2000]).to(
        dtype
    )
    assert same(convert(x, torch.bfloat16), x.to(torch.bfloat16))
    assert torch.equal(convert(x.to(torch.bfloat16), dtype), x.to(torch.bfloat16).to(dtype))


def test_a_product_of_matrices(repaired: None) -> None:
    assert dot_error() < 1e-5


def test_arithmetic_and_comparisons(repaired: None) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 64).to(torch.bfloat16)
    out, smaller = torch.empty(4, 64, dtype=torch.bfloat16), torch.empty(64, dtype=torch.int8)
    arithmetic_kernel[(1,)](x, y, out, smaller, SIZE=64)
    assert same(out.flatten(), torch.stack((x + y, x * y, -x, torch.minimum(x, y))).flatten())
    assert torch.equal(smaller.bool(), x < y)


def test_a_second_repair_changes_nothing(repaired: None) -> None:
    before = [vars(InterpreterBuilder)[name] for name in REPAIRS]
    repair()
    assert [vars(InterpreterBuilder)[name] for name in REPAIRS] == before


def test_the_repair_is_needed(unrepaired: None) -> None:
    """If this fails, Triton has learnt bfloat16, and the repair can go."""
    assert dot_error() > 1
    assert not same(convert(borders(), torch.bfloat16), borders().to(torch.bfloat16))
    assert not same(convert(every_bfloat16(), torch.float32), every_bfloat16().float())


def test_widen_and_narrow_take_scalars() -> None:
    """Reductions of the interpreter leave arrays without dimensions."""
    assert widen(np.uint16(0x3F80)) == 1.0 and narrow(np.float32(1.0)) == 0x3F80  # type: ignore[arg-type]
