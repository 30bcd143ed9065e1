"""The data behind the pictures: spans and events of requests, and the state of the pool after each
step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from nanovllm.lab.viz.metrics import StepScale, step_edges
from nanovllm.trace.trace import StepRecord, Trace

if TYPE_CHECKING:
    from nanovllm.core.block_pool import BlockPool


@dataclass
class Span:
    """What one request did from `begin` to `end`, in units of the x axis.

    Attributes:
        kind: "waiting", "stalled", "swapped", "cached", "prefill" or "decode". A "cached" span
            covers the same time as the first prefill span after an admission, since tokens from the
            cache take no time.
        first_step, last_step: steps that the span covers, both included.
        start, num_tokens: position of its first token and how many there are; 0 for kinds without
            tokens.
    """

    request_id: str
    kind: str
    begin: float
    end: float
    first_step: int
    last_step: int
    start: int = 0
    num_tokens: int = 0


@dataclass
class Event:
    """Something that happened to a request at `at`, in units of the x axis: "first token",
    "preempted", "finished" or "aborted"; `detail` is the mode of preemption or the finish reason.
    """

    request_id: str
    kind: str
    at: float
    step: int
    detail: str = ""


def request_ids(*traces: Trace) -> list[str]:
    """Ids of all requests in order of appearance."""
    found: dict[str, None] = {}
    for trace in traces:
        for step in trace:
            found |= dict.fromkeys(step.arrived)
            found |= dict.fromkeys(r.request_id for r in step.requests)
    return list(found)


def timeline_spans(trace: Trace, x: StepScale = "step", merge: bool = True) -> list[Span]:
    """Return what each request did when, in order of time.

    Args:
        x: see `step_edges`.
        merge: join equal kinds of adjacent steps into one span. Otherwise there is one span per
            step.
    """
    spans: list[Span] = []
    last: dict[str, Span] = {}  # the newest span of each request, cached ones left out
    for step, (begin, end) in zip(trace, step_edges(trace, x), strict=True):
        for span in _step_spans(step, begin, end):
            if span.kind == "cached":
                spans.append(span)
                continue
            previous = last.get(span.request_id)
            joins = merge and previous and previous.kind == span.kind and previous.end == begin
            if previous and joins and previous.first_step <= step.step:
                previous.end = end
                previous.last_step = step.step
                previous.num_tokens += span.num_tokens
            else:
                spans.append(span)
                last[span.request_id] = span
    return spans


def _step_spans(step: StepRecord, begin: float, end: float) -> Iterator[Span]:
    def span(request_id: str, kind: str, start: int = 0, num_tokens: int = 0) -> Span:
        return Span(
            request_id=request_id,
            kind=kind,
            begin=begin,
            end=end,
            first_step=step.step,
            last_step=step.step,
            start=start,
            num_tokens=num_tokens,
        )

    for share in step.requests:
        if cached := step.admitted.get(share.request_id, 0):
            yield span(share.request_id, "cached", 0, cached)
        yield span(share.request_id, share.kind, share.start, share.num_tokens)
    busy = {share.request_id for share in step.requests}
    for kind, queue in (
        ("waiting", step.waiting),
        ("swapped", step.swapped),
        ("stalled", step.running),
    ):
        yield from (span(request_id, kind) for request_id in queue if request_id not in busy)


def timeline_events(trace: Trace, x: StepScale = "step") -> list[Event]:
    """Return first tokens and ends (at the end of their step), preemptions and ends between two
    steps (at its beginning), in order of time. A stop string finishes a request between steps."""
    events: list[Event] = []
    ended: set[str] = set()
    for step, (begin, end) in zip(trace, step_edges(trace, x), strict=True):
        ended -= step.arrived.keys()
        for request_id, mode in step.preempted.items():
            events.append(Event(request_id, "preempted", begin, step.step, mode))
        for share in step.requests:
            if share.samples_first_token:
                events.append(Event(share.request_id, "first token", end, step.step))
        busy = {share.request_id for share in step.requests}
        for request_id, reason in step.finished.items():
            if request_id in ended:
                continue  # repeated for readers that joined in between
            if request_id in busy:
                events.append(Event(request_id, "finished", end, step.step, reason))
            else:  # ended between the last step and this one
                kind = "finished" if reason == "stop" else "aborted"
                events.append(Event(request_id, kind, begin, step.step, reason))
        ended |= step.finished.keys()
    return events


@dataclass
class PoolState:
    """The pool at one moment.

    Attributes:
        num_blocks, block_size: size of the pool and of a block.
        tables: request id to the ids of its blocks, in order.
        num_tokens: request id to the tokens written so far, which fill its blocks from the first
            on; a request that is missing fills all of its blocks.
        cached: blocks whose content can be found by its hash.
        held: tables that KV transfers hold, see `StepRecord`; these blocks belong to no request
            that computes.
        ref_counts: holders of each block, if not simply the number of tables that hold it.
        appeared: ids of all requests so far in order of appearance, which gives them their colours.
    """

    num_blocks: int
    block_size: int
    tables: dict[str, list[int]] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)
    ref_counts: list[int] = field(default_factory=list)
    appeared: list[str] = field(default_factory=list)
    held: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ref_counts:
            counts = Counter(itertools.chain(*self.tables.values(), *self.held.values()))
            self.ref_counts = [counts[block_id] for block_id in range(self.num_blocks)]

    def holders(self, block_id: int) -> list[str]:
        """Requests whose table holds the block."""
        return [request_id for request_id, table in self.tables.items() if block_id in table]

    def filled(self, block_id: int) -> int:
        """Tokens written to the block: 0 to `block_size`."""
        if holders := self.holders(block_id):
            return max(
                self.filled_by(request_id, self.tables[request_id].index(block_id))
                for request_id in holders
            )
        return self.block_size if block_id in self.cached or self.ref_counts[block_id] else 0

    def filled_by(self, request_id: str, index: int) -> int:
        """Tokens that the request has written to its `index`-th block."""
        everything = len(self.tables[request_id]) * self.block_size
        written = self.num_tokens.get(request_id, everything)
        return max(0, min(self.block_size, written - index * self.block_size))

    def emptied(self, keeps_content: bool) -> PoolState:
        """The pool once all requests have ended; if it keeps content, their full blocks can still
        be found."""
        cached = set(self.cached)
        for request_id, table in self.tables.items():
            written = self.num_tokens.get(request_id, len(table) * self.block_size)
            cached.update(table[: written // self.block_size] if keeps_content else [])
        return PoolState(self.num_blocks, self.block_size, cached=cached, appeared=self.appeared)


@runtime_checkable
class Manager(Protocol):
    """A `KVCacheManager`, or that of a lecture."""

    pool: BlockPool
    tables: Mapping[str, Sequence[int]]
    block_size: int


def pool_state(
    source: BlockPool | Manager | PoolState | int,
    tables: Mapping[str, Sequence[int]] | None = None,
    num_tokens: Mapping[str, int] | None = None,
    block_size: int | None = None,
) -> PoolState:
    """The state of a pool, a manager, or a plain number of blocks.

    Args:
        source: a `BlockPool`, a `KVCacheManager`, a `PoolState` or the number of blocks.
        tables, num_tokens: as in `PoolState`, which has its own; a manager brings its own tables.
        block_size: tokens per block, 16 by default; a manager and a state bring their own.
    """
    if isinstance(source, PoolState):
        return source
    if isinstance(source, Manager):
        tables = source.tables if tables is None else tables
        block_size = source.block_size if block_size is None else block_size
        source = source.pool
    size = 16 if block_size is None else block_size
    own = {request_id: list(table) for request_id, table in (tables or {}).items()}
    known = dict(num_tokens or {})
    if isinstance(source, int):
        return PoolState(source, size, own, known)
    cached = set(source.cached_blocks.values())
    return PoolState(
        source.num_blocks, size, own, known, cached, ref_counts=list(source.ref_counts)
    )


def pool_state_at(trace: Trace, step: int) -> PoolState:
    """The pool right after the steps up to `step` (a step number) had been scheduled, rebuilt from
    a trace.

    A trace does not say which free blocks are still cached. Those count as cached that were full
    when they were freed and have not been allocated since."""
    replay = _PoolReplay(trace)
    for record in itertools.takewhile(lambda record: record.step <= step, trace):
        replay.apply(record)
    return replay.state()


def pool_states(trace: Trace) -> Iterator[PoolState]:
    """Yield the pool right after each record's step had been scheduled, one state per record; see
    `pool_state_at`."""
    replay = _PoolReplay(trace)
    for record in trace:
        replay.apply(record)
        yield replay.state()


class _PoolReplay:
    """Follows tables from record to record. A changed table is a new list, so that states can share
    the old one."""

    def __init__(self, trace: Trace) -> None:
        self.settings = trace.settings
        self.appeared = request_ids(trace)
        self.tables: dict[str, list[int]] = {}
        self.num_tokens: dict[str, int] = {}
        self.held: dict[str, list[int]] = {}
        # Blocks that were full when a request left them, and that no request has taken since.
        self.full: set[int] = set()
        # Requests that ended in an earlier record and may still hold their blocks.
        self.ended: set[str] = set()

    def state(self) -> PoolState:
        """A copy of the present state."""
        cached = self.full.difference(*self.tables.values(), *self.held.values())
        return PoolState(
            num_blocks=self.settings.num_blocks,
            block_size=self.settings.block_size,
            tables=dict(self.tables),
            num_tokens=dict(self.num_tokens),
            cached=cached,
            appeared=self.appeared,
            held=self.held,
        )

    def apply(self, record: StepRecord) -> None:
        """Go on to the state after the record's step had been scheduled."""
        computed = {share.request_id for share in record.requests}
        held = set(record.running)
        # A step can be scheduled before the results of the previous step are known: a request that
        # ended with those still holds its blocks, and may even be computed once more.
        over = [r for r in self.ended if r not in held or r in record.arrived]
        for request_id in [
            *over,
            *(r for r in record.finished if r not in computed),
            *record.preempted,
            *record.held,
        ]:
            self._release(request_id)
        self.ended.difference_update(over)
        self.held = record.held
        for share in record.requests:
            whole = share.request_id in record.admitted or share.request_id in record.resumed
            before = [] if whole else self.tables.get(share.request_id, [])
            self.tables[share.request_id] = before + share.new_block_ids
            self.full.difference_update(share.new_block_ids)
            if share.request_id not in self.ended:
                self.num_tokens[share.request_id] = share.start + share.num_tokens
        if (snapshot := record.snapshot) is not None:
            self.tables = dict(snapshot.tables)
            self.num_tokens = dict(snapshot.num_tokens)
            self.full = set(snapshot.cached)
            self.ended &= self.tables.keys()
        for share in (
            each
            for each in record.requests
            if each.num_drafts and each.request_id not in self.ended
        ):
            # Rejected ones do not count.
            self.num_tokens[share.request_id] -= share.num_drafts - share.num_accepted
        self.ended.update(r for r in record.finished if r in self.tables)

    def _release(self, request_id: str) -> None:
        table = self.tables.pop(request_id, [])
        written = self.num_tokens.pop(request_id, 0)
        if self.settings.enable_prefix_caching is not False:
            self.full.update(table[: written // self.settings.block_size])
