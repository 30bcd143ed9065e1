"""GPTQ against a search that inverts the Hessian of what is left anew for each column, grids
against compressed-tensors, and AWQ's searches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm.offline.algorithms import (
    Format,
    Grid,
    awq_factors,
    clip_outliers,
    gptq,
    hessian_of,
    output_error,
    rtn,
)

FORMATS = [
    Format(4, 16),
    Format(4, 16, symmetric=False),
    Format(4, 0),
    Format(4, 16, dtype=torch.bfloat16),
    Format(8, 0),
]


def layer(
    outputs: int = 24, inputs: int = 64, tokens: int = 400, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """A matrix, and inputs that depend on each other and are of different sizes, as those of a
    trained model."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, inputs // 4, generator=generator) @ torch.randn(
        inputs // 4, inputs, generator=generator
    )
    x = (hidden + torch.randn(tokens, inputs, generator=generator)) * torch.rand(
        inputs, generator=generator
    ) ** 2
    return torch.randn(outputs, inputs, generator=generator) * 0.05, x


def brute_force(
    weight: Tensor, hessian: Tensor, form: Format, act_order: bool, damping: float = 0.05
) -> Tensor:
    """Optimal Brain Quantization in a fixed order: round a column, change all later ones for the
    least error, and invert the Hessian of the later ones from scratch. In float64."""
    size = form.group_size or weight.shape[1]
    damped = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(
        len(hessian)
    )
    left, q = weight.double(), torch.empty_like(weight.double())
    waiting = (
        sorted(range(len(hessian)), key=lambda i: -hessian[i, i].item())
        if act_order
        else list(range(len(hessian)))
    )
    while waiting:
        i, first = waiting[0], waiting[0] // size * size
        if act_order or i % size == 0:
            grid = form.grid((weight if act_order else left)[:, first : first + size].float())
        column = Grid(grid.scales.double(), grid.zeros.double(), grid.low, grid.high)
        q[:, i : i + 1] = column.round(left[:, i : i + 1])
        wrong = left[:, i] - column.dequantize(q[:, i : i + 1])[:, 0]
        inverse = torch.linalg.inv(damped[waiting][:, waiting])
        left[:, waiting] -= torch.outer(wrong, inverse[0] / inverse[0, 0])
        waiting.pop(0)
    return q.float()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_gptq_is_what_inverting_anew_for_each_column_finds(form: Format, act_order: bool) -> None:
    weight, x = layer()
    found = gptq(weight, hessian_of(x), form, act_order)
    expected = brute_force(weight, hessian_of(x), form, act_order)
    # Float32 may round a number the other way, and later ones then differ, too.
    assert (found.q == expected).float().mean() > 0.98
    assert (found.q - expected).abs().max() <= 1


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_gptq_errs_less_than_rounding_to_nearest(form: Format, act_order: bool) -> None:
    """On inputs that it has not seen."""
    weight, x = layer(tokens=4000)
    seen, unseen = x[:2000], x[2000:]
    by_gptq, by_rtn = gptq(weight, hessian_of(seen), form, act_order), rtn(weight, form)

    def error(matrix: Tensor) -> float:
        return (unseen @ (matrix - weight).T).square().mean().item()

    assert error(by_gptq.dequantize()) < 0.5 * error(by_rtn.dequantize())
    low, high = (0, 15) if form.bits == 4 else (-127, 127)
    assert (
        by_gptq.q.min() >= low
        and by_gptq.q.max() <= high
        and torch.equal(by_gptq.q, by_gptq.q.round())
    )


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    weight, x = layer()
    x[:, 5] = 0
    found = gptq(weight, hessian_of(x), Format(4, 16))
    assert found.dequantize().isfinite().all()
    assert ((found.dequantize() - weight)[:, 5].abs() <= 0.51 * found.grid.scales[:, 0]).all(), (
        "it is just rounded"
    )


def test_the_hessian_says_what_an_error_does_to_the_output() -> None:
    weight, x = layer()
    difference = rtn(weight, Format(4, 16)).dequantize() - weight
    expected = (x @ difference.T).square().mean(0)
    assert torch.allclose(output_error(difference, hessian_of(x)), expected, rtol=1e-4)


@pytest.mark.parametrize("symmetric", [True, False])
def test_grids_are_those_of_compressed_tensors(symmetric: bool) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weight, size = layer()[0], 16
    arguments = quantization.QuantizationArgs(
        num_bits=4, symmetric=symmetric, strategy="group", group_size=size
    )
    grouped = weight.unflatten(1, (-1, size))
    scales, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
    found = rtn(weight, Format(4, size, symmetric))
    assert torch.allclose(found.grid.scales, scales, rtol=1e-6)
    assert torch.equal(found.grid.zeros, zeros.float() + 8)
    theirs = fake_quantize(weight, found.grid.scales, zeros, arguments)
    assert torch.allclose(found.dequantize(), theirs, atol=1e-6)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_awq_s_searches_only_gain(form: Format) -> None:
    weight, x = layer(tokens=2000)
    hessian = hessian_of(x)
    factors = awq_factors(weight, hessian, x.abs().mean(0), form)
    scaled, scaled_hessian = weight * factors, hessian / torch.outer(factors, factors)
    clipped = rtn(clip_outliers(scaled, scaled_hessian, form), form).dequantize()

    def error(matrix: Tensor) -> float:
        return output_error(matrix - weight, hessian).sum().item()

    plain, by_factors = rtn(weight, form), rtn(scaled, form)
    assert torch.isclose(factors.max() * factors.min(), torch.tensor(1.0))
    assert error(by_factors.dequantize() / factors) <= error(plain.dequantize())
    if form.bits == 4:
        assert error(clipped / factors) < 0.9 * error(plain.dequantize())
    by_size = factors[x.abs().mean(0).argsort()]
    assert (by_size.diff() >= 0).all(), "larger inputs have larger factors"
