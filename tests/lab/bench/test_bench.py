"""The benchmark: workloads, arithmetic and reports. Nothing here depends on how fast this machine
is."""

from __future__ import annotations

import json
import math
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest

from nanovllm import LLM
from nanovllm.cli.main import main
from nanovllm.distributed.groups import Grid
from nanovllm.lab.bench import client, machine, report
from nanovllm.lab.bench.client import ServerError
from nanovllm.lab.bench.engines import ENGINES, EngineFailed, EngineSettings, OfflineEngine, Server
from nanovllm.lab.bench.machine import Limits, Noise, NoiseMeter, peak_memory, process_tree
from nanovllm.lab.bench.metrics import Timeline, compare, figures, intruder_figures
from nanovllm.lab.bench.report import Report, goal
from nanovllm.lab.bench.roofline import ModelCost, Work, least_work, roofline_share, workload_work
from nanovllm.lab.bench.suite import Run, Started, Suite
from nanovllm.lab.bench.workloads import NAMED, BenchRequest, custom_workload
from nanovllm.lab.processes import run_ranks
from nanovllm.lab.viz import roofline
from nanovllm.models.config import ModelConfig
from tests.lab.bench.conftest import set_limits
from tests.oracle import make_checkpoint, reference_model
from tests.stand_ins import set_temporary_folder

VOCABULARY = 1000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


# ---------------------------------------------------------------- workloads


def test_the_named_workloads_have_the_shapes_that_their_names_promise() -> None:
    shapes = {}
    for workloads in NAMED.values():
        for workload in workloads:
            requests = workload.requests(VOCABULARY)
            assert len(requests) == workload.num_prompts + (workload.intruder_len > 0)
            lengths = [len(r.prompt_token_ids) for r in requests]
            shapes[workload.name] = (len(requests), min(lengths), max(lengths))
            assert (
                max(len(r.prompt_token_ids) + r.max_tokens for r in requests)
                <= workload.max_request_tokens
            )
            assert all(0 <= token < VOCABULARY for r in requests for token in r.prompt_token_ids)
    assert shapes["W1"] == (1, 32, 32)
    assert shapes["W2"] == shapes["W4"] and shapes["W2"][0] == 32
    assert 32 <= shapes["W2"][1] < 64 and 224 < shapes["W2"][2] <= 256
    assert shapes["W3 cold"] == shapes["W3 no cache"] == (16, 528, 528)
    assert shapes["W5"] == shapes["W5 chunk 128"] == (5, 32, 1024)
    assert [r.max_tokens for r in NAMED["W1"][0].requests(VOCABULARY)] == [128]
    outputs = [r.max_tokens for r in NAMED["W2"][0].requests(VOCABULARY)]
    assert min(outputs) >= 32 and max(outputs) <= 128 and len(set(outputs)) > 10


def test_equal_seeds_give_equal_requests_whatever_was_drawn_before() -> None:
    workload = NAMED["W2"][0]
    again = workload.requests(VOCABULARY, seed=3)
    workload.requests(VOCABULARY, seed=4)
    assert workload.requests(VOCABULARY, seed=3) == again
    assert workload.requests(VOCABULARY, seed=4) != again
    # Pinned, so that figures of different versions and machines stay comparable.
    first = workload.requests(49152)[0]
    assert (len(first.prompt_token_ids), first.max_tokens, first.prompt_token_ids[:3]) == (
        111,
        121,
        [29841, 28281, 10960],
    )


def test_a_repeat_has_the_same_lengths_and_other_tokens() -> None:
    for workload in (NAMED["W2"][0], NAMED["W3"][1], NAMED["W5"][0]):
        first, second = workload.requests(VOCABULARY), workload.requests(VOCABULARY, repeat=1)
        for one, other in zip(first, second, strict=True):
            assert len(one.prompt_token_ids) == len(other.prompt_token_ids)
            assert one.max_tokens == other.max_tokens
            assert one.prompt_token_ids != other.prompt_token_ids


