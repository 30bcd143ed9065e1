"""The small Triton operators against float64, and against the rounding of plain torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nanovllm import ops
from nanovllm.ops import native, reference
from nanovllm.ops import triton as ours
from tests.ops.test_ops import rows_of_equals
from tests.stand_ins import refuse_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [1, 7, 64, 576, 1000, 2048]


@pytest.fixture(autouse=True)
def no_fallback(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that hands its work to plain torch would agree with plain torch."""
    if "fallback" in request.node.name:
        return

    refuse_reference(monkeypatch, ours)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def assert_exact(out: Tensor, exact: Tensor) -> None:
    """Within the rounding steps of the operator, which are three at the most."""
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=4 * eps, atol=4 * eps)


def assert_same_rounding(out: Tensor, expected: Tensor) -> None:
    """Equal to plain torch, but for a few numbers that another order of a sum has moved across a
    border by one step."""
    assert out.dtype == expected.dtype and out.shape == expected.shape
    eps = torch.finfo(out.dtype).eps
    if out.dtype == torch.float32:
        torch.testing.assert_close(out, expected, rtol=4 * eps, atol=eps)
    else:
        torch.testing.assert_close(
            out, expected, rtol=2 * eps, atol=torch.finfo(out.dtype).smallest_normal
        )
        assert int((out != expected).sum()) <= 1 + out.numel() // 100


