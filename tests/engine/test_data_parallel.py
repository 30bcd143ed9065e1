"""Data parallelism: the router, engines in lock-step, and everything together in processes."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.assembly.engine import Engine
from nanovllm.core.schedule import ModelRunnerOutput, SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineOutput, EngineRequest
from nanovllm.distributed.groups import Grid
from nanovllm.engine import group as engine_group
from nanovllm.engine.client import EngineClient
from nanovllm.engine.group import DataParallelCore
from nanovllm.engine.process import Command, EngineLoop
from nanovllm.executor.base import Executor, ExecutorError
from nanovllm.features.data_parallel.lock_step import LOCK_STEP
from nanovllm.features.data_parallel.ranks import engine_grid, rank_config, trace_path
from nanovllm.features.data_parallel.router import MAX_IMBALANCE, EngineRouter, load_score
from nanovllm.features.data_parallel.waves import Waves
from nanovllm.processes.channel import Failure
from nanovllm.processes.supervisor import Child
from nanovllm.text.detokenizer import continues_prompt
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.trace.trace import Trace
from tests import rank_faults
from tests.content_runner import ContentRunner, next_token
from tests.examples import examples
from tests.forking import children
from tests.oracle import greedy, greedy_choices, make_checkpoint, make_tokenizer, reference_tokens
from tests.server_process import SOON, ServerProcess, wait_until
from tests.stand_ins import set_executor, set_program

BLOCK = 4


def request(
    name: str, tokens: list[int], max_tokens: int = 1, salt: str | None = None
) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(name, tokens, params, cache_salt=salt)


# ---------------------------------------------------------------- the router


def test_equal_engines_take_turns() -> None:
    router = EngineRouter(3, BLOCK, capacity=100)
    assert [router.choose(request("x", [i] * 9), [0, 0, 0]) for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_known_prefix_leads_back() -> None:
    router = EngineRouter(3, BLOCK, capacity=100)
    prompts = [[i] * 12 for i in range(3)]
    homes = [router.choose(request("x", prompt), [0, 0, 0]) for prompt in prompts]
    for home, prompt in zip(homes, prompts, strict=True):
        assert router.choose(request("y", prompt + [9] * 20), [5, 5, 5]) == home
    loads = [0, 0, 0]
    loads[homes[1]] = 1
    assert router.choose(request("x", prompts[1]), loads) == homes[1], "worth a little more load"
    router.forget()
    assert router.choose(request("x", prompts[1]), loads) != homes[1], (
        "forgotten: the least busy one"
    )


def test_another_salt_is_another_prompt() -> None:
    router = EngineRouter(2, BLOCK, capacity=100)
    home = router.choose(request("x", [1] * 12, salt="a"), [0, 0])
    loads = [0, 0]
    loads[home] = 1
    assert router.choose(request("x", [1] * 12, salt="a"), loads) == home
    assert router.choose(request("x", [1] * 12, salt="b"), loads) != home


def test_the_last_token_is_never_from_a_cache() -> None:
    router = EngineRouter(2, BLOCK, capacity=100)
    assert router.choose(request("x", [1] * BLOCK), [0, 0]) == 0
    assert router.choose(request("x", [1] * BLOCK), [1, 0]) == 1, (
        "nothing of so short a prompt can be reused"
    )


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@settings(max_examples=examples(300))
@given(
    st.integers(1, 4),
    st.integers(0, 6),
    st.lists(st.tuples(prompts, st.lists(st.integers(0, 30), min_size=4, max_size=4)), max_size=40),
)
def test_the_router_never_piles_up(
    num_ranks: int, capacity: int, stream: list[tuple[list[int], list[int]]]
) -> None:
    router = EngineRouter(num_ranks, BLOCK, capacity)
    for tokens, loads in stream:
        loads = loads[:num_ranks]
        chosen = router.choose(request("x", tokens), loads)
        assert 0 <= chosen < num_ranks
        assert loads[chosen] - min(loads) <= MAX_IMBALANCE
        assert all(len(sent) <= capacity for sent in router._sent)
        if capacity == 0:
            assert loads[chosen] == min(loads)


@settings(max_examples=examples(100))
@given(st.integers(2, 4), prompts, st.integers(1, 200))
def test_one_prompt_does_not_drown_one_engine(
    num_ranks: int, tokens: list[int], count: int
) -> None:
    """All requests share a prefix and none ever ends: the loads stay within the bound, whatever
    affinity wants."""
    router, waiting = EngineRouter(num_ranks, BLOCK, capacity=50), [0] * num_ranks
    for _ in range(count):
        waiting[router.choose(request("x", tokens), [load_score(n, 0) for n in waiting])] += 1
    assert load_score(max(waiting) - min(waiting), 0) <= MAX_IMBALANCE + load_score(1, 0)


@settings(max_examples=examples(100))
@given(
    st.integers(2, 4),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30)), min_size=1, max_size=60),
)
def test_the_longest_prefix_among_the_idle_wins(
    num_ranks: int, stream: list[tuple[int, int]]
) -> None:
    """While all are equally busy, and nothing has been forgotten, no other engine was sent a longer
    part of the prompt."""
    router = EngineRouter(num_ranks, BLOCK, capacity=10_000)
    sent: list[list[list[int]]] = [[] for _ in range(num_ranks)]

    def common(a: list[int], b: list[int]) -> int:
        blocks = 0
        while a[: (blocks + 1) * BLOCK] == b[: (blocks + 1) * BLOCK] and (blocks + 1) * BLOCK < min(
            len(a), len(b)
        ):
            blocks += 1
        return blocks

    for kind, length in stream:
        tokens = [kind % 4] * 5 + [kind] * length + [9]
        matches = [max((common(tokens, other) for other in there), default=0) for there in sent]
        chosen = router.choose(request("x", tokens), [0] * num_ranks)
        assert matches[chosen] == max(matches)
        sent[chosen].append(tokens)


# ---------------------------------------------------------------- waves


def test_a_stale_start_changes_nothing() -> None:
    waves = Waves()
    waves.start(0)
    assert waves.running
    waves.end(0)
    waves.start(0)  # late
    assert not waves.running and waves.ended == 1
    waves.start(1)
    waves.start(1)  # twice
    waves.end(1)
    assert not waves.running and waves.ended == 2


def test_an_early_start_waits_for_the_end() -> None:
    waves = Waves()
    waves.start(0)
    waves.start(1)
    waves.end(0)
    assert waves.running and waves.ended == 1
    waves.end(0)  # a step of the old wave that was under way says it again
    assert waves.running and waves.ended == 1
    waves.end(1)
    assert not waves.running


def test_ranks_of_engines_in_lock_step_are_one_grid() -> None:
    config = EngineConfig(data_parallel_size=3, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert config.is_divided and not config.in_lock_step
    ours = rank_config(config, 2, "file:///tmp/x")
    assert not ours.is_divided and ours.in_lock_step
    assert engine_grid(ours) == (Grid(3, 2, 2), 8)
    alone = rank_config(config, 2, "")
    assert not alone.in_lock_step and engine_grid(alone) == (Grid(1, 2, 2), 0)


def test_every_engine_writes_its_own_trace() -> None:
    assert trace_path("a/run.jsonl", 0) == os.path.join("a", "run.dp0.jsonl")
    assert trace_path("run.jsonl.gz", 3) == "run.dp3.jsonl.gz"
    assert trace_path("run", 1) == "run.dp1"


@pytest.mark.parametrize("backend", ["ray", "external_launcher"])
def test_executors_that_span_machines_take_no_data_parallelism(backend: Any) -> None:
    with pytest.raises(ValueError, match="data_parallel_size above 1 cannot be combined with"):
        EngineConfig(data_parallel_size=2, distributed_executor_backend=backend)


# ---------------------- coordinator, loops, engines and schedulers; threads for processes, no model


class Meeting:
    """An all-reduce among threads: whoever waits for a step waits until all have come to it."""

    def __init__(self, size: int) -> None:
        self.size, self.patience = size, 20.0
        self.votes: list[list[bool]] = []
        self.news = threading.Condition()

    def vote(self, step: int, unfinished: bool) -> None:
        with self.news:
            while len(self.votes) <= step:
                self.votes.append([])
            self.votes[step].append(unfinished)
            self.news.notify_all()

    def result(self, step: int) -> bool:
        with self.news:
            votes = self.votes[step]
            came = self.news.wait_for(lambda: len(votes) == self.size, self.patience)
            assert came, f"nobody else came to step {step}"
            return any(votes)


class LockStepExecutor(Executor):
    """Contents instead of tensors, and steps that end only once every engine has launched them."""

    on_gpu = False
    num_blocks = 24
    bytes_per_block = 2**25  # 32 blocks in host memory

    def __init__(self, meeting: Meeting, waits_at_launch: bool) -> None:
        self.meeting, self.waits_at_launch = meeting, waits_at_launch
        self.runner = ContentRunner(BLOCK, Everyone())
        self.kinds: list[str] = []

    def allocate(self, *sizes: Any) -> None:
        pass

    def forget_requests(self) -> None:
        pass

    def launch(self, plan: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        step = len(self.kinds)
        self.kinds.append("dummy" if plan.empty else "real")
        result = self.runner.execute_model(plan)
        self.meeting.vote(step, bool(plan.extras.get(LOCK_STEP, True)))
        if self.waits_at_launch:  # as collectives on a CPU do; a GPU's are only enqueued
            self.meeting.result(step)
        return lambda: msgspec.structs.replace(
            result, extras={LOCK_STEP: self.meeting.result(step)}
        )


class Everyone(dict[str, Any]):
    def __missing__(self, key: str) -> None:
        return None


class ThreadRank(EngineClient):
    """An engine in a thread."""

    def __init__(self, config: EngineConfig, environment: Any) -> None:
        self.rank = config.data_parallel_rank or 0
        ours, self.theirs = Pipe()
        Child.__init__(self, f"data rank {self.rank}", "thread", ours)
        self.folder = ""
        addresses = [f"inproc://{kind} {id(self)}" for kind in ("commands", "reports")]
        self._bind(*addresses)
        there = zmq.Context.instance().socket(zmq.PULL), zmq.Context.instance().socket(zmq.PUSH)
        for theirs, address in zip(there, addresses, strict=True):
            theirs.connect(address)
        self.error: BaseException | None = None
        self.sent: list[Command] = []
        self.process: Any = self
        self._thread = threading.Thread(target=self._run, args=(config, *there), daemon=True)
        self._thread.start()

    def _run(self, config: EngineConfig, commands: Any, reports: Any) -> None:
        try:
            self.core = Engine(config)
            EngineLoop(self.core, commands, reports).run()
        except BaseException as error:
            self.error = error
        finally:
            commands.close(linger=0)
            reports.close(linger=0)

    def send(self, command: Command) -> None:
        self.sent.append(command)
        super().send(command)

    def receive(self) -> None:
        super().receive()
        self.heard = time.monotonic()

    def how_it_ended(self) -> str:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return "" if self._thread.is_alive() else "ended with exit code 0"

    def close(self) -> None:
        """Nothing: the thread still has to hear that it is "killed"."""

    def kill(self) -> None:
        super().send(Command(order="shutdown"))

    def wait(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        super().close()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_checkpoint(tmp_path_factory.mktemp("mixtral"), "mixtral")


@pytest.fixture
def engines(
    mixtral: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., DataParallelCore]]:
    """Makes coordinators of engines in threads."""
    made: list[DataParallelCore] = []

    def make(size: int = 2, waits_at_launch: bool = True, **options: Any) -> DataParallelCore:
        meeting = Meeting(size)
        set_executor(monkeypatch, lambda *_: LockStepExecutor(meeting, waits_at_launch))
        monkeypatch.setattr(engine_group, "EngineClient", ThreadRank)
        options = {
            "enable_expert_parallel": True,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 4,
        } | options
        config = EngineConfig(
            str(mixtral),
            data_parallel_size=size,
            block_size=BLOCK,
            max_model_len=64,
            device="cpu",
            check_invariants=True,
            **options,
        )
        made.append(DataParallelCore(config))
        return made[-1]

    yield make
    for core in made:
        core.close()


def test_a_failure_wakes_who_polls_the_coordinator(
    engines: Callable[..., DataParallelCore],
) -> None:
    core = engines(1)
    poller = zmq.Poller()
    for source in core.sources:
        poller.register(source, zmq.POLLIN)
    core.step()
    assert poller.poll(0) == [], "all that was sent has been taken in"
    rank: Any = core.ranks[0]
    rank.theirs.send(Failure(False, "no luck"))
    assert poller.poll(1000), "it sleeps although an engine has failed"
    with pytest.raises(ExecutorError, match="data rank 0, thread, failed: no luck"):
        core.step()


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def drive(core: DataParallelCore, seed: int, count: int) -> None:
    """Requests that come now and then, often just when everybody pauses; each gets its tokens."""
    chance = random.Random(seed)
    expected: dict[str, list[int]] = {}
    tokens: dict[str, list[int]] = {}
    for i in range(count):
        prompt = [chance.randrange(6) for _ in range(chance.choice((1, 3, 9, 30)))]
        length = chance.choice((1, 1, 2, 5, 20))
        expected[f"r{i}"], tokens[f"r{i}"] = continuation(prompt, length), []
        core.add_request(request(f"r{i}", prompt, length))
        if chance.random() < 0.1:
            core.abort_request(f"r{i}")
            del expected[f"r{i}"]
        if chance.random() < 0.5:
            while core.has_unfinished:
                collect(core, tokens)
            time.sleep(chance.choice((0, 0, 0.0005, 0.002)))
    while core.has_unfinished:
        collect(core, tokens)
    assert {name: tokens[name] for name in expected} == expected


def collect(core: DataParallelCore, tokens: dict[str, list[int]]) -> None:
    for output in core.step():
        tokens[output.request_id] += output.new_token_ids


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("size", "waits_at_launch", "options"),
    [
        (2, True, {}),
        (3, True, {"preemption_mode": "swap"}),
        (2, False, {"async_scheduling": True}),
        (3, False, {"pipeline_parallel_size": 2}),
    ],
    ids=["two", "three", "ahead", "stages"],
)
def test_nobody_waits_for_ever(
    engines: Callable[..., DataParallelCore],
    seed: int,
    size: int,
    waits_at_launch: bool,
    options: dict[str, Any],
) -> None:
    core = engines(size, waits_at_launch, **options)
    drive(core, seed, 40)
    core.wait_for_pause(10)
    steps = [len(rank.core.executor.kinds) for rank in core.ranks]
    assert len(set(steps)) == 1, f"engines have made different numbers of steps: {steps}"
    assert not any(rank.core.has_work for rank in core.ranks)
    assert len({rank.core.peers.waves.ended for rank in core.ranks}) == 1


def test_idle_engines_make_dummies_and_nobody_steps_when_all_pause(
    engines: Callable[..., DataParallelCore],
) -> None:
    core = engines(3)
    core.add_request(request("alone", [1, 2, 3], 6))
    tokens: dict[str, list[int]] = {"alone": []}
    while core.has_unfinished:
        collect(core, tokens)
    core.wait_for_pause(10)
    kinds = [rank.core.executor.kinds for rank in core.ranks]
    # Six steps, and one in which everybody learns that nobody has anything left. The coordinator
    # may read of the wave's end before it reads of the request's: then it starts a wave of one
    # step.
    steps = 6 + core.waves.ended
    assert core.waves.ended in (1, 2)
    idle = ["dummy"] * steps
    assert sorted(kinds) == [idle, idle, ["real"] * 6 + ["dummy"] * (steps - 6)]
    time.sleep(0.1)
    assert [len(k) for k in kinds] == [steps] * 3


def test_penalties_wait_with_a_dummy(engines: Callable[..., DataParallelCore]) -> None:
    """An engine that cannot plan ahead, for the sake of one request, must not fall behind the
    others."""
    core = engines(2, False, async_scheduling=True)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=1.3)
    core.add_request(EngineRequest("penalized", [1, 2, 3], params))
    core.add_request(request("plain", [4, 4], 12))
    tokens: dict[str, list[int]] = {"penalized": [], "plain": []}
    while core.has_unfinished:
        collect(core, tokens)
    assert [len(t) for t in tokens.values()] == [8, 12]
    assert not core.has_unfinished


def test_stale_and_repeated_orders_are_ignored(engines: Callable[..., DataParallelCore]) -> None:
    core = engines(2)
    for _ in range(3):
        drive(core, 1, 5)
        core.wait_for_pause(10)
        for wave in range(core.waves.ended):
            core.ranks[1].send(Command(order="start_wave", wave=wave))
    time.sleep(0.1)
    assert not core.ranks[1].core.peers.waves.running
    drive(core, 2, 5)


def test_without_a_dummy_somebody_waits_for_ever(engines: Callable[..., DataParallelCore]) -> None:
    """The reason for all of this: an engine that sits out stops the others."""
    core = engines(2)
    core.ranks[0].core.executor.meeting.patience = 0.2
    core.ranks[1].core.peers.waves.start = lambda wave: None  # it never hears of the wave
    core.add_request(request("r", [1, 2, 3], 4))
    with pytest.raises(AssertionError, match="nobody else came to step 0"):
        while core.has_unfinished:
            core.step()


def test_engines_without_common_experts_never_wait(
    engines: Callable[..., DataParallelCore],
) -> None:
    core = engines(2, enable_expert_parallel=False)
    assert core.waves is None
    for rank in core.ranks:  # nobody has to come to anybody's steps
        rank.core.executor.meeting = Meeting(1)
    drive(core, 3, 20)
    assert all("dummy" not in rank.core.executor.kinds for rank in core.ranks)


def test_load_and_counters_are_summed(engines: Callable[..., DataParallelCore]) -> None:
    core = engines(2)
    for i in range(6):
        core.add_request(request(f"r{i}", [i % 6] * 9, 20))
    assert core.stats.num_waiting + core.stats.num_running == 6, "on their way counts as waiting"
    counts = Counter(rank.name for rank in core.rank_of.values())
    assert counts == {"data rank 0": 3, "data rank 1": 3}
    core.add_request(request("long", [1] * 64, 1))
    outputs: list[EngineOutput] = []
    while core.has_unfinished:
        outputs += core.step()
    (refused,) = [output for output in outputs if output.request_id == "long"]
    assert refused.finish_reason == "error" and "64" in refused.error
    core.wait_for_pause(10)
    assert core.stats.num_steps == sum(len(rank.core.executor.kinds) for rank in core.ranks)


# ---------------------------------------------------------------- processes

PROMPTS = [[1] + [(7 * i * j + 3 * j) % 300 + 3 for j in range(5 + 3 * i)] for i in range(8)]
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "torch",
    "device": "cpu",
    "block_size": BLOCK,
    "max_model_len": 64,
    # So little that prompts come in chunks and requests lose their blocks.
    "num_kv_blocks": 24,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
    "check_invariants": True,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def llm(fork_server: None) -> Iterator[Callable[..., LLM]]:
    """Makes engines, which end with the test."""
    made: list[LLM] = []

    def make(folder: pathlib.Path, **options: Any) -> LLM:
        made.append(LLM(str(folder), **(SMALL | options)))
        return made[-1]

    before = psutil.Process().children(recursive=True)  # of other tests
    yield make
    for each in made:
        each.engine.core.close()
    assert not set(psutil.Process().children(recursive=True)) - set(before), "a process is left"


def coordinator(llm: LLM) -> DataParallelCore:
    core = llm.engine.core
    assert isinstance(core, DataParallelCore)
    return core


def check_tokens(llm: LLM, folder: pathlib.Path) -> None:
    for _ in range(2):  # the second time out of the prefix cache
        ours = greedy(llm, PROMPTS, 20)
        assert ours == greedy_choices(str(folder), PROMPTS, ours, 20)


def test_dense_engines(
    llm: Callable[..., LLM], tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "run.jsonl"
    two = llm(tiny_model, data_parallel_size=2, trace=str(path))
    check_tokens(two, tiny_model)
    core = coordinator(two)
    each = [rank.stats for rank in core.ranks]
    assert all(stats.num_preemptions and stats.num_hit_tokens for stats in each)
    assert core.stats.num_waves == 0 and core.waves is None
    sampled = [
        output.token_ids
        for output in two.generate(
            PROMPTS[0], SamplingParams(n=3, temperature=1, seed=5, max_tokens=6), use_tqdm=False
        )[0].outputs
    ]
    core.close()
    one = llm(tiny_model)
    same = one.generate(
        PROMPTS[0], SamplingParams(n=3, temperature=1, seed=5, max_tokens=6), use_tqdm=False
    )
    assert sampled == [output.token_ids for output in same[0].outputs]
    traces = [Trace.load(trace_path(str(path), rank)) for rank in range(2)]
    assert [trace.settings.data_rank for trace in traces] == [0, 1]
    assert [len(trace.steps) for trace in traces] >= [stats.num_steps for stats in each]
    arrived = [{name for step in trace for name in step.arrived} for trace in traces]
    assert not arrived[0] & arrived[1] and len(arrived[0] | arrived[1]) == 2 * len(PROMPTS) + 3


GRIDS = [
    pytest.param({"data_parallel_size": 2}, id="dp2"),
    pytest.param(
        {"data_parallel_size": 2, "tensor_parallel_size": 2},
        id="dp2-tp2",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        {"data_parallel_size": 2, "pipeline_parallel_size": 2},
        id="dp2-pp2",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize("grid", GRIDS)
def test_experts_of_all_engines(
    llm: Callable[..., LLM], mixtral: pathlib.Path, grid: dict[str, int]
) -> None:
    many = llm(mixtral, enable_expert_parallel=True, **grid)
    check_tokens(many, mixtral)
    core = coordinator(many)
    # One engine has something to do, and all step.
    before = [rank.stats.num_steps for rank in core.ranks]
    assert greedy(many, PROMPTS[:1], 6) == [reference_tokens(str(mixtral), PROMPTS[0], 6)]
    core.wait_for_pause(10)
    assert all(rank.stats.num_steps >= before[rank.rank] + 6 for rank in core.ranks)
    assert len({rank.stats.num_steps for rank in core.ranks}) == 1, "the engines have lost step"


def test_wake_up_races_and_stale_orders(llm: Callable[..., LLM], mixtral: pathlib.Path) -> None:
    """Short requests one after another, many of which come just when all engines pause."""
    many = llm(mixtral, enable_expert_parallel=True, data_parallel_size=2, attention_backend="auto")
    core, chance = coordinator(many), random.Random(0)
    expected = [reference_tokens(str(mixtral), prompt, 3) for prompt in PROMPTS]
    for i in range(60):
        which = chance.randrange(len(PROMPTS))
        length = chance.choice((1, 1, 3))
        assert greedy(many, [PROMPTS[which]], length) == [expected[which][:length]]
        if i % 10 == 0 and core.waves is not None:
            core.ranks[i // 10 % 2].send(
                Command(order="start_wave", wave=max(0, core.waves.ended - 1))
            )
        time.sleep(chance.choice((0, 0, 0.001, 0.004, 0.02)))
    core.wait_for_pause(10)
    assert core.waves is not None and core.waves.ended > 10
    assert len({rank.stats.num_steps for rank in core.ranks}) == 1


def test_all_load_on_one_engine(llm: Callable[..., LLM], mixtral: pathlib.Path) -> None:
    many = llm(mixtral, enable_expert_parallel=True, data_parallel_size=2)
    core = coordinator(many)
    core.router.choose = lambda request, loads: 1  # type: ignore[method-assign]
    check_tokens(many, mixtral)
    assert core.ranks[0].stats.num_queried_tokens == 0
    assert core.ranks[1].stats.num_preemptions > 0


def test_aborted_requests_free_their_engine(
    llm: Callable[..., LLM], tiny_model: pathlib.Path
) -> None:
    two = llm(tiny_model, data_parallel_size=2)
    for i in range(4):
        two.engine.add_request(
            f"r{i}",
            {"prompt_token_ids": PROMPTS[i]},
            SamplingParams(max_tokens=40, ignore_eos=True),
        )
    two.engine.step()
    for i in range(4):
        two.engine.abort_request(f"r{i}")
    core = coordinator(two)
    assert not core.has_unfinished
    deadline = time.monotonic() + 10
    while core.stats.num_running + core.stats.num_waiting and time.monotonic() < deadline:
        core.step()
    assert core.stats.kv_cache_usage == 0


def test_the_trace_of_the_first_engine(llm: Callable[..., LLM], tiny_model: pathlib.Path) -> None:
    two = llm(tiny_model, data_parallel_size=2)
    core = coordinator(two)
    first_engine = core.engines[0]
    trace = Trace(settings=first_engine.trace_settings)
    first_engine.watch(trace.record)
    greedy(two, PROMPTS[:4], 5)
    first = {name for name in map(str, range(4)) if any(name in step.arrived for step in trace)}
    assert len(first) == 2, "half of the requests"
    assert trace.settings.data_rank == 0 and trace.settings.data_parallel_size == 2
    first_engine.unwatch(trace.record)
    steps = len(trace.steps)
    greedy(two, PROMPTS[:4], 5)
    assert len(trace.steps) == steps


@pytest.mark.parametrize(
    ("fault", "shared", "how"),
    [
        pytest.param(signal.SIGKILL, True, "was killed by SIGKILL", id="dies in lock-step"),
        pytest.param(signal.SIGKILL, False, "was killed by SIGKILL", id="dies apart"),
        pytest.param(signal.SIGSTOP, True, "hangs: nothing was heard", id="is silent in lock-step"),
        pytest.param(
            signal.SIGSTOP,
            False,
            "hangs: nothing was heard",
            id="is silent apart",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "1 launch hang", True, ".*tests/rank_faults.py:.* in strike", id="hangs in lock-step"
        ),
    ],
)
def test_an_engine_that_dies_or_hangs(
    llm: Callable[..., LLM],
    mixtral: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: signal.Signals | str,
    shared: bool,
    how: str,
) -> None:
    if isinstance(fault, str):
        monkeypatch.setenv("RANK_FAULT", fault)
        set_program(monkeypatch, EngineClient, rank_faults.DATA_RANK)
    many = llm(mixtral, enable_expert_parallel=shared, data_parallel_size=2)
    core = coordinator(many)
    for i in range(4):
        many.engine.add_request(
            f"r{i}",
            {"prompt_token_ids": PROMPTS[i]},
            SamplingParams(max_tokens=50, ignore_eos=True),
        )
    many.engine.step()
    if isinstance(fault, signal.Signals):
        os.kill(core.ranks[1].process.pid, fault)
    start = time.monotonic()
    with pytest.raises(
        ExecutorError, match=f"data rank 1, process {core.ranks[1].process.pid}, {how}"
    ):
        while many.engine.has_unfinished or fault == signal.SIGKILL:
            many.engine.step()
        while time.monotonic() < start + SOON:  # the requests ended before anybody noticed
            time.sleep(0.1)
            core.check_health()
    assert time.monotonic() - start < SOON
    assert all(rank.process.poll() is not None for rank in core.ranks)
    with pytest.raises(ExecutorError):
        greedy(many, PROMPTS[:1], 1)


def test_an_engine_that_leaves_the_others_waiting(
    llm: Callable[..., LLM], mixtral: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK_FAULT", "1 wave skip")
    set_program(monkeypatch, EngineClient, rank_faults.DATA_RANK)
    many = llm(mixtral, enable_expert_parallel=True, data_parallel_size=2)
    words = (
        r"data rank 1, process \d+, hangs: for 4 seconds it has been idle while data rank 0,"
        r" process \d+, waits for it in all_"
    )
    start = time.monotonic()
    with pytest.raises(ExecutorError, match=words):
        greedy(many, PROMPTS[:2], 5)
    assert time.monotonic() - start < 2 * SOON
    assert all(rank.process.poll() is not None for rank in coordinator(many).ranks)


def test_engines_that_cannot_start(llm: Callable[..., LLM], tiny_model: pathlib.Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ValueError, match="raise kv_cache_memory"):
        llm(tiny_model, data_parallel_size=2, num_kv_blocks=None, kv_cache_memory="10")
    assert not set(psutil.Process().children(recursive=True)) - before


def test_http(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The whole way: command line, front end, coordinator, two engines; and one of them dies."""
    prompt = PROMPTS[2]
    with ServerProcess(
        tiny_model, tmp_path, "-dp", "2", "--device", "cpu", "--num-kv-blocks", "64"
    ) as server:
        for _ in range(3):
            answer = server.complete(prompt=prompt, max_tokens=8, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 8
        expected = reference_tokens(str(tiny_model), prompt, 8)
        # The prompt's last token begins a character, which the first generated one may continue.
        whole = server.post("/detokenize", {"tokens": prompt[-1:] + expected}).json()["prompt"]
        text = (
            whole if continues_prompt(Tokenizer(make_tokenizer()), prompt, expected) else whole[1:]
        )
        assert answer["choices"][0]["text"] == text
        wait_until(server.is_idle)
        ranks = [
            p for p in children(server.engine) if "nanovllm.engine.client" in " ".join(p.cmdline())
        ]
        assert len(ranks) == 2
        failures: list[Any] = []

        def ask() -> None:
            body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}
            while (response := server.post("/v1/completions", body)).status_code == 200:
                pass  # again, so that there is load when the engine is killed
            failures.append(response)

        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        wait_until(lambda: server.metrics()["num_requests_running"] >= 2)
        ranks[1].kill()
        start = time.monotonic()
        for asker in askers:
            asker.join(2 * SOON)
        assert time.monotonic() - start < SOON
        assert len(failures) == 4 and all(r.status_code >= 500 for r in failures)
        assert all(
            f"data rank 1, process {ranks[1].pid}, was killed by SIGKILL" in r.text
            for r in failures
        )
        assert server.get("/health").status_code == 503
        wait_until(
            lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks)
        )
