"""Step records as lines of JSON: the same in a file, in the stream of a running server, and in the
notebook's player.

The first line names the format: `{"nanovllm_trace": 2, "settings": {...}}`. Each further line is
one step: a `StepRecord` in which requests are numbers, and which contains only what is new. `named`
introduces requests as (number, request id, prompt length). A missing field has its default or, if
`SAME_AS_BEFORE` lists it, the value of the line before. A line with a snapshot repeats everything
that a reader needs to start there.

A share is [number, start, num_tokens, new block ids, sampled ids], and the number of drafts if
there are any; or, for a decode step's single token without a new block, [number, start, sampled
id]."""

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from nanovllm.data.errors import UsageError
from nanovllm.data.json import JsonObject
from nanovllm.data.trace_settings import MAX_SIZE, TraceSettings
from nanovllm.trace.record import StepRecord, TracedRequest

FORMAT_VERSION = 2
# With their values before the first line; the header may say other `SIZES`.
SAME_AS_BEFORE: dict[str, object] = {
    "waiting": [],
    "running": [],
    "swapped": [],
    "held": {},
    "num_free_blocks": 0,
    "num_blocks": 0,
    "num_evictions": 0,
    "token_budget": 0,
}
ALWAYS = ("step", "start")
IDS = ("arrived", "resumed", "waiting", "running", "swapped")  # numbers in a line
# A dict in a record, pairs in a line.
BY_ID = (
    "admitted",
    "preempted",
    "finished",
    "arrivals",
    "prefixes",
    "aborted",
    "prompts",
    "text",
    "tables",
    "num_tokens",
)
HIDDEN_TOKEN = -1
FIELDS = tuple(StepRecord.__dataclass_fields__)
MIN_KNOWN = 64  # requests that an encoder remembers at least
SIZES = ("block_size", "num_blocks", "token_budget")  # of the settings
EXAMPLE = f'{{"nanovllm_trace": {FORMAT_VERSION}, ...}}'


class TraceError(UsageError):
    """A file is not a trace of this format, or is damaged; the message says where, and what to
    do."""


class Header(msgspec.Struct):
    """The first line, whose settings are decoded once the version is known."""

    nanovllm_trace: int
    settings: msgspec.Raw = msgspec.Raw(b"{}")


def header_line(settings: TraceSettings) -> bytes:
    """The first line of a trace, with its end."""
    encoded = msgspec.Raw(msgspec.json.encode(settings))
    return msgspec.json.encode(Header(FORMAT_VERSION, encoded)) + b"\n"


def parse_header(line: bytes, source: object) -> TraceSettings:
    """The settings in the first line of a trace.

    Args:
        source: the file, for messages.

    Raises:
        TraceError: no trace, or one of another version.
    """
    foreign = f"{source} is not a nanovllm trace: its first line is not {EXAMPLE}"
    try:
        header = msgspec.json.decode(line, type=Header)
    except ValueError as error:
        raise TraceError(foreign) from error
    version = header.nanovllm_trace
    if version != FORMAT_VERSION:
        raise TraceError(
            f"{source} has version {version}, but this nanovllm reads version {FORMAT_VERSION}: "
            "record it again"
        )
    try:
        return msgspec.json.decode(header.settings, type=TraceSettings)
    except msgspec.ValidationError as error:
        for name in SIZES:
            if str(error).endswith(f"`$.{name}`"):
                raise TraceError(
                    f"{source}: its {name} must be an integer from 1 to {MAX_SIZE} ({error})"
                ) from error
        raise TraceError(f"{foreign} ({error})") from error


def require_sizes(settings: TraceSettings, source: object) -> None:
    """Check that a trace can be drawn.

    Raises:
        TraceError: its header does not say how large the pool is.
    """
    sizes = {"block_size": settings.block_size, "num_blocks": settings.num_blocks}
    for name, size in sizes.items():
        if size == 0:
            raise TraceError(f"{source} cannot be drawn: its first line does not say {name}")


