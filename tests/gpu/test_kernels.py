"""Kernels against float64, on the numbers that the hardware really computes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.lab.cases import (
    TOLERANCES,
    attention_case,
    cos_sin_table,
    latent_case,
    relative_error,
    rotated,
)
from nanovllm.ops import quantized, reference_quantized
from nanovllm.ops.support import why_no_triton
from tests.gpu.setting import DEVICE, DRY_RUN
from tests.stand_ins import refuse_reference, set_kernels

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
# Decodes, chunks, whole prompts, the rest after a prefix hit, sequences without new tokens, all in
# one batch.
MIXED = [
    (1, 700),
    (1, 0),
    (37, 500),
    (200, 0),
    (0, 0),
    (0, 40),
    (1, 15),
    (16, 16),
    (129, 3),
    (1, 2047),
]
_8B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
LARGE: Cases = {
    "decode of 128k": {"sequences": [(1, 131071), (1, 100000), (1, 1)], **_8B},
    "chunk of 300 on 128k": {"sequences": [(300, 130000)], **_8B},
    "prompt of 4k": {"sequences": [(4096, 0)], **_8B},
    # Long enough for the tiles of long prompts.
    "prompt of 8k beside decodes": {"sequences": [(1, 500), (5000, 20), (8192, 0)], **_8B},
    "prompt of 8k, heads of 64, window, soft cap": {
        "sequences": [(8000, 100)],
        "sliding_window": 1000,
        "soft_cap": 20.0,
        **_8B,
        "head_dim": 64,
    },
    "chunk of 512 on 8k": {"sequences": [(512, 8192)], **_8B},
    "window of 4k on 32k": {"sequences": [(1, 32000), (100, 20000)], "sliding_window": 4096, **_8B},
    "300 decodes": {"sequences": [(1, 13 * i % 997) for i in range(300)], **_8B},
    "prompts alone": {
        "sequences": [(n, 0) for n in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 513)],
        **_8B,
    },
    # Past what 32 bits can count.
    "cache of 2.7e9 elements": {"sequences": [(1, 5000), (70, 3000)], "num_blocks": 81920, **_8B},
}
# One per dtype, small enough for an interpreter or a sanitizer.
_FEW = {"num_heads": 6, "num_kv_heads": 2, "sequences": [(1, 20), (1, 0), (5, 9), (0, 4), (18, 3)]}
SMALL: Cases = {
    "small, bf16, head 64": _FEW | {"dtype": torch.bfloat16, "padding_rows": 2},
    "small, fp16, head 80, window": (
        _FEW | {"dtype": torch.float16, "head_dim": 80, "sliding_window": 7}
    ),
    "small, fp32, head 64, soft cap, rotary": _FEW | {"soft_cap": 20.0, "rotary": True},
}
_DEEPSEEK = {
    "num_heads": 16,
    "rank": 512,
    "rope": 64,
    "nope": 128,
    "v": 128,
    "dtype": torch.bfloat16,
}
SMALL_LATENT: Cases = {"small, bf16": {"sequences": _FEW["sequences"], "dtype": torch.bfloat16}}
LATENT: Cases = {
    "mixed, 16 heads": {"sequences": MIXED, **_DEEPSEEK},
    "mixed, fp16, 40 heads, padding": {
        "sequences": MIXED,
        **_DEEPSEEK,
        "num_heads": 40,
        "dtype": torch.float16,
        "padding_rows": 3,
    },
    "mixed, fp32, blocks of 64": {
        "sequences": MIXED,
        **_DEEPSEEK,
        "dtype": torch.float32,
        "block_size": 64,
    },
    "decodes, 128 heads": {
        "sequences": [(1, 13 * i % 997) for i in range(70)],
        **_DEEPSEEK,
        "num_heads": 128,
    },
    "decode of 64k": {"sequences": [(1, 65535), (1, 40000), (1, 1)], **_DEEPSEEK},
    "prompts of 2k and 300": {"sequences": [(2048, 0), (300, 0), (1, 100)], **_DEEPSEEK},
    "chunk of 600 on 8k": {"sequences": [(600, 8000), (3, 8000)], **_DEEPSEEK},
}


def all_cases() -> Cases:
    """Every head size in every dtype, with the other properties in turn, and large cases."""
    cases: Cases = {}
    for index, (dtype, head_dim) in enumerate(itertools.product(DTYPES, HEAD_DIMS)):
        # Rows of the grid are shifted against each other, so that no property always meets the same
        # head size.
        turn = index + index // len(HEAD_DIMS)
        num_heads, num_kv_heads = GROUPS[turn % len(GROUPS)]
        block_size = BLOCK_SIZES[(turn + index // len(HEAD_DIMS)) % len(BLOCK_SIZES)]
        variant = list(VARIANTS)[index % len(VARIANTS)]
        name = (
            f"{dtype}, head {head_dim}, {num_heads} on {num_kv_heads} heads, block {block_size}, "
            f"{variant}"
        )
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
    return pytest.mark.parametrize(
        ("seed", "options"), list(enumerate(cases.values())), ids=list(cases)
    )


@pytest.fixture(autouse=True)
def refuse_without_triton() -> None:
    if obstacle := why_no_triton(DEVICE, 64):
        pytest.skip(obstacle)


def _skip_without_memory(options: dict[str, Any]) -> None:
    if (
        DEVICE.type == "cuda"
        and "num_blocks" in options
        and torch.cuda.mem_get_info()[0] < 16 * 2**30
    ):
        pytest.skip("less than 16 GiB of memory are free")


@parameters(SMALL, all_cases())
def test_attention(seed: int, options: dict[str, Any]) -> None:
    from nanovllm.attention.triton import TritonBackend

    _skip_without_memory(options)
    case = attention_case(seed, device=DEVICE, **options)
    options = (case.scale, case.sliding_window, case.soft_cap, case.rotary)
    out = TritonBackend().forward(case.q, case.k, case.v, case.kv_cache, case.metadata, *options)
    assert case.error(out) <= case.tolerance and case.cache_error() <= case.tolerance


# What the smallest kernel supports.
PLAIN = {
    name: options
    for name, options in (SMALL | all_cases()).items()
    if not options.keys() & {"sliding_window", "soft_cap", "rotary"}
}


@parameters(PLAIN, {})
def test_attention_of_the_smallest_kernel(seed: int, options: dict[str, Any]) -> None:
    from nanovllm.attention.triton_simple import SimpleTritonBackend

    _skip_without_memory(options)
    case = attention_case(seed, device=DEVICE, **options)
    out = SimpleTritonBackend().forward(
        case.q, case.k, case.v, case.kv_cache, case.metadata, case.scale
    )
    assert case.error(out) <= case.tolerance and case.cache_error() <= case.tolerance


@parameters(SMALL_LATENT, LATENT)
def test_latent_attention(seed: int, options: dict[str, Any]) -> None:
    from nanovllm.attention.triton_latent import TritonLatentBackend

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
    x, residual, weight = (
        draw(37, 2048, dtype=dtype),
        draw(37, 2048, dtype=dtype),
        draw(2048, dtype=dtype),
    )
    total = x.double() + residual.double()
    assert (
        relative_error(operators.rms_norm(x, weight, 1e-5), exact_norm(x.double(), weight))
        <= TOLERANCES[dtype]
    )
    normed, stream = operators.add_rms_norm(x, residual, weight, 1e-5)
    assert relative_error(stream, total) <= TOLERANCES[dtype]
    assert relative_error(normed, exact_norm(total, weight)) <= TOLERANCES[dtype]


@pytest.mark.parametrize("name", ["bf16"] if DRY_RUN else DTYPES)
def test_silu_and_mul(name: str) -> None:
    from nanovllm.ops import triton as operators

    x = draw(37, 2 * 1536, dtype=DTYPES[name])
    gate, up = x.double().chunk(2, dim=-1)
    assert (
        relative_error(operators.silu_and_mul(x), gate * torch.sigmoid(gate) * up)
        <= TOLERANCES[DTYPES[name]]
    )


@pytest.mark.parametrize("name", ["bf16"] if DRY_RUN else DTYPES)
def test_argmax(name: str) -> None:
    from nanovllm.ops import triton as operators

    x = draw(37, 3000 if DRY_RUN else 49152, dtype=DTYPES[name])
    x[1, [20, 700, 2900]] = 99.0
    x[2, [30, 40]] = float("nan")
    x[3] = float("-inf")
    assert operators.argmax(x).tolist() == x.cpu().float().argmax(dim=-1).tolist()


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


# ---------------------------------------------------------------- quantized weights

# (tokens, outputs, inputs, groups): each tile, sums that programs share and sums that they do not,
# edges, small and large groups.
PRODUCTS = {
    "small, whole rows": (3, 80, 192, 1),
    "decode, groups of 128": (1, 4096, 4096, 32),
    "16 tokens, groups of 32": (16, 28672, 4096, 128),
    "37 tokens, groups of 64": (37, 1552, 1600, 25),
    "64 tokens, many outputs": (64, 32000, 2048, 16),
    "1000 tokens, few outputs": (1000, 144, 576, 9),
    "1000 tokens, many outputs": (1000, 9216, 2304, 18),
}
_QUANTIZED = {
    "w4a16": (4, False, False),
    "w4a16 with zeros": (4, True, False),
    "w8a16": (8, False, False),
    "w8a8": (8, False, True),
}


def quantized_case(
    name: str, kind: str, dtype: torch.dtype
) -> tuple[Tensor, Any, list[Any], Tensor | None]:
    """Activations, the product and the tensors of its weight (packed), and the dequantized weight
    (W8A8: none)."""
    tokens, outputs, inputs, groups = PRODUCTS[name]
    bits, has_zeros, integers = _QUANTIZED[kind]
    torch.manual_seed(0)
    x, scales = draw(tokens, inputs, dtype=dtype), torch.rand(outputs, groups, device=DEVICE) / 50
    if integers:
        values = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device=DEVICE)
        return x, quantized.linear_w8a8, [values, scales[:, :1].contiguous()], None
    if bits == 8:
        values = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device=DEVICE)
        tensors = [values, scales.to(dtype)]
        return x, quantized.linear_w8a16, tensors, quantized.dequantize(*tensors, None, dtype)
    nibbles = torch.randint(-(2**31), 2**31, (outputs, inputs // 8), device=DEVICE).to(torch.int32)
    zeros = (
        torch.randint(0, 16, (outputs, groups), dtype=torch.uint8, device=DEVICE)
        if has_zeros
        else None
    )
    weight = quantized.dequantize(nibbles, scales.to(dtype), zeros, dtype)
    return (
        x,
        quantized.linear_w4a16,
        [quantized.pack_nibbles(nibbles)[0], scales.to(dtype), zeros],
        weight,
    )


@pytest.fixture
def quantized_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run interprets them, too; and nothing is left to plain torch."""
    from nanovllm.ops import reference_quantized, triton_quantized

    if DRY_RUN:
        set_kernels(monkeypatch, quantized, triton_quantized)
    refuse_reference(monkeypatch, triton_quantized, pack=reference_quantized.pack)


