"""Chooses the integers that stand for a matrix: to the nearest, by GPTQ, and by AWQ.

Each function takes a matrix and statistics of the layer's inputs, and does not need the engine.
`weight` is `[out_features, in_features]`, a layer's inputs are `[tokens, in_features]`, and the
product is `inputs @ weight.T`.

- Rounding to the nearest (RTN) needs no inputs.
- GPTQ (Frantar et al. 2022, arXiv 2210.17323) rounds one input's column after the other, and
  changes the columns that are not rounded yet to keep the error of the layer's output small.
- AWQ (Lin et al. 2023, arXiv 2306.00978) rounds to the nearest, but first multiplies the columns of
  large inputs by a factor, by which the layer before divides its output, and cuts off outliers.

Built by notebooks/41_quantization.ipynb: edit it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.ops.reference_quantized import round_to_nearest

# Columns that GPTQ rounds before it updates all later ones at once, if a group is a whole row.
BLOCK_SIZE = 128
AWQ_STEPS = 20
CLIP_STEPS = 10
CLIP_LEAST = 0.5


class Grid(NamedTuple):
    """The numbers that a quantized weight can be: `(q - zero) * scale`, for the integers q from
    `low` to `high`.

    Attributes:
        scales, zeros: `[out_features, groups]` float32, each for a group of neighbouring inputs.
    """

    scales: Tensor
    zeros: Tensor
    low: int
    high: int

    def columns(self, groups: Tensor) -> Grid:
        """The grid of each input, if input i belongs to group `groups[i]`."""
        return Grid(self.scales[:, groups], self.zeros[:, groups], self.low, self.high)

    def round(self, weight: Tensor) -> Tensor:
        """The nearest integers q; a scale and a zero belong to as many neighbouring inputs as the
        shapes say."""
        grouped: Tensor = weight.unflatten(1, (self.scales.shape[1], -1))
        q = (grouped / self.scales[..., None]).round() + self.zeros[..., None]
        return q.clamp(self.low, self.high).flatten(1)

    def dequantize(self, q: Tensor) -> Tensor:
        """The matrix that the integers stand for, in float32."""
        grouped: Tensor = q.unflatten(1, (self.scales.shape[1], -1))
        return ((grouped - self.zeros[..., None]) * self.scales[..., None]).flatten(1)


@dataclass(frozen=True)
class Format:
    """How numbers are stored.

    Attributes:
        bits: 4 or 8.
        group_size: neighbouring inputs with one scale; 0: all inputs.
        symmetric: the zeros are the middle of the range; otherwise (with 4 bits alone) each group
            has a zero of its own.
        dtype: of the stored scales.
    """

    bits: int = 4
    group_size: int = 64
    symmetric: bool = True
    dtype: torch.dtype = torch.float32

    def grid(self, weight: Tensor) -> Grid:
        """A grid that reaches from the smallest weight of each group to the largest."""
        groups = weight.shape[1] // (self.group_size or weight.shape[1])
        _, scales, zeros = round_to_nearest(weight, self.bits, groups, self.symmetric, self.dtype)
        low, high, middle = (0, 15, 8) if self.bits == 4 else (-127, 127, 0)
        wide = scales.float()
        return Grid(
            wide, torch.full_like(wide, middle) if zeros is None else zeros.float(), low, high
        )


class Quantized(NamedTuple):
    """A quantized matrix: integers `[out_features, in_features]`, as float32, and their grid."""

    q: Tensor
    grid: Grid

    def dequantize(self) -> Tensor:
        """The matrix, in float32."""
        return self.grid.dequantize(self.q)


def rtn(weight: Tensor, form: Format) -> Quantized:
    """Round each weight to the nearest number of its group's grid."""
    grid = form.grid(weight)
    return Quantized(grid.round(weight.float()), grid)


def hessian_of(inputs: Tensor) -> Tensor:
    """`2 / tokens * inputs.T @ inputs`, `[in_features, in_features]` float32: the second derivative
    of an output's squared error, mean over the tokens, by this output's weights. It is the same for
    all outputs."""
    x = inputs.float()
    return x.T @ x * (2 / len(x))


