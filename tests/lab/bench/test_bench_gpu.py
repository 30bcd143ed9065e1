"""`nanovllm bench gpu`: its arithmetic, what becomes of parts that fail, and the whole of it as a dry run."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from nanovllm import ops
from nanovllm.attention.cpu import CpuBackend
from nanovllm.attention.torch import TorchBackend
from nanovllm.cli.main import main
from nanovllm.distributed.cost_model import Link
from nanovllm.lab.bench.gpu import attention, checks, command, environment, nccl, parts, report, tokens, trace
from nanovllm.lab.bench.gpu.cases import attention_case, oracle, relative_error
from nanovllm.lab.bench.gpu.engine import run_requests, start_engine
from nanovllm.lab.bench.gpu.parts import Outcome, Part, Runner
from nanovllm.lab.bench.gpu.results import Results
from nanovllm.lab.bench.gpu.setting import Setting, Skip
from nanovllm.lab.bench.gpu.shapes import SHAPES, write_checkpoint
from nanovllm.lab.bench.gpu.trace import StepSplit, kind_of, split_steps
from nanovllm.lab.bench.roofline import ModelCost
from nanovllm.lab.bench.workloads import BenchRequest
from nanovllm.models.config import ModelConfig
from tests.oracle import reference_tokens

ROOT = pathlib.Path(__file__).parents[3]
SEQUENCES = [(1, 40), (5, 0), (7, 30), (1, 0), (0, 0), (0, 4), (33, 17)]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton for this system"
)


# ---------------------------------------------------------------- the whole


@needs_triton
@pytest.mark.slow
def test_the_dry_run_goes_through_every_part(tmp_path: pathlib.Path) -> None:
    files = [tmp_path / "gpu.json", tmp_path / "gpu.md"]
    figures = sorted((ROOT / "figures").iterdir())
    assert main(["bench", "gpu", "--dry-run", "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    assert sorted((ROOT / "figures").iterdir()) == figures
    found = json.loads(files[0].read_text())
    assert found["dry_run"] is True and found["failed"] is False
    status = {part["title"]: part["status"] for part in found["parts"]}
    assert status.pop("compute-sanitizer") == "skipped"
    assert set(status.values()) == {"done"} and len(status) == len(parts.plan(dry_run=True)) - 1
    assert {limit["name"] for limit in found["limits"]} == {"bytes_per_second", "flops_per_second"}
    passed = [check["name"] for check in found["checks"] if check["passed"] is True]
    assert len(passed) >= 18 and sum("experts that move" in name for name in passed) == 2
    assert all("seconds" in row for row in found["decode"] + found["latent"])
    implementations = {row["implementation"] for row in found["prefill"] if "seconds" in row}
    assert implementations == {"nanovllm", "SDPA flash", "flex_attention"}
    engines = {row["engine"]: row for row in found["end_to_end"]}
    assert len(engines) == 4 and all("seconds" in row for row in found["end_to_end"])
    assert [row["operation"] for row in found["collectives"]] == ["all-reduce"] * 3 + ["all-gather"] * 3
    splits = {(row["engine"], row["workload"]): row["running"] for row in found["step_split"]}
    modes = ("nanovllm, graphs", "nanovllm, eager")
    assert splits == {(mode, name): n for mode in modes for name, n in (("W1", 1), ("256 requests", 3))}
    assert len(found["targets"]) == 7 and all(target["reached"] is None for target in found["targets"])
    text = files[1].read_text()
    assert report.DRY_RUN in text and "| dry run |" in text


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["bench", "gpu"]) == 2
    assert "no NVIDIA GPU" in (error := capsys.readouterr().err) and "--dry-run" in error
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main(["bench", "gpu"]) == 2
    assert "without CUDA" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpu", "--dry-run", "--engine", "hf"], "no option --engine"),
        (["gpu", "--dry-run", "--batch-size", "3"], "no option --batch-size"),
        (["gpu", "--dry-run", "--repeats", "5"], "no option --repeats"),
        (["gpu", "--dry-run", "--block-size", "32"], "engine's settings"),
        (["gpu", "--dry-run", "--minutes", "0"], "above 0"),
        (["gpu", "--dry-run", "--json", "/no/such/folder/x"], "no such folder"),
        (["latency", "--dry-run"], "belongs to `bench gpu`"),
        (["all", "--minutes", "3"], "belongs to `bench gpu`"),
    ],
)
def test_bad_command_lines(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_gpu_never_writes_a_dry_run_into_figures() -> None:
    for arguments, written in (("", True), ("--dry-run", False), ("--minutes 3 --dry-run", False)):
        text = subprocess.check_output(["make", "-n", "gpu", f"ARGS={arguments}"], cwd=ROOT, text=True)
        assert ("figures/gpu.json" in text) is written and ("figures/gpu.md" in text) is written


def prepare(
    monkeypatch: pytest.MonkeyPatch, missing: set[str], in_venv: bool, error: Exception | None = None
) -> tuple[int, list[tuple[str, ...]]]:
    """What `environment.main` returns and runs on a machine that lacks some packages."""
    ran: list[tuple[str, ...]] = []

    def run(*words: str) -> None:
        ran.append(words)
        if error is not None:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(environment, "_run", run)
        patch.setattr(sys, "prefix", "/elsewhere" if in_venv else sys.base_prefix)
        patch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else object())
        return environment.main(), ran


def test_make_gpu_installs_what_is_missing_and_nothing_else(monkeypatch, capsys) -> None:
    assert prepare(monkeypatch, set(), in_venv=True) == (0, [])
    assert capsys.readouterr().out == f"{sys.executable}\n"

    code, [install] = prepare(monkeypatch, {"msgspec", "tqdm"}, in_venv=True)
    assert code == 0 and install[0] == sys.executable and install[-2:] == ("tqdm", "msgspec")
    assert "torch" not in install

    code, [make, install] = prepare(monkeypatch, {"msgspec"}, in_venv=False)
    python = str(ROOT / ".venv" / "bin" / "python")
    assert code == 0 and make[0] == sys.executable and "--system-site-packages" in make
    assert install[0] == python and install[-1] == "msgspec"
    assert capsys.readouterr().out.splitlines()[-1] == python

    error = subprocess.CalledProcessError(1, "pip")
    assert prepare(monkeypatch, {"msgspec"}, in_venv=True, error=error)[0] == 2
    captured = capsys.readouterr()
    assert "lacks msgspec" in captured.err and "bring wheels of msgspec" in captured.err and not captured.out


# ---------------------------------------------------------------- cases


@pytest.mark.parametrize("backend", [CpuBackend(), TorchBackend()], ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 9},
        {"soft_cap": 5.0},
        {"padding_rows": 3, "dtype": torch.bfloat16},
        {"num_heads": 7, "num_kv_heads": 1, "head_dim": 80, "dtype": torch.float16},
        {"num_blocks": 200, "block_size": 32},
    ],
    ids=str,
)
def test_backends_that_are_right_pass_the_cases(backend: Any, options: dict[str, Any]) -> None:
    case = attention_case(1, SEQUENCES, **options)
    out = backend.forward(
        case.q, case.k, case.v, case.kv_cache, case.metadata, case.scale, case.sliding_window, case.soft_cap
    )
    assert case.error(out) <= case.tolerance and case.cache_error() == 0


def test_the_oracle_is_torchs_attention() -> None:
    q, k, v = (torch.randn(1, heads, length, 16, dtype=torch.float64) for heads, length in ((4, 5), (2, 12), (2, 12)))
    mask = torch.ones(5, 12, dtype=torch.bool).tril(7) & torch.ones(5, 12, dtype=torch.bool).triu(7 - 3)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=0.3)
    packed = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
    assert relative_error(oracle(*packed, 0.3, sliding_window=4), expected[0].transpose(0, 1)) < 1e-12


def test_a_case_catches_reads_and_writes_that_are_wrong() -> None:
    case = attention_case(2, [(1, 20), (3, 4)], padding_rows=1)
    assert len(case.q) == 5 and case.metadata.slot_mapping.tolist()[-1] == -1
    assert math.isnan(case.error(torch.full_like(case.q, math.nan)))
    assert case.error(torch.zeros_like(case.q)) > 0.9
    assert not math.isfinite(case.cache_error())  # nothing is written yet
    CpuBackend().forward(case.q, case.k, case.v, case.kv_cache, case.metadata, case.scale)
    assert case.cache_error() == 0
    unused = set(range(len(case.kv_cache))) - set(case.metadata.block_tables[:, :2].flatten().tolist())
    case.kv_cache[unused.pop(), 1, 0, 0, 0] = 1.0  # where nobody has anything to write
    assert case.cache_error() == math.inf
    # What a table says beyond its sequence's end is a block of NaN.
    assert case.kv_cache[case.metadata.block_tables[0, 2].long()].isnan().all()


def test_the_checks_cover_what_the_engine_may_choose() -> None:
    cases = checks.all_cases()
    for name, wanted in (("head_dim", checks.HEAD_DIMS), ("block_size", checks.BLOCK_SIZES)):
        assert set(wanted) <= {case.get(name) for case in cases.values()}
    assert {case["num_heads"] // case["num_kv_heads"] for case in cases.values()} >= {1, 3, 4, 7, 8}
    for dtype in checks.DTYPES.values():
        assert {c["head_dim"] for c in cases.values() if c["dtype"] == dtype} >= set(checks.HEAD_DIMS)
    (large,) = (case for case in cases.values() if "num_blocks" in case)
    assert large["num_blocks"] * 2 * large["num_kv_heads"] * 16 * large["head_dim"] > 2**31
    assert max(sum(sequence) for case in cases.values() for sequence in case["sequences"]) == 2**17


def test_an_error_that_is_no_number_has_not_passed() -> None:
    assert checks.verdict(1e-3, 1e-2)["passed"] is True and checks.verdict(1e-1, 1e-2)["passed"] is False
    for error in (math.nan, math.inf):
        assert checks.verdict(error, 1e-2) == {"error": None, "tolerance": 1e-2, "passed": False}


@needs_triton
def test_an_engine_that_does_without_the_checked_operators_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.ops import triton

    for chosen in (triton, ops.reference):
        monkeypatch.setattr(ops, "_kernels", {torch.device("cuda"): chosen}.get)
        assert checks.dispatch(triton, torch.device("cuda"))["passed"] is (chosen is triton)


@pytest.mark.parametrize("dry_run", [True, False])
def test_an_engine_that_does_not_start_costs_its_own_row_only(
    dry_run: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: str, **options: Any) -> None:
        raise RuntimeError("no engine today")

    monkeypatch.setattr(tokens, "start_engine", refuse)
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path))  # without the course model
    reference, launching, course = tokens.tokens(Setting(dry_run, seconds=60))
    assert reference["passed"] is False and "no engine today" in reference["reason"]
    assert launching["passed"] is (None if dry_run else False) and course["passed"] is None


@pytest.mark.parametrize(
    ("script", "passed"),
    [
        ("""echo '{"passed": true}'""", True),
        ("""echo '{"passed": true}'; echo 'Invalid __global__ read'; exit 99""", False),
        ("""echo '{"passed": true} {"passed": false}'""", False),
        ("true", False),  # which has checked nothing
        ("echo 'Device not supported'; exit 1", None),
    ],
)
def test_what_the_sanitizer_says(
    script: str, passed: bool | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = checks.sanitizer(Setting(dry_run=False, seconds=60))
    if passed is None:
        with pytest.raises(Skip, match="does not support"):
            next(found)
    else:
        assert next(found)["passed"] is passed


# ---------------------------------------------------------------- two GPUs

TOPOLOGY = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \t{}\tSYS\t0-63\t0
GPU1\t{}\t X \tSYS\t0-63\t0
"""


