"""Prefixes that are kept beyond the pool, against computing them again: from which length on, and on documents that many ask of."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanovllm.distributed.cost_model import Link, fit
from nanovllm.kv.connector import IDLE_SECONDS
from nanovllm.kv_transfer.stores.store import KEY_BYTES, KVStore
from nanovllm.lab.bench.kv import transport
from nanovllm.lab.bench.kv.engines import Answer, Engines, EngineSpec, draw
from nanovllm.lab.bench.kv.places import HOST, HOST_AND_DISK, Place, Sizes, places
from nanovllm.lab.bench.parallel.findings import Finding, Found, estimate, in_turn, number, paired
from nanovllm.lab.bench.parallel.setting import Setting
from nanovllm.lab.bench.report import Table

POOL, AGAIN = "pool of the device", "computed again"
PLAIN = "no other place"
#: So often a prefix is asked for until it has arrived where it is kept.
MAX_TRIES = 50


@dataclass(frozen=True)
class Plan:
    """What is asked.

    Attributes:
        lengths: of prefixes.
        rounds: how often each.
        num_documents, document_len, question_len: of the documents, which do not fit into the pool together.
        num_questions: each about one of them, the popular ones more often.
        pool_documents, host_documents: how many fit into the device's pool and into host memory.
    """

    lengths: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    rounds: int = 6
    num_documents: int = 20
    document_len: int = 512
    question_len: int = 15
    num_questions: int = 40
    pool_documents: int = 5
    host_documents: int = 10

    def questions(self) -> list[int]:
        """The number of the document that each is about: Zipf's law, as for most things that people choose from."""
        weights = [1 / (1 + i) for i in range(self.num_documents)]
        return random.Random(0).choices(range(self.num_documents), weights, k=self.num_questions)


@dataclass
class Tiers:
    """Everything that was measured.

    Attributes:
        bytes_per_token: of KV.
        block_size: tokens a block.
        ttfts: seconds to the first token, by place and by length of the prefix; rounds make pairs.
        stores: without an engine: seconds that a store takes to give out so many bytes.
        documents: by place, of each question: seconds to the first token, and the share of its prompt that was not computed.
    """

    plan: Plan
    bytes_per_token: int
    block_size: int
    ttfts: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    stores: dict[str, dict[int, float]] = field(default_factory=dict)
    documents: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def link(self, place: str) -> Link:
        """A store's latency and bandwidth."""
        return fit(place, list(self.stores[place]), list(self.stores[place].values()))


# ---------------------------------------------------------------- measuring


def time_store(
    store: KVStore, forget: Callable[[], None], entry_bytes: int, counts: Sequence[int], rounds: int = 5
) -> dict[int, float]:
    """Seconds that a store takes to give out entries, by how many bytes they have together."""
    entries = np.random.default_rng(0).integers(0, 256, (max(counts), entry_bytes), dtype=np.uint8)
    keys = [i.to_bytes(KEY_BYTES, "little") for i in range(len(entries))]
    rows, found = [memoryview(row) for row in entries], [memoryview(row) for row in np.zeros_like(entries)]
    store.put(keys, rows)
    seconds = {}
    for count in counts:
        times = []
        for _ in range(rounds + 1):
            forget()
            start = time.perf_counter()
            if not all(store.get(keys[:count], found[:count])):
                raise RuntimeError("a store lacks what it has just been given")
            times.append(time.perf_counter() - start)
        seconds[count * entry_bytes] = statistics.median(times[1:])
    store.remove(keys)
    store.close()
    return seconds


def ask_again(engines: Engines, place: str, prompt: Sequence[int], forgetting: Place | None = None) -> Answer:
    """The same prompt, after the engine's own pool has forgotten it."""
    engines.reset_prefix_cache(place)
    if forgetting is not None:
        forgetting.forget()
    return engines.complete(engines.ask(place, prompt))


def fill(engines: Engines, place: str, prompt: Sequence[int]) -> None:
    """Ask until what was computed has arrived where it is kept."""
    for _ in range(MAX_TRIES):
        if ask_again(engines, place, prompt).num_cached == len(prompt) - 1:
            return
    raise RuntimeError(f"{place} does not keep a prefix of {len(prompt) - 1} tokens")


