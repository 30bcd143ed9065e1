"""`nanovllm simulate`: settings, output, mistakes, and what it imports."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import nanovllm
from nanovllm.assembly.flags import flags_of
from nanovllm.cli.main import main
from nanovllm.data.errors import UsageError
from nanovllm.simulate.command import parse_sweep
from nanovllm.simulate.report import Summary
from nanovllm.simulate.settings import FLEET_GROUPS, FleetConfig
from nanovllm.simulate.simulation import simulate

PACKAGE = Path(nanovllm.__file__).parent
SMALL = ["--num-prompts", "40", "--request-rate", "20", "--random-output-len", "16"]
FEW = {"num_prompts": 40, "request_rate": 20.0, "random_output_len": 16}
EVERY_PART: list[dict[str, object]] = [
    {"prefill": 1, "decode": 1},
    {"replicas": 2, "failures": ["0@1"]},
    {"replicas": 2, "data_parallel_size": 2},
    {"spec_acceptance": "0.5"},
    {"goodput": "ttft:200", "price_per_hour": 1.0},
]
ROWS = "".join(
    json.dumps(
        {
            "timestamp": 50 * i,
            "input_length": 1024,
            "output_length": 8,
            "hash_ids": [i % 4, 100 + i],
        }
    )
    + "\n"
    for i in range(40)
)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints."""
    assert main(["simulate", *words]) == 0
    return capsys.readouterr().out


def results(capsys: pytest.CaptureFixture[str], *words: str) -> Summary:
    return json.loads(run(capsys, *words, "--json"))


def test_a_function_returns_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    summary = simulate({**FEW, "replicas": 2, "goodput": ["ttft:500"]})
    assert summary["completed"] == 40
    assert len(summary["replicas"]) == 2
    printed = results(capsys, *SMALL, "--replicas", "2", "--goodput", "ttft:500")
    assert printed == json.loads(json.dumps(summary))
    table = run(capsys, *SMALL, "--replicas", "2", "--goodput", "ttft:500")
    for text in ("duration (s)", "goodput (req/s)", "TTFT", "queue", "dollars per million"):
        assert text in table
    first = table.partition("\n")[0]
    assert first.startswith("llama-3.1-8b on H100, TP 1, PP 1; engines: 2, each with ")
    assert first.endswith(" KV blocks of 16 tokens; router: estimated")


def test_a_file_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(ROWS)
    words = ["--workload", str(path), "--block-size", "512"]
    summary = results(capsys, *words)
    assert (summary["completed"], summary["total_input_tokens"]) == (40, 40 * 1024)
    assert summary["prefix_cache_hit_rate"] == 36 * 512 / (40 * 1024)
    assert results(capsys, *words, "--no-enable-prefix-caching")["prefix_cache_hit_rate"] == 0
    assert results(capsys, *words, "--limit", "7")["completed"] == 7
    assert results(capsys, *words, "--speedup", "100")["duration"] < 0.7 * summary["duration"]


@pytest.mark.parametrize(
    "policy", ["random", "round_robin", "load", "estimated", "prefix_aware", "precise"]
)
def test_every_policy_routes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(ROWS)
    words = ["--workload", str(path), "--block-size", "512", "--replicas", "3"]
    summary = results(capsys, *words, "--routing-policy", policy)
    assert summary["completed"] == 40
    by_prefix = policy in ("estimated", "prefix_aware", "precise")
    assert by_prefix == (summary["prefix_cache_hit_rate"] > 0.4)


def test_all_settings_of_the_scheduler_have_their_effect() -> None:
    plain = simulate({**FEW, "max_num_seqs": 4, "max_num_batched_tokens": 256})
    changes = {
        "max_num_seqs": 40,
        "max_num_batched_tokens": 4096,
        "long_prefill_token_threshold": 64,
        "batching_policy": "static",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "async_scheduling": False,
        "machine": "A100",
        "model": "llama-3.1-70b",
        "kv_cache_dtype": "fp8",
    }
    for name, value in changes.items():
        more = {"tensor_parallel_size": 4} if name == "model" else {}
        settings = {**FEW, "max_num_seqs": 4, "max_num_batched_tokens": 256, **more, name: value}
        changed = simulate(settings)
        assert changed["completed"] == 40
        assert changed["duration"] != plain["duration"], name


