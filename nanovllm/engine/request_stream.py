"""A request in the front end of a server: its text so far, the outputs that its caller reads as
they come, and the times of its events.

Built by notebooks/91_llama_server.ipynb: edit it there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from nanovllm.data.outputs import CompletionOutput, OutputCollector, RequestOutput
from nanovllm.data.request import EngineRequest
from nanovllm.text.processor import RequestState
from nanovllm.text.tokenizer import Tokenizer


@dataclass
class RequestTimes:
    """The times of a request's events, in seconds of the monotonic clock.

    Attributes:
        arrival: when it came to the front end, which had not yet tokenized its prompt.
        scheduled: when the engine first computed a part of the prompt.
        last_token, num_tokens: of each completion, by its index.
    """

    arrival: float
    num_prompt_tokens: int
    scheduled: float | None = None
    first_token: float | None = None
    last_token: dict[int, float] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)


class EngineObserver:
    """Its methods are called when something happens in an engine. They do nothing; metrics override
    them."""

    def tokens(self, times: RequestTimes, piece: CompletionOutput, now: float) -> None:
        """Called when a completion gets tokens or ends. `times` still shows the tokens before
        these."""

    def finished(self, times: RequestTimes, last: CompletionOutput, now: float) -> None:
        """Called when a request has ended with all its completions; `last` is the last piece."""


class RequestStream(RequestState):
    """A request and the stream of its outputs: `async for output in stream`, where each output has
    the new part only.

    A reader that leaves before the end has to call `close`. A slow reader finds one merged output,
    not a long queue.

    Args:
        on_close: called when the reader wants no more.

    Attributes:
        times: of the request's events; set by `AsyncEngine.add_request`, which knows when the
            request arrived.
    """

    times: RequestTimes

    def __init__(
        self,
        request_id: str,
        text: str | None,
        requests: list[EngineRequest],
        tokenizer: Tokenizer,
        on_close: Callable[[RequestStream], None],
    ) -> None:
        super().__init__(request_id, text, requests, tokenizer)
        self._on_close = on_close
        self._unread: OutputCollector | None = None
        self._error: Exception | None = None
        self._ended = False
        self._arrival = asyncio.Event()

    @property
    def is_waiting(self) -> bool:
        """Whether it has not ended, and has no token yet."""
        return not self._ended and self.times.first_token is None

    def put(self, output: RequestOutput) -> None:
        """Add an output, which may be an error."""
        if output.error:
            self.fail(output.error)
            return
        self._unread = self._unread or OutputCollector()
        self._unread.add(output)
        self._arrival.set()

    def fail(self, error: Exception) -> None:
        """End with an error, after the outputs so far."""
        self._error = error
        self._arrival.set()

    def note_times(self, output: RequestOutput, now: float, observer: EngineObserver) -> None:
        """Note when an output came, and tell the observer."""
        times = self.times
        for piece in output.outputs:
            observer.tokens(times, piece, now)
            if piece.token_ids:
                times.first_token = times.first_token or now
                times.last_token[piece.index] = now
                times.num_tokens[piece.index] = times.num_tokens.get(piece.index, 0) + len(
                    piece.token_ids
                )
        if output.finished:
            observer.finished(times, output.outputs[-1], now)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        """Wait for an output, and return all outputs that were not read yet, as one
        (`OutputCollector.result`); they are read now.

        The stream has ended (`_ended`) with an output that is `finished`, after an error was
        raised, or when it was closed; then this raises StopAsyncIteration, without waiting. An
        error (`fail`) is raised by the call after the one that returns the last outputs. So
        `_arrival` stays set while an output or an error is left, and is cleared when neither is."""
        if self._ended:
            raise StopAsyncIteration
        await self._arrival.wait()
        if self._unread is not None:
            output = self._unread.result()
            self._unread = None
            self._ended = output.finished
            if self._error is None:
                self._arrival.clear()
            return output
        self._ended = True
        assert self._error is not None
        raise self._error

    def close(self) -> None:
        """End the request within a step, if it has not ended. May be called more than once."""
        self._ended = True
        self._on_close(self)