class TraceEncoder:
    """Writes records as lines. What it remembers is bounded by the number of requests that have not
    ended.

    Args:
        settings: those of the header, which hold the first line's pool size and token budget.
        hide_tokens: write -1 for every sampled id.

    Attributes:
        known: by request id, its number and the length of its prompt.
    """

    def __init__(self, settings: TraceSettings, hide_tokens: bool = False) -> None:
        self.hide_tokens = hide_tokens
        self._encoder = msgspec.json.Encoder()
        self.known: dict[str, tuple[int, int]] = {}
        self._numbers = itertools.count()
        self._before: dict[str, object] = msgspec.to_builtins(settings)
        self._named: list[tuple[int, str, int]] = []

    def encode(self, record: StepRecord) -> bytes:
        """The record's line, with its end."""
        self._named = []
        introduced = record.arrived
        if record.snapshot is not None:
            self.known = {}
            self._before = {}
            introduced = record.snapshot.prompt_lens | introduced
        for request_id, length in introduced.items():
            # A request gets a new number, even if an earlier one had its id.
            self._name(request_id, length)
        # In one order, whether the record was read or made.
        values = ((name, getattr(record, name)) for name in FIELDS)
        line = {
            name: self._written(name, value) for name, value in values if self._is_new(name, value)
        }
        if self._named:
            line["named"] = self._named
        queued = [*record.waiting, *record.running, *record.swapped]
        if len(self.known) > 2 * len(queued) + MIN_KNOWN:  # forget requests that have ended
            self.known = {request_id: self.known[request_id] for request_id in queued}
        return self._encoder.encode(line) + b"\n"

    def _is_new(self, name: str, value: object) -> bool:
        if name not in SAME_AS_BEFORE:
            return bool(value) or name in ALWAYS
        before = self._before.get(name)
        self._before[name] = value
        return value != before

    def _written(self, name: str, value: Any) -> object:
        """A field as it is in a line."""
        if name == "requests":
            return self._shares(value)
        if name == "snapshot":  # prompt lengths are in `named`
            return {
                key: self._written(key, part)
                for key, part in vars(value).items()
                if key != "prompt_lens"
            }
        if name in BY_ID:
            return [(self._number(request_id), part) for request_id, part in value.items()]
        return [self._number(request_id) for request_id in value] if name in IDS else value

    def _name(self, request_id: str, length: int) -> int:
        number = next(self._numbers)
        self._named.append((number, request_id, length))
        self.known[request_id] = (number, length)
        return number

    def _number(self, request_id: str) -> int:
        return self.known[request_id][0] if request_id in self.known else self._name(request_id, 0)

    def _shares(self, shares: Iterable[TracedRequest]) -> list[list[int | list[int]]]:
        known = self.known
        hide_tokens = self.hide_tokens
        written: list[list[int | list[int]]] = []
        for share in shares:  # hundreds in every step of a busy engine
            number, length = known.get(share.request_id, (0, -1))
            if length != share.num_prompt_tokens:
                number = self._name(share.request_id, share.num_prompt_tokens)
            sampled = [HIDDEN_TOKEN] * len(share.sampled) if hide_tokens else share.sampled
            if share.num_tokens == 1 and len(sampled) == 1 and not share.new_block_ids:
                written.append([number, share.start, sampled[0]])
            else:
                drafts = [share.num_drafts] if share.num_drafts else []
                written.append(
                    [number, share.start, share.num_tokens, share.new_block_ids, sampled, *drafts]
                )
        return written


class TraceDecoder:
    """Reads lines, one after another, as records.

    Args:
        settings: those of the header.
    """

    def __init__(self, settings: TraceSettings) -> None:
        self._names: dict[int, tuple[str, int]] = {}  # number -> request id, prompt length
        self._before = SAME_AS_BEFORE | {
            "num_blocks": settings.num_blocks,
            "token_budget": settings.token_budget,
        }

    def decode(self, line: bytes) -> StepRecord:
        """The record of a line.

        Raises:
            ValueError: the line is not one of this format; says what is wrong with it.
        """
        try:
            return self._record(msgspec.json.decode(line, type=JsonObject))
        except KeyError as error:
            raise ValueError(f"request number {error} is unknown") from None
        except (TypeError, AttributeError) as error:  # a number in the place of a list, for example
            raise ValueError(str(error)) from None

    def _record(self, line: JsonObject) -> StepRecord:
        introduced = msgspec.convert(line.pop("named", []), list[tuple[int, str, int]])
        named = {number: (request_id, length) for number, request_id, length in introduced}
        self._names |= named
        fields = {name: self._read(name, value) for name, value in line.items()}
        record = msgspec.convert(
            {"duration": 0.0, "token_budget": 0, "requests": []} | fields, StepRecord
        )
        for name in SAME_AS_BEFORE:
            if name in fields:
                self._before[name] = getattr(record, name)
            setattr(record, name, self._before[name])
        if record.snapshot is not None:
            queued = {*record.waiting, *record.running, *record.swapped}
            record.snapshot.prompt_lens = {
                key: length for key, length in named.values() if key in queued
            }
        return record

    def _read(self, name: str, value: Any) -> object:
        """A field as it is in a record."""
        if name == "requests":
            return [
                self._share(share) for share in msgspec.convert(value, list[list[int | list[int]]])
            ]
        if name == "snapshot":
            return {key: self._read(key, part) for key, part in value.items()}
        if name == "arrived":
            return dict(self._names[number] for number in value)
        if name in BY_ID:
            return {self._names[number][0]: part for number, part in value}
        return [self._names[number][0] for number in value] if name in IDS else value

    def _share(self, share: list[int | list[int]]) -> TracedRequest:
        whole = share
        match share:
            case [number, start, int(token)]:
                whole = [number, start, 1, [], [token], 0]
            case [_, _, _, _, _]:
                whole = [*share, 0]
        match whole:
            case [
                int(number),
                int(start),
                int(num_tokens),
                list(new_block_ids),
                list(sampled),
                int(num_drafts),
            ]:
                request_id, length = self._names[number]
                return TracedRequest(
                    request_id=request_id,
                    start=start,
                    num_tokens=num_tokens,
                    num_prompt_tokens=length,
                    new_block_ids=new_block_ids,
                    sampled=sampled,
                    num_drafts=num_drafts,
                )
            case _:
                raise ValueError(f"not a share: {share}")