@pytest.mark.parametrize(
    ("way", "capability", "generation", "name"),
    [
        ("NV18", 9, "5", "NVLink 4"),
        ("NV18", 10, "5", "NVLink 5"),
        ("NV12", 8, "4", None),  # the cost model knows no NVLink 3
        ("PHB", 9, "5", "PCIe 5.0 x16"),
        ("SYS", 8, "4", "PCIe 4.0 x16"),
        ("SYS", 7, "3", None),
    ],
)
def test_the_link_is_read_from_the_topology(way: str, capability: int, generation: str, name: str) -> None:
    link = nccl.link_of(TOPOLOGY.format(way, way), capability, generation)
    assert (link and link.name) == name
    assert nccl.link_of("", capability, generation) is None


def test_collectives_are_compared_with_the_cost_model() -> None:
    link = Link("made up", 2e-6, 400e9)
    times = {
        "all-reduce": [2 * (2e-6 + size / 2 / 400e9) for size in nccl.SIZES],
        "all-gather": [2 * (2e-6 + size / 400e9) for size in nccl.SIZES],  # twice what it should take
    }
    rows = list(nccl.collective_rows(times, nccl.SIZES, link))
    for row in rows:
        slower = 2 if row["operation"] == "all-gather" else 1
        assert row["predicted_seconds"] * slower == pytest.approx(row["seconds"])
        assert row["fitted_seconds"] == pytest.approx(row["seconds"], rel=1e-6)
        assert row["bus_bytes"] == row["num_bytes"]  # with two ranks, both have to send as much as they have
    assert "predicted_seconds" not in next(nccl.collective_rows(times, nccl.SIZES, None))
    text = report.markdown(results(rows))
    assert "| all-reduce | 2048 |" in text and "| all-gather | 134217728 |" in text


