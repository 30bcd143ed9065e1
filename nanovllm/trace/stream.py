"""Streams of a running engine's trace to readers: their backlogs, and the requests' texts in the
lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from nanovllm.data.outputs import RequestOutput
from nanovllm.data.request import EngineRequest
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.trace.format import TraceEncoder, header_line
from nanovllm.trace.record import StepRecord, decode_record

# A page redraws at most twenty times per second; more and smaller chunks would only take time.
CHUNK_SECONDS = 0.05
# A reader that is further behind skips to the present state of the engine.
MAX_BACKLOG_BYTES = 4 * 2**20
# A new reader gets the prompts and answers of all running requests at once, which delays the
# server.
MAX_PROMPT_TOKENS = 500
MAX_CHARACTERS = 2000


Order = Callable[[Literal["watch", "unwatch"]], None]


class StepStream:
    """One reader's stream: `async for chunk in stream` yields the header, then whole lines,
    beginning with a snapshot.

    A reader that leaves before the end must `close` it. A slow reader misses steps, and continues
    at a new snapshot."""

    def __init__(
        self, settings: TraceSettings, hide_tokens: bool, on_close: Callable[[StepStream], None]
    ) -> None:
        self._on_close = on_close
        self._header = header_line(settings)
        self._encoder = TraceEncoder(settings, hide_tokens)
        self._lines: list[bytes] = []
        self._size = 0  # bytes of these lines, without the first one, which has the snapshot
        self._has_start = False
        self._ended = False
        self._arrival = asyncio.Event()
        self._arrival.set()  # the header
        self._next_chunk = 0.0  # not before this time of the event loop

    def put(self, record: StepRecord, start: StepRecord | None) -> bool:
        """Add a record's line.

        Args:
            record: as readers see it that have read the previous lines.
            start: as readers see it that start here; None if there is no snapshot.

        Returns:
            False if this reader is too far behind, and needs a new snapshot.
        """
        if not self._has_start and start is None:
            return True
        if self._has_start:
            self._lines.append(self._encoder.encode(record))
            self._size += len(self._lines[-1])
            self._has_start = self._size <= MAX_BACKLOG_BYTES
        if not self._has_start:
            self._lines = []
            self._size = 0
            if start is None:
                return False
            self._lines = [self._encoder.encode(start)]
            self._has_start = True
        self._arrival.set()
        return True

    def end(self) -> None:
        """End the stream after the lines that it has."""
        self._ended = True
        self._arrival.set()

    def __aiter__(self) -> StepStream:
        return self

    async def __anext__(self) -> bytes:
        await self._arrival.wait()
        loop = asyncio.get_running_loop()
        if not self._ended:
            await asyncio.sleep(self._next_chunk - loop.time())
        self._next_chunk = loop.time() + CHUNK_SECONDS
        chunk = self._header + b"".join(self._lines)
        self._header = b""
        self._lines = []
        self._size = 0
        if not self._ended:
            self._arrival.clear()
        elif not chunk:
            raise StopAsyncIteration
        return chunk

    def close(self) -> None:
        """Stop reading; may be called more than once, and in a `finally`."""
        self.end()
        self._on_close(self)


class StepBroadcast:
    """The readers of a running engine, or of one of several. The engine records its steps only
    while there are readers.

    Args:
        settings: those of the trace's header; `data_rank` says which of several engines this is.
        order: sends the engine "watch" (or, if it records already, has it take a new snapshot) and
            "unwatch".
        texts: the requests' texts, if readers may see them.

    Attributes:
        streams: of the readers.
    """

    def __init__(
        self, settings: TraceSettings, order: Order, texts: RequestTexts | None = None
    ) -> None:
        self.settings = settings
        self.texts = texts
        self._engine = settings.data_rank or 0
        self._order = order
        self.streams: list[StepStream] = []
        self._ended = False

    def watch(self) -> StepStream:
        """A new reader's stream."""
        stream = StepStream(self.settings, self.texts is None, self._leave)
        if self._ended:
            stream.end()
        else:
            self.streams.append(stream)
            self._order("watch")
        return stream

    def _leave(self, stream: StepStream) -> None:
        if stream in self.streams:
            self.streams.remove(stream)
            if not self.streams:
                self._order("unwatch")

    def put(self, records: Sequence[msgspec.Raw]) -> None:
        """Pass on the records of the engine's report."""
        behind = False
        for i, encoded in enumerate(records if self.streams else ()):
            record = decode_record(encoded)
            start = record if record.snapshot is not None else None
            if self.texts is not None:
                if start is not None:
                    start = self.texts.so_far(record)
                # The last record gets all new text: no record after it is available yet.
                record = self.texts.new(record, self._engine if i == len(records) - 1 else None)
            for stream in self.streams:
                behind |= not stream.put(record, start)
        if self.texts is not None and (records or not self.streams):
            self.texts.forget(self._engine)
        if behind:
            self._order("watch")

    def end(self) -> None:
        """End all streams, now and in the future."""
        self._ended = True
        for stream in self.streams:
            stream.end()
        self.streams = []


