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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch
import xxhash

logger = logging.getLogger(__name__)

KEY_BYTES = 32
COMPLAINT_SECONDS = 60.0

# The header of an entry outside of this process: magic and version, key, length, checksum.
_HEADER = struct.Struct(f"<8s{KEY_BYTES}sQQ")
_MAGIC = b"nanoKV\x00\x01"
HEADER_BYTES = _HEADER.size


def _checksum(key: bytes, payload: memoryview) -> int:
    # xxh3 reads 45 GB/s on one core here, crc32 4.7, blake2b 0.9: no slower than copying. It finds accidents, not forgeries:
    # a program that may write to the pool may write anything.
    state = xxhash.xxh3_64(_MAGIC)
    for part in (key, len(payload).to_bytes(8, "little"), payload):
        state.update(part)
    return state.intdigest()


def seal(key: bytes, payload: memoryview) -> bytes:
    """The header of an entry, `HEADER_BYTES` long."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
    return _HEADER.pack(_MAGIC, key, len(payload), _checksum(key, payload))


def is_intact(header: bytes | bytearray | memoryview, key: bytes, payload: memoryview) -> bool:
    """Whether the payload is complete, belongs to the key and is as it was when it was sealed."""
    return bytes(header) == seal(key, payload)


@dataclass
class StoreStats:
    """Counts of a store's entries, as seen from this process.

    Attributes:
        hits, misses: entries that were requested, and found or not.
        stored: entries written.
        evicted: entries removed to make room.
        damaged: entries that were found damaged; they are removed, and count as misses too.
        failed: entries that could not be stored.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    damaged: int = 0
    failed: int = 0


class Patience:
    """How long not to ask a server that does not answer: one second, and twice as long after every further try, up to a minute."""

    def __init__(self) -> None:
        self._seconds, self._until = 1.0, 0.0

    @property
    def is_over(self) -> bool:
        """The server may be asked."""
        return time.monotonic() >= self._until

    def tried(self, answered: bool) -> None:
        """The server has been asked."""
        if not answered:
            self._until = time.monotonic() + self._seconds
        self._seconds = 1.0 if answered else min(2 * self._seconds, COMPLAINT_SECONDS)


