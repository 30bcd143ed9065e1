"""Attention in plain torch, the oracle of all other backends, against float64: mixed batches on
shuffled pages."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nanovllm.attention.torch import TorchBackend
from nanovllm.lab.cases import AttentionCase, attention_case, relative_error
from nanovllm.ops.attention import attend_dense, gather_kv, write_kv_cache


def test_tokens_are_written_to_their_slots_and_padding_nowhere() -> None:
    k, v = torch.arange(1.0, 7.0).view(3, 2, 1), torch.arange(11.0, 17.0).view(3, 2, 1)
    cache = torch.zeros(2, 2, 2, 4, 1)  # two blocks, keys and values, two heads, four slots
    write_kv_cache(k, v, cache, torch.tensor([5, -1, 2]))
    assert cache[1, 0, :, 1, 0].tolist() == [1, 2], "slot 5 is entry 1 of block 1"
    assert cache[0, 1, :, 2, 0].tolist() == [15, 16], "slot 2 is entry 2 of block 0"
    num_written = int(cache.count_nonzero())
    assert num_written == 8, "two tokens are written and nothing else: a row of slot -1 is padding"


@pytest.mark.parametrize("first", [0, 3, 4, 6])
def test_pages_are_gathered_in_the_order_of_the_table(first: int) -> None:
    k, v, cache = (
        torch.randn(7, 2, 3),
        torch.randn(7, 2, 3),
        torch.full((9, 2, 2, 4, 3), float("nan")),
    )
    write_kv_cache(k, v, cache, torch.tensor([20, 21, 22, 23, 8, 9, 10]))
    keys, values = gather_kv(cache, torch.tensor([5, 2, 99], dtype=torch.int32), 7, first)
    assert torch.equal(keys, k[first:].transpose(0, 1)) and torch.equal(
        values, v[first:].transpose(0, 1)
    )


@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"soft_cap": 2.0}], ids=str)
def test_dense_attention_by_its_definition(options: dict[str, float]) -> None:
    q, keys, values = torch.randn(3, 4, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 6)
    out = attend_dense(q, keys, values, 0.3, **options)  # type: ignore[arg-type]
    assert (out.shape, out.dtype) == ((3, 4, 6), q.dtype), (
        "[query_len, num_heads, width of the values]"
    )
    for row in range(3):
        position = 2 + row  # the queries are the last positions
        begin = max(0, position + 1 - int(options.get("sliding_window", 5)))
        for head in range(4):
            k, v = keys[head // 2, begin : position + 1], values[head // 2, begin : position + 1]
            scores = k @ q[row, head] * 0.3
            if "soft_cap" in options:
                scores = 2.0 * torch.tanh(scores / 2.0)
            sees = (
                f"query head {head} of row {row} uses KV head {head // 2}, and sees positions "
                f"{begin} to {position}"
            )
            difference = float((out[row, head] - scores.softmax(0) @ v).abs().max())
            assert difference < 1e-5, f"{sees} of 0 to 4"


def assert_right(case: AttentionCase, out: Tensor) -> None:
    """Name the first sequence whose rows are wrong."""
    starts, lengths, tolerance = (
        case.metadata.query_start_loc.tolist(),
        case.metadata.seq_lens.tolist(),
        case.tolerance,
    )
    for (start, end), length in zip(pairwise(starts), lengths, strict=True):
        error = relative_error(out[start:end], case.expected[start:end])
        what = (
            f"rows {start} to {end - 1} are the last {end - start} of a sequence's {length} "
            "positions"
        )
        assert error <= tolerance, (
            f"{what}; NaN means that a slot was read which none of them may see"
        )


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 5}, {"soft_cap": 20.0}, {"dtype": torch.bfloat16}], ids=str
)
def test_a_mixed_batch(options: dict[str, object]) -> None:
    """A prompt, a decode, a chunk, a request without new tokens, and padding."""
    sequences = [(9, 0), (1, 20), (4, 13), (0, 5)]
    case = attention_case(1, sequences, block_size=4, padding_rows=2, **options)  # type: ignore[arg-type]
    settings = case.scale, case.sliding_window, case.soft_cap
    out = TorchBackend().forward(case.q, case.k, case.v, case.kv_cache, case.metadata, *settings)
    tolerance, cache_error = case.tolerance, case.cache_error()
    assert cache_error <= tolerance, "keys or values are not in their slots"
    assert_right(case, out)


def test_pages_behind_the_window_are_not_read() -> None:
    case = attention_case(2, [(1, 20), (4, 13)], block_size=4, sliding_window=5)
    for table, first in zip(case.metadata.block_tables, (16, 9), strict=True):
        # The first positions that a row sees.
        case.kv_cache[table[: first // 4].long()] = float("nan")
    assert_right(
        case,
        TorchBackend().forward(case.q, case.k, case.v, case.kv_cache, case.metadata, case.scale, 5),
    )
