"""The engine's record of itself: one plain-data entry a step, in memory or in a file of JSON lines."""

from __future__ import annotations

import contextlib
import gc
import gzip
import logging
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from nanovllm.distributed.life_signs import waiting_for_others
from nanovllm.trace.format import (
    FORMAT_VERSION,
    TraceDecoder,
    TraceEncoder,
    TraceError,
    header_line,
    parse_header,
    require_sizes,
)
from nanovllm.trace.record import Snapshot, StepRecord, TracedRequest

__all__ = ["FORMAT_VERSION", "Snapshot", "StepRecord", "Trace", "TraceError", "TracedRequest"]

logger = logging.getLogger(__name__)

GZIP_MAGIC = b"\x1f\x8b"
Result = TypeVar("Result")


class Trace:
    """A list of step records, in memory and, if a path is given, appended to a file as they come.

    A file that cannot be written any more (a full disk) ends the file, with one warning, and not the engine.

    Args:
        path: file to write, compressed if its name ends in ".gz"; its first line says what it is.
        settings: what a reader needs to draw the steps (`block_size`, `num_blocks`, ...).
        keep: keep the records in memory too. Default: only without a path, so that a server's trace cannot
            fill its memory.
    """

    def __init__(
        self, path: str | pathlib.Path | None = None, settings: dict[str, Any] | None = None, keep: bool | None = None
    ) -> None:
        self.steps: list[StepRecord] = []
        self.settings = settings or {}
        self._keep = path is None if keep is None else keep
        self._path = path
        self._file = _open_for_writing(path) if path is not None else None
        # What was written can be read at once; but a compressor that is flushed after every line compresses nothing.
        self._flushes = not str(path).endswith(".gz")
        self._encoder: TraceEncoder | None = None

    def record(self, step: StepRecord) -> None:
        """Append one step."""
        if self._keep:
            self.steps.append(step)
        if self._file is not None:
            with waiting_for_others(), self._ending_the_file_on_error():
                self._file.write(self._begin_file().encode(step))
                if self._flushes:
                    self._file.flush()

    def _begin_file(self) -> TraceEncoder:
        """The file's encoder. Its first line is written late: the settings are complete only when steps come."""
        if self._encoder is None:
            assert self._file is not None
            self._file.write(header_line(self.settings))
            self._encoder = TraceEncoder(self.settings)
        return self._encoder

    def close(self) -> None:
        """Finish the file, if there is one."""
        if self._file is not None:
            with waiting_for_others(), self._ending_the_file_on_error():
                self._begin_file()
                self._file.close()
            self._file = None

    @contextlib.contextmanager
    def _ending_the_file_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            logger.warning(
                "the trace %s ends here, and the engine goes on without it: %s", self._path, error.strerror or error
            )
            assert self._file is not None
            file, self._file = self._file, None
            with contextlib.suppress(OSError):  # closing writes what is left in the buffer, and fails once more
                file.close()

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def lines(self) -> Iterator[bytes]:
        """The kept steps as they stand in a file, with the header."""
        encoder = TraceEncoder(self.settings)
        yield header_line(self.settings)
        for step in self.steps:
            yield encoder.encode(step)

    def save(self, path: str | pathlib.Path) -> None:
        """Write the kept steps to a file, compressed if its name ends in ".gz"."""
        with _open_for_writing(path) as file:
            file.writelines(self.lines())

    @classmethod
    def load(cls, path: str | pathlib.Path, partial: bool = False) -> Trace:
        """Read a trace, compressed or not.

        Args:
            partial: of a file that was cut off, take the whole steps.

        Raises:
            TraceError: the file is not a trace, is of another version, was cut off, or a line is damaged; says which.
            OSError: there is no such file.
        """
        header, *lines = read_lines(path, partial)
        trace = cls(settings=parse_header(header, path))
        decoder = TraceDecoder(trace.settings)
        with _without_garbage_collection():  # which would walk over a million objects that all stay
            trace.steps = list(_read_each(path, lines, decoder.decode))
        return trace

    def to_perfetto(self, path: str | pathlib.Path) -> None:
        """Write the trace as Chrome trace events, which ui.perfetto.dev opens; see `nanovllm.trace.perfetto`."""
        from nanovllm.trace.perfetto import write_events

        write_events(self, path)


def read_lines(path: str | pathlib.Path, partial: bool = False) -> list[bytes]:
    """The lines of a trace, its header first, each without its end. Only the header is looked at.

    Args:
        partial: leave out a last line that was cut off.

    Raises:
        TraceError: not a trace, of another version, or cut off in the middle of a line.
        OSError: there is no such file.
    """
    data = pathlib.Path(path).read_bytes()
    compressed_whole = True
    if data.startswith(GZIP_MAGIC):
        decompressor = zlib.decompressobj(wbits=31)
        try:
            data = decompressor.decompress(data)
        except zlib.error as error:
            raise TraceError(f"{path} is damaged: {error}") from error
        compressed_whole = decompressor.eof
    *lines, rest = data.split(b"\n")
    if rest.endswith(b"}"):  # only the end of the line is missing
        lines, rest = [*lines, rest], b""
    parse_header(lines[0] if lines else rest, path)
    if (rest or not compressed_whole) and not partial:
        raise TraceError(
            f"{path}, line {len(lines) + 1}: the file was cut off after {len(lines) - 1} whole steps, as that of a server "
            "that was killed; to read those, say --partial or Trace.load(path, partial=True)"
        )
    return lines


def check_lines(path: str | pathlib.Path, partial: bool = False) -> tuple[dict[str, Any], list[bytes]]:
    """The settings and the further lines of a trace, for those who pass them on. Each line is looked at, so that whoever
    gets them finds nothing damaged; takes as long as `Trace.load`, and no memory for the records.

    Raises:
        TraceError: see `Trace.load`; or it does not say how large the pool is.
        OSError: there is no such file.
    """
    header, *lines = read_lines(path, partial)
    settings = parse_header(header, path)
    require_sizes(settings, path)
    for _ in _read_each(path, lines, TraceDecoder(settings).decode):
        pass
    return settings, lines


def _read_each(path: str | pathlib.Path, lines: list[bytes], read: Callable[[bytes], Result]) -> Iterator[Result]:
    for number, line in enumerate(lines, start=2):
        try:
            yield read(line)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: not a step record ({error})") from error


def _open_for_writing(path: str | pathlib.Path) -> IO[bytes]:
    if str(path).endswith(".gz"):
        return gzip.open(path, "wb", compresslevel=5)  # type: ignore[return-value]
    return open(path, "wb")


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
