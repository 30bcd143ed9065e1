"""Step records as lines of JSON: the same in a file, in the stream of a running server, and in the notebook's player.

The first line names the format: `{"nanovllm_trace": 2, "settings": {...}}`. Each further line is one step, and contains only what
is new. `named` introduces a request's id and number; later lines contain the number alone. A missing field has its default or, if
`SAME_AS_BEFORE` lists it, the value of the line before. A line with a snapshot repeats everything that a reader needs to start
there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from nanovllm.data.flags import UsageError
from nanovllm.trace.record import Snapshot, StepRecord, TracedRequest

FORMAT_VERSION = 2
SAME_AS_BEFORE = (
    "waiting", "running", "swapped", "held", "num_free_blocks", "num_blocks", "num_evictions", "token_budget"
)  # fmt: skip
PLAIN = ("step", "start", "duration", "swap_out", "swap_in", "blocked_by")  # the same in a line as in a record
BY_REQUEST = ("admitted", "preempted", "finished", "prompts", "text")  # a dict in a record, pairs in a line
HIDDEN_TOKEN = -1
MIN_KNOWN = 64  # requests that an encoder remembers at least
SIZES = ("block_size", "num_blocks", "token_budget")  # of the settings
_encoder = msgspec.json.Encoder()
EXAMPLE = f'{{"nanovllm_trace": {FORMAT_VERSION}, ...}}'


class TraceError(UsageError):
    """A file is not a trace of this format, or is damaged; the message says where, and what to do."""


class Header(msgspec.Struct):
    """The first line."""

    nanovllm_trace: int
    settings: dict[str, Any] = {}


class SnapshotLine(msgspec.Struct):
    """`Snapshot` with numbers for ids. Prompt lengths are in the line's `named`."""

    tables: list[tuple[int, list[int]]]
    num_tokens: list[tuple[int, int]]
    cached: list[int]


class StepLine(msgspec.Struct, omit_defaults=True):
    """`StepRecord` as it is written: requests are numbers, and `named` introduces (number, request id, prompt length).

    A share is [number, start, num_tokens, new block ids, sampled ids] or, for a decode step's single token without a new block,
    [number, start, sampled id].
    """

    step: int
    start: float
    duration: float = 0.0
    named: list[tuple[int, str, int]] = []
    arrived: list[int] = []
    requests: list[list[int | list[int]]] = []
    admitted: list[tuple[int, int]] = []
    resumed: list[int] = []
    preempted: list[tuple[int, str]] = []
    finished: list[tuple[int, str]] = []
    swap_out: list[tuple[int, int]] = []
    swap_in: list[tuple[int, int]] = []
    blocked_by: str = ""
    waiting: list[int] | None = None
    running: list[int] | None = None
    swapped: list[int] | None = None
    held: dict[str, list[int]] | None = None
    num_free_blocks: int | None = None
    num_blocks: int | None = None
    num_evictions: int | None = None
    token_budget: int | None = None
    snapshot: SnapshotLine | None = None
    prompts: list[tuple[int, str]] = []
    text: list[tuple[int, str]] = []


def header_line(settings: Mapping[str, Any]) -> bytes:
    """The first line of a trace, with its end."""
    return write(Header(FORMAT_VERSION, dict(settings)))


def parse_header(line: bytes, source: object) -> dict[str, Any]:
    """The settings in the first line of a trace.

    Args:
        source: the file, for messages.

    Raises:
        TraceError: no trace, or one of another version.
    """
    try:
        header = msgspec.json.decode(line, type=Header)
    except ValueError as error:
        raise TraceError(f"{source} is not a nanovllm trace: its first line is not {EXAMPLE}") from error
    version, settings = header.nanovllm_trace, header.settings
    if version != FORMAT_VERSION:
        raise TraceError(
            f"{source} is of version {version}, and this nanovllm reads version {FORMAT_VERSION}: record it again"
        )
    for name in SIZES:
        value = settings.get(name, 1)
        if type(value) is not int or value < 1:
            raise TraceError(f"{source}: its {name} must be an integer of at least 1, got {value!r}")
    return settings


def write(line: Header | StepLine) -> bytes:
    """A line as it is in the file, with its end."""
    return _encoder.encode(line) + b"\n"


def require_sizes(settings: Mapping[str, Any], source: object) -> None:
    """Check that a trace can be drawn.

    Raises:
        TraceError: its header does not say how large the pool is.
    """
    for name in ("block_size", "num_blocks"):
        if name not in settings:
            raise TraceError(f"{source} cannot be drawn: its first line does not say {name}")