def test_the_shared_prefix_is_shared_and_nothing_else_is() -> None:
    cold, hot = NAMED["W3"][1:]
    requests = cold.requests(VOCABULARY)
    assert len({tuple(r.prompt_token_ids[:512]) for r in requests}) == 1
    assert len({tuple(r.prompt_token_ids[512:]) for r in requests}) == len(requests)
    assert hot.requests(VOCABULARY) == requests  # or the hot run would find nothing in the cache


def test_a_request_rate_spreads_the_arrivals() -> None:
    workload = custom_workload(
        "serve", input_len=4, output_len=2, num_prompts=400, request_rate=50.0
    )
    arrivals = [r.arrival for r in workload.requests(VOCABULARY)]
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    assert arrivals[-1] / 399 == pytest.approx(1 / 50, rel=0.2)


# ---------------------------------------------------------------- metrics


def test_figures_of_a_made_up_timeline() -> None:
    # Two requests sent at 10 s: tokens at 11, 12 and (two at once) 14; and at 13 and 13.5.
    found = figures(
        [Timeline(10.0, [(11.0, 1), (12.0, 1), (14.0, 2)]), Timeline(10.0, [(13.0, 1), (13.5, 1)])]
    )
    assert found.seconds == 4.0 and found.output_tokens == 6 and found.tokens_per_second == 1.5
    assert found.ttft_p50 == 2.0 and found.ttft_p99 == pytest.approx(2.98)
    # Gaps 1, 2 and 0.5: tokens that come together are one arrival.
    assert found.itl_p50 == 1.0 and found.itl_max == 2.0 and found.itl_p99 == pytest.approx(1.98)


def test_figures_without_gaps_or_without_tokens() -> None:
    assert figures([Timeline(0.0, [(1.0, 5)])]).itl_p50 is None
    for timelines in ([], [Timeline(0.0)], [Timeline(0.0, [(1.0, 1)]), Timeline(0.0)]):
        with pytest.raises(ValueError, match="at least one token"):
            figures(timelines)


def test_only_waits_that_the_late_prompt_can_have_caused_count() -> None:
    # The stream waited 5 s long before the prompt came, 2 s around it, and 4 s after its first
    # token.
    stream = Timeline(0.0, [(1.0, 1), (6.0, 1), (8.0, 1), (12.0, 1)])
    found = intruder_figures([stream, Timeline(6.5, [(7.5, 1)])])
    assert found.itl_max == 2.0 and found.ttft_p50 == found.ttft_p99 == 1.0
    assert found.output_tokens == 4  # the streams' alone


@pytest.mark.parametrize(
    ("runs", "higher_is_better", "ratio", "verdict"),
    [
        ([(20, 10), (30, 10), (10, 10 / 1.5)], True, 2.0, "better"),
        ([(20, 10), (30, 10), (15, 10)], False, 0.5, "worse"),
        ([(11, 10)], True, 1.1, "tie"),
        ([(11, 10), (12, 10)], True, 1.15, "tie"),  # two pairs are too few
        ([(11, 10), (12, 10), (10.5, 10)], True, 1.1, "better"),
        ([(10, 11), (10, 12), (10, 10.5)], True, 1 / 1.1, "worse"),
        ([(11, 10), (12, 10), (9, 10)], True, 1.1, "tie"),
        ([(20, 10), (30, 10), (9, 10)], True, 2.0, "unclear"),
        ([(10, 10)], True, 1.0, "tie"),
    ],
)
def test_verdicts(
    runs: list[tuple[float, float]], higher_is_better: bool, ratio: float, verdict: str
) -> None:
    pairs, found = compare(runs, higher_is_better)
    assert statistics.median(pairs) == pytest.approx(ratio)
    assert found == verdict and len(pairs) == len(runs)


# ---------------------------------------------------------------- roofline


def tiny_model() -> ModelConfig:
    return ModelConfig("LlamaForCausalLM", 50, 8, 12, 2, 2, 1, 4, 128, layer_windows=[0, 0])


