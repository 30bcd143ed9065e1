"""A pool in a Redis server, or in any that speaks its protocol (Valkey, KeyDB, Dragonfly). `pip install 'nanovllm[redis]'`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from nanovllm.kv_transfer.stores.store import HEADER_BYTES, KVStore, Patience, is_intact, seal

# Values that one round trip carries: few enough that neither side has to hold many copies.
BATCH = 16

Item = TypeVar("Item")


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[i : i + BATCH] for i in range(0, len(items), BATCH))


class RedisStore(KVStore):
    """Entries as values, behind the same header as in a folder.

    The bound is the server's: `maxmemory`, with `maxmemory-policy allkeys-lru`. A server that is gone holds nothing; as soon as
    it answers again, it is used again.

    Args:
        url: redis://[user:password@]host:port/db, or rediss:// or unix://.
        namespace: what keys begin with; a server may have other users.
        timeout: longest wait for an answer, in seconds.

    Raises:
        ValueError: the package is missing, or the URL makes no sense.
    """

    def __init__(self, url: str, namespace: str = "nanovllm:", timeout: float = 0.5) -> None:
        super().__init__()
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ValueError("the pool 'redis' needs a package: pip install 'nanovllm[redis]'") from error
        self._errors, self._refusal = redis.RedisError, redis.ResponseError
        self._client: Any = redis.Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),  # a block is not worth a second try
        )
        options = self._client.get_connection_kwargs()
        self.server = options.get("path") or f"{options.get('host')}:{options.get('port')}"  # no password
        self._namespace = namespace.encode()
        self._patience = Patience()  # while it lasts, everything is a miss, which costs no time
        self._ask(None, self._check_bound)

    def _check_bound(self) -> None:
        memory = self._client.info("memory")
        if not memory.get("maxmemory") or not str(memory.get("maxmemory_policy")).startswith("allkeys"):
            self._complain(
                f"the Redis server at {self.server} will not make room for new KV blocks: give it "
                f"--maxmemory and --maxmemory-policy allkeys-lru"
            )

    def contains(self, keys: Sequence[bytes]) -> int:
        """See `KVStore.contains`."""
        there = (self._there(self._names(keys)[::-1]) or [0])[::-1]
        return next((i for i, found in enumerate(there) if not found), len(there))

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """See `KVStore.put`."""
        for batch in _batches(list(zip(keys, buffers, strict=True))[::-1]):
            names = self._names([key for key, _ in batch])
            there = self._there(names)
            commands = [
                ("SET", name, b"".join((seal(key, buffer), buffer)))
                for name, (key, buffer), found in zip(names, batch, there or [], strict=False)
                if not found
            ]
            if self._ask(None, self._pipeline, commands) is None or there is None:
                self._count(failed=len(batch))
            else:
                self._count(stored=len(commands))

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """See `KVStore.get`."""
        found: list[bool] = []
        for batch in _batches(list(zip(keys, buffers, strict=True))[::-1]):
            values = self._ask([None] * len(batch), self._client.mget, self._names([key for key, _ in batch]))
            found += [self._take(value, *pair) for value, pair in zip(values, batch, strict=True)]
        self._count_found(found)
        return found[::-1]

    def _take(self, value: bytes | None, key: bytes, buffer: memoryview) -> bool:
        if value is None:
            return False
        header, payload = value[:HEADER_BYTES], memoryview(value)[HEADER_BYTES:]
        if len(payload) == len(buffer) and is_intact(header, key, payload):
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(payload, np.uint8))
            return True
        self._count(damaged=1)
        self._complain(f"the KV block {key.hex()} of the Redis server at {self.server} is damaged, and removed")
        self.remove([key])
        return False

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `KVStore.remove`."""
        if keys:
            self._ask(None, self._client.delete, *self._names(keys))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _names(self, keys: Iterable[bytes]) -> list[bytes]:
        return [self._namespace + key for key in keys]

    def _there(self, names: list[bytes]) -> list[int] | None:
        """Which of them are there; that counts as a use (unlike EXISTS). None: the server does not say."""
        return self._ask(None, self._pipeline, [("TOUCH", name) for name in names])

    def _pipeline(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """The answers to several commands that are sent at once."""
        with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return pipeline.execute()

    def _ask(self, otherwise: Any, question: Callable[..., Any], *arguments: Any) -> Any:
        """The server's answer; `otherwise` if it gives none, or was gone a moment ago."""
        if not self._patience.is_over:
            return otherwise
        try:
            answer = question(*arguments)
            self._patience.tried(answered=True)
            return answer
        except self._errors as error:
            self._patience.tried(answered=isinstance(error, self._refusal))
            self._complain(f"the Redis server at {self.server} keeps no KV blocks: {error}")
            return otherwise
