"""A request in the front end of a server: its text so far, and the outputs that its caller reads as
they come.

Built by notebooks/91_llama_server.ipynb: edit it there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from nanovllm.data.outputs import OutputCollector, RequestOutput
from nanovllm.data.request import EngineRequest
from nanovllm.engine.request_times import RequestTimes
from nanovllm.text.processor import RequestState
from nanovllm.text.tokenizer import Tokenizer


class RequestStream(RequestState):
    """A request and the stream of its outputs: `async for output in stream`, where each output has
    the new part only.

    A reader that leaves before the end has to call `close`. A slow reader finds one merged output,
    not a long queue.

    Args:
        on_close: called when the reader closes the stream.

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
