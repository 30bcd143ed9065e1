"""Keeps KV blocks outside of this process: each entry behind a header that reveals damage, in a
store that may fail at any time."""

import logging
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import TypeVar

import numpy as np
import xxhash

from nanovllm.kv_transfer.stores.store import KVStore

logger = logging.getLogger(__name__)

KEY_BYTES = 32
COMPLAINT_SECONDS = 60.0
RETRY_SECONDS = 10.0

# The header of an entry outside of this process: magic and version, key, length; then a checksum.
_HEADER = struct.Struct(f"<8s{KEY_BYTES}sQ")
HEADER_BYTES = _HEADER.size + 8

Pair = tuple[bytes, memoryview]  # a key and the bytes of its entry
Items = TypeVar("Items", bound=Sequence[object])
T = TypeVar("T")


def seal(key: bytes, payload: memoryview) -> bytes:
    """The header of an entry, `HEADER_BYTES` long."""
    header = _HEADER.pack(b"nanoKV\x00\x01", key, len(payload))
    # xxh3 reads 45 GB/s on one core here, crc32 4.7, blake2b 0.9: no slower than copying. It finds
    # accidents, not forgeries: a program that may write to the pool may write anything.
    checksum = xxhash.xxh3_64(header)
    checksum.update(payload)
    return header + checksum.intdigest().to_bytes(8, "little")


def is_intact(header: bytes, key: bytes, payload: memoryview) -> bool:
    """Whether the payload is complete, belongs to the key and is as it was when it was sealed."""
    return header == seal(key, payload)


def unpack(entry: memoryview, payload: memoryview) -> bytes:
    """Fill a payload with that of a sealed entry; returns the entry's header, or b"" if its payload
    has another length."""
    if len(entry) != HEADER_BYTES + len(payload):
        return b""
    np.copyto(np.frombuffer(payload, np.uint8), np.frombuffer(entry, np.uint8)[HEADER_BYTES:])
    return bytes(entry[:HEADER_BYTES])


class SealedStore(KVStore):
    """Entries outside of this process, each behind a header (`seal`). A subclass says how they get
    there and back.

    A store that fails counts as empty: it logs a warning, at most one per minute, and the engine
    computes the blocks. One that does not answer is asked again after some seconds.

    Attributes:
        place: what warnings call it.
        batch: entries that pass at a time.
        errors: exceptions that mean that the store keeps no block.
        refusals: those of them that are an answer.
    """

    place = ""
    batch = 16
    errors: tuple[type[Exception], ...] = (OSError,)
    refusals: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self._ask_again = 0.0
        self._quiet_until = 0.0

    def _find(self, keys: Sequence[bytes]) -> Sequence[object]:
        """True for the keys that are there; they count as used, in this order."""
        raise NotImplementedError

    def _send(self, pairs: Sequence[Pair]) -> int:
        """Store entries that are not there; returns how many have been taken."""
        raise NotImplementedError

    def _fetch(self, pairs: Sequence[Pair]) -> list[bytes | None]:
        """Fill the buffers. Returns the entries' headers: b"" if the length is not the buffer's,
        None if there is no entry."""
        raise NotImplementedError

    def _delete(self, keys: Sequence[bytes]) -> None:
        """Remove entries, if they are there."""

    def contains(self, keys: Sequence[bytes]) -> int:
        """See `KVStore.contains`."""
        return sum(1 for _ in takewhile(bool, reversed(self._ask(self._find, keys[::-1]) or [])))

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """See `KVStore.put`."""
        for batch in self._batches(keys, buffers):
            there = self._ask(self._find, [key for key, _ in batch]) or [False] * len(batch)
            new = [pair for pair, found in zip(batch, there, strict=True) if not found]
            stored = self._ask(self._send, new) or 0
            self.stats.stored += stored
            self.stats.failed += len(new) - stored

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """See `KVStore.get`."""
        found: list[bool] = []
        for batch in self._batches(keys, buffers):
            headers = self._ask(self._fetch, batch) or [None] * len(batch)
            found += [
                self._check(header, *pair) for header, pair in zip(headers, batch, strict=True)
            ]
        return self._count_found(found)

    def _batches(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Iterator[list[Pair]]:
        pairs = self._last_first(keys, buffers)
        return (pairs[i : i + self.batch] for i in range(0, len(pairs), self.batch))

    def _check(self, header: bytes | None, key: bytes, payload: memoryview) -> bool:
        """Whether there is an entry, and it is intact. If it is damaged, it is removed."""
        if header is None or is_intact(header, key, payload):
            return header is not None
        self.stats.damaged += 1
        self._complain(f"the KV block {key.hex()} of {self.place} is damaged, and removed")
        self._ask(self._delete, [key])
        return False

    def _ask(self, question: Callable[[Items], T], items: Items) -> T | None:
        """The store's answer; None if it gives none, or gave none a moment ago, or if there is
        nothing to ask."""
        if items and time.monotonic() >= self._ask_again:
            try:
                return question(items)
            except self.errors as error:
                self._complain(f"{self.place} keeps no KV blocks: {error}")
                if not isinstance(error, self.refusals):
                    self._ask_again = time.monotonic() + RETRY_SECONDS
        return None

    def _complain(self, text: str) -> None:
        """Log a warning, unless there was one within the last minute."""
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + COMPLAINT_SECONDS
            logger.warning("%s; not repeated for %.0f s", text, COMPLAINT_SECONDS)
