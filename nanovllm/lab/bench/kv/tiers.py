"""Prefixes that are kept beyond the pool, against computing them again: by their length, and with
questions about documents."""

import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from nanovllm.data.config import EngineConfig
from nanovllm.distributed.cost_model import fit
from nanovllm.kv_transfer.stores.factory import open_store
from nanovllm.kv_transfer.stores.sealed import KEY_BYTES
from nanovllm.kv_transfer.stores.store import KVStore
from nanovllm.lab.bench.kv import transport
from nanovllm.lab.bench.kv.engines import Answer, Engines, EngineSpec, draw
from nanovllm.lab.bench.kv.places import HOST, HOST_AND_DISK, Place, places
from nanovllm.lab.bench.metrics import alternate
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, goal, paired
from nanovllm.processes.activity import IDLE_SECONDS

POOL = "device pool"
AGAIN = "recomputed"
PLAIN = "device pool alone"
#: Requests for a prefix until its KV has arrived in the place that keeps it.
MAX_TRIES = 50


@dataclass(frozen=True)
class Plan:
    """What is asked.

    Attributes:
        lengths: of prefixes.
        rounds: how often each.
        num_documents, document_len, question_len: of the documents, which do not fit into the pool
            together.
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
        """The document that each question is about, drawn by Zipf's law."""
        weights = [1 / (1 + i) for i in range(self.num_documents)]
        return random.Random(0).choices(range(self.num_documents), weights, k=self.num_questions)


@dataclass
class Tiers:
    """Everything that was measured.

    Attributes:
        bytes_per_token: of KV.
        block_size: tokens per block.
        ttfts: seconds to the first token, by place and by length of the prefix; rounds make pairs.
        stores: without an engine: seconds that a store takes to read so many bytes.
        documents: by place, of each question: seconds to the first token, and the share of its
            prompt that was not computed.
    """

    plan: Plan
    bytes_per_token: int
    block_size: int
    ttfts: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    stores: dict[str, dict[int, float]] = field(default_factory=dict)
    documents: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


# ---------------------------------------------------------------- measuring


def time_store(
    store: KVStore,
    forget: Callable[[], None],
    entry_bytes: int,
    counts: Sequence[int],
    rounds: int = 5,
) -> dict[int, float]:
    """Seconds that a store takes to read entries, by their bytes together."""
    entries = np.random.default_rng(0).integers(0, 256, (max(counts), entry_bytes), dtype=np.uint8)
    keys = [i.to_bytes(KEY_BYTES, "little") for i in range(len(entries))]
    rows = [memoryview(row) for row in entries]
    found = [memoryview(row) for row in np.zeros_like(entries)]
    store.put(keys, rows)
    seconds = {}
    for count in counts:
        times = []
        for _ in range(rounds + 1):
            forget()
            start = time.perf_counter()
            if not all(store.get(keys[:count], found[:count])):
                raise RuntimeError("a store lacks an entry that was just stored")
            times.append(time.perf_counter() - start)
        seconds[count * entry_bytes] = statistics.median(times[1:])
    store.close()
    return seconds


def ask_again(
    engines: Engines, place: str, prompt: Sequence[int], forgetting: Place | None = None
) -> Answer:
    """The same prompt, after the engine's own pool has forgotten it."""
    engines.reset_prefix_cache(place)
    if forgetting is not None:
        forgetting.forget()
    return engines.complete(engines.ask(place, prompt))


def fill(engines: Engines, place: str, prompt: Sequence[int]) -> None:
    """Ask until the KV has arrived in the place that keeps it."""
    for _ in range(MAX_TRIES):
        if ask_again(engines, place, prompt).num_cached == len(prompt) - 1:
            return
    raise RuntimeError(f"{place} does not keep a prefix of {len(prompt) - 1} tokens")


