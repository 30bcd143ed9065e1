"""`nanovllm bench gpu`: its arithmetic, what becomes of parts that fail, and the whole of it as a
dry run."""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.util
import json
import math
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from nanovllm.attention.torch import CpuBackend, TorchBackend
from nanovllm.cli.main import main
from nanovllm.lab.bench import parts
from nanovllm.lab.bench.gpu import attention, end_to_end, environment, nccl, plan, proofs, trace
from nanovllm.lab.bench.gpu.trace import kind_of, split_steps
from nanovllm.lab.bench.local import SHAPES, TINY, run_requests, start_engine, write_checkpoint
from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.parts import Part, Runner, Setting, Skip
from nanovllm.lab.bench.report import DRY_RUN, GOALS, PARTS, Report, Row, goal
from nanovllm.lab.bench.roofline import ModelCost
from nanovllm.lab.bench.workloads import BenchRequest, Workload
from nanovllm.lab.cases import attention_case, oracle, relative_error
from nanovllm.models.config import ModelConfig
from tests.gpu import test_divided, test_kernels, test_sanitizer
from tests.gpu.setting import TINY_DEEPSEEK
from tests.lab.bench.toy_parts import ROW, crash, hang, proven, refuse, skip, succeed
from tests.oracle import reference_tokens
from tests.processes import CONTEXT
from tests.server_process import wait_until
from tests.stand_ins import set_constants, set_gpu, set_installed

ROOT = pathlib.Path(__file__).parents[3]
SEQUENCES = [(1, 40), (5, 0), (7, 30), (1, 0), (0, 0), (0, 4), (33, 17)]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton for this system"
)


# ---------------------------------------------------------------- the whole


@needs_triton
@pytest.mark.nightly
def test_the_dry_run_goes_through_every_part(tmp_path: pathlib.Path, forked_parts: None) -> None:
    files = [tmp_path / "gpu.json", tmp_path / "gpu.md"]
    figures = sorted((ROOT / "figures").iterdir())
    assert (
        main(["bench", "gpu", "--dry-run", "--json", str(files[0]), "--markdown", str(files[1])])
        == 0
    )
    assert sorted((ROOT / "figures").iterdir()) == figures
    found = json.loads(files[0].read_text())
    assert found["dry_run"] is True and found["failed"] is False
    tables = found["tables"]
    assert [part["status"] for part in tables[PARTS]] == ["done"] * len(plan.plan(dry_run=True))
    assert len(tables["Measured ceilings"]) == 2
    passed = [row["test"] for row in tables[proofs.TITLE] if row["passed"]]
    assert len(passed) >= 9 and sum("experts that move" in name for name in passed) == 1
    assert all(row["% of copy"] > 0 for row in tables[plan.DECODE] + tables[plan.LATENT])
    assert len(tables[plan.SIMPLE]) == 1, "the dry run has one batch"
    implementations = {row["implementation"] for row in tables[plan.PREFILL] if "ms" in row}
    assert implementations == {"nanovllm", "SDPA flash", "flex_attention"}
    assert len({row["engine"] for row in tables[plan.MODELS]}) == 3 and all(
        "s" in row for row in tables[plan.MODELS]
    )
    (collectives,) = (rows for title, rows in tables.items() if title.startswith("Collectives"))
    assert [row["operation"] for row in collectives] == ["all-reduce"] * 3 + ["all-gather"] * 3
    splits = {(row["engine"], row["workload"]): row["running"] for row in tables[plan.STEP]}
    modes = ("nanovllm, graphs", "nanovllm, eager")
    assert splits == {
        (mode, name): n for mode in modes for name, n in (("W1", 1), ("256 requests", 3))
    }
    assert len(tables[GOALS]) == 7 and all(goal["reached"] is None for goal in tables[GOALS])
    assert DRY_RUN in files[1].read_text()


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_gpu(monkeypatch, is_available=False)
    for version, words in (("13.0", "for CUDA 13.0"), (None, "without CUDA")):
        set_gpu(monkeypatch, version=version)
        assert main(["bench", "gpu"]) == 2
        error = capsys.readouterr().err
        assert words in error and "no NVIDIA GPU" in error and "--dry-run" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpu", "--dry-run", "--engine", "hf"], "unrecognized arguments: --engine hf"),
        (["gpu", "--dry-run", "--repeats", "5"], "unrecognized arguments: --repeats 5"),
        (["gpu", "--dry-run", "--block-size", "32"], "unrecognized arguments: --block-size 32"),
        (["gpu", "--dry-run", "--minutes", "0"], "above 0"),
        (["gpu", "--dry-run", "--json", "/no/such/folder/x"], "there is no folder /no/such/folder"),
        (["latency", "--dry-run"], "unrecognized arguments: --dry-run"),
        (["all", "--minutes", "3"], "unrecognized arguments: --minutes 3"),
    ],
)
def test_bad_command_lines(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *words])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_gpu_never_writes_a_dry_run_into_figures() -> None:
    for arguments, written in (("", True), ("--dry-run", False), ("--minutes 3 --dry-run", False)):
        text = subprocess.check_output(
            ["make", "-n", "gpu", f"ARGS={arguments}"], cwd=ROOT, text=True
        )
        assert ("figures/gpu.json" in text) is written and ("figures/gpu.md" in text) is written
        assert ("figures/ladder_gpu.md" in text) is written


