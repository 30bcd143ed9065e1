"""A recorded run is replayed with every plan equal, and a plan that is not equal is found."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
import statistics
import time
from typing import Any, Literal

import msgspec
import pytest

from nanovllm.assembly.engine import Engine
from nanovllm.cli.main import main
from nanovllm.core.schedule import SchedulerOutput
from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.data.request import EngineRequest
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.lab.bench.workloads import NAMED, Workload
from nanovllm.simulate.by_time import replay_by_time
from nanovllm.simulate.replay import replay
from nanovllm.trace.trace import Trace, TracedRequest
from tests.examples import examples
from tests.kv_transfer.test_disaggregated import WAYS, make_fleet, prompts, send
from tests.models.test_eagle import CONFIG, random_head, write
from tests.oracle import make_checkpoint
from tests.stages import staged  # noqa: F401

DRAFTS = '{"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1%s}'
# So many drafts pay by the scheduler's own measurements, or always three.
MEASURED_DRAFTS = DRAFTS % ""
THREE = ', "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 256, 3]]'
THREE_DRAFTS = DRAFTS % THREE
# `make_engine` names the folder of the head.
HEAD = '{"method": "eagle3", "model": "HEAD"%s}'
MEASURED_HEAD = HEAD % ', "num_speculative_tokens": 3'
THREE_OF_HEAD = HEAD % THREE
ENGINES: list[dict[str, Any]] = [
    {},
    {"enable_prefix_caching": False},
    {"scheduling_policy": "priority", "long_prefill_token_threshold": 8},
    {"preemption_mode": "swap", "swap_space": 0.001},
    {"max_step_ms": 3.0, "max_num_batched_tokens": 128},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
    {"batching_policy": "prefill_first"},
    {"batching_policy": "static"},
    {"speculative_config": THREE_DRAFTS},
    {"speculative_config": MEASURED_DRAFTS, "async_scheduling": True},
    {"speculative_config": THREE_OF_HEAD},
    {"speculative_config": MEASURED_HEAD, "async_scheduling": True},
    {"async_scheduling": True, "max_step_ms": 3.0, "max_num_batched_tokens": 128},
    {"async_scheduling": True, "preemption_mode": "swap", "swap_space": 0.001},
]
PIPELINES: list[dict[str, Any]] = [
    {"pipeline_parallel_size": 3},
    {"pipeline_parallel_size": 2, "speculative_config": THREE_DRAFTS},
]
ACTIONS = {"step": 12, "add": 4, "again": 1, "twins": 0.5, "abort": 1, "reset": 0.2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write(folder / "head", random_head(), CONFIG)
    return str(make_checkpoint(folder / "model"))


class Clients:
    """Send random requests to an engine: some continue an answer, ask twice, or leave."""

    def __init__(self, core: Engine, seed: int) -> None:
        self.core = core
        self.draw = random.Random(seed)
        self.num_requests = 0
        self.prompts: dict[str, list[int]] = {}
        self.texts: list[list[int]] = []

    def run(self, num_actions: int) -> None:
        for action in self.draw.choices([*ACTIONS], [*ACTIONS.values()], k=num_actions):
            self.do(action)

    def do(self, action: str) -> None:
        core, draw = self.core, self.draw
        if action == "step":
            self.step()
        elif action == "abort" and core.has_unfinished:
            core.abort_request(draw.choice(sorted(core.scheduler.queues.requests)))
        elif action == "reset":
            core.reset_prefix_cache()
        elif action == "add":
            first = draw.choice([5, 5, draw.randint(6, 300)])  # some prompts begin alike
            self.add([3 + (first + 11 * i) % 300 for i in range(draw.randint(1, 40))])
        elif action == "again" and self.texts:
            self.add([*draw.choice(self.texts), 9, 8, 7][:50])
        elif action == "twins":
            for _ in range(2):
                self.add([7, 8, 9], greedy=True)

    def step(self) -> None:
        for output in self.core.step():
            text = self.prompts[output.request_id]
            text += output.new_token_ids
            if output.finish_reason:
                self.texts.append(text)

    def add(self, prompt: list[int], greedy: bool = False) -> None:
        draw = self.draw
        params = SamplingParams(
            max_tokens=draw.randint(1, 25),
            temperature=0 if greedy else 1,
            seed=draw.randint(0, 99),
            ignore_eos=draw.random() < 0.5,
            stop_token_ids=[*range(0, 320, 16)] if draw.random() < 0.5 else [],
            min_tokens=draw.choice([0, 0, 1]),
            presence_penalty=draw.choice([0.0, 0.0, 0.0, 0.5]),
            prompt_logprobs=draw.choice([None] * 9 + [1]),
        )
        if self.core.config.speculative is not None and draw.random() < 0.8:
            # Answers that n-grams can foresee, some of the time.
            params.logit_bias = dict.fromkeys((5, 6, 7), 100.0)
            params.num_speculative_tokens = draw.choice([None, None, 1])
        name = f"r{self.num_requests}"
        self.num_requests += 1
        self.prompts[name] = [*prompt]
        request = EngineRequest(name, prompt, params, [2], priority=draw.randint(0, 2))
        self.core.add_request(request)


def make_engine(checkpoint: str, **options: Any) -> Engine:
    settings: dict[str, Any] = {
        "max_model_len": 64,
        "num_kv_blocks": 24,
        "block_size": 4,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
    }
    if "speculative_config" in options:
        head = str(pathlib.Path(checkpoint).with_name("head"))
        options["speculative_config"] = options["speculative_config"].replace("HEAD", head)
    config = EngineConfig(checkpoint, dtype="float32", device="cpu", **(settings | options))
    return Engine(config)


def record(core: Engine, seed: int, num_actions: int) -> Trace:
    """The trace of an engine with random clients, as it was written to its file."""
    Clients(core, seed).run(num_actions)
    return finish(core)


def finish(core: Engine) -> Trace:
    """The trace of an engine that answers what it has, as it was written to its file."""
    while core.has_unfinished:
        core.step()
    core.close()
    return Trace.load(str(core.config.trace))


def count(trace: Trace) -> int:
    return sum(bool(step.requests) for step in trace)


def check_by_time(trace: Trace, begins: Literal["recorded", "median"]) -> None:
    """Replay a trace by time: all plans are equal, and all times to within a microsecond."""
    result = replay_by_time(trace, begins)
    numbers = [result[f"num_{name}"] for name in ("steps", "replayed_steps", "equal_plans")]
    assert numbers == [count(trace)] * 3
    assert result["replayed"] == pytest.approx(result["recorded"], abs=2e-3)


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("options", PIPELINES, ids=str)
def test_every_plan_of_a_pipeline_is_equal(
    options: dict[str, Any], checkpoint: str, tmp_path: pathlib.Path
) -> None:
    test_every_plan_is_equal(options, checkpoint, tmp_path)


@pytest.mark.parametrize("options", ENGINES, ids=str)
def test_every_plan_is_equal(
    options: dict[str, Any], checkpoint: str, tmp_path: pathlib.Path
) -> None:
    happened = set[str]()
    for seed in range(examples(40, by_day=1)):
        core = make_engine(checkpoint, trace=str(tmp_path / "run.jsonl"), **options)
        trace = record(core, seed, 250)
        assert str(replay(trace)) == f"{count(trace)} steps, all plans equal"
        if options.get("pipeline_parallel_size") != 2:
            check_by_time(trace, "recorded")
        else:  # a plan that computes nothing may drop drafts, and is not in the trace
            equal = replay_by_time(trace, "recorded")["num_equal_plans"]
            assert isinstance(equal, int) and 0.9 * count(trace) < equal
        for step in trace:
            happened |= {name for name, value in vars(step).items() if value}
            happened |= {f"prefix of {bool(a.prefix)}" for a in step.arrivals.values()}
            happened |= {f"{max(step.admitted.values(), default=0) > 0} hit"}
            happened |= {"drafts" for share in step.requests if share.num_drafts}
            happened |= {"in flight" for a in step.arrivals.values() if a.in_flight}
    caches = core.config.enable_prefix_caching
    assert ("True hit" in happened) == ("prefix of True" in happened) == caches
    assert {"preempted", "finished", "cache_resets", "blocked_by"} < happened
    assert ("prefixes" in happened) == caches, "two answers are the same"
    drafts = options.get("speculative_config")
    if drafts in (None, THREE_DRAFTS, THREE_OF_HEAD):
        assert ("drafts" in happened) == (drafts is not None)
    assert "aborted" in happened
    assert ("in flight" in happened) == bool(core.settings.steps_ahead)
    assert ("swap_in" in happened) == (core.config.preemption_mode == "swap")


def test_a_request_is_aborted_while_its_last_token_is_in_flight(
    checkpoint: str, tmp_path: pathlib.Path
) -> None:
    core = make_engine(checkpoint, trace=str(tmp_path / "run.jsonl"), async_scheduling=True)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    core.add_request(EngineRequest("aborted", [5, 6, 7], params, []))
    for _ in range(3):
        core.step()
    core.abort_request("aborted")
    # Half of the time until the next plan is now longer than the last step.
    time.sleep(0.1)
    core.add_request(EngineRequest("later", [5, 6, 7], params, []))
    trace = finish(core)
    assert [step.aborted for step in trace if step.aborted] == [{"aborted": 1}]
    check_by_time(trace, "recorded")


def test_the_last_step_is_shorter_than_the_gaps_between_steps(
    checkpoint: str, tmp_path: pathlib.Path
) -> None:
    core = make_engine(checkpoint, trace=str(tmp_path / "run.jsonl"), async_scheduling=True)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    core.add_request(EngineRequest("slow", [5, 6, 7], params, []))
    for _ in range(8):
        core.step()
        time.sleep(0.02)
    core.step()
    trace = finish(core)
    assert count(trace) == 9
    check_by_time(trace, "recorded")


def small(workload: Workload) -> Workload:
    """An eighth of the tokens, for a model with 256 positions."""
    return dataclasses.replace(
        workload,
        num_prompts=min(workload.num_prompts, 12),
        input_len=tuple(length // 8 for length in workload.input_len),
        output_len=tuple(length // 8 for length in workload.output_len),
        prefix_len=workload.prefix_len // 8,
        intruder_len=workload.intruder_len // 8,
        max_concurrency=workload.max_concurrency and 4,
    )


@pytest.mark.parametrize("name", NAMED)
def test_named_workloads(name: str, checkpoint: str, tmp_path: pathlib.Path) -> None:
    for workload in map(small, NAMED[name]):
        path = tmp_path / "run.jsonl"
        options = {"max_num_batched_tokens": 16, "max_num_seqs": 8} if workload.options else {}
        options["enable_prefix_caching"] = workload.options.get("enable_prefix_caching", True)
        core = make_engine(
            checkpoint,
            trace=str(path),
            **{"max_model_len": 256, "num_kv_blocks": 200, "max_num_batched_tokens": 64} | options,
        )
        requests = workload.requests(vocab_size=300)
        at_once = workload.max_concurrency or (4 if workload.intruder_len else len(requests))
        for turn in range(2 if workload.cache == "hot" else 1):
            for number, request in enumerate(requests):
                while len(core.scheduler.queues.requests) >= at_once + bool(workload.intruder_len):
                    core.step()
                if workload.intruder_len and request is requests[-1]:
                    for _ in range(4):
                        core.step()
                params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
                source = EngineRequest(f"{turn} {number}", request.prompt_token_ids, params)
                core.add_request(source)
            while core.has_unfinished:
                core.step()
        core.close()
        trace = Trace.load(path)
        assert str(replay(trace)) == f"{count(trace)} steps, all plans equal"


# ---------------------------------------------------------------- a replay that can fail


@pytest.fixture(scope="module")
def recorded(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    record(
        make_engine(
            checkpoint, trace=str(path), scheduling_policy="priority", max_num_batched_tokens=48
        ),
        3,
        150,
    )
    return path


def other(share: TracedRequest, draw: random.Random) -> TracedRequest:
    """A share that is not this one."""
    changes: list[dict[str, Any]] = [
        {"start": share.start + 1},
        {"num_tokens": share.num_tokens + 1},
        {"request_id": share.request_id + "x"},
        {"num_drafts": 1},
        {"new_block_ids": [*share.new_block_ids, 3]},
    ]
    return dataclasses.replace(share, **draw.choice(changes))


@pytest.mark.parametrize("seed", range(20))
def test_one_changed_plan_is_found(seed: int, recorded: pathlib.Path) -> None:
    trace = Trace.load(recorded)
    assert replay(trace).difference == ""
    draw = random.Random(seed)
    step = draw.choice([step for step in trace if step.requests])
    change = draw.choice(["share", "order", "blocked_by", "num_free_blocks", "admitted", "running"])
    if change == "share":
        index = draw.randrange(len(step.requests))
        step.requests[index] = other(step.requests[index], draw)
    elif change == "order" and len(step.requests) > 1:
        step.requests.append(step.requests.pop(0))
    elif change == "blocked_by":
        step.blocked_by += "?"
    elif change == "admitted":
        step.admitted["r1000"] = 4
    elif change == "running":
        step.running = step.running[:-1]
    else:
        step.num_free_blocks += 1
    result = replay(trace)
    assert f"step {step.step} differs: " in str(result)
    assert result.num_steps == len([s for s in trace if s.requests and s.step < step.step])


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": 23},
        {"block_size": 5},
        {"token_budget": 47},
        {"max_num_seqs": 5},
        {"scheduling_policy": "fcfs"},
        {"enable_prefix_caching": False},
        {"long_prefill_token_threshold": 7},
        {"batching_policy": "static"},
        {"max_step_ms": 0.001},
        {"preemption_mode": "swap", "num_host_blocks": 40},
        {"async_scheduling": True},
        {"pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_every_setting_decides(change: dict[str, Any], recorded: pathlib.Path) -> None:
    trace = Trace.load(recorded)
    trace.settings |= TraceSettings(**change)
    trace.settings = msgspec.structs.replace(trace.settings, **change)
    assert " differs: " in replay(trace).difference


def test_every_fact_of_a_request_decides(recorded: pathlib.Path) -> None:
    changes: list[dict[str, Any]] = [
        {"max_tokens": 1},
        {"priority": 7},
        {"prefix": None},
        {"prompt_logprobs": True},
    ]
    for change in changes:
        trace = Trace.load(recorded)
        for step in trace:
            for name, arrival in step.arrivals.items():
                step.arrivals[name] = msgspec.structs.replace(arrival, **change)
        assert " differs: " in replay(trace).difference


def test_times_decide_how_many_prompt_tokens_a_limited_step_has(
    checkpoint: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "run.jsonl"
    limits = {"max_step_ms": 3.0, "max_num_batched_tokens": 128}
    check_that_times_decide(record(make_engine(checkpoint, trace=str(path), **limits), 5, 300))


def test_times_decide_how_many_drafts_pay(checkpoint: str, tmp_path: pathlib.Path) -> None:
    """A greedy request repeats itself, so that there is a draft in each step."""
    core = make_engine(
        checkpoint,
        trace=str(tmp_path / "run.jsonl"),
        speculative_config=MEASURED_DRAFTS,
        max_model_len=256,
        num_kv_blocks=80,
    )
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    core.add_request(EngineRequest("r0", [1, 2, 3], params))
    check_that_times_decide(finish(core))


def check_that_times_decide(trace: Trace) -> None:
    """A replay is equal, and with much shorter or much longer steps of more than a token per
    request, it is not."""
    assert replay(trace).difference == ""
    # Not a multiple of what they took: on a loaded machine, that may be long enough for both.
    typical = statistics.median(step.duration for step in trace if step.requests)
    differences = []
    for change in (0.01, 100.0):
        for step in trace:
            if step.num_tokens > len(step.requests):
                step.duration = typical * change
        differences.append(replay(trace).difference)
    assert any(" differs: " in difference for difference in differences), differences


# ---------------------------------------------------------------- by time


def regular(trace: Trace) -> Trace:
    """The same steps, 2 ms after one another, each as long as its work wants; a request that
    arrives at an idle engine is planned after 3 ms."""
    end = 0.0
    for step in trace:
        is_idle = {*step.waiting, *step.running, *step.swapped} <= step.arrivals.keys()
        step.start = round(end + (1.0 if is_idle else 0.002), 6)
        step.duration = (0.01 + step.num_tokens / 1000) * bool(step.requests)
        step.planned = 0.0
        time = round(step.start - (0.003 if is_idle else 0.001), 6)
        for name, arrival in step.arrivals.items():
            step.arrivals[name] = msgspec.structs.replace(arrival, time=time)
        if step.requests:
            end = step.start + step.duration
    return trace


def test_gaps_and_sizes_decide_when_steps_end(recorded: pathlib.Path) -> None:
    trace = regular(Trace.load(recorded))
    check_by_time(trace, "median")
    result = replay_by_time(trace)
    assert result["median_gap_ms"] == pytest.approx(2)
    # A slow host now and then: the median gap is the same, but the run was longer.
    for step in trace.steps[len(trace) // 2 :: 3]:
        for later in trace.steps[trace.steps.index(step) :]:
            later.start += 0.005
            for name, arrival in later.arrivals.items():
                later.arrivals[name] = msgspec.structs.replace(arrival, time=arrival.time + 0.005)
    slow = replay_by_time(trace)
    assert slow["median_gap_ms"] == pytest.approx(2)
    assert slow["recorded"] != pytest.approx(slow["replayed"], rel=1e-4)
    check_by_time(trace, "recorded")


def test_a_run_that_failed_is_compared_as_far_as_it_went(recorded: pathlib.Path) -> None:
    trace = regular(Trace.load(recorded))
    whole = replay_by_time(trace)
    step = [step for step in trace if step.requests][40]
    step.finished = dict.fromkeys(step.running, "error")
    step.requests = []
    assert 0 < replay_by_time(trace)["num_steps"] < whole["num_steps"]  # type: ignore[operator]


# ---------------------------------------------------------------- the command


def test_times_are_printed(recorded: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--replay", str(recorded), "--by-time"]
    assert main([*command, "recorded", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == replay_by_time(Trace.load(recorded), "recorded")
    assert main([*command, "recorded"]) == 0
    table = capsys.readouterr().out
    assert f"num equal plans {found['num_steps']}" in table
    assert "mean ttft ms" in table and "+0.00%" in table
    assert main(command) == 0
    assert f"{replay_by_time(Trace.load(recorded))['median_gap_ms']:.4g}" in capsys.readouterr().out
    assert main(["simulate", "--by-time"]) == 2
    assert "--by-time is for replays" in capsys.readouterr().err


def test_the_result_is_printed(
    recorded: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", "--replay", str(recorded)]
    assert main(command) == 0
    trace = Trace.load(recorded)
    assert capsys.readouterr().out == f"{count(trace)} steps, all plans equal\n"
    assert main([*command, "--json"]) == 0
    expected = {"num_steps": count(trace), "difference": "", "ended_by": ""}
    assert json.loads(capsys.readouterr().out) == expected
    step = [step for step in trace if step.requests][9]
    step.requests[0].start += 1
    trace.save(tmp_path / "changed.jsonl")
    assert main(["simulate", "--replay", str(tmp_path / "changed.jsonl")]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"step {step.step} differs: requests[0]: replayed TracedRequest(")


def test_a_step_that_failed_ends_the_replay(
    checkpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_engine(checkpoint, trace=str(tmp_path / "run.jsonl"))
    clients = Clients(core, 1)
    clients.add([3, 4, 5])
    core.step()
    launch = core.executor.launch

    def refuse(plan: SchedulerOutput) -> Any:
        raise ArithmeticError

    core.executor.launch = refuse  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError):
        core.step()
    core.executor.launch = launch  # type: ignore[method-assign]
    clients.run(5)
    core.close()
    result = replay(Trace.load(tmp_path / "run.jsonl"))
    assert str(result) == "1 steps, all plans equal (the recorded engine failed before step 1)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"async_scheduling": None}, "does not state the settings"),
        ({"in_lock_step": True}, "in lock-step"),
        ({"kv_connector": "offloading"}, "what the store of"),
    ],
    ids=str,
)
def test_what_cannot_be_replayed(
    change: dict[str, Any], message: str, recorded: pathlib.Path
) -> None:
    trace = Trace.load(recorded)
    trace.settings = msgspec.structs.replace(trace.settings, **change)
    with pytest.raises(UsageError, match=message):
        replay(trace)


def test_a_trace_without_its_beginning_cannot_be_replayed(recorded: pathlib.Path) -> None:
    trace = Trace.load(recorded)
    del trace.steps[:3]
    with pytest.raises(UsageError, match="begins in the middle"):
        replay(trace)


# ---------------------------------------------------------------- prefill and decode engines


@pytest.mark.parametrize("way", WAYS)
def test_prefill_and_decode_engines(way: str, checkpoint: str) -> None:
    fleet = make_fleet(checkpoint, "small producer")
    traces = [Trace(settings=engine.trace_settings) for engine in fleet.engines]
    for engine, trace in zip(fleet.engines, traces, strict=True):
        engine.watch(trace.record)
    for turn in range(2):  # the second time, some of it is in the caches
        for i, prompt in enumerate(prompts()):
            # 3 is aborted while its KV is on its way, or later.
            send(fleet, way, f"{turn} {i}", prompt, max_tokens=40 if i == 3 else 5)
        fleet.engines[1].abort_request(f"{turn} 3")
        for i in range(len(prompts())):
            if i != 3:
                fleet.complete(f"{turn} {i}")
        fleet.settle()
    fleet.close()
    for trace in traces:
        assert str(replay(trace)) == f"{count(trace)} steps, all plans equal"
        assert any(step.transfers for step in trace)
    assert any(arrival.is_remote for step in traces[1] for arrival in step.arrivals.values())
    step = next(step for step in traces[1] if step.transfers)
    step.transfers = []
    assert " differs: " in replay(traces[1]).difference