def measure_lengths(
    engines: Engines, found: Sequence[Place], tiers: Tiers, vocab_size: int
) -> None:
    """A prefix of each length and one more token: kept in each place, and computed again; they take
    turns."""
    prompts = {
        length: draw(length + 1, vocab_size, "prefix", length) for length in tiers.plan.lengths
    }
    for place in found:
        for prompt in prompts.values():
            fill(engines, place.name, prompt)
    by_name = {place.name: place for place in found}

    def run(length: int, name: str) -> dict[str, float]:
        engine = PLAIN if name == AGAIN else name
        prompt = prompts[length]
        took = {name: ask_again(engines, engine, prompt, by_name.get(name))}
        if name == AGAIN:  # now it is in the pool
            took[POOL] = engines.complete(engines.ask(PLAIN, prompt))
        for way, answer in took.items():
            if answer.num_cached != (0 if way == AGAIN else length):
                raise RuntimeError(f"{way}: {answer.num_cached} of {length} tokens were cached")
        return {way: answer.ttft for way, answer in took.items()}

    ways = list(itertools.product(prompts, (AGAIN, *by_name)))
    tiers.ttfts = {name: {length: [] for length in prompts} for name in (AGAIN, POOL, *by_name)}
    for (length, _), rounds in alternate(
        {way: partial(run, *way) for way in ways}, tiers.plan.rounds
    ).items():
        for name, ttft in itertools.chain.from_iterable(took.items() for took in rounds):
            tiers.ttfts[name][length].append(ttft)


def measure_documents(engines: Engines, tiers: Tiers, vocab_size: int) -> None:
    """Questions about documents, one after another, to an engine with each place, in turn. All
    caches are empty at first."""
    plan = tiers.plan
    names = list(engines.specs)
    documents = [
        draw(plan.document_len, vocab_size, "document", i) for i in range(plan.num_documents)
    ]
    prompts = [
        [*documents[chosen], *draw(plan.question_len, vocab_size, "question", turn)]
        for turn, chosen in enumerate(plan.questions())
    ]

    def run(name: str, questions: Iterator[list[int]]) -> tuple[float, float]:
        prompt = next(questions)
        answer = engines.complete(engines.ask(name, prompt))
        return answer.ttft, answer.num_cached / len(prompt)

    for name in names:
        engines.reset_prefix_cache(name)
    works = {name: partial(run, name, iter(prompts)) for name in names}
    tiers.documents = alternate(works, len(prompts), warm_up=0)


