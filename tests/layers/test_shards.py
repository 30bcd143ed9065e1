"""Shards of layers, rule by rule and without processes: each rank computes its part here, and the
test adds the parts up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm.distributed.groups import GroupCoordinator
from nanovllm.layers.tensor_parallel import (
    QKVParallelLinear,
    RowParallelLinear,
    Shard,
    VocabParallelEmbedding,
)


class Rank(GroupCoordinator):
    """A rank without its peers: counts its all-reduces, which return this rank's addend."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("tp", list(range(size)), rank)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Count the call."""
        self.calls["all_reduce"] += 1
        return x


def ranks(size: int) -> list[Rank]:
    return [Rank(rank, size) for rank in range(size)]


@pytest.mark.parametrize(
    ("total", "size", "expected"),
    [
        (12, 3, [(0, 4), (4, 4), (8, 4)]),
        (7, 3, [(0, 3), (3, 3), (6, 1)]),
        (5, 4, [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (2, 4, [(0, 1), (1, 1), (2, 0), (2, 0)]),
    ],
)
def test_rows_are_divided_in_order_and_the_last_ranks_may_have_fewer(
    total: int, size: int, expected: list[tuple[int, int]]
) -> None:
    shards = [Shard.of(total, group) for group in ranks(size)]
    assert [(shard.start, shard.size) for shard in shards] == expected, (
        "start and size on each rank"
    )
    assert all(shard.total == total for shard in shards)


def test_the_addends_of_a_row_parallel_layer_have_the_bias_once() -> None:
    weight, bias, x = (
        torch.arange(12.0).view(2, 6),
        torch.tensor([100.0, 200.0]),
        torch.arange(18.0).view(3, 6),
    )
    for reduce in (True, False):
        addends = []
        for group in ranks(3):
            layer = RowParallelLinear(6, 2, bias=True, reduce=reduce, group=group)
            layer.weight.copy_(weight[:, layer.shard.rows])
            layer.bias.copy_(bias)
            addends.append(layer(x[:, layer.shard.rows]))
            assert group.calls["all_reduce"] == reduce, "all-reduce with `reduce`, and only then"
        assert torch.equal(sum(addends), x @ weight.T + bias), (
            "the sum over the ranks is the whole layer's output"
        )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_looks_up_its_own_tokens(size: int) -> None:
    table, tokens = 1 + torch.arange(10.0).view(5, 2), torch.tensor([4, 0, 2, 2, 1])
    addends = []
    for group in ranks(size):
        layer = VocabParallelEmbedding(5, 2, group)
        layer.weight.fill_(float("nan"))  # padding rows must not be read
        layer.weight[: layer.shard.size] = table[layer.shard.rows]
        before = tokens.clone()
        addends.append(layer(tokens))
        assert torch.equal(tokens, before), "the token ids belong to the caller"
        assert group.calls["all_reduce"] == (size > 1), (
            "one all-reduce; a group of one has nothing to add up"
        )
        mine = (tokens >= layer.shard.start) & (tokens < layer.shard.start + layer.shard.size)
        assert not addends[-1][~mine].any(), "zeros for the tokens of other ranks"
    assert torch.equal(sum(addends), table[tokens]), (
        "the sum over the ranks is the whole layer's output"
    )


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "expected"),
    [
        (1, 4, 2, [[0, 1]]),
        (2, 4, 2, [[0], [1]]),
        (4, 4, 2, [[0], [0], [1], [1]]),
        (3, 9, 3, [[0], [1], [2]]),
        (2, 8, 4, [[0, 1], [2, 3]]),
        (4, 8, 1, [[0]] * 4),
    ],
)
def test_a_rank_has_the_kv_heads_of_its_query_heads(
    size: int, heads: int, kv_heads: int, expected: list[list[int]]
) -> None:
    head_dim, found = 2, []
    for rank, group in enumerate(ranks(size)):
        layer = QKVParallelLinear(3, head_dim, heads, kv_heads, group=group)
        query, key, value = layer.shards
        n = heads // size
        assert (layer.num_heads, layer.num_kv_heads) == (n, len(expected[rank])), (
            "heads of this rank"
        )
        assert (query.start, query.size) == (rank * n * head_dim, n * head_dim), (
            "rows of this rank's query heads"
        )
        assert (key.start, key.size, key.total) == (value.start, value.size, value.total), (
            "keys and values alike"
        )
        assert key.total == kv_heads * head_dim, "rows of all KV heads"
        assert layer.weight.shape == ((n + 2 * layer.num_kv_heads) * head_dim, 3), (
            "queries, keys and values"
        )
        found.append(list(range(key.start // head_dim, (key.start + key.size) // head_dim)))
    assert found == expected, "KV heads on each rank"