def measure_lengths(engines: Engines, found: Sequence[Place], tiers: Tiers, vocab_size: int) -> None:
    """A prefix of each length, and a token more: kept in each place, and computed again; they take turns."""
    prompts = {length: draw(length + 1, vocab_size, "prefix", length) for length in tiers.plan.lengths}
    for place in found:
        for prompt in prompts.values():
            fill(engines, place.name, prompt)
    by_name = {place.name: place for place in found}
    names = [AGAIN, *by_name]
    tiers.ttfts = {name: {length: [] for length in prompts} for name in (AGAIN, POOL, *by_name)}
    for turn in range(tiers.plan.rounds + 1):
        for length, prompt in prompts.items():
            for name in in_turn(names, turn):
                engine = PLAIN if name == AGAIN else name
                took = {name: ask_again(engines, engine, prompt, by_name.get(name))}
                if name == AGAIN:  # now it is there
                    took[POOL] = engines.complete(engines.ask(PLAIN, prompt))
                for way, answer in took.items():
                    expected = 0 if way == AGAIN else length
                    if answer.num_cached != expected:
                        raise RuntimeError(f"{way}: {answer.num_cached} tokens were there, and not {expected}")
                    if turn:  # the first round is to warm up
                        tiers.ttfts[way][length].append(answer.ttft)


def measure_documents(engines: Engines, tiers: Tiers, vocab_size: int) -> None:
    """Questions about documents, one after another, to an engine with each place, in turn. All begin with nothing of them."""
    plan, names = tiers.plan, list(engines.specs)
    documents = [draw(plan.document_len, vocab_size, "document", i) for i in range(plan.num_documents)]
    tiers.documents = {name: [] for name in names}
    for name in names:
        engines.reset_prefix_cache(name)
    for turn, chosen in enumerate(plan.questions()):
        prompt = [*documents[chosen], *draw(plan.question_len, vocab_size, "question", turn)]
        for name in in_turn(names, turn):
            answer = engines.complete(engines.ask(name, prompt))
            tiers.documents[name].append((answer.ttft, answer.num_cached / len(prompt)))


def plan_of(setting: Setting) -> Plan:
    """What is asked of this model."""
    if setting.dry_run:
        return Plan((32, 64), 1, 4, 64, 15, 6, 2, 3)
    return Plan(rounds=3 * setting.repeats)


