"""The engine's block pool and block tables, with less memory and fewer calls: they do the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from nanovllm.core.block_pool import BlockPool, InvariantError
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.request import Request


class GrowingPool(BlockPool):
    """Hands out the same blocks as `BlockPool`, in the same order. Its memory grows with the blocks
    that were ever used.

    Blocks that were never used come before all others in the free list. They are not in
    `free_block_queue`, and have no entries in `ref_counts` and `block_hashes`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = []
        self.block_hashes = []
        self.free_block_queue = OrderedDict()
        self.cached_blocks = {}
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self.free_block_queue) + self.num_blocks - len(self.ref_counts)

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks from the old end of the free list; O(count).

        Raises:
            MemoryError: fewer than `count` blocks are free. Nothing is taken then.
        """
        ref_counts = self.ref_counts
        hashes = self.block_hashes
        num_used = len(ref_counts)
        num_fresh = min(count, self.num_blocks - num_used)
        num_reused = count - num_fresh
        if num_reused > len(self.free_block_queue):
            return super().get_new_blocks(count)  # raises the error
        block_ids: list[int] = []
        if num_fresh:
            block_ids += range(num_used, num_used + num_fresh)
            ref_counts += [1] * num_fresh
            hashes += [None] * num_fresh
        pop = self.free_block_queue.popitem
        for _ in range(num_reused):
            block_id, _ = pop(last=False)
            if (block_hash := hashes[block_id]) is not None:
                del self.cached_blocks[block_hash]
                hashes[block_id] = None
                self.num_evictions += 1
            ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Give up one hold on each block; see `BlockPool.free_blocks`.

        Raises:
            InvariantError: a block is free already.
        """
        ref_counts = self.ref_counts
        queue = self.free_block_queue
        for block_id in block_ids:
            left = ref_counts[block_id] - 1
            if left < 0:
                raise InvariantError(f"block {block_id} freed twice")
            ref_counts[block_id] = left
            if left == 0:
                queue[block_id] = None


class SimulatedManager(KVCacheManager):
    """Owns the block tables of requests whose blocks have all their names already."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
    ) -> None:
        super().__init__(0, block_size, enable_prefix_caching)
        self.pool = GrowingPool(num_blocks)
        self.host_pool = GrowingPool(num_host_blocks)

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Blocks that already contain the beginning of the request's tokens; see
        `KVCacheManager.get_computed_blocks`."""
        found: list[int] = []
        if not self.enable_prefix_caching:
            return found
        get = self.pool.cached_blocks.get
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            if (block_id := get(block_hash)) is None:
                break
            found.append(block_id)
        return found

    def cache_blocks(self, request: Request, num_before: int) -> None:
        """Let other requests find the blocks that became full since `num_before` tokens were
        computed."""
        size = self.block_size
        first = num_before // size
        end = min(request.num_computed_tokens, len(request.token_ids)) // size
        if first >= end or not self.enable_prefix_caching:
            return
        hashes = self.pool.block_hashes
        cached = self.pool.cached_blocks
        table = self.tables[request.request_id]
        names = request.block_hashes
        for i in range(first, end):
            block_id = table[i]
            name = names[i]
            if hashes[block_id] is None and name not in cached:
                hashes[block_id] = name
                cached[name] = block_id
