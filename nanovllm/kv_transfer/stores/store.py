"""Keeps KV blocks outside of the KV pool, as bytes under a key.

A key is made of everything that determines the bytes (model, layout, tokens: see
`offloading.block_key`), so the same key always means the same bytes. Hence an entry is never
updated: if it is there, a second writer need not write it, and no reader can get a stale block.

Built by notebooks/32_kv_sharing.ipynb: edit it there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Memory = NDArray[np.uint8] | dict[int, memoryview]  # the bytes of each slot

# Stands for an entry where only its key matters.
BYTE = memoryview(b"\0")


class KVStore:
    """Keeps bytes under keys, up to a bound: the least recently used entries are evicted. Any
    thread may call it. This one keeps nothing.

    The keys of a call name blocks that follow one another, and a block is useless without those
    before it. So the first key counts as used last: the end of a chain is evicted before its
    beginning.

    Attributes:
        num_slots: for entries in host memory.
        stats: counts of entries, as seen from this process: `hits` and `misses` of those that were
            requested; `stored`; `evicted` to make room; found `damaged`, which are removed, and
            count as misses too; `failed` to be stored.
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
            Whether each was filled with its entry. If not, its content is undefined: the entry is
            not there, or was damaged and has been removed.
        """
        return [False] * len(keys)

    def evict(self, keys: Sequence[bytes]) -> None:
        """Evict entries from host memory now, if they are there."""

    def close(self) -> None:
        """Close files and connections. Entries that other processes share stay."""

    def _last_first(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[tuple[bytes, memoryview]]:
        """All entries, the first one last, so that it counts as used last."""
        return list(zip(keys, buffers, strict=True))[::-1]

    def _count_found(self, found: list[bool]) -> list[bool]:
        """Count what was found of `_last_first`; returns it in the order of the keys."""
        self.stats.hits += sum(found)
        self.stats.misses += len(found) - sum(found)
        return found[::-1]


class HostStore(KVStore):
    """Entries of one size in host memory: one allocation, divided into slots. A large slow store
    may be below this small fast one: entries that are evicted here go there. Entries that are found
    there come back, and stay below too: when they are evicted again, there is nothing to write.

    The constructor writes to all of the memory: the kernel allocates a page when it is first
    touched, which takes several times as long as the copy itself. A GPU can read pinned memory
    without a copy in between.

    Args:
        num_bytes: how much memory to take.
        entry_bytes: length of every entry.
        pinned: for a GPU to copy from and to.
        lower: the store below.

    Attributes:
        is_in_use: whether an entry must not be evicted now. If none may be, a new one is not
            stored.
        slots: the place of each entry by its key, the least recently used first.
        stats: of this store alone.
    """

    def __init__(
        self, num_bytes: int, entry_bytes: int, pinned: bool = False, lower: KVStore | None = None
    ) -> None:
        super().__init__()
        self.num_slots = num_bytes // entry_bytes
        self.lower = lower or KVStore()
        self._memory = self._allocate(entry_bytes, pinned)
        self.slots: OrderedDict[bytes, int] = OrderedDict()
        self._free: list[int] = []  # slots that were used before
        self.is_in_use: Callable[[bytes], bool] = lambda key: False
        # `_lock` guards `slots`, and is held for one copy at most; the thread that fills or
        # empties slots holds `_writing`.
        self._lock = threading.Lock()
        self._writing = threading.RLock()

    def _allocate(self, entry_bytes: int, pinned: bool) -> Memory:
        """Return the memory of all slots, one after another."""
        import torch  # takes seconds, and `HostKeys` does without

        size = (self.num_slots, entry_bytes)
        return torch.zeros(size, dtype=torch.uint8, pin_memory=pinned).numpy()

    def __contains__(self, key: bytes) -> bool:
        """Whether an entry is in this very store."""
        return key in self.slots

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
                self.slots.move_to_end(key)
        return len(there)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """See `KVStore.get`."""
        entries = self._last_first(keys, buffers)
        found = self._count_found([self._read(key, buffer) for key, buffer in entries])
        missing = [i for i, there in enumerate(found) if not there]
        below = self.lower.get([keys[i] for i in missing], [buffers[i] for i in missing])
        risen = [i for i, there in zip(missing, below, strict=True) if there]
        self.put([keys[i] for i in risen], [buffers[i] for i in risen])
        return [there or i in risen for i, there in enumerate(found)]

    def _read(self, key: bytes, buffer: memoryview) -> bool:
        import numpy as np

        with self._lock:
            if there := key in self:
                self.slots.move_to_end(key)
                np.frombuffer(buffer, np.uint8)[:] = self._memory[self.slots[key]]
        return there

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """Copy the bytes of these buffers into slots of `_memory`, in the order of `_last_first`.

        An entry that is there already only counts as used (`_touch`). If there is no free slot,
        `_make_room` evicts an entry; it returns False if there is still none, and then this entry
        is not stored; the next ones are tried nevertheless. Each new one counts in
        `stats.stored`.

        This thread holds `_writing` all the time, and `_lock` only to enter a key into `slots`.
        Another thread may read a slot as soon as its key is there, so the bytes are copied before.
        """
        with self._writing:
            for key, buffer in self._last_first(keys, buffers):
                if self._touch([key]) or not self._make_room():
                    continue
                slot = self._free.pop()
                # No other thread knows this slot yet.
                self._memory[slot] = buffer
                with self._lock:
                    self.slots[key] = slot
                self.stats.stored += 1

    def _make_room(self) -> bool:
        if not self._free and len(self.slots) < self.num_slots:
            self._free.append(len(self.slots))  # the first slot that was never used
        if not self._free:
            with self._lock:
                oldest = list(islice((key for key in self.slots if not self.is_in_use(key)), 1))
            self.evict(oldest)
        return bool(self._free)

    def evict(self, keys: Sequence[bytes]) -> None:
        """See `KVStore.evict`."""
        with self._writing:
            for key in filter(self.__contains__, keys):
                # The store below may be slow: until it has the entry, the entry can still be read
                # here.
                self.lower.put([key], [memoryview(self._memory[self.slots[key]])])
                with self._lock:
                    self._free.append(self.slots.pop(key))
                self.stats.evicted += 1

    def close(self) -> None:
        """Close the store below."""
        self.lower.close()


class HostKeys(HostStore):
    """The keys of a `HostStore`, in the same order, without the bytes. Its memory grows with the
    keys that it has had."""

    def __init__(self, num_slots: int, lower: KVStore | None = None) -> None:
        super().__init__(num_slots, 1, lower=lower)

    def _allocate(self, entry_bytes: int, pinned: bool) -> Memory:
        return {}
