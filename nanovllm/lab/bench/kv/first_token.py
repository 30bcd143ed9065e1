"""When the first token comes if prefill is somewhere else: prefill first, decode first, pull and push, and not at all."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanovllm.lab.bench.kv import transport
from nanovllm.lab.bench.kv.engines import Answer, Engines, EngineSpec, draw
from nanovllm.lab.bench.parallel.findings import Finding, Found, estimate, in_turn, number, paired
from nanovllm.lab.bench.parallel.setting import Setting
from nanovllm.lab.bench.report import Table
from nanovllm.lab.bench.watch import Estimate

ONE, PREFILL_FIRST = "one engine", "prefill first, pull"
PULL, PUSH = "decode first, pull", "decode first, push"
WAYS = (ONE, PREFILL_FIRST, PULL, PUSH)
COLD, CONSUMER, BOTH = "", ", half of it cached by the consumer", ", half of it cached by both"


@dataclass
class Case:
    """Prompts of one length.

    Attributes:
        cached: who has seen the first half of each before.
        seconds: to the first token, by way.
        prefilled: prefill first: when the producer had done its part.
    """

    length: int
    cached: str = COLD
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    prefilled: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For a reader."""
        return f"{self.length} tokens{self.cached}"


@dataclass
class FirstTokens:
    """Everything that was measured.

    Attributes:
        again: seconds to the first token of a prompt that an engine has in its cache, by its length: a step that computes
            next to nothing.
        bytes_per_token: of KV.
        bytes_per_second: of a transfer.
    """

    cases: list[Case]
    again: dict[int, float]
    bytes_per_token: int
    bytes_per_second: float

    def predict(self, case: Case, way: str) -> float:
        """Seconds to the first token: the producer computes, the bytes travel, and the consumer makes a step in which there is
        next to nothing to compute. A push has gone on while the producer computed."""
        if way == ONE:
            return statistics.median(case.seconds[ONE])
        alike = [other for other in self.cases if other.length == case.length]
        computed = case if case.cached == BOTH else next(other for other in alike if not other.cached)
        tokens = case.length - (case.length // 2 if case.cached else 0)
        moved = 0.0 if way == PUSH else tokens * self.bytes_per_token / self.bytes_per_second
        return statistics.median(computed.seconds[ONE]) + moved + self.again[case.length]


def ask(engines: Engines, way: str, prompt: Sequence[int]) -> Answer:
    """Ask for the one token."""
    if way == ONE:
        return engines.complete(engines.ask("one", prompt))
    if way == PREFILL_FIRST:
        return engines.complete(engines.ask_both("prefill", "decode", prompt))
    params = {"do_remote_prefill": True, "prefill_addresses": engines.addresses["prefill"]}
    params["kv_direction"] = "pull" if way == PULL else "push"
    return engines.complete(engines.ask("decode", prompt, params=params))


def warm(engines: Engines, way: str, prompt: Sequence[int], case: Case) -> None:
    """Let those see the first half who have seen it."""
    half = prompt[: case.length // 2]
    names = ["one"] if way == ONE else ["decode", *["prefill"] * (case.cached == BOTH)]
    for name in names if case.cached else ():
        engines.complete(engines.ask(name, half))


def measure(engines: Engines, cases: list[Case], rounds: int, vocab_size: int) -> None:
    """All ways in turn, each with prompts of its own; the first round does not count."""
    for turn in range(rounds + 1):
        for case in cases:
            for way in in_turn(WAYS, turn):
                prompt = draw(case.length, vocab_size, case.name, way, turn)
                warm(engines, way, prompt, case)
                answer = ask(engines, way, prompt)
                if way != ONE and answer.num_cached < case.length - 1:
                    raise RuntimeError(
                        f"{way}: the decode engine got KV of {answer.num_cached} of {case.length} tokens"
                    )
                if turn:
                    case.seconds[way].append(answer.ttft)
                    if answer.prefilled is not None:
                        case.prefilled.append(answer.prefilled - answer.timeline.start)


def measure_again(engines: Engines, length: int, vocab_size: int, rounds: int) -> float:
    """Seconds to the first token of a prompt that has just been answered."""
    prompt = draw(length, vocab_size, "again")
    return statistics.median([engines.complete(engines.ask("decode", prompt)).ttft for _ in range(rounds + 1)][1:])


def first_token(setting: Setting) -> Found:
    """Every engine has all cores: only one of them computes at a time, as if each had a machine of its own."""
    lengths, half, rounds = ((20, 60), 60, 1) if setting.dry_run else ((100, 300, 900), 900, 2 * setting.repeats)
    cases = [*map(Case, lengths), Case(half, CONSUMER), Case(half, BOTH)]
    num_bytes, seconds = transport.measure(setting, rounds=1 if setting.dry_run else 5)
    options = {"model": str(setting.folder)}
    options |= setting.options(max_model_len=max(lengths) + 16, enable_prefix_caching=True)
    roles = {"one": {}, "prefill": {"kv_role": "producer"}, "decode": {"kv_role": "consumer"}}
    specs = {name: EngineSpec(options | role, setting.threads) for name, role in roles.items()}
    vocab_size = setting.model.vocab_size
    with Engines(specs) as engines:
        measure(engines, cases, rounds, vocab_size)
        again = {length: measure_again(engines, length, vocab_size, rounds) for length in lengths}
    layout = transport.cache_layout(setting)
    bytes_per_token = layout.block_bytes * layout.num_layers // layout.block_size
    rate = num_bytes / statistics.median(seconds[transport.READ])
    return report_first_tokens(FirstTokens(cases, again, bytes_per_token, rate))


def report_first_tokens(measured: FirstTokens) -> Found:
    """What the times say. A pull should add the bytes' way, and the step of an engine that has nearly all in its cache; a push
    has gone on while the prompt was computed."""
    found, rows = Found(data=dataclasses.asdict(measured)), []
    longest = max(case.length for case in measured.cases)
    for case in measured.cases:
        for way in WAYS:
            pairs = list(zip(case.seconds[ONE], case.seconds[way], strict=True))
            ratio = paired(*zip(*pairs, strict=True))
            more = Estimate.of([divided - one for one, divided in pairs])
            cells = [1e3 * statistics.median(case.seconds[way]), 1e3 * measured.predict(case, way)]
            rows.append([case.name, way, *map(number, cells), estimate(more, 1e3), estimate(ratio)])
            if case.length == longest and case.cached != BOTH and way != ONE:
                figure = f"time to first token, {case.name}, {way}: of one engine"
                found.findings.append(Finding(figure, ratio.ratio, " ×"))
    columns = ["prompt", "way", "TTFT, ms", "predicted", "more than one engine, ms", "of one engine"]
    title = f"Time to first token, medians of {len(pairs)}, 95 % intervals"
    found.tables.append(Table(title, columns, rows))
    producer = []
    for case in measured.cases:
        parts = (*(statistics.median(t) for t in (case.seconds[ONE], case.prefilled)), measured.again[case.length])
        producer.append([case.name, *(number(1e3 * seconds) for seconds in parts)])
    columns = ["prompt", "one engine, ms", "prefill first: the producer's part", "a prompt that is cached"]
    found.tables.append(Table("Where it goes", columns, producer, num_labels=1))
    return found
