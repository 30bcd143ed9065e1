"""CUDA graphs without a GPU: a double that repeats recorded work on the very same addresses, and
refuses any other."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import pathlib
import subprocess
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from nbformat import v4
from torch import Tensor

import nanovllm.core.runner
import nanovllm.features.cuda_graphs.graphs
from nanovllm import LLM, SamplingParams
from nanovllm.assembly.flags import add_flags, read_flags
from nanovllm.assembly.runner import (
    choose_features,
    create_forward,
    create_runner,
    graph_maker,
    runner_settings,
)
from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.torch import CpuBackend, TorchBackend
from nanovllm.core.batch import StepBuffers
from nanovllm.core.forward import Forward
from nanovllm.core.runner import ModelRunner
from nanovllm.core.schedule import ScheduledRequest, SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import resolve
from nanovllm.features.cuda_graphs.graphs import CudaGraph, GraphForward, WarmUp, ladder
from nanovllm.features.pipeline.stage import StageForward
from nanovllm.lab.course.__main__ import main as course_main
from nanovllm.models.config import ModelConfig
from tests.models.test_eagle import CONFIG, random_head, write
from tests.oracle import make_checkpoint
from tests.pairwise import in_turn
from tests.stand_ins import set_backend, set_gpu

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


# ---------------------------------------------------------------- the ladder


@pytest.mark.parametrize("most", [*range(1, 70), 100, 256, 257, 300, 512, 1000, 4096])
def test_ladder(most: int) -> None:
    sizes = ladder(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for num_seqs in range(1, most + 1):
        size = next(size for size in sizes if size >= num_seqs)
        assert size - num_seqs < max(8, num_seqs / 16), "too much padding"


def test_ladder_is_that_of_vllm() -> None:
    assert ladder(512) == [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    assert ladder(13) == [1, 2, 4, 8, 13]
    assert len(ladder(100_000)) < 250


class Rows:
    """Of a runner what graphs need."""

    device: torch.device

    def __init__(self, sizes: int, noted: list[Any]) -> None:
        config = EngineConfig(max_num_seqs=sizes)
        self.settings = runner_settings(resolve(config, model_max_len=64, num_kv_blocks=32))
        self.noted = noted
        self.buffers = self  # of which graphs need two methods

    def pad(self, first: int, end: int) -> None:
        self.noted.append(("padding", first, end))

    def inputs(
        self, num_seqs: int, num_tokens: int, *longest: int, upload: bool = False
    ) -> tuple[int]:
        if upload:
            self.noted.append(("upload", num_seqs, num_tokens))
        return (num_seqs,)


class Zeros(GraphForward):
    """A step of some rows computes as many zeros, plus `number`."""

    def __init__(self, make_graph: Any, noted: list[Any]) -> None:
        super().__init__(None, None, make_graph)  # type: ignore[arg-type]
        self.noted = noted
        self.number = 0.0

    def run(self, size: int) -> Tensor:  # type: ignore[override]
        self.noted.append(f"work {size}")
        return torch.zeros(size) + self.number


def prepared(make_graph: Any, sizes: int, noted: list[Any]) -> Zeros:
    """One whose steps are recorded."""
    forward = Zeros(make_graph, noted)
    forward.prepare(Rows(sizes, noted))  # type: ignore[arg-type]
    return forward


def batch_of(counts: list[int], padded: int) -> Any:
    return SimpleNamespace(num_scheduled=np.array(counts), input_ids=[0] * padded)


def test_the_smallest_that_is_large_enough() -> None:
    recorded: list[Any] = []

    class Listed:
        def capture(self, work: Callable[[], Tensor], pool: Any) -> Any:
            recorded.append((len(work()), pool))
            return "pool"

        def replay(self) -> None:
            recorded.append("replayed")

    noted: list[Any] = []
    graphs = prepared(Listed, 13, noted)
    assert recorded == [(13, None), *((n, "pool") for n in (8, 4, 2, 1))], (
        "all share the memory of the first"
    )
    assert noted == [
        ("padding", 0, 13),
        ("upload", 13, 13),
        *(f"work {n}" for n in (13, 8, 4, 2, 1)),
    ]
    assert [graphs.size_for(n) for n in (1, 3, 4, 5, 8, 9, 13)] == [1, 4, 4, 8, 8, 13, 13]
    out = graphs.replay(batch_of([1] * 5, 8))
    assert recorded[-1] == "replayed" and len(out) == 5


@torch.inference_mode()
def test_a_replay_returns_the_rows_of_the_requests() -> None:
    replayed: list[int] = []

    class Graph:
        def capture(self, work: Callable[[], Tensor], pool: Any) -> Any:
            self.work = work
            work()
            return "pool"

        def replay(self) -> None:
            replayed.append(len(self.work()))

    graphs = prepared(Graph, 8, [])
    with torch.inference_mode():
        out = graphs.replay(batch_of([1, 2], 4))
    assert replayed == [4], "the graph of the size to which the batch was padded"
    assert out.shape == (3,), "the requests' rows, without those of the padding"
    graphs.number = 7.0
    with torch.inference_mode():
        graphs.replay(batch_of([1] * 8, 8))
    assert replayed == [4, 8]
    assert (out == 7).all(), "all graphs write to the same buffer"


# ---------------------------------------------------------------- the double


class Watched:
    """A backend that a graph may record, since what it reads of lengths it reads when it runs. It
    notes all that a GPU's kernels would be given: addresses, shapes and strides."""

    supports_graphs = True
    launches: list[Any]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        inputs = (
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            metadata.slot_mapping,
        )
        for tensor in (kv_cache, *inputs):
            self.launches.append((tensor.data_ptr(), tensor.shape, tensor.stride()))
        self.launches.append((metadata.max_query_len, metadata.max_seq_len))
        return super().forward(q, k, v, kv_cache, metadata, *rest, **options)  # type: ignore[misc]