class KVStore:
    """Keeps bytes under keys, up to a bound: the least recently used entries are evicted. Any thread may call it.

    The keys of a call name blocks that follow one another, and a block is useless without those before it. So the first key
    counts as used last: the end of a chain is evicted before its beginning.

    A store that fails counts as empty: it logs a warning, at most one per minute, and the engine computes the blocks.
    """

    def __init__(self) -> None:
        self.stats = StoreStats()
        self._stats_lock = threading.Lock()
        self._quiet_until = 0.0

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many keys are there, up to the first that is not; they count as used now."""
        raise NotImplementedError

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """Copy the bytes of these buffers into the store."""
        raise NotImplementedError

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill the buffers, each as long as its entry.

        Returns:
            Whether each was filled with its entry. If not, its content is undefined: the entry is not there, or was damaged
            and has been removed.
        """
        raise NotImplementedError

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove entries, if they are there."""
        raise NotImplementedError

    def close(self) -> None:
        """Close files and connections. Entries that other processes share stay."""

    def _count(self, **amounts: int) -> None:
        with self._stats_lock:
            for name, amount in amounts.items():
                setattr(self.stats, name, getattr(self.stats, name) + amount)

    def _count_found(self, found: Sequence[bool]) -> None:
        self._count(hits=sum(found), misses=len(found) - sum(found))

    def _complain(self, text: str) -> None:
        """Log a warning, unless there was one within the last minute."""
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + COMPLAINT_SECONDS
            logger.warning("%s; not said again for %.0f s", text, COMPLAINT_SECONDS)

    def _drop_damaged(self, key: bytes, place: str) -> None:
        self._count(damaged=1)
        self._complain(f"the KV block {key.hex()} of {place} is damaged, and removed")
        self.remove([key])


class HostStore(KVStore):
    """Entries of one size in host memory: one allocation, divided into slots.

    The constructor writes to all of the memory: the kernel allocates a page when it is first touched, which takes several
    times as long as the copy itself. A GPU can read pinned memory without a copy in between.

    Args:
        num_bytes: how much memory to take.
        entry_bytes: length of every entry.
        pin_memory: for a GPU to copy from and to.

    Attributes:
        spill: called with the key and the bytes of an entry that is about to be evicted, while it can still be found.

    Raises:
        ValueError: not one entry fits, or there is not enough memory.
    """

    def __init__(self, num_bytes: int, entry_bytes: int, pin_memory: bool = False) -> None:
        super().__init__()
        self.num_slots, self.entry_bytes = num_bytes // entry_bytes, entry_bytes
        available = psutil.virtual_memory().available
        if num_bytes > available:
            raise ValueError(
                f"lower kv_offloading_size: {num_bytes / 2**30:.1f} GiB of host memory are wanted for KV blocks, and "
                f"{available / 2**30:.1f} GiB are available"
            )
        if self.num_slots < 1:
            raise ValueError(
                f"raise kv_offloading_size: {num_bytes} bytes of host memory hold no KV block of {entry_bytes} bytes"
            )
        memory = torch.empty(self.num_slots, entry_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        self._memory = memory.zero_().numpy()
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(self.num_slots))
        self.spill: Callable[[bytes, memoryview], None] | None = None
        # `_lock` guards `_slots` and `_free`, and is held for one copy at most; the thread that fills slots holds `_writing`.
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def contains(self, keys: Sequence[bytes]) -> int:
        """See `KVStore.contains`."""
        with self._lock:
            count = next((i for i, key in enumerate(keys) if key not in self._slots), len(keys))
            for key in reversed(keys[:count]):
                self._slots.move_to_end(key)
        return count

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """See `KVStore.get`."""
        found = []
        for key, buffer in zip(reversed(keys), reversed(buffers), strict=True):
            target = self._as_entry(buffer)
            with self._lock:
                found.append(key in self._slots)
                if found[-1]:
                    self._slots.move_to_end(key)
                    target[:] = self._memory[self._slots[key]]
        self._count_found(found)
        return found[::-1]

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """See `KVStore.put`."""
        with self._writing:
            for key, buffer in zip(reversed(keys), reversed(buffers), strict=True):
                if self.contains([key]):
                    continue
                source, slot = self._as_entry(buffer), self._empty_slot()
                self._memory[slot] = source  # no other thread knows this slot yet
                with self._lock:
                    self._slots[key] = slot
                self._count(stored=1)

    def evict(self, keys: Sequence[bytes]) -> None:
        """Evict entries now."""
        with self._writing:
            for key in keys:
                self._evict(key)

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `KVStore.remove`."""
        with self._writing:
            for key in keys:
                self._forget(key)

    def _empty_slot(self) -> int:
        if not self._free:
            self._evict(next(iter(self._slots)))
        return self._free.pop()

    def _evict(self, key: bytes) -> None:
        # The next store may be slow: until it has the entry, the entry can still be read here.
        if key in self._slots and self.spill is not None:
            self.spill(key, memoryview(self._memory[self._slots[key]]))
        self._count(evicted=self._forget(key))

    def _forget(self, key: bytes) -> bool:
        with self._lock:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self._free.append(slot)
        return slot is not None

    def _as_entry(self, buffer: memoryview) -> np.ndarray:
        array = np.frombuffer(buffer, dtype=np.uint8)
        if array.size != self.entry_bytes:
            raise ValueError(f"entries have {self.entry_bytes} bytes here, got {array.size}")
        return array


class TieredStore(KVStore):
    """A small fast store before a large slow one. Entries evicted from the first go to the second. Entries found in the second
    come back to the first, and stay below too: when they are evicted again, there is nothing to write.

    Args:
        upper: the fast one.
        lower: the slow one, which may be tiered itself.
    """

    def __init__(self, upper: HostStore, lower: KVStore) -> None:
        super().__init__()
        self.upper, self.lower = upper, lower
        upper.spill = lambda key, buffer: lower.put([key], [buffer])

    def contains(self, keys: Sequence[bytes]) -> int:
        """See `KVStore.contains`; some may be above and some below."""
        count = 0
        while count < len(keys):
            more = self.upper.contains(keys[count:]) or self.lower.contains(keys[count:])
            if not more:
                break
            count += more
        return count

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """See `KVStore.put`."""
        self.upper.put(keys, buffers)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """See `KVStore.get`."""
        found = self.upper.get(keys, buffers)
        missing = [i for i, there in enumerate(found) if not there]
        if missing:
            below = self.lower.get([keys[i] for i in missing], [buffers[i] for i in missing])
            risen = [i for i, there in zip(missing, below, strict=True) if there]
            self.upper.put([keys[i] for i in risen], [buffers[i] for i in risen])
            for i in risen:
                found[i] = True
        self._count_found(found)
        return found

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `KVStore.remove`."""
        self.upper.remove(keys)  # an entry that is being evicted arrives below before this returns
        self.lower.remove(keys)

    def close(self) -> None:
        """Close both stores."""
        self.upper.close()
        self.lower.close()
