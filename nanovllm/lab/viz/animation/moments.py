"""A trace as a story about memory: what was given up, taken and written, moment by moment, with words for it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nanovllm.lab.viz.animation.beats import short_names
from nanovllm.lab.viz.animation.stage import several
from nanovllm.lab.viz.data import PoolState, pool_states, share_kind
from nanovllm.trace.trace import StepRecord, Trace

# What a moment teaches, and the seconds that it takes to see; of the same topic, each further one teaches less.
_TOPICS = {
    "preempted": (10.0, 2.2),
    "overwritten": (9.0, 2.0),
    "hit": (9.0, 2.0),
    "resumed": (8.0, 1.8),
    "freed, still found": (7.0, 1.7),
    "freed": (6.0, 1.5),
    "admitted": (5.0, 1.6),
    "grown": (5.0, 1.4),
    "prefill": (4.0, 1.2),
    "decode": (1.0, 0.4),
}
_QUICK, _QUICK_DECODE = 0.25, 0.09  # seconds: only more of what has been told before
_CHOSEN = 1.4  # at least so many for a caption that somebody wrote
_QUICK_CAPTION = "Blocks are taken as requests grow, and given back when they end."


@dataclass
class Moment:
    """A picture of the pool within a step, and what is to be said about it.

    Attributes:
        step: number of the step.
        topic: what just happened: blocks were given up ("freed", "freed, still found", "preempted"), taken ("admitted",
            "grown", "hit", "overwritten", "resumed") or written to ("prefill", "decode").
        state: the pool after it.
        caption: the same in words.
        lit: blocks that the caption speaks of.
        fresh: request id to the positions of the tokens that were written just now.
        free_order: free blocks, the one that will be taken next first; None if the trace does not begin with an empty
            pool, so that nobody knows.
        seconds: how long it takes to see.
    """

    step: int
    topic: str
    state: PoolState
    caption: str
    lit: set[int] = field(default_factory=set)
    fresh: dict[str, range] = field(default_factory=dict)
    free_order: list[int] | None = None
    seconds: float = 0.0


def moments(
    trace: Trace,
    steps: Collection[int],
    captions: Mapping[int, str] | None = None,
    retold: Mapping[tuple[int, str], str] | None = None,
    most: float = 16.5,
) -> list[Moment]:
    """Up to three moments a step: blocks are given up, taken, written to.

    Args:
        steps: numbers of the steps wanted; the others are followed but not told.
        captions: by step number, to stand instead of what is said otherwise.
        retold: the same for one moment, by step number and topic.
        most: seconds. Of a longer story, what teaches least is passed over quickly, or left out.

    Raises:
        ValueError: nothing happens to any block in these steps.
    """
    wanted, told = set(steps), []
    last = max(wanted, default=-1)
    for moment in itertools.takewhile(lambda moment: moment.step <= last, _Teller(trace).moments()):
        if moment.step in wanted:
            text = (captions or {}).get(moment.step, moment.caption)
            moment.caption = (retold or {}).get((moment.step, moment.topic), text)
            told.append(moment)
    if not told:
        raise ValueError("nothing happens to any block in these steps")
    return _abridged(told, set(retold or ()), most)


def _abridged(told: list[Moment], chosen: set[tuple[int, str]], most: float) -> list[Moment]:
    """Every step's last moment, at least quickly (of very many steps, every other, and so on); and as many moments as
    there is time for at leisure, the chosen ones first, then those that teach most."""
    last = list({moment.step: number for number, moment in enumerate(told)}.values())
    quick = [_QUICK_DECODE if moment.topic == "decode" else _QUICK for moment in told]
    needed = sum(quick[number] for number in last)
    hurried = {0, len(told) - 1, *last[:: max(1, math.ceil(2 * needed / most))]}
    times: Counter[str] = Counter()
    weights: list[float] = []
    for moment in told:
        times[moment.topic] += 1
        weight, moment.seconds = _TOPICS[moment.topic]
        moment.seconds *= 1.0 if times[moment.topic] == 1 else 0.8
        weights.append(weight / times[moment.topic])
        if (moment.step, moment.topic) in chosen:
            weights[-1] += 100
            moment.seconds = max(moment.seconds, _CHOSEN)
    total, leisurely = sum(quick[number] for number in hurried), set[int]()
    for number in sorted(range(len(told)), key=lambda i: -weights[i]):
        extra = told[number].seconds - (quick[number] if number in hurried else 0.0)
        if total + extra <= most:
            total += extra
            leisurely.add(number)
    shown: list[Moment] = []
    for number in sorted(hurried | leisurely):
        moment = told[number]
        if number not in leisurely:
            text = moment.caption if moment.topic == "decode" else _QUICK_CAPTION
            if shown and shown[-1].step == moment.step:
                text = shown[-1].caption
            moment = replace(moment, seconds=quick[number], caption=text)
        shown.append(moment)
    return shown


class _Teller:
    """Follows the steps, and finds words for what changed."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.names = trace, short_names(trace)
        self.size = trace.settings["block_size"]
        self.caching = trace.settings.get("enable_prefix_caching", True)
        self.order: list[int] | None = list(range(trace.settings["num_blocks"]))
        self.thrown_out: set[str] = set()

    def moments(self) -> Iterator[Moment]:
        """All moments of the trace."""
        before = PoolState(self.trace.settings["num_blocks"], self.size)
        for record, after in zip(self.trace, pool_states(self.trace), strict=True):
            if record.snapshot is not None and (record.snapshot.tables or record.snapshot.cached):
                self.order = None
            gone = [r for r in before.tables if r not in after.tables or r in record.admitted or r in record.resumed]
            between = self._without(before, gone)
            if gone:
                topic, text = self._freed(record, before, between, gone)
                lit = {b for r in gone for b in before.tables[r]}
                yield Moment(record.step, topic, between, text, lit, free_order=self.order)
            added = {r: table[len(between.tables.get(r, [])) :] for r, table in after.tables.items()}
            added = {r: table for r, table in added.items() if table}
            if added:
                yield self._take(record, between, after, added)
            if record.requests:
                fresh = {s.request_id: range(s.start, s.start + s.num_tokens) for s in record.requests}
                topic, text = self._written(record)
                yield Moment(record.step, topic, after, text, fresh=fresh, free_order=self.order)
            before = after

    def _without(self, state: PoolState, gone: Iterable[str]) -> PoolState:
        """The state once these requests have given up their blocks. The last block of a table comes first into the free
        list, as `BlockPool.free_blocks` has it."""
        tables, cached = dict(state.tables), set(state.cached)
        freed: list[int] = []
        for request_id in gone:
            table = tables.pop(request_id)
            freed += reversed(table)
            if self.caching:
                cached |= set(table[: state.num_tokens.get(request_id, 0) // state.block_size])
        held = {b for table in tables.values() for b in table}
        if self.order is not None:
            # A block that two of them shared is free when the second gives it up.
            last = dict.fromkeys(reversed([b for b in freed if b not in held]))
            self.order = self.order + list(last)[::-1]
        return replace(state, tables=tables, cached=cached - held, ref_counts=[])

    def _take(self, record: StepRecord, between: PoolState, after: PoolState, added: Mapping[str, list[int]]) -> Moment:
        """Blocks come into tables; nothing is written yet."""
        starts = {share.request_id: share.start for share in record.requests}
        tokens = {r: starts.get(r, n) for r, n in after.num_tokens.items()}
        held = {b for table in after.tables.values() for b in table}
        state = replace(after, num_tokens=tokens, cached=between.cached - held)
        if self.order is not None:
            self.order = [b for b in self.order if b not in held]
        topic, text = self._taken(record, between, added)
        found = {b for r, table in added.items() for b in table[: self._num_hits(record, r)]}
        lit = found or {b for table in added.values() for b in table}  # hits light up, and new blocks if there are none
        return Moment(record.step, topic, state, text, lit, {}, self.order)

    def _num_hits(self, record: StepRecord, request_id: str) -> int:
        """Blocks of a table that were found in the prefix cache."""
        return record.admitted.get(request_id, 0) // self.size

    def _several(self, request_ids: Iterable[str], suffix: str = "") -> str:
        return several([self.names[r] + suffix for r in request_ids])

    def _freed(self, record: StepRecord, before: PoolState, after: PoolState, gone: list[str]) -> tuple[str, str]:
        held = {b for r in gone for b in before.tables[r]}
        free = {b for b in held if not after.ref_counts[b]}
        who = self._several(gone)
        preempted = [r for r in gone if r in record.preempted]
        self.thrown_out.update(preempted)
        if preempted:
            swap = record.preempted[preempted[0]] == "swap"
            then = "What is in them moves to host memory." if swap else "It will be computed again later."
            text = f"No block is free for the next token: {self._several(preempted)} must give up {_blocks(held)}. "
            return "preempted", text + then
        text = f"{who} {_verb(gone)} done"
        if held - free:
            kept = held - free
            owners = self._several([r for r, table in after.tables.items() if kept & set(table)])
            text += f". {_blocks(kept).capitalize()} stay{'s' * (len(kept) == 1)} with {owners}"
        if not free:
            return "freed", f"{text}."
        text += f"{': ' if held == free else ', '}{_blocks(free)} {_verb(free)} free"
        found = free & after.cached
        if not found:
            return "freed", f"{text} again."
        if found == free:
            return "freed, still found", f"{text}, but {_keep(found)} content."
        return "freed, still found", f"{text}. What is full keeps its content."

    def _taken(self, record: StepRecord, between: PoolState, added: Mapping[str, list[int]]) -> tuple[str, str]:
        texts, topics = [], []
        everything = {b for table in added.values() for b in table}
        lost: set[int] = set()
        for request_id, table in added.items():
            num_hits = self._num_hits(record, request_id)
            hits, new = table[:num_hits], table[num_hits:]
            lost |= set(new) & between.cached
            name = self.names[request_id]
            if hits:
                texts.append(self._hit(request_id, between, hits))
                topics.append("hit")
            elif request_id in record.resumed:
                texts.append(f"{name} comes back from host memory, into {_blocks(table)}.")
                topics.append("resumed")
            elif request_id in record.admitted:
                share = next(share for share in record.requests if share.request_id == request_id)
                need = "token needs" if share.num_tokens == 1 else "tokens need"
                count = f"{len(new)} block{'s' * (len(new) > 1)} of {self.size}"
                got = _blocks(new)
                got = "" if got[0].isdigit() else f" It gets {got}."
                verb = "is back" if request_id in self.thrown_out else "comes"
                texts.append(f"{name} {verb}. Its {share.num_tokens} {need} {count}.{got}")
                topics.append("admitted")
        grown = [r for r in added if r not in record.admitted and r not in record.resumed]
        if grown:
            blocks = [b for r in grown for b in added[r]]
            owners = self._several(grown, "'s")
            full = f"{owners} last block{'s are' if len(grown) > 1 else ' is'} full"
            another = "each takes another" if len(grown) > 1 else "it takes another"
            texts.append(f"{full}: {another}, {_blocks(blocks)}." if len(blocks) == len(grown) else f"{full}.")
            topics.append("grown")
        if lost:
            what = f"{len(lost)} of them" if len(lost) > 4 else _blocks(lost)
            if lost == everything:
                what = "it" if len(lost) == 1 else "them"
            texts.append(f"What was in {what}, unused for longest, is lost.")
            topics.append("overwritten")
        return next(t for t in _TOPICS if t in topics), " ".join(texts)

    def _hit(self, request_id: str, between: PoolState, hits: Sequence[int]) -> str:
        if request_id in self.thrown_out:
            return f"{self.names[request_id]} is back: {_blocks(hits)} {_verb(hits)} still there, not computed again."
        holders = [r for r, table in between.tables.items() if set(hits) & set(table)]
        like = self._several(holders, "'s") if holders else "one before"
        how = "shared" if holders else "found in the cache"
        text = f"{self.names[request_id]}'s prompt begins like {like}: {_blocks(hits)} {_verb(hits)} {how},"
        return f"{text} not computed again."

    def _written(self, record: StepRecord) -> tuple[str, str]:
        prefills = [share for share in record.requests if share_kind(share) == "prefill"]
        if not prefills:
            one = len(record.requests) == 1
            who = self.names[record.requests[0].request_id] if one else "Each request"
            return "decode", f"{who} writes one token a step, into the next cell of its last block."
        texts = []
        for share in prefills:
            name, end = self.names[share.request_id], share.start + share.num_tokens
            if share.start and share.start == record.admitted.get(share.request_id):
                count = f"{share.num_tokens} tokens" if share.num_tokens > 1 else "token"
                texts.append(f"Only {name}'s other {count} must be computed.")
            elif share.start or end < share.num_prompt_tokens:
                texts.append(f"{name}'s tokens {share.start} to {end - 1} are computed and written.")
            else:
                texts.append(f"{name}'s {share.num_tokens} tokens are computed and written, in order.")
        return "prefill", " ".join(texts)


def _blocks(block_ids: Collection[int]) -> str:
    """ "block 3", "blocks 3 and 4", "blocks 3 to 9", "7 blocks" if they are too many to be named."""
    ids = sorted(block_ids)
    if len(ids) > 2 and ids[-1] - ids[0] == len(ids) - 1:
        return f"blocks {ids[0]} to {ids[-1]}"
    if len(ids) > 4:
        return f"{len(ids)} blocks"
    return f"block{'s' if len(ids) > 1 else ''} {several(ids)}"


def _verb(things: Collection[object]) -> str:
    return "is" if len(things) == 1 else "are"


def _keep(things: Collection[object]) -> str:
    return "keeps its" if len(things) == 1 else "keep their"
