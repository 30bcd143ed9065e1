"""Collectives of two ranks, each in a process of its own, with numbers that fit on a page;
`test_groups` has all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nanovllm.distributed.groups import Grid, get_tp_group
from nanovllm.lab.course.ranks import run_ranks


def scattered() -> dict[str, Any]:
    """On each rank: its parts of a sum, and what the call has changed."""
    group = get_tp_group()
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * group.rank_in_group
    before = x.clone()
    rows, columns = group.reduce_scatter(x), group.reduce_scatter(x, dim=1)
    with pytest.raises(ValueError, match="3 rows cannot be scattered equally over 2 ranks"):
        group.reduce_scatter(torch.zeros(3))
    return {
        "rows": rows.tolist(),
        "columns": columns.tolist(),
        "is contiguous": columns.is_contiguous(),
        "x stays": torch.equal(x, before),
        "calls": group.calls["reduce_scatter"],
    }


def test_each_rank_gets_its_part_of_the_sum() -> None:
    first, second = run_ranks(scattered, Grid(tensor=2), timeout=100)
    assert first["rows"] == [[12, 14]] and second["rows"] == [[16, 18]], (
        "rank r gets part r of the sum over the ranks"
    )
    assert first["columns"] == [[12], [16]] and second["columns"] == [[14], [18]], "along dim 1"
    for found in (first, second):
        assert found["is contiguous"], "later collectives need contiguous tensors"
        assert found["x stays"], "x belongs to the caller: sum a copy"
        assert found["calls"] == 2, (
            "`_collective` counts the calls that are made, and not a call that is refused"
        )


def exchanged() -> dict[str, Any]:
    """On each rank: the rows that it got. Rank 0 has three rows, of which two stay; rank 1 has two,
    for rank 0."""
    group = get_tp_group()
    numbers, sent, received = (([1, 2, 3], [2, 1], [2, 2]), ([7, 8], [2, 0], [1, 0]))[
        group.rank_in_group
    ]
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.float8_e4m3fn):
        # Its columns lie on top of each other.
        x = torch.tensor(numbers).float().to(dtype)[:, None].expand(-1, 2)
        got = group.all_to_all(x, sent, received)
        found[str(dtype)] = got.dtype == dtype, got.float().tolist()
    flat = group.all_to_all(torch.tensor(numbers), sent, received)
    return found | {"flat": (True, flat.tolist()), "calls": group.calls["all_to_all"]}


def test_rows_reach_their_ranks_in_the_order_of_their_senders() -> None:
    for found, numbers in zip(
        run_ranks(exchanged, Grid(tensor=2), timeout=100), ([1, 2, 7, 8], [3]), strict=True
    ):
        assert found.pop("calls") == 5, "`_collective` counts each call"
        assert found.pop("flat") == (True, numbers), "rows without further dimensions"
        for dtype, (is_same, rows) in found.items():
            assert is_same, f"{dtype} must stay {dtype}"
            assert rows == [[number] * 2 for number in numbers], f"rows of {dtype}"
