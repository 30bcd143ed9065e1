"""A response that is sent piece by piece, and whose source is closed in every case."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class ClosingStream(StreamingResponse):
    """A stream that calls `on_close` at its end, even if the client leaves before the first piece.

    Args:
        on_close: called once; awaited if it is asynchronous.
        **settings: those of `StreamingResponse`.
    """

    def __init__(self, pieces: AsyncIterable[bytes], on_close: Callable[[], Any], **settings: Any) -> None:
        super().__init__(pieces, **settings)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if (closing := self._on_close()) is not None:
                await closing
