"""Decides which requests come in: how many may wait for the engine, or for the work that prepares
them for it, and how many of them may have the same API key."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from nanovllm.server.errors import APIError

if TYPE_CHECKING:
    from nanovllm.engine.async_engine import AsyncEngine
    from nanovllm.engine.request_stream import RequestStream

# Which API key the current request has: a digest; empty without keys.
current_key: ContextVar[bytes] = ContextVar("current_key", default=b"")


class Admission:
    """Counts the sequences on their way to the first token, and lets in more of them while at most
    `max_num_waiting` have to wait. API keys divide these places equally: requests with other keys
    cannot take them.

    Args:
        num_keys: how many API keys there are.
    """

    def __init__(self, engine: AsyncEngine, num_keys: int = 1) -> None:
        self.engine = engine
        self.num_keys = max(num_keys, 1)
        # By key: sequences that are prepared for the engine, and requests that it has.
        self._num_preparing: Counter[bytes] = Counter()
        self._waiting: defaultdict[bytes, list[RequestStream]] = defaultdict(list)

    def num_waiting_with(self, num_sequences: int) -> int:
        """How many sequences would wait if so many more came in."""
        num_preparing = self._num_preparing.total()
        if not self.engine.num_requests and not num_preparing:
            return 0
        stats = self.engine.stats
        waiting = stats.num_waiting + stats.num_swapped
        on_their_way = self.engine.client.num_in_flight + num_preparing
        config = self.engine.config
        places = config.max_num_seqs * config.data_parallel_size
        # While sequences wait, new ones have to wait behind them.
        free_places = 0 if waiting else places - stats.num_running
        return max(0, waiting + on_their_way + num_sequences - free_places)

    def num_waiting_of(self, key: bytes) -> int:
        """How many of a key's sequences have no token yet."""
        self._waiting[key] = [stream for stream in self._waiting[key] if stream.is_waiting]
        in_engine = sum(len(stream.completions) for stream in self._waiting[key])
        return in_engine + self._num_preparing[key]

    @contextmanager
    def place(self, num_sequences: int) -> Iterator[list[RequestStream]]:
        """Reserve places for so many sequences while they are prepared for the engine. The caller
        puts the requests into the list that it gets, as soon as the engine has them.

        Raises:
            APIError: too many sequences are already waiting (429); names the limit.
        """
        key = current_key.get()
        limit = self.engine.config.max_num_waiting
        would_wait = self.num_waiting_with(num_sequences)
        if self.num_keys == 1 and would_wait > limit:
            raise self._too_many("requests are already waiting")
        if self.num_keys > 1:
            share = min(limit, max(limit // self.num_keys, 1))
            if self.num_waiting_of(key) + num_sequences > share and would_wait:
                raise self._too_many(
                    f"requests with this API key are already waiting: at most {share}",
                    f", divided among {self.num_keys} keys",
                )
        streams: list[RequestStream] = []
        self._num_preparing[key] += num_sequences
        try:
            yield streams
        finally:
            self._num_preparing[key] -= num_sequences
            if self.num_keys > 1:
                self._waiting[key] += streams

    def _too_many(self, what: str, more: str = "") -> APIError:
        return APIError(
            429,
            f"too many {what} (--max-num-waiting {self.engine.config.max_num_waiting}{more})",
            code="rate_limit_exceeded",
            headers={"Retry-After": "1"},
        )
