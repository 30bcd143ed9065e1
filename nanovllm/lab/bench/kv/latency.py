"""What running streams wait for while long prompts arrive: in an engine that reads a prompt at once, in ones that read it in
chunks, and where another engine reads it."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanovllm.lab.bench.kv.engines import Answer, Engines, EngineSpec, draw
from nanovllm.lab.bench.parallel.findings import Finding, Found, estimate, in_turn, number, paired
from nanovllm.lab.bench.parallel.setting import Setting
from nanovllm.lab.bench.report import Table

WHOLE, DIVIDED = "whole prompts", "prefill and decode apart"
GOAL = 0.5
LIMIT_SECONDS = 120.0
# A prompt arrives in so many times the time that the slowest way needs for one: prompts must not pile up.
SPARE, LONGEST_PAUSE = 2.0, 3.0


@dataclass(frozen=True)
class Load:
    """Streams that go on, and prompts that arrive one after another.

    Attributes:
        stream_len, prompt_len: tokens of their prompts.
        num_prompts: that arrive.
        output_len: tokens that each of them gets.
        pause: seconds from one arrival to the next.
    """

    num_streams: int = 8
    stream_len: int = 32
    num_prompts: int = 6
    prompt_len: int = 900
    output_len: int = 8
    pause: float = 0.0
    stream_output: int = 1500


@dataclass
class Watch:
    """What was seen while the prompts arrived.

    Attributes:
        gaps: between two tokens of a stream, in seconds.
        ttfts: of the prompts, in seconds.
        tokens_per_second: of everybody.
    """

    gaps: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0

    def percentile(self, percent: float) -> float:
        """Of the gaps."""
        return float(np.percentile(self.gaps, percent))


@dataclass
class Way:
    """A way to serve them.

    Attributes:
        chunk: prompt tokens a step; 0: the whole prompt.
        threads: of each engine.
        decode: the engine that answers.
        prefill: the engine that reads prompts, if that is another one.
    """

    name: str
    chunk: int
    threads: int
    decode: str
    prefill: str = ""

    def send(self, engines: Engines, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Send a request this way."""
        if self.prefill:
            return engines.ask_both(self.prefill, self.decode, prompt, max_tokens)
        return engines.ask(self.decode, prompt, max_tokens)


