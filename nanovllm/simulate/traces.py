"""Reads workloads from files: public traces, traces of `nanovllm serve`, and results of `vllm bench
serve`. Each is recognised by its content; the rows are read while they are needed."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, convert
from msgspec.structs import replace

from nanovllm.data.disk import GZIP_MAGIC
from nanovllm.data.errors import UsageError
from nanovllm.simulate.workload import (
    MAX_SECONDS,
    SECOND,
    Length,
    OutputLength,
    Workload,
    WorkloadRequest,
)

FORMATS = (
    "name a file with Mooncake JSON lines (timestamp, input_length, output_length, hash_ids), Azure"
    " CSV (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT CSV (Timestamp, Request tokens, "
    "Response tokens), or one from nanovllm serve --trace or vllm bench serve --save-detailed"
)
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
# Bytes of a line. A result of `vllm bench serve` is a single line of JSON.
MAX_JSON = 2**30
MAX_LINE = 2**20
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BOM = b"\xef\xbb\xbf"
MOONCAKE_BLOCK_SIZE = 512
# Columns of time and lengths in CSV files of Azure (AzurePublicDataset) and BurstGPT (arXiv
# 2401.17644).
CSV_COLUMNS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    ("Timestamp", "Request tokens", "Response tokens"),
)
T = TypeVar("T")


class MooncakeRow(msgspec.Struct, gc=False):
    """A line of a trace of Mooncake's (FAST'25): times in ms, a number for each 512 tokens."""

    timestamp: Annotated[float, Meta(ge=0, le=1000 * MAX_SECONDS)]
    input_length: Length
    output_length: OutputLength
    hash_ids: list[Annotated[int, Meta(ge=0)]] = []


class BenchResult(msgspec.Struct):
    """A result of `vllm bench serve`: an entry per request, in which times are in seconds."""

    start_times: list[Seconds]
    input_lens: list[Length]
    output_lens: list[OutputLength]


def read_workload(path: str | Path, speedup: float = 1.0, limit: int | None = None) -> Workload:
    """Read the requests of a file. The first one arrives at 0. Requests without output tokens,
    which have failed, are skipped.

    Args:
        path: plain, or compressed with gzip.
        speedup: divides all times.
        limit: read this many rows.

    Raises:
        UsageError: no such file, or none of these formats. While requests are read: a damaged row,
            or one that is earlier than the one before; the message has its row and column.
    """
    lines = _lines(path)
    first = next(lines, b"").removeprefix(BOM)
    keys = _keys(first)
    whole = itertools.chain([first], lines)
    block_size = MOONCAKE_BLOCK_SIZE
    recorded = None
    if not first:
        raise UsageError(f"{path} is empty: {FORMATS}")
    if "nanovllm_trace" in keys:
        # Here, since other files do not need them.
        from nanovllm.simulate.recorded import traced_workload
        from nanovllm.trace.trace import read_trace

        recorded, _, records = read_trace(path, data=b"".join(whole))
        block_size = recorded.block_size or block_size
        requests = traced_workload(records, block_size)
    elif "request_throughput" in keys or first.strip() == b"{":
        requests = _bench_requests(path, b"".join(whole))
    elif "input_length" in keys or (first.startswith(b"{") and not keys):
        decode = msgspec.json.Decoder(MooncakeRow).decode
        rows = ((number, line) for number, line in enumerate(whole, start=1) if line.strip())
        requests = _requests(path, rows, lambda number, line: _mooncake(number, decode(line)))
    else:
        requests = _csv_requests(path, whole)
    return Workload(
        requests=_scaled(path, itertools.islice(requests, limit), speedup),
        prefix_block_size=block_size,
        names_outputs=recorded is not None,
        recorded=recorded,
    )


def _lines(path: str | Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            is_compressed = file.peek(2)[:2] == GZIP_MAGIC
            # A buffer above finds lines faster than `GzipFile` does.
            lines = io.BufferedReader(gzip.GzipFile(fileobj=file)) if is_compressed else file
            most = MAX_JSON if b"{" in lines.peek(len(BOM) + 1)[: len(BOM) + 1] else MAX_LINE
            for number, line in enumerate(iter(lambda: lines.readline(most), b""), start=1):
                if len(line) == most:
                    raise UsageError(f"{path}, row {number} has {most:,} bytes or more: {FORMATS}")
                yield line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: name a file") from error


def _keys(line: bytes) -> set[str]:
    """The keys of a line that is a JSON object; else none."""
    try:
        return set(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except (ValueError, RecursionError):
        return set()


def _mistake(path: str | Path, number: int | None, error: Exception) -> UsageError:
    """An error of msgspec's, which ends with its place, as a line for the user.

    Args:
        number: of the row; None: the place is an index of a list.
    """
    text, _, place = str(error).replace("`", "").partition(" - at $.")
    column, _, index = place.partition("[")
    row = str(number) if number is not None else index.rstrip("]")
    where = [f"{path}", f"row {row}" * bool(row), f"column {column}" * bool(column)]
    return UsageError(f"{', '.join(filter(None, where))}: {text}")


def _requests(
    path: str | Path, rows: Iterable[tuple[int, T]], read: Callable[[int, T], WorkloadRequest]
) -> Iterator[WorkloadRequest]:
    """The requests of numbered rows, none of which may be earlier than the one before."""
    before = 0
    for number, row in rows:
        try:
            request = read(number, row)
            if request.arrival < before:
                raise ValueError("earlier than the row before: sort the rows by time")
        except (ValueError, RecursionError) as error:
            raise _mistake(path, number, error) from error
        before = request.arrival
        yield request


def _mooncake(number: int, row: MooncakeRow) -> WorkloadRequest:
    num_blocks = -(-row.input_length // MOONCAKE_BLOCK_SIZE)
    if row.hash_ids and len(row.hash_ids) != num_blocks:
        raise ValueError(f"Expected {num_blocks} numbers, got {len(row.hash_ids)} - at $.hash_ids")
    # The sum is computed in less time than the maximum, and no number is above it.
    if sum(row.hash_ids) >= 2**64 <= max(row.hash_ids):
        raise ValueError("Expected numbers below 2**64 - at $.hash_ids")
    return WorkloadRequest(
        request_id=str(number),
        arrival=round(row.timestamp * (SECOND // 1000)),
        num_prompt_tokens=row.input_length,
        num_output_tokens=row.output_length,
        prefix_ids=row.hash_ids,
    )


def _csv_requests(path: str | Path, lines: Iterable[bytes]) -> Iterator[WorkloadRequest]:
    # A character that is not UTF-8 is shown as such in the message about its cell.
    table = csv.reader(line.decode(errors="replace") for line in lines)
    try:
        header = [name.strip() for name in next(table)]
    except csv.Error as error:
        raise UsageError(f"{path} is no workload ({error}): {FORMATS}") from error
    columns = next((known for known in CSV_COLUMNS if {*known} <= {*header}), None)
    if columns is None:
        raise UsageError(f"{path} is no workload: {FORMATS}")
    indices = [header.index(column) for column in columns]

    def read(number: int, cells: list[str]) -> WorkloadRequest:
        if len(cells) != len(header):
            raise ValueError(f"Expected {len(header)} columns, got {len(cells)}")
        values = []
        for index, kind in zip(indices, (None, Length, OutputLength), strict=True):
            text = cells[index].strip()
            try:
                values.append(convert(text, kind, strict=False) if kind else _clock(text))
            except ValueError as error:
                place = f"{cells[index]!r} - at $.{header[index]}"
                raise ValueError(f"{error}, got {place}") from error
        arrival, num_prompt_tokens, num_output_tokens = values
        return WorkloadRequest(
            request_id=str(number),
            arrival=arrival,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
        )

    rows = ((table.line_num, cells) for cells in table if cells)
    try:
        yield from _requests(path, rows, read)
    except csv.Error as error:
        raise _mistake(path, table.line_num, error) from error


def _clock(text: str) -> int:
    """Picoseconds since any time, of a date or of a number of seconds."""
    # `datetime` alone would cut off the seventh digit of the seconds.
    date = re.fullmatch(r"(\d+-\d+-\d+ [\d:]+)(?:\.(\d{1,12}))?([+-][\d:]+)?", text)
    if date is None:
        return round(convert(text, Seconds, strict=False) * SECOND)
    elapsed = datetime.fromisoformat(date[1] + (date[3] or "+00:00")) - EPOCH
    return elapsed // timedelta(seconds=1) * SECOND + int((date[2] or "").ljust(12, "0"))


def _bench_requests(path: str | Path, text: bytes) -> Iterator[WorkloadRequest]:
    """The requests of a result of `vllm bench serve`, in the order of their starts."""
    try:
        result = msgspec.json.decode(text, type=BenchResult)
        sizes = {name: len(column) for name, column in msgspec.structs.asdict(result).items()}
        longest = max(sizes, key=lambda name: sizes[name])
        shortest = min(sizes, key=lambda name: sizes[name])
        if sizes[shortest] < sizes[longest]:
            raise ValueError(
                f"missing, although {longest} has {sizes[longest]} entries: each request has one "
                f"in every list - at $.{shortest}[{sizes[shortest]}]"
            )
        rows = sorted(zip(result.start_times, result.input_lens, result.output_lens, strict=True))
    except (ValueError, RecursionError) as error:
        if "required field" in str(error):
            error = ValueError(f"{error}: record it with --save-detailed")
        raise _mistake(path, None, error) from error
    for number, (start, num_prompt_tokens, num_output_tokens) in enumerate(rows, start=1):
        yield WorkloadRequest(
            request_id=str(number),
            arrival=round(start * SECOND),
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
        )


def _scaled(
    path: str | Path, requests: Iterable[WorkloadRequest], speedup: float
) -> Iterator[WorkloadRequest]:
    """Requests with output, from time 0, at `speedup` times their speed."""
    begin = None
    for request in requests:
        if request.num_output_tokens == 0:
            continue
        if begin is None:
            begin = request.arrival
        abort = request.abort
        if begin or speedup != 1:
            request = replace(
                request,
                arrival=round((request.arrival - begin) / speedup),
                abort=None if abort is None else round((abort - begin) / speedup),
            )
        yield request
    if begin is None:
        raise UsageError(f"{path} has no request with output tokens: {FORMATS}")
