"""Settings that a simulation has from the trace whose requests it serves."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from nanovllm.cli.main import main
from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.data.resolved_config import resolve
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.simulate.measured import MeasuredCost, write_cost
from nanovllm.simulate.models import find_model
from nanovllm.simulate.plan import plan_fleet
from nanovllm.simulate.recorded import inherit
from nanovllm.simulate.report import Summary
from nanovllm.simulate.settings import FleetConfig
from nanovllm.simulate.simulation import simulate
from nanovllm.trace.record import Arrival
from nanovllm.trace.trace import StepRecord, Trace, TracedRequest

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# What an engine on a laptop may have been given.
GIVEN: list[dict[str, object]] = [
    {},
    {"max_num_seqs": 4, "max_num_batched_tokens": 64, "enable_prefix_caching": False},
    {"max_model_len": 1024, "long_prefill_token_threshold": 32, "max_step_ms": 200.0},
    {"max_model_len": 1024, "enable_chunked_prefill": False, "batching_policy": "prefill_first"},
    {"pipeline_parallel_size": 2, "scheduling_policy": "priority", "block_size": 32},
    {"preemption_mode": "swap", "swap_space": 0.25, "tensor_parallel_size": 3},
    {"kv_offloading_size": 0.5, "kv_cache_dtype": "int8"},
]
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 1024}


def recorded_by(**given: object) -> TraceSettings:
    """The header of a trace from a CPU with 100 KV blocks."""
    config = EngineConfig(**given)  # type: ignore[arg-type]
    model = find_model(MODEL, kv_cache_dtype=config.kv_cache_dtype)
    num_bytes = model.kv_bytes_per_token(config.tensor_parallel_size) * config.block_size
    resolved = resolve(
        config,
        model_max_len=model.config.max_position_embeddings,
        num_kv_blocks=100,
        num_host_blocks=config.count_host_blocks(int(num_bytes / config.pipeline_parallel_size)),
    )
    return TraceSettings(model=MODEL) | resolved.trace_settings


def trace_of(folder: Path, settings: TraceSettings, num_requests: int = 40) -> str:
    """A trace of requests that arrive every 50 ms, and of which each has a step of its own."""
    trace = Trace(settings=settings)
    for i in range(num_requests):
        record = StepRecord(i, 0.05 * i, 0.01, 64, [TracedRequest(str(i), 0, 40, 40, [0], [5] * 9)])
        record.arrived = {str(i): 40}
        record.arrivals = {str(i): Arrival(time=0.05 * i, max_tokens=9)}
        record.finished = {str(i): "length"}
        trace.record(record)
    path = folder / "run.jsonl"
    trace.save(path)
    return str(path)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return trace_of(tmp_path, recorded_by(**SMALL))


def printed(capsys: pytest.CaptureFixture[str], path: str, *words: str) -> Summary:
    assert main(["simulate", "--workload", path, "--json", *words]) == 0
    found: Summary = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("given", GIVEN)
def test_without_flags_all_that_decides_plans_is_as_recorded(given: dict[str, object]) -> None:
    recorded = recorded_by(**given)
    settings, _ = inherit(recorded, {})
    (kind,) = plan_fleet(FleetConfig(), EngineConfig(**settings)).kinds  # type: ignore[arg-type]
    assert TraceSettings(model=MODEL) | kind.resolved.trace_settings == recorded


def test_the_output_has_the_settings_in_a_line_and_as_data(
    capsys: pytest.CaptureFixture[str], path: str
) -> None:
    found = printed(capsys, path)
    setup = str(found["setup"])
    assert setup.startswith("smollm2-135m on H100, TP 1, PP 1; engines: 1, each with 100 KV blocks")
    words = "--max-model-len 1024 --num-kv-blocks 100 --max-num-seqs 4 --max-num-batched-tokens 64"
    line = f"settings of the trace: --model {MODEL} {words} --no-async-scheduling"
    assert found["notes"] == [line]
    settings = found["from_trace"]
    assert isinstance(settings, dict)
    assert settings.items() >= {**SMALL, "model": MODEL, "num_kv_blocks": 100}.items()
    assert main(["simulate", "--workload", path]) == 0
    table = capsys.readouterr().out
    assert table.count(line) == 1 and "from trace" not in table


def test_a_flag_wins_also_if_it_is_the_default(
    capsys: pytest.CaptureFixture[str], path: str
) -> None:
    flags = ["--max-num-seqs", "256", "--max-num-batched-tokens", "2048", "--async-scheduling"]
    found = printed(capsys, path, "--speedup", "200", *flags)
    settings = found["from_trace"]
    assert isinstance(settings, dict) and "100 KV blocks" in str(found["setup"])
    names = {"max_num_seqs", "max_num_batched_tokens", "async_scheduling"}
    assert not names & settings.keys()
    given = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "async_scheduling": True}
    workload = {"workload": path, "speedup": 200.0}
    assert simulate({**workload, **given}) == found
    assert simulate(workload)["duration"] != found["duration"]


def test_what_followed_from_the_machine_is_computed_for_another_one(
    capsys: pytest.CaptureFixture[str], path: str, tmp_path: Path
) -> None:
    found = printed(capsys, path, "--machine", "A100")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"timestamp": 0, "input_length": 8, "output_length": 2}')
    words = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--model", MODEL]
    other = printed(capsys, str(rows), "--machine", "A100", *words)
    assert found["setup"] == other["setup"]
    assert found["notes"] == [
        f"settings of the trace: --model {MODEL} --max-num-seqs 4 --max-num-batched-tokens 64",
        "computed because of --machine: the trace has --max-model-len 1024 --num-kv-blocks 100 "
        "--no-async-scheduling",
    ]
    assert "from_trace" not in other and "notes" not in other


@pytest.mark.parametrize(
    ("flags", "computed"),
    [
        ("--model llama-3.1-8b", "num_kv_blocks max_model_len"),
        ("-tp 3", "num_kv_blocks max_model_len"),
        ("-pp 2", "num_kv_blocks max_model_len async_scheduling"),
        ("--block-size 8", "num_kv_blocks max_model_len"),
        ("--gpu-memory-utilization 0.5", "num_kv_blocks max_model_len"),
        ("--num-kv-blocks 50", "max_model_len"),
        ("--machine H200 --num-kv-blocks 50", "max_model_len async_scheduling"),
        ("--max-model-len 512", ""),
        ("--replicas 2", ""),
        ("--prefill 1 --decode 1", ""),
        (
            "--prefill 1 --decode 1 --decode-config.machine A100",
            "num_kv_blocks max_model_len async_scheduling",
        ),
        ("--prefill 1 --decode 1 --prefill-config.num-kv-blocks 9", "max_model_len"),
    ],
)
def test_each_setting_follows_from_some(
    capsys: pytest.CaptureFixture[str], path: str, flags: str, computed: str
) -> None:
    all_of_them = simulate({"workload": path})["from_trace"]
    settings = printed(capsys, path, *flags.split())["from_trace"]
    assert isinstance(all_of_them, dict) and isinstance(settings, dict)
    given = {"model", "block_size", "num_kv_blocks", "max_model_len"}
    missing = all_of_them.keys() - settings.keys()
    own = {name for name in given if f"--{name.replace('_', '-')} " in flags}
    assert missing == {*computed.split()} | own


def test_a_budget_for_whole_prompts_follows_from_the_longest_request(tmp_path: Path) -> None:
    recorded = recorded_by(max_model_len=1500, enable_chunked_prefill=False, max_num_seqs=4)
    path = trace_of(tmp_path, recorded)
    assert simulate({"workload": path})["from_trace"]["max_num_batched_tokens"] == 2048  # type: ignore[index]
    for more in ({"max_model_len": 4000, "num_kv_blocks": 300}, {"machine": "A100"}):
        assert "max_num_batched_tokens" not in simulate({"workload": path, **more})["from_trace"]  # type: ignore[operator]


def test_a_sweep_changes_a_recorded_setting(capsys: pytest.CaptureFixture[str], path: str) -> None:
    sweep = ["--sweep", "max-num-seqs=1,4,64", "--max-num-batched-tokens", "64", "--processes", "1"]
    rows = printed(capsys, path, *sweep)
    for row, number in zip(rows, (1, 4, 64), strict=True):
        flags = ["--max-num-seqs", str(number), "--max-num-batched-tokens", "64"]
        assert row == row | printed(capsys, path, *flags)  # type: ignore[operator]
    assert main(["simulate", "--workload", path, *sweep]) == 0
    assert capsys.readouterr().out.count("settings of the trace") == 1


def test_a_sweep_of_machines_computes_every_pool(
    capsys: pytest.CaptureFixture[str], path: str
) -> None:
    words = ["--sweep", "machine=H100,A100", "--processes", "1"]
    for row in printed(capsys, path, *words):
        assert "100 KV blocks" not in row["setup"]  # type: ignore[index]
    assert main(["simulate", "--workload", path, *words]) == 0
    assert capsys.readouterr().out.count("computed because of --machine: ") == 1
    words = ["--sweep", "decode-config.max-num-seqs=1,2", "--prefill", "1", "--decode", "1"]
    for row in printed(capsys, path, *words, "--processes", "1"):
        assert "100 KV blocks" in row["setup"]  # type: ignore[index]


def test_the_highest_load_is_that_of_the_recorded_engine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = trace_of(tmp_path, recorded_by(**SMALL), num_requests=300)
    words = ["--goodput", "ttft:50"]
    one, many = (
        printed(capsys, path, *words, "--find-load", *more)
        for more in (["--max-num-seqs", "1"], [])
    )
    assert one["speedup"] < many["speedup"]  # type: ignore[operator]
    again = printed(capsys, path, *words, "--speedup", str(many["speedup"]))
    notes = many["notes"]
    assert many == {"speedup": many["speedup"], **again, "notes": notes}
    assert set(again["notes"]) <= set(notes)  # type: ignore[call-overload]


def test_a_measured_machine_has_its_own_model_and_layout(tmp_path: Path) -> None:
    path = trace_of(tmp_path, recorded_by(pipeline_parallel_size=2, kv_cache_dtype="int8"))
    cost = MeasuredCost(
        model="by hand",
        machine="none",
        on_gpu=False,
        num_kv_blocks=300,
        block_size=16,
        kv_bytes_per_token=1.0,
        max_model_len=1024,
        knots=[1, 3],
        row_seconds=[0.010, 0.020],
        per_sample=0.0,
        per_context=0.0,
        per_pair=0.0,
    )
    machine = tmp_path / "this.json"
    write_cost(cost, machine)
    for fleet in (
        {"machine": str(machine)},
        {"machine": {**msgspec.to_builtins(cost), "file": str(machine)}},
        {
            **{"prefill": 1, "decode": 1, "kv_transfer_bandwidth": 1.0},
            "prefill_config": json.dumps({"machine": str(machine)}),
            "decode_config": json.dumps({"machine": str(machine)}),
        },
    ):
        found = simulate({"workload": path, **fleet})
        assert str(found["setup"]).startswith("by hand on ") and "300 KV" in str(found["setup"])
        note = found["notes"][-1]  # type: ignore[index]
        assert f"the trace has --model {MODEL} --pipeline-parallel-size 2" in note


def test_a_recorded_setting_that_is_impossible_is_named(tmp_path: Path) -> None:
    path = trace_of(tmp_path, TraceSettings(model="gpt") | recorded_by(**SMALL))
    assert simulate({"workload": path, "model": "smollm2-135m"})["completed"] == 40
    path = trace_of(tmp_path, recorded_by(**SMALL) | TraceSettings(model="gpt"))
    with pytest.raises(UsageError, match=r"'gpt' is unknown.*; the trace has --model gpt$"):
        simulate({"workload": path})
    with pytest.raises(UsageError, match="'gpt-5' is unknown") as caught:
        simulate({"workload": path, "model": "gpt-5"})
    assert "the trace has" not in str(caught.value)
    with pytest.raises(UsageError, match=r"; the trace has --max-num-batched-tokens 64$"):
        simulate({"workload": path, "model": "smollm2-135m", "max_num_seqs": 65})


def test_drafts_are_simulated_with_their_acceptance(tmp_path: Path) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 3}'
    path = trace_of(tmp_path, recorded_by(speculative_config=drafts))
    words = "the recorded engine had drafts: set --spec-acceptance to simulate them"
    assert words in simulate({"workload": path})["notes"]  # type: ignore[operator]
    with_drafts = simulate({"workload": path, "spec_acceptance": "0.5"})
    assert words not in with_drafts["notes"]  # type: ignore[operator]
    assert with_drafts["spec_decode_num_draft_tokens"]


def test_a_trace_that_states_nothing_changes_nothing(tmp_path: Path) -> None:
    found = simulate({"workload": trace_of(tmp_path, TraceSettings(block_size=16))})
    assert str(found["setup"]).startswith("llama-3.1-8b on H100") and "notes" not in found