def check(
    operator: Callable[..., Tensor], plain: Callable[..., Tensor], *arguments: Tensor | float
) -> None:
    exact = plain(*(a.double() if isinstance(a, Tensor) else a for a in arguments))
    out = operator(*arguments)
    assert out.is_contiguous()
    assert_exact(out, exact)
    assert_same_rounding(out, plain(*arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_rms_norm(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    x, weight = 3 * random(num_tokens, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    check(ours.rms_norm, reference.rms_norm, x, weight, 1e-5)
    check(ours.rms_norm, reference.rms_norm, x[0], weight, 1e-5)


@pytest.mark.parametrize("width", [8192, 16384])
def test_rms_norm_of_the_widest_rows(width: int) -> None:
    x, weight = random(2, width, dtype=torch.bfloat16), random(width, dtype=torch.bfloat16, seed=1)
    check(ours.rms_norm, reference.rms_norm, x, weight, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 64), (3, 80), (5, 128)])
def test_rms_norm_of_heads_in_a_fused_projection(
    num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    projection = random(4, (num_heads + 2) * head_dim, dtype=dtype)
    heads = projection[:, head_dim : (num_heads + 1) * head_dim].view(4, num_heads, head_dim)
    weight = random(head_dim, dtype=dtype, seed=1)
    check(ours.rms_norm, reference.rms_norm, heads, weight, 1e-6)
    check(ours.rms_norm, reference.rms_norm, heads.transpose(0, 1), weight, 1e-6)
    check(ours.rms_norm, reference.rms_norm, heads[:, 0], weight, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_add_rms_norm(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    x, residual = (
        random(num_tokens, width, dtype=dtype),
        3 * random(num_tokens, width, dtype=dtype, seed=1),
    )
    weight = random(width, dtype=dtype, seed=2)
    expected, total = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    exact, _ = reference.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    before = x.clone()
    out, same = ours.add_rms_norm(x, residual, weight, 1e-5)
    assert same is residual and torch.equal(residual, total) and torch.equal(x, before)
    assert_same_rounding(out, expected)
    # The sum is rounded before it is normalised: relative to the largest of a row, one more
    # rounding.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=4 * eps, atol=8 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 2), (9, 3, 64), (4, 4, 80), (5, 1, 96), (8, 2, 256)],
)
def test_apply_rope(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Elementwise, so it must be equal to plain torch bit by bit; and nothing else of the
    projection may change."""
    num_tokens = 5
    projection = random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = 7 * random(100, head_dim // 2, dtype=torch.float32)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([0, 99, 3, 3, 50])

    def split(fused: Tensor) -> list[Tensor]:
        parts = fused.split(
            [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], dim=1
        )
        return [part.view(num_tokens, -1, head_dim) for part in parts]

    expected, exact = projection.clone(), projection.double()
    reference.apply_rope(*split(expected)[:2], positions, cos_sin)
    reference.apply_rope(*split(exact)[:2], positions, cos_sin.double())
    q, k, _ = split(projection)
    out = ours.apply_rope(q, k, positions, cos_sin)
    assert out[0] is q and out[1] is k
    assert torch.equal(projection, expected)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(projection.double(), exact, rtol=4 * eps, atol=8 * eps)


def test_a_position_beyond_the_table_is_seen() -> None:
    q, k = random(3, 2, 8, dtype=torch.float32), random(3, 1, 8, dtype=torch.float32)
    ours.apply_rope(q, k, torch.tensor([1, 4, -1]), torch.ones(4, 8))
    assert (
        q[0].isfinite().all()
        and k[0].isfinite().all()
        and q[1:].isnan().all()
        and k[1:].isnan().all()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 1024, 2500])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_silu_and_mul(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    x = 4 * random(num_tokens, 2 * size, dtype=dtype)
    check(ours.silu_and_mul, reference.silu_and_mul, x)
    wide = 4 * random(num_tokens, 2 * size + 3, dtype=dtype)
    check(ours.silu_and_mul, reference.silu_and_mul, wide[:, : 2 * size])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_extreme_gates() -> None:
    gates = [-100.0, -20.0, -0.0, 0.0, 100.0, float("nan"), float("inf")]
    x = torch.tensor([gates + [2.0] * len(gates)])
    torch.testing.assert_close(ours.silu_and_mul(x), reference.silu_and_mul(x), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
# A block that the row does not fill, a full one, and several.
@pytest.mark.parametrize("width", [1, 7, 300, 4096, 4097, 9000])
def test_argmax_takes_the_first_of_the_largest(width: int, dtype: torch.dtype) -> None:
    x = rows_of_equals(width).to(dtype)
    assert ours.argmax(x).tolist() == x.float().argmax(dim=-1).tolist()
    wide = torch.cat([x, torch.full((len(x), 5), float("inf"), dtype=dtype)], dim=1)
    assert ours.argmax(wide[:, :width]).tolist() == ours.argmax(x).tolist(), "rows may lie apart"


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tokens(dtype: torch.dtype) -> None:
    nothing, weight = torch.empty(0, 64, dtype=dtype), torch.ones(64, dtype=dtype)
    assert ours.rms_norm(nothing, weight, 1e-5).shape == (0, 64)
    assert ours.add_rms_norm(nothing, nothing.clone(), weight, 1e-5)[0].shape == (0, 64)
    assert ours.silu_and_mul(nothing).shape == (0, 32)
    assert ours.argmax(nothing).shape == (0,)
    heads = nothing.view(0, 1, 64)
    q, _ = ours.apply_rope(
        heads, heads.clone(), torch.empty(0, dtype=torch.int64), torch.ones(4, 64)
    )
    assert q.shape == (0, 1, 64)


def test_rows_beyond_two_to_the_31() -> None:
    """Row offsets have 64 bits. Only two rows of the 4 GiB are ever touched."""
    row = 2**31
    memory = torch.empty(row + 64, dtype=torch.bfloat16)
    x = memory.as_strided((2, 64), (row, 1))
    x.copy_(random(2, 64, dtype=torch.bfloat16))
    weight = torch.ones(64, dtype=torch.bfloat16)
    expected = reference.rms_norm(x, weight, 1e-5)
    assert_same_rounding(ours.rms_norm(x, weight, 1e-5), expected)
    assert_same_rounding(ours.silu_and_mul(x), reference.silu_and_mul(x))
    assert ours.argmax(x).tolist() == x.argmax(dim=-1).tolist()
    update = random(2, 64, dtype=torch.bfloat16, seed=1)
    out, total = ours.add_rms_norm(update, x, weight, 1e-5)
    assert_same_rounding(out, reference.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("case", ["float64", "gradient", "gaps", "wide"])
def test_fallback_for_what_no_kernel_covers(case: str) -> None:
    dtype = torch.float64 if case == "float64" else torch.float32
    width = 20000 if case == "wide" else 64
    x, weight = random(3, 2 * width, dtype=dtype), random(width, dtype=dtype)
    x = x[:, ::2] if case == "gaps" else x[:, :width].contiguous()
    weight.requires_grad = case == "gradient"
    out = ours.rms_norm(x, weight, 1e-5)
    assert torch.equal(out, reference.rms_norm(x, weight, 1e-5)) and out.requires_grad == (
        case == "gradient"
    )
    assert torch.equal(ours.argmax(x), reference.argmax(x))
    normed, total = ours.add_rms_norm(x, torch.zeros_like(x), weight, 1e-5)
    assert torch.equal(normed, out) and torch.equal(total, x)


def set_obstacle(patch: pytest.MonkeyPatch, why: str | None) -> None:
    """Say why Triton's kernels cannot run on the GPU, which is none here."""
    patch.setattr(ops, "why_no_triton", lambda device, head_dim: why)


def test_who_serves_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose, gpu = ops._kernels.__wrapped__, torch.device("cuda")
    set_obstacle(monkeypatch, None)
    functions = {name: value for name, value in vars(ops).items() if inspect.isfunction(value)}
    operators = {name for name, value in functions.items() if value.__module__ == ops.__name__}
    operators -= {"embedding", "widen"}  # plain torch on every device but a CPU
    assert choose(gpu) is ours and len(operators) == 10
    assert all(
        callable(getattr(module, name))
        for module in (ours, native, reference)
        for name in operators
    )
    assert choose(torch.device("cpu")) is not ours and choose(torch.device("meta")) is reference
    set_obstacle(monkeypatch, "the GPU is of glass")
    assert choose(gpu) is reference and "the GPU is of glass" in caplog.text


def test_without_cpu_kernels_a_gpu_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_NATIVE", "0")
    monkeypatch.setattr(native, "_library", native._library.__wrapped__)
    set_obstacle(monkeypatch, None)
    choose = ops._kernels.__wrapped__
    assert choose(torch.device("cpu")) is reference and choose(torch.device("cuda")) is ours
