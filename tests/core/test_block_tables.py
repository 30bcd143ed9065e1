"""Block tables and the prefix cache, rule by rule; `test_scheduler_machine` has their random
lives."""

from __future__ import annotations

import pytest

from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.request import Request
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams


def request(name: str, *token_ids: int, **options: object) -> Request:
    return Request(EngineRequest(name, list(token_ids), SamplingParams(max_tokens=8, **options)))


def test_a_prefix_is_found_block_by_block_up_to_the_first_difference() -> None:
    manager = KVCacheManager(8, 2)
    first = request("a", 1, 2, 3, 4, 5)
    table = manager.allocate_slots(first, 5)
    assert table == [0, 1, 2]
    first.num_computed_tokens = 5
    manager.cache_blocks(first, 2)
    assert manager.get_computed_blocks(request("b", 1, 2, 3, 4, 9)) == [], (
        "a block behind a missing one is of no use"
    )
    manager.cache_blocks(first, 0)
    assert manager.get_computed_blocks(request("b", 1, 2, 3, 4, 9)) == [0, 1]
    assert manager.get_computed_blocks(request("c", 1, 2, 9, 4, 5)) == [0], (
        "the first two tokens only"
    )
    assert manager.get_computed_blocks(request("d", 9, 2, 3, 4, 5)) == [], (
        "a block is the same only behind the same prefix"
    )
    assert manager.get_computed_blocks(request("e", 1, 2, 3, 4)) == [0], (
        "the last token has to be computed"
    )
    assert manager.get_computed_blocks(request("f", 1, 2, 3, 4, 9, prompt_logprobs=1)) == [], (
        "all logits are needed"
    )
    manager.enable_prefix_caching = False
    assert manager.get_computed_blocks(request("g", 1, 2, 3, 4, 9)) == []


def test_a_table_grows_at_its_end() -> None:
    manager = KVCacheManager(4, 2)
    one = request("a", 1, 2, 3)
    assert manager.allocate_slots(one, 3) == [0, 1]
    assert manager.allocate_slots(one, 4) == [], "there is room in the last block"
    assert manager.allocate_slots(one, 5) == [2], "the blocks that are new"
    assert manager.tables["a"] == [0, 1, 2]


def test_a_request_that_does_not_fit_changes_nothing() -> None:
    manager = KVCacheManager(3, 2)
    first = request("a", 1, 2, 3, 4)
    manager.allocate_slots(first, 4)
    assert manager.allocate_slots(request("b", 5, 6, 7), 3) is None
    assert manager.tables == {"a": [0, 1]} and manager.pool.num_free == 1


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "free"])
def test_computed_blocks_are_taken_out_of_the_free_list(is_held: bool) -> None:
    manager = KVCacheManager(3, 2)
    first = request("a", 1, 2, 3, 4)
    manager.allocate_slots(first, 4)
    first.num_computed_tokens = 4
    manager.cache_blocks(first, 0)
    if not is_held:
        manager.free(first)
    second = request("b", 1, 2, 3, 4, 5, 6, 7)
    found = manager.get_computed_blocks(second)
    assert manager.allocate_slots(second, 7, found) is None, (
        "two blocks are missing, and one is free beside those found"
    )
    assert manager.pool.num_free == (1 if is_held else 3)
    assert manager.allocate_slots(second, 6, found) == [0, 1, 2]
    assert manager.pool.ref_counts == ([2, 2, 1] if is_held else [1, 1, 1])
