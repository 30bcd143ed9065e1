"""Parts of a decode's context, and how they become one result: the kernels of lecture 15 with
numbers that are chosen by hand."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.attention.triton_kernels import _parts, combine_kernel


@triton.jit
def parts_kernel(
    out_ptr,
    seq_len,
    window,
    NUM_SPLITS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    first, part = _parts(seq_len, window, NUM_SPLITS, TILE_KEYS, WINDOWED)
    tl.store(out_ptr, first)
    tl.store(out_ptr + 1, part)


@pytest.mark.parametrize(
    ("seq_len", "window", "splits", "expected", "why"),
    [
        (16, 0, 1, (0, 16), "a single part has all positions"),
        (17, 0, 1, (0, 32), "whole tiles of 16 positions"),
        (64, 0, 4, (0, 16), "a tile for each of 4 parts"),
        (65, 0, 4, (0, 32), "five tiles: at least two for some part, and all parts are equal"),
        (3, 0, 4, (0, 16), "the first part has all, the others none"),
        (100, 20, 2, (80, 16), "positions 80 to 99, from the start of a tile"),
        (100, 10, 2, (80, 16), "positions 90 to 99 are in the tiles from 80 on"),
        (100, 200, 2, (0, 64), "the window is wider than the context"),
    ],
)
def test_parts_are_whole_tiles(
    seq_len: int, window: int, splits: int, expected: tuple[int, int], why: str
) -> None:
    out = torch.zeros(2, dtype=torch.int32)
    parts_kernel[(1,)](out, seq_len, window, NUM_SPLITS=splits, TILE_KEYS=16, WINDOWED=window > 0)
    assert tuple(out.tolist()) == expected, f"(first position, positions per part): {why}"


SPLITS, HEADS, TILE = 4, 3, 16


def combine(
    seq_lens: list[int], log_weights: Tensor, query_lens: list[int], head_dim: int = 8
) -> tuple[Tensor, Tensor]:
    """The kernel's result, which is 7 where it writes nothing, and the averages of the parts."""
    partial = torch.randn(
        len(seq_lens), SPLITS, HEADS, head_dim, generator=torch.Generator().manual_seed(1)
    )
    for seq, seq_len in enumerate(seq_lens):
        part = triton.cdiv(triton.cdiv(seq_len, SPLITS), TILE) * TILE
        for split in range(SPLITS):
            if split * part >= seq_len:  # never written
                partial[seq, split] = log_weights[seq, split] = float("nan")
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    out = torch.full((sum(query_lens), HEADS, head_dim), 7.0)
    combine_kernel[(len(seq_lens), HEADS)](
        partial,
        log_weights,
        out,
        torch.tensor(seq_lens, dtype=torch.int32),
        starts,
        NUM_HEADS=HEADS,
        HEAD_DIM=head_dim,
        TILE_KEYS=TILE,
        NUM_SPLITS=SPLITS,
    )
    return out, partial


def weights(num_seqs: int, level: float = 0.0) -> Tensor:
    """log2 of sums of weights."""
    return torch.randn(num_seqs, SPLITS, HEADS, generator=torch.Generator().manual_seed(2)) + level


@pytest.mark.parametrize("level", [0.0, 300.0, -300.0])
@pytest.mark.parametrize("head_dim", [8, 6])
def test_the_result_is_the_weighted_average_of_the_parts(level: float, head_dim: int) -> None:
    log_weights = weights(1, level)
    out, partial = combine([64], log_weights, [1], head_dim)
    share = (log_weights[0] * 0.6931471805599453).softmax(0)  # 2^x is e^(x ln 2)
    expected = (partial[0] * share[:, :, None]).sum(0)
    is_nan = bool(out.isnan().any())
    assert not is_nan, f"sums of 2^score around 2^{level:g}: compare them with the largest first"
    weighted = (
        f"the parts count as 2^log_weight to the sum of these, and all {head_dim} channels are "
        "written"
    )
    torch.testing.assert_close(
        out[0], expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{weighted}\n{text}"
    )


def test_parts_that_were_not_written_do_not_count() -> None:
    out, partial = combine([16, 33], weights(2), [1, 1])
    is_nan = bool(out.isnan().any())
    assert not is_nan, "only parts that begin before the sequence's end were written"
    torch.testing.assert_close(
        out[0], partial[0, 0], msg="16 positions are one part: it is the result"
    )


def test_parts_without_visible_keys_have_no_weight() -> None:
    log_weights = weights(1)
    log_weights[0, 1:] = float("-inf")
    out, partial = combine([64], log_weights, [1])
    torch.testing.assert_close(out[0], partial[0, 0], msg="only the first part has seen keys")
    assert not combine([64], torch.full_like(log_weights, float("-inf")), [1])[0].any(), (
        "no part has: zeros, not NaN"
    )


def test_results_are_at_their_tokens() -> None:
    out, partial = combine([16, 20, 16], weights(3), [1, 2, 1])
    torch.testing.assert_close(out[3], partial[2, 0], msg="the third sequence's token is row 3")
    assert (out[1:3] == 7).all(), (
        "a sequence with two new tokens is left to `mixed_attention_kernel`"
    )