def prepare(
    monkeypatch: pytest.MonkeyPatch,
    missing: set[str],
    in_venv: bool,
    error: Exception | None = None,
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
        set_installed(patch, **{name: name not in missing for name in environment.NEEDS})
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
    assert (
        "lacks msgspec" in captured.err
        and "bring wheels of msgspec" in captured.err
        and not captured.out
    )


# Imports what parts import, and runs an engine, where the project's modules may import nothing else
# than what is given.
_WITH_NOTHING_ELSE = """
import builtins, importlib, json, pathlib, sys, tempfile

allowed = {*json.loads(sys.argv[1]), *sys.stdlib_module_names, "nanovllm", "tests"}
unchecked = builtins.__import__

def import_if_allowed(name, globals=None, locals=None, fromlist=(), level=0):
    importer, wanted = (globals or {}).get("__name__", ""), name.partition(".")[0]
    if level == 0 and importer.partition(".")[0] in ("nanovllm", "tests") and wanted not in allowed:
        raise ModuleNotFoundError(f"{importer} wants {wanted}, which is not among NEEDS")
    return unchecked(name, globals, locals, fromlist, level)

builtins.__import__ = import_if_allowed
from nanovllm.lab.bench.gpu import plan
from nanovllm.lab.bench.local import TINY, run_requests, start_engine, write_checkpoint
from nanovllm.lab.bench.workloads import BenchRequest
for part in plan.plan(dry_run=False):
    importlib.import_module(part.function.partition(":")[0])
for proofs in pathlib.Path(sys.argv[2]).glob("*.py"):
    importlib.import_module("tests.gpu." + proofs.stem)
import nanovllm.cli.main, nanovllm.engine.group
with tempfile.TemporaryDirectory() as folder:
    model = str(write_checkpoint(pathlib.Path(folder), TINY))
    core = start_engine(model, device="cpu", num_kv_blocks=16)
    print(len(run_requests(core, [BenchRequest([1, 2, 3], 4)])[0][0]))
"""


def run_with_nothing_but(needs: list[str]) -> subprocess.CompletedProcess[str]:
    environment_of = os.environ | {
        "PYTHONPATH": str(ROOT),
        "NANOVLLM_NATIVE": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-c",
        _WITH_NOTHING_ELSE,
        json.dumps(needs),
        str(ROOT / "tests" / "gpu"),
    ]
    return subprocess.run(command, env=environment_of, cwd=ROOT, capture_output=True, text=True)


@needs_triton
def test_the_packages_that_make_gpu_installs_are_enough() -> None:
    done = run_with_nothing_but([*environment.NEEDS])
    assert done.returncode == 0 and done.stdout == "4\n", done.stderr
    refused = run_with_nothing_but([name for name in environment.NEEDS if name != "msgspec"])
    assert "wants msgspec, which is not among NEEDS" in refused.stderr


# ---------------------------------------------------------------- cases


@pytest.mark.parametrize(
    "backend", [CpuBackend(), TorchBackend()], ids=lambda backend: backend.name
)
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
        case.q,
        case.k,
        case.v,
        case.kv_cache,
        case.metadata,
        case.scale,
        case.sliding_window,
        case.soft_cap,
    )
    assert case.error(out) <= case.tolerance and case.cache_error() == 0


