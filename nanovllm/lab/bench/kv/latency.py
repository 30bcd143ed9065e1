"""The inter-token latency of running streams while long prompts arrive: in an engine that computes
whole prompts, in engines that compute them in chunks, and with prefill in another engine."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nanovllm.lab.bench.kv.engines import Answer, Engines, EngineSpec, draw
from nanovllm.lab.bench.metrics import alternate, percentile
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, goal, paired

WHOLE = "whole prompts"
DIVIDED = "separate prefill and decode"
GOAL = 0.5
LIMIT_SECONDS = 120.0
# The pause between prompts, in units of the slowest way's time for one (prompts must not pile up),
# and its limit in seconds.
SPARE = 2.0
LONGEST_PAUSE = 3.0


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
class Run:
    """What happened while the prompts arrived.

    Attributes:
        gaps: between two tokens of a stream, in seconds.
        ttfts: of the prompts, in seconds.
        tokens_per_second: of all requests.
    """

    gaps: list[float]
    ttfts: list[float]
    tokens_per_second: float


@dataclass
class Way:
    """A way to serve the load, and its measurements.

    Attributes:
        chunk: prompt tokens per step; 0: the whole prompt.
        threads: of each engine.
        decode: the engine that answers.
        prefill: the engine that computes prompts, if that is another one.
        alone: seconds to the first token of a prompt on idle engines.
    """

    name: str
    chunk: int
    threads: int
    decode: str
    prefill: str = ""
    alone: float = 0.0
    runs: list[Run] = field(default_factory=list)

    def send(self, engines: Engines, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Send a request this way."""
        if self.prefill:
            return engines.ask_both(self.prefill, self.decode, prompt, max_tokens)
        return engines.ask(self.decode, prompt, max_tokens)