@dataclass
class SequenceText:
    """What a sequence was asked and has answered; `new` is what no line contains yet."""

    sequence_id: str
    prompt: str | list[int]
    text: str = ""
    new: str = ""
    engine: int = 0
    ended: bool = False


class RequestTexts:
    """Keeps the prompts and answers of running requests, and adds them to the lines of the engines'
    traces.

    Args:
        tokenizer: decodes prompts that were given as token ids.

    Attributes:
        sequences: by request id and index of the completion, those that may still be shown.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.sequences: dict[tuple[str, int], SequenceText] = {}

    def expect(self, request_id: str, prompt: str | None, requests: list[EngineRequest]) -> None:
        """Note that a request was queued; see `InputProcessor.process`."""
        for index, request in enumerate(requests):
            content = request.prompt_token_ids if prompt is None else _beginning(prompt)
            self.sequences[request_id, index] = SequenceText(request.request_id, content)

    def add(self, output: RequestOutput) -> None:
        """Note a request's new text, or its end."""
        for piece in output.outputs:
            key = (output.request_id, piece.index)
            sequence = self.sequences[key]
            sequence.text = _end(sequence.text + piece.text)
            sequence.new += piece.text
            sequence.engine = piece.engine
            sequence.ended = piece.finish_reason is not None
            if piece.finish_reason == "abort" and not sequence.text:
                del self.sequences[key]  # its engine may be unknown, and there is no text to show

    def new(self, record: StepRecord, engine: int | None) -> StepRecord:
        """A record as readers see it that continue: with the prompts of requests that begin to run,
        since thousands may wait, and the new text of an engine's requests."""
        text = {
            s.sequence_id: s.new for s in self.sequences.values() if s.new and s.engine == engine
        }
        return replace(
            record, prompts=self._prompts({*record.admitted, *record.resumed}), text=text
        )

    def so_far(self, record: StepRecord) -> StepRecord:
        """A record with a snapshot as readers see it that start there: with the prompts of all
        running requests, and all text."""
        assert record.snapshot is not None
        known = record.snapshot.prompt_lens
        running = {*record.admitted, *record.resumed, *record.snapshot.tables}
        text = {
            s.sequence_id: s.text
            for s in self.sequences.values()
            if s.text and s.sequence_id in known
        }
        return replace(record, prompts=self._prompts(running), text=text)

    def _prompts(self, sequence_ids: set[str]) -> dict[str, str]:
        return {
            s.sequence_id: self._prompt(s)
            for s in self.sequences.values()
            if s.sequence_id in sequence_ids
        }

    def _prompt(self, sequence: SequenceText) -> str:
        if isinstance(sequence.prompt, str):
            return sequence.prompt
        token_ids = sequence.prompt
        text = self._tokenizer.decode(token_ids[:MAX_PROMPT_TOKENS], skip_special_tokens=False)
        sequence.prompt = _beginning(text, len(token_ids) > MAX_PROMPT_TOKENS)
        return sequence.prompt

    def forget(self, engine: int) -> None:
        """Forget an engine's new texts: they have been passed on, or there is no reader."""
        for key, sequence in list(self.sequences.items()):
            if sequence.engine == engine:
                sequence.new = ""
                if sequence.ended:
                    del self.sequences[key]


def _beginning(text: str, is_cut: bool = False) -> str:
    return text[:MAX_CHARACTERS] + " …" if is_cut or len(text) > MAX_CHARACTERS else text


def _end(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else "… " + text[2 - MAX_CHARACTERS :]