def test_the_oracle_is_torchs_attention() -> None:
    q, k, v = (
        torch.randn(1, heads, length, 16, dtype=torch.float64)
        for heads, length in ((4, 5), (2, 12), (2, 12))
    )
    mask = torch.ones(5, 12, dtype=torch.bool).tril(7) & torch.ones(5, 12, dtype=torch.bool).triu(
        7 - 3
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=True, scale=0.3
    )
    packed = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
    assert (
        relative_error(oracle(*packed, 0.3, sliding_window=4), expected[0].transpose(0, 1)) < 1e-12
    )


def test_a_case_catches_reads_and_writes_that_are_wrong() -> None:
    case = attention_case(2, [(1, 20), (3, 4)], padding_rows=1)
    assert len(case.q) == 5 and case.metadata.slot_mapping.tolist()[-1] == -1
    assert math.isnan(case.error(torch.full_like(case.q, math.nan)))
    assert case.error(torch.zeros_like(case.q)) > 0.9
    assert not math.isfinite(case.cache_error())  # nothing is written yet
    CpuBackend().forward(case.q, case.k, case.v, case.kv_cache, case.metadata, case.scale)
    assert case.cache_error() == 0
    unused = set(range(len(case.kv_cache))) - set(
        case.metadata.block_tables[:, :2].flatten().tolist()
    )
    case.kv_cache[unused.pop(), 1, 0, 0, 0] = 1.0  # where nobody has anything to write
    assert case.cache_error() == math.inf
    # What a table says beyond its sequence's end is a block of NaN.
    assert case.kv_cache[case.metadata.block_tables[0, 2].long()].isnan().all()


def test_the_checks_cover_what_the_engine_may_choose() -> None:
    cases = test_kernels.all_cases()
    for name, wanted in (
        ("head_dim", test_kernels.HEAD_DIMS),
        ("block_size", test_kernels.BLOCK_SIZES),
    ):
        assert set(wanted) <= {case.get(name) for case in cases.values()}
    assert {case["num_heads"] // case["num_kv_heads"] for case in cases.values()} >= {1, 3, 4, 7, 8}
    for dtype in test_kernels.DTYPES.values():
        assert {c["head_dim"] for c in cases.values() if c["dtype"] == dtype} >= set(
            test_kernels.HEAD_DIMS
        )
    (large,) = (case for case in cases.values() if "num_blocks" in case)
    assert large["num_blocks"] * 2 * large["num_kv_heads"] * 16 * large["head_dim"] > 2**31
    assert max(sum(sequence) for case in cases.values() for sequence in case["sequences"]) == 2**17


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("echo '4 passed'", "passed"),
        ("echo '4 passed'; echo 'Invalid __global__ read'; exit 99", "failed"),
        ("echo '3 passed, 1 failed'; exit 1", "failed"),
        ("true", "failed"),  # which has checked nothing
        ("echo 'Device not supported'; exit 1", "skipped"),
    ],
)
def test_what_the_sanitizer_says(
    script: str, outcome: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    errors: dict[str, Any] = {"failed": AssertionError, "skipped": pytest.skip.Exception}
    with pytest.raises(errors[outcome]) if outcome in errors else contextlib.nullcontext():
        test_sanitizer.test_memcheck()


def test_each_proof_is_reported_with_its_reason(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conftest = (ROOT / "tests" / "gpu" / "conftest.py").read_text()
    conftest = conftest.replace(
        "from tests.gpu.setting import DRY_RUN, ON_GPU\n", "DRY_RUN = ON_GPU = True\n"
    )
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', ['one', 'two words, in one'])\n"
        "def test_right(n): pass\n"
        "def test_wrong(): assert 1 == 2, 'no number'\n"
        "def test_left_out(): pytest.skip('no GPU here')\n"
    )

    def prove(share: str) -> list[Row]:
        with ProcessPoolExecutor(1, CONTEXT) as process:  # one without this pytest
            return process.submit(proven, tmp_path, share).result()

    found = {row["test"]: (row["passed"], row["why"]) for row in prove("0/1")}
    passed, why = found.pop("test_wrong")
    assert passed is False and "no number" in why
    assert found == {
        "test_right[one]": (True, ""),
        "test_right[two words, in one]": (True, ""),
        "test_left_out": (None, "no GPU here"),
    }
    assert [row["test"] for row in prove("1/3")] == ["test_right[two words, in one]"]
    with pytest.raises(Skip, match="tests/gpu"):
        next(proofs.prove(Setting(), "test_y.py"))


# ---------------------------------------------------------------- two GPUs


def test_collectives_are_compared_with_the_cost_model() -> None:
    times = {
        "all-reduce": [2 * (2e-6 + size / 2 / 400e9) for size in nccl.SIZES],
        "all-gather": [4e-6 + size / 200e9 for size in nccl.SIZES],
    }
    rows = list(nccl.compare(times, nccl.SIZES))
    for row in rows:
        assert row["predicted ÷ measured"] == pytest.approx(1, rel=1e-6)
        # With two ranks, each sends as much as it has.
        assert row["GB/s sent"] * 1e3 * row["µs"] == pytest.approx(row["bytes per rank"])
    text = report(rows).markdown()
    assert "| all-reduce | 2048 |" in text and "| all-gather | 134217728 |" in text


def test_one_gpu_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, device_count=1)
    with pytest.raises(Skip, match="needs 2 GPUs, and this machine has 1"):
        next(nccl.nccl(Setting()))