def test_one_gpu_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Skip, match="needs 2 GPUs, and this machine has 1"):
        next(nccl.nccl(Setting(dry_run=False, seconds=60)))


@pytest.mark.parametrize("model", ["Llama", "DeepSeek-V3"])
def test_the_checkpoints_that_are_divided_are_models(model: str, tmp_path: pathlib.Path) -> None:
    """Those whose experts are named as in the hub's files, so that transformers can read them."""
    folder = str(write_checkpoint(tmp_path, nccl.DIVIDED[model][0]))
    requests = [BenchRequest(list(range(3, 40)), 12), BenchRequest([9, 8, 7], 12)]
    core = start_engine(folder, dtype="float32", device="cpu", num_kv_blocks=64)
    found, _ = run_requests(core, requests)
    assert found == [reference_tokens(folder, request.prompt_token_ids, 12) for request in requests]
    assert len({token for tokens in found for token in tokens}) > 12, "hardly another token ever comes"


def test_what_is_wrong_with_a_divided_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    divisions: dict[str, dict[str, Any]] = {
        "alike": {"seed": 1},
        "unlike": {"tensor_parallel_size": 2},
        "moving": {"enable_eplb": True},
        "still": {"enable_eplb": True, "tensor_parallel_size": 3},
        "broken": {"data_parallel_size": 2},
    }

    class Engine:
        def __init__(self, folder: str, **options: Any) -> None:
            if options == divisions["broken"]:
                raise RuntimeError("no second GPU")
            if "enable_eplb" in options:
                moved = 12 if options == divisions["moving"] else 0
                for _ in range(2):  # as ranks do: they know nothing of this process's sys.stderr
                    os.write(2, f"balancedness of experts: 0.50, now 0.90; {moved} bytes moved\n".encode())
            self.tokens = [[1, 2], [3, 5 if options == divisions["unlike"] else 4]]

        def close(self) -> None:
            pass

    monkeypatch.setattr(nccl, "start_engine", Engine)
    monkeypatch.setattr(nccl, "run_requests", lambda core, requests: (core.tokens, None))
    rows = {row["name"]: row for row in nccl.compare("M", "", [], {}, divisions)}
    assert [row["passed"] for row in rows.values()] == [True, False, True, False, False]
    reasons = [row.get("reason", "") for row in rows.values()]
    assert "requests [1] differ" in reasons[1] and "not moved" in reasons[3] and "no second GPU" in reasons[4]

    def refuse(folder: str, **options: Any) -> None:
        raise RuntimeError("no engine today")

    monkeypatch.setattr(nccl, "start_engine", refuse)
    (row,) = nccl.compare("M", "", [], {}, divisions)
    assert row["passed"] is False and row["name"].endswith("one rank")