def output_error(difference: Tensor, hessian: Tensor) -> Tensor:
    """The squared error of each output, mean over the tokens, `[out_features]`, if the weight is
    wrong by `difference`: `d H dᵀ / 2`."""
    return ((difference @ hessian) * difference).sum(1) / 2


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper triangular U with `UᵀU = H⁻¹`. Row i says how the columns from i on are best
    changed when column i is wrong: by `-error * U[i, i:] / U[i, i]`. It is the first row of the
    inverse Hessian of these columns alone, up to a factor.

    Args:
        damping: share of the mean of the diagonal that is added to the diagonal, since inputs that
            depend on each other, or are always 0, have no inverse.
    """
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def gptq_block(weight: Tensor, factor: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Round the columns of one block.

    Args:
        weight: `[out_features, columns]`.
        factor: the block's part of `inverse_factor`.
        grid: of each column.

    Returns: (integers, errors), both `[out_features, columns]`. An error is divided by the factor's
    diagonal."""
    left = weight.clone()
    q = torch.empty_like(weight)
    errors = torch.empty_like(weight)
    for i in range(weight.shape[1]):
        here = grid.columns(torch.tensor([i]))
        column = left[:, i : i + 1]
        q[:, i : i + 1] = here.round(column)
        errors[:, i : i + 1] = (column - here.dequantize(q[:, i : i + 1])) / factor[i, i]
        left[:, i:] -= torch.outer(errors[:, i], factor[i, i:])
    return q, errors


def gptq(
    weight: Tensor, hessian: Tensor, form: Format, act_order: bool = True, damping: float = 0.05
) -> Quantized:
    """Round column after column, and let later columns compensate for the error.

    Each column changes the rest of its block immediately (`gptq_block`). When the block is done,
    one product of matrices changes all later columns, by the same sums.

    Args:
        hessian: see `hessian_of`.
        act_order: begin with the largest inputs, while many columns are left to compensate for
            their errors. The grids are then those of the original weights ("static groups"), so
            that groups stay together. Otherwise a group's grid is chosen when its first column is
            reached, for weights that have been changed.
        damping: see `inverse_factor`.
    """
    weight = weight.float()
    size = form.group_size or weight.shape[1]
    order = hessian.diagonal().argsort(descending=True) if act_order else torch.arange(len(hessian))
    factor = inverse_factor(hessian[order][:, order], damping)
    grid = form.grid(weight)
    left = weight[:, order]
    q = torch.empty_like(weight)
    for start in range(0, len(order), form.group_size or BLOCK_SIZE):
        block = slice(start, start + (form.group_size or BLOCK_SIZE))
        if not act_order and start % size == 0:
            here = form.grid(left[:, start : start + size])
            grid.scales[:, start // size] = here.scales[:, 0]
            grid.zeros[:, start // size] = here.zeros[:, 0]
        q[:, block], errors = gptq_block(
            left[:, block], factor[block, block], grid.columns(order[block] // size)
        )
        left[:, block.stop :] -= errors @ factor[block, block.stop :]
    return Quantized(q[:, order.argsort()], grid)


def awq_factors(weight: Tensor, hessian: Tensor, magnitudes: Tensor, form: Format) -> Tensor:
    """Return a factor for each input, `[in_features]` float32, for which the rounded product of
    `inputs / factors` and `weight * factors` has the smallest error: `magnitudes ** alpha`, with
    the best of twenty alphas from 0 on.

    A column that is multiplied by a factor above 1 mostly keeps its group's scale, so that its
    weights are rounded in finer steps.

    Args:
        magnitudes: `[in_features]`, the mean of each input's absolute value.
    """
    best = torch.ones_like(magnitudes)
    least = float("inf")
    for step in range(AWQ_STEPS):
        factors = magnitudes.clamp(min=1e-4) ** (step / AWQ_STEPS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = (
            output_error(rtn(weight * factors, form).dequantize() / factors - weight, hessian)
            .sum()
            .item()
        )
        if error < least:
            best = factors
            least = error
    return best


def clip_outliers(weight: Tensor, hessian: Tensor, form: Format) -> Tensor:
    """Return the weight with the outliers of each group cut off, at that of ten limits with which
    the group's share of the output has the smallest error. The limits are between the largest
    absolute value and just above half of it. All other weights of the group get finer steps."""
    size = form.group_size or weight.shape[1]
    grouped: Tensor = weight.unflatten(1, (-1, size))
    own = torch.stack([hessian[i : i + size, i : i + size] for i in range(0, len(hessian), size)])
    largest = grouped.abs().amax(-1, keepdim=True)
    best = grouped
    least = torch.full_like(largest, float("inf"))
    for step in range(CLIP_STEPS):
        limit = largest * (1 - (1 - CLIP_LEAST) * step / CLIP_STEPS)
        clipped = grouped.clamp(-limit, limit)
        wrong = rtn(clipped.flatten(1), form).dequantize().view_as(grouped) - grouped
        error = (torch.einsum("ngi,gij->ngj", wrong, own) * wrong).sum(-1, keepdim=True)
        best = torch.where(error < least, clipped, best)
        least = torch.minimum(error, least)
    return best.flatten(1)
