"""Keeps KV blocks outside of the KV pool, as bytes under a key.

A key is made of everything that determines the bytes (model, layout, tokens: see `offloading.block_key`), so the same key always
means the same bytes. Hence an entry is never updated: if it is there, a second writer need not write it, and no reader can get a
stale block.

Built by notebooks/32_kv_sharing.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import xxhash

logger = logging.getLogger(__name__)

KEY_BYTES = 32
COMPLAINT_SECONDS, RETRY_SECONDS = 60.0, 10.0

# The header of an entry outside of this process: magic and version, key, length; then a checksum.
_HEADER = struct.Struct(f"<8s{KEY_BYTES}sQ")
_MAGIC = b"nanoKV\x00\x01"
HEADER_BYTES = _HEADER.size + 8

Pair = tuple[bytes, memoryview]  # a key and the bytes of its entry


def seal(key: bytes, payload: memoryview) -> bytes:
    """The header of an entry, `HEADER_BYTES` long."""
    header = _HEADER.pack(_MAGIC, key, len(payload))
    # xxh3 reads 45 GB/s on one core here, crc32 4.7, blake2b 0.9: no slower than copying. It finds accidents, not forgeries:
    # a program that may write to the pool may write anything.
    checksum = xxhash.xxh3_64(header)
    checksum.update(payload)
    return header + checksum.intdigest().to_bytes(8, "little")


def is_intact(header: bytes, key: bytes, payload: memoryview) -> bool:
    """Whether the payload is complete, belongs to the key and is as it was when it was sealed."""
    return header == seal(key, payload)


def unpack(entry: memoryview, payload: memoryview) -> bytes:
    """Fill a payload with that of a sealed entry; returns the entry's header, or b"" if its payload has another length."""
    if len(entry) != HEADER_BYTES + len(payload):
        return b""
    np.copyto(np.frombuffer(payload, np.uint8), np.frombuffer(entry, np.uint8)[HEADER_BYTES:])
    return bytes(entry[:HEADER_BYTES])


class KVStore:
    """Keeps bytes under keys, up to a bound: the least recently used entries are evicted. Any thread may call it. This one keeps
    nothing.

    The keys of a call name blocks that follow one another, and a block is useless without those before it. So the first key
    counts as used last: the end of a chain is evicted before its beginning.

    Attributes:
        num_slots: for entries in host memory.
        stats: counts of entries, as seen from this process: `hits` and `misses` of those that were requested; `stored`; `evicted` to
            make room; found `damaged`, which are removed, and count as misses too; `failed` to be stored.
    """

    num_slots = 0

    def __init__(self) -> None:
        self.stats = SimpleNamespace(hits=0, misses=0, stored=0, evicted=0, damaged=0, failed=0)

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many keys are there, up to the first that is not; they count as used now."""
        return 0

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """Copy the bytes of these buffers into the store."""

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill the buffers, each as long as its entry.

        Returns:
            Whether each was filled with its entry. If not, its content is undefined: the entry is not there, or was damaged
            and has been removed.
        """
        return [False] * len(keys)

    def evict(self, keys: Sequence[bytes]) -> None:
        """Evict entries from host memory now, if they are there."""

    def close(self) -> None:
        """Close files and connections. Entries that other processes share stay."""

    def _last_first(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Pair]:
        """All entries, the first one last, so that it counts as used last."""
        return list(zip(keys, buffers, strict=True))[::-1]

    def _count_found(self, found: list[bool]) -> list[bool]:
        """Count what was found of `_last_first`; returns it in the order of the keys."""
        self.stats.hits += sum(found)
        self.stats.misses += len(found) - sum(found)
        return found[::-1]


class SealedStore(KVStore):
    """Entries outside of this process, each behind a header (`seal`). A subclass says how they get there and back.

    A store that fails counts as empty: it logs a warning, at most one per minute, and the engine computes the blocks. One that does
    not answer is asked again after some seconds.

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
        self._ask_again, self._quiet_until = 0.0, 0.0

    def _find(self, keys: Sequence[bytes]) -> list[Any]:
        """True for the keys that are there; they count as used, in this order."""
        raise NotImplementedError

    def _send(self, pairs: Sequence[Pair]) -> int:
        """Store entries that are not there; returns how many have been taken."""
        raise NotImplementedError

    def _fetch(self, pairs: Sequence[Pair]) -> list[bytes | None]:
        """Fill the buffers. Returns the entries' headers: b"" if the length is not the buffer's, None if there is no entry."""
        raise NotImplementedError

    def _delete(self, keys: Sequence[bytes]) -> None:
        """Remove entries, if they are there."""

    def contains(self, keys: Sequence[bytes]) -> int:
        """See `KVStore.contains`."""
        there = self._ask(self._find, keys[::-1]) or []
        return sum(1 for _ in takewhile(bool, reversed(there)))

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
            found += [self._check(header, *pair) for header, pair in zip(headers, batch, strict=True)]
        return self._count_found(found)

    def _batches(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Iterator[list[Pair]]:
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

    def _ask(self, question: Callable[[Any], Any], items: Sequence[Any]) -> Any:
        """The store's answer; None if it gives none, or gave none a moment ago, or if there is nothing to ask."""
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
            logger.warning("%s; not said again for %.0f s", text, COMPLAINT_SECONDS)