def ways_of(threads: int, dry_run: bool) -> list[Way]:
    """All of them have the same cores: one engine has a thread on each, two engines share them; and to see what is due to that,
    one engine has as few threads as each of the two, if that is fewer."""
    share = max(1, threads // 2)
    ways = [Way(f"{WHOLE}, {_threads(threads)}", 0, threads, "whole")]
    if share < threads and not dry_run:
        ways.append(Way(f"{WHOLE}, {_threads(share)}", 0, share, "whole slow"))
    for chunk in (32,) if dry_run else (512, 256, 128):
        ways.append(Way(f"chunks of {chunk}, {_threads(threads)}", chunk, threads, f"chunked {chunk}"))
    return [*ways, Way(f"{DIVIDED}, {_threads(share)} each", 0, share, "decode", "prefill")]


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def specs_of(ways: Sequence[Way], common: dict[str, Any], max_num_seqs: int) -> dict[str, EngineSpec]:
    """The engines that they need."""
    specs = {}
    for way in ways:
        options = common | {"max_num_seqs": max_num_seqs}
        options |= {"max_num_batched_tokens": way.chunk} if way.chunk else {"enable_chunked_prefill": False}
        if way.prefill:
            specs[way.prefill] = EngineSpec(options | {"kv_role": "producer"}, way.threads)
            options["kv_role"] = "consumer"
        specs[way.decode] = EngineSpec(options, way.threads)
    return specs


def watch(
    engines: Engines, send: Callable[[Sequence[int], int], Answer], load: Load, vocab_size: int, *name: Any
) -> Watch:
    """Start the streams, and when all of them decode, let the prompts come.

    Args:
        name: of this run: its prompts are its own.
    """
    streams: list[Answer] = []

    def stream(index: int) -> None:
        answer = send(draw(load.stream_len, vocab_size, "stream", index, len(streams), *name), load.stream_output)
        answer.on_end = lambda _: stream(index)  # it is as long as the others need it
        streams.append(answer)

    for index in range(load.num_streams):
        stream(index)
    engines.wait(lambda: all(len(s.timeline.arrivals) > 3 for s in streams), LIMIT_SECONDS)
    begin, prompts = time.monotonic(), list[Answer]()

    def arrive() -> float:
        due = begin + (len(prompts) + 0.5) * load.pause - time.monotonic()
        if len(prompts) < load.num_prompts and due <= 0:
            prompt = draw(load.prompt_len, vocab_size, "prompt", len(prompts), *name)
            prompts.append(send(prompt, load.output_len))
        return due if len(prompts) < load.num_prompts else 1.0

    def is_over() -> bool:
        return len(prompts) == load.num_prompts and all(p.finished for p in prompts)

    engines.wait(is_over, LIMIT_SECONDS, arrive)
    end = time.monotonic()
    engines.abort(streams)
    return _seen(streams, prompts, begin, end)


def _seen(streams: Sequence[Answer], prompts: Sequence[Answer], begin: float, end: float) -> Watch:
    """What happened to these between two moments."""
    gaps = [
        after - before
        for stream in streams
        for (before, _), (after, _) in itertools.pairwise(stream.timeline.arrivals)
        if begin < after <= end
    ]
    everything = [arrival for answer in (*streams, *prompts) for arrival in answer.timeline.arrivals]
    tokens = sum(count for when, count in everything if begin < when <= end)
    return Watch(gaps, [prompt.ttft for prompt in prompts], tokens / (end - begin))


@dataclass
class Measured:
    """All runs of one way.

    Attributes:
        alone: seconds to the first token of a prompt when nothing else is done.
    """

    way: Way
    alone: float
    runs: list[Watch] = field(default_factory=list)


def latency(setting: Setting) -> Found:
    """The ways take turns on the same machine; engines that have nothing to do sleep."""
    load, vocab_size = Load(), setting.model.vocab_size
    repeats = setting.repeats
    if setting.dry_run:
        load, repeats = Load(2, 8, 2, 60, 2, stream_output=150), 1
    ways = ways_of(setting.threads, setting.dry_run)
    length = load.prompt_len + load.output_len + load.stream_len + load.stream_output
    common = {"model": str(setting.folder)} | setting.options(max_model_len=length, enable_prefix_caching=True)
    with Engines(specs_of(ways, common, 2 * load.num_streams)) as engines:
        measured = {}
        for way in ways:
            answers = []
            for i in range(3):
                prompt = draw(load.prompt_len, vocab_size, "alone", i, way.name)
                answers.append(engines.complete(way.send(engines, prompt, load.output_len)))
            measured[way.name] = Measured(way, min(answer.ttft for answer in answers))
        slowest = max(each.alone for each in measured.values())
        load = dataclasses.replace(load, pause=min(SPARE * slowest, LONGEST_PAUSE))
        for turn in range(repeats):
            for name in in_turn(list(measured), turn):

                def send(prompt: Sequence[int], max_tokens: int, way: Way = measured[name].way) -> Answer:
                    return way.send(engines, prompt, max_tokens)

                measured[name].runs.append(watch(engines, send, load, vocab_size, turn, name))
    return report_latency(load, list(measured.values()))


def predict(measured: Measured, whole: Measured, load: Load) -> float:
    """The longest that a stream should wait, in seconds: for a step that decodes, and in it the part of a prompt that is read with
    it. Where prefill is elsewhere, for nothing but the step.

    Args:
        whole: an engine with as many threads that reads prompts at once; it knows how long reading takes.
    """
    step = statistics.median(run.percentile(50) for run in measured.runs)
    if measured.way.prefill:
        return step
    share = min(1.0, measured.way.chunk / load.prompt_len) if measured.way.chunk else 1.0
    return step + share * whole.alone


def _summary(run: Watch) -> dict[str, float]:
    """Thousands of gaps in a few numbers."""
    return {"count": len(run.gaps)} | {f"p{percent}": run.percentile(percent) for percent in (50, 90, 99, 100)}


def report_latency(load: Load, measured: Sequence[Measured]) -> Found:
    """What was seen; see `latency`. The first one reads whole prompts with all threads, the last one is divided."""
    found, rows = Found(), []
    base, divided = measured[0], measured[-1]
    for each in measured:
        whole = next(m for m in measured if not m.way.chunk and m.way.threads == each.way.threads)
        ratio = paired([r.percentile(99) for r in base.runs], [r.percentile(99) for r in each.runs])
        values = [statistics.median(r.percentile(p) for r in each.runs) for p in (50, 99, 100)]
        values.append(predict(each, whole, load))
        ttft = statistics.median(t for r in each.runs for t in r.ttfts)
        rows.append(
            [
                each.way.name,
                *(number(1e3 * value) for value in values),
                estimate(ratio),
                number(statistics.median(run.tokens_per_second for run in each.runs)),
                number(1e3 * ttft),
                number(1e3 * each.alone),
            ]
        )
        figure = f"p99 of inter-token latency while prompts arrive, {each.way.name}: of {base.way.name}"
        if each is divided:
            found.findings.append(Finding.at_most(figure, ratio.ratio, " ×", GOAL))
        elif each is not base:
            found.findings.append(Finding(figure, ratio.ratio, " ×"))
        runs = [dataclasses.asdict(run) | {"gaps": _summary(run)} for run in each.runs]
        found.data[each.way.name] = {"way": dataclasses.asdict(each.way), "alone": each.alone, "runs": runs}
    columns = ["engines", "ITL p50, ms", "p99", "worst", "predicted worst", "p99 of the first", "tokens/s"]
    title = (
        f"{load.num_streams} streams while a prompt of {load.prompt_len} tokens arrives every {load.pause:.1f} s, "
        f"medians of {len(base.runs)} runs in turn"
    )
    columns += ["prompts' TTFT, ms", "alone"]
    found.tables.append(Table(title, columns, rows, num_labels=1))
    return found
