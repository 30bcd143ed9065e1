"""Keeps KV blocks in a store behind a server: what Redis and Mooncake have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from nanovllm.kv_transfer.stores.store import HEADER_BYTES, KVStore, Patience, is_intact

Pair = tuple[bytes, memoryview]  # a key and the bytes of its entry


class ServerStore(KVStore):
    """Entries behind the same header as in a folder, which pass in batches.

    A server that does not answer holds nothing, which costs no time, and is asked less and less often.

    Attributes:
        server: what warnings call it.
        batch: entries per round trip.
        errors: exceptions that mean that the server keeps no block.
        refusals: those of them that are an answer.
    """

    server = ""
    batch = 16
    errors: tuple[type[Exception], ...] = (ConnectionError,)
    refusals: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self._patience = Patience()

    def _find(self, keys: Sequence[bytes]) -> list[Any]:
        """True for the keys that are there; they count as used, in this order."""
        raise NotImplementedError

    def _send(self, pairs: Sequence[Pair]) -> int:
        """Store entries; returns how many the server has taken."""
        raise NotImplementedError

    def _fetch(self, keys: Sequence[bytes]) -> Iterable[memoryview | None]:
        """The headers and bytes of entries; None for those that are not there."""
        raise NotImplementedError

    def contains(self, keys: Sequence[bytes]) -> int:
        """See `KVStore.contains`."""
        there = self._ask(self._find, keys[::-1]) or []
        return sum(1 for _ in takewhile(bool, reversed(there)))

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """See `KVStore.put`."""
        for batch in self._batches(keys, buffers):
            there = self._ask(self._find, [key for key, _ in batch]) or [False] * len(batch)
            new = [pair for pair, found in zip(batch, there, strict=True) if not found]
            stored = self._ask(self._send, new) or 0 if new else 0
            self._count(stored=stored, failed=len(new) - stored)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """See `KVStore.get`."""
        found: list[bool] = []
        for batch in self._batches(keys, buffers):
            found += self._ask(self._receive, batch) or [False] * len(batch)
        self._count_found(found)
        return found[::-1]

    def _receive(self, batch: Sequence[Pair]) -> list[bool]:
        values = self._fetch([key for key, _ in batch])
        return [self._take(value, *pair) for value, pair in zip(values, batch, strict=True)]

    def _take(self, value: memoryview | None, key: bytes, buffer: memoryview) -> bool:
        if value is None:
            return False
        header, payload = value[:HEADER_BYTES], value[HEADER_BYTES:]
        if len(payload) == len(buffer) and is_intact(header, key, payload):
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(payload, np.uint8))
            return True
        self._drop_damaged(key, self.server)
        return False

    def _batches(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Iterator[list[Pair]]:
        """All entries, the first key last, so that it counts as used last."""
        pairs = list(zip(keys, buffers, strict=True))[::-1]
        return (pairs[i : i + self.batch] for i in range(0, len(pairs), self.batch))

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """The server's answer; None if it gives none, or gave none a moment ago."""
        if not self._patience.is_over:
            return None
        try:
            answer = question(*arguments)
        except self.errors as error:
            self._patience.tried(answered=isinstance(error, self.refusals))
            self._complain(f"{self.server} keeps no KV blocks: {error}")
            return None
        self._patience.tried(answered=True)
        return answer