@pytest.mark.parametrize(
    "variant",
    [
        "llama-biased",
        "llama-mha-tied",
        "qwen3",
        "gemma2",
        "mixtral",
        "qwen3-moe",
        "deepseek-v2",
        "deepseek-v3",
    ],
)
def test_the_cost_of_a_model_is_counted_right(variant: str, tmp_path: pathlib.Path) -> None:
    """By its checkpoint, by the operations of transformers for one token, and by the cache that the
    engine makes."""
    import torch
    from safetensors import safe_open
    from torch.utils.flop_counter import FlopCounterMode

    folder = make_checkpoint(tmp_path, variant)
    cost = ModelCost.of(ModelConfig.from_pretrained(folder), 4)
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    embedding = sizes["model.embed_tokens.weight"] if "lm_head.weight" in sizes else 0
    assert cost.weight_bytes == 4 * (sum(sizes.values()) - experts - embedding)
    assert cost.expert_bytes == 4 * experts and (cost.expert_share > 0) == (experts > 0)

    model = reference_model(str(folder))
    if experts:
        model.set_experts_implementation("eager")  # whose products can be counted
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(torch.tensor([[5]]))
    counts = {name: sum(found.values()) for name, found in counter.get_flop_counts().items()}
    layers = sum(n for name, n in counts.items() if re.fullmatch(r"\w+\.model\.layers\.\d+", name))
    # It sees itself, and nothing before it.
    assert layers == cost.layer_flops + cost.attention_flops
    assert counts[f"{type(model).__name__}.lm_head"] == cost.head_flops

    runner = LLM(str(folder), dtype="float32", num_kv_blocks=3, block_size=8).engine.core.runner
    assert sum(cache.nbytes for cache in runner.kv_caches) == 3 * 8 * cost.kv_bytes_per_token


@pytest.mark.parametrize("num_tokens", [1, 3, 20])
def test_how_many_experts_a_step_reads(num_tokens: int) -> None:
    cost = ModelCost(50, 0, 0, 0, 0, expert_bytes=1600, expert_share=3 / 16)
    draw, trials = random.Random(0), 2000
    visited = [
        len({expert for _ in range(num_tokens) for expert in draw.sample(range(16), 3)})
        for _ in range(trials)
    ]
    assert cost.step_bytes(num_tokens) == pytest.approx(50 + 100 * sum(visited) / trials, rel=0.02)


def test_full_steps_share_experts() -> None:
    cost = ModelCost(1000, 0, 0, 0, 0, expert_bytes=25600, expert_share=0.25)
    one, two, four = (1000 + 25600 * (1 - 0.75**n) for n in (1, 2, 4))
    assert least_work(cost, [BenchRequest([1] * 9, 10)]).num_bytes == 10 * one
    assert least_work(cost, [BenchRequest([1], 10)] * 4).num_bytes == 10 * four
    assert least_work(cost, [BenchRequest([1], 10)] * 4, max_concurrency=1).num_bytes == 40 * one
    uneven = [BenchRequest([1], 10), BenchRequest([1], 3)]
    assert least_work(cost, uneven).num_bytes == 3 * two + 7 * one


def test_least_work_by_hand() -> None:
    cost = ModelCost(
        weight_bytes=1000, kv_bytes_per_token=10, layer_flops=7, head_flops=5, attention_flops=2
    )
    # A prompt of 3 and 4 output tokens: 4 steps; tokens at positions 0 to 5 are computed, 3 to 5
    # are decoded.
    work = least_work(cost, [BenchRequest([1, 2, 3], 4)])
    assert work.num_bytes == 4 * 1000 + 10 * (4 + 5 + 6)
    assert work.flops == 4 * 5 + 6 * 7 + 2 * (1 + 2 + 3 + 4 + 5 + 6)


def test_a_batch_shares_its_steps_and_concurrency_bounds_that() -> None:
    cost = ModelCost(1000, 0, 0, 0, 0)
    requests = [BenchRequest([1], 10)] * 8
    assert least_work(cost, requests).num_bytes == 10 * 1000
    assert least_work(cost, requests, max_concurrency=4).num_bytes == 20 * 1000
    # 80 tokens, 3 a step.
    assert least_work(cost, requests, max_concurrency=3).num_bytes == 27 * 1000


