"""A pool that grows hands out the same blocks as the engine's."""

from __future__ import annotations

import random

import pytest

from nanovllm.core.block_pool import BlockPool, InvariantError
from nanovllm.simulate.pool import GrowingPool


@pytest.mark.parametrize("seed", range(20))
def test_a_growing_pool_hands_out_the_same_blocks(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.choice([1, 5, 40])
    pools = BlockPool(num_blocks), GrowingPool(num_blocks)
    tables: list[list[int]] = []
    for name in range(300):
        count = rng.randrange(4)
        if tables and rng.random() < 0.5:
            table = tables.pop(rng.randrange(len(tables)))
            for pool in pools:
                pool.free_blocks(reversed(table))
        elif count <= pools[0].num_free:
            found = [pool.get_new_blocks(count) for pool in pools]
            assert found[0] == found[1]
            tables.append(found[0])
            num_cached = rng.randrange(4)
            for pool in pools:
                for i, block_id in enumerate(found[0][:num_cached]):
                    pool.cache_full_block(block_id, bytes([name % 256, i]))
        if tables and rng.random() < 0.3:
            shared = tables[0][: rng.randrange(3)]
            tables.append(shared)
            for pool in pools:
                pool.touch(shared)
        states = [
            (pool.num_free, pool.usage, pool.cached_blocks, pool.num_evictions) for pool in pools
        ]
        assert states[0] == states[1]
    used = len(pools[1].ref_counts)
    assert pools[1].ref_counts == pools[0].ref_counts[:used]
    unused = range(used, num_blocks)
    assert [*unused, *pools[1].free_block_queue] == list(pools[0].free_block_queue)


def test_mistakes() -> None:
    pool = GrowingPool(3)
    table = pool.get_new_blocks(2)
    with pytest.raises(MemoryError, match="2 blocks requested, 1 of 3 free"):
        pool.get_new_blocks(2)
    pool.free_blocks(table)
    with pytest.raises(InvariantError, match="block 0 freed twice"):
        pool.free_blocks([0])