@pytest.mark.parametrize("shape", [TINY, TINY_DEEPSEEK], ids=["Llama", "DeepSeek-V3"])
def test_the_checkpoints_that_are_divided_are_models(
    shape: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """Those whose experts are named as in the hub's files, so that transformers can read them."""
    folder = str(write_checkpoint(tmp_path, shape))
    requests = [BenchRequest(list(range(3, 40)), 12), BenchRequest([9, 8, 7], 12)]
    core = start_engine(folder, dtype="float32", device="cpu", num_kv_blocks=64)
    found, _ = run_requests(core, requests)
    assert found == [reference_tokens(folder, request.prompt_token_ids, 12) for request in requests]
    assert len({token for tokens in found for token in tokens}) > 12, (
        "hardly another token ever comes"
    )


@pytest.mark.parametrize(
    ("name", "tokens", "moved", "message"),
    [
        ("tensor parallel", [[1, 2]], 0, None),
        ("tensor parallel", [[1, 3]], 0, "assert"),
        ("Mixtral, data parallel, experts that move", [[1, 2]], 12, None),
        ("Mixtral, data parallel, experts that move", [[1, 2]], 0, "have not moved"),
    ],
)
def test_a_wrong_divided_engine_is_found(
    name: str,
    tokens: list[list[int]],
    moved: int,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(folder: str, requests: Any, **options: Any) -> list[list[int]]:
        for _ in range(2):
            # Ranks write to the file descriptor: they know nothing of this process's sys.stderr.
            os.write(2, f"balancedness of experts: 0.50, now 0.90; {moved} bytes moved\n".encode())
        return tokens

    monkeypatch.setattr(test_divided, "tiny", lambda kind: "")
    monkeypatch.setattr(test_divided, "undivided", lambda kind: ([], {}, [[1, 2]]))
    monkeypatch.setattr(test_divided, "tokens_of", run)
    with pytest.raises(AssertionError, match=message) if message else contextlib.nullcontext():
        test_divided.test_two_ranks_sample_the_tokens_of_one(name)


# ---------------------------------------------------------------- arithmetic


def test_bytes_and_flops_of_attention() -> None:
    # 3 sequences of 10 tokens: keys and values of 8 heads, queries and output of 32, 128 numbers of
    # 2 bytes each.
    assert attention.decode_bytes(3, 10) == 3 * (2 * 10 * 8 + 2 * 32) * 128 * 2
    pairs = sum(1 for query in range(5) for key in range(12) if key <= 7 + query)
    assert attention.prefill_flops(5, 7) == pairs * 32 * 128 * 4
    assert attention.prefill_flops(8192, 0) / 8192**2 == pytest.approx(2 * 32 * 128, rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "parameters"), [("Llama-3.2-1B", 1.236e9), ("Llama-3.1-8B", 7.505e9)]
)
def test_shapes_have_the_size_that_they_are_named_for(shape: str, parameters: float) -> None:
    # The 8B model has 8.030e9, of which 0.525e9 are an input embedding that no step reads.
    cost = ModelCost.of(ModelConfig.from_dict(SHAPES[shape]), bytes_per_number=1)
    assert cost.weight_bytes == pytest.approx(parameters, rel=1e-3)


def kernel(name: str, begin: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": begin,
        "dur": duration,
        "pid": 0,
        "tid": 7,
    }


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
    busiest = split.pop("busiest")
    assert split == pytest.approx(
        {
            "ms": 0.1,
            "attention %": 24,
            "sampling %": 10,
            "matrix products %": 39,
            f"{trace.OTHER} %": 6,
            "between kernels %": 1,
            "host gap %": 20,
        }
    )
    assert busiest == "nvjet_tst_64x8_64x16_bz_TNT"
    with pytest.raises(ValueError, match="no kernel"):
        split_steps(events[:0])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mixed_attention_kernel", "attention"),
        ("latent_attention_kernel", "attention"),
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


def run_parts(
    *functions: Any, seconds: float = 60.0, minutes: float = 1.0
) -> tuple[list[Row], dict[str, Row]]:
    """The rows of parts, and the parts' outcomes."""
    runner = Runner(Setting(), time.perf_counter() + 60 * minutes)
    chosen = [
        Part(
            function.__name__,
            f"{function.__module__}:{function.__name__}",
            ("argument",) * (function is succeed),
            seconds,
        )
        for function in functions
    ]
    rows = runner.run(chosen)
    return [row for row in rows if row["table"] != PARTS], {
        row["part"]: row for row in rows if row["table"] == PARTS
    }


def test_a_part_that_fails_takes_no_other_along_and_keeps_its_rows() -> None:
    rows, outcomes = run_parts(crash, refuse, skip, succeed)
    whys = {name: (row["status"], row["why"]) for name, row in outcomes.items()}
    assert whys.pop("crash")[1].startswith("killed by SIGSEGV")
    assert whys == {
        "refuse": ("failed", "exit code 1: ValueError: no such GPU"),
        "skip": ("skipped", "there is one GPU"),
        "succeed": ("done", ""),
    }
    assert rows == [ROW, ROW, ROW | {"before": 5}], (
        "two rows and three outcomes came before the last one"
    )
    assert (
        report([*outcomes.values()]).failed
        and not report([outcomes["succeed"], outcomes["skip"]]).failed
    )


def test_a_part_ends_with_its_time_and_so_does_what_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_constants(monkeypatch, parts, LEAST_SECONDS=0.0)
    (row,), outcomes = run_parts(hang, seconds=12.0)
    assert outcomes["hang"]["status"] == "failed" and outcomes["hang"]["why"].startswith(
        "stopped after 12 s"
    )
    wait_until(lambda: not psutil.pid_exists(row["pid"]), what="init has collected it")


def test_no_part_is_started_without_time_for_it() -> None:
    rows, outcomes = run_parts(crash, minutes=0.05)
    assert not rows and (outcomes["crash"]["s"], outcomes["crash"]["why"]) == (
        0,
        "no time was left for it",
    )


def test_parts_fit_into_the_plan() -> None:
    chosen = plan.plan(dry_run=False)
    assert len({(part.function, part.arguments) for part in chosen}) == len(chosen)
    shares = [part.arguments[1] for part in chosen if part.title.startswith("kernels")]
    assert shares == [f"{i}/{len(shares)}" for i in range(len(shares))]
    # After the ceilings come the proofs, and only they run beside each other.
    alone = [part.alone for part in chosen]
    assert alone[0] and alone[1:] == sorted(alone[1:]) and not alone[1]
    assert {word for part in chosen for word in part.arguments if word.startswith("Llama")} == set(
        SHAPES
    )
    for each in [*chosen, *parts.PARTS["parallel"].values(), *parts.PARTS["kv"].values()]:
        module, _, name = each.function.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


# ---------------------------------------------------------------- goals


def models(shape: str, workload: str, engine: str, **more: Any) -> Row:
    return {"table": plan.MODELS, "shape": shape, "workload": workload, "engine": engine} | more


def prefill(implementation: str, num_tokens: int, **more: Any) -> Row:
    return {
        "table": plan.PREFILL,
        "new tokens": num_tokens,
        "context before": 0,
        "implementation": implementation,
    } | more


ROWS = [
    {"table": plan.DECODE, "sequences": 1, "context": 8192, "% of copy": 1.0},
    {"table": plan.DECODE, "sequences": 64, "context": 8192, "% of copy": 90.0},
    {"table": plan.DECODE, "sequences": 256, "context": 8192, "% of copy": 86.0},
    {
        "table": plan.DECODE,
        "sequences": 256,
        "context": 32768,
        "why not": "does not fit into the memory",
    },
    {"table": plan.LATENT, "heads": 16, "sequences": 64, "context": 8192, "% of copy": 82.0},
    {"table": plan.LATENT, "heads": 16, "sequences": 256, "context": 8192, "% of copy": 79.0},
    {"table": plan.LATENT, "heads": 128, "sequences": 256, "context": 8192, "% of copy": 1.0},
    prefill("nanovllm", 8192, **{"% of peak": 70.0, "÷ nanovllm": 1.0}),
    prefill("SDPA flash", 4096, **{"÷ nanovllm": 0.8}),
    prefill("SDPA flash", 8192, **{"÷ nanovllm": 2.0}),
    models("Llama-3.1-8B", "W1", "nanovllm, graphs", **{"% of weight bandwidth": 90.0}),
    models("Llama-3.2-1B", "256 requests", "nanovllm, graphs", **{"% of roofline": 50.0}),
    {"table": plan.STEP, "engine": "nanovllm, graphs", "host gap %": 4.0},
    {"table": plan.STEP, "engine": "nanovllm, graphs", "host gap %": 2.0},
    {"table": proofs.TITLE, "test": "attention", "passed": True, "why": ""},
]


def report(rows: list[Row], dry_run: bool = False) -> Report:
    return Report("nanovllm bench gpu", ["today"], [dict(row) for row in rows], dry_run)


def test_goals_take_the_worst_of_their_values() -> None:
    assert [(goal["measured"], goal["reached"]) for goal in plan.goals(ROWS)] == [
        (86, True),  # of 90 and 86; a batch of one and what does not fit say nothing
        (79, False),  # of 82 and 79; 128 heads say nothing
        (70, True),
        (0.8, False),  # slower at 4k, faster at 8k
        (90, True),
        (50, False),
        (4, True),  # of 4 for one request and 2 for many
    ]
    assert all((goal["measured"], goal["reached"]) == (None, None) for goal in plan.goals([]))
    dry = report(list(plan.goals(ROWS)), dry_run=True)
    assert all(row["measured"] is not None and row["reached"] is None for row in dry.rows)


def test_speeds_are_compared_on_equal_work_only() -> None:
    work = Workload("W", "throughput", "", 2, (4, 4), (3, 3))
    before = [
        models("8B", "W", "nanovllm, graphs", **{"tokens/s": 60.0}),
        {"table": "x", "limit": "bytes_per_second", "value": 1e9},
    ]

    def run(requests: Any) -> list[Timeline]:
        return [Timeline(0.0, [(0.1, 1), (0.2, 2)]) for _ in requests]

    for shape, ratio in (("8B", 2.0), ("1B", None)):
        label = {"shape": shape, "engine": "transformers"}
        row = end_to_end.measured(
            label, work, ModelConfig.from_dict(TINY), run, Setting(before=before)
        )
        assert row["tokens/s"] == pytest.approx(30) and row["nanovllm's speed ÷"] == (
            ratio and pytest.approx(ratio)
        )
        assert row["% of roofline"] is None, "one ceiling was not measured"


@pytest.mark.parametrize("rows", [ROWS, ROWS[2:], []], ids=["all", "some", "nothing"])
def test_whatever_was_found_can_be_reported(rows: list[Row]) -> None:
    found = report([*plan.goals(rows), *rows])
    assert (
        len(json.loads(found.json())["tables"][GOALS]) == 7 and found.markdown().count("\n| ") >= 8
    )


def test_a_wrong_result_is_a_failure_and_a_skipped_one_is_not() -> None:
    row = {"table": proofs.TITLE, "test": "attention", "passed": False, "why": "error 0.3"}
    assert report([row]).failed and not report([row | {"passed": None}]).failed
    assert "| NO |" in report([row]).markdown()


def test_tests_and_parts_are_counted_and_their_lists_are_folded() -> None:
    rows: list[Row] = [
        {"table": PARTS, "part": "kernels", "status": "done", "why": "", "s": 3},
        {"table": "The machine", "what": "multiprocessors", "value": "132"},
        {"table": proofs.TITLE, "test": "test_a[8k | 16]", "passed": True, "why": ""},
        {"table": proofs.TITLE, "test": "test_b", "passed": None, "why": "it needs 2 GPUs"},
        {"table": PARTS, "part": "two GPUs", "status": "skipped", "why": "it needs 2 GPUs", "s": 1},
        goal("decode", 90.0, "%", at_least=85),
    ]
    expected = """    nanovllm bench gpu

- today

**Figures and goals**

| figure | measured | unit | goal | reached |
| :--- | ---: | :--- | :--- | ---: |
| decode | 90.0 | % | ≥ 85.0 | yes |

**Tests on the GPU: kernels against float64, tokens in float32**: 1 passed, 1 skipped

<details>
<summary>All 2</summary>

| test | passed | why |
| :--- | ---: | :--- |
| `test_a[8k / 16]` | yes |  |
| `test_b` | – | it needs 2 GPUs |

</details>

**The machine**

| what | value |
| :--- | :--- |
| multiprocessors | 132 |

**Parts**: 1 done, 1 skipped

<details>
<summary>All 2</summary>

| part | status | why | s |
| :--- | :--- | :--- | ---: |
| kernels | done |  | 3 |
| two GPUs | skipped | it needs 2 GPUs | 1 |

</details>
"""
    assert report(rows).markdown() == expected
    in_terminal = report(rows).markdown(with_lists=False)
    assert (
        "1 passed, 1 skipped" in in_terminal
        and "test_a" not in in_terminal
        and "details" not in in_terminal
    )
    wrong: Row = {"table": proofs.TITLE, "test": "test_c", "passed": False, "why": "error 0.3"}
    in_terminal = report([*rows, wrong]).markdown(with_lists=False)
    assert (
        "1 passed, 1 failed, 1 skipped" in in_terminal
        and "| `test_c` | NO | error 0.3 |" in in_terminal
    )


def test_the_stored_figures_begin_with_the_goals_and_count_the_tests() -> None:
    text = (ROOT / "figures" / "gpu.md").read_text(encoding="utf-8")
    goals, tests, *_ = re.findall(r"^\*\*(.+?)\*\*(.*)$", text, re.MULTILINE)
    assert goals == (GOALS, "")
    assert tests[0] == proofs.TITLE
    listed = collections.Counter(re.findall(r"^\| `test_.*?` \| (yes|NO|–) \|", text, re.MULTILINE))
    words = {"yes": "passed", "NO": "failed", "–": "skipped"}
    assert tests[1] == ": " + ", ".join(
        f"{listed[each]} {word}" for each, word in words.items() if listed[each]
    )
