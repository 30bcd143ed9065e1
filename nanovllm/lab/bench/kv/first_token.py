"""The time to the first token if prefill is in another engine: prefill first, decode first, pull
and push, and not at all."""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from nanovllm.lab.bench.kv import transport
from nanovllm.lab.bench.kv.engines import Answer, Engines, EngineSpec, draw
from nanovllm.lab.bench.metrics import alternate
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, estimate, goal, paired

ONE = "one engine"
PREFILL_FIRST = "prefill first, pull"
PULL = "decode first, pull"
PUSH = "decode first, push"
WAYS = (ONE, PREFILL_FIRST, PULL, PUSH)
COLD = ""
CONSUMER = ", half cached by the consumer"
BOTH = ", half cached by both"


@dataclass
class Case:
    """Prompts of one length.

    Attributes:
        cached: which engines have seen the first half of each prompt before.
        seconds: to the first token, by way.
        prefilled: prefill first: seconds until the producer has done its part.
    """

    length: int
    cached: str = COLD
    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    prefilled: list[float] = field(default_factory=list)


def ask(engines: Engines, way: str, prompt: Sequence[int]) -> Answer:
    """Ask for one token."""
    if way == ONE:
        return engines.complete(engines.ask("one", prompt))
    if way == PREFILL_FIRST:
        return engines.complete(engines.ask_both("prefill", "decode", prompt))
    params = {"do_remote_prefill": True, "prefill_addresses": engines.addresses("prefill")}
    params["kv_direction"] = "pull" if way == PULL else "push"
    return engines.complete(engines.ask("decode", prompt, params=params))


def measure(engines: Engines, cases: list[Case], rounds: int, vocab_size: int) -> None:
    """All cases and ways in turn, each with prompts of its own."""

    def run(case: Case, way: str, turns: Iterator[int]) -> Answer:
        prompt = draw(case.length, vocab_size, case.length, case.cached, way, next(turns))
        warmed = ["one"] if way == ONE else ["decode", *["prefill"] * (case.cached == BOTH)]
        for name in warmed if case.cached else ():
            engines.complete(engines.ask(name, prompt[: case.length // 2]))
        answer = ask(engines, way, prompt)
        if way != ONE and answer.num_cached < case.length - 1:
            raise RuntimeError(
                f"{way}: decode has KV of {answer.num_cached} of {case.length} tokens"
            )
        return answer

    works = {
        (i, way): partial(run, case, way, itertools.count())
        for i, case in enumerate(cases)
        for way in WAYS
    }
    for (i, way), answers in alternate(works, rounds).items():
        cases[i].seconds[way] = [answer.ttft for answer in answers]
        if way == PREFILL_FIRST:
            cases[i].prefilled = [
                (answer.prefilled or 0.0) - answer.timeline.start for answer in answers
            ]


def measure_again(engines: Engines, length: int, vocab_size: int, rounds: int) -> float:
    """Seconds to the first token of a prompt that has just been answered."""
    prompt = draw(length, vocab_size, "again")
    return statistics.median(
        [engines.complete(engines.ask("decode", prompt)).ttft for _ in range(rounds + 1)][1:]
    )


def first_token(setting: Setting) -> Iterator[Row]:
    """Every engine has all cores: only one of them computes at a time, as if each had a machine of
    its own."""
    lengths, half, rounds = (
        ((20, 60), 60, 1) if setting.dry_run else ((100, 300, 900), 900, 2 * setting.repeats)
    )
    cases = [*map(Case, lengths), Case(half, CONSUMER), Case(half, BOTH)]
    num_bytes, seconds = transport.measure(setting, rounds=1 if setting.dry_run else 5)
    options = setting.options(max_model_len=max(lengths) + 16, enable_prefix_caching=True)
    roles = {"one": {}, "prefill": {"kv_role": "producer"}, "decode": {"kv_role": "consumer"}}
    vocab_size = setting.model.vocab_size
    with Engines(
        {name: EngineSpec(options | role, setting.threads) for name, role in roles.items()}
    ) as engines:
        measure(engines, cases, rounds, vocab_size)
        again = {length: measure_again(engines, length, vocab_size, rounds) for length in lengths}
    layout = transport.cache_layout(setting)
    bytes_per_token = layout.block_bytes * layout.num_layers // layout.block_size
    yield from compare(
        cases, again, bytes_per_token * statistics.median(seconds[transport.READ]) / num_bytes
    )


def predict(
    case: Case, cases: Sequence[Case], way: str, again: float, seconds_per_token: float
) -> float:
    """Predict the seconds to the first token: the producer computes, the bytes travel, and the
    consumer makes a step with nearly nothing to compute. A push travels while the producer
    computes."""
    if way == ONE:
        return statistics.median(case.seconds[ONE])
    cold = next(other for other in cases if other.length == case.length and not other.cached)
    computed = case if case.cached == BOTH else cold
    tokens = case.length - (case.length // 2 if case.cached else 0)
    moved = 0.0 if way == PUSH else tokens * seconds_per_token
    return statistics.median(computed.seconds[ONE]) + moved + again


def compare(
    cases: Sequence[Case], again: dict[int, float], seconds_per_token: float
) -> Iterator[Row]:
    """Compare the ways round by round, and each with its prediction.

    Args:
        again: seconds to the first token of a prompt that is in the engine's cache, by its length.
        seconds_per_token: that a transfer of its KV takes.
    """
    longest = max(case.length for case in cases)
    for case in cases:
        name = f"{case.length} tokens{case.cached}"
        one = case.seconds[ONE]
        for way, times in case.seconds.items():
            ratio = paired(one, times)
            predicted = predict(case, cases, way, again[case.length], seconds_per_token)
            yield {
                "table": f"Time to first token, medians of {len(one)}, 95 % intervals",
                "prompt": name,
                "way": way,
                "TTFT, ms": [1e3 * seconds for seconds in times],
                "predicted": 1e3 * predicted,
                "extra over one engine, ms": estimate(
                    [1e3 * (b - a) for a, b in zip(one, times, strict=True)]
                ),
                "relative to one engine": ratio,
            }
            if case.length == longest and case.cached != BOTH and way != ONE:
                yield goal(
                    f"time to first token, {name}, {way}: relative to one engine",
                    ratio["median"],
                    "×",
                )
        yield {
            "table": "Where the time goes",
            "prompt": name,
            "one engine, ms": [1e3 * seconds for seconds in one],
            "prefill first: the producer's part, ms": [1e3 * seconds for seconds in case.prefilled],
            "a cached prompt, ms": 1e3 * again[case.length],
        }