class TraceEncoder:
    """Writes records as lines. What it remembers is bounded by the number of requests that have not ended.

    Args:
        settings: those of the header, which hold the first line's pool size and token budget.
        hide_tokens: write -1 for every sampled id.
    """

    def __init__(self, settings: Mapping[str, Any], hide_tokens: bool = False) -> None:
        self.hide_tokens = hide_tokens
        self._known: dict[str, tuple[int, int]] = {}  # request id -> number, prompt length
        self._numbers = itertools.count()
        self._before: dict[str, Any] = {"waiting": [], "running": [], "swapped": [], "held": {}} | {
            name: settings.get(name) for name in ("num_blocks", "token_budget")
        }
        self._named: list[tuple[int, str, int]] = []

    def encode(self, record: StepRecord) -> bytes:
        """The record's line, with its end."""
        return write(self.line(record))

    def line(self, record: StepRecord) -> StepLine:
        """The record's line, to which texts may be added."""
        snapshot, introduced = record.snapshot, record.arrived
        self._named = []
        if snapshot is not None:
            self._known, introduced = {}, snapshot.prompt_lens | introduced
        for request_id, length in introduced.items():
            self._name(request_id, length)  # with a new number, even if an earlier request had this id
        fields: dict[str, Any] = {name: getattr(record, name) for name in PLAIN}
        fields |= {name: self.pairs(getattr(record, name)) for name in BY_REQUEST}
        line = StepLine(
            **fields,
            arrived=self._numbers_of(record.arrived),
            resumed=self._numbers_of(record.resumed),
            requests=self._shares(record.requests),
        )
        for name in SAME_AS_BEFORE:
            value = getattr(record, name)
            if snapshot is not None or value != self._before.get(name):
                self._before[name] = value
                setattr(line, name, self._numbers_of(value) if isinstance(value, list) else value)
        if snapshot is not None:
            tables, num_tokens = self.pairs(snapshot.tables), self.pairs(snapshot.num_tokens)
            line.snapshot = SnapshotLine(tables, num_tokens, snapshot.cached)
        line.named = self._named
        queued = [*record.waiting, *record.running, *record.swapped]
        if len(self._known) > 2 * len(queued) + MIN_KNOWN:  # forget requests that have ended
            self._known = {request_id: self._known[request_id] for request_id in queued}
        return line

    def _name(self, request_id: str, length: int) -> int:
        number = next(self._numbers)
        self._named.append((number, request_id, length))
        self._known[request_id] = (number, length)
        return number

    def _number(self, request_id: str) -> int:
        return self._known[request_id][0] if request_id in self._known else self._name(request_id, 0)

    def _numbers_of(self, request_ids: Iterable[str]) -> list[int]:
        return [self._number(request_id) for request_id in request_ids]

    def pairs(self, by_request: Mapping[str, Any]) -> list[tuple[int, Any]]:
        """By the requests' numbers."""
        return [(self._number(request_id), value) for request_id, value in by_request.items()]

    def _shares(self, shares: Iterable[TracedRequest]) -> list[list[int | list[int]]]:
        known, hide_tokens = self._known, self.hide_tokens
        written: list[list[int | list[int]]] = []
        for share in shares:  # hundreds in every step of a busy engine
            number, length = known.get(share.request_id, (0, -1))
            if length != share.num_prompt_tokens:
                number = self._name(share.request_id, share.num_prompt_tokens)
            sampled = [HIDDEN_TOKEN] * len(share.sampled) if hide_tokens else share.sampled
            if share.num_tokens == 1 and len(sampled) == 1 and not share.new_block_ids:
                written.append([number, share.start, sampled[0]])
            else:
                written.append([number, share.start, share.num_tokens, share.new_block_ids, sampled])
        return written


class TraceDecoder:
    """Reads lines, one after another, as records.

    Args:
        settings: those of the header.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._decoder = msgspec.json.Decoder(StepLine)
        self._names: dict[int, tuple[str, int]] = {}  # number -> request id, prompt length
        self._before: dict[str, Any] = {"waiting": [], "running": [], "swapped": [], "held": {}} | {
            name: settings.get(name, 0) for name in SAME_AS_BEFORE[4:]
        }

    def decode(self, line: bytes) -> StepRecord:
        """The record of a line.

        Raises:
            ValueError: the line is not one of this format; says what is wrong with it.
        """
        parsed = self._decoder.decode(line)
        try:
            return self._record(parsed)
        except KeyError as error:
            raise ValueError(f"request number {error} has not been named") from None

    def _record(self, line: StepLine) -> StepRecord:
        for number, request_id, length in line.named:
            self._names[number] = (request_id, length)
        for name in SAME_AS_BEFORE:
            if (value := getattr(line, name)) is not None:
                self._before[name] = self._ids(value) if isinstance(value, list) else value
        fields: dict[str, Any] = {name: getattr(line, name) for name in PLAIN}
        fields |= {name: self._by_id(getattr(line, name)) for name in BY_REQUEST}
        return StepRecord(
            **fields,
            arrived={self._names[number][0]: self._names[number][1] for number in line.arrived},
            resumed=self._ids(line.resumed),
            requests=[self._share(share) for share in line.requests],
            snapshot=self._snapshot(line),
            **self._before,
        )

    def _ids(self, numbers: Iterable[int]) -> list[str]:
        return [self._names[number][0] for number in numbers]

    def _by_id(self, pairs: Iterable[tuple[int, Any]]) -> dict[str, Any]:
        return {self._names[number][0]: value for number, value in pairs}

    def _share(self, share: list[Any]) -> TracedRequest:
        types = [type(entry) for entry in share]
        if types == [int, int, int]:
            number, start, token = share
            num_tokens, new_block_ids, sampled = 1, [], [token]
        elif types == [int, int, int, list, list]:
            number, start, num_tokens, new_block_ids, sampled = share
        else:
            raise ValueError(f"not a share: {share}")
        request_id, length = self._names[number]
        return TracedRequest(request_id, start, num_tokens, length, new_block_ids, sampled)

    def _snapshot(self, line: StepLine) -> Snapshot | None:
        if line.snapshot is None:
            return None
        queued = {*self._before["waiting"], *self._before["running"], *self._before["swapped"]}
        return Snapshot(
            self._by_id(line.snapshot.tables),
            self._by_id(line.snapshot.num_tokens),
            line.snapshot.cached,
            {request_id: length for _, request_id, length in line.named if request_id in queued},
        )
