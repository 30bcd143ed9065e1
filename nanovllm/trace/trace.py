"""Traces: one plain-data record per step of the engine, in memory or in a file of JSON lines."""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import logging
import pathlib
import zlib
from collections.abc import Iterator
from typing import IO

from nanovllm.data.disk import GZIP_MAGIC, REMEDIES
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.processes.activity import waiting_for_others
from nanovllm.trace.format import (
    FORMAT_VERSION,
    TraceDecoder,
    TraceEncoder,
    TraceError,
    header_line,
    parse_header,
)
from nanovllm.trace.perfetto import trace_events
from nanovllm.trace.record import Snapshot, StepRecord, TracedRequest

__all__ = ["FORMAT_VERSION", "Snapshot", "StepRecord", "Trace", "TraceError", "TracedRequest"]

logger = logging.getLogger(__name__)

FilePath = str | pathlib.Path


class Trace:
    """A list of step records, in memory or, if a path is given, in a file that grows with each
    step.

    If the file cannot be written any more (the disk is full), the trace ends with a warning, and
    the engine continues.

    Args:
        path: the file to write, compressed if its name ends in ".gz". Its records are not kept in
            memory.
        settings: what a reader needs to draw the steps (`block_size`, `num_blocks`, ...).
    """

    def __init__(self, path: FilePath | None = None, settings: TraceSettings | None = None) -> None:
        self.steps: list[StepRecord] = []
        self.settings = settings or TraceSettings()
        self._path = path
        self._file = None
        if path is not None:
            self._file = _open_for_writing(path)
            self._encoder = TraceEncoder(self.settings)
            self._write(header_line(self.settings))

    def record(self, step: StepRecord) -> None:
        """Append one step."""
        if self._path is None:
            self.steps.append(step)
        elif self._file is not None:
            self._write(self._encoder.encode(step))

    def close(self) -> None:
        """Finish the file, if there is one."""
        if self._file is not None:
            self._write(None)
        self._file = None

    def _write(self, line: bytes | None) -> None:
        """Write a line, or finish the file (None)."""
        file = self._file
        assert file is not None
        try:
            with waiting_for_others():
                if line is None:
                    return file.close()
                file.write(line)
                # A compressor that is flushed after every line would compress nothing.
                if not str(self._path).endswith(".gz"):
                    file.flush()
        except OSError as error:
            remedies = [REMEDIES[error.errno]] if error.errno in REMEDIES else []
            reason = ": ".join([error.strerror or str(error), *remedies])
            logger.warning(
                "the trace %s ends here, and the engine continues without it: %s",
                self._path,
                reason,
            )
            self._file = None
            with contextlib.suppress(OSError):
                # Closing writes the rest of the buffer, and fails again.
                file.close()

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def lines(self) -> Iterator[bytes]:
        """The steps in memory as lines of a file, with the header."""
        encoder = TraceEncoder(self.settings)
        yield header_line(self.settings)
        for step in self.steps:
            yield encoder.encode(step)

    def save(self, path: FilePath) -> None:
        """Write the steps in memory to a file, compressed if its name ends in ".gz"."""
        with _open_for_writing(path) as file:
            file.writelines(self.lines())

    @classmethod
    def load(cls, path: FilePath, partial: bool = False) -> Trace:
        """Read a trace, compressed or not.

        Args:
            partial: accept a file that was cut off, and take its complete steps.

        Raises:
            TraceError: the file is not a trace, is of another version, was cut off, or a line is
                damaged; says which.
            OSError: there is no such file.
        """
        settings, _, records = read_trace(path, partial)
        trace = cls(settings=settings)
        gc.disable()  # the collector would walk over a million objects that all stay alive
        try:
            trace.steps = list(records)
        finally:
            gc.enable()
        return trace

    def to_perfetto(self, path: FilePath) -> None:
        """Write the trace as Chrome trace events, which ui.perfetto.dev opens; see
        `nanovllm.trace.perfetto`."""
        events = [{"pid": 1, **event} for event in trace_events(self.steps)]
        pathlib.Path(path).write_text(json.dumps({"traceEvents": events}))


def read_trace(
    path: FilePath, partial: bool = False, data: bytes | None = None
) -> tuple[TraceSettings, list[bytes], Iterator[StepRecord]]:
    """The settings of a trace, its other lines, each without its end, and their records, which are
    read while they are asked for.

    Args:
        partial: leave out a last line that was cut off.
        data: the content of the file, if it was read already, as pipes are only once.

    Raises:
        TraceError: not a trace, of another version, or cut off in the middle of a line; or, while
            records are read, a damaged line.
        OSError: there is no such file.
    """
    if data is None:
        with open(path, "rb") as file:
            first = file.peek(len(GZIP_MAGIC))
            # What is no trace may have no end, such as a device.
            data = file.read() if first.startswith((GZIP_MAGIC, b"{")) else first
    compressed_whole = True
    if data.startswith(GZIP_MAGIC):
        decompressor = zlib.decompressobj(wbits=31)
        try:
            data = decompressor.decompress(data)
        except zlib.error as error:
            raise TraceError(f"{path} is damaged: {error}") from error
        compressed_whole = decompressor.eof
    if data.endswith(b"}"):  # only the end of the last line is missing
        data += b"\n"
    *lines, rest = data.split(b"\n")
    settings = parse_header(lines[0] if lines else rest, path)
    if (rest or not compressed_whole) and not partial:
        raise TraceError(
            f"{path}, line {len(lines) + 1}: the file was cut off after {len(lines) - 1} complete "
            "steps, as happens to a server that was killed; to read these, use --partial or "
            "Trace.load(path, partial=True)"
        )
    return settings, lines[1:], _records(path, lines[1:], TraceDecoder(settings))


def _records(path: FilePath, lines: list[bytes], decoder: TraceDecoder) -> Iterator[StepRecord]:
    for number, line in enumerate(lines, start=2):
        try:
            yield decoder.decode(line)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: not a step record ({error})") from error


def _open_for_writing(path: FilePath) -> IO[bytes]:
    """Open the file of a trace.

    Raises:
        TraceError: it cannot be written.
    """
    try:
        if str(path).endswith(".gz"):
            return gzip.open(path, "wb", compresslevel=5)  # type: ignore[return-value]
        return open(path, "wb")
    except OSError as error:
        raise TraceError(
            f"cannot write the trace {path} ({error.strerror}): name a file in a folder that "
            "exists and that you may write"
        ) from error
