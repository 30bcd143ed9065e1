"""Devices that sleep: real ranks, whose virtual times equal the cost model's, however busy the
machine is."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import pathlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.cli.main import main
from nanovllm.data.config import EngineConfig
from nanovllm.data.request import EngineRequest
from nanovllm.distributed.cost_model import Link
from nanovllm.distributed.pipeline_parallel import layer_range
from nanovllm.engine.llm import LLMEngine
from nanovllm.executor.rank_cost import RankCost, RankTimes
from nanovllm.executor.virtual_clock import SECOND, RankRead, RankStep, read_clock, read_timelines
from nanovllm.lab.processes import CONTEXT
from nanovllm.models.config import ModelConfig
from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.machines import find_machine
from nanovllm.simulate.models import Layout, find_model
from nanovllm.simulate.ranks import create_rank_cost
from nanovllm.simulate.roofline import Roofline
from tests.kv_engines import Fleet
from tests.kv_fleet import KVFleet
from tests.oracle import make_tokenizer

PROMPTS = [list(range(40 + i, 60 + 3 * i)) for i in range(4)]
NUM_TOKENS = 6
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
# Llama 3.1 8B.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
# Qwen3 30B A3B.
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def make_folder(folder: pathlib.Path, config: dict[str, Any]) -> str:
    """A model without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("models") / "llama", LLAMA)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folder(tmp_path_factory.mktemp("models") / "qwen", QWEN)


class Run:
    """What ranks did while some prompts were completed."""

    def __init__(
        self, model: str, folder: pathlib.Path, prompts: list[list[int]] = PROMPTS, **options: Any
    ) -> None:
        sleep = {"timelines": str(folder)} | options.pop("sleep", {})
        settings = {"model": model, "device": "sleep", "sleep_config": sleep} | options
        self.config = EngineConfig(**settings)
        llm = LLM(**settings)
        try:
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        finally:
            llm.engine.core.close()
        self.outputs = [output.outputs[0] for output in outputs]
        self.timelines = read_timelines(folder)

    def steps(self, rank: int) -> list[RankStep]:
        return [each for each in self.timelines[f"rank {rank}"] if isinstance(each, RankStep)]

    def cost(self, stage: int = 0) -> RankCost:
        return self.cost_of(self.config, stage)

    @staticmethod
    def cost_of(config: EngineConfig, stage: int = 0) -> RankCost:
        sleep = config.sleep
        assert sleep is not None
        num_layers = ModelConfig.from_pretrained(config.model).num_layers
        layers = layer_range(num_layers, config.pipeline_parallel_size, stage)
        return create_rank_cost(config, sleep, config.model, layers)


def predicted(cost: RankCost, steps: list[RankStep]) -> list[RankTimes]:
    """What a rank's share of these steps takes."""
    known: dict[str, int] = {}
    times = []
    for step in steps:
        shares = [(known.get(name, 0), count) for name, count in step.tokens.items()] or [(0, 1)]
        for name, count in step.tokens.items():
            known[name] = known.get(name, 0) + count
        times.append(cost.step(shares, len(step.tokens)))
    return times


def relative(steps: list[RankStep]) -> list[tuple[int, ...]]:
    """The times of steps since the first was ordered."""
    begin = steps[0].order
    return [
        tuple(
            time - begin
            for time in (step.order, step.compute, step.wait, step.communicate, step.answer)
        )
        for step in steps
    ]


# ---------------------------------------------------------------- one stage


def test_one_rank_takes_the_predicted_times(llama: str, tmp_path: pathlib.Path) -> None:
    run = Run(llama, tmp_path, sleep={"scale": 2.0})
    steps = run.steps(0)
    assert len(steps) == NUM_TOKENS
    for step, times in zip(steps, predicted(run.cost(), steps), strict=True):
        assert step.order == step.compute
        assert step.wait == step.communicate == step.compute + times.compute
        assert step.answer == step.communicate + times.communicate
    for step, later in itertools.pairwise(steps):
        assert later.order == step.answer