class WatchedTorch(Watched, TorchBackend):
    """The same in plain torch."""


class WatchedCpu(Watched, CpuBackend):
    """The compiled loops, which check every index."""


class Recording:
    """A graph on the CPU. Between its replays its result is spoiled, so that nobody lives on an old
    one."""

    made: list[Recording]
    launches: list[Any]

    def __init__(self) -> None:
        self.made.append(self)
        self.num_replays = 0

    def capture(self, work: Callable[[], Tensor], pool: Any) -> Any:
        self.work = work
        self.result = work()
        self.launches.clear()
        work()
        self.recorded = list(self.launches)
        self.result.fill_(float("nan"))
        return pool or object()

    def replay(self) -> None:
        self.num_replays += 1
        self.result.fill_(float("nan"))
        self.launches.clear()
        again = self.work()
        assert again.data_ptr() == self.result.data_ptr() and again.shape == self.result.shape
        assert self.launches == self.recorded, "a graph would have read elsewhere"


def record_graphs(
    patch: pytest.MonkeyPatch, backend: type[Watched] = WatchedTorch
) -> type[Recording]:
    """From here on, runners record graphs, as on a GPU."""
    Watched.launches = Recording.launches = []
    Recording.made = []
    set_backend(patch, backend, Recording)
    return Recording


# By day a costly test has each of its cases with one of them, in turn.
BACKENDS = [WatchedTorch, WatchedCpu]


@pytest.fixture(params=BACKENDS)
def graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Recording]:
    """From here on, runners record graphs, as on a GPU."""
    return record_graphs(monkeypatch, request.param)


def recorded_sizes(runner: ModelRunner) -> list[int]:
    """The sizes of the recorded steps."""
    assert isinstance(runner.forward, GraphForward)
    return runner.forward.sizes


def watch_inputs(runner: ModelRunner) -> None:
    """Note the addresses of token ids and positions, too."""
    forward = runner.model.forward

    def watched(input_ids: Tensor, positions: Tensor, *others: Any) -> Any:
        Watched.launches += [(t.data_ptr(), t.shape) for t in (input_ids, positions)]
        return forward(input_ids, positions, *others)

    runner.model.forward = watched  # type: ignore[method-assign]


def make_llm(folder: pathlib.Path, **options: Any) -> LLM:
    llm = LLM(
        str(folder),
        **{
            "dtype": "float32",
            "block_size": 4,
            "max_num_batched_tokens": 24,
            "max_num_seqs": 13,
            "max_model_len": 64,
        }
        | {"num_kv_blocks": 256, "check_invariants": True}
        | options,
    )
    return llm


