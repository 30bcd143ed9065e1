"""Kernels against float64, on the numbers that the hardware really computes."""

from __future__ import annotations

import functools
import itertools
import math
import os
import pathlib
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.lab.bench.gpu.cases import (
    TOLERANCES,
    AttentionCase,
    attention_case,
    cos_sin_table,
    relative_error,
    rotated,
)
from nanovllm.lab.bench.gpu.latent import latent_case
from nanovllm.lab.bench.gpu.setting import Row, Setting, Skip, reason_of
from nanovllm.ops.support import why_no_triton

Cases = dict[str, dict[str, Any]]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROUPS = ((8, 8), (6, 2), (8, 2), (7, 1), (16, 2))
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 100},
    "soft cap": {"soft_cap": 20.0},
    "rotary": {"rotary": True},
    "padding": {"padding_rows": 5},
    "window, soft cap": {"sliding_window": 33, "soft_cap": 20.0},
    "rotary, padding": {"rotary": True, "padding_rows": 3},
}
# Decodes, chunks, whole prompts, the rest after a prefix hit, sequences that sit the step out, all in one batch.
MIXED = [(1, 700), (1, 0), (37, 500), (200, 0), (0, 0), (0, 40), (1, 15), (16, 16), (129, 3), (1, 2047)]
_8B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
LARGE: Cases = {
    "decode of 128k": {"sequences": [(1, 131071), (1, 100000), (1, 1)], **_8B},
    "chunk of 300 on 128k": {"sequences": [(300, 130000)], **_8B},
    "prompt of 4k": {"sequences": [(4096, 0)], **_8B},
    "chunk of 512 on 8k": {"sequences": [(512, 8192)], **_8B},
    "window of 4k on 32k": {"sequences": [(1, 32000), (100, 20000)], "sliding_window": 4096, **_8B},
    "300 decodes": {"sequences": [(1, 13 * i % 997) for i in range(300)], **_8B},
    "prompts alone": {"sequences": [(n, 0) for n in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 513)], **_8B},
    # Past what 32 bits can count.
    "cache of 2.7e9 elements": {"sequences": [(1, 5000), (70, 3000)], "num_blocks": 81920, **_8B},
}


_DEEPSEEK = {"num_heads": 16, "rank": 512, "rope": 64, "nope": 128, "v": 128, "dtype": torch.bfloat16}
LATENT: Cases = {
    "mixed, 16 heads": {"sequences": MIXED, **_DEEPSEEK},
    "mixed, fp16, 40 heads, padding": {
        "sequences": MIXED, **_DEEPSEEK, "num_heads": 40, "dtype": torch.float16, "padding_rows": 3,
    },
    "mixed, fp32, blocks of 64": {"sequences": MIXED, **_DEEPSEEK, "dtype": torch.float32, "block_size": 64},
    "decodes, 128 heads": {"sequences": [(1, 13 * i % 997) for i in range(70)], **_DEEPSEEK, "num_heads": 128},
    "decode of 64k": {"sequences": [(1, 65535), (1, 40000), (1, 1)], **_DEEPSEEK},
    "prompts of 2k and 300": {"sequences": [(2048, 0), (300, 0), (1, 100)], **_DEEPSEEK},
    "chunk of 600 on 8k": {"sequences": [(600, 8000), (3, 8000)], **_DEEPSEEK},
}  # fmt: skip
FEW_LATENT: Cases = {"bf16, small": {"sequences": [(1, 20), (1, 0), (5, 9), (0, 4), (18, 3)], "dtype": torch.bfloat16}}


