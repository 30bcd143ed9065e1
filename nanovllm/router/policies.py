"""Which of several servers gets a request: they take turns, or each prefix has a home server.

`prefix_aware` is what vLLM's production stack calls prefixaware, and SGLang's and vLLM's routers cache_aware. A router has no
tokenizer, so it compares texts: it divides a request into pieces, and names each by a hash of this piece and all before it, as a
prefix cache names its blocks. `scheduler.data_parallel.Router` does the same for the engines within one server, with real blocks.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from nanovllm.router.backends import Backend

# Bytes per piece: some sixty tokens, a few blocks.
PIECE_BYTES = 256
# Requests that agree in so many pieces count as equal: comparing more would only cost time.
ROUTED_PIECES = 64
# Names to remember per server (some 150 bytes each), as if its cache had a million tokens.
CAPACITY = 16384
# A server may have so many more running requests than the least busy one and still get a request for the sake of its prefix.
MAX_IMBALANCE = 8


class RoundRobin:
    """The servers take turns; servers that are down are skipped.

    Args:
        size: number of servers, including those that are down.
    """

    def __init__(self, size: int) -> None:
        self.size, self._turn = size, 0

    def choose(self, candidates: Sequence[Backend], body: Mapping[str, Any]) -> Backend:
        """The server that gets the request.

        Args:
            candidates: the servers that can get it; at least one.
            body: the request.
        """
        return self._take_turn(min(candidates, key=self._distance))

    def forget(self, index: int) -> None:
        """Note that a server has been restarted, and has an empty cache."""

    def _distance(self, candidate: Backend) -> int:
        return (candidate.index - self._turn) % self.size

    def _take_turn(self, chosen: Backend) -> Backend:
        self._turn = (chosen.index + 1) % self.size
        return chosen


class PrefixAware(RoundRobin):
    """Chooses the server that has been sent the longest part of the request before, unless it is too busy; else the least busy
    one; among equals they take turns.

    Args:
        capacity: names of pieces to remember per server, the least recently used are dropped first.
    """

    def __init__(self, size: int, capacity: int = CAPACITY) -> None:
        super().__init__(size)
        self.capacity = capacity
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(size)]

    def choose(self, candidates: Sequence[Backend], body: Mapping[str, Any]) -> Backend:
        """The server that gets the request; from now on its text counts as cached there."""
        names = prefix_names(body)

        def num_cached(index: int) -> int:
            return next((i for i, name in enumerate(names) if name not in self._sent[index]), len(names))

        least = min(candidate.num_running for candidate in candidates)
        chosen = min(
            (each for each in candidates if each.num_running - least <= MAX_IMBALANCE),
            key=lambda each: (-num_cached(each.index), each.num_running, self._distance(each)),
        )
        sent = self._sent[chosen.index]
        for name in reversed(names):  # the end of a text is dropped before its beginning
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > self.capacity:
            sent.popitem(last=False)
        return self._take_turn(chosen)

    def forget(self, index: int) -> None:
        """Note that a server has been restarted, and has an empty cache."""
        self._sent[index].clear()


POLICIES = {"round_robin": RoundRobin, "prefix_aware": PrefixAware}


def prefix_names(body: Mapping[str, Any]) -> list[bytes]:
    """Names of a request's first whole pieces. Requests share a name only if they agree in everything up to there, and in the
    fields that keep caches apart (model and salt)."""
    prompt = body.get("messages") or body.get("prompt")
    if isinstance(prompt, list):  # token ids or messages, no more of them than can matter
        prompt = prompt[: ROUTED_PIECES * PIECE_BYTES]
    # A list that goes on has the same JSON up to there.
    text = msgspec.json.encode([body.get("model"), body.get("cache_salt"), prompt])
    name, names = b"", []
    for end in range(PIECE_BYTES, min(len(text), ROUTED_PIECES * PIECE_BYTES) + 1, PIECE_BYTES):
        name = hashlib.blake2b(name + text[end - PIECE_BYTES : end], digest_size=16).digest()
        names.append(name)
    return names