def tiers(setting: Setting) -> Found:
    """Every engine has a small pool and all cores; only one of them computes at a time."""
    plan, layout = plan_of(setting), transport.cache_layout(setting)
    size, entry_bytes = layout.block_size, layout.block_bytes * layout.num_layers
    document = -(-plan.document_len // size)
    blocks = plan.num_documents * document + sum(-(-length // size) for length in plan.lengths)
    pool_blocks = max(plan.pool_documents * document, -(-max(plan.lengths) // size)) + 2
    longest = max(*plan.lengths, plan.document_len + plan.question_len) + 8
    options: dict[str, Any] = {"model": str(setting.folder)}
    options |= setting.options(max_model_len=longest, enable_prefix_caching=True, num_kv_blocks=pool_blocks)
    del options["kv_cache_memory"]
    sizes = Sizes(entry_bytes, plan.host_documents * document, blocks)
    measured = Tiers(plan, entry_bytes // size, size)
    with places(sizes) as (found, measured.missing):
        counts = sorted({max(1, length // size) for length in plan.lengths})
        for place in found:
            if place.make_store is not None:
                store = place.make_store()
                measured.stores[place.name] = time_store(store, place.forget, entry_bytes, counts)
        specs = {PLAIN: EngineSpec(options, setting.threads)}
        for place in found:
            specs[place.name] = EngineSpec(options | place.options, setting.threads, place.wrapper)
        with Engines(specs) as engines:
            vocab_size = setting.model.vocab_size
            # What is found in host memory says nothing of the disk behind it.
            single = [place for place in found if place.name != HOST_AND_DISK]
            measure_lengths(engines, single, measured, vocab_size)
            measure_documents(engines, measured, vocab_size)
    return report_tiers(measured)


# ---------------------------------------------------------------- what it says


def crossing(tiers: Tiers, place: str) -> float:
    """From how many tokens on it should be faster to fetch than to compute: where `latency + tokens * bytes / bandwidth` is below
    `tokens / speed`, but no less than a block. The step that makes the first token is needed in any case; and who waits looks
    now and then whether it has come."""
    longest = max(tiers.plan.lengths)
    step, again = (statistics.median(tiers.ttfts[name][longest]) for name in (POOL, AGAIN))
    link = tiers.link(place)
    gain = (again - step) / longest - tiers.bytes_per_token / link.bandwidth
    blocks = (link.latency + IDLE_SECONDS) / gain / tiers.block_size if gain > 0 else math.inf
    return tiers.block_size * max(1.0, blocks)


def measured_crossing(tiers: Tiers, place: str) -> float:
    """From which of the lengths on it is faster, and for all longer ones."""
    winning = math.inf
    for length in sorted(tiers.plan.lengths, reverse=True):
        if paired(tiers.ttfts[AGAIN][length], tiers.ttfts[place][length]).ratio >= 1:
            break
        winning = length
    return winning


def lru_share(questions: Sequence[int], room: int) -> float:
    """The share of questions whose document is there, if so many fit and the one that was not used for longest gives way."""
    there: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for document in questions:
        hits += document in there
        there[document] = None
        there.move_to_end(document)
        if len(there) > room:
            there.popitem(last=False)
    return hits / len(questions)


def report_tiers(measured: Tiers) -> Found:
    """What was measured; see `Tiers`."""
    found = Found(data=dataclasses.asdict(measured))
    _report_lengths(found, measured)
    _report_documents(found, measured)
    if measured.missing:
        rows = [[place, why] for place, why in measured.missing.items()]
        found.tables.append(Table("Places that this machine lacks", ["place", "why"], rows))
    return found


def _report_lengths(found: Found, measured: Tiers) -> None:
    rows, again, lengths = [], measured.ttfts[AGAIN], measured.plan.lengths
    for name, by_length in measured.ttfts.items():
        times = [number(1e3 * statistics.median(by_length[length])) for length in lengths]
        ratio = paired(again[lengths[-1]], by_length[lengths[-1]])
        cells = ["–", "–", "–"]
        if name not in (POOL, AGAIN):
            cells[2] = _tokens(measured_crossing(measured, name))
        if name in measured.stores:
            size, seconds = max(measured.stores[name].items())
            predicted = crossing(measured, name)
            cells[:2] = number(size / seconds / 1e9), _tokens(predicted)
            _judge(found, measured, name, predicted)
        rows.append([name, *times, estimate(ratio), *cells])
    columns = ["prefix", *(f"{length} tokens, ms" for length in lengths), "longest, of computing"]
    columns += ["bare store, GB/s", "faster from, predicted", "measured"]
    title = f"Time to first token of a prefix that is kept, medians of {len(again[lengths[0]])}"
    found.tables.append(Table(title, columns, rows, num_labels=1))


def _judge(found: Found, measured: Tiers, place: str, predicted: float) -> None:
    """Whether it is faster from the predicted length on: that is one of those that were measured, or the next one."""
    figure = f"prefix in {place}: faster than computing it from"
    reached = [length for length in measured.plan.lengths if length >= predicted]
    actual = measured_crossing(measured, place)
    if not reached or actual == math.inf:
        found.findings.append(Finding(f"{figure} (never, of these lengths)", 0.0, " tokens", "a length", False))
        return
    goal = f"≤ {reached[0]} tokens, predicted {_tokens(predicted)}"
    found.findings.append(Finding(figure, actual, " tokens", goal, actual <= reached[0]))


def _tokens(count: float) -> str:
    return "never" if count == math.inf else f"{count:.0f}"


def _report_documents(found: Found, measured: Tiers) -> None:
    plan, rows = measured.plan, []
    base = [seconds for seconds, _ in measured.documents[PLAIN]]
    share = plan.document_len / (plan.document_len + plan.question_len)
    for name, questions in measured.documents.items():
        room = {PLAIN: plan.pool_documents, HOST: plan.host_documents}.get(name, plan.num_documents)
        hits, times = statistics.mean(hit for _, hit in questions), [seconds for seconds, _ in questions]
        predicted = share * lru_share(plan.questions(), room)
        mean, middle, late = statistics.mean(times), *np.percentile(times, [50, 90])
        cells = [100 * hits, 100 * predicted, *(1e3 * float(value) for value in (mean, middle, late))]
        rows.append([name, *map(number, cells), number(mean / statistics.mean(base))])
        if name != PLAIN:
            figure = f"{plan.num_documents} documents, {name}: mean time to first token, of {PLAIN}"
            found.findings.append(Finding(figure, mean / statistics.mean(base), " ×"))
    columns = ["kept in", "hits, % of tokens", "predicted", "TTFT mean, ms", "p50", "p90", "mean, of the first"]
    title = (
        f"{plan.num_questions} questions about {plan.num_documents} documents of {plan.document_len} tokens; the pool holds "
        f"{plan.pool_documents}, host memory {plan.host_documents}, other places all"
    )
    found.tables.append(Table(title, columns, rows, num_labels=1))
