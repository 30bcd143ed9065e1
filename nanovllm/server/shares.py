"""Waiting places: how many requests may wait, and how many of them may have the same API key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from nanovllm.server.errors import APIError

if TYPE_CHECKING:
    from nanovllm.engine.async_engine import AsyncEngine
    from nanovllm.engine.request_stream import RequestStream


class Share:
    """One API key's part of the waiting places, which requests with other keys cannot take.

    Args:
        num_keys: how many keys share the places.
    """

    def __init__(self, num_keys: int) -> None:
        self.num_keys = num_keys
        self.num_preparing = 0  # sequences that have a place and are not in the engine yet
        self._waiting: list[tuple[RequestStream, int]] = []

    def limit(self, engine: AsyncEngine) -> int:
        """Sequences of this key that may wait."""
        places = engine.config.max_num_waiting
        return min(places, max(places // self.num_keys, 1))

    def has_room(self, engine: AsyncEngine, num_sequences: int) -> bool:
        """Whether so many more sequences can run at once, or have room in this key's part."""
        if engine.has_room(num_sequences, max_num_waiting=0):
            return True
        waiting = sum(count for stream, count in self._waiting if stream.is_waiting)
        return waiting + self.num_preparing + num_sequences <= self.limit(engine)

    def add(self, stream: RequestStream, num_sequences: int) -> None:
        """Count a request as waiting until it has its first token."""
        self._waiting = [entry for entry in self._waiting if entry[0].is_waiting]
        self._waiting.append((stream, num_sequences))


# The share of the current request's key; None if the server has at most one key.
current_share: ContextVar[Share | None] = ContextVar("current_share", default=None)


def check_room(engine: AsyncEngine, num_sequences: int) -> None:
    """Refuse so many sequences if too many wait already.

    Raises:
        APIError: 429, names the limit.
    """
    share = current_share.get()
    if share is None and not engine.has_room(num_sequences):
        message = f"too many requests wait already (--max-num-waiting {engine.config.max_num_waiting})"
    elif share is not None and not share.has_room(engine, num_sequences):
        message = (
            f"too many requests with this API key wait already: {share.limit(engine)} may "
            f"(--max-num-waiting {engine.config.max_num_waiting}, divided among {share.num_keys} keys)"
        )
    else:
        return
    raise APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})


@contextmanager
def place(engine: AsyncEngine, num_sequences: int) -> Iterator[None]:
    """Reserve places for so many sequences while they are prepared for the engine.

    Raises:
        APIError: too many sequences wait already; see `check_room`.
    """
    check_room(engine, num_sequences)
    share = current_share.get()
    counters: list[Any] = [engine] if share is None else [engine, share]
    for counter in counters:
        counter.num_preparing += num_sequences
    try:
        yield
    finally:
        for counter in counters:
            counter.num_preparing -= num_sequences


def note_request(stream: RequestStream, num_sequences: int) -> None:
    """Count a queued request in the share of its API key."""
    if (share := current_share.get()) is not None:
        share.add(stream, num_sequences)