# ---------------------------------------------------------------- arithmetic


def test_bytes_and_flops_of_attention() -> None:
    # 3 sequences of 10 tokens: keys and values of 8 heads, queries and output of 32, 128 numbers of 2 bytes each.
    assert attention.decode_bytes(3, 10) == 3 * (2 * 10 * 8 + 2 * 32) * 128 * 2
    pairs = sum(1 for query in range(5) for key in range(12) if key <= 7 + query)
    assert attention.prefill_flops(5, 7) == pairs * 32 * 128 * 4
    assert attention.prefill_flops(8192, 0) / 8192**2 == pytest.approx(2 * 32 * 128, rel=1e-3)


@pytest.mark.parametrize(("shape", "parameters"), [("Llama-3.2-1B", 1.236e9), ("Llama-3.1-8B", 7.505e9)])
def test_shapes_have_the_size_that_they_are_named_for(shape: str, parameters: float) -> None:
    # The 8B model has 8.030e9, of which 0.525e9 are an input embedding that no step reads.
    cost = ModelCost.of(ModelConfig.from_dict(SHAPES[shape]), bytes_per_number=1)
    assert cost.weight_bytes == pytest.approx(parameters, rel=1e-3)


def kernel(name: str, begin: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration, "pid": 0, "tid": 7}


