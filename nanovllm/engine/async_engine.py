"""The engine for a server: many callers at once, each with a stream of its own, none waiting for another.

Built by notebooks/91_llama_server.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Literal

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import EngineStats, RequestOutput
from nanovllm.data.parts import MissingPartError, load
from nanovllm.data.request import EngineOutput
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.distributed.activity import LOOK_SECONDS
from nanovllm.engine.client import EngineClient
from nanovllm.engine.process import Command, Report
from nanovllm.engine.request_stream import (
    EngineDeadError,
    EngineObserver,
    EngineStartError,
    RequestFailedError,
    RequestRefusedError,
    RequestStream,
    RequestTimes,
)
from nanovllm.text.long_texts import LongTexts
from nanovllm.text.portions import early_portions
from nanovllm.text.processor import EngineLimits, InputProcessor, OutputProcessor, Prompt
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.trace.stream import RequestTexts, StepBroadcast, StepStream

logger = logging.getLogger("nanovllm")

# Longer prompts (characters or token ids) are prepared in a thread, so that they do not block the event loop.
LONG_PROMPT = 4096
# The time that an engine gets to end by itself.
END_SECONDS = 5.0
WATCHING = "watching the engine"


class AsyncEngine:
    """An engine process and its callers. `await AsyncEngine.start(config)` makes one.

    Attributes:
        name: of the model, for clients.
        limits: the longest request, the vocabulary, and what else a request has to fit.
        error: why the engine ended; None while it lives.
        died: set when it has ended without an order to end.
        num_preparing: sequences that have been accepted, and are still prepared for the engine.
        observer: is told about steps, tokens and finished requests.
        broadcasts: for each of the engines that data parallelism has, the readers of its trace.
    """

    tokenizer: Tokenizer
    limits: EngineLimits
    input_processor: InputProcessor
    output_processor: OutputProcessor
    _long_texts: LongTexts

    def __init__(self, config: EngineConfig, folder: pathlib.Path) -> None:
        self.config = config
        self.observer, self.died = EngineObserver(), asyncio.Event()
        self.error: str | None = None
        self.broadcasts: list[StepBroadcast] = []
        self._streams: dict[str, RequestStream] = {}
        self._texts: RequestTexts | None = None
        self.num_preparing, self._closing = 0, False
        self._reader: asyncio.Task[None] | None = None
        self.name = config.served_model_name or config.model
        create = EngineClient
        with contextlib.suppress(MissingPartError):  # without that part, a process that hangs is not noticed
            create = load("nanovllm.engine.data_rank:DataRank", "several processes")
        self._client = create(dataclasses.replace(config, model=str(folder), served_model_name=self.name), {})
        self._arrival = asyncio.Event()  # of a report or heartbeat, or the end of the process
        self._sources = [self._client.reports.fileno(), self._client.connection.fileno()]
        for source in self._sources:
            asyncio.get_running_loop().add_reader(source, self._arrival.set)

    # ---------------------------------------------------------------- start

    @classmethod
    async def start(cls, config: EngineConfig, show_text: bool = False) -> AsyncEngine:
        """Start the engine's process and wait until it can take requests.

        Args:
            config: the settings.
            show_text: whether readers of the trace may see prompts and answers.

        Raises:
            ValueError: no such model (`ModelNotFoundError`), or settings that do not fit (`EngineStartError`).
            EngineDeadError: the process ended while it was starting.
        """
        # Downloaded here, where the user sees the progress and can interrupt it.
        folder = tokenizer_folder = await asyncio.to_thread(resolve_model, config.model, config.revision)
        if config.tokenizer is not None:
            tokenizer_folder = await asyncio.to_thread(resolve_model, config.tokenizer)
        engine = cls(config, folder)
        try:
            # The tokenizer loads here while the other process imports torch and loads the weights.
            try:
                engine.tokenizer = await asyncio.to_thread(Tokenizer.from_pretrained, tokenizer_folder)
            except ValueError as error:
                raise EngineStartError(str(error)) from error
            ready, *_ = await engine._next_reports()
        except BaseException:
            await engine.shutdown()
            raise
        engine.limits = engine._client.limits
        if show_text:
            engine._texts = load("nanovllm.trace.stream:RequestTexts", "show_text")(engine.tokenizer)
        with contextlib.suppress(MissingPartError):
            create = load("nanovllm.trace.stream:StepBroadcast", WATCHING)
            engine.broadcasts = [
                create(settings | {"model": engine.name, "live": True}, partial(engine._order, i), engine._texts)
                for i, settings in enumerate(ready.trace_settings)
            ]
        engine.input_processor = InputProcessor(engine.tokenizer, engine.limits, config.seed)
        engine.output_processor = OutputProcessor(engine.tokenizer)
        engine._long_texts = LongTexts(engine.tokenizer)
        engine._reader = asyncio.create_task(engine._read_reports())
        return engine

    # ---------------------------------------------------------------- requests

    @property
    def stats(self) -> EngineStats:
        """The statistics after the engine's latest step."""
        return self._client.stats

    @property
    def is_alive(self) -> bool:
        """True while the engine can take requests."""
        return self.error is None and not self._closing

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine cannot take requests."""
        if not self.is_alive:
            raise EngineDeadError(self.error or "the engine is shutting down")

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def has_room(self, num_sequences: int, max_num_waiting: int | None = None) -> bool:
        """Whether at most `max_num_waiting` sequences (default: the setting) would wait if so many more came in."""
        limit = self.config.max_num_waiting if max_num_waiting is None else max_num_waiting
        if not self._streams and not self.num_preparing:
            return True
        on_their_way = self._client.num_in_flight + self.num_preparing
        waiting = self.stats.num_waiting + self.stats.num_swapped
        # While sequences wait, new ones have to wait behind them.
        places = self.config.max_num_seqs * self.config.data_parallel_size
        free_places = 0 if waiting else places - self.stats.num_running
        return waiting + on_their_way + num_sequences - free_places <= limit

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text of any length, without blocking the event loop.

        Raises:
            ValueError: the text is not valid Unicode, or a long one with more tokens than any request may have; see `LongTexts.encode`.
        """
        if len(text) <= LONG_PROMPT:
            return self.tokenizer.encode(text, add_special_tokens)
        return await self._long_texts.encode(text, add_special_tokens, self.limits.max_request_tokens)

    async def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> RequestStream:
        """Queue a request, and return the stream of its outputs, which the caller reads to its end or closes.

        Raises:
            ValueError: a bad prompt, or an id in use.
            EngineDeadError: the engine has ended.
        """
        process = self.input_processor.process
        content = prompt.get("prompt_token_ids") or prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if len(content or ()) <= LONG_PROMPT:
            text, requests = process(request_id, prompt, params, priority)
        else:
            text, requests = await asyncio.to_thread(process, request_id, prompt, params, priority)
        self.check_alive()
        self.output_processor.add(request_id, text, requests)
        try:
            self._client.send(Command(add=requests))
        except (OverflowError, UnicodeEncodeError) as error:  # a number over 64 bits; half of a surrogate pair
            self.output_processor.remove(request_id)
            raise ValueError(f"the request cannot be sent to the engine: {error}") from error
        if self._texts is not None:
            self._texts.expect(request_id, text, requests)
        times = RequestTimes(time.monotonic(), len(requests[0].prompt_token_ids))
        stream = self._streams[request_id] = RequestStream(request_id, times, self._forget)
        return stream

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Stream the outputs of a request; see `add_request`. Closing the iterator, or cancelling the task that reads it, ends
        the request within a step."""
        stream = await self.add_request(request_id, prompt, params, priority)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def abort(self, request_id: str) -> None:
        """End a request within a step. Its reader gets the outputs so far, with finish reason "abort"."""
        state = self.output_processor.requests.get(request_id)
        if state is None:
            return
        unfinished = [key for key, completion in state.completions.items() if not completion.finished]
        self._client.send(Command(abort=dict.fromkeys(unfinished, "abort")))
        self._deliver([EngineOutput(key, finish_reason="abort") for key in unfinished], time.monotonic())

    def release_kv(self, sequence_id: str) -> None:
        """Free the KV that is held for a finished sequence (`remote_request_id`), unless a decode server is reading it."""
        if self.output_processor.owner(sequence_id) is None:
            self._client.send(Command(abort={sequence_id: "abort"}))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; later requests find none."""
        self._client.send(Command(order="reset_prefix_cache"))

    def watch(self, engine: int = 0) -> StepStream:
        """Stream the lines of the trace of one engine, in whole, as they come. The engine records its steps only while it has
        such readers. The reader closes the stream, unless the stream has ended, as it does with the engine.

        Raises:
            ValueError: there is no such engine; names the engines.
        """
        load("nanovllm.trace.stream:StepStream", WATCHING)
        last = len(self.broadcasts) - 1
        if not 0 <= engine <= last:
            fitting = f"from 0 to {last}" if last else "0, the only one"
            raise ValueError(f"engine must be {fitting}, not {engine}")
        return self.broadcasts[engine].watch()

    def _order(self, engine: int, order: Literal["watch", "unwatch"]) -> None:
        self._client.send(Command(order=order, engine=engine))

    def _forget(self, request_id: str) -> None:
        self.abort(request_id)
        self._streams.pop(request_id, None)

    # ---------------------------------------------------------------- reports

    async def _next_reports(self) -> list[Report]:
        """Wait for the engine's next reports.

        Raises:
            EngineStartError: it refuses the settings.
            EngineDeadError: it has ended, or hangs.
        """
        while True:
            self._arrival.clear()
            trouble = self._client.trouble()
            if reports := self._client.take_reports():
                return reports
            if trouble:
                last = self._client.last_words
                raise (EngineStartError if last is not None and last.user_error else EngineDeadError)(trouble)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._arrival.wait()

    async def _read_reports(self) -> None:
        try:
            while True:
                for report in await self._next_reports():
                    for output in early_portions(report.outputs):
                        self._deliver([output], report.time)
                        await asyncio.sleep(0)
                    self._take(report)
                    await asyncio.sleep(0)  # many reports at once must not delay the readers
        except EngineDeadError as error:
            self._die(str(error))
        except Exception as error:  # a bug on this side, after which no reader may wait for ever
            logger.exception("the engine's reports cannot be read")
            self._die(f"{type(error).__name__}: {error}")

    def _take(self, report: Report) -> None:
        for sequence_id, reason in report.refused.items():
            stream = self._streams.get(self.output_processor.owner(sequence_id) or "")
            if stream is not None:
                stream.fail(RequestRefusedError(reason))
        self._deliver(report.outputs, report.time)
        for i, broadcast in enumerate(self.broadcasts):
            broadcast.put(report.steps.get(i, ()))

    def _deliver(self, outputs: list[EngineOutput], now: float) -> None:
        new_outputs, stopped = self.output_processor.process(outputs)
        if stopped:
            self._client.send(Command(abort=dict.fromkeys(stopped, "stop")))
        for output in new_outputs:
            if self._texts is not None:
                self._texts.add(output)
            stream = self._streams[output.request_id]
            self._note_times(stream.times, output, now)
            if output.error:
                stream.fail(RequestFailedError(output.error))
            else:
                stream.put(output)
            if output.finished:
                del self._streams[output.request_id]

    def _note_times(self, times: RequestTimes, output: RequestOutput, now: float) -> None:
        for piece in output.outputs:
            self.observer.tokens(times, piece, now)
            if piece.token_ids:
                times.first_token = times.first_token or now
                times.last_token[piece.index] = now
        if output.finished:
            self.observer.finished(times, output.outputs[-1], now)

    # ---------------------------------------------------------------- the end

    def _die(self, reason: str) -> None:
        if self.error is not None or self._closing:
            return
        self.error = f"the engine is dead: {reason}"
        logger.error(self.error)
        self._end_broadcasts()
        self._fail_all(self.error)
        self._client.kill()
        self._stop_listening()
        self.died.set()

    def _stop_listening(self) -> None:
        for source in self._sources:
            asyncio.get_running_loop().remove_reader(source)

    def _fail_all(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.fail(EngineDeadError(reason))

    async def drain(self, timeout: float) -> None:
        """Wait until all requests have ended, and abort them after `timeout` seconds; then end the streams of the trace."""
        deadline = time.monotonic() + timeout
        while self._streams and self.error is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for request_id in list(self._streams):
            self.abort(request_id)
        self._end_broadcasts()

    def _end_broadcasts(self) -> None:
        for broadcast in self.broadcasts:
            broadcast.end()

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Wait so many seconds for running requests, abort the others, and end the process."""
        if self._closing:
            return
        self._closing = True
        if self._reader is not None:
            await self.drain(drain_timeout)
            self._fail_all("the engine was shut down")
            self._long_texts.close()
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        self._stop_listening()
        self.error = self.error or "the engine was shut down"
        await asyncio.to_thread(self._client.shutdown, END_SECONDS if self._client.is_ready else 0)
