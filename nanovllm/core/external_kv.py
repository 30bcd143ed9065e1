"""The strategy for keys and values that are computed, or used, outside this engine."""

from __future__ import annotations

from nanovllm.core.request import Request


class ExternalKV:
    """Knows of no keys and values outside this engine; see its subclasses."""

    def num_tokens(self, request: Request) -> int:
        """Return how many tokens after the first `num_computed_tokens` have been computed
        elsewhere, and can be loaded."""
        return 0

    def load(self, request: Request, block_ids: list[int], num_tokens: int) -> None:
        """Begin to fill a request's blocks. The request stays in `Queues.receiving` until the
        feature moves it.

        Args:
            block_ids: the request's whole block table.
        """

    def uses_blocks(self, request: Request) -> bool:
        """Whether the blocks of a request that ends are still read or written from outside. They
        are then held until `KVCacheManager.let_go`."""
        return False

    def choose_victim(
        self, request: Request, num_tokens: int, running: list[Request]
    ) -> Request | None:
        """Return the running request to preempt so that `request` gets blocks for `num_tokens`
        tokens; None if `request` has to wait."""
        return running[-1]
