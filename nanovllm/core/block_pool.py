"""A pool of equally large KV blocks: reference counts, and a free list that doubles as the prefix
cache.

Built by notebooks/11_paged_memory.ipynb: edit it there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class InvariantError(AssertionError):
    """The engine's bookkeeping contradicts itself: a bug, not a user's mistake."""


class BlockPool:
    """Hands out block ids `0 .. num_blocks - 1`; knows nothing of requests, tokens or tensors.

    A block is *free* when its reference count is 0. A free block keeps its content, and its hash if
    it has one, until it is handed out again: so the free list, least recently used first, is the
    prefix cache.

    Attributes:
        ref_counts: holders of each block.
        block_hashes: the hash of each block's content, None where it is unknown or not to be
            shared.
        free_block_queue: ids of free blocks in the order in which they will be reused.
        cached_blocks: from a hash to the one block that is found under it.
        num_evictions: how many cached blocks lost their content to a new owner.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.block_hashes: list[bytes | None] = [None] * num_blocks
        self.free_block_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached_blocks: dict[bytes, int] = {}
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self.free_block_queue)

    @property
    def usage(self) -> float:
        """The held share of the pool, 0 to 1."""
        return 1 - self.num_free / self.num_blocks

    def get_new_blocks(self, count: int) -> list[int]:
        """Take `count` blocks from the old end of the free list; O(count).

        Raises:
            MemoryError: fewer than `count` blocks are free. Nothing is taken then.
        """
        if count > self.num_free:
            raise MemoryError(
                f"{count} blocks requested, {self.num_free} of {self.num_blocks} free"
            )
        block_ids = [self.free_block_queue.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._forget(block_id)
            self.ref_counts[block_id] = 1
        return block_ids

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Give up one hold on each block. Pass the last block of a sequence first: it is then
        reused first, and the beginning of the sequence, which other requests are likelier to share,
        stays longest.

        Raises:
            InvariantError: a block is free already.
        """
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                raise InvariantError(f"block {block_id} freed twice")
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self.free_block_queue[block_id] = None

    def touch(self, block_ids: Iterable[int]) -> None:
        """Take one more hold on each block, and take free blocks out of the free list; O(1) per
        block."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                del self.free_block_queue[block_id]
            self.ref_counts[block_id] += 1

    def cache_full_block(self, block_id: int, block_hash: bytes) -> bool:
        """Let other requests find a full block under its hash.

        Returns:
            Whether the block is found under this hash from now on. False, with nothing changed, if
            the hash leads to another block (the two are not merged: a block table only ever grows
            at its end), or the block has another hash.

        Raises:
            InvariantError: the block is free.
        """
        if self.ref_counts[block_id] == 0:
            raise InvariantError(f"block {block_id} is free and cannot be published")
        if self.block_hashes[block_id] is not None:
            return self.block_hashes[block_id] == block_hash
        if block_hash in self.cached_blocks:
            return False  # another block has this content
        self.block_hashes[block_id] = block_hash
        self.cached_blocks[block_hash] = block_id
        return True

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """The block with this content, held or free; None if there is none."""
        return self.cached_blocks.get(block_hash)

    def reset_prefix_cache(self) -> None:
        """Forget every hash: no later request finds anything. Blocks that are held stay held."""
        for block_id in list(self.cached_blocks.values()):
            self._forget(block_id, evicted=False)

    def _forget(self, block_id: int, evicted: bool = True) -> None:
        block_hash = self.block_hashes[block_id]
        if block_hash is not None:
            del self.cached_blocks[block_hash]
            self.block_hashes[block_id] = None
            self.num_evictions += evicted

    def check_invariants(self, tables: Iterable[list[int]]) -> None:
        """Check the pool against the block tables of all live requests.

        Raises:
            InvariantError: a count differs from the number of tables that hold the block, a free
                block is in a table, a block is lost, or a hash leads to the wrong block.
        """
        holders = Counter(block_id for table in tables for block_id in table)
        for block_id, count in enumerate(self.ref_counts):
            if count != holders[block_id]:
                raise InvariantError(
                    f"block {block_id} has a reference count of {count}, but is in "
                    f"{holders[block_id]} tables"
                )
            if (count == 0) != (block_id in self.free_block_queue):
                raise InvariantError(
                    f"block {block_id} has {count} holders and is {'' if count else 'not '}free"
                )
        hashed = {
            block_hash: b
            for b, block_hash in enumerate(self.block_hashes)
            if block_hash is not None
        }
        if hashed != self.cached_blocks:
            raise InvariantError("the hash index and the blocks' own hashes differ")
