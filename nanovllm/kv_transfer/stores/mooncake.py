"""A pool in the memory of many machines: Mooncake's store. `pip install 'nanovllm[mooncake]'`, and Debian's libibverbs1.

Every engine brings a segment of memory; a master, which holds no entry itself, knows what is where. Start it with
`mooncake_master --rpc_address=127.0.0.1 --metrics_host=127.0.0.1`: it listens on all interfaces unless it is told otherwise.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanovllm.kv_transfer.stores.store import HEADER_BYTES, KVStore, Patience, is_intact, seal

BUFFER_BYTES = 32 << 20  # what passes at a time

# Mooncake's answers that are not about an entry but about the master: it does not answer.
_NO_MASTER = range(-999, -899)


class MooncakeStore(KVStore):
    """Entries of one size in Mooncake's store, behind the same header as in a folder.

    The bound is the sum of all segments; the master makes room by itself, for what was not used lately. What a machine's segment
    holds goes with its process.

    Args:
        entry_bytes: length of every entry.
        settings: under the names of Mooncake's own configuration file: master_server_address, metadata_server, local_hostname,
            protocol ("tcp" or "rdma"), device_name, global_segment_size in bytes. And listen_on_all_interfaces, which has to be
            true: Mooncake's client answers on every interface, and asks nobody for a secret.

    Raises:
        ValueError: a setting that makes no sense, a missing package, or no master.
    """

    def __init__(self, entry_bytes: int, settings: dict[str, Any]) -> None:
        super().__init__()
        defaults: dict[str, Any] = {
            "master_server_address": "127.0.0.1:50051",
            "metadata_server": "P2PHANDSHAKE",
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 1 << 30,
            "listen_on_all_interfaces": False,
        }
        for name, value in settings.items():
            if type(value) is not type(defaults.get(name)):
                known = ", ".join(f"{n} ({type(v).__name__})" for n, v in defaults.items())
                raise ValueError(f"the pool 'mooncake' has the settings {known}; got {name}: {value!r}")
        settings = defaults | settings
        if not settings["listen_on_all_interfaces"]:
            raise ValueError(
                "Mooncake's client listens on all interfaces, and whoever reaches it may read and write what it keeps: see "
                'that only your machines can, then say "listen_on_all_interfaces": true'
            )
        self._store = self._connect(settings)
        self.master = settings["master_server_address"]
        # Mooncake reads and writes memory that was registered with it; there, each entry follows its header.
        self._entry_bytes, slot_bytes = entry_bytes, HEADER_BYTES + entry_bytes
        self._slots = np.zeros((max(1, BUFFER_BYTES // slot_bytes), slot_bytes), np.uint8)
        self._addresses = [self._slots.ctypes.data + i * slot_bytes for i in range(len(self._slots))]
        self._store.register_buffer(self._slots.ctypes.data, self._slots.nbytes)
        self._lock = threading.Lock()  # of the slots
        self._patience = Patience()

    @staticmethod
    def _connect(settings: dict[str, Any]) -> Any:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("MC_STORE_CLIENT_METRIC", "0")
        os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", "500")
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ValueError(
                f"the pool 'mooncake' needs a package, pip install 'nanovllm[mooncake]', and the system's libibverbs1: {error}"
            ) from error
        store = MooncakeDistributedStore()
        code = store.setup(
            settings["local_hostname"],
            settings["metadata_server"],
            settings["global_segment_size"],
            1 << 20,  # of Mooncake's own, which this class does not use
            settings["protocol"],
            settings["device_name"],
            settings["master_server_address"],
        )
        if code != 0:
            raise ValueError(
                f"Mooncake's master at {settings['master_server_address']} cannot be used (error {code}): start it with "
                f"mooncake_master --rpc_address=127.0.0.1 --metrics_host=127.0.0.1, or name another master_server_address"
            )
        return store

    def contains(self, keys: Sequence[bytes]) -> int:
        """See `KVStore.contains`."""
        there = self._there(keys)
        return next((i for i, code in enumerate(there) if code != 1), len(there))

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """See `KVStore.put`."""
        there = self._there(keys)
        pairs = [(k, b) for k, b, code in zip(keys, buffers, there, strict=True) if code != 1][::-1]
        for start in range(0, len(pairs), len(self._slots)):
            batch = pairs[start : start + len(self._slots)]
            if not self._patience.is_over:
                self._count(failed=len(batch))
                continue
            with self._lock:
                for slot, (key, buffer) in zip(self._slots, batch, strict=False):
                    slot[:HEADER_BYTES] = np.frombuffer(seal(key, buffer), np.uint8)
                    slot[HEADER_BYTES:] = np.frombuffer(buffer, np.uint8)
                codes = self._heed(self._transfer(self._store.batch_put_from, [key for key, _ in batch]))
            done = sum(code == 0 for code in codes)
            self._count(stored=done, failed=len(batch) - done)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """See `KVStore.get`."""
        found: list[bool] = []
        pairs = list(zip(keys, buffers, strict=True))[::-1]
        for start in range(0, len(pairs), len(self._slots)):
            batch = pairs[start : start + len(self._slots)]
            if not self._patience.is_over:
                found += [False] * len(batch)
                continue
            with self._lock:
                codes = self._heed(self._transfer(self._store.batch_get_into, [key for key, _ in batch]))
                for code, slot, pair in zip(codes, self._slots, batch, strict=False):
                    found.append(self._take(code, slot, *pair))
        self._count_found(found)
        return found[::-1]

    def _there(self, keys: Sequence[bytes]) -> list[int]:
        """1 for those that are there, which counts as a use."""
        if not keys or not self._patience.is_over:
            return [0] * len(keys)
        return self._heed(self._store.batch_is_exist([key.hex() for key in keys]))

    def _transfer(self, method: Any, keys: list[bytes]) -> list[int]:
        count = len(keys)
        return method([key.hex() for key in keys], self._addresses[:count], [self._slots.shape[1]] * count)

    def _take(self, code: int, slot: np.ndarray, key: bytes, buffer: memoryview) -> bool:
        if code < 0:
            return False
        if code == slot.nbytes and is_intact(slot[:HEADER_BYTES].tobytes(), key, slot[HEADER_BYTES:].data):
            np.copyto(np.frombuffer(buffer, np.uint8), slot[HEADER_BYTES:])
            return True
        self._count(damaged=1)
        self._complain(f"the KV block {key.hex()} of Mooncake's store is damaged, and removed")
        self.remove([key])
        return False

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `KVStore.remove`."""
        if keys and self._patience.is_over:
            self._heed(self._store.batch_remove([key.hex() for key in keys], True))

    def close(self) -> None:
        """Leave the store, and take this engine's segment along."""
        self._store.close()

    def _heed(self, codes: list[int]) -> list[int]:
        """Leave a master that does not answer alone for a while."""
        is_gone = any(code in _NO_MASTER for code in codes)
        self._patience.tried(answered=not is_gone)
        if is_gone:
            self._complain(f"Mooncake's master at {self.master} does not answer: no KV blocks from there")
        return codes
