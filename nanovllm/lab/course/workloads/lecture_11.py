"""Second part of lecture 11: keep what is asked for again.

Chats come back with all that was said before, and long documents that come once run
through the pool between them. Counted are the prompt tokens that the engine computes: whatever the
prefix cache finds is not computed. BlockPool reuses the least recently used block first, so each
document pushes out the chats.

Change what MyPool overrides, or override more. Invariants are checked after each step.
"""

from collections.abc import Iterable

from nanovllm.core.block_pool import BlockPool


class MyPool(BlockPool):
    """A pool that knows which blocks are worth keeping."""

    def touch(self, block_ids: Iterable[int]) -> None:
        """See `BlockPool.touch`: a request has found these blocks in the cache."""
        super().touch(block_ids)

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """See `BlockPool.free_blocks`. The free list is reused from its beginning."""
        super().free_blocks(block_ids)
