"""Renders the chats of all requests one after another, so that a slow template delays only other chats."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from nanovllm.server.errors import APIError

if TYPE_CHECKING:
    from nanovllm.engine.async_engine import AsyncEngine


class ChatRenderer:
    """A queue of chats, and the thread that waits for the process that renders them."""

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
        limit = engine.config.max_num_waiting
        if self._num_chats > limit:  # one chat is being rendered, the rest wait
            message = f"too many chats wait for the chat template already (--max-num-waiting {limit})"
            raise APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})
        self._num_chats += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, lambda: engine.tokenizer.apply_chat_template(**arguments))
        finally:
            self._num_chats -= 1


RENDERER = ChatRenderer()