class HostStore(KVStore):
    """Entries of one size in host memory: one allocation, divided into slots. A large slow store may be below this small fast one:
    entries that are evicted here go there. Entries that are found there come back, and stay below too: when they are evicted again,
    there is nothing to write.

    The constructor writes to all of the memory: the kernel allocates a page when it is first touched, which takes several
    times as long as the copy itself. A GPU can read pinned memory without a copy in between.

    Args:
        num_bytes: how much memory to take.
        entry_bytes: length of every entry.
        pinned: for a GPU to copy from and to.
        lower: the store below.

    Attributes:
        is_in_use: whether an entry must not be evicted now. If none may be, a new one is not stored.
        stats: of this store alone.
    """

    def __init__(self, num_bytes: int, entry_bytes: int, pinned: bool = False, lower: KVStore | None = None) -> None:
        super().__init__()
        self.num_slots, self.lower = num_bytes // entry_bytes, lower or KVStore()
        self._memory = torch.zeros(self.num_slots, entry_bytes, dtype=torch.uint8, pin_memory=pinned).numpy()
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(self.num_slots))
        self.is_in_use: Callable[[bytes], bool] = lambda key: False
        # `_lock` guards `_slots`, and is held for one copy at most; the thread that fills or empties slots holds `_writing`.
        self._lock, self._writing = threading.Lock(), threading.RLock()

    def __contains__(self, key: bytes) -> bool:
        """Whether an entry is in this very store."""
        return key in self._slots

    def contains(self, keys: Sequence[bytes]) -> int:
        """See `KVStore.contains`; some may be here and some below."""
        count = 0
        while more := self._touch(keys[count:]) or self.lower.contains(keys[count:]):
            count += more
        return count

    def _touch(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            there = list(takewhile(self.__contains__, keys))
            for key in reversed(there):
                self._slots.move_to_end(key)
        return len(there)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """See `KVStore.get`."""
        found = self._count_found([self._read(key, buffer) for key, buffer in self._last_first(keys, buffers)])
        missing = [i for i, there in enumerate(found) if not there]
        below = self.lower.get([keys[i] for i in missing], [buffers[i] for i in missing])
        risen = [i for i, there in zip(missing, below, strict=True) if there]
        self.put([keys[i] for i in risen], [buffers[i] for i in risen])
        return [there or i in risen for i, there in enumerate(found)]

    def _read(self, key: bytes, buffer: memoryview) -> bool:
        with self._lock:
            if there := key in self:
                self._slots.move_to_end(key)
                np.frombuffer(buffer, np.uint8)[:] = self._memory[self._slots[key]]
        return there

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """See `KVStore.put`."""
        with self._writing:
            for key, buffer in self._last_first(keys, buffers):
                if self._touch([key]) or not self._make_room():
                    continue
                slot = self._free.pop()
                self._memory[slot] = np.frombuffer(buffer, np.uint8)  # no other thread knows this slot yet
                with self._lock:
                    self._slots[key] = slot
                self.stats.stored += 1

    def _make_room(self) -> bool:
        if not self._free:
            with self._lock:
                oldest = list(islice((key for key in self._slots if not self.is_in_use(key)), 1))
            self.evict(oldest)
        return bool(self._free)

    def evict(self, keys: Sequence[bytes]) -> None:
        """See `KVStore.evict`."""
        with self._writing:
            for key in filter(self.__contains__, keys):
                # The store below may be slow: until it has the entry, the entry can still be read here.
                self.lower.put([key], [memoryview(self._memory[self._slots[key]])])
                with self._lock:
                    self._free.append(self._slots.pop(key))
                self.stats.evicted += 1

    def close(self) -> None:
        """Close the store below."""
        self.lower.close()
