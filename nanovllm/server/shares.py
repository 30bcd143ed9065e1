"""Waiting places: how many requests may wait, and how many of them may have the same API key; and
the chats that wait for the chat template."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from nanovllm.data.json import JsonObject
from nanovllm.server.errors import APIError

if TYPE_CHECKING:
    from nanovllm.engine.async_engine import AsyncEngine
    from nanovllm.engine.request_stream import RequestStream


def too_many(what: str, engine: AsyncEngine, more: str = "") -> APIError:
    """Return the error for a full queue."""
    return APIError(
        429,
        f"too many {what} (--max-num-waiting {engine.config.max_num_waiting}{more})",
        code="rate_limit_exceeded",
        headers={"Retry-After": "1"},
    )


class Share:
    """One API key's part of the waiting places, which requests with other keys cannot take; or all
    places, if there are no keys.

    Args:
        num_keys: how many keys share the places.
    """

    def __init__(self, num_keys: int = 1) -> None:
        self.num_keys = num_keys
        self.num_preparing = 0  # sequences that have a place and are not in the engine yet
        self._waiting: list[tuple[RequestStream, int]] = []

    @contextmanager
    def place(self, engine: AsyncEngine, num_sequences: int) -> Iterator[None]:
        """Reserve places for so many sequences while they are prepared for the engine.

        Raises:
            APIError: too many sequences are already waiting (429); names the limit.
        """
        if self.num_keys == 1:
            if not engine.has_room(num_sequences):
                raise too_many("requests are already waiting", engine)
        elif not engine.has_room(num_sequences, max_num_waiting=0):
            places = engine.config.max_num_waiting
            limit = min(places, max(places // self.num_keys, 1))
            waiting = sum(count for stream, count in self._waiting if stream.is_waiting)
            if waiting + self.num_preparing + num_sequences > limit:
                raise too_many(
                    f"requests with this API key are already waiting: at most {limit}",
                    engine,
                    f", divided among {self.num_keys} keys",
                )
        for counter in (engine, self):
            counter.num_preparing += num_sequences
        try:
            yield
        finally:
            for counter in (engine, self):
                counter.num_preparing -= num_sequences

    def add(self, stream: RequestStream, num_sequences: int) -> None:
        """Count a request as waiting until it has its first token."""
        if self.num_keys > 1:
            self._waiting = [entry for entry in self._waiting if entry[0].is_waiting] + [
                (stream, num_sequences)
            ]


# All places, and the share of the current request's key.
ALL_PLACES = Share()
current_share: ContextVar[Share] = ContextVar("current_share", default=ALL_PLACES)

# At most one thread at a time, so that chats wait for one another, and other requests do not wait
# for them.
RENDERING = CapacityLimiter(1)


async def render_chat(engine: AsyncEngine, arguments: JsonObject) -> str:
    """The text of a chat. A template is a program that may take seconds.

    Args:
        arguments: those of `Tokenizer.apply_chat_template`.

    Raises:
        APIError: too many chats are already waiting (429).
        ValueError: as `Tokenizer.apply_chat_template`.
    """
    chats = RENDERING.statistics()
    if chats.borrowed_tokens + chats.tasks_waiting > engine.config.max_num_waiting:
        # One is rendered, the rest wait.
        raise too_many("chats are already waiting for the chat template", engine)
    return await run_sync(
        partial(engine.tokenizer.apply_chat_template, **arguments), limiter=RENDERING
    )
