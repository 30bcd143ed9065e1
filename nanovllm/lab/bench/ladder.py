"""`nanovllm bench ladder`: one workload on the engine of each lecture, from a loop that computes
all tokens again for each new one, to the finished engine; with `transformers` and other engines."""

from __future__ import annotations

import pathlib
import pydoc_data.topics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from nanovllm.lab.bench.engines import PEERS, EngineSettings, OfflineEngine
from nanovllm.lab.bench.metrics import alternate
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, paired
from nanovllm.lab.bench.speculation import QUESTIONS
from nanovllm.lab.bench.to_gguf import gguf_of
from nanovllm.lab.bench.workloads import BenchRequest
from nanovllm.text.tokenizer import Tokenizer

NUM_REQUESTS = 8
# As many are enough to measure an engine that serves one after another.
NUM_ONE_BY_ONE = 2
OUTPUT_LEN = 32
TABLE = "One workload on the engine of each lecture"
BASELINE = "transformers"
# What all requests begin with; 160 tokens in the course model's vocabulary.
SHARED = " ".join(pydoc_data.topics.topics["if"].split())[:560]


@dataclass(frozen=True)
class Rung:
    """An engine on the ladder.

    Attributes:
        lecture: the one that builds what is new; 0: another engine.
        engine: a name of `engines.ENGINES`.
        options: its settings.
        one_by_one: it gets a request only after the last token of the one before.
    """

    name: str
    lecture: int
    options: Mapping[str, object] = field(default_factory=dict)
    engine: str = "nanovllm"
    one_by_one: bool = False


# Each of these keeps the options of the rungs before it.
_LINE = (
    ("paged KV cache", 12, {"max_num_seqs": 1}),
    ("continuous batching", 13, {"max_num_seqs": NUM_REQUESTS}),
    ("prefix caching", 13, {"enable_prefix_caching": True}),
    ("attention kernels: Triton, on a CPU C++", 15, {"attention_backend": "auto"}),
    ("CUDA graphs, on a CPU all layers in one call", 40, {"enforce_eager": False}),
    ("asynchronous scheduling", 43, {"async_scheduling": True}),
)
# Each of these is an alternative, and changes the last one of the line.
_BRANCHES = (
    ("8-bit weights and activations (W8A8)", 41, {"quantization": "w8a8"}),
    ("4-bit weights (W4A8)", 41, {"quantization": "w4a8"}),
    ("drafts of the EAGLE-3 head", 42, {"speculative_config": '{"method": "eagle3"}'}),
    ("two engines, each with half of the cores or a GPU", 25, {"data_parallel_size": 2}),
)
PEER_RUNGS = (
    Rung("llama.cpp", 0, engine="llamacpp"),
    Rung("vLLM", 0, {"enable_prefix_caching": True}, "vllm"),
)
FIRST = {
    "enable_prefix_caching": False,
    "attention_backend": "torch",
    "enforce_eager": True,
    "async_scheduling": False,
}


def rungs() -> list[Rung]:
    """Return the ladder, from the bottom to the top, and `transformers` below it."""
    found = [
        Rung(BASELINE, 0, engine="hf", one_by_one=True),
        Rung("transformers, all requests as one padded batch", 0, engine="hf"),
        Rung(
            "each token computes the whole text again",
            10,
            {"caches": False},
            "nanovllm loop",
            one_by_one=True,
        ),
        Rung("KV cache", 11, {"caches": True}, "nanovllm loop", one_by_one=True),
    ]
    options: dict[str, object] = dict(FIRST)
    for name, lecture, more in _LINE:
        options |= more
        found.append(Rung(name, lecture, dict(options), one_by_one=options["max_num_seqs"] == 1))
    found += [Rung(name, lecture, options | more) for name, lecture, more in _BRANCHES]
    return found


def rung_of(lecture: int) -> Rung:
    """Return the highest rung of the line that the reader of a lecture has built. (The lectures on
    quantization, drafts and data parallelism have rungs of their own.)"""
    mine = [rung for rung in rungs() if rung.lecture == lecture]
    built = [rung for rung in rungs()[: -len(_BRANCHES)] if 0 < rung.lecture <= lecture]
    return (mine or built)[-1]


def ladder(setting: Setting) -> Iterator[Row]:
    """All rungs in alternating runs, and the peers' engines whose environments are named."""
    found = rungs()
    found += [rung for rung in PEER_RUNGS if rung.engine in setting.peers]
    yield from measure(found, setting)


def measure(chosen: Sequence[Rung], setting: Setting) -> Iterator[Row]:
    """Measure rungs in alternating runs, and compare them with the first."""
    runs = Runs(setting)
    works = {}
    with ExitStack() as stack:
        for rung in chosen:
            engine = stack.enter_context(OfflineEngine(settings_of(rung, setting)))
            engine.rest()  # engines that wait busily would slow the one that is measured
            works[rung.name] = partial(runs.run, rung, engine)
        rates = alternate(works, setting.repeats)
    for rung in chosen:
        yield {
            "table": TABLE,
            "lecture": rung.lecture or "",
            "engine": rung.name,
            "tokens/s": rates[rung.name],
            f"÷ {chosen[0].name}": paired(rates[chosen[0].name], rates[rung.name]),
        }


def settings_of(rung: Rung, setting: Setting) -> EngineSettings:
    """How to start the engine of a rung."""
    options = dict(rung.options)
    device = setting.fastest_device
    if setting.dry_run and "speculative_config" in options:
        options["speculative_config"] = '{"method": "ngram"}'  # there is no head for the tiny model
    if rung.engine == "nanovllm":
        options = setting.options(**options) | {"device": device}
        del options["model"]
    elif rung.engine == "nanovllm loop":
        options |= {"dtype": setting.dtype, "device": device}
    else:
        options["dtype"] = "bfloat16" if setting.dtype == "auto" else setting.dtype
    if rung.engine == "hf":
        options["device"] = device
    found = EngineSettings(rung.engine, pathlib.Path(setting.folder), options, setting.threads)
    if rung.engine in PEERS:
        found.options |= {"max_model_len": 2048, "max_num_seqs": NUM_REQUESTS}
        found.python = setting.peers[rung.engine]
    if rung.engine == "llamacpp":
        found.model = gguf_of(found.model, found.options["dtype"])
    return found


class Runs:
    """Runs the workload, each time with a new beginning, so that nothing of it is in a cache.

    Attributes:
        turns: of each rung, how often it ran.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.tokenizer = Tokenizer.from_pretrained(setting.folder)
        self.turns: dict[str, int] = {}

    def run(self, rung: Rung, engine: OfflineEngine) -> float:
        """Run the workload on an engine that rests; returns its output tokens per second."""
        turn = self.turns[rung.name] = self.turns.get(rung.name, -1) + 1
        requests = self.requests(turn)
        groups = [[each] for each in requests[:NUM_ONE_BY_ONE]] if rung.one_by_one else [requests]
        engine.wake()
        seconds = 0.0
        for group in groups:
            seconds += max(line[-1][0] for line in engine.ask(group))
        engine.rest()
        return sum(each.max_tokens for group in groups for each in group) / seconds

    def requests(self, turn: int) -> list[BenchRequest]:
        """Return the requests of a turn: questions that share what precedes them."""
        input_len, output_len = (64, 4) if self.setting.dry_run else (None, OUTPUT_LEN)
        questions = [*QUESTIONS["chat"], *QUESTIONS["code"]][:NUM_REQUESTS]
        texts = [f"Visit {turn}. {SHARED}\n\n{question}" for question in questions]
        return [BenchRequest(self.tokenizer.encode(text)[:input_len], output_len) for text in texts]