def test_a_cached_prefix_is_not_computed() -> None:
    cost = ModelCost(0, 0, 1, 0, 0)
    requests = [BenchRequest(list(range(20)), 1)] * 4
    flops = {
        cache: least_work(cost, requests, None, 16, cache).flops
        for cache in ("none", "cold", "hot")
    }
    assert flops == {"none": 80, "cold": 20 + 3 * 4, "hot": 16}


def test_shares_of_the_roof() -> None:
    share = roofline_share(
        Work(num_bytes=50, flops=30), seconds=2.0, bytes_per_second=100, flops_per_second=20
    )
    assert share == (25, 75)


def test_waiting_has_no_roof() -> None:
    cost = ModelCost.of(tiny_model(), 2)
    for workload in (NAMED["W5"][0], custom_workload("serve", request_rate=2.0)):
        assert workload_work(cost, workload, workload.requests(50)) is None
    workload = NAMED["W4"][0]
    assert workload_work(cost, workload, workload.requests(50)) is not None


@pytest.mark.parametrize("option", ["quantization", "quantize_head", "kv_cache_dtype"])
def test_what_is_quantized_has_no_roof(option: str) -> None:
    """Its bytes are not those of the model's dtype: a run would seem to read more than the memory
    can."""
    suite = made_up_suite()
    assert suite.cost is not None
    quantized = made_up_suite()
    quantized.engines[0].options[option] = "some"
    assert quantized.cost is None
    workload = NAMED["W1"][0]
    assert workload_work(quantized.cost, workload, workload.requests(50)) is None


# ---------------------------------------------------------------- the machine