def make_prompts(count: int, shared: int = 0) -> list[list[int]]:
    return [
        [7 * i % 300 + 3 for i in range(shared)]
        + [(i * i + 11 * n) % 300 + 3 for i in range(1 + 5 * n % 17)]
        for n in range(count)
    ]


def serve(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


def same_caches(llm: LLM, other: LLM) -> bool:
    """Whether both have computed the same keys and values into the same slots, and nothing anywhere
    else."""
    caches, others = llm.engine.core.runner.kv_caches, other.engine.core.runner.kv_caches
    return all(torch.allclose(a, b, atol=1e-4) for a, b in zip(caches, others, strict=True))


# ---------------------------------------------------------------- the engine with graphs


@pytest.mark.parametrize(
    ("count", "graphs"), in_turn([1, 2, 3, 5, 9, 13, 20], BACKENDS), indirect=["graphs"]
)
def test_same_tokens_and_same_cache_as_without(folder, graphs, count) -> None:
    """With batches of every size, as requests come and end; 13 is no rung but the last."""
    prompts = make_prompts(count)
    params = [
        SamplingParams(temperature=0, max_tokens=3 + 4 * n % 19, ignore_eos=True)
        for n in range(count)
    ]
    eager, llm = make_llm(folder, enforce_eager=True), make_llm(folder)
    assert serve(llm, prompts, params) == serve(eager, prompts, params)
    assert same_caches(llm, eager)
    assert type(eager.engine.core.runner.forward) is Forward
    assert recorded_sizes(llm.engine.core.runner) == [1, 2, 4, 8, 13]
    assert sum(graph.num_replays for graph in graphs.made) > 0


@pytest.mark.parametrize(
    ("options", "graphs"),
    in_turn(
        [
            {"num_kv_blocks": 28},
            {"num_kv_blocks": 28, "preemption_mode": "swap", "swap_space": 0.001},
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
            {"batching_policy": "prefill_first", "max_num_batched_tokens": 64},
            {"max_num_seqs": 7, "block_size": 1},
        ],
        BACKENDS,
    ),
    indirect=["graphs"],
)
def test_preemption_prefix_hits_and_policies(folder, graphs, options) -> None:
    """Twice the same prompts, which begin alike: the second time, most of them is found in the
    cache."""
    eager, llm = make_llm(folder, enforce_eager=True, **options), make_llm(folder, **options)
    prompts = make_prompts(11, shared=9)
    for _ in range(2):
        assert serve(llm, prompts) == serve(eager, prompts)
        assert same_caches(llm, eager)
    stats = llm.engine.core.stats
    assert stats == eager.engine.core.stats and stats.num_hit_tokens > 0
    assert stats.num_preemptions > 0 or options.get("num_kv_blocks") != 28


@pytest.mark.parametrize(
    ("method", "graphs"), in_turn(["ngram", "draft_model", "eagle3"], BACKENDS), indirect=["graphs"]
)
def test_steps_with_drafts_are_replayed(folder, graphs, monkeypatch, tmp_path, method) -> None:
    """With and without graphs the same drafts, although a head reads hidden states of the replayed
    step; and tokens as without drafts."""
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    drafts["num_speculative_tokens_per_batch_size"] = [[1, 256, 3]]
    drafts |= {"draft_model": {"model": str(folder)}, "ngram": {"prompt_lookup_min": 1}}.get(
        method, {}
    )
    if method == "eagle3":
        drafts["model"] = str(write(tmp_path, random_head(), CONFIG))
    few = {token: 60.0 for token in (70, 71, 72)}  # so that the text repeats itself
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=24, ignore_eos=True, logit_bias=few)
    plain = make_llm(folder, enforce_eager=True)
    made = [
        make_llm(folder, enforce_eager=eager, speculative_config=drafts) for eager in (True, False)
    ]
    noted: list[list[Any]] = [[], []]
    for llm, notes in zip(made, noted, strict=True):

        def note(plan: SchedulerOutput, replayed: list[int], notes: Any = notes) -> None:
            notes += [(r.request_id, r.num_tokens, list(r.extra_token_ids)) for r in plan.requests]
            decodes = all(r.num_tokens == 1 + len(r.extra_token_ids) for r in plan.requests)
            fits = sum(r.num_tokens for r in plan.requests) <= 24
            if notes is noted[1] and decodes:
                assert len(replayed) == fits

        watch_steps(monkeypatch, llm.engine.core.runner, graphs, note)
    prompts = make_prompts(4, shared=3)
    expected = serve(plain, prompts, params)
    assert [serve(llm, prompts, params) for llm in made] == [expected] * 2
    assert noted[0] == noted[1] and sum(len(drafted) for *_, drafted in noted[1]) > 30
    assert recorded_sizes(made[1].engine.core.runner)[-1] == 24, (
        "as many rows as the step's budget, for up to 52 tokens"
    )