def test_a_sweep_has_every_combination(capsys: pytest.CaptureFixture[str]) -> None:
    sweeps = ["--sweep", "replicas=1,2", "--sweep", "max-num-batched-tokens=512,64"]
    one = results(capsys, *SMALL, *sweeps, "--processes", "1")
    assert [point["settings"] for point in one] == [
        {"replicas": replicas, "max_num_batched_tokens": budget}
        for replicas in (1, 2)
        for budget in (512, 64)
    ]
    assert "at least max_num_seqs" in one[1]["error"]
    assert results(capsys, *SMALL, *sweeps, "--processes", "2") == one
    assert one[0]["bottleneck"] != "none"
    single = results(capsys, *SMALL, "--max-num-batched-tokens", "512")
    assert one[0]["p99_ttft_ms"] == single["p99_ttft_ms"]
    table = run(capsys, *SMALL, *sweeps, "--processes", "1")
    assert "P99 TTFT" in table
    # A line for each of the others.
    errors = [line for line in table.splitlines() if "must be at least" in line]
    starts = [f"replicas {n}, max_num_batched_tokens 64: max_num_batched" for n in (1, 2)]
    assert [line[: len(starts[0])] for line in errors] == starts


def test_rejected_requests_have_a_reason_and_no_price(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--random-input-len", "200000"]
    table = run(capsys, *words)
    assert "rejected 40" in table
    assert "\nrejected: a prompt must have 1 to 131071 tokens here, got 200000\n" in table
    assert "dollars" not in table
    sweep = run(capsys, *words, "--sweep", "random-input-len=200000,100", "--processes", "1")
    lines = [line for line in sweep.splitlines() if "mlp" in line or "none" in line]
    assert len(lines) == 2, "a point without a price has a row, too"


def test_a_wrong_value_of_a_sweep_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--sweep", "replicas=1,x"])
    assert capsys.readouterr().err.endswith("'x' (see nanovllm simulate --help)\n")


def test_the_names_of_machines_have_no_case() -> None:
    upper = simulate({**FEW, "machine": "H100x4"})
    assert simulate({**FEW, "machine": "h100X4"}) == upper
    assert "on H100x4," in str(upper["setup"])


def test_a_table_says_how_many_engines_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    table = run(capsys, *SMALL, "--replicas", "19")
    assert table.endswith("3 more engines are in the output of --json\n")
    assert "more engine" not in run(capsys, *SMALL, "--replicas", "16")


def test_each_engine_has_its_number_and_role(capsys: pytest.CaptureFixture[str]) -> None:
    apart = [*SMALL, "--prefill", "2", "--decode", "1"]
    roles = [each["role"] for each in results(capsys, *apart)["replicas"]]
    assert roles == ["prefill", "prefill", "decode"]
    table = run(capsys, *apart)
    assert re.findall(r"^│ (\d.*?) +│", table, re.MULTILINE) == [
        "0 prefill",
        "1 prefill",
        "2 decode",
    ]
    assert results(capsys, *SMALL)["replicas"][0]["role"] == ""


def test_values_of_a_sweep_are_read_as_flags_are() -> None:
    words = ["max-num-batched-tokens=8k,512", "enable_prefix_caching=true,false", "machine=A100"]
    assert parse_sweep(words) == {
        "max_num_batched_tokens": [8000, 512],
        "enable_prefix_caching": [True, False],
        "machine": ["A100"],
    }
    assert parse_sweep(["tp=1,2", "-pp=1,2"]) == {
        "tensor_parallel_size": [1, 2],
        "pipeline_parallel_size": [1, 2],
    }


def test_parts_of_settings_are_swept() -> None:
    words = ["prefill-config.tensor-parallel-size=1,2", "decode_config.machine=A100"]
    words += ["eplb-config.num_redundant_experts=0,32"]
    assert parse_sweep(words) == {
        "prefill_config.tensor_parallel_size": [1, 2],
        "decode_config.machine": ["A100"],
        "eplb_config.num_redundant_experts": [0, 32],
    }
    whole = '{"tensor_parallel_size": 2, "machine": "A100"}'
    assert parse_sweep([f"prefill-config={whole},{{}}"]) == {"prefill_config": [whole, "{}"]}


def test_a_sweep_of_a_part_keeps_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    apart = [*SMALL, "--prefill", "1", "--decode", "1", "--prefill-config.machine", "A100"]
    sweep = ["--sweep", "prefill-config.tensor_parallel_size=1,2", "--processes", "1"]
    points = results(capsys, *apart, *sweep)
    for point, size in zip(points, (1, 2), strict=True):
        assert point["settings"] == {"prefill_config.tensor_parallel_size": size}
        alone = results(capsys, *apart, "--prefill-config.tensor_parallel_size", str(size))
        assert f"on A100, TP {size}" in alone["setup"]
        shared = {name: point[name] for name in alone}
        assert shared == alone
    assert "prefill config.tensor parallel" in " ".join(run(capsys, *apart, *sweep).split())


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-store-bandwidth", "5", "--sweep", "kv-store-size=0,10"],
        ["--kv-offloading-bandwidth", "5", "--sweep", "kv-offloading-size=0,10"],
        ["--draft-time", "1", "--sweep", "spec-acceptance=,0.8"],
        ["--decode-config.max_num_seqs", "9", "--sweep", "prefill=0,1", "--sweep", "decode=0,1"],
    ],
)
def test_a_sweep_may_have_a_point_where_a_flag_is_idle(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    points = results(capsys, *SMALL, *words, "--processes", "1")
    plain = results(capsys, *SMALL)
    assert {name: points[0][name] for name in plain} == plain
    assert points[-1]["completed"] == 40


def test_a_bandwidth_may_be_for_one_role(capsys: pytest.CaptureFixture[str]) -> None:
    apart = ["--prefill", "1", "--decode", "1", "--decode-config.preemption_mode", "swap"]
    assert results(capsys, *SMALL, *apart, "--kv-offloading-bandwidth", "5")["completed"] == 40


def test_a_flag_is_a_whole_or_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prefill-config", "{}", "--prefill-config.machine", "A100"]
    for each in (words, words[2:] + words[:2]):
        with pytest.raises(SystemExit):
            main(["simulate", "--prefill", "1", "--decode", "1", *each])
        error = capsys.readouterr().err
        assert "--prefill-config is set as a whole and in parts (--prefill-config.*)" in error


def test_the_highest_rate_keeps_the_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--goodput", "ttft:200", "tpot:15"]
    found = results(capsys, *words, "--find-load", "--slo-attainment", "0.8")
    assert found["slo_attainment"] >= 0.8
    rate = found["request_rate"]
    words += ["--num-prompts", str(found["completed"])]
    assert results(capsys, *words, "--request-rate", str(rate))["slo_attainment"] >= 0.8
    beyond = results(capsys, *words, "--request-rate", str(rate * 1.03))
    assert beyond["slo_attainment"] < 0.8


@pytest.mark.parametrize(
    "words", [["--find-load", "--goodput", "ttft:9"], ["--sweep", "replicas=1,2"]]
)
def test_a_pipe_is_not_read_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert main(["simulate", "--workload", str(path), *words]) == 2
    assert f"--workload {path} is a pipe, which can be read once" in capsys.readouterr().err


def test_the_picture_does_not_replace_the_workload(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "load.jsonl"
    line = '{"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1]}\n'
    path.write_text(line)
    (tmp_path / "other.jsonl").symlink_to(path)
    words = "--workload", str(path), "--perfetto", str(tmp_path / "other.jsonl")
    assert main(["simulate", *words]) == 2
    assert "this is the file of --workload: name another one" in capsys.readouterr().err
    assert path.read_text() == line


def test_steps_and_requests_are_written_for_perfetto(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    summary = results(capsys, *SMALL, "--replicas", "2", "--perfetto", str(path))
    assert summary == results(capsys, *SMALL, "--replicas", "2"), "recording changes nothing"
    events = json.loads(path.read_bytes())["traceEvents"]
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert names == ["engine 0", "engine 1"]
    for pid, replica in enumerate(summary["replicas"], start=1):
        steps = [e for e in events if e["pid"] == pid and e["name"].startswith("step ")]
        assert len(steps) == replica["num_steps"]
        ends = [e for e in events if e["pid"] == pid and e["name"] == "finished (length)"]
        assert len(ends) == replica["num_requests"]
        last = max(event["ts"] + event["dur"] for event in steps)
        assert last <= summary["duration"] * 1e6 + 1


MISTAKES = {
    "--machine 'H1000' is unknown: choose A100, .*; --list describes them": ["--machine", "H1000"],
    "--model 'gpt-5' is unknown: choose .*, which --list describes, or": ["--model", "gpt-5"],
    "cannot be divided among 3 ranks": ["-tp", "3"],
    "does not fit on H100: .* GB per device are missing": ["--model", "llama-3.1-405b"],
    "exceeds the 131072 positions": ["--max-model-len", "200000"],
    "raise num_kv_blocks": ["--max-model-len", "100000", "--num-kv-blocks", "9"],
    "--num-prompts has no effect with --workload: .*; --limit is": [
        *("--workload", "x", "--num-prompts", "9")
    ],
    "of activations.; raise gpu_memory_utilization 0.1$": ["--gpu-memory-utilization", "0.1"],
    "of activations.; raise tensor_parallel_size": [
        *("--model", "llama-3.1-70b", "--gpu-memory-utilization", "0.1")
    ],
    "x: No such file": ["--workload", "x"],
    "--limit has no effect without --workload: set it, too, or omit --limit": ["--limit", "9"],
    "--speedup has no effect without --workload": ["--speedup", "2"],
    "--cold-start has no effect without --failures": ["--cold-start", "9"],
    "--no-retry-failed has no effect without --failures": ["--no-retry-failed"],
    "--draft-time has no effect without --spec-acceptance": ["--draft-time", "1"],
    "--replicas has no effect with --prefill and --decode, which count the engines: omit it": [
        *("--replicas", "4", "--prefill", "1", "--decode", "1")
    ],
    "--ray has no effect without --sweep": ["--ray"],
    "--processes has no effect without --sweep": ["--processes", "2"],
    "request_rate must be": ["--request-rate", "-1"],
    "replicas must be an integer of at least 1": ["--replicas", "0"],
    "--goodput must be a name of ttft": ["--goodput", "itl:1"],
    "--routing-weights must be a name of prefix, kv, queue": ["--routing-weights", "kv"],
    "--routing-weights needs --routing-policy load, estimated": [
        *("--routing-weights", "kv:1", "--routing-policy", "random")
    ],
    "kv_offloading_bandwidth must be .* at most 1000000": ["--kv-offloading-bandwidth", "inf"],
    "kv_store_bandwidth must be .* at least 1e-06": ["--kv-store-bandwidth", "1e-10"],
    "--kv-store-bandwidth has no effect without --kv-store-size": ["--kv-store-bandwidth", "1"],
    "--kv-store-latency has no effect without --kv-store-size": ["--kv-store-latency", "2"],
    "--kv-transfer-bandwidth has no effect without --prefill": ["--kv-transfer-bandwidth", "1"],
    "--kv-transfer-latency has no effect without --prefill": ["--kv-transfer-latency", "1"],
    "--kv-offloading-bandwidth has no effect without --kv-offloading-size, --kv-store-size": [
        *("--kv-offloading-bandwidth", "9")
    ],
    "kv_store_latency must be .* at most 1000000000": [
        *("--kv-store-size", "9", "--kv-store-latency", "1e300")
    ],
    "kv_store_size must be .* at most": ["--kv-store-size", "1e300"],
    "kv_transfer_latency must be .* at most": [
        *("--prefill", "1", "--decode", "1", "--kv-transfer-latency", "1e300")
    ],
    "kv_offloading_size must be .* at most": ["--kv-offloading-size", "1e300"],
    "swap_space must be .* at most": ["--preemption-mode", "swap", "--swap-space", "1e300"],
    "metrics_interval must be .* at most": ["--metrics-interval", "1e300"],
    "cold_start must be .* at most": ["--failures", "0@1", "--cold-start", "1e300"],
    "draft_time must be .* at most": ["--spec-acceptance", "0.5", "--draft-time", "1e300"],
    "price_per_hour must be .* at most": ["--price-per-hour", "1e300"],
    "burst_size must be .* at most": ["--burst-size", "9" * 30],
    "num_prefixes must be .* at most": ["--num-prefixes", "9" * 30],
    "limit must be .* at most": ["--workload", "x", "--limit", "9" * 30],
    "--prefill-config must be JSON": [
        *("--prefill", "1", "--decode", "1", "--prefill-config", "\udcff")
    ],
    "--decode-config must be JSON": [
        *("--prefill", "1", "--decode", "1", "--decode-config", '{"a":' * 9**5)
    ],
    "--decode-config must be a JSON object": [
        *("--prefill", "1", "--decode", "1", "--decode-config", "\udcff"),
        *("--sweep", "decode-config.max_num_seqs=1,2"),
    ],
    "--spec-acceptance cannot be combined with --batching-policy static: choose": [
        *("--spec-acceptance", "0.5", "--batching-policy", "static")
    ],
    "--slo-attainment has no effect without --find-load": ["--slo-attainment", "0.5"],
    "--find-load needs --goodput": ["--find-load"],
    "--replicas has no effect with --list: omit one of them": ["--list", "--replicas", "4"],
    "--no-enable-prefix-caching has no effect with --list": [
        *("--list", "--no-enable-prefix-caching")
    ],
    "--num-prompts has no effect with --list": ["--list", "--num-prompts", "9"],
    "--failures has no effect with --list": ["--list", "--failures", "0@1"],
    "--sweep has no effect with --list": ["--list", "--sweep", "replicas=1,2"],
    "--find-load has no effect with --list": ["--list", "--find-load"],
    "--replay has no effect with --list": ["--list", "--replay", "x"],
    "--perfetto has no effect with --list": ["--list", "--perfetto", "x"],
    "--machine has no effect with --replay": ["--replay", "x", "--machine", "H100"],
    "--replicas has no effect with --replay": ["--replay", "x", "--replicas", "2"],
    "--sweep has no effect with --replay": ["--replay", "x", "--sweep", "replicas=1,2"],
    "no setting 'replica'; did you mean replicas": ["--sweep", "replica=1,2"],
    "no setting 'machine.tp'": ["--sweep", "machine.tp=1"],
    r"no setting 'eplb-config.window_size\+'": ["--sweep", "eplb-config.window_size+=1"],
    "--prefill-config: no setting 'tp'": [
        *("--prefill", "1", "--decode", "1", "--sweep", "prefill-config.tp=1")
    ],
    "--eplb-config must be a JSON object, got '2'": [
        *("--eplb-config", "2", "--sweep", "eplb-config.window_size=8")
    ],
    "--decode-config must have a JSON object as eplb_config, got '{}'": [
        *("--prefill", "1", "--decode", "1", "--decode-config", '{"eplb_config": "{}"}'),
        *("--sweep", "decode-config.eplb_config.window_size=8,9"),
    ],
    "--sweep must be a list such as replicas=1,2,4, got 'replicas'": ["--sweep", "replicas"],
    "--perfetto shows one simulation": ["--perfetto", "x", "--sweep", "replicas=1"],
    "--perfetto .: Is a directory: name a file": ["--perfetto", "."],
    "--perfetto no/x: No such file or directory": ["--perfetto", "no/x"],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *MISTAKES[message]]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(UsageError, match=message):
        raise UsageError(error)


def test_quantization_is_in_the_config_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--quantization", "fp8"])
    hint = "'fp8' has no effect here: give --model the path of a config.json with a quantization_"
    assert hint in capsys.readouterr().err


def test_a_replay_compares_every_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"nanovllm_trace": 2, "settings": {}}\n')
    assert main(["simulate", "--replay", str(path)]) == 2
    assert main(["simulate", "--replay", str(tmp_path / "missing")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "record it again" in errors[0]
    assert "No such file" in errors[1]


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(UsageError, match="no setting 'replica'; did you mean replicas"):
        simulate({"replica": 3})


@pytest.mark.started
def test_the_function_runs_where_a_browser_runs_python() -> None:
    """Pyodide has msgspec, but no processes."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from nanovllm.simulate.simulation import simulate\n"
        f"for more in {EVERY_PART!r}:\n"
        "    simulate({'num_prompts': 5, 'random_output_len': 5, **more})\n"
        "found = {name.partition('.')[0] for name in sys.modules.keys() - before}\n"
        "print(*sorted(found - set(sys.stdlib_module_names)))\n"
        "assert found.isdisjoint({'multiprocessing', 'fcntl', 'termios', 'resource'})\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    found = {name for name in finished.stdout.split() if not name.startswith("_")}
    # msgspec uses typing_extensions where it is installed.
    assert found - {"typing_extensions"} == {"msgspec", "nanovllm"}


def test_the_help_has_each_setting_once() -> None:
    grouped = Counter(itertools.chain(*FLEET_GROUPS.values()))
    assert grouped == Counter(field.name for field in flags_of(FleetConfig))


@pytest.mark.started
@pytest.mark.parametrize(
    "words",
    [["--help"], [*SMALL, "--json"], [*SMALL, "--replicas", "2"], ["--list"], ["--list", "--json"]],
)
def test_the_command_needs_msgspec_and_for_tables_rich(words: list[str]) -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from nanovllm.cli.main import main\n"
        "try:\n"
        f"    main({['simulate', *words]!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "found = {name.partition('.')[0] for name in sys.modules.keys() - before}\n"
        "print(*found - set(sys.stdlib_module_names), file=sys.stderr)\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout
    found = {name for name in finished.stderr.split() if not name.startswith("_")}
    tables = {"rich"} if words in ([*SMALL, "--replicas", "2"], ["--list"]) else set()
    assert found - {"typing_extensions"} == {"msgspec", "nanovllm"} | tables


def test_the_readme_shows_what_its_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    text = (PACKAGE / "simulate" / "README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```console\n\$ nanovllm simulate (.*)\n([^`]*?)\n```", text)
    assert len(examples) == 2
    for words, output in examples:
        processes = ["--processes", "1"] if "--sweep" in words else []
        assert run(capsys, *words.split(), *processes).rstrip() == output