def tiers(setting: Setting) -> Iterator[Row]:
    """Every engine has a small pool and all cores; only one of them computes at a time."""
    plan = (
        Plan(
            lengths=(32, 64),
            rounds=1,
            num_documents=4,
            document_len=64,
            question_len=15,
            num_questions=6,
            pool_documents=2,
            host_documents=3,
        )
        if setting.dry_run
        else Plan(rounds=3 * setting.repeats)
    )
    layout = transport.cache_layout(setting)
    size = layout.block_size
    entry_bytes = layout.block_bytes * layout.num_layers
    document = -(-plan.document_len // size)
    blocks = plan.num_documents * document + sum(-(-length // size) for length in plan.lengths)
    pool_blocks = max(plan.pool_documents * document, -(-max(plan.lengths) // size)) + 2
    longest = max(*plan.lengths, plan.document_len + plan.question_len) + 8
    options = setting.options(
        max_model_len=longest, enable_prefix_caching=True, num_kv_blocks=pool_blocks
    )
    del options["kv_cache_memory"]
    measured = Tiers(plan, entry_bytes // size, size)
    with places(entry_bytes, plan.host_documents * document, blocks) as (found, missing):
        counts = sorted({max(1, length // size) for length in plan.lengths})
        for place in found:
            if place.is_one_store:
                store = open_store(EngineConfig(**options | place.options), entry_bytes)
                assert store is not None
                measured.stores[place.name] = time_store(store, place.forget, entry_bytes, counts)
        specs = {PLAIN: EngineSpec(options, setting.threads)}
        for place in found:
            specs[place.name] = EngineSpec(options | place.options, setting.threads, place.wrapper)
        with Engines(specs) as engines:
            vocab_size = setting.model.vocab_size
            # A hit in host memory says nothing about the disk behind it.
            single = [place for place in found if place.name != HOST_AND_DISK]
            measure_lengths(engines, single, measured, vocab_size)
            measure_documents(engines, measured, vocab_size)
    yield from compare_lengths(measured)
    yield from compare_documents(measured)
    for name, why in missing.items():
        yield {"table": "Places that this machine lacks", "place": name, "why": why}


# ---------------------------------------------------------------- comparisons


def crossing(tiers: Tiers, place: str) -> float:
    """Predict from how many tokens on fetching is faster than computing: where
    `latency + tokens * bytes / bandwidth` is below `tokens / speed`, but at least a block. The step
    that samples the first token is needed in both cases; and the engine polls for the end of a
    fetch."""
    longest = max(tiers.plan.lengths)
    step, again = (statistics.median(tiers.ttfts[name][longest]) for name in (POOL, AGAIN))
    link = fit(place, list(tiers.stores[place]), list(tiers.stores[place].values()))
    gain = (again - step) / longest - tiers.bytes_per_token / link.bandwidth
    blocks = (link.latency + IDLE_SECONDS) / gain / tiers.block_size if gain > 0 else math.inf
    return tiers.block_size * max(1.0, blocks)


def measured_crossing(tiers: Tiers, place: str) -> float:
    """The length from which on fetching is faster, for all longer ones too."""
    winning = math.inf
    for length in sorted(tiers.plan.lengths, reverse=True):
        if paired(tiers.ttfts[AGAIN][length], tiers.ttfts[place][length])["median"] >= 1:
            break
        winning = length
    return winning


def lru_share(questions: Sequence[int], room: int) -> float:
    """The share of questions whose document is cached, if `room` documents fit and the least
    recently used one is evicted."""
    ask = functools.lru_cache(room)(lambda document: None)
    for document in questions:
        ask(document)
    return ask.cache_info().hits / len(questions)


def compare_lengths(measured: Tiers) -> Iterator[Row]:
    """Compare each place with computing again; the goal is to be faster from the predicted length
    on, or from the next length that was measured."""
    again = measured.ttfts[AGAIN]
    lengths = measured.plan.lengths
    for name, by_length in measured.ttfts.items():
        title = f"Time to first token with a stored prefix, medians of {len(again[lengths[0]])}"
        row: Row = {"table": title, "prefix": name}
        row |= {
            f"{length} tokens, ms": [1e3 * seconds for seconds in by_length[length]]
            for length in lengths
        }
        row["longest prefix, relative to computing"] = paired(
            again[lengths[-1]], by_length[lengths[-1]]
        )
        row |= dict.fromkeys(
            ("bare store, GB/s", "break-even tokens, predicted", "break-even tokens, measured")
        )
        if name not in (POOL, AGAIN):
            row["break-even tokens, measured"] = _tokens(measured_crossing(measured, name))
        if name in measured.stores:
            size, seconds = max(measured.stores[name].items())
            predicted = crossing(measured, name)
            actual = measured_crossing(measured, name)
            row |= {
                "bare store, GB/s": size / seconds / 1e9,
                "break-even tokens, predicted": _tokens(predicted),
            }
            figure = (
                f"shortest prefix in {name} that loads faster than it is computed (predicted "
                f"{_tokens(predicted)})"
            )
            reached = next((length for length in lengths if length >= predicted), None)
            fetching = goal(
                figure, None if actual == math.inf else actual, "tokens", at_most=reached
            )
            yield fetching | {"reached": bool(fetching["reached"])}
        yield row


def _tokens(count: float) -> str:
    return "never" if count == math.inf else f"{count:.0f}"


def compare_documents(measured: Tiers) -> Iterator[Row]:
    """Compare the questions' times and hits in each place with the pool alone, and hits with those
    of an LRU list."""
    plan = measured.plan
    base = statistics.mean(seconds for seconds, _ in measured.documents[PLAIN])
    share = plan.document_len / (plan.document_len + plan.question_len)
    for name, questions in measured.documents.items():
        room = {PLAIN: plan.pool_documents, HOST: plan.host_documents}.get(name, plan.num_documents)
        times = [1e3 * seconds for seconds, _ in questions]
        ratio = statistics.mean(times) / base / 1e3
        yield {
            "table": (
                f"{plan.num_questions} questions about {plan.num_documents} documents of "
                f"{plan.document_len} tokens; the pool holds {plan.pool_documents}, host memory "
                f"{plan.host_documents}, other stores all of them"
            ),
            "stored in": name,
            "hits, % of tokens": 100 * statistics.mean(hit for _, hit in questions),
            "predicted": 100 * share * lru_share(plan.questions(), room),
            "TTFT mean, ms": statistics.mean(times),
            "p50": times,
            "p90": float(np.percentile(times, 90)),
            "mean relative to the first row": ratio,
        }
        if name != PLAIN:
            yield goal(
                f"{plan.num_documents} documents, {name}: mean time to first token relative to "
                f"{PLAIN}",
                ratio,
                "×",
            )