def ways_of(threads: int, dry_run: bool) -> list[Way]:
    """All ways use the same cores: one engine has a thread per core, two engines share the cores.
    For comparison, one more engine has as few threads as each of the two, if that is fewer."""
    share = max(1, threads // 2)
    names = {count: f"{count} thread{'s' * (count > 1)}" for count in (threads, share)}
    ways = [Way(f"{WHOLE}, {names[threads]}", 0, threads, "whole")]
    if share < threads and not dry_run:
        ways.append(Way(f"{WHOLE}, {names[share]}", 0, share, "whole slow"))
    for chunk in (32,) if dry_run else (512, 256, 128):
        ways.append(Way(f"chunks of {chunk}, {names[threads]}", chunk, threads, f"chunked {chunk}"))
    return [*ways, Way(f"{DIVIDED}, {names[share]} each", 0, share, "decode", "prefill")]


def specs_of(
    ways: Sequence[Way], common: dict[str, Any], max_num_seqs: int
) -> dict[str, EngineSpec]:
    """The engines that the ways need."""
    specs = {}
    for way in ways:
        options = common | {"max_num_seqs": max_num_seqs}
        options |= (
            {"max_num_batched_tokens": way.chunk}
            if way.chunk
            else {"enable_chunked_prefill": False}
        )
        if way.prefill:
            specs[way.prefill] = EngineSpec(options | {"kv_role": "producer"}, way.threads)
            options["kv_role"] = "consumer"
        specs[way.decode] = EngineSpec(options, way.threads)
    return specs


def run_load(engines: Engines, way: Way, load: Load, vocab_size: int, turn: int) -> Run:
    """Start the streams; when all of them decode, send the prompts one by one."""
    streams = list[Answer]()
    prompts = list[Answer]()

    def stream(index: int) -> None:
        name = ("stream", index, len(streams), turn, way.name)
        streams.append(
            way.send(engines, draw(load.stream_len, vocab_size, *name), load.stream_output)
        )
        streams[-1].on_end = lambda _: stream(index)  # it goes on as long as prompts arrive

    for index in range(load.num_streams):
        stream(index)
    engines.wait(lambda: all(len(s.timeline.arrivals) > 3 for s in streams), LIMIT_SECONDS)
    begin = time.monotonic()

    def arrive() -> float:
        due = begin + (len(prompts) + 0.5) * load.pause - time.monotonic()
        if len(prompts) < load.num_prompts and due <= 0:
            prompt = draw(load.prompt_len, vocab_size, "prompt", len(prompts), turn, way.name)
            prompts.append(way.send(engines, prompt, load.output_len))
        return due if len(prompts) < load.num_prompts else 1.0

    engines.wait(
        lambda: len(prompts) == load.num_prompts and all(p.finished for p in prompts),
        LIMIT_SECONDS,
        arrive,
    )
    end = time.monotonic()
    engines.abort(streams)
    return run_between(streams, prompts, begin, end)


def run_between(
    streams: Sequence[Answer], prompts: Sequence[Answer], begin: float, end: float
) -> Run:
    """What happened between two moments."""
    waits = [wait for stream in streams for wait in stream.timeline.waits]
    gaps = [after - before for before, after in waits if begin < after <= end]
    arrivals = [arrival for answer in (*streams, *prompts) for arrival in answer.timeline.arrivals]
    tokens = sum(count for when, count in arrivals if begin < when <= end)
    return Run(gaps, [prompt.ttft for prompt in prompts], tokens / (end - begin))


def latency(setting: Setting) -> Iterator[Row]:
    """The ways take turns on the same machine; idle engines sleep."""
    load = Load()
    vocab_size = setting.model.vocab_size
    repeats = setting.repeats
    if setting.dry_run:
        load = Load(2, 8, 2, 60, 2, stream_output=150)
        repeats = 1
    ways = ways_of(setting.threads, setting.dry_run)
    length = load.prompt_len + load.output_len + load.stream_len + load.stream_output
    common = setting.options(max_model_len=length, enable_prefix_caching=True)
    with Engines(specs_of(ways, common, 2 * load.num_streams)) as engines:
        for way in ways:
            prompts = [draw(load.prompt_len, vocab_size, "alone", i, way.name) for i in range(3)]
            way.alone = min(
                engines.complete(way.send(engines, prompt, load.output_len)).ttft
                for prompt in prompts
            )
        load = replace(load, pause=min(SPARE * max(way.alone for way in ways), LONGEST_PAUSE))

        def run(way: Way) -> None:
            way.runs.append(run_load(engines, way, load, vocab_size, len(way.runs)))

        alternate({way.name: partial(run, way) for way in ways}, repeats, warm_up=0)
    yield from compare(load, ways)


def predict(way: Way, whole: Way, load: Load) -> float:
    """Predict the longest wait of a stream in seconds: a decode step, and the share of a prompt
    that is computed with it. With prefill in another engine, the step alone.

    Args:
        whole: an engine with as many threads that computes whole prompts, whose time for a prompt
            is known.
    """
    step = statistics.median(percentile(run.gaps, 50) for run in way.runs)
    share = min(1.0, way.chunk / load.prompt_len) if way.chunk else 1.0
    return step if way.prefill else step + share * whole.alone


def compare(load: Load, ways: Sequence[Way]) -> Iterator[Row]:
    """Compare each way with the first one, which computes whole prompts with all threads; the last
    one is divided."""
    base = ways[0]
    late = {way.name: [percentile(run.gaps, 99) for run in way.runs] for way in ways}
    for way in ways:
        whole = next(other for other in ways if not other.chunk and other.threads == way.threads)
        ratio = paired(late[base.name], late[way.name])
        figure = (
            f"p99 inter-token latency while prompts arrive, {way.name}: relative to {base.name}"
        )
        if way is not base:
            yield goal(figure, ratio["median"], "×", at_most=GOAL if way.prefill else None)
        yield {
            "table": (
                f"{load.num_streams} streams while a prompt of {load.prompt_len} tokens arrives "
                f"every {load.pause:.1f} s, medians of {len(base.runs)} alternating runs"
            ),
            "engines": way.name,
            "ITL p50, ms": [1e3 * percentile(run.gaps, 50) for run in way.runs],
            "p99": [1e3 * seconds for seconds in late[way.name]],
            "worst": [1e3 * max(run.gaps) for run in way.runs],
            "predicted worst": 1e3 * predict(way, whole, load),
            "p99 relative to the first row": ratio,
            "tokens/s": [run.tokens_per_second for run in way.runs],
            "prompts' TTFT, ms": [1e3 * seconds for run in way.runs for seconds in run.ttfts],
            "TTFT alone, ms": 1e3 * way.alone,
        }
