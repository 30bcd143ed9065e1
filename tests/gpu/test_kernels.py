"""Kernels against float64, on the numbers that the hardware really computes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.lab.cases import TOLERANCES, attention_case, cos_sin_table, latent_case, relative_error, rotated
from nanovllm.ops.support import why_no_triton
from tests.gpu.setting import DEVICE, DRY_RUN

Cases = dict[str, dict[str, Any]]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROUPS = ((8, 8), (6, 2), (8, 2), (7, 1), (16, 2))
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)
VARIANTS: Cases = {
    "plain": {},
    "window": {"sliding_window": 100},
    "soft cap": {"soft_cap": 20.0},
    "rotary": {"rotary": True},
    "padding": {"padding_rows": 5},
    "window, soft cap": {"sliding_window": 33, "soft_cap": 20.0},
    "rotary, padding": {"rotary": True, "padding_rows": 3},
}
# Decodes, chunks, whole prompts, the rest after a prefix hit, sequences without new tokens, all in one batch.
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
# One per dtype, small enough for an interpreter or a sanitizer.
_FEW = {"num_heads": 6, "num_kv_heads": 2, "sequences": [(1, 20), (1, 0), (5, 9), (0, 4), (18, 3)]}
SMALL: Cases = {
    "small, bf16, head 64": _FEW | {"dtype": torch.bfloat16, "padding_rows": 2},
    "small, fp16, head 80, window": _FEW | {"dtype": torch.float16, "head_dim": 80, "sliding_window": 7},
    "small, fp32, head 64, soft cap, rotary": _FEW | {"soft_cap": 20.0, "rotary": True},
}
_DEEPSEEK = {"num_heads": 16, "rank": 512, "rope": 64, "nope": 128, "v": 128, "dtype": torch.bfloat16}
SMALL_LATENT: Cases = {"small, bf16": {"sequences": _FEW["sequences"], "dtype": torch.bfloat16}}
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


def all_cases() -> Cases:
    """Every head size in every dtype, with the other properties in turn, and large cases."""
    cases: Cases = {}
    for index, (dtype, head_dim) in enumerate(itertools.product(DTYPES, HEAD_DIMS)):
        # Rows of the grid are shifted against each other, so that no property always meets the same head size.
        turn = index + index // len(HEAD_DIMS)
        num_heads, num_kv_heads = GROUPS[turn % len(GROUPS)]
        block_size = BLOCK_SIZES[(turn + index // len(HEAD_DIMS)) % len(BLOCK_SIZES)]
        variant = list(VARIANTS)[index % len(VARIANTS)]
        name = f"{dtype}, head {head_dim}, {num_heads} on {num_kv_heads} heads, block {block_size}, {variant}"
        cases[name] = {
            "sequences": MIXED,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "block_size": block_size,
            "dtype": DTYPES[dtype],
        } | VARIANTS[variant]
    return cases | LARGE


def parameters(small: Cases, others: Cases) -> Any:
    cases = dict([*small.items()][:1]) if DRY_RUN else small | others  # other tests interpret more
    return pytest.mark.parametrize(("seed", "options"), list(enumerate(cases.values())), ids=list(cases))


@pytest.fixture(autouse=True)
def refuse_without_triton() -> None:
    if obstacle := why_no_triton(DEVICE, 64):
        pytest.skip(obstacle)


@parameters(SMALL, all_cases())
def test_attention(seed: int, options: dict[str, Any]) -> None:
    from nanovllm.attention.triton import TritonBackend

    if DEVICE.type == "cuda" and "num_blocks" in options and torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("less than 16 GiB of memory are free")
    case = attention_case(seed, device=DEVICE, **options)
    options = (case.scale, case.sliding_window, case.soft_cap, case.rotary)
    out = TritonBackend().forward(case.q, case.k, case.v, case.kv_cache, case.metadata, *options)
    assert case.error(out) <= case.tolerance and case.cache_error() <= case.tolerance


@parameters(SMALL_LATENT, LATENT)
def test_latent_attention(seed: int, options: dict[str, Any]) -> None:
    from nanovllm.attention.latent_kernels import TritonLatentBackend

    case = latent_case(seed, device=DEVICE, **options)
    error, cache_error = case.errors(TritonLatentBackend())
    assert error <= case.tolerance and cache_error <= case.tolerance


# ---------------------------------------------------------------- the small operators


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("name", ["bf16"] if DRY_RUN else DTYPES)
def test_rms_norm(name: str) -> None:
    from nanovllm.ops import triton as operators

    dtype = DTYPES[name]
    x, residual, weight = draw(37, 2048, dtype=dtype), draw(37, 2048, dtype=dtype), draw(2048, dtype=dtype)
    total = x.double() + residual.double()
    assert relative_error(operators.rms_norm(x, weight, 1e-5), exact_norm(x.double(), weight)) <= TOLERANCES[dtype]
    normed, stream = operators.add_rms_norm(x, residual, weight, 1e-5)
    assert relative_error(stream, total) <= TOLERANCES[dtype]
    assert relative_error(normed, exact_norm(total, weight)) <= TOLERANCES[dtype]


@pytest.mark.parametrize("name", ["bf16"] if DRY_RUN else DTYPES)
def test_silu_and_mul(name: str) -> None:
    from nanovllm.ops import triton as operators

    x = draw(37, 2 * 1536, dtype=DTYPES[name])
    gate, up = x.double().chunk(2, dim=-1)
    assert relative_error(operators.silu_and_mul(x), gate * torch.sigmoid(gate) * up) <= TOLERANCES[DTYPES[name]]


@pytest.mark.parametrize("name", ["bf16"] if DRY_RUN else DTYPES)
def test_apply_rope(name: str) -> None:
    from nanovllm.ops import triton as operators

    # Views of one projection, as the model makes them.
    q, k, _ = draw(37, 8, 128, dtype=DTYPES[name]).split([4, 2, 2], dim=1)
    cos_sin = cos_sin_table(512, 128).to(DEVICE)
    positions = torch.arange(37, device=DEVICE) * 13
    expected = [rotated(rows, cos_sin[positions]) for rows in (q, k)]
    for found, rows in zip(operators.apply_rope(q, k, positions, cos_sin), expected, strict=True):
        assert relative_error(found, rows) <= TOLERANCES[DTYPES[name]]


@pytest.mark.skipif(DRY_RUN, reason="a dry run")
def test_the_engine_uses_these_operators() -> None:
    from nanovllm.ops import triton as operators

    assert ops._kernels(DEVICE) is operators
