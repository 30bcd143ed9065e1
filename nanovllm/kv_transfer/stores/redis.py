"""Keeps KV blocks in a Redis server, or in any that speaks its protocol (Valkey, KeyDB, Dragonfly).

It needs `pip install 'nanovllm[redis]'`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanovllm.kv_transfer.stores.store import Pair, SealedStore, seal, unpack


class RedisStore(SealedStore):
    """Entries as values. The server sets the bound: `maxmemory`, with `maxmemory-policy allkeys-lru`.

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
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ValueError("the pool 'redis' needs a package: pip install 'nanovllm[redis]'") from error
        self.errors, self.refusals = (redis.RedisError,), (redis.ResponseError,)
        retry = Retry(NoBackoff(), 0)  # a block is not worth a second try
        self._client: Any = redis.Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=retry
        )
        options = self._client.get_connection_kwargs()
        address = options.get("path") or f"{options.get('host')}:{options.get('port')}"  # without the password
        self.place = f"the Redis server at {address}"
        self._namespace = namespace.encode()
        memory = self._ask(lambda section: self._client.info(section), "memory")
        if memory and not (memory.get("maxmemory") and str(memory.get("maxmemory_policy")).startswith("allkeys")):
            self._complain(
                f"{self.place} will not make room for new KV blocks: give it --maxmemory and "
                f"--maxmemory-policy allkeys-lru"
            )

    def _find(self, keys: Sequence[bytes]) -> list[Any]:
        return self._pipeline([("TOUCH", name) for name in self._names(keys)])  # counts as a use, unlike EXISTS

    def _send(self, pairs: Sequence[Pair]) -> int:
        entries = ((self._namespace + key, b"".join((seal(key, buffer), buffer))) for key, buffer in pairs)
        return len(self._pipeline([("SET", *entry) for entry in entries]))

    def _fetch(self, pairs: Sequence[Pair]) -> list[bytes | None]:
        values = self._client.mget(self._names([key for key, _ in pairs]))
        return [value and unpack(memoryview(value), buffer) for value, (_, buffer) in zip(values, pairs, strict=True)]

    def _delete(self, keys: Sequence[bytes]) -> None:
        self._client.delete(*self._names(keys))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [self._namespace + key for key in keys]

    def _pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers to several commands that are sent together."""
        with self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return pipeline.execute()
