"""Attention in plain torch, the oracle of all other backends, against float64: mixed batches on shuffled pages."""

from __future__ import annotations

import pytest
import torch

from nanovllm.attention.torch import TorchBackend
from nanovllm.lab.cases import attention_case
from nanovllm.ops.attention import attend_dense, gather_kv, write_kv_cache


def test_tokens_are_written_to_their_slots_and_padding_nowhere() -> None:
    k, v = torch.arange(1.0, 7.0).view(3, 2, 1), torch.arange(11.0, 17.0).view(3, 2, 1)
    cache = torch.zeros(2, 2, 2, 4, 1)  # two blocks, keys and values, two heads, four slots
    write_kv_cache(k, v, cache, torch.tensor([5, -1, 2]))
    assert cache[1, 0, :, 1, 0].tolist() == [1, 2], "slot 5 is entry 1 of block 1"
    assert cache[0, 1, :, 2, 0].tolist() == [15, 16], "slot 2 is entry 2 of block 0"
    assert int(cache.count_nonzero()) == 8, "nothing else is written"


@pytest.mark.parametrize("first", [0, 3, 4, 6])
def test_pages_are_gathered_in_the_order_of_the_table(first: int) -> None:
    k, v, cache = torch.randn(7, 2, 3), torch.randn(7, 2, 3), torch.full((9, 2, 2, 4, 3), float("nan"))
    write_kv_cache(k, v, cache, torch.tensor([20, 21, 22, 23, 8, 9, 10]))
    keys, values = gather_kv(cache, torch.tensor([5, 2, 99], dtype=torch.int32), 7, first)
    assert torch.equal(keys, k[first:].transpose(0, 1)) and torch.equal(values, v[first:].transpose(0, 1))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"soft_cap": 2.0}], ids=str)
def test_dense_attention_by_its_definition(options: dict[str, float]) -> None:
    q, keys, values = torch.randn(3, 4, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 6)
    out = attend_dense(q, keys, values, 0.3, **options)  # type: ignore[arg-type]
    assert out.shape == (3, 4, 6), "[query_len, num_heads, width of the values]"
    for row in range(3):
        position = 2 + row  # the queries are the last positions
        begin = max(0, position + 1 - int(options.get("sliding_window", 5)))
        for head in range(4):
            k, v = keys[head // 2, begin : position + 1], values[head // 2, begin : position + 1]
            scores = k @ q[row, head] * 0.3
            if "soft_cap" in options:
                scores = 2.0 * torch.tanh(scores / 2.0)
            torch.testing.assert_close(out[row, head], scores.softmax(0) @ v)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"soft_cap": 20.0}, {"dtype": torch.bfloat16}], ids=str)
def test_a_mixed_batch(options: dict[str, object]) -> None:
    """A prompt, a decode, a chunk, a request without new tokens, and padding."""
    sequences = [(9, 0), (1, 20), (4, 13), (0, 5)]
    case = attention_case(1, sequences, block_size=4, padding_rows=2, **options)  # type: ignore[arg-type]
    settings = case.scale, case.sliding_window, case.soft_cap
    out = TorchBackend().forward(case.q, case.k, case.v, case.kv_cache, case.metadata, *settings)
    assert case.cache_error() <= case.tolerance, "keys or values are not in their slots"
    assert case.error(out) <= case.tolerance
