"""Many small matrix products in one launch: rows sorted by expert, each group of rows with a weight
of its own.

Only the GPU knows how many rows an expert gets, and to read the numbers the host would have to
wait. So the grid has the largest size that may be needed, and each program computes from the counts
which expert and rows it serves, if any (a grouped GEMM, as in CUTLASS and in vLLM's fused_moe)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.ops import reference
from nanovllm.ops.triton_common import covers


class GroupedTiles(NamedTuple):
    """Sizes of a launch: rows, outputs and inputs of a tile, warps of a program, and stages of its
    pipeline."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def choose_grouped_tiles(rows_per_expert: float, dtype: torch.dtype) -> GroupedTiles:
    """Choose the sizes of a launch. Few rows per expert wait for its weights: they get 16 rows, the
    minimum of a matrix instruction.

    On average half the rows of an expert's last tile are wasted, so a tile should have far fewer
    rows than an expert gets."""
    # In float32 there is no exact matrix instruction: everything goes through registers.
    if dtype == torch.float32:
        return GroupedTiles(rows=16, outputs=64, inputs=32, num_warps=4, num_stages=3)
    if rows_per_expert <= 32:
        return GroupedTiles(rows=16, outputs=64, inputs=128, num_warps=4, num_stages=4)
    if rows_per_expert <= 256:
        return GroupedTiles(rows=64, outputs=128, inputs=64, num_warps=4, num_stages=3)
    return GroupedTiles(rows=128, outputs=128, inputs=64, num_warps=8, num_stages=3)


@triton.jit
def grouped_linear_kernel(
    x_ptr,
    weight_ptr,
    count_ptr,
    out_ptr,
    x_stride,
    expert_stride,
    num_experts,
    num_outputs,
    num_inputs,
    EXPERTS_P2: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """A tile of rows of one expert, and a tile of its outputs.

    Grid (as many row tiles as there could be, ceil(num_outputs / TILE_OUTPUTS)): neighbours share a
    tile of weights."""
    tile = tl.program_id(0)
    index = tl.arange(0, EXPERTS_P2)
    counts = tl.load(count_ptr + index, mask=index < num_experts, other=0).to(tl.int32)
    tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    done = tl.cumsum(tiles, 0) <= tile  # experts whose tiles come before this one
    expert = tl.sum(done.to(tl.int32))
    if expert < num_experts:
        first_row = tl.sum(tl.where(done, counts, 0))
        count = tl.sum(tl.where(index == expert, counts, 0))
        within = (tile - tl.sum(tl.where(done, tiles, 0))) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        row = (first_row + within).to(tl.int64)
        ours = within < count
        output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
        known = output < num_outputs
        channel = tl.arange(0, TILE_INPUTS)
        x_rows = x_ptr + row[:, None] * x_stride
        weight_rows = (
            weight_ptr
            + expert.to(tl.int64) * expert_stride
            + output.to(tl.int64)[None, :] * num_inputs
        )
        total = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
        for start in range(0, num_inputs, TILE_INPUTS):
            inside = start + channel < num_inputs
            x = tl.load(
                x_rows + (start + channel)[None, :], mask=ours[:, None] & inside[None, :], other=0.0
            )
            weight = tl.load(
                weight_rows + (start + channel)[:, None],
                mask=inside[:, None] & known[None, :],
                other=0.0,
            )
            total = tl.dot(x, weight, total, input_precision="ieee")
        tl.store(
            out_ptr + row[:, None] * num_outputs + output[None, :],
            total,
            mask=ours[:, None] & known[None, :],
        )


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    num_rows, num_inputs = x.shape
    num_experts, num_outputs, _ = weight.shape
    if not covers(x, weight) or weight.stride(1) != num_inputs:
        return reference.grouped_linear(x, weight, counts)
    out = x.new_empty(num_rows, num_outputs)
    if out.numel() > 0:
        tiles = choose_grouped_tiles(num_rows / num_experts, x.dtype)
        # Each expert with rows may have one tile that is not full.
        most = (num_rows + min(num_experts, num_rows) * (tiles.rows - 1)) // tiles.rows
        grouped_linear_kernel[(most, triton.cdiv(num_outputs, tiles.outputs))](
            x,
            weight,
            counts,
            out,
            x.stride(0),
            weight.stride(0),
            num_experts,
            num_outputs,
            num_inputs,
            EXPERTS_P2=triton.next_power_of_2(num_experts),
            TILE_ROWS=tiles.rows,
            TILE_OUTPUTS=tiles.outputs,
            TILE_INPUTS=tiles.inputs,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            enable_fp_fusion=True,
        )
    return out