def test_a_trace_is_split_by_kind_and_by_gap() -> None:
    events = [
        {"ph": "M", "name": "process_name", "args": {}},
        kernel("cudaGraphLaunch", 90, 500, "cuda_runtime"),
        kernel("nvjet_tst_64x8_64x16_bz_TNT", 100, 30),
        kernel("decode_attention_kernel", 131, 20),  # a gap of 1: between kernels
        kernel("combine_kernel", 151, 4),
        kernel("add_rms_norm_kernel", 155, 5),
        kernel("at::native::reduce_kernel<512, 1, ReduceOp<float, ArgMaxOps>>", 160, 10),
        kernel("Memcpy DtoH", 170, 1, "gpu_memcpy"),
        kernel("nvjet_tst_64x8_64x16_bz_TNT", 191, 9),  # a gap of 20: the host
        kernel("add_rms_norm_kernel", 195, 5),  # beside the product, on another stream: counts once
    ]
    random.Random(0).shuffle(events)
    split = split_steps(events)
    assert split.seconds == pytest.approx(100e-6)
    assert split.shares == pytest.approx(
        {"attention": 0.24, "sampling": 0.10, "matrix products": 0.39, trace.OTHER: 0.06}
    )
    assert split.launch_gaps == pytest.approx(0.01) and split.host_gaps == pytest.approx(0.20)
    assert sum(split.shares.values()) + split.launch_gaps + split.host_gaps == pytest.approx(1)
    assert split.busiest[0] == ("nvjet_tst_64x8_64x16_bz_TNT", pytest.approx(0.39))
    with pytest.raises(ValueError, match="no kernel"):
        split_steps(events[:0])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mixed_attention_kernel", "attention"),
        ("write_kv_kernel", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "matrix products"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "matrix products"),
        ("at::native::vectorized_elementwise_kernel<4, silu>", trace.OTHER),
        ("at::native::(anonymous namespace)::cunn_SoftMaxForward", "sampling"),
    ],
)
def test_kernels_are_known_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


# ---------------------------------------------------------------- parts


class OtherRunner(Runner):
    """Runs the words of a part as a program."""

    def _command(self, part: Part, seconds: float) -> list[str]:
        return [sys.executable, "-c", *part.words]


