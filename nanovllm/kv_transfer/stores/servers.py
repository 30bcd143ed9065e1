"""Keeps KV blocks in servers that engines share: Redis, and Mooncake's store."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nanovllm.data.kv_transfer_config import KVTransferConfig
from nanovllm.kv_transfer.stores.sealed import HEADER_BYTES, Pair, SealedStore, seal, unpack

Method = Callable[..., list[int]]  # of Mooncake's store: keys and more -> a code per key

BUFFER_BYTES = 32 << 20  # passes at a time

# Mooncake's return codes which say that the master does not answer.
_NO_MASTER = range(-999, -899)
# In the order of the arguments of Mooncake's `setup`, except for the last two.
_DEFAULTS: dict[str, str | int | bool] = {
    "local_hostname": "127.0.0.1",
    "metadata_server": "P2PHANDSHAKE",
    "global_segment_size": 1 << 30,
    "local_buffer_size": 1 << 20,
    "protocol": "tcp",
    "device_name": "",
    "master_server_address": "127.0.0.1:50051",
    "listen_on_all_interfaces": False,
    "store": "mooncake",
}


class RedisStore(SealedStore):
    """Entries as values of a Redis server, or of any that speaks its protocol (Valkey, KeyDB,
    Dragonfly). It needs `pip install 'nanovllm[redis]'`.

    The server sets the bound: `maxmemory`, with `maxmemory-policy allkeys-lru`.

    Args:
        url: redis://[user:password@]host:port/db, or rediss:// or unix://.
        namespace: prefix of all keys; the server may have other users.
        timeout: longest wait for an answer, in seconds.

    Raises:
        ValueError: the package is missing, or the URL makes no sense.
    """

    def __init__(self, url: str, namespace: str = "nanovllm:", timeout: float = 0.5) -> None:
        super().__init__()
        try:
            import redis
        except ImportError as error:
            raise ValueError(
                "the pool 'redis' needs a package: pip install 'nanovllm[redis]'"
            ) from error
        self.errors = (redis.RedisError,)
        self.refusals = (redis.ResponseError,)
        # No `retry`, so there is none: a block is not worth a second try.
        self._client: Any = redis.Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout
        )
        options = self._client.get_connection_kwargs()
        # Without the password.
        address = options.get("path") or f"{options.get('host')}:{options.get('port')}"
        self.place = f"the Redis server at {address}"
        self._namespace = namespace.encode()
        memory = self._ask(self._client.info, "memory")
        if memory and not (
            memory.get("maxmemory") and str(memory.get("maxmemory_policy")).startswith("allkeys")
        ):
            self._complain(
                f"{self.place} cannot make room: give it --maxmemory and --maxmemory-policy "
                "allkeys-lru"
            )

    def _find(self, keys: Sequence[bytes]) -> list[object]:
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.touch(self._namespace + key)  # counts as a use, unlike EXISTS
            found: list[object] = pipeline.execute()
            return found

    def _send(self, pairs: Sequence[Pair]) -> int:
        self._client.mset(
            {self._namespace + key: b"".join((seal(key, buffer), buffer)) for key, buffer in pairs}
        )
        return len(pairs)

    def _fetch(self, pairs: Sequence[Pair]) -> list[bytes | None]:
        values = self._client.mget([self._namespace + key for key, _ in pairs])
        return [
            value and unpack(memoryview(value), buffer)
            for value, (_, buffer) in zip(values, pairs, strict=True)
        ]

    def _delete(self, keys: Sequence[bytes]) -> None:
        self._client.delete(*[self._namespace + key for key in keys])

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class MooncakeStore(SealedStore):
    """Entries of one size in Mooncake's store, which spans the memory of many machines. It needs
    `pip install 'nanovllm[mooncake]'`, and Debian's libibverbs1.

    Every engine brings a segment of memory; a master, which holds no entry itself, knows where each
    entry is. Start it with `mooncake_master --rpc_address=127.0.0.1 --metrics_host=127.0.0.1`:
    without these options it listens on all interfaces.

    The sum of all segments is the bound; the master evicts what was not used lately. The entries in
    a machine's segment are lost with its process.

    Args:
        entry_bytes: length of every entry.
        kv_transfer: has settings under the names of Mooncake's own configuration file:
            master_server_address, metadata_server, local_hostname, protocol ("tcp" or "rdma"),
            device_name, global_segment_size and local_buffer_size in bytes. And
            listen_on_all_interfaces, which must be true: Mooncake's client listens on every
            interface, and requires no secret.
        only_to_look: bring no segment.

    Raises:
        ValueError: a setting that makes no sense, a missing package, or no master.
    """

    def __init__(
        self, entry_bytes: int, kv_transfer: KVTransferConfig, only_to_look: bool = False
    ) -> None:
        super().__init__()
        settings = kv_transfer.extras(**_DEFAULTS)
        if not settings["listen_on_all_interfaces"]:
            raise ValueError(
                "Mooncake's client listens on all interfaces, and any program that reaches it can "
                "read and write the stored KV: make sure that only your machines can, then set"
                ' "listen_on_all_interfaces": true'
            )
        if only_to_look:
            settings["global_segment_size"] = 0
        self.place = f"Mooncake's master at {settings['master_server_address']}"
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("MC_STORE_CLIENT_METRIC", "0")
        os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", "500")
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            mistake = "the pool 'mooncake' needs a package, pip install 'nanovllm[mooncake]'"
            raise ValueError(f"{mistake}, and the system's libibverbs1: {error}") from error
        self._store: Any = MooncakeDistributedStore()
        if (code := self._store.setup(*list(settings.values())[:-2])) != 0:
            raise ValueError(
                f"{self.place} cannot be used (error {code}): start it with mooncake_master "
                "--rpc_address=127.0.0.1 --metrics_host=127.0.0.1, or name another "
                "master_server_address"
            )
        # Mooncake reads and writes memory that was registered with it; there, each entry follows
        # its header.
        slot_bytes = HEADER_BYTES + entry_bytes
        self.batch = max(1, BUFFER_BYTES // slot_bytes)
        self._slots = np.zeros((self.batch, slot_bytes), np.uint8)
        self._store.register_buffer(self._slots.ctypes.data, self._slots.nbytes)
        self._lock = threading.Lock()  # of the slots

    def _find(self, keys: Sequence[bytes]) -> list[bool]:
        # A look-up counts as a use.
        return [code == 1 for code in self._call(self._store.batch_is_exist, keys)]

    def _send(self, pairs: Sequence[Pair]) -> int:
        with self._lock:
            for slot, (key, buffer) in zip(self._slots, pairs, strict=False):
                slot[:HEADER_BYTES] = np.frombuffer(seal(key, buffer), np.uint8)
                slot[HEADER_BYTES:] = np.frombuffer(buffer, np.uint8)
            return self._transfer(self._store.batch_put_from, [key for key, _ in pairs]).count(0)

    def _fetch(self, pairs: Sequence[Pair]) -> list[bytes | None]:
        with self._lock:
            codes = self._transfer(self._store.batch_get_into, [key for key, _ in pairs])
            found = zip(codes, self._slots, pairs, strict=False)
            return [
                unpack(slot.data[:code], buffer) if code >= 0 else None
                for code, slot, (_, buffer) in found
            ]

    def _delete(self, keys: Sequence[bytes]) -> None:
        self._call(self._store.batch_remove, keys, True)

    def close(self) -> None:
        """Leave the store, together with this engine's segment."""
        self._store.close()

    def _transfer(self, method: Method, keys: Sequence[bytes]) -> list[int]:
        """Move the first slots from or to the store; returns a code per key, negative for an
        error."""
        slots = self._slots[: len(keys)]
        return self._call(
            method, keys, [slot.ctypes.data for slot in slots], [slot.nbytes for slot in slots]
        )

    @staticmethod
    def _call(method: Method, keys: Sequence[bytes], *arguments: object) -> list[int]:
        codes: list[int] = method([key.hex() for key in keys], *arguments)
        if any(code in _NO_MASTER for code in codes):
            raise ConnectionError("it does not answer")
        return codes
