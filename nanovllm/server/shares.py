"""Waiting places: how many requests may wait, and how many of them may have the same API key; and the chats that wait for the chat
template."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from nanovllm.server.errors import APIError

if TYPE_CHECKING:
    from nanovllm.engine.async_engine import AsyncEngine
    from nanovllm.engine.request_stream import RequestStream


def too_many(what: str, engine: AsyncEngine, more: str = "") -> APIError:
    """The refusal of what does not find a waiting place."""
    message = f"too many {what} (--max-num-waiting {engine.config.max_num_waiting}{more})"
    return APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})


class Share:
    """One API key's part of the waiting places, which requests with other keys cannot take; or all places, if there are no keys.

    Args:
        num_keys: how many keys share the places.
    """

    def __init__(self, num_keys: int = 1) -> None:
        self.num_keys = num_keys
        self.num_preparing = 0  # sequences that have a place and are not in the engine yet
        self._waiting: list[tuple[RequestStream, int]] = []

    def check_room(self, engine: AsyncEngine, num_sequences: int) -> None:
        """Refuse so many sequences if too many wait already.

        Raises:
            APIError: 429, names the limit.
        """
        if self.num_keys == 1:
            if not engine.has_room(num_sequences):
                raise too_many("requests wait already", engine)
        elif not engine.has_room(num_sequences, max_num_waiting=0):
            places = engine.config.max_num_waiting
            limit = min(places, max(places // self.num_keys, 1))
            waiting = sum(count for stream, count in self._waiting if stream.is_waiting)
            if waiting + self.num_preparing + num_sequences > limit:
                what = f"requests with this API key wait already: {limit} may"
                raise too_many(what, engine, f", divided among {self.num_keys} keys")

    @contextmanager
    def place(self, engine: AsyncEngine, num_sequences: int) -> Iterator[None]:
        """Reserve places for so many sequences while they are prepared for the engine.

        Raises:
            APIError: too many sequences wait already; see `check_room`.
        """
        self.check_room(engine, num_sequences)
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
            self._waiting = [entry for entry in self._waiting if entry[0].is_waiting]
            self._waiting.append((stream, num_sequences))


# All places, and the share of the current request's key.
ALL_PLACES = Share()
current_share: ContextVar[Share] = ContextVar("current_share", default=ALL_PLACES)


class ChatRenderer:
    """Renders the chats of all requests one after another, so that a slow template delays only other chats."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "nanovllm-render")
        self._num_chats = 0

    async def render(self, engine: AsyncEngine, arguments: dict[str, Any]) -> str:
        """The text of a chat.

        Args:
            arguments: those of `Tokenizer.apply_chat_template`.

        Raises:
            APIError: too many chats wait already (429).
            ValueError: as `Tokenizer.apply_chat_template`.
        """
        if self._num_chats > engine.config.max_num_waiting:  # one chat is being rendered, the rest wait
            raise too_many("chats wait for the chat template already", engine)
        self._num_chats += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, lambda: engine.tokenizer.apply_chat_template(**arguments))
        finally:
            self._num_chats -= 1


RENDERER = ChatRenderer()
