"""Which of several servers gets a request: they take turns, or each prefix has its home.

`prefix_aware` is what vLLM's production stack calls prefixaware, and SGLang's and vLLM's routers cache_aware. A router has no
tokenizer, so that it compares texts: pieces of the request, each named by a hash of itself and of all before it, as a prefix
cache names its blocks. `distributed.data_parallel.Router` does the same for the engines within one server, with real blocks.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

# Bytes a piece: some sixty tokens, a few blocks.
PIECE_BYTES = 256
# Requests that agree in so many pieces are alike: looking further would only cost time.
ROUTED_PIECES = 64
# Names that are remembered for each server (some 150 bytes each): as if its cache had a million tokens.
CAPACITY = 16384
# What a server may have to do more than the least busy one and still get a request for the sake of its prefix.
MAX_IMBALANCE = 8


class Candidate(Protocol):
    """What a policy wants to know of a server.

    Attributes:
        index: its place among the servers of its kind.
        num_running: requests that have been sent to it and have not ended.
    """

    index: int
    num_running: int


Server = TypeVar("Server", bound=Candidate)


class RoundRobin:
    """They take turns; who cannot be chosen is passed over.

    Args:
        size: servers, those that are down included.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = 0

    def choose(self, candidates: Sequence[Server], body: Mapping[str, Any]) -> Server:
        """The server that gets the request.

        Args:
            candidates: those that can be chosen; at least one.
            body: the request.
        """
        return self._take_turn(min(candidates, key=self._distance))

    def forget(self, index: int) -> None:
        """The server has started anew: nothing is cached there."""

    def _distance(self, candidate: Candidate) -> int:
        return (candidate.index - self._turn) % self.size

    def _take_turn(self, chosen: Server) -> Server:
        self._turn = (chosen.index + 1) % self.size
        return chosen


class PrefixAware(RoundRobin):
    """The server that has been sent the longest part of the request before, unless it is too busy; else the least busy one;
    else they take turns.

    Args:
        size: servers, those that are down included.
        capacity: names of pieces to remember for each server, least recently used first out.
        max_imbalance: by how many running requests a server may be above the least busy one and still be chosen.
    """

    def __init__(self, size: int, capacity: int = CAPACITY, max_imbalance: int = MAX_IMBALANCE) -> None:
        super().__init__(size)
        self.capacity, self.max_imbalance = capacity, max_imbalance
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(size)]

    def choose(self, candidates: Sequence[Server], body: Mapping[str, Any]) -> Server:
        """The server that gets the request; from now on its text counts as cached there."""
        names = prefix_names(body)
        least = min(candidate.num_running for candidate in candidates)
        chosen = min(
            (each for each in candidates if each.num_running - least <= self.max_imbalance),
            key=lambda each: (-self._match(each.index, names), each.num_running, self._distance(each)),
        )
        self._remember(chosen.index, names)
        return self._take_turn(chosen)

    def forget(self, index: int) -> None:
        """The server has started anew: nothing is cached there."""
        self._sent[index].clear()

    def _match(self, index: int, names: list[bytes]) -> int:
        """How many of the pieces, from the first on, were sent there."""
        sent = self._sent[index]
        return next((i for i, name in enumerate(names) if name not in sent), len(names))

    def _remember(self, index: int, names: list[bytes]) -> None:
        sent = self._sent[index]
        for name in reversed(names):  # the end of a text is forgotten before its beginning
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > self.capacity:
            sent.popitem(last=False)


POLICIES = {"round_robin": RoundRobin, "prefix_aware": PrefixAware}


def prefix_names(body: Mapping[str, Any]) -> list[bytes]:
    """Names of a request's first whole pieces. Requests share a name only if they agree in everything up to there, and in what
    keeps caches apart (model and salt)."""
    prompt = body.get("messages") or body.get("prompt")
    if isinstance(prompt, list):  # token ids or messages: no more of them than can matter
        prompt = prompt[: ROUTED_PIECES * PIECE_BYTES]
    # A list that goes on has the same JSON up to there.
    text = msgspec.json.encode([body.get("model"), body.get("cache_salt"), prompt])
    name, names = b"", []
    for end in range(PIECE_BYTES, min(len(text), ROUTED_PIECES * PIECE_BYTES) + 1, PIECE_BYTES):
        name = hashlib.blake2b(name + text[end - PIECE_BYTES : end], digest_size=16).digest()
        names.append(name)
    return names
