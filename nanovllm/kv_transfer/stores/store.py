"""Places beyond the KV pool where blocks are kept: bytes under a key that names them.

A key is made of everything that decides the bytes (model, layout, tokens: see `offloading.block_key`), so the same key always
means the same bytes. Hence nothing is ever updated, only there or not: whoever comes second need not write, and nobody can
read a stale block.

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

# What stands before an entry's bytes wherever they leave this process: magic and version, key, length, checksum.
_HEADER = struct.Struct(f"<8s{KEY_BYTES}sQQ")
_MAGIC = b"nanoKV\x00\x01"
HEADER_BYTES = _HEADER.size


def _checksum(key: bytes, payload: memoryview) -> int:
    # xxh3 reads 45 GB/s on one core here, crc32 4.7, blake2b 0.9: no slower than copying. It finds accidents, not forgers:
    # who may write to the pool may write anything.
    state = xxhash.xxh3_64(_MAGIC)
    for part in (key, len(payload).to_bytes(8, "little"), payload):
        state.update(part)
    return state.intdigest()


def seal(key: bytes, payload: memoryview) -> bytes:
    """The header for an entry, `HEADER_BYTES` long."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
    return _HEADER.pack(_MAGIC, key, len(payload), _checksum(key, payload))


def is_intact(header: bytes | bytearray | memoryview, key: bytes, payload: memoryview) -> bool:
    """Whether these are the key's bytes, all of them, as they were when they were sealed."""
    return bytes(header) == seal(key, payload)


@dataclass
class StoreStats:
    """What has happened to a store's entries, as seen from this process.

    Attributes:
        hits, misses: entries that were asked for, and given or not.
        stored: entries written.
        evicted: entries that gave way to others.
        damaged: entries that were found damaged; they are dropped, and count as misses too.
        failed: entries that should have been stored and could not be.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    damaged: int = 0
    failed: int = 0


class Patience:
    """Leaves a server alone that does not answer: for a second, and twice as long after every further try, up to a minute."""

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
    """Keeps bytes under keys, for a while. Bounded: what was not used for longest gives way. Any thread may call it.

    The keys of a call are of blocks that follow one another, and a block is worth nothing without those before it. So the
    first key counts as used last: the end of a chain goes before its beginning.

    A store that fails holds nothing: it complains, at most once a minute, and the engine computes.
    """

    def __init__(self) -> None:
        self.stats = StoreStats()
        self._stats_lock = threading.Lock()
        self._quiet_until = 0.0

    def contains(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are there, up to the first that is not; they count as used now."""
        raise NotImplementedError

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """Keep the bytes of these buffers; whoever owns them may overwrite them afterwards."""
        raise NotImplementedError

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Fill the buffers, each as long as its entry.

        Returns:
            Whether each was filled with what was stored. If not, its content is anything: the entry is not there, or was
            damaged and has been dropped.
        """
        raise NotImplementedError

    def remove(self, keys: Sequence[bytes]) -> None:
        """Drop entries, if they are there."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of files and connections. What others share stays."""

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


class HostStore(KVStore):
    """Entries of one size in host memory: one piece, divided into slots.

    The memory is written to once in advance: the kernel gives out a page when it is first touched, and that takes several
    times as long as the copy itself. Pinned memory can be read by a GPU without a copy in between.

    Args:
        num_bytes: how much memory to take.
        entry_bytes: length of every entry.
        pin_memory: for a GPU to copy from and to.

    Attributes:
        spill: called with the key and the bytes of an entry that is about to give way, while it can still be found.

    Raises:
        ValueError: not one entry fits, or there is not so much memory.
    """

    def __init__(self, num_bytes: int, entry_bytes: int, pin_memory: bool = False) -> None:
        super().__init__()
        self.num_slots, self.entry_bytes = num_bytes // entry_bytes, entry_bytes
        available = psutil.virtual_memory().available
        if num_bytes > available:
            raise ValueError(
                f"{num_bytes / 2**30:.1f} GiB of host memory are wanted for KV blocks, and {available / 2**30:.1f} GiB are "
                f"available: lower kv_offloading_size"
            )
        if self.num_slots < 1:
            raise ValueError(
                f"{num_bytes} bytes of host memory hold no KV block of {entry_bytes} bytes: raise kv_offloading_size"
            )
        memory = torch.empty(self.num_slots, entry_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        self._memory = memory.zero_().numpy()
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(self.num_slots))
        self.spill: Callable[[bytes, memoryview], None] | None = None
        # `_lock` guards the books, and is held for one copy at most; `_writing` is held by the only one who may fill slots.
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
        found = [self._read(*pair) for pair in zip(reversed(keys), reversed(buffers), strict=True)]
        self._count_found(found)
        return found[::-1]

    def _read(self, key: bytes, buffer: memoryview) -> bool:
        target = self._as_entry(buffer)
        with self._lock:
            if key not in self._slots:
                return False
            self._slots.move_to_end(key)
            target[:] = self._memory[self._slots[key]]
        return True

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """See `KVStore.put`."""
        with self._writing:
            for key, buffer in zip(reversed(keys), reversed(buffers), strict=True):
                if self.contains([key]):
                    continue
                source, slot = self._as_entry(buffer), self._empty_slot()
                self._memory[slot] = source  # nobody else knows of this slot now
                with self._lock:
                    self._slots[key] = slot
                self._count(stored=1)

    def evict(self, keys: Sequence[bytes]) -> None:
        """Let entries give way now."""
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
        # The next store may take its time: meanwhile the entry can be read, here or there.
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
    """A small fast store before a large slow one. What falls out of the first goes to the second; what is found in the second
    comes back to the first, and stays below too: when it falls out again, there is nothing to write.

    Args:
        upper: the fast one.
        lower: the slow one; itself tiered, perhaps.
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
        self.upper.remove(keys)  # what is falling at this moment arrives below before this returns
        self.lower.remove(keys)

    def close(self) -> None:
        """Let go of both."""
        self.upper.close()
        self.lower.close()