def quantized_parameters(dtypes: Any) -> Any:
    names = list(PRODUCTS)[: 1 if DRY_RUN else None]
    cases = [(n, kind, dtype) for n in names for kind in _QUANTIZED for dtype in dtypes]
    return pytest.mark.parametrize(("name", "kind", "dtype"), cases[:: 5 if DRY_RUN else 1])


@pytest.mark.usefixtures("quantized_kernels")
@quantized_parameters(DTYPES)
def test_quantized_product(name: str, kind: str, dtype: str) -> None:
    x, product, tensors, weight = quantized_case(name, kind, DTYPES[dtype])
    bias = draw(PRODUCTS[name][1], dtype=DTYPES[dtype])
    out = product(x, *tensors, bias)
    if weight is not None:
        exact = x.double() @ weight.double().T + bias.double()
        assert relative_error(out, exact) <= TOLERANCES[DTYPES[dtype]]
        return
    values, scales = (tensor.cpu() for tensor in tensors)
    # On the CPU, since a GPU's division by a number is a product with its rounded reciprocal.
    assert torch.equal(
        out.cpu(), reference_quantized.linear_w8a8(x.cpu(), values, scales, bias.cpu())
    )


@pytest.mark.usefixtures("quantized_kernels")
@pytest.mark.parametrize("kind", _QUANTIZED)
@pytest.mark.parametrize("dtype", ["bf16"] if DRY_RUN else DTYPES)
def test_a_row_of_a_quantized_product_does_not_depend_on_its_batch(kind: str, dtype: str) -> None:
    """To the last bit: with every tile, and where programs share a sum or not."""
    x, product, tensors, _ = quantized_case(
        "small, whole rows" if DRY_RUN else "1000 tokens, many outputs", kind, DTYPES[dtype]
    )
    alone = torch.cat([product(row, *tensors) for row in x[:3].split(1)])
    for tokens in (2, 3) if DRY_RUN else (3, 16, 17, 64, 65, 200, 1000):
        assert torch.equal(product(x[:tokens], *tensors)[:3], alone[:tokens]), f"{tokens} tokens"


@pytest.mark.skipif(DRY_RUN, reason="a dry run")
def test_the_engine_uses_these_operators() -> None:
    from nanovllm.ops import triton as operators
    from nanovllm.ops import triton_quantized

    assert ops._kernels(DEVICE) is operators and quantized._kernels(DEVICE) is triton_quantized
