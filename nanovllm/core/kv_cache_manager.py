"""Block tables: which blocks hold the keys and values of which request, and what a new request can
reuse.

Built by notebooks/12_block_tables.ipynb: edit it there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

from nanovllm.core.block_pool import BlockPool, InvariantError
from nanovllm.core.request import BlockCopies, Request


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256 over the parent block's hash and this block's tokens: it names the whole prefix up to
    here.

    Two different prefixes have the same name only if SHA-256 collides, which no attacker can bring
    about today; the encoding is injective, because the parent has a fixed length and a token id
    fixed eight bytes. (With a 64-bit `hash()`, one user would sooner or later read another user's
    cached blocks.)"""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def hash_salt(cache_salt: str | None) -> bytes:
    """The parent hash of a request's first block: requests with different salts share no block."""
    return hashlib.sha256((cache_salt or "").encode()).digest()


class KVCacheManager:
    """Owns the block tables of all requests, on the device and, for swapped requests, in host
    memory.

    Args:
        num_blocks: blocks in the device pool.
        block_size: tokens per block.
        enable_prefix_caching: let requests share full blocks with equal content.
        num_host_blocks: blocks in host memory for swapped requests; 0 switches swapping off.

    Attributes:
        tables: request id to block ids; entry i holds the tokens
            `i * block_size .. (i + 1) * block_size - 1`. A table only grows at its end while its
            request runs.
        host_tables: the same for swapped requests, with ids of the host pool.
        held: tables of ended requests whose blocks are still in use, by a KV transfer (lecture 31).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks)
        self.tables: dict[str, list[int]] = {}
        self.host_tables: dict[str, list[int]] = {}
        self.held: dict[str, list[int]] = {}

    def forget_requests(self) -> None:
        """Forget all block tables, and the content of all blocks."""
        self.pool = BlockPool(self.pool.num_blocks)
        self.host_pool = BlockPool(self.host_pool.num_blocks)
        self.tables.clear()
        self.host_tables.clear()
        self.held.clear()

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def block_hashes(self, request: Request) -> list[bytes]:
        """Hashes of the request's full blocks; each is computed once, since tokens are only ever
        appended."""
        hashes = request.block_hashes
        size = self.block_size
        for i in range(len(hashes), request.num_tokens // size):
            parent = hashes[-1] if hashes else hash_salt(request.cache_salt)
            hashes.append(hash_block(parent, request.token_ids[i * size : (i + 1) * size]))
        return hashes

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Blocks, held or free, that already contain the beginning of the request's tokens, without
        a gap. Nothing is found if the prefix cache is switched off.

        The last token is never taken from the cache: its logits are needed, so it has to be
        computed. A request that wants log-probabilities of its prompt
        (`sampling_params.prompt_logprobs` is not None) needs the logits of all of it, and takes
        nothing."""
        if not self.enable_prefix_caching or request.sampling_params.prompt_logprobs is not None:
            return []
        found = []
        for block_hash in self.block_hashes(request)[: (request.num_tokens - 1) // self.block_size]:
            if (block_id := self.pool.get_cached_block(block_hash)) is None:
                break
            found.append(block_id)
        return found

    def allocate_slots(
        self, request: Request, num_tokens: int, computed_blocks: Sequence[int] = ()
    ) -> list[int] | None:
        """Make room for the request's first `num_tokens` tokens.

        Args:
            computed_blocks: blocks from `get_computed_blocks`, with which the table of a new
                request begins. Those without a holder count as free, but are no new blocks: touch
                all of them before the pool hands out new ones.

        Returns:
            The blocks that were appended to the table, the computed ones included; [] if the last
            block has room. None, with nothing changed, if the pool has too few free blocks.
        """
        num_held = len(self.tables.get(request.request_id, ())) + len(computed_blocks)
        num_new = max(0, self.blocks_for(num_tokens) - num_held)
        if num_new == 0 and not computed_blocks:
            return []  # the last block has room, as in most steps of a decoding request
        # Computed blocks with reference count 0 are in the free list themselves: they cannot be
        # handed out as new ones, too.
        idle = sum(self.pool.ref_counts[block_id] == 0 for block_id in computed_blocks)
        if num_new > self.pool.num_free - idle:
            return None
        self.pool.touch(computed_blocks)
        appended = [*computed_blocks, *self.pool.get_new_blocks(num_new)]
        self.tables.setdefault(request.request_id, []).extend(appended)
        return appended

    def cache_blocks(self, request: Request, num_before: int) -> None:
        """Let other requests find the blocks that became full since `num_before` tokens were
        computed. A block that contains an unsampled token has no hash yet.

        The step that fills a block may be about to run: every layer writes all keys and values of a
        step before it reads any, so a request later in the same step may already count on the
        block."""
        if not self.enable_prefix_caching:
            return
        num_named = min(request.num_computed_tokens, request.num_tokens)
        if request.num_exact_tokens is not None:  # a hash promises exact keys and values
            num_named = min(num_named, request.num_exact_tokens)
        for i in range(num_before // self.block_size, num_named // self.block_size):
            self.pool.cache_full_block(
                self.tables[request.request_id][i], self.block_hashes(request)[i]
            )

    def free(self, request: Request) -> None:
        """Free all blocks of the request. Their content can be found until it is overwritten."""
        self.pool.free_blocks(reversed(self.tables.pop(request.request_id, [])))
        self.host_pool.free_blocks(self.host_tables.pop(request.request_id, []))

    def hold(self, request: Request, name: str) -> None:
        """Take the request's table away, and keep its blocks as they are until `let_go(name)`."""
        self.held[name] = self.tables.pop(request.request_id)

    def let_go(self, name: str) -> None:
        """Free blocks that were held."""
        self.pool.free_blocks(reversed(self.held.pop(name)))

    def swap_out(self, request: Request) -> BlockCopies | None:
        """Move what the request has computed to host memory.

        Returns:
            The copies to make before any step writes to the device blocks; None if host memory is
            full.
        """
        count = self.blocks_for(request.num_computed_tokens)
        if count > self.host_pool.num_free:
            return None
        host_table = self.host_pool.get_new_blocks(count)
        copies = list(zip(self.tables[request.request_id], host_table, strict=False))
        self.free(request)
        self.host_tables[request.request_id] = host_table
        return copies

    def swap_in(self, request: Request, num_tokens: int) -> BlockCopies | None:
        """Bring a swapped request back, with room for `num_tokens` tokens in all. Blocks whose
        content is still, or again, on the device are shared instead of copied.

        Returns:
            The copies to make before the step runs; None, with nothing changed, if the pool has too
            few blocks.
        """
        host_table = self.host_tables[request.request_id]
        prefix = self.get_computed_blocks(request)[: request.num_computed_tokens // self.block_size]
        if self.allocate_slots(request, num_tokens, prefix) is None:
            return None
        table = self.tables[request.request_id]
        copies = list(zip(host_table, table, strict=False))[len(prefix) :]
        self.host_pool.free_blocks(self.host_tables.pop(request.request_id))
        self.cache_blocks(request, len(prefix) * self.block_size)
        return copies

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Check tables, pools and requests against each other.

        Raises:
            InvariantError: see `BlockPool.check_invariants`; or a table belongs to no request, or
                is too short for the computed tokens; or a block is cached under the hash of other
                tokens; or two requests could write to the same block.
        """
        self.pool.check_invariants([*self.tables.values(), *self.held.values()])
        self.host_pool.check_invariants(self.host_tables.values())
        live = {request.request_id: request for request in requests}
        orphans = (self.tables.keys() | self.host_tables.keys()) - live.keys()
        if orphans:
            raise InvariantError(f"tables without a request: {sorted(orphans)}")
        for request_id, table in self.tables.items():
            computed = live[request_id].num_computed_tokens
            if len(table) * self.block_size < computed:
                raise InvariantError(
                    f"{request_id} computed {computed} tokens, its table has {len(table)} blocks"
                )
            hashes = self.block_hashes(live[request_id])[: computed // self.block_size]
            for i, block_id in enumerate(table):
                if self.pool.block_hashes[block_id] not in (None, *hashes[i : i + 1]):
                    raise InvariantError(
                        f"block {block_id} has a hash that does not match the tokens of "
                        f"{request_id}"
                    )
            # A request writes to its first partly filled block and those after it, never to full
            # blocks.
            for block_id in table[computed // self.block_size :]:
                if self.pool.ref_counts[block_id] != 1:
                    raise InvariantError(
                        f"block {block_id} would be written by {request_id} and is shared"
                    )
