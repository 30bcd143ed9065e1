"""An engine's process as the front end of a server knows it: whether it lives, its reports, and the
readers of its trace."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Literal

from nanovllm.assembly.front_end import create_broadcasts, create_texts
from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import EngineStats, RequestOutput
from nanovllm.data.parts import MissingPartError
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.distributed.activity import LOOK_SECONDS
from nanovllm.engine.process import Command, Report
from nanovllm.engine.request_stream import EngineDeadError, EngineObserver, EngineStartError
from nanovllm.text.processor import OutputProcessor
from nanovllm.text.prompts import EngineLimits
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.engine.client import EngineClient
    from nanovllm.engine.request_stream import RequestStream, RequestTimes
    from nanovllm.trace.stream import RequestTexts, StepBroadcast, StepStream


class FrontEnd:
    """An engine's process, without its callers' requests: the base of `AsyncEngine`.

    Attributes:
        name: of the model, for clients.
        limits: the longest request, the vocabulary, and what else a request has to fit.
        client: the engine's process, for its number and what it reports.
        error: why the engine ended; None while it lives.
        died: set when it has ended without an order to end.
        num_preparing: sequences that have been accepted, and are still prepared for the engine.
        observer: is told about steps, tokens and finished requests.
        trace_settings: for each of the engines that data parallelism has, sizes and policies; known
            when they are ready.
        broadcasts: for each of them, the readers of its trace.
    """

    tokenizer: Tokenizer
    limits: EngineLimits
    output_processor: OutputProcessor

    def __init__(self, config: EngineConfig, client: EngineClient) -> None:
        self.config = config
        self.observer = EngineObserver()
        self.died = asyncio.Event()
        self.error: str | None = None
        self.trace_settings: list[TraceSettings] = []
        self.broadcasts: list[StepBroadcast] = []
        self._streams: dict[str, RequestStream] = {}
        self._why_unwatched = ""
        self._texts: RequestTexts | None = None
        self.num_preparing = 0
        self._closing = False
        self._reader: asyncio.Task[None] | None = None
        self.name = config.model_names[0]
        self.client = client
        self._arrival = asyncio.Event()  # of a report
        asyncio.get_running_loop().add_reader(self.client.reports.fileno(), self._arrival.set)

    # ---------------------------------------------------------------- state

    @property
    def stats(self) -> EngineStats:
        """The statistics after the engine's latest step."""
        return self.client.stats

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine cannot take requests."""
        if self.error is not None or self._closing:
            raise EngineDeadError(self.error or "the engine is shutting down")

    def has_room(self, num_sequences: int, max_num_waiting: int | None = None) -> bool:
        """Whether at most `max_num_waiting` sequences (default: the setting) would wait if so many
        more came in."""
        limit = self.config.max_num_waiting if max_num_waiting is None else max_num_waiting
        if not self._streams and not self.num_preparing:
            return True
        on_their_way = self.client.num_in_flight + self.num_preparing
        waiting = self.stats.num_waiting + self.stats.num_swapped
        # While sequences wait, new ones have to wait behind them.
        places = self.config.max_num_seqs * self.config.data_parallel_size
        free_places = 0 if waiting else places - self.stats.num_running
        return waiting + on_their_way + num_sequences - free_places <= limit

    def release_kv(self, sequence_id: str) -> None:
        """Free the KV that is held for a finished sequence (`remote_request_id`), unless a decode
        server is reading it."""
        if self.output_processor.owner(sequence_id) is None:
            self.client.send(Command(abort={sequence_id: "abort"}))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; later requests find none."""
        self.client.send(Command(order="reset_prefix_cache"))

    # ---------------------------------------------------------------- reports

    async def _next_reports(self) -> list[Report]:
        """Wait for the engine's next reports.

        Raises:
            EngineStartError: it refuses the settings.
            EngineDeadError: it has ended, or hangs.
        """
        while True:
            self._arrival.clear()
            reason = self.client.poll()
            if reports := self.client.take_reports():
                return reports
            if reason:
                last = self.client.last_words
                is_users = last is not None and last.user_error
                raise EngineStartError(reason) if is_users else EngineDeadError(reason)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._arrival.wait()

    def _stop_listening(self) -> None:
        asyncio.get_running_loop().remove_reader(self.client.reports.fileno())

    def _note_schedule(self, report: Report) -> None:
        for sequence_id, time in report.first_scheduled.items():
            stream = self._streams.get(self.output_processor.owner(sequence_id) or "")
            if stream is not None and stream.times.scheduled is None:
                stream.times.scheduled = time

    def _note_times(self, times: RequestTimes, output: RequestOutput, now: float) -> None:
        for piece in output.outputs:
            self.observer.tokens(times, piece, now)
            if piece.token_ids:
                times.first_token = times.first_token or now
                times.last_token[piece.index] = now
                times.num_tokens[piece.index] = times.num_tokens.get(piece.index, 0) + len(
                    piece.token_ids
                )
        if output.finished:
            self.observer.finished(times, output.outputs[-1], now)

    # ---------------------------------------------------------------- the trace

    def _show_trace(self, settings: list[TraceSettings], show_text: bool) -> None:
        """Open a broadcast of each engine's steps, if that part is there."""
        self.trace_settings = settings
        if show_text:
            self._texts = create_texts(self.tokenizer)
        shown = TraceSettings(model=self.name, live=True)
        try:
            self.broadcasts = create_broadcasts(
                [each | shown for each in settings], self._order, self._texts
            )
        except MissingPartError as error:
            self._why_unwatched = str(error)

    def watch(self, engine: int = 0) -> StepStream:
        """Stream the lines of the trace of one engine, in whole, as they come. The engine records
        its steps only while it has such readers. The reader closes the stream, unless the stream
        has ended, as it does with the engine.

        Raises:
            ValueError: there is no such engine; names the engines. Or nothing can be watched.
        """
        if self._why_unwatched:
            raise ValueError(self._why_unwatched)
        if engine not in range(count := len(self.broadcasts)):
            fitting = f"from 0 to {count - 1}" if count > 1 else "0, the only one"
            raise ValueError(f"engine must be {fitting}, not {engine}")
        return self.broadcasts[engine].watch()

    def _order(self, engine: int, order: Literal["watch", "unwatch"]) -> None:
        self.client.send(Command(order=order, engine=engine))

    def _end_broadcasts(self) -> None:
        for broadcast in self.broadcasts:
            broadcast.end()
