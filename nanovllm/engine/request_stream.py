"""What a caller of the asynchronous engine reads: one request's answer as it comes, and when what happened to it.

Built by notebooks/91_llama_server.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from nanovllm.data.outputs import CompletionOutput, EngineStats, RequestOutput, join_pieces


class RequestRefusedError(ValueError):
    """The engine could not take a request that had passed the front end's checks."""


class RequestFailedError(RuntimeError):
    """A request has come to a bad end, and only this one; the message says why."""


@dataclass
class RequestTimes:
    """When what happened to a request, in seconds of the monotonic clock.

    Attributes:
        last_token: by completion index.
    """

    arrival: float
    num_prompt_tokens: int
    first_token: float | None = None
    last_token: dict[int, float] = field(default_factory=dict)


class EngineObserver:
    """Is told what happens in an engine. Does nothing; metrics override what they need."""

    def step(self, stats: EngineStats) -> None:
        """A step has ended."""

    def tokens(self, times: RequestTimes, piece: CompletionOutput, now: float) -> None:
        """A completion got tokens, or ended. `times` still shows the tokens before these."""

    def finished(self, times: RequestTimes, last: CompletionOutput, now: float) -> None:
        """A request has ended with all its completions, of which this piece was the last."""


class RequestStream:
    """A request's answer: `async for output in stream`, where each output has what is new since the one before.

    Whoever leaves before the end has to `close` it. A slow reader finds one merged piece, not a long queue.
    """

    def __init__(self, request_id: str, times: RequestTimes, on_close: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.times = times
        self._on_close = on_close
        self._pieces: dict[int, list[CompletionOutput]] = {}
        self._last: RequestOutput | None = None
        self._error: Exception | None = None
        self._ended = False
        self._news = asyncio.Event()

    @property
    def is_waiting(self) -> bool:
        """Whether it has not ended, and has no token yet."""
        return not self._ended and self.times.first_token is None

    def put(self, output: RequestOutput) -> None:
        """Add news."""
        for piece in output.outputs:
            self._pieces.setdefault(piece.index, []).append(piece)
        self._last = output
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End with an error, after what has come so far."""
        self._error = error
        self._news.set()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        await self._news.wait()
        if self._last is not None:
            outputs = [join_pieces(self._pieces[index]) for index in sorted(self._pieces)]
            output = dataclasses.replace(self._last, outputs=outputs)
            self._pieces, self._last = {}, None
            self._ended = output.finished
            if self._error is None:
                self._news.clear()
            return output
        self._ended = True
        assert self._error is not None
        raise self._error

    def close(self) -> None:
        """End the request within a step, if it has not ended; may be called more than once, and in a `finally`."""
        self._ended = True
        self._on_close(self.request_id)
