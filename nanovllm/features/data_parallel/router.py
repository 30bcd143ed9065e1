"""Chooses the engine for a request, by prefix and load.

Built by notebooks/25_data_parallel.ipynb: edit it there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate

from nanovllm.core.kv_cache_manager import hash_block, hash_salt
from nanovllm.data.request import EngineRequest

# The most blocks of a prompt that are compared. More would cost time without changing the choice.
ROUTED_BLOCKS = 64
# Running requests that a waiting one counts for: it shows that the engine is full.
WAITING_WEIGHT = 4
# An engine whose load exceeds the lowest load by more than this gets no request because of a cached
# prefix.
MAX_IMBALANCE = 8


def load_score(num_waiting: int, num_running: int) -> int:
    """Return an engine's load."""
    return WAITING_WEIGHT * num_waiting + num_running


class EngineRouter:
    """Chooses the engine for a request.

    It takes the engine that probably has the longest prefix of the prompt cached, unless this
    engine is too busy. Ties go to the least busy engine, then round robin.

    To estimate what an engine has cached, the router remembers the block hashes of the prompts that
    it has sent there (see `hash_block`). It remembers at most as many as the engine has blocks, and
    forgets the least recently used ones first.

    Args:
        num_ranks: number of engines.
        block_size: tokens per block.
        capacity: hashes to remember per engine; 0 ignores prefixes.
        max_imbalance: the most by which the chosen engine's load may exceed the lowest load.
    """

    def __init__(
        self, num_ranks: int, block_size: int, capacity: int, max_imbalance: int = MAX_IMBALANCE
    ) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self.max_imbalance = max_imbalance
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_ranks)]
        self._turn = 0

    def choose(self, request: EngineRequest, loads: Sequence[int]) -> int:
        """Choose the engine for a request, and remember its prompt's blocks as cached there
        (`_block_hashes`, `_remember`; no hashes if `capacity` is 0).

        Take the engines with `load <= lowest load + max_imbalance`, and choose the first by

            1. the most leading blocks of the prompt (`_match`),
            2. the lowest load,
            3. round robin: `_turn`, the engines after it, then those before it.

        Set `_turn` to the engine after the chosen one.

        Args:
            loads: the load of each engine, with all requests sent to it so far; see `load_score`.
        """
        hashes = self._block_hashes(request) if self.capacity else []
        least = min(loads)
        size = len(loads)
        rank = min(
            (rank for rank in range(size) if loads[rank] - least <= self.max_imbalance),
            key=lambda rank: (-self._match(rank, hashes), loads[rank], (rank - self._turn) % size),
        )
        self._turn = (rank + 1) % size
        self._remember(rank, hashes)
        return rank

    def _block_hashes(self, request: EngineRequest) -> list[bytes]:
        """Return the hashes of the prompt's first full blocks. The last token does not count: it is
        always computed."""
        size = self.block_size
        tokens = request.prompt_token_ids
        count = min((len(tokens) - 1) // size, ROUTED_BLOCKS)
        blocks = (tokens[i * size : (i + 1) * size] for i in range(count))
        return list(accumulate(blocks, hash_block, initial=hash_salt(request.cache_salt)))[1:]

    def _match(self, rank: int, hashes: list[bytes]) -> int:
        """Return the number of leading blocks that were sent to an engine before."""
        sent = self._sent[rank]
        return next((i for i, each in enumerate(hashes) if each not in sent), len(hashes))

    def _remember(self, rank: int, hashes: list[bytes]) -> None:
        sent = self._sent[rank]
        for each in reversed(hashes):  # the last block first, so that it is evicted first
            sent[each] = None
            sent.move_to_end(each)
        while len(sent) > self.capacity:
            sent.popitem(last=False)

    def forget(self) -> None:
        """Forget all prompts, after the engines' caches were emptied."""
        self._sent = [OrderedDict() for _ in self._sent]