def watch_steps(
    patch: pytest.MonkeyPatch,
    runner: ModelRunner,
    graphs: type[Recording],
    note: Callable[[SchedulerOutput, list[int]], None],
) -> None:
    """Call a function after each launch, with its plan and the sizes of the graphs that it has
    replayed."""
    launch = runner.launch

    def watched(plan: SchedulerOutput) -> Any:
        before = [graph.num_replays for graph in graphs.made]
        wait = launch(plan)
        after = [graph.num_replays for graph in graphs.made]
        note(
            plan,
            [
                len(graph.result)
                for graph, a, b in zip(graphs.made, before, after, strict=True)
                if a != b
            ],
        )
        return wait

    patch.setattr(runner, "launch", watched)


def test_decode_steps_are_replayed_and_no_others(folder, graphs, monkeypatch) -> None:
    llm = make_llm(folder)
    chosen = set()
    num_mixed = 0

    def note(plan: SchedulerOutput, replayed: list[int]) -> None:
        nonlocal num_mixed
        n = len(plan.requests)
        if all(r.num_tokens == 1 for r in plan.requests):
            size = min(size for size in (1, 2, 4, 8, 13) if size >= n)
            assert replayed == [size]
            chosen.add((n, size))
        else:
            assert replayed == []
            num_mixed += 1

    watch_steps(monkeypatch, llm.engine.core.runner, graphs, note)
    params = [SamplingParams(temperature=0, max_tokens=12 + n, ignore_eos=True) for n in range(13)]
    expected = serve(make_llm(folder, enforce_eager=True), make_prompts(13), params)
    assert serve(llm, make_prompts(13), params) == expected
    assert {(13, 13), (8, 8), (5, 8), (3, 4), (1, 1)} <= chosen
    assert num_mixed, "no step was mixed"


