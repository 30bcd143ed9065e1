"""The block pool, rule by rule; `test_scheduler_machine` has its random lives."""

from __future__ import annotations

import pytest

from nanovllm.core.block_pool import BlockPool, InvariantError


def test_freed_blocks_join_the_free_list_at_its_end() -> None:
    pool = BlockPool(4)
    table = pool.get_new_blocks(3)
    pool.free_blocks(reversed(table))
    assert list(pool.free_block_queue) == [3, 2, 1, 0], (
        "in the order in which they are passed: a sequence passes its last block first, which is "
        "then reused first, so that its beginning, which others may share, stays longest"
    )


def test_a_shared_block_is_free_when_its_last_holder_has_gone() -> None:
    pool = BlockPool(2)
    table = pool.get_new_blocks(1)
    pool.touch(table)
    pool.free_blocks(table)
    assert pool.ref_counts[0] == 1 and 0 not in pool.free_block_queue, (
        "another table still holds it"
    )
    pool.free_blocks(table)
    assert pool.ref_counts[0] == 0 and 0 in pool.free_block_queue
    with pytest.raises(InvariantError):
        pool.free_blocks(table)


def test_a_freed_block_keeps_its_content_until_it_is_reused() -> None:
    pool = BlockPool(1)
    table = pool.get_new_blocks(1)
    assert pool.cache_full_block(0, b"x")
    pool.free_blocks(table)
    assert pool.get_cached_block(b"x") == 0, "a free block is still cached"
    pool.touch(table)
    assert pool.num_free == 0, "a block that is held is not free"
    pool.free_blocks(table)
    pool.get_new_blocks(1)
    assert pool.get_cached_block(b"x") is None, "its new owner overwrites it"


def test_a_hash_leads_to_one_block() -> None:
    pool = BlockPool(3)
    first, second = pool.get_new_blocks(2)
    assert pool.cache_full_block(first, b"x") is True
    assert pool.cache_full_block(second, b"x") is False, "the duplicate stays private"
    assert pool.cache_full_block(first, b"x") is True, "it is found already"
    assert pool.cache_full_block(first, b"y") is False, "a block has one hash"
    assert pool.cached_blocks == {b"x": first} and pool.block_hashes == [b"x", None, None]
    with pytest.raises(InvariantError):
        pool.cache_full_block(2, b"z")  # it is free