def all_cases() -> Cases:
    """Every head size in every dtype, with the other properties in turn, and what is large."""
    cases: Cases = {}
    for index, (dtype, head_dim) in enumerate(itertools.product(DTYPES, HEAD_DIMS)):
        # Rows of the grid are shifted against each other, so that no property always meets the same head size.
        turn = index + index // len(HEAD_DIMS)
        num_heads, num_kv_heads = GROUPS[turn % len(GROUPS)]
        block_size = BLOCK_SIZES[(turn + index // len(HEAD_DIMS)) % len(BLOCK_SIZES)]
        variant = list(VARIANTS)[index % len(VARIANTS)]
        name = f"{dtype}, head {head_dim}, {num_heads}/{num_kv_heads} heads, block {block_size}, {variant}"
        cases[name] = {
            "sequences": MIXED,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "block_size": block_size,
            "dtype": DTYPES[dtype],
        } | VARIANTS[variant]
    return cases | LARGE


def few_cases() -> Cases:
    """A case a dtype, small enough for an interpreter or a sanitizer."""
    small = {"num_heads": 6, "num_kv_heads": 2, "sequences": [(1, 20), (1, 0), (5, 9), (0, 4), (18, 3)]}
    return {
        "bf16, head 64, small": small | {"dtype": torch.bfloat16, "padding_rows": 2},
        "fp16, head 80, small, window": small | {"dtype": torch.float16, "head_dim": 80, "sliding_window": 7},
        "fp32, head 64, small, soft cap, rotary": small | {"soft_cap": 20.0, "rotary": True},
    }


def kernels(setting: Setting, share: str = "0/1", which: str = "all") -> Iterator[Row]:
    """Check attention, the small operators, and that the engine uses them.

    Args:
        share: "i/n": every n-th check from the i-th on; the others are done by other processes.
        which: "few" for the small cases alone.
    """
    device = setting.device
    obstacle = why_no_triton(device, 64, torch.float32)
    if obstacle is not None:
        raise Skip(obstacle)
    from nanovllm.ops import triton as operators

    first, step = map(int, share.split("/"))
    checks: dict[str, Callable[[], Row]] = {}
    cases = few_cases() if setting.dry_run or which == "few" else all_cases()
    for seed, (name, options) in enumerate(cases.items()):
        checks[f"attention: {name}"] = functools.partial(_attention, seed, options, device)
    latent_cases = FEW_LATENT if setting.dry_run or which == "few" else LATENT
    for seed, (name, options) in enumerate(latent_cases.items()):
        checks[f"latent attention: {name}"] = functools.partial(_latent_attention, seed, options, device)
    for dtype_name, dtype in DTYPES.items():
        for name, check in OPERATORS.items():
            checks[f"{name}: {dtype_name}"] = functools.partial(check, operators, dtype, device)
    checks["the engine's operators are Triton's"] = functools.partial(dispatch, operators, device)
    for name, run in itertools.islice(checks.items(), first, None, step):
        try:
            found = run()
        except Exception as error:  # the next check may tell more
            found = {"passed": False, "reason": reason_of(error)}
        yield {"table": "checks", "name": name} | found


def verdict(error: float, tolerance: float) -> Row:
    """A row's columns; an error that is no number has not passed, and JSON has no word for it."""
    known = math.isfinite(error)
    return {"error": error if known else None, "tolerance": tolerance, "passed": known and error <= tolerance}


def _attention(seed: int, options: dict[str, Any], device: torch.device) -> Row:
    if device.type == "cuda" and "num_blocks" in options and torch.cuda.mem_get_info()[0] < 16 * 2**30:
        return {"passed": None, "reason": "less than 16 GiB of memory are free"}
    case = attention_case(seed, device=device, **options)
    return verdict(attention_error(case), case.tolerance)


def attention_error(case: AttentionCase) -> float:
    """The error of the Triton backend's output, or of what it wrote into the cache."""
    from nanovllm.attention.triton import TritonBackend

    out = TritonBackend().forward(
        case.q,
        case.k,
        case.v,
        case.kv_cache,
        case.metadata,
        case.scale,
        case.sliding_window,
        case.soft_cap,
        case.rotary,
    )
    errors = [case.error(out), case.cache_error()]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _latent_attention(seed: int, options: dict[str, Any], device: torch.device) -> Row:
    from nanovllm.attention.latent_kernels import TritonLatentBackend

    case = latent_case(seed, device=device, **options)
    errors = case.errors(TritonLatentBackend())
    return verdict(math.nan if any(map(math.isnan, errors)) else max(errors), case.tolerance)


# ---------------------------------------------------------------- the small operators


def dispatch(operators: ModuleType, device: torch.device) -> Row:
    """Whether these are the operators that the engine gets on the GPU."""
    if device.type == "cpu":
        return {"passed": None, "reason": "a dry run"}
    chosen = ops._kernels(device)
    passed = chosen is operators
    return {"passed": passed} | ({} if passed else {"reason": f"it uses {chosen.__name__}"})


def _rms_norm(operators: ModuleType, dtype: torch.dtype, device: torch.device) -> Row:
    x, weight = _draw(37, 2048, dtype=dtype, device=device), _draw(2048, dtype=dtype, device=device)
    return verdict(
        relative_error(operators.rms_norm(x, weight, 1e-5), _exact_norm(x.double(), weight)), TOLERANCES[dtype]
    )


def _add_rms_norm(operators: ModuleType, dtype: torch.dtype, device: torch.device) -> Row:
    x, residual = (_draw(37, 2048, dtype=dtype, device=device) for _ in range(2))
    weight = _draw(2048, dtype=dtype, device=device)
    total = x.double() + residual.double()
    normed, stream = operators.add_rms_norm(x, residual, weight, 1e-5)
    errors = [relative_error(stream, total), relative_error(normed, _exact_norm(total, weight))]
    return verdict(float(torch.tensor(errors).max()), TOLERANCES[dtype])


def _silu_and_mul(operators: ModuleType, dtype: torch.dtype, device: torch.device) -> Row:
    x = _draw(37, 2 * 1536, dtype=dtype, device=device)
    gate, up = x.double().chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    return verdict(relative_error(operators.silu_and_mul(x), expected), TOLERANCES[dtype])


def _apply_rope(operators: ModuleType, dtype: torch.dtype, device: torch.device) -> Row:
    # Views of one projection, as the model makes them.
    q, k, _ = _draw(37, 8, 128, dtype=dtype, device=device).split([4, 2, 2], dim=1)
    cos_sin = cos_sin_table(512, 128).to(device)
    positions = torch.arange(37, device=device) * 13
    expected = [rotated(rows, cos_sin[positions]) for rows in (q, k)]
    errors = map(relative_error, operators.apply_rope(q, k, positions, cos_sin), expected)
    return verdict(float(torch.tensor(list(errors)).max()), TOLERANCES[dtype])


OPERATORS = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "silu_and_mul": _silu_and_mul,
    "apply_rope": _apply_rope,
}


def _draw(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


# ---------------------------------------------------------------- compute-sanitizer


def find_sanitizer() -> str | None:
    """compute-sanitizer on PATH, in the CUDA toolkit, or in one of NVIDIA's Python packages."""
    if found := shutil.which("compute-sanitizer"):
        return found
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    paths = [pathlib.Path(home) / "bin" / "compute-sanitizer" for home in homes if home]
    for folder in site.getsitepackages():
        paths += pathlib.Path(folder, "nvidia").glob("**/compute-sanitizer")
    return next((str(path) for path in paths if path.is_file() and os.access(path, os.X_OK)), None)


def sanitizer(setting: Setting) -> Iterator[Row]:
    """The small cases again, with every access to memory checked."""
    tool = find_sanitizer()
    if tool is None:
        raise Skip("compute-sanitizer is not on PATH, nor in the CUDA toolkit")
    if setting.dry_run:
        raise Skip("a dry run launches nothing on a GPU")
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "99"]
    command += [sys.executable, "-m", "nanovllm.lab.bench.gpu", "kernels", "0/1", "few"]
    # Each tensor gets memory of its own, or what lies beside it would look like its own.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if "Device not supported" in done.stdout:
        raise Skip("compute-sanitizer does not support this device")
    right, wrong = (done.stdout.count(f'"passed": {word}') for word in ("true", "false"))
    lines = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "Invalid" in line]
    row: Row = {"table": "checks", "name": "compute-sanitizer memcheck, small cases"}
    row["passed"] = done.returncode == 0 and right > 0 and not wrong
    if not row["passed"]:
        row["reason"] = f"exit code {done.returncode}, {right} right and {wrong} wrong results; {'; '.join(lines[:3])}"
    yield row
