"""Costs that are measured on this machine: the fit, the file, and simulations with it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import msgspec
import pytest

from nanovllm.cli.main import main
from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.data.resolved_config import resolve
from nanovllm.engine.llm import LLMEngine
from nanovllm.simulate.calibrate import (
    MIN_MODEL_LEN,
    LoadRequest,
    StepTimer,
    calibrate,
    extra_seconds,
    full_loads,
    full_steps,
    loads,
    with_errors,
)
from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.fit import Timed, fit, fit_head
from nanovllm.simulate.measured import HeadCost, MeasuredCost, read_cost, write_cost
from nanovllm.simulate.plan import plan_fleet
from nanovllm.simulate.roofline import longest_part
from nanovllm.simulate.settings import FleetConfig
from nanovllm.simulate.simulation import simulate
from nanovllm.simulate.workload import SECOND

COST = MeasuredCost(
    model="smollm2-135m",
    machine="any",
    on_gpu=False,
    num_kv_blocks=1000,
    block_size=16,
    kv_bytes_per_token=23_040,
    max_model_len=2048,
    knots=[1, 2, 4, 8, 16, 32, 64],
    row_seconds=[0.01, 0.011, 0.012, 0.013, 0.015, 0.02, 0.04],
    per_sample=1e-4,
    per_context=1e-7,
    per_pair=1e-8,
)


def random_work(numbers):
    decodes = numbers.choice([0, 1, 2, 5, 9, 20])
    sizes = [numbers.randint(2, 20) for _ in range(numbers.choice([0, 0, 1, 2]))]
    if not decodes:
        sizes.append(numbers.randint(2, 24))
    prefills = [(numbers.randint(0, 500), size) for size in sizes]
    return StepWork(decodes, decodes * numbers.randint(10, 2000), prefills, decodes + len(prefills))


def test_a_fit_finds_the_prices_and_slowed_steps_only_raise_the_mean():
    numbers = random.Random(1)
    works = [random_work(numbers) for _ in range(600)]
    slowed = [
        Timed(work, COST.step(work) / SECOND * numbers.choice([1] * 9 + [3])) for work in works
    ]
    knots, row_seconds, others = fit(slowed)
    found = msgspec.structs.replace(
        COST,
        knots=knots,
        row_seconds=row_seconds,
        per_sample=others[0],
        per_context=others[1],
        per_pair=others[2],
    )
    raised = sum(seconds for _, seconds in slowed) / sum(COST.step(work) for work in works)
    unseen = [Timed(work, COST.step(work) * raised) for work in map(random_work, [numbers] * 200)]
    checked = with_errors(found, unseen)
    assert 1.15 < raised * SECOND < 1.25
    assert checked.error < 0.02
    assert 0.97 < checked.low <= checked.high < 1.03


def test_a_delay_of_steps_that_other_prices_explain_stays_a_delay() -> None:
    """Contexts explain the decodes, and nothing is left for their rows, which a factor per size
    cannot raise, however large: rows that were not measured took 256 seconds."""
    decodes = [(50, 0.001), (100, 0.002), (200, 0.004), (150, 0.03)]
    steps = [Timed(StepWork(2, context, (), 2), seconds) for context, seconds in decodes]
    steps += [Timed(StepWork(0, 0, [(0, 100)], 1), 0.05)] * 3
    knots, row_seconds, (_, per_context, *_) = fit(steps)
    assert per_context == pytest.approx(2e-5, rel=0.01)
    assert knots[1] == 2
    delay = sum(seconds - 2e-5 * context for context, seconds in decodes) / len(decodes)
    assert 0.2 * delay < row_seconds[1] < delay
    assert row_seconds[-1] < 0.06


def test_times_that_make_no_sense_are_refused():
    """As on a machine where other programs run all the time."""
    nothing = msgspec.structs.replace(
        COST,
        row_seconds=[0.0] * len(COST.row_seconds),
        per_sample=0.0,
        per_context=0.0,
        per_pair=0.0,
    )
    with pytest.raises(UsageError, match="run it again while no other program runs"):
        with_errors(nothing, [Timed(StepWork(1, 10, (), 1), 0.01)])
    ages = msgspec.structs.replace(COST, row_seconds=[*COST.row_seconds[:-1], 1.1e9])
    with pytest.raises(UsageError, match="run it again while no other program runs"):
        with_errors(ages, [Timed(StepWork(1, 10, (), 1), 0.01)])


def test_steps_of_decodes_are_affine_and_the_last_line_goes_on():
    for count in (1, 3, 64, 200):
        base, per_token = COST.decode(count)
        assert COST.step(StepWork(count, 5000, (), count)) == base + 5000 * per_token
    assert COST.decode(96)[0] == round((0.04 + 0.02 + 96e-4) * SECOND)
    assert longest_part(COST.parts(StepWork(1, 10**6, (), 1))).name == "attention"


def test_a_pause_delays_the_next_step():
    cost = msgspec.structs.replace(COST, pauses=[0.1, 1.0], idle_seconds=[0.02, 0.11])
    found = [cost.after_idle(round(pause * SECOND)) / SECOND for pause in (0, 0.05, 0.1, 0.4, 9)]
    assert found == pytest.approx([0, 0.01, 0.02, 0.05, 0.11])
    assert COST.after_idle(SECOND) == 0
    work = StepWork(1, 0, (), 1)
    usual = cost.step(work) / SECOND
    assert extra_seconds(cost, [Timed(work, usual + 0.25)]) == pytest.approx([0.25])


def test_a_file_is_a_machine(tmp_path):
    path = tmp_path / "this.json"
    write_cost(COST, path)
    assert read_cost(path) == COST
    few = {"machine": str(path), "num_prompts": 8, "random_input_len": 40, "random_output_len": 6}
    found = simulate(few)
    assert found["completed"] == 8
    assert simulate({**few, "model": "smollm2-135m"}) == found
    for wrong in (
        {"model": "qwen3-8b"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 3},
    ):
        with pytest.raises(UsageError, match="omit "):
            simulate({**few, **wrong})
    fixed = {"kv_cache_dtype": "fp8", "gpu_memory_utilization": 0.5, "enable_expert_parallel": True}
    for name, value in fixed.items():
        with pytest.raises(
            UsageError, match=f"--{name.replace('_', '-')} has no effect with --mac"
        ):
            simulate({**few, name: value})
    without_head = msgspec.structs.replace(COST, pipeline_parallel_size=2)
    path.write_bytes(msgspec.json.encode(without_head))
    with pytest.raises(UsageError, match="no time of the last stage: measure the pipeline again"):
        simulate(few)
    path.write_text(json.dumps({"model": "x"}))
    with pytest.raises(UsageError, match=r"no file of --calibrate: .*missing required field"):
        simulate(few)
    with pytest.raises(UsageError, match="No such file or directory"):
        write_cost(COST, tmp_path / "missing" / "this.json")


def test_mistakes_are_told_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    missing = tmp_path / "missing" / "this.json"
    assert main(["simulate", "--calibrate", str(missing), "--model", "no-such-model"]) != 0
    assert "No such file or directory: name a file" in capsys.readouterr().err
    path = tmp_path / "this.json"
    assert main(["simulate", "--calibrate", str(path), "--model", str(tmp_path / "none")]) != 0
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not path.exists()


def test_settings_that_a_calibration_does_not_use(tmp_path, capsys):
    path = tmp_path / "this.json"
    for idle in (
        *("--replicas=2", "--machine=A100", "--request-rate=3"),
        *("--sweep=block-size=8,16", "--find-load", "--perfetto=x", "--json"),
    ):
        assert main(["simulate", "--calibrate", str(path), idle]) != 0
        flag = idle.partition("=")[0]
        assert f"{flag} has no effect with --calibrate" in capsys.readouterr().err
        assert not path.exists()


def test_a_context_that_is_too_short_is_refused(tiny_model, tmp_path, capsys):
    path = tmp_path / "this.json"
    words = ["--model", str(tiny_model), "--max-model-len", "127", "--num-kv-blocks", "200"]
    assert main(["simulate", "--calibrate", str(path), *words]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--calibrate runs requests of 128 tokens, got --max-model-len 127: raise it" in line
    assert not path.exists()


def test_an_engine_is_measured_with_the_shortest_context(tiny_model):
    config = EngineConfig(model=str(tiny_model), num_kv_blocks=200, max_model_len=MIN_MODEL_LEN)
    assert calibrate(config, seconds=4.0).decode(1)[0] > 0


def test_an_engine_is_measured(tiny_model):
    config = EngineConfig(model=str(tiny_model), device="cpu", num_kv_blocks=200, max_num_seqs=8)
    cost = calibrate(config, seconds=4.0)
    assert cost.num_kv_blocks == 200
    assert not cost.on_gpu
    assert cost.decode(1)[0] > 0
    assert 0 < cost.low <= cost.high
    assert cost.row_seconds == sorted(cost.row_seconds)
    assert len(cost.pauses) == len(cost.idle_seconds) > 0


def test_prompts_are_not_drawn_while_steps_are_timed(tiny_model):
    """The second request arrives while the first one is decoded: its tokens are known by then."""
    timer = StepTimer(LLMEngine(EngineConfig(model=str(tiny_model), num_kv_blocks=100)))

    class IdleNumbers(random.Random):
        def randrange(self, *bounds):
            assert not timer.engine.has_unfinished
            return super().randrange(*bounds)

    timer.numbers = IdleNumbers(0)
    steps = timer.run([LoadRequest(20, 10), LoadRequest(30, 5, step=3, num_shared=8)])
    assert sum(work.num_samples for work, _ in steps) >= 15
    timer.core.close()


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_a_step_on_several_ranks_takes_the_time_of_all_stages(tiny_model, layout):
    """Known step times: in a pipeline, half of a step passes between the results of two steps."""
    options = {"num_kv_blocks": 200, "max_num_seqs": 8, "async_scheduling": False, **layout}
    sleep = {"machine": "L40S", "model": "llama-3.1-8b", "scale": 1e-6}
    timer = StepTimer(
        LLMEngine(
            EngineConfig(str(tiny_model), device="sleep", sleep_config=json.dumps(sleep), **options)
        )
    )
    engine = EngineConfig("llama-3.1-8b", **options)
    known = plan_fleet(FleetConfig(machine="L40S"), engine).kinds[0].cost
    load = [LoadRequest(40, 12, step) for step in (0, 2, 4, 6)]
    steps = timer.run(load)
    full = timer.run_full([LoadRequest(40, 8)] * 4)
    timer.core.close()
    assert len(steps) > 12
    for work, seconds in steps:
        assert seconds == pytest.approx(known.step(work) / SECOND, rel=2e-3)
    stages = layout.get("pipeline_parallel_size", 1)
    assert len(full) >= 4
    for work, seconds in full:
        step, head = known.step(work), known.head(work)
        assert work.num_decodes == 4 / stages
        assert head > 0.05 * step
        assert seconds == pytest.approx(((step - head) / stages + head) / SECOND, rel=2e-3)


PIPELINE = msgspec.structs.replace(COST, pipeline_parallel_size=3)


@pytest.mark.parametrize(
    "head",
    [HeadCost(), HeadCost(fixed=0.002, per_sample=3e-4), HeadCost(per_sample=1e-4, share=0.3)],
)
def test_a_fit_finds_how_much_longer_the_last_stage_takes(head: HeadCost) -> None:
    true = msgspec.structs.replace(PIPELINE, head_cost=head)
    works = [StepWork(n, 100 * n, (), n) for n in (1, 2, 4, 8)] * 3
    works += [StepWork(0, 0, [(0, n)], 1) for n in (10, 30, 60)] * 3

    def slowest(work: StepWork) -> float:
        """Seconds of the last of three stages."""
        extra = true.head(work)
        return ((true.step(work) - extra) / 3 + extra) / SECOND

    # Of two equal steps, one is faster, and one is slower.
    for ratios in ([1.0], [0.9, 1.1]):
        steps = [Timed(work, slowest(work) * ratio) for work in works for ratio in ratios]
        found = fit_head(PIPELINE, steps)
        assert (found.fixed, found.per_sample, found.share) == pytest.approx(
            (head.fixed, head.per_sample, head.share), abs=1e-6
        )


def test_steps_of_a_full_pipeline_come_after_two_equal_ones_per_stage() -> None:
    decodes = [StepWork(2, 100 + step, (), 2) for step in range(7)]
    prompt = StepWork(0, 0, [(0, 9)], 1)
    steps = [Timed(work, 1.0 + i) for i, work in enumerate([prompt, *decodes, prompt, *decodes])]
    found = full_steps(steps, num_stages=2)
    # Steps 1 to 7 and 9 to 15 decode; the first four of each fill the pipeline.
    assert found == [Timed(steps[i].work, i + 0.5) for i in (5, 6, 7, 13, 14, 15)]


def test_loads_of_a_full_pipeline_have_equal_requests_for_which_there_is_memory() -> None:
    config = EngineConfig("smollm2-135m", max_num_seqs=16, pipeline_parallel_size=4)
    resolved = resolve(config, model_max_len=8192, num_kv_blocks=60, num_host_blocks=0)
    found = full_loads(resolved, random.Random(0))
    streams = [load for load in found if load[-1].step > 0]
    batches = [load for load in found if load not in streams]
    assert sorted(map(len, batches)) == [4, 8, 16]
    assert streams
    for load in found:
        (size,) = {(each.num_prompt_tokens, each.num_output_tokens) for each in load}
        assert sum(size) * (4 if load in streams else len(load)) <= 60 * 16


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_an_engine_of_several_ranks_is_measured_and_simulated(tiny_model, tmp_path, layout):
    config = EngineConfig(
        str(tiny_model), device="cpu", num_kv_blocks=200, max_num_seqs=8, **layout
    )
    cost = calibrate(config, seconds=4.0)
    (name,) = layout
    assert getattr(cost, name) == 2
    assert cost.tensor_parallel_size * cost.pipeline_parallel_size == 2
    assert (cost.head_cost is not None) == (name == "pipeline_parallel_size")
    path = tmp_path / "this.json"
    write_cost(cost, path)
    few = {"machine": str(path), "num_prompts": 8, "random_input_len": 40, "random_output_len": 6}
    found = simulate(few)
    short = {"tensor_parallel_size": "TP 2", "pipeline_parallel_size": "PP 2"}[name]
    assert found["completed"] == 8
    assert short in found["setup"]
    assert simulate({**few, **layout}) == found
    hourly = simulate({**few, "price_per_hour": 1.0})
    tokens_per_hour = 3600 * found["output_throughput"]
    assert hourly["dollars_per_million_output_tokens"] == pytest.approx(2e6 / tokens_per_hour)
    alone = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    write_cost(msgspec.structs.replace(cost, **alone), path)
    with pytest.raises(UsageError, match=rf"measured with --{name.replace('_', '-')} 1, not 2"):
        simulate({**few, **layout})


def test_sizes_between_measured_ones_take_a_time_between_theirs():
    """Many prices explain long prompts and decodes, and a calibration may end before others."""
    numbers = random.Random(2)
    knots = [1, 8, 2048]
    true = msgspec.structs.replace(COST, knots=knots, row_seconds=[0.02, 0.025, 5.0])
    works = [StepWork(n, 100 * n, (), n) for n in (1, 2, 4, 6, 8, 12, 16)] * 10
    works += [StepWork(0, 0, [(0, numbers.randint(900, 2048))], 1) for _ in range(10)]
    knots, row_seconds, others = fit([Timed(work, true.step(work) / SECOND) for work in works])
    found = msgspec.structs.replace(
        COST,
        knots=knots,
        row_seconds=row_seconds,
        per_sample=others[0],
        per_context=others[1],
        per_pair=others[2],
        per_prompt=others[3],
    )
    for size in (48, 100, 200, 400):
        work = StepWork(2, 200, [(0, size)], 3)
        assert found.step(work) == pytest.approx(true.step(work), rel=0.1)


def test_a_round_of_loads_is_short():
    """A slow machine then measures all kinds of steps: those of a round of 23 budgets took longer
    than the two minutes."""
    config = EngineConfig("smollm2-135m", max_num_seqs=32, max_num_batched_tokens=2048)
    resolved = resolve(
        config, model_max_len=8192, num_kv_blocks=11_650, num_host_blocks=0, on_gpu=False
    )
    for seed in range(5):
        found = loads(resolved, random.Random(seed))
        num_tokens = [sum(each.num_prompt_tokens for each in load) for load in found]
        assert sum(num_tokens) < 15 * 2048
        assert max(num_tokens) > 2048


# Both run on one processor. The first does something else until the second has ended.
COMPETE = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while True:
    pass
"""
MEASURE = """
import os, sys, time
from nanovllm.simulate.calibrate import processor_times
os.sched_setaffinity(0, {int(sys.argv[1])})
before = processor_times()
until = time.process_time() + 0.5
while time.process_time() < until:
    pass
print(*(b - a for a, b in zip(before, processor_times())))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="only Linux tells")
def test_the_time_in_which_other_programs_run_is_measured():
    processor = str(min(os.sched_getaffinity(0)))
    words = [sys.executable, "-c", COMPETE, processor]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            words[2] = MEASURE
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            other.kill()
    ran, waited = map(float, done.stdout.split())
    assert 0.45 < ran < 1, "the kernel counts a running thread up to its latest tick"
    assert waited > 0.2, "the other program had half of the processor"


def test_simulations_with_a_disturbed_measurement_have_a_note(tmp_path):
    for waited, notes in ((0.02, []), (0.3, ["30% of the time. Repeat --calibrate"])):
        path = tmp_path / "this.json"
        write_cost(msgspec.structs.replace(COST, waited=waited), path)
        summary = simulate({"machine": str(path), "num_prompts": 3, "random_output_len": 4})
        found = summary.get("notes", [])
        assert len(found) == len(notes)
        assert all(words in note for words, note in zip(notes, found, strict=True))