def run_parts(*sources: str, seconds: float = 60.0, minutes: float = 1.0) -> list[Outcome]:
    said: list[str] = []
    runner = OtherRunner(False, time.perf_counter() + 60 * minutes, said.append)
    outcomes = runner.run([Part(f"part {i}", (source,), seconds) for i, source in enumerate(sources)])
    assert len(said) == len(sources)
    return outcomes


def test_a_part_that_fails_takes_no_other_along_and_keeps_its_rows() -> None:
    row = """print('{"table": "checks", "name": "a", "passed": true}', flush=True)"""
    crashed, raised, fine = run_parts(
        f"{row}; import os; os.kill(os.getpid(), 11)", f"{row}; raise ValueError('no such GPU')", row
    )
    assert (crashed.status, crashed.reason) == ("failed", "killed by SIGSEGV")
    assert (raised.status, raised.reason) == ("failed", "exit code 1: ValueError: no such GPU")
    assert (fine.status, fine.reason) == ("done", "")
    assert all(len(outcome.rows) == 1 for outcome in (crashed, raised, fine))
    assert Results([raised], {}, False).failed and not Results([fine], {}, False).failed


def test_a_part_ends_with_its_time_and_so_does_what_it_started(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    source = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); "
        """print('{"table": "limits", "name": "x", "value": 1}', flush=True); print('{"half a', end='', flush=True); """
        "child.wait()"
    )
    monkeypatch.setattr(parts, "_LEAST_SECONDS", 0.0)
    (outcome,) = run_parts(source, seconds=3.0)
    assert (outcome.status, outcome.reason) == ("failed", "stopped after 3 s")
    assert outcome.rows == [{"table": "limits", "name": "x", "value": 1}]
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until init has collected it
            os.kill(int(pid_file.read_text()), 0)
            time.sleep(0.05)


def test_no_part_is_started_without_time_for_it() -> None:
    (outcome,) = run_parts("raise SystemExit", minutes=0.05)
    assert (outcome.status, outcome.seconds) == ("failed", 0.0) and "no time" in outcome.reason


def test_parts_fit_into_the_plan() -> None:
    words = [part.words for part in parts.plan(dry_run=False)]
    assert len(set(words)) == len(words)
    shares = [word[1] for word in words if word[0] == "kernels"]
    assert shares == [f"{i}/{len(shares)}" for i in range(len(shares))]
    # Behind the ceilings, what is proven comes first, and only that runs beside something else.
    timed = [part.timed for part in parts.plan(dry_run=False)]
    assert timed[0] and timed[1:] == sorted(timed[1:]) and not timed[1]
    assert {shape for word in words for shape in word if shape.startswith("Llama")} == set(SHAPES)


# ---------------------------------------------------------------- results


def end_to_end(shape: str, workload: str, engine: str, seconds: float, **more: Any) -> dict[str, Any]:
    row = {"table": "end_to_end", "shape": shape, "workload": workload, "engine": engine, "seconds": seconds}
    return row | {"tokens": 100, "num_bytes": 10**9, "flops": 10**9, "runs": [seconds]} | more


def prefill(implementation: str, query_len: int, seconds: float) -> dict[str, Any]:
    row = {"table": "prefill", "query_len": query_len, "context": 0, "flops": 7 * 10**9}
    return row | {"implementation": implementation, "seconds": seconds}


def latent(heads: int, batch: int, num_bytes: int) -> dict[str, Any]:
    row = {"table": "latent", "heads": heads, "batch": batch, "context": 8192, "flops": 10**9}
    return row | {"seconds": 1e-3, "num_bytes": num_bytes}


def step_split(workload: str, running: int, split: StepSplit) -> dict[str, Any]:
    row = {"table": "step_split", "shape": "Llama-3.1-8B", "engine": "nanovllm, graphs", "steps": 2}
    return row | {"workload": workload, "running": running} | vars(split)


