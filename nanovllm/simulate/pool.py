"""The engine's block pool and block tables, with less memory and fewer calls: they do the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from nanovllm.core.block_pool import BlockPool, InvariantError
from nanovllm.core.kv_cache_manager import KVCacheManager
from nanovllm.core.request import Request
from nanovllm.simulate.requests import SimulatedRequest


class GrowingPool(BlockPool):
    """Hands out the same blocks as `BlockPool`, in the same order. Its memory grows with the blocks
    that were ever used.

    Blocks that were never used come before all others in the free list. They are not in
    `free_block_queue`, and have no entries in `ref_counts` and `block_hashes`.

    A block that is taken from the middle of the free list leaves its entry there, which is skipped
    later. So the list has no links, and takes little memory.
    """

    num_free = 0  # here it is counted

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = []
        self.block_hashes = []
        self.cached_blocks = {}
        self.num_evictions = 0
        self.num_free = num_blocks
        # The free list: entries before `_head` were taken.
        self._queue: list[int] = []
        self._head = 0
        # How many of a block's entries in the queue are to be skipped: the first ones.
        self._skipped: dict[int, int] = {}
        self._num_skipped = 0

    @property
    def free_block_queue(self) -> OrderedDict[int, None]:  # type: ignore[override]
        """The ids of free blocks that were used before, in the order in which they will be
        reused."""
        skipped = dict(self._skipped)
        return OrderedDict.fromkeys(self._without_skipped(self._queue[self._head :], skipped))

    @staticmethod
    def _without_skipped(entries: Iterable[int], skipped: dict[int, int]) -> list[int]:
        """Return the entries that count. `skipped` loses the others."""
        found = []
        for block_id in entries:
            if block_id not in skipped:
                found.append(block_id)
            elif skipped[block_id] == 1:
                del skipped[block_id]
            else:
                skipped[block_id] -= 1
        return found

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks from the old end of the free list; O(count).

        Raises:
            MemoryError: fewer than `count` blocks are free. Nothing is taken then.
        """
        if count > self.num_free:
            return super().get_new_blocks(count)  # raises the error
        self.num_free -= count
        num_used = len(self.ref_counts)
        if num_used == self.num_blocks:
            return self._reuse(count)
        num_fresh = min(count, self.num_blocks - num_used)
        self.ref_counts += [1] * num_fresh
        self.block_hashes += [None] * num_fresh
        return [*range(num_used, num_used + num_fresh), *self._reuse(count - num_fresh)]

    def _reuse(self, count: int) -> list[int]:
        """Take blocks from the queue. They lose their content."""
        ref_counts = self.ref_counts
        hashes = self.block_hashes
        cached = self.cached_blocks
        num_cached = len(cached)
        block_ids = self._pop(count)
        for block_id in block_ids:
            ref_counts[block_id] = 1
            if (block_hash := hashes[block_id]) is not None:
                del cached[block_hash]
                hashes[block_id] = None
        self.num_evictions += num_cached - len(cached)
        return block_ids

    def _pop(self, count: int) -> list[int]:
        """Take blocks from the queue."""
        skipped = self._skipped
        found = self._take(count)
        if skipped.keys().isdisjoint(found):
            return found
        found = self._without_skipped(found, skipped)
        while num_missing := count - len(found):
            self._num_skipped -= num_missing
            found += self._without_skipped(self._take(num_missing), skipped)
        return found

    def _take(self, count: int) -> list[int]:
        """Take entries from the queue."""
        head = self._head
        self._head = end = head + count
        found = self._queue[head:end]
        if end > 1000 and 2 * end > len(self._queue):
            del self._queue[:end]
            self._head = 0
        return found

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Give up one hold on each block; see `BlockPool.free_blocks`.

        Raises:
            InvariantError: a block is free already.
        """
        ref_counts = self.ref_counts
        queue = self._queue
        num_before = len(queue)
        for block_id in block_ids:
            count = ref_counts[block_id]
            if count == 1:
                ref_counts[block_id] = 0
                queue.append(block_id)
            elif count > 1:
                ref_counts[block_id] = count - 1
            else:
                raise InvariantError(f"block {block_id} freed twice")
        self.num_free += len(queue) - num_before

    def touch(self, block_ids: Iterable[int]) -> None:
        """Take one more hold on each block; see `BlockPool.touch`."""
        ref_counts = self.ref_counts
        skipped = self._skipped
        num_idle = 0
        for block_id in block_ids:
            count = ref_counts[block_id]
            ref_counts[block_id] = count + 1
            if count == 0:
                skipped[block_id] = skipped.get(block_id, 0) + 1
                num_idle += 1
        self._num_skipped += num_idle
        self.num_free -= num_idle
        if self._num_skipped > 2 * len(ref_counts):
            self._queue = self._without_skipped(self._queue[self._head :], skipped)
            self._head = self._num_skipped = 0

    def check_invariants(self, tables: Iterable[list[int]]) -> None:
        """Check the blocks that were ever used; see `BlockPool.check_invariants`."""
        used = BlockPool(0)
        used.ref_counts = self.ref_counts
        used.block_hashes = self.block_hashes
        used.cached_blocks = self.cached_blocks
        used.free_block_queue = self.free_block_queue
        used.check_invariants(tables)


class SimulatedManager(KVCacheManager):
    """Owns the block tables of requests whose blocks have all their names already.

    Attributes:
        unordered: names of blocks that may be evicted after a block before them in a prompt. Other
            blocks are evicted before these, since a table is freed last block first.
    """

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
        self.unordered: set[object] = set()

    def allocate_slots(
        self, request: Request, num_tokens: int, computed_blocks: Sequence[int] = ()
    ) -> list[int] | None:
        """Make room for the request's first `num_tokens` tokens; see
        `KVCacheManager.allocate_slots`."""
        table = self.tables.get(request.request_id) or []
        num_new = -(-num_tokens // self.block_size) - len(table) - len(computed_blocks)
        if num_new <= 0 and not computed_blocks:
            return []
        pool = self.pool
        if num_new > pool.num_free:
            return None
        if not computed_blocks:
            appended = pool.get_new_blocks(num_new)
        elif not self.has_room(num_new, computed_blocks):
            return None
        else:
            pool.touch(computed_blocks)
            appended = list(computed_blocks)
            if num_new > 0:
                appended += pool.get_new_blocks(num_new)
        table += appended
        self.tables[request.request_id] = table
        return appended

    def has_room(self, count: int, block_ids: Sequence[int]) -> bool:
        """Whether `count` blocks are free besides these, some of which may be free, too."""
        pool = self.pool
        num_left = pool.num_free - count
        if num_left < 0 or num_left >= len(block_ids):
            return num_left >= 0
        ref_counts = pool.ref_counts
        return num_left >= len([each for each in block_ids if not ref_counts[each]])

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

    def cache_blocks(
        self,
        request: SimulatedRequest,  # type: ignore[override]
        num_before: int,
    ) -> None:
        """Let other requests find the blocks that became full since `num_before` tokens were
        computed."""
        size = self.block_size
        first = num_before // size
        num_named = request.num_computed_tokens
        if num_named > request.num_tokens:  # with a token that is not sampled yet
            num_named = request.num_tokens
        end = num_named // size
        if first >= end or not self.enable_prefix_caching:
            return
        hashes = self.pool.block_hashes
        cached = self.pool.cached_blocks
        table = self.tables[request.request_id]
        names = request.block_hashes
        has_copies = request.has_copies
        for i in range(first, end):
            name = names[i]
            if name not in cached:
                block_id = table[i]
                hashes[block_id] = name
                cached[name] = block_id
                if has_copies:
                    self.unordered.add(name)
            else:
                has_copies = request.has_copies = True
