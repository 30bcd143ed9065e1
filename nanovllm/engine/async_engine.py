"""The engine for a server: serves many callers concurrently, each with its own stream.

Built by notebooks/91_llama_server.ipynb: edit it there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Literal

from nanovllm.assembly.requests import Preparation
from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import EngineStats, RequestOutput
from nanovllm.data.request import EngineOutput
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.engine.errors import EngineDeadError, RequestRefusedError
from nanovllm.engine.process import Command, Report
from nanovllm.engine.request_stream import RequestStream
from nanovllm.engine.request_times import EngineObserver, RequestTimes
from nanovllm.engine.starting import StartedEngine, start_engine
from nanovllm.engine.watching import Watching
from nanovllm.text.input_processor import InputProcessor
from nanovllm.text.long_texts import encode_long_text
from nanovllm.text.portions import early_portions
from nanovllm.text.processor import OutputProcessor
from nanovllm.text.prompts import Prompt, unpack_prompt

if TYPE_CHECKING:
    from nanovllm.trace.stream import StepStream

logger = logging.getLogger("nanovllm")

# Longer prompts (characters or token ids) are prepared in a thread, so that they do not block the
# event loop.
LONG_PROMPT = 4096
# Seconds in which an engine has to end after it was asked to.
END_SECONDS = 5.0


class AsyncEngine:
    """An engine process and its callers. `await AsyncEngine.start(config)` makes one.

    Args:
        started: the engine's process, which is ready.
        show_text: whether readers of the trace may see prompts and answers.

    Attributes:
        name: of the model, for clients.
        limits: the longest request, the size of the vocabulary, and other limits of a request.
        error: why the engine ended; None while it lives.
        died: set when the engine has ended unexpectedly.
        observer: is told about steps, tokens and finished requests.

    A program that streams:

        import asyncio
        from nanovllm import AsyncEngine, EngineConfig, SamplingParams

        async def main():
            engine = await AsyncEngine.start(EngineConfig("smollm2-135m"))
            async for output in engine.generate("Paris is", SamplingParams(temperature=0), "1"):
                print(output.outputs[0].text, end="", flush=True)
            await engine.shutdown()

        asyncio.run(main())
    """

    def __init__(
        self, config: EngineConfig, started: StartedEngine, show_text: bool = False
    ) -> None:
        self.config = config
        self.name = config.model_names[0]
        self.client = started.client
        self.tokenizer = tokenizer = started.tokenizer
        self.limits = self.client.limits
        self.preparation = Preparation(tokenizer, self.limits)
        self.input_processor = InputProcessor(
            tokenizer, self.limits, config.seed, prepare=self.preparation.prepare
        )
        self.output_processor = OutputProcessor(
            tokenizer, partial(RequestStream, on_close=self._forget)
        )
        self.observer = EngineObserver()
        self.trace_settings = started.trace_settings
        shown = TraceSettings(model=self.name, live=True)
        self.watching = Watching(
            [each | shown for each in self.trace_settings],
            self._order,
            tokenizer if show_text else None,
        )
        self.error: str | None = None
        self.died = asyncio.Event()
        self._closing = False
        self._reports = started.reports
        self._reader = asyncio.create_task(self._read_reports())

    # ---------------------------------------------------------------- start

    @classmethod
    async def start(cls, config: EngineConfig, show_text: bool = False) -> AsyncEngine:
        """Start the engine's process and wait until it can take requests.

        Args:
            config: the settings.
            show_text: whether readers of the trace may see prompts and answers.

        Raises:
            ValueError, EngineDeadError: see `start_engine`.
        """
        return cls(config, await start_engine(config), show_text)

    # ---------------------------------------------------------------- state

    @property
    def stats(self) -> EngineStats:
        """The statistics after the engine's latest step."""
        return self.client.stats

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self.output_processor.requests)

    def check_alive(self) -> None:
        """Raise EngineDeadError if the engine cannot take requests."""
        if self.error is not None or self._closing:
            raise EngineDeadError(self.error or "the engine is shutting down")

    # ---------------------------------------------------------------- requests

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text of any length, without blocking the event loop.

        Raises:
            ValueError: the text is not valid Unicode, or a long one with more tokens than any
                request may have; see `encode_long_text`.
        """
        if len(text) <= LONG_PROMPT:
            return self.tokenizer.encode(text, add_special_tokens)
        return await encode_long_text(self.tokenizer, text, add_special_tokens, self.limits)

    async def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> RequestStream:
        """Queue a request, and return the stream of its outputs, which the caller reads to its end
        or closes.

        Raises:
            ValueError: a bad prompt, or an id in use.
            EngineDeadError: the engine has ended.
        """
        arrival = time.monotonic()
        process = self.input_processor.process
        content, _ = unpack_prompt(prompt)
        # A grammar's check may take long, and so may the tokens of many bad words.
        takes_long = params.structured_outputs is not None or params.bad_words
        if len(content) <= LONG_PROMPT and not takes_long:
            text, requests = process(request_id, prompt, params, priority)
        else:
            text, requests = await asyncio.to_thread(process, request_id, prompt, params, priority)
        self.check_alive()
        stream = self.output_processor.add(request_id, text, requests)
        stream.times = RequestTimes(arrival, len(stream.prompt_token_ids))
        try:
            self.client.send(Command(add=requests))
        except (OverflowError, UnicodeEncodeError) as error:
            # A number over 64 bits; half of a surrogate pair.
            self.output_processor.remove(request_id)
            what = (
                "stop, cache_salt, structured_outputs and kv_transfer_params must be Unicode and "
                "64-bit numbers"
            )
            raise ValueError(f"{what}: {error}") from error
        self.watching.expect(request_id, text, requests)
        return stream

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Stream the outputs of a request; see `add_request`. Closing the iterator, or cancelling
        the task that reads it, ends the request within a step."""
        stream = await self.add_request(request_id, prompt, params, priority)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def abort(self, request_id: str) -> None:
        """End a request within a step. Its reader gets the outputs so far, with finish reason
        "abort"."""
        stream = self.output_processor.requests.get(request_id)
        if stream is None:
            return
        unfinished = [
            key for key, completion in stream.completions.items() if not completion.finished
        ]
        self.client.send(Command(abort=dict.fromkeys(unfinished, "abort")))
        self._deliver(
            [EngineOutput(key, finish_reason="abort") for key in unfinished], time.monotonic()
        )

    def _forget(self, stream: RequestStream) -> None:
        if self.output_processor.requests.get(stream.request_id) is stream:
            # Otherwise it has ended, and its id may be another request's.
            self.abort(stream.request_id)

    # ---------------------------------------------------------------- reports

    async def _read_reports(self) -> None:
        try:
            while True:
                for report in await self._reports.next():
                    await self._take_report(report)
                    await asyncio.sleep(0)  # many reports at once must not delay the readers
        except EngineDeadError as error:
            self._die(str(error))
        except Exception as error:  # a bug on this side, after which no reader may wait for ever
            logger.exception("the engine's reports cannot be read")
            self._die(f"{type(error).__name__}: {error}")

    async def _take_report(self, report: Report) -> None:
        find = self.output_processor.owner
        for sequence_id, moment in report.first_scheduled.items():
            stream = find(sequence_id)
            if stream is not None and stream.times.scheduled is None:
                stream.times.scheduled = moment
        for sequence_id, reason in report.refused.items():
            stream = find(sequence_id)
            if stream is not None:
                stream.fail(RequestRefusedError(reason))
        for output in early_portions(report.outputs):
            self._deliver([output], report.time)
            await asyncio.sleep(0)
        self._deliver(report.outputs, report.time)
        self.watching.put(report.steps)

    def _deliver(self, outputs: list[EngineOutput], now: float) -> None:
        """Turn the engine's outputs into text, and put them into the streams from which the
        requests' readers take them.

        `OutputProcessor.process` returns the requests' new outputs, and the ids of sequences that a
        stop string has ended. The engine does not see stop strings, and would go on computing these
        sequences, so one `Command` aborts all of them, with the reason "stop".

        Each request (a `RequestStream`) notes the time `now` (`times.note`, which also tells
        `observer`) before its reader can see the output (`put`). Readers of the trace see the
        output, too (`watching.add`)."""
        news, stopped = self.output_processor.process(outputs)
        if stopped:
            self.client.send(Command(abort=dict.fromkeys(stopped, "stop")))
        for stream, output in news:
            self.watching.add(output)
            stream.times.note(output, now, self.observer)
            stream.put(output)

    # ---------------------------------------------------------------- control

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; later requests find none."""
        self.client.send(Command(order="reset_prefix_cache"))

    def release_kv(self, sequence_id: str) -> None:
        """Free the KV that is held for a finished sequence (`remote_request_id`), unless a decode
        server is reading it."""
        if self.output_processor.owner(sequence_id) is None:
            self.client.send(Command(abort={sequence_id: "abort"}))

    def watch(self, engine: int = 0) -> StepStream:
        """Stream complete lines of one engine's trace as they arrive. The engine records its steps
        only while it has such readers. The reader closes the stream, unless the stream has ended,
        as it does with the engine.

        Raises:
            ValueError: there is no such engine; names the engines. Or nothing can be watched.
        """
        return self.watching.watch(engine)

    def _order(self, engine: int, order: Literal["watch", "unwatch"]) -> None:
        self.client.send(Command(order=order, engine=engine))

    # ---------------------------------------------------------------- the end

    def _die(self, reason: str) -> None:
        if self.error is not None or self._closing:
            return
        self.error = f"the engine is dead: {reason}"
        logger.error(self.error)
        self.watching.end()
        self._fail_all(self.error)
        self.client.kill()
        self._reports.close()
        self.died.set()

    def _fail_all(self, reason: str) -> None:
        for stream in self.output_processor.requests.values():
            stream.fail(EngineDeadError(reason))

    async def drain(self, timeout: float) -> None:
        """Wait until all requests have ended, and abort them after `timeout` seconds; then end the
        streams of the trace."""
        deadline = time.monotonic() + timeout
        while self.num_requests and self.error is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self.error is None:  # else they have failed, and must not seem to end well
            for request_id in list(self.output_processor.requests):
                self.abort(request_id)
        self.watching.end()

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Wait up to `drain_timeout` seconds for running requests, abort the rest, and end the
        process."""
        if self._closing:
            return
        self._closing = True
        await self.drain(drain_timeout)
        self._fail_all("the engine was shut down")
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._reports.close()
        self.error = self.error or "the engine was shut down"
        await asyncio.to_thread(self.client.shutdown, END_SECONDS)