ROWS = [
    {"table": "limits", "name": "bytes_per_second", "value": 1e12},
    {"table": "limits", "name": "flops_per_second", "value": 1e13},
    {"table": "decode", "batch": 1, "context": 8192, "seconds": 1.0, "num_bytes": 10},
    {"table": "decode", "batch": 64, "context": 8192, "seconds": 1e-3, "num_bytes": 9 * 10**8},
    {"table": "decode", "batch": 256, "context": 8192, "seconds": 1e-3, "num_bytes": 86 * 10**7},
    {"table": "decode", "batch": 256, "context": 32768, "reason": "does not fit into the memory"},
    latent(16, 64, 82 * 10**7),
    latent(16, 256, 79 * 10**7),
    latent(128, 256, 10**7),
    prefill("nanovllm", 4096, 1e-3),
    prefill("nanovllm", 8192, 1e-3),
    prefill("SDPA flash", 4096, 0.8e-3),
    prefill("SDPA flash", 8192, 2e-3),
    end_to_end("Llama-3.1-8B", "W1", "nanovllm, graphs", 2.0, weight_bytes=9 * 10**9, step_seconds=0.01),
    end_to_end("Llama-3.1-8B", "W1", "transformers generate", 5.0),
    end_to_end("Llama-3.2-1B", "256 requests", "nanovllm, graphs", 2e-3),
    step_split("W1", 1, StepSplit(0.02, {"attention": 0.9}, 0.06, 0.04, [])),
    step_split("256 requests", 256, StepSplit(0.2, {"attention": 0.8}, 0.18, 0.02, [])),
    {"table": "checks", "name": "attention", "error": 1e-3, "tolerance": 1e-2, "passed": True},
]


def results(rows: list[dict[str, Any]], dry_run: bool = False) -> Results:
    outcome = Outcome("everything", "done", 1.0, rows=[dict(row) for row in rows])
    return Results([outcome], {"command": "nanovllm bench gpu", "date": "today", "seconds": 60.0}, dry_run)


def test_targets_take_the_worst_of_their_values() -> None:
    figures = [(target.measured, target.reached) for target in results(ROWS).targets()]
    assert figures == [
        (pytest.approx(86), True),  # of 90 and 86; a batch of one and what does not fit say nothing
        (pytest.approx(79), False),  # of 82 and 79; 128 heads say nothing
        (pytest.approx(70), True),
        (pytest.approx(1.25), False),  # slower at 4k, faster at 8k
        (pytest.approx(90), True),
        (pytest.approx(50), False),
        (pytest.approx(4), True),  # of 4 for one request and 2 for many
    ]
    assert all(t.measured is not None and t.reached is None for t in results(ROWS, dry_run=True).targets())
    assert all((t.measured, t.reached) == (None, None) for t in results([]).targets())


def test_ratios_are_between_equal_work_only() -> None:
    found = results(ROWS)
    ratios = {(r["workload"], r["engine"]): found.end_to_end_ratio(r) for r in found.rows("end_to_end")}
    assert ratios["W1", "transformers generate"] == pytest.approx(2.5)
    lonely = end_to_end("Llama-3.2-1B", "W1", "transformers generate", 1.0)
    assert results([*ROWS, lonely]).end_to_end_ratio(lonely) is None


@pytest.mark.parametrize("rows", [ROWS, ROWS[2:], []], ids=["all", "no ceilings", "nothing"])
def test_whatever_was_found_can_be_reported(rows: list[dict[str, Any]]) -> None:
    text = report.markdown(results(rows))
    data = json.loads(report.as_json(results(rows)))
    assert len(data["targets"]) == 7 and text.count("\n| ") >= 10
    for table in report.tables(results(rows)):
        assert {len(row) for row in table.rows} == {len(table.columns)}
    assert report.DRY_RUN in report.markdown(results(rows, dry_run=True))


def test_a_wrong_result_is_a_failure_and_a_skipped_one_is_not() -> None:
    row = {"table": "checks", "name": "attention", "error": None, "tolerance": 1e-2, "passed": False}
    assert results([row]).failed and not results([row | {"passed": None}]).failed
    assert "| NO |" in report.markdown(results([row]))


def test_why_no_gpu_names_nothing_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert command.why_no_gpu() is None
