"""A trace as a story about scheduling: who came, who got which share of the budget, who had to go, who waits for what."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nanovllm.lab.viz.animation.stage import several
from nanovllm.lab.viz.data import PoolState, pool_states, request_ids, share_kind
from nanovllm.trace.trace import StepRecord, Trace, TracedRequest

# How much a beat teaches; of the same kind, each further one teaches less.
_WEIGHTS = {
    "preempted": 10.0,
    "resumed": 8.0,
    "chunk": 7.0,
    "cached": 7.0,
    "kv blocks": 6.0,
    "again": 6.0,
    "max_num_seqs": 5.0,
    "admitted": 5.0,
    "arrived": 4.0,
    "aborted": 4.0,
    "max_num_batched_tokens": 3.0,
    "finished": 3.0,
    "decode": 2.0,
}
_SECONDS = {"preempted": 2.2, "resumed": 1.8, "chunk": 1.6, "cached": 1.6, "kv blocks": 1.6, "finished": 1.2}
_LEISURE = 0.7  # of an animation, at least, for what is worth reading
_QUICK = 0.3  # seconds: only a step more of what has been told before


@dataclass
class Queues:
    """Who stands where, in order."""

    waiting: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    swapped: list[str] = field(default_factory=list)

    def move(self, request_id: str, target: list[str] | None) -> None:
        """Take a request out of its queue and put it at the end of another, or of none."""
        for queue in (self.waiting, self.running, self.swapped):
            if request_id in queue:
                queue.remove(request_id)
        if target is not None:
            target.append(request_id)

    def copy(self) -> Queues:
        """Queues of their own."""
        return Queues(list(self.waiting), list(self.running), list(self.swapped))


@dataclass
class Beat:
    """One moment of a step's scheduling, and what is to be said about it.

    Attributes:
        record: the step it belongs to.
        topic: what kind of thing happens, a key of the captions' weights.
        caption: what happens, in words.
        num_shares: how many of the step's shares have been given out.
        queues, pool: as they are now.
        computed, known: tokens of each live request, this step's shares that have been given out included.
        lit: requests of which the caption speaks.
        weight: how much it teaches; what teaches least is passed over quickly.
        seconds: how long it takes to read.
    """

    record: StepRecord
    topic: str
    caption: str
    num_shares: int
    queues: Queues
    pool: PoolState
    computed: dict[str, int]
    known: dict[str, int]
    lit: list[str] = field(default_factory=list)
    weight: float = 0.0
    seconds: float = _QUICK


def short_names(trace: Trace) -> dict[str, str]:
    """What requests are called in pictures: their ids if all are short, else R1, R2, ... in order of appearance."""
    ids = request_ids(trace)
    # A trace that begins in the middle may name requests that only wait.
    queued = (
        request_id for step in trace for queue in (step.running, step.swapped, step.waiting) for request_id in queue
    )
    ids = list(dict.fromkeys([*ids, *queued]))
    if all(len(request_id) <= 3 for request_id in ids):
        return {request_id: request_id for request_id in ids}
    return {request_id: f"R{number}" for number, request_id in enumerate(ids, start=1)}


class _Teller:
    """Follows the steps and remembers what the records do not repeat: how much is known and computed of whom."""

    def __init__(self, trace: Trace) -> None:
        self.names = short_names(trace)
        self.caching = trace.settings.get("enable_prefix_caching", True)
        self.order = {request_id: i for i, request_id in enumerate(self.names)}
        self.queues = Queues()
        self.computed: dict[str, int] = {}
        self.known: dict[str, int] = {}
        self.prompt: dict[str, int] = {}
        self.blocked: tuple[str, str] = ("", "")
        self.pool = PoolState(trace.settings["num_blocks"], trace.settings["block_size"])

    def beats(self, record: StepRecord, after: PoolState) -> Iterator[Beat]:
        """The beats of one step, in the order in which the scheduler decides; `after` it, the pool is like this."""
        self._forget(record)
        yield from self._comings_and_goings(record)
        if record.preempted:
            yield self._preempted(record)
        self.pool = after
        yield from self._shares(record)
        self.queues = Queues(list(record.waiting), list(record.running), list(record.swapped))
        if record.blocked_by and record.blocked_by != "preemption":
            yield from self._blocked(record)
        done = [s.request_id for s in record.requests if s.request_id in record.finished and s.request_id in self.known]
        if done:
            yield self._ended(record, done, len(record.requests))
        for share in record.requests:
            if share.request_id in self.known:
                self.known[share.request_id] = self._known(share) + len(share.sampled)

    def _forget(self, record: StepRecord) -> None:
        """Drop those who are not there any more: whoever ended while the next step was already planned was in that one."""
        there = {*record.finished, *record.running, *record.waiting, *record.swapped}
        for request_id in [r for r in self.known if r not in there]:
            self.queues.move(request_id, None)
            del self.known[request_id]
            self.computed.pop(request_id, None)

    def _beat(self, record: StepRecord, topic: str, caption: str, num_shares: int, lit: Collection[str] = ()) -> Beat:
        books = dict(self.computed), dict(self.known)
        return Beat(record, topic, caption, num_shares, self.queues.copy(), self.pool, *books, list(lit))

    def _several(self, request_ids: Collection[str]) -> str:
        return several([self.names[r] for r in request_ids], 5)

    def _comings_and_goings(self, record: StepRecord) -> Iterator[Beat]:
        """Requests that ended between the steps, and those that came."""
        busy = {share.request_id for share in record.requests}
        gone = [r for r in record.finished if r not in busy and r in self.order]
        if gone:
            yield self._ended(record, gone, 0)
        for request_id, length in record.arrived.items():
            self.queues.move(request_id, self.queues.waiting)
            self.known[request_id] = self.prompt[request_id] = length
            self.computed[request_id] = 0
        arrived = list(record.arrived)
        if len(arrived) == 1:
            text = f"{self.names[arrived[0]]} arrives with a prompt of {record.arrived[arrived[0]]} tokens and gets in line."
            yield self._beat(record, "arrived", text, 0, arrived)
        elif arrived:
            lengths = several(list(record.arrived.values()), 5)
            text = f"{self._several(arrived)} arrive, with prompts of {lengths} tokens."
            yield self._beat(record, "arrived", text, 0, arrived)

    def _ended(self, record: StepRecord, gone: list[str], num_shares: int) -> Beat:
        aborted = [r for r in gone if record.finished[r] not in ("stop", "length")]
        blocks = {b for r in gone for b in self.pool.tables.get(r, [])}
        tables = {r: table for r, table in self.pool.tables.items() if r not in gone}
        freed = blocks - {b for table in tables.values() for b in table}
        cached = set(self.pool.cached)
        if self.caching:
            size = self.pool.block_size
            full = {b for r in gone for b in self.pool.tables.get(r, [])[: self.pool.num_tokens.get(r, 0) // size]}
            cached |= full & freed
        self.pool = replace(self.pool, tables=tables, cached=cached, ref_counts=[])
        for request_id in gone:
            self.queues.move(request_id, None)
        what = "gone: the caller hung up" if aborted else "done"
        text = f"{self._several(gone)} {'is' if len(gone) == 1 else 'are'} {what}."
        if freed:
            text += f" {len(freed)} block{'s are' if len(freed) > 1 else ' is'} free again."
        beat = self._beat(record, "aborted" if aborted else "finished", text, num_shares)
        for request_id in gone:
            self.computed.pop(request_id, None)
            self.known.pop(request_id, None)
        return beat

    def _preempted(self, record: StepRecord) -> Beat:
        gone = list(record.preempted)
        swap = record.preempted[gone[0]] == "swap"
        for request_id in gone:
            self.queues.move(request_id, self.queues.swapped if swap else self.queues.waiting)
            if not swap:
                self.computed[request_id] = 0
        tables = {r: table for r, table in self.pool.tables.items() if r not in gone}
        self.pool = replace(self.pool, tables=tables, ref_counts=[])
        one = len(gone) == 1
        last = "the last in line, is" if one else "the last in line, are"
        its, it = ("its", "it is") if one else ("their", "they are")
        fate = f"{its} blocks go to host memory" if swap else f"{it} computed again later"
        text = f"No block is free: {self._several(gone)}, {last} preempted; {fate}."
        return self._beat(record, "preempted", text, 0, gone)

    def _known(self, share: TracedRequest) -> int:
        """Known tokens of a request; with steps under way, those that are pending count too."""
        return max(self.known.get(share.request_id, share.num_prompt_tokens), share.start + share.num_tokens)

    def _shares(self, record: StepRecord) -> Iterator[Beat]:
        """A beat for each share that is more than one token, and one for all decodes between two of those."""
        decodes: list[str] = []
        whole: list[str] = []  # prompts that fit, one after another
        given = 0
        for number, share in enumerate(record.requests, start=1):
            self.prompt.setdefault(share.request_id, share.num_prompt_tokens)
            enters = share.request_id in record.admitted or share.request_id in record.resumed
            if decodes and (enters or share_kind(share) == "prefill"):
                yield self._decodes(record, decodes, number - 1)
                decodes = []
            topic, text = self._share_words(record, share, record.token_budget - given)
            given += share.num_tokens
            self.known[share.request_id] = self._known(share)
            self.computed[share.request_id] = share.start + share.num_tokens
            if enters or share.request_id not in self.queues.running:
                self.queues.move(share.request_id, self.queues.running)
            if topic == "decode":
                decodes.append(share.request_id)
                continue
            whole = [*whole, share.request_id] if topic == "admitted" else []
            if topic == "admitted" and self._is_whole(record, number):
                continue
            if len(whole) > 1:
                text = f"{self._several(whole)} get in: their prompts fit into the budget."
            yield self._beat(record, topic, text, number, whole or [share.request_id])
            whole = []
        if decodes:
            yield self._decodes(record, decodes, len(record.requests))

    def _is_whole(self, record: StepRecord, number: int) -> bool:
        """True if this share of a step is a whole new prompt."""
        if number >= len(record.requests):
            return False
        share = record.requests[number]
        fits = share.num_tokens == share.num_prompt_tokens == self._known(share)
        return fits and record.admitted.get(share.request_id) == 0

    def _decodes(self, record: StepRecord, decodes: list[str], num_shares: int) -> Beat:
        left = record.token_budget - sum(share.num_tokens for share in record.requests[:num_shares])
        each = "one token each" if len(decodes) > 1 else "one token"
        text = f"{self._several(decodes)} decode{'s' * (len(decodes) == 1)}: {each}, which leaves {left} of {record.token_budget}."
        return self._beat(record, "decode", text, num_shares)

    def _share_words(self, record: StepRecord, share: TracedRequest, left: int) -> tuple[str, str]:
        """(topic, caption) of a share, when `left` tokens of the budget are left for it."""
        request_id, end = share.request_id, share.start + share.num_tokens
        name, known, count = self.names[request_id], self._known(share), share.num_tokens
        tokens = "token" if count == 1 else f"{count} tokens"
        if request_id in record.resumed:
            return "resumed", f"{name} comes back from host memory and goes on where it stopped."
        if share_kind(share) == "decode" and request_id not in record.admitted:
            return "decode", ""
        rest = f"the {tokens} left over" if count == left else f"{tokens} for now"
        if request_id not in record.admitted:
            if end < known:
                return "chunk", f"{name}'s prompt gets {rest}: {end} of {known} tokens are computed now."
            last = f"last {tokens}" if count > 1 else "last token"
            return "chunk", f"{name}'s {last}: its prompt is read, and the next token can be sampled."
        cached = record.admitted[request_id]
        if cached:
            return (
                "cached",
                f"{name} gets in: {cached} of its {known} tokens are in the prefix cache, {count} {'is' if count == 1 else 'are'} computed.",
            )
        if known > share.num_prompt_tokens:
            part = f"all {known}" if end == known else f"{count} of {known}"
            return ("again", f"{name} gets in again: {part} tokens are computed once more, its answer so far included.")
        if end < known:
            return "chunk", f"{name} gets in: its prompt of {known} tokens gets {rest}."
        return "admitted", f"{name} gets in: its prompt of {known} tokens fits into the budget."

    def _blocked(self, record: StepRecord) -> Iterator[Beat]:
        """Why the first in line does not get in; said once."""
        queue = record.waiting + record.swapped
        if not queue:
            return
        first = min(queue, key=lambda r: self.order.get(r, len(self.order)))
        if (first, record.blocked_by) == self.blocked:
            return
        self.blocked = (first, record.blocked_by)
        reason = {
            "kv blocks": "too few blocks are free for it",
            "max_num_seqs": f"all {len(record.running)} places are taken",
            "max_num_batched_tokens": "this step's budget is spent",
            "static batch": "a batch that has begun to decode takes nobody",
            "pipeline_parallel_size": "the rest is for the steps of the other stages",
        }.get(record.blocked_by, record.blocked_by)
        text = f"{self.names[first]} has to wait: {reason}."
        yield self._beat(record, record.blocked_by, text, len(record.requests), [first])


def beats(trace: Trace, steps: Collection[int], captions: Mapping[int, str] | None = None) -> list[Beat]:
    """What happens in these steps, beat by beat, with how much each teaches and how long it takes to read.

    Args:
        steps: numbers of the steps wanted; the others are followed but not told.
        captions: by step number, to stand instead of what is said otherwise.
    """
    teller, wanted, told = _Teller(trace), set(steps), []
    seen: dict[str, int] = {}
    for record, pool in zip(trace, pool_states(trace), strict=True):
        for beat in teller.beats(record, pool):
            if record.step not in wanted:
                continue
            times = seen[beat.topic] = seen.get(beat.topic, 0) + 1
            beat.weight = _WEIGHTS.get(beat.topic, 4.0) / times
            if beat.topic != "decode" or times <= 1:
                beat.seconds = _SECONDS.get(beat.topic, 1.4) * (1.0 if times == 1 else 0.85)
            beat.caption = (captions or {}).get(record.step, beat.caption)
            told.append(beat)
    return told


def _briefly(beat: Beat) -> str:
    """A caption for those who have no time to read it."""
    record = beat.record
    if not record.requests or beat.topic == "decode":
        return beat.caption
    for_whom = f"{len(record.requests)} requests" if len(record.requests) > 1 else "one request"
    return f"{record.num_tokens} of {record.token_budget} tokens, for {for_whom}."


def abridge(told: Sequence[Beat], most: float, quick: float = _QUICK) -> list[Beat]:
    """At most so many seconds. The first and the last beat stay; of the others, those that teach most are told at leisure.
    Of the rest, the last of each step is passed over in `quick` seconds, and if that is still too long, steps are left
    out, evenly."""
    last_of_step = {id(beat.record): i for i, beat in enumerate(told)}
    ends = {0, len(told) - 1}

    def passing(leisure: set[int]) -> list[int]:
        return [i for i in last_of_step.values() if i not in leisure]

    leisure = set(ends)
    for i in sorted(range(len(told)), key=lambda i: -told[i].weight):
        wider = leisure | {i}
        seconds = sum(told[j].seconds for j in wider)
        if seconds > _LEISURE * most and seconds + quick * len(passing(wider)) > most:
            break
        leisure = wider
    left = max(0.0, most - sum(told[i].seconds for i in leisure))
    rest = passing(leisure)
    room = min(len(rest), int(left / quick + 1e-9))
    shown = {rest[i * len(rest) // room] for i in range(room)}
    return [
        beat if i in leisure else replace(beat, seconds=quick, caption=_briefly(beat))
        for i, beat in enumerate(told)
        if i in leisure or i in shown
    ]