def test_a_process_and_its_children_are_watched() -> None:
    # A shell's child that holds 64 MiB, until its input ends.
    program = "import sys; held = b'x' * 2**26; print(1, flush=True); sys.stdin.read()"
    shell = f'"{sys.executable}" -c "{program}"; true'
    with subprocess.Popen(
        shell, shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        assert len(process_tree(process.pid)) == 2
        peak, found = peak_memory(process.pid), NoiseMeter(process.pid).read()
        process.stdin.close()
    assert peak > 2**26
    # Shares of clock ticks.
    assert 0 <= found.steal <= 1.001 and 0 <= found.others <= 1.001 and found.cores >= 0
    assert process_tree(process.pid) == []


def compute(seconds: float) -> None:
    """Use the processor for this time."""
    while time.process_time() < seconds:
        pass


def test_ranks_that_have_ended_belong_to_the_run() -> None:
    """A server that descends from this process forks the ranks, and waits for them."""
    begin = time.perf_counter()
    meter = NoiseMeter()
    run_ranks(compute, Grid(), 0.5)
    found = meter.read()
    assert found.cores * (time.perf_counter() - begin) > 0.4


def test_measured_limits_have_the_dtype() -> None:
    limits = machine.measure_limits("float32", 1)
    assert limits.dtype == "float32" and limits.bytes_per_number == 4
    assert limits.bytes_per_second > 0 and limits.flops_per_second > 0
    higher = machine.best(Limits(1.0, 9.0, "float32", 4), Limits(2.0, 3.0, "float32", 4))
    assert higher == Limits(2.0, 9.0, "float32", 4)


# ---------------------------------------------------------------- engines and the client


def test_vllm_gets_its_own_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    options = {
        "block_size": 32,
        "kv_cache_memory": "1.5GiB",
        "device": "cpu",
        "batching_policy": "static",
    }
    settings = EngineSettings("vllm", tmp_path, options, 1, str(tmp_path / "bin" / "python"))
    variables = settings.environment()
    assert settings.engine_options() == {"block_size": 32}
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == str(machine.usable_cores()[0])
    assert "PYTHONPATH" not in variables and "OMP_NUM_THREADS" not in variables
    assert str(tmp_path / "lib" / "libiomp5.so") in variables["LD_PRELOAD"]

    own = EngineSettings("nanovllm", tmp_path, options, 1)
    assert own.environment()["OMP_NUM_THREADS"] == "1"
    assert own.environment()["PYTHONPATH"].endswith("/somewhere")
    assert own.engine_options() == options


def test_engines_spin_as_is_their_default_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """`nanovllm` sets the policy for itself. The run of the lectures sets the number of spins, so
    that two of them at once do not take each other's processors."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    for name in ENGINES:
        variables = EngineSettings(name, tmp_path, {"max_model_len": 64}, 2).environment()
        assert "OMP_WAIT_POLICY" not in variables
        assert variables["GOMP_SPINCOUNT"] == "0"


def test_nothing_is_left_when_a_run_is_interrupted(
    checkpoint: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_temporary_folder(monkeypatch, tmp_path)
    options = {"device": "cpu", "kv_cache_memory": "8MiB", "max_model_len": 64}
    engine = OfflineEngine(EngineSettings("nanovllm", checkpoint, options, 1))
    with pytest.raises(KeyboardInterrupt), engine:
        raise KeyboardInterrupt
    assert process_tree(engine.process.pid) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("engine", "flags"), [("nanovllm", {"--check-invariants"}), ("vllm", {"--enforce-eager"})]
)
def test_a_server_gets_the_options_that_it_has_as_flags(
    engine: str, flags: set[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_temporary_folder(monkeypatch, tmp_path)
    options = {"max_num_seqs": 8, "enable_prefix_caching": False, "check_invariants": True}
    command = Server(EngineSettings(engine, tmp_path, options, 1))._command()
    words = {word for word in command if word.startswith("--")}
    expected = {"--host", "--port", "--model", "--max-num-seqs=8", "--no-enable-prefix-caching"}
    assert words == expected | flags


def event(count: int | None) -> bytes:
    usage = "" if count is None else f', "usage": {{"completion_tokens": {count}}}'
    return b'data: {"choices": []' + usage.encode() + b"}\n\n"


def test_events_are_read_however_the_network_cuts_them() -> None:
    stream = event(None) + event(1) + event(2) + event(5) + event(5) + b"data: [DONE]\n\n"
    cut = len(event(None) + event(1)) + 5
    line = client._timeline(0.5, [(1.0, stream[:cut]), (2.0, stream[cut:])], 5)
    assert line.arrivals == [(1.0, 1), (2.0, 4)] and line.ttft == 0.5
    with pytest.raises(ServerError, match="5 tokens came, 6"):
        client._timeline(0.0, [(1.0, stream)], 6)
    with pytest.raises(ServerError, match="too much"):
        client._timeline(0.0, [(1.0, b'data: {"error": "too much"}\n\n')], 6)


def test_an_engine_that_cannot_start_is_named_with_its_reason(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_temporary_folder(monkeypatch, tmp_path)  # its log stays, for who wants to know more
    engine = OfflineEngine(EngineSettings("nanovllm", tmp_path / "nowhere", {"device": "cpu"}, 1))
    with pytest.raises(EngineFailed, match=r"nanovllm ended with status 1.*nowhere"), engine:
        pass
    assert process_tree(engine.process.pid) == []


# ---------------------------------------------------------------- reports


def made_up_suite() -> Suite:
    workload, folder = NAMED["W1"][0], pathlib.Path("/nowhere")
    engines = [
        EngineSettings(name, folder, {"dtype": "bfloat16"}, 2) for name in ("nanovllm", "hf")
    ]
    suite = Suite(
        "some-model", engines, [workload], 2, 0, tiny_model(), Limits(1e9, 1e12, "bfloat16", 2)
    )
    for repeat in range(2):
        for engine, step in (("nanovllm", 0.01), ("hf", 0.02)):
            line = Timeline(0.0, [(step * (i + 1), 1) for i in range(128)])
            noise = Noise(0.1 * repeat, 0.25, 1.5)
            suite.runs.append(Run("W1", engine, figures([line]), noise, Work(10**8, 10**9)))
    for engine, seconds in (("nanovllm", 2.0), ("hf", 5.0)):
        suite.starts.append(
            Started(engine, "offline", seconds, {"torch": "2.13"}, int(seconds * 2**28))
        )
    return suite


def test_runs_lie_under_the_roof(tmp_path: pathlib.Path) -> None:
    """10 FLOPs per byte; 1e9 FLOPs in 1.28 and in 2.56 s."""
    suite = made_up_suite()
    runs = suite.under_the_roof()
    assert (
        runs["nanovllm"] == {"W1": (10.0, pytest.approx(1e9 / 1.28))}
        and runs["hf"]["W1"][1] < 0.4e9
    )
    figure = roofline.draw_roofline(1e9, 1e12, runs)
    roof, ours, theirs = figure.axes[0].get_lines()
    x, y = roof.get_data()
    assert np.allclose(y, np.minimum(x, 1000)) and x[0] < 10 < 1000 < x[-1]
    assert [(line.get_label(), *line.get_xydata()[0]) for line in (ours, theirs)] == [
        ("nanovllm", 10.0, pytest.approx(1 / 1.28)),
        ("hf", 10.0, pytest.approx(1 / 2.56)),
    ]
    for name, start in (("roof.svg", b"<?xml"), ("roof.png", b"\x89PNG")):
        roofline.write_roofline(tmp_path / name, 1e9, 1e12, runs)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_an_interval_narrows_with_the_pairs() -> None:
    few, many = (report.estimate([0.9, 1.0, 1.1, 1.0] * n) for n in (2, 20))
    assert few["median"] == many["median"] == 1
    assert few["low"] < many["low"] <= 1 <= many["high"] < few["high"]
    assert report.estimate([0.97]) == {"median": 0.97, "low": 0.97, "high": 0.97, "values": [0.97]}


def test_markdown_and_json_say_the_same() -> None:
    suite = made_up_suite()
    found = Report("nanovllm bench latency", suite.facts(12.0), list(suite.rows()))
    text = found.markdown()
    assert "    nanovllm bench latency\n" in text and "some-model" in text and "torch 2.13" in text
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", text)
    # 128 tokens in 1.28 s; 1e8 bytes at 1e9 per second are 0.1 s of them, 1e9 FLOPs at 1e12 are 1
    # ms.
    assert "| W1 | nanovllm | 100 | 10.0 | 10.0 | 10.0 | 10.0 | 10.0 |" in text
    assert "| W1 | nanovllm | 7.81 | 7.81 | 0.08 | 1.50 | 10.0 | 25.0 |" in text
    assert "| offline | nanovllm | 1 | 2.00 | 512 |" in text
    assert "| W1 | tokens/s | hf | 2.00 | 2.00 2.00 | better |" in text
    assert "| offline | start to first token | hf | 2.50 | 2.50 | better |" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1

    data = json.loads(found.json())
    speed, use, _, ratios = data["tables"].values()
    assert data["command"] == "nanovllm bench latency"
    assert speed[0]["tokens/s"] == pytest.approx([100, 100]) and use[0][
        "% of roofline"
    ] == pytest.approx([7.8125] * 2)
    verdicts = {(row["workload"], row["figure"]): row["verdict"] for row in ratios}
    assert verdicts["W1", "worst ITL ms"] == verdicts["offline", "peak memory"] == "better"


def test_goals() -> None:
    for measured, reached in ((51.1, False), (50.9, True)):
        assert goal("x", measured, "%", near=50.0, tolerance=0.02)["reached"] is reached
    assert goal("x", 7, near=7)["reached"] is True and goal("x", 7.0)["reached"] is None
    rows = [
        goal("speed", 4.0, "×", at_least=5.0),
        goal("cost", 3.0, at_most=5.0),
        goal("none", None, at_most=5.0),
    ]
    assert [row["reached"] for row in rows] == [False, True, None]
    found = Report("c", [], rows)
    assert "| speed | 4.00 | × | ≥ 5.00 | NO |" in found.markdown() and not found.failed
    found = Report("c", [], rows, dry_run=True)
    assert (
        "| speed | 4.00 | × | ≥ 5.00 | – |" in found.markdown()
        and report.DRY_RUN in found.markdown()
    )


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["latency", "--engine", "tgi"],
            "unknown name 'tgi'; there are nanovllm, vllm, llamacpp, hf, watched",
        ),
        (["latency", "--engine", "vllm"], "needs --vllm-python"),
        (["latency", "--engine", "vllm", "--vllm-python", "/nowhere"], "got /nowhere"),
        (["serve", "--engine", "hf"], "has no server"),
        (["latency", "--workload", "W9"], "unknown name 'W9'"),
        (["latency", "--workload", "W2"], "belongs to `bench throughput`"),
        (["latency", "--workload", "W1", "--input-len", "3"], "exclude each other"),
        (["all", "--input-len", "3"], "unrecognized arguments: --input-len 3"),
        (["latency", "--num-prompts", "3"], "unrecognized arguments: --num-prompts 3"),
        (["latency", "--batch-size", "0"], "argument --batch-size: must be 1 or more, got '0'"),
        (["latency", "--repeats", "0"], "argument --repeats: must be 1 or more"),
        (["latency", "--output-len", "-1"], "argument --output-len: must be 1 or more"),
        (["latency", "--threads", "999"], "argument --threads: must be"),
        (["latency", "--block-size", "0"], "block_size"),
        (["latency", "--json", "/nowhere/x.json"], "there is no folder"),
        (["latency", "--json", "."], "it is a folder"),
        (["latency", "--input-len", "300"], "over the 256 that fit"),
        (["latency", "--device", "cuda"], "measures CPUs"),
        (["scheduler", "--minutes", "3"], "unrecognized arguments: --minutes 3"),
        (["parallel", "--part", "orders,all"], "unknown name 'all'; there are orders, executor"),
        (["parallel", "-tp", "2"], "unrecognized arguments: -tp 2"),
        (["scheduler", "--engine", "hf"], "unrecognized arguments: --engine hf"),
        (["serve", "--request-rate", "0"], "argument --request-rate: must be above 0"),
        (["serve", "--request-rate", "nan"], "argument --request-rate: must be above 0"),
    ],
)
def test_a_mistake_is_answered_in_one_line(
    words: list[str], message: str, checkpoint: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", *words, "--model", str(checkpoint)])
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    lines = capsys.readouterr().err.splitlines()
    assert (
        code == 2
        and len(lines) == 1
        and lines[0].startswith("nanovllm bench")
        and message in lines[0]
    )


@pytest.mark.parametrize("benchmark", ["latency", "throughput", "serve"])
def test_from_the_command_line_to_the_files(
    benchmark: str,
    checkpoint: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Measuring them takes seconds, and has a test of its own.
    set_limits(monkeypatch)
    engines = ["nanovllm", "hf"] if benchmark == "latency" else ["nanovllm"]
    words = [
        "bench",
        benchmark,
        "--model",
        str(checkpoint),
        "--engine",
        ",".join(engines),
        "--repeats",
        "1",
    ]
    words += [
        "--input-len",
        "12",
        "--output-len",
        "5",
        "--dtype",
        "float32",
        "--kv-cache-memory",
        "8MiB",
    ]
    words += ["--batch-size" if benchmark == "latency" else "--num-prompts", "3", "--threads", "1"]
    if benchmark == "serve":
        words += ["--max-concurrency", "2", "--request-rate", "100"]
    words += ["--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md")]
    assert main(words) == 0
    data = json.loads((tmp_path / "r.json").read_text())
    speed, use, starts, *_ = data["tables"].values()
    assert [row["engine"] for row in speed] == engines and all(
        row["tokens/s"][0] > 0 for row in speed
    )
    assert [row["used as"] == "server" for row in starts] == [benchmark == "serve"] * len(engines)
    assert all(row["peak memory MiB"] > 0 for row in starts)
    # A request rate has no roof.
    assert all((row["% of roofline"] == [None]) == (benchmark == "serve") for row in use)
    assert all(any(fact.startswith(f"{engine}: ") for fact in data["facts"]) for engine in engines)
    text = (tmp_path / "r.md").read_text()
    for engine in engines:
        assert f"| custom | {engine} |" in text
    shown = capsys.readouterr().out
    assert "custom" in shown and "tokens/s" in shown
