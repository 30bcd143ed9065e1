"""The engine for a server: many callers at once, each with a stream of its own, none waiting for another.

Built by notebooks/91_llama_server.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec
import zmq
import zmq.asyncio

from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import EngineStats, RequestOutput
from nanovllm.data.parts import MissingPartError, load
from nanovllm.data.request import EngineOutput
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.process import Command, Report, run_engine
from nanovllm.engine.request_stream import (
    EngineDeadError,
    EngineObserver,
    EngineStartError,
    RequestFailedError,
    RequestRefusedError,
    RequestStream,
    RequestTimes,
)
from nanovllm.engine.watch import EngineProcess
from nanovllm.text.long_texts import LongTexts
from nanovllm.text.portions import early_portions
from nanovllm.text.processor import EngineLimits, InputProcessor, OutputProcessor, Prompt
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.trace.stream import RequestTexts, StepBroadcast, StepStream

logger = logging.getLogger("nanovllm")

# Longer prompts (characters or token ids) are prepared in a thread, so that they do not block the event loop.
LONG_PROMPT = 4096
# The last report of an engine process may still be in flight when the front end notices that the process has ended.
LAST_WORDS_SECONDS = 0.1
WATCHING = "watching the engine"


class AsyncEngine:
    """An engine process and its callers. `await AsyncEngine.start(config)` makes one.

    Attributes:
        name: of the model, for clients.
        limits: the longest request, the vocabulary, and what else a request has to fit.
        stats: the statistics after its latest step.
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
        self.stats, self.observer, self.died = EngineStats(), EngineObserver(), asyncio.Event()
        self.error: str | None = None
        self.broadcasts: list[StepBroadcast] = []
        self._streams: dict[str, RequestStream] = {}
        self._texts: RequestTexts | None = None
        self._num_sent = self._num_taken = self.num_preparing = 0
        self._closing = self._ready = False
        self._folder = tempfile.mkdtemp(prefix="nanovllm-")  # for this user alone
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._reports = zmq.asyncio.Socket(self._context, zmq.PULL)
        # Without a limit on the queues, neither side ever waits for the other. The requests bound the commands in flight, and this
        # side's speed of reading bounds the reports.
        addresses = [f"ipc://{self._folder}/{name}" for name in ("commands", "reports")]
        for socket, address in zip((self._commands, self._reports), addresses, strict=True):
            socket.set_hwm(0)
            socket.bind(address)
        self.name = config.served_model_name or config.model
        settings = dataclasses.replace(config, model=str(folder), served_model_name=self.name)
        process_class = EngineProcess
        with contextlib.suppress(MissingPartError):  # without that part, a process that hangs is not noticed
            process_class = load("nanovllm.engine.pulse:WatchedEngineProcess", "several processes")
        self._process = process_class(run_engine, settings, *addresses)
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._on_exit)
        self._tasks = [asyncio.create_task(self._process.watch(on_hang=self._die))]

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
            ready = await engine._wait_until_ready()
        except BaseException:
            await engine.shutdown()
            raise
        assert ready.limits is not None, "the first report has the limits"
        engine.limits = ready.limits
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
        engine._tasks.append(asyncio.create_task(engine._read_reports()))
        return engine

    async def _wait_until_ready(self) -> Report:
        while not await self._reports.poll(20):
            if self.error is not None:
                raise EngineDeadError(self.error)
        report = msgspec.msgpack.decode(await self._reports.recv(), type=Report)
        if report.fatal:
            raise (EngineStartError if report.user_error else EngineDeadError)(report.fatal)
        # Both sides are connected, so the sockets' names can go. Then nothing is left behind even if this process is killed.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._ready, self.stats = True, report.stats
        self._process.expect_heartbeats()
        return report

    # ---------------------------------------------------------------- requests

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
        on_their_way = self._num_sent - self._num_taken + self.num_preparing
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
        try:
            command = msgspec.msgpack.encode(Command(add=requests))
        except (OverflowError, UnicodeEncodeError) as error:  # a number over 64 bits; half of a surrogate pair
            raise ValueError(f"the request cannot be sent to the engine: {error}") from error
        self.output_processor.add(request_id, text, requests)
        if self._texts is not None:
            self._texts.expect(request_id, text, requests)
        times = RequestTimes(time.monotonic(), len(requests[0].prompt_token_ids))
        stream = self._streams[request_id] = RequestStream(request_id, times, self._forget)
        self._num_sent += len(requests)
        self._send(command)
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
        self._send(Command(abort=dict.fromkeys(unfinished, "abort")))
        self._deliver([EngineOutput(key, finish_reason="abort") for key in unfinished], time.monotonic())

    def release_kv(self, sequence_id: str) -> None:
        """Free the KV that is held for a finished sequence (`remote_request_id`), unless a decode server is reading it."""
        if self.output_processor.owner(sequence_id) is None:
            self._send(Command(abort={sequence_id: "abort"}))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; later requests find none."""
        self._send(Command(order="reset_prefix_cache"))

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
        self._send(Command(order=order, engine=engine))

    def _forget(self, request_id: str) -> None:
        self.abort(request_id)
        self._streams.pop(request_id, None)

    def _send(self, command: Command | bytes) -> None:
        if self.error is not None:
            return
        encoded = command if isinstance(command, bytes) else msgspec.msgpack.encode(command)
        with contextlib.suppress(zmq.Again):  # the other end is closed: see `_on_exit`
            self._commands.send(encoded, zmq.NOBLOCK)

    # ---------------------------------------------------------------- reports

    async def _read_reports(self) -> None:
        decoder = msgspec.msgpack.Decoder(Report)
        try:
            while True:
                report = decoder.decode(await self._reports.recv())
                if report.fatal:
                    return self._die(report.fatal)
                for output in early_portions(report.outputs):
                    self._deliver([output], report.time)
                    await asyncio.sleep(0)
                self._take(report)
                await asyncio.sleep(0)  # many reports at once must not delay the readers
        except Exception as error:  # a bug on this side, after which no reader may wait for ever
            logger.exception("the engine's reports cannot be read")
            self._die(f"{type(error).__name__}: {error}")

    def _take(self, report: Report) -> None:
        self.stats, self._num_taken = report.stats, report.num_taken
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
            self._send(Command(abort=dict.fromkeys(stopped, "stop")))
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

    def _on_exit(self) -> None:
        """Called when the process has ended, by an order or not."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        self._process.join(1)
        reason = f"the engine process has ended with exit code {self._process.exitcode}"
        loop.call_later(LAST_WORDS_SECONDS, self._die, reason)

    def _die(self, reason: str) -> None:
        if self.error is not None or self._closing:
            return
        self.error = f"the engine is dead: {reason}"
        logger.error(self.error)
        self._end_broadcasts()
        self._fail_all(self.error)
        self.died.set()

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
        if self._ready:
            await self.drain(drain_timeout)
            self._fail_all("the engine was shut down")
            self._long_texts.close()
            self._send(Command(order="shutdown"))
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        await self._process.end(was_told=self._ready)
        self.error = self.error or "the engine was shut down"
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for socket in (self._commands, self._reports):
            socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