def test_other_outputs_of_a_step(folder, graphs) -> None:
    """Log-probabilities, and prompts of one token, which are read by a decode step."""
    params = SamplingParams(
        temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    prompts = [[5], [6], [7, 8, 9], [10]]
    both = [
        make_llm(folder, **options).generate(prompts, params, use_tqdm=False)
        for options in ({}, {"enforce_eager": True})
    ]
    for mine, other in zip(*both, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        for a, b in zip(mine.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert a.keys() == b.keys()
            assert all(a[token].logprob == pytest.approx(b[token].logprob, abs=1e-3) for token in a)
        assert len(mine.prompt_logprobs) == len(other.prompt_logprobs)


class Unrecorded:
    """A graph for which nothing is computed."""

    def capture(self, work: Callable[[], Tensor], pool: Any) -> Any:
        return pool


def test_budget_below_the_number_of_requests() -> None:
    """Then a step has fewer requests than may run."""
    assert prepared(Unrecorded, 3000, []).sizes[-1] == 2048


# ---------------------------------------------------------------- padding


def padded_runner(folder: pathlib.Path) -> ModelRunner:
    config = EngineConfig(dtype="float32", max_num_seqs=6, block_size=4, max_num_batched_tokens=16)
    runner = create_runner(config, ModelConfig.from_pretrained(folder), folder)
    resolved = resolve(config, model_max_len=64, num_kv_blocks=32)
    runner.allocate(runner_settings(resolved), 32)
    watch_inputs(runner)
    runner.forward.prepare(runner)
    return runner


def step(runner: ModelRunner, *parts: tuple[str, int, list[int], list[int]]) -> SchedulerOutput:
    """Of each request: its name, where it begins, its new tokens and blocks."""
    known = runner.rows.row_of
    return SchedulerOutput(
        [
            ScheduledRequest(
                name,
                start,
                len(tokens),
                tokens,
                blocks,
                *(() if name in known else (GREEDY, len(tokens))),
            )
            for name, start, tokens, blocks in parts
        ]
    )


def test_padding_after_a_larger_step(folder, graphs) -> None:
    """What the larger step left behind is overwritten, in every buffer that padding rows read."""
    runner = padded_runner(folder)
    wide = [(name, 0, [9 + i, 8, 7], [2 * i + 1]) for i, name in enumerate("ABCDE")]
    runner.execute_model(step(runner, *wide))
    before = [cache.clone() for cache in runner.kv_caches]
    plan = step(runner, ("A", 3, [50], []), ("B", 3, [51], []), ("C", 3, [52], []))
    result = runner.execute_model(plan)
    assert set(result.sampled) == {"A", "B", "C"}
    ids, places, metadata = runner.buffers.inputs(4, 4, 1, 4)
    assert ids.tolist() == [50, 51, 52, 0] and places.tolist() == [3, 3, 3, 0]
    assert metadata.slot_mapping.tolist() == [1 * 4 + 3, 3 * 4 + 3, 5 * 4 + 3, -1]
    assert metadata.seq_lens.tolist() == [4, 4, 4, 1] and metadata.block_tables[3, 0] == 0
    assert metadata.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    written = [1, 3, 5]
    for cache, old in zip(runner.kv_caches, before, strict=True):
        others = [block for block in range(len(cache)) if block not in written]
        assert torch.equal(cache[others], old[others]), "padding was written"
        assert not torch.equal(cache[written], old[written])


def break_slots(buffers: StepBuffers, first: int, end: int) -> None:
    slots = buffers.slot_mapping.array[first:end].copy()
    INTACT(buffers, first, end)
    buffers.slot_mapping.array[first:end] = slots


def break_starts(buffers: StepBuffers, first: int, end: int) -> None:
    starts = buffers.query_start_loc.array[first + 1 : end + 1].copy()
    INTACT(buffers, first, end)
    buffers.query_start_loc.array[first + 1 : end + 1] = starts[::-1]


def break_first_row(buffers: StepBuffers, first: int, end: int) -> None:
    INTACT(buffers, max(0, first - 1), end)


INTACT = StepBuffers.pad


@pytest.mark.parametrize("mistake", [break_slots, break_starts, break_first_row])
def test_mistakes_in_padding_are_seen(folder, graphs, monkeypatch, mistake) -> None:
    """What the tests above compare does differ if padding is wrong."""
    eager = make_llm(folder, enforce_eager=True)
    monkeypatch.setattr(StepBuffers, "pad", mistake)
    params = [SamplingParams(temperature=0, max_tokens=3 + n, ignore_eos=True) for n in range(13)]
    expected = serve(eager, make_prompts(13), params)
    try:
        llm = make_llm(folder)
        different = serve(llm, make_prompts(13), params) != expected or not same_caches(llm, eager)
    except (IndexError, RuntimeError):  # the backend noticed
        different = True
    assert different


def test_a_buffer_made_anew_is_seen(folder, graphs) -> None:
    runner = padded_runner(folder)
    runner.execute_model(step(runner, ("A", 0, [9, 8, 7], [1])))
    runner.execute_model(step(runner, ("A", 3, [6], [])))
    # The old ones stay alive, as on a GPU, where the graph would go on reading them.
    old = runner.buffers
    runner.buffers = StepBuffers(runner.settings, runner.device)
    with pytest.raises(AssertionError, match="would have read elsewhere"):
        runner.execute_model(step(runner, ("A", 4, [5], [2])))
    assert old.input_ids.array.ctypes.data != runner.buffers.input_ids.array.ctypes.data


# ---------------------------------------------------------------- when there are graphs


@pytest.mark.parametrize(
    ("device", "backend", "eager"),
    [
        ("cpu", TorchBackend(), False),
        ("cpu", WatchedTorch(), False),
        ("cuda", WatchedTorch(), True),
        ("cuda", TorchBackend(), True),
        ("cuda", TorchBackend(), False),
    ],
)
def test_no_graphs(device, backend, eager) -> None:
    assert graph_maker(torch.device(device), backend, eager) is None


@pytest.mark.parametrize(
    ("device", "compiles", "is_warmed_up"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_who_is_warmed_up(device: str, compiles: bool, is_warmed_up: bool) -> None:
    loaded: Any = SimpleNamespace(
        config=EngineConfig(),
        device=torch.device(device),
        backend=SimpleNamespace(compiles_kernels=compiles),
        model_config=SimpleNamespace(num_heads=9),
    )
    features = choose_features(loaded, None)
    assert any(isinstance(feature, WarmUp) for feature in features) is is_warmed_up


def test_backends_that_say_so() -> None:
    triton = pytest.importorskip("nanovllm.attention.triton")
    assert triton.TritonBackend.supports_graphs
    assert not TorchBackend.supports_graphs
    assert not CpuBackend.supports_graphs


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU that notes what it is asked as `events`, and has `free` bytes."""
    gpu = SimpleNamespace(events=[], free=1000)
    events = gpu.events

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = str(name)

        def wait_stream(self, other: Stream) -> None:
            events.append(f"{self.name} waits for {other.name}")

    class Handle:
        def pool(self) -> str:
            return "pool"

        def replay(self) -> None:
            events.append("replay")

    @contextlib.contextmanager
    def on(stream: Stream) -> Any:
        events.append(f"on {stream.name}")
        yield

    @contextlib.contextmanager
    def recording(graph: Handle, pool: Any, stream: Stream) -> Any:
        events.append(f"record on {stream.name} in {pool}")
        yield

    set_gpu(
        monkeypatch,
        Stream=Stream,
        CUDAGraph=Handle,
        current_stream=lambda: Stream("main"),
        stream=on,
        graph=recording,
        mem_get_info=lambda *_: (gpu.free, 1000),
        synchronize=None,
        empty_cache=None,
    )
    return gpu


def test_what_is_asked_of_cuda(cuda) -> None:
    """Work is done once on the stream that records, and then recorded, in the memory of the first
    graph."""
    events = cuda.events
    make_graph = graph_maker(torch.device("cuda"), WatchedTorch(), False)
    assert make_graph is not None
    graphs = prepared(make_graph, 2, events)
    del events[:2]  # the padding
    graphs.replay(batch_of([1, 1], 2))
    rounds = [
        [
            "cuda waits for main",
            "on cuda",
            f"work {size}",
            "main waits for cuda",
            f"record on cuda in {pool}",
            f"work {size}",
        ]
        for size, pool in ((2, None), (1, "pool"))
    ]
    assert events == [*rounds[0], *rounds[1], "replay"]
    assert isinstance(make_graph(), CudaGraph)


def test_the_memory_of_all_graphs_is_estimated_from_the_largest_two(cuda) -> None:
    """Of 13 requests: graphs for 13, 8, 4, 2 and 1."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Measured:
        def __init__(self) -> None:
            alive.add(self)

        def capture(self, work: Callable[[], Tensor], pool: Any) -> Any:
            if pool is None:
                cuda.free -= 300  # kernels, and the memory that all share
            cuda.free -= len(work())
            return "pool"

    noted: list[Any] = []
    graphs = Zeros(Measured, noted)
    rows = Rows(13, noted)
    rows.device = torch.device("cuda")
    assert graphs.extra_bytes(rows) == 300 + 13 + 4 * 8  # type: ignore[arg-type]
    assert noted[:2] == [("padding", 0, 13), ("upload", 13, 13)], "no request's data is computed"
    assert noted[2:] == ["work 13", "work 8"] and not alive
    cuda.free = 1000
    graphs.prepare(rows)  # type: ignore[arg-type]
    assert cuda.free == 1000 - 300 - (13 + 8 + 4 + 2 + 1) and len(alive) == 5


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_stage_copies_what_it_sends_if_graphs_reuse_it(enforce_eager: bool, cuda) -> None:
    loaded: Any = SimpleNamespace(
        config=SimpleNamespace(enforce_eager=enforce_eager, pipeline_parallel_size=2),
        model_config=SimpleNamespace(moe=None),
        model=None,
        backend=SimpleNamespace(supports_graphs=True),
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
    )
    stage = create_forward(loaded, speculator=None)
    assert isinstance(stage, StageForward)
    assert isinstance(stage.forward, GraphForward) == stage.reuses_output == (not enforce_eager)


@pytest.mark.parametrize("flags", [[], ["--enforce-eager"], ["--no-enforce-eager"]])
def test_flag(flags: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(EngineConfig, parser)
    config = read_flags(EngineConfig, parser.parse_args(flags))
    assert config.enforce_eager is (flags == ["--enforce-eager"])
    with pytest.raises(ValueError, match="enforce_eager must be True or False"):
        EngineConfig(enforce_eager="yes")  # type: ignore[arg-type]


def test_option_of_llm(folder, graphs) -> None:
    llm = make_llm(folder, enforce_eager=True)
    serve(llm, make_prompts(2))
    assert graphs.made == [] and type(llm.engine.core.runner.forward) is Forward


# ---------------------------------------------------------------- cells of lectures that need a GPU


@pytest.fixture
def lecture(tmp_path: pathlib.Path) -> pathlib.Path:
    """A lecture whose second cell needs a GPU, and put out something when it last had one."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    sources = ("x = 1", "raise SystemError('no GPU')", "print(x + 1)")
    cells = [
        v4.new_code_cell(source, execution_count=i) for i, source in enumerate(sources, start=1)
    ]
    cells[1].metadata["tags"] = ["gpu"]
    for cell, text in zip(cells[1:], ("42 kernels\n", "2\n"), strict=True):
        cell.outputs = [v4.new_output("stream", text=text)]
    path = tmp_path / "notebooks/10_gpu.ipynb"
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


def test_gpu_cells_keep_their_outputs_without_a_gpu(lecture, monkeypatch, capsys) -> None:
    set_gpu(monkeypatch, is_available=False)
    for _ in range(2):
        assert course_main(["--root", str(lecture.parents[1]), "run"]) == 0
        cells = nbformat.read(lecture, 4).cells
        assert [[o.text for o in cell.outputs] for cell in cells] == [[], ["42 kernels\n"], ["2\n"]]
        assert [cell.execution_count for cell in cells] == [1, 2, 3]
    assert capsys.readouterr().out.split("\n")[1].endswith("unchanged")
    set_gpu(monkeypatch, is_available=True)
    assert course_main(["--root", str(lecture.parents[1]), "run"]) == 1
    assert "cell 2 (In [2])" in capsys.readouterr().err


@pytest.mark.parametrize("available", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_gpu_cells_are_reported_as_skipped(lecture, available) -> None:
    course = pathlib.Path(nanovllm.__file__).parents[1] / "notebooks/conftest.py"
    # What the real conftest does, with another answer to its question.
    answer = f"import torch\n\ntorch.cuda.is_available = lambda: {available}\n"
    (lecture.parent / "conftest.py").write_text(
        course.read_text().replace("import torch\n", answer)
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--nbval",
        "--nbval-current-env",
        "-rs",
    ]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [*command, str(lecture)],
        capture_output=True,
        text=True,
        cwd=lecture.parent,
        env=environment,
    )
    if available:
        assert (
            done.returncode == 1 and "1 failed, 2 passed" in done.stdout and "no GPU" in done.stdout
        )
    else:
        assert done.returncode == 0, done.stdout
        assert "2 passed, 1 skipped" in done.stdout and "needs a GPU" in done.stdout


class Forgetful:
    """A graph that keeps nothing of what it records, as one on a GPU."""

    def capture(self, work: Callable[[], Tensor], pool: Any) -> Any:
        work()
        return pool

    def replay(self) -> None:
        raise AssertionError("nobody replays it")


def test_an_engine_with_graphs_gives_its_memory_back_at_once(folder, monkeypatch) -> None:
    """A cycle through the graphs would keep a GPU full until the garbage collector comes by, which
    the next engine does not wait for."""
    Watched.launches = []
    set_backend(monkeypatch, WatchedTorch, Forgetful)
    llm = make_llm(folder)
    runner = weakref.ref(llm.engine.core.runner)
    assert recorded_sizes(llm.engine.core.runner)
    gc.collect()
    gc.disable()
    try:
        del llm
        assert runner() is None
    finally:
        gc.enable()