def test_a_rank_takes_all_parts_of_a_step(llama: str) -> None:
    """A roofline may have several parts of one name."""
    cost = Run.cost_of(EngineConfig(model=llama, device="sleep"))
    times = cost.step([(200, 1)], 1)
    work = StepWork(num_decodes=1, decode_context=201, prefills=[], num_samples=1)
    roofline = Roofline(find_model(llama), find_machine("H100"), Layout())
    assert times.compute + times.communicate == sum(times.parts.values())
    assert times.compute + times.communicate == pytest.approx(roofline.step(work), abs=1000)


@pytest.mark.parametrize("share", [(200, 1), (0, 700)])
@pytest.mark.parametrize(
    ("name", "stages"), [("llama", 2), ("llama", 3), ("llama", 4), ("qwen", 5), ("qwen", 7)]
)
def test_all_stages_together_take_the_time_of_a_simulated_step(
    name: str, stages: int, share: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    """Layers, head, messages between the stages, and the host of each. In some pipelines, the last
    stage has the fewest layers. In some of these, it is not the slowest one."""
    folder: str = request.getfixturevalue(name)
    config = EngineConfig(model=folder, device="sleep", pipeline_parallel_size=stages)
    costs = [Run.cost_of(config, stage) for stage in range(stages)]
    times = [cost.step([share], 1) for cost in costs]
    ranks = sum(each.compute for each in times) + sum(each.send for each in times[:-1])
    layout = Layout(pipeline_parallel_size=stages)
    roofline = Roofline(find_model(folder), find_machine("H100"), layout)
    start, count = share
    decode = StepWork(1, start + 1, (), 1)
    work = decode if count == 1 else StepWork(0, 0, [share], 1)
    assert ranks == pytest.approx(roofline.step(work), abs=1000)
    step, head = roofline.step(work), roofline.head(work)
    # In a simulation, all stages take the time of the messages.
    messages = sum(each.send for each in times[:-1]) / stages
    slowest = max(each.compute for each in times)
    assert (step - head) / stages + head - messages == pytest.approx(slowest, rel=1e-3)


def test_a_trace_has_virtual_times(llama: str, tmp_path: pathlib.Path) -> None:
    options: dict[str, Any] = {"scale": 2.0, "timelines": str(tmp_path)}
    llm = LLM(llama, trace=True, device="sleep", sleep_config=options)
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.trace is not None
    times = [(record.start, record.duration) for record in llm.trace.steps]
    steps = [each for each in read_timelines(tmp_path)["rank 0"] if isinstance(each, RankStep)]
    begin = steps[0].order
    assert len(times) == len(steps) == 2 * NUM_TOKENS
    for (start, duration), step in zip(times, steps, strict=True):
        assert start - times[0][0] == pytest.approx((step.order - begin) / SECOND, abs=2e-6)
        assert duration == pytest.approx((step.answer - step.order) / SECOND, abs=2e-6)


def test_the_clock_on_the_wall_follows(llama: str, tmp_path: pathlib.Path) -> None:
    llm = LLM(llama, device="sleep", sleep_config={"scale": 3.0, "timelines": str(tmp_path)})
    begin = time.monotonic()
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    seconds = time.monotonic() - begin
    steps = [each for each in read_timelines(tmp_path)["rank 0"] if isinstance(each, RankStep)]
    assert seconds >= 3.0 * (steps[-1].answer - steps[0].order) / SECOND


def test_a_later_request_begins_later_even_with_the_id_of_an_earlier_one(
    llama: str, tmp_path: pathlib.Path
) -> None:
    sleep = json.dumps({"timelines": str(tmp_path)})
    engine = LLMEngine(EngineConfig(llama, device="sleep", sleep_config=sleep))
    sent = []
    for _ in range(2):
        sent.append(read_clock(1.0))
        engine.add_request("same", {"prompt_token_ids": PROMPTS[0]}, PARAMS)
        while engine.has_unfinished:
            engine.step()
    engine.core.close()
    steps = [each for each in read_timelines(tmp_path)["rank 0"] if isinstance(each, RankStep)]
    assert len(steps) == 2 * NUM_TOKENS
    first = [step.order for step in steps[::NUM_TOKENS]]
    assert all(order >= time for order, time in zip(first, sent, strict=True))


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_ranks_are_as_fast_as_predicted(
    llama: str, tmp_path: pathlib.Path, tp: int
) -> None:
    """The ranks meet once per step, and none of them waits for another."""
    run = Run(llama, tmp_path, tensor_parallel_size=tp)
    steps = run.steps(0)
    expected = predicted(run.cost(), steps)
    assert expected[0].communicate > 0
    for rank in range(tp):
        assert relative(run.steps(rank)) == relative(steps)
    for step, times in zip(steps, expected, strict=True):
        assert step.wait == step.communicate == step.order + times.compute
        assert step.answer == step.communicate + times.communicate


def test_all_ranks_wait_for_a_straggler(llama: str, tmp_path: pathlib.Path) -> None:
    run = Run(llama, tmp_path, tensor_parallel_size=2, sleep={"stragglers": {"1": 1.5}})
    fast, slow = run.steps(0), run.steps(1)
    for step, late, times in zip(fast, slow, predicted(run.cost(), fast), strict=True):
        assert step.wait - step.compute == times.compute
        assert late.wait - late.compute == round(1.5 * times.compute)
        assert step.communicate == late.communicate == late.wait
        assert step.answer == late.answer


def test_two_gpus_have_more_than_twice_the_room(llama: str, tmp_path: pathlib.Path) -> None:
    """The weights are there once, and the rest is for KV."""
    blocks = []
    for tp in 1, 2:
        options: dict[str, Any] = {"tensor_parallel_size": tp, "max_num_seqs": 8192}
        llm = LLM(llama, device="sleep", max_num_batched_tokens=8192, **options)
        blocks.append(llm.engine.core.resolved.num_kv_blocks)  # type: ignore[union-attr]
        llm.engine.core.close()
    assert blocks[1] > 2 * blocks[0]


# ---------------------------------------------------------------- several stages and engines


def test_a_pipeline_has_its_bubble(llama: str, tmp_path: pathlib.Path) -> None:
    """A stage begins when it is free and has what the stage before has sent; the first, when the
    tokens of the step before last are known."""
    run = Run(llama, tmp_path, pipeline_parallel_size=2)
    first, last = run.steps(0), run.steps(1)
    sends = [times.send for times in predicted(run.cost(0), first)]
    for number, (step, after) in enumerate(zip(first, last, strict=True)):
        free = first[number - 1].answer if number else 0
        assert step.compute == max(step.order, free)
        if number >= 2:
            assert step.order == last[number - 2].answer
        free = last[number - 1].answer if number else 0
        assert after.compute == max(step.answer + sends[number], free)
    for stage, steps in enumerate((first, last)):
        for step, times in zip(steps, predicted(run.cost(stage), steps), strict=True):
            assert step.answer - step.compute == times.compute + times.communicate


@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_virtual_times_of_more_than_64_bits(
    llama: str, tmp_path: pathlib.Path, layout: str
) -> None:
    """A machine that has been up for half a minute is at 2 ** 64 picoseconds, if a second is a
    million; at a second per second, one that has been up for 213 days."""
    fast = Run(llama, tmp_path / "fast", sleep={"scale": 1e-6}, **{layout: 2})
    usual = Run(llama, tmp_path / "usual", **{layout: 2})
    assert fast.steps(0)[0].order > 1 << 64
    for rank in range(2):
        assert relative(fast.steps(rank)) == relative(usual.steps(rank))


def test_engines_in_lock_step_wait_for_the_slowest(qwen: str, tmp_path: pathlib.Path) -> None:
    run = Run(
        qwen,
        tmp_path,
        data_parallel_size=2,
        enable_expert_parallel=True,
        sleep={"stragglers": {"1": 2.0}},
    )
    run.config = dataclasses.replace(run.config, data_parallel_address="file://")
    fast, slow = (
        list(zip(run.steps(rank), predicted(run.cost(), run.steps(rank)), strict=True))
        for rank in range(2)
    )
    assert len(fast) == len(slow) >= NUM_TOKENS
    for (step, times), (late, its_times) in zip(fast, slow, strict=True):
        assert step.wait - step.compute == times.compute
        assert late.wait - late.compute == 2 * its_times.compute
        assert step.communicate == late.communicate == max(step.wait, late.wait)
        longest = max(times.communicate, its_times.communicate)
        assert longest > 0
        assert step.answer == late.answer == step.communicate + longest
    assert {"dispatch", "combine", "experts"} <= fast[0][0].parts.keys()


def test_kv_takes_its_time_from_prefill_to_decode(llama: str, tmp_path: pathlib.Path) -> None:
    """The decode engine begins when the blocks have arrived over a slow link."""
    from nanovllm.assembly.engine import Engine

    link = {"kv_latency_us": 500.0, "kv_gb_per_s": 0.5}
    engines = []
    for role in "kv_producer", "kv_consumer":
        sleep = {"timelines": str(tmp_path)} | link
        options: dict[str, Any] = {"device": "sleep", "sleep_config": sleep, "kv_role": role}
        engines.append(Engine(EngineConfig(model=llama, max_model_len=4096, **options)))
    prefill, decode = engines
    fleet = Fleet(engines)
    prompt = list(range(3, 103))
    try:
        first = SamplingParams(max_tokens=1, ignore_eos=True)
        prefill.add_request(
            EngineRequest("a", prompt, first, kv_transfer_params={"do_remote_decode": True})
        )
        fleet.complete("a")
        remote = fleet.outputs["a"][-1].kv_transfer_params
        decode.add_request(
            EngineRequest("b", prompt, PARAMS, kv_transfer_params=dict(remote or {}))
        )
        fleet.complete("b")
    finally:
        for engine in engines:
            engine.close()
    timelines = read_timelines(tmp_path)
    [computed] = timelines["prefill rank 0"]
    read, *steps = timelines["decode rank 0"]
    assert isinstance(computed, RankStep)
    assert isinstance(read, RankRead)
    assert isinstance(steps[0], RankStep)
    # 7 blocks of 16 tokens, 32 layers, 8 KV heads of 128 channels, keys and values of 2 bytes.
    assert read.num_bytes == 7 * 16 * 32 * 8 * 128 * 2 * 2
    seconds = Link("slow", 500e-6, 0.5e9).message(read.num_bytes)
    assert read.begin == computed.answer
    assert read.end == read.begin + round(seconds * SECOND)
    assert steps[0].order == read.end
    assert len(steps) == NUM_TOKENS


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_servers_of_both_kinds_sleep(llama: str, tmp_path: pathlib.Path, scale: float) -> None:
    """`serve --prefill 1 --decode 1 -tp 2`, also with virtual times of more than 64 bits."""
    times = tmp_path / "times"
    sleep = {"model": "llama-3.1-8b", "timelines": str(times), "kv_gb_per_s": 2, "scale": scale}
    words = ["-tp", "2", "--device", "sleep", "--sleep-config", json.dumps(sleep)]
    with KVFleet(pathlib.Path(llama), tmp_path, 1, 1, *words) as fleet:
        fleet.wait_until_ready()
        choice = fleet.complete(prompt="once upon a time " * 9, max_tokens=4, ignore_eos=True)
    assert choice["usage"]["completion_tokens"] == 4
    timelines = read_timelines(times)
    assert len(timelines) == 4
    for rank in range(2):
        # The router may have asked before, to see whether the servers work.
        computed = timelines[f"prefill rank {rank}"][-1]
        read, *steps = timelines[f"decode rank {rank}"][-5:]
        assert isinstance(computed, RankStep)
        assert isinstance(read, RankRead)
        assert read.begin == computed.answer
        # 153 tokens, of which each rank has half of the bytes.
        assert read.num_bytes == 10 * 16 * 32 * 4 * 128 * 2 * 2
        assert isinstance(steps[0], RankStep)
        assert steps[0].order == read.end
        assert len(steps) == 4


# ---------------------------------------------------------------- what does not matter


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Programs that take the cores from the ranks."""
    stop = CONTEXT.Event()
    processes = [CONTEXT.Process(target=_spin, args=(stop,)) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            process.join()


def _spin(stop: Any) -> None:
    while not stop.is_set():
        sum(range(10_000))


def test_times_do_not_depend_on_the_load(llama: str, tmp_path: pathlib.Path) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "sleep": {"stragglers": {"0": 1.25}}}
    quiet = Run(llama, tmp_path / "quiet", **options)
    with busy_processes(2 * multiprocessing.cpu_count()):
        busy = Run(llama, tmp_path / "busy", **options)
    for rank in range(2):
        assert relative(busy.steps(rank)) == relative(quiet.steps(rank))
    assert [each.token_ids for each in busy.outputs] == [each.token_ids for each in quiet.outputs]


def test_tokens_are_words_of_the_course_model(tmp_path: pathlib.Path) -> None:
    run = Run("smollm2-135m", tmp_path)
    texts = [output.text for output in run.outputs]
    assert all(text.isprintable() and len(text) >= NUM_TOKENS for text in texts)
    assert len(set(texts)) > 1


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sleep_config": "{"}, "sleep_config must be JSON such as"),
        ({"sleep_config": {"scal": 2}}, "no argument 'scal'; did you mean scale?"),
        ({"sleep_config": {"scale": 0}}, "scale must be a finite number above 0"),
        ({"sleep_config": {"machine": "H10"}}, "sleep_config: machine 'H10' is unknown: .*H100"),
        ({"distributed_executor_backend": "external_launcher"}, "choose 'uni' or 'mp'"),
        ({"sleep_config": {"expert_imbalance": 0.5}}, "expert_imbalance must be"),
        ({"sleep_config": {"model": "x"}}, "sleep_config: model 'x' is unknown: .*llama-3.1-70b"),
        ({"sleep_config": {"model": "llama-3.1-70b"}}, "does not fit on H100: .* GB per device"),
        ({"sleep_config": {"stragglers": {"1": 2}}}, "rank '1', and the ranks are 0 to 0"),
        ({"tensor_parallel_size": 5}, "32 attention heads"),
        ({"preemption_mode": "swap"}, "device 'sleep' cannot be combined with preemption_mode"),
        ({"kv_offloading_size": 1.0}, "device 'sleep' cannot be combined with kv_connector"),
        ({"device": "cpu", "sleep_config": {}}, "sleep_config does nothing without device 'sleep'"),
    ],
)
def test_mistakes_are_told_in_one_line(llama: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        LLM(llama, **({"device": "sleep"} | options))
    assert "\n" not in str(error.value)


def test_log_probabilities_are_refused(llama: str) -> None:
    llm = LLM(llama, device="sleep")
    params = SamplingParams(max_tokens=1, logprobs=1)
    [output] = llm.generate([PROMPTS[0]], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"


def test_a_server_says_what_is_wrong(llama: str, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["serve", llama, "--device", "sleep", "--sleep-config.machine", "H10"]
    assert main(words) != 0
    assert "H10" in capfd.readouterr().err.splitlines()[-1]
