"""The paged cache in 8 bits: rounding against float64, attention against float64, and kernels
against plain torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from nanovllm.attention.base import kv_cache_shape
from nanovllm.lab.cases import TOLERANCES, Problem, oracle, relative_error
from nanovllm.ops import native, native_quantized_cache, quantized_cache
from nanovllm.ops.quantized_cache import LARGEST, SCALE_BYTES
from tests.pairwise import in_turn
from tests.stand_ins import refuse_reference

KINDS = list(LARGEST)
needs_kernels = pytest.mark.skipif(not native.is_available(), reason="no compiled kernels here")
OPERATORS = [quantized_cache, pytest.param(native_quantized_cache, marks=needs_kernels)]


@pytest.fixture
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not take is an error, so that nothing is compared with itself."""
    refuse_reference(monkeypatch, native_quantized_cache, "quantized_cache")


# ---------------------------------------------------------------- rounding


def e4m3_numbers() -> np.ndarray:
    """All finite values from 0 up, by their code, from the format's description."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
    )


def nearest(numbers: np.ndarray, kind: torch.dtype) -> np.ndarray:
    """The nearest number of a format in float64, of two equally near ones that with an even
    code."""
    if kind == torch.int8:
        return np.rint(numbers)
    grid, absolute = e4m3_numbers(), np.abs(numbers)
    above = np.searchsorted(grid, absolute).clip(1, len(grid) - 1)
    low, high = absolute - grid[above - 1], grid[above] - absolute
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return np.copysign(grid[code], numbers)


finite = st.floats(-(2.0**126), 2.0**126, width=32)
rows = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=finite | st.just(0.0)
)
near = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 40)),
    elements=st.floats(-4, 4, width=32),
)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(x=rows | near)
def test_a_row_is_rounded_to_the_nearest_numbers(kind: torch.dtype, x: np.ndarray) -> None:
    """Zeros, tiny and huge numbers among them."""
    values, scales = quantized_cache.quantize(torch.from_numpy(x), kind)
    absmax = np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-30))
    assert np.array_equal(scales.numpy(), absmax / np.float32(LARGEST[kind]))
    scaled = x * (np.float32(LARGEST[kind]) / absmax)
    assert np.array_equal(values.double().numpy(), nearest(scaled.astype(np.float64), kind))
    # Within half a step, which is a scale with int8, and a sixteenth of the number with e4m3; and a
    # little for float32.
    error = np.abs(values.double().numpy() * scales.double().numpy() - x)
    step = 1.0 if kind == torch.int8 else np.maximum(np.abs(scaled) / 8, 2.0**-9)
    assert (error <= scales.double().numpy() * (step / 2 + 1e-4)).all()
    assert (np.abs(values.double().numpy()).max(-1)[absmax[:, 0] > 1e-30] == LARGEST[kind]).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_number_of_the_format_survives(kind: torch.dtype) -> None:
    grid = np.arange(128.0) if kind == torch.int8 else e4m3_numbers()
    x = torch.from_numpy(np.concatenate([grid, -grid])).float()
    values, scales = quantized_cache.quantize(x, kind)
    assert scales == 1 and torch.equal(values.float(), x)


# ---------------------------------------------------------------- attention


SEQUENCES = [(1, 300), (1, 4), (40, 60), (200, 0), (3, 510), (1, 0)]
# head_dim, query heads, KV heads.
HEADS = [(64, 9, 3), (128, 8, 2), (80, 4, 4), (8, 2, 1), (256, 4, 2)]


class Case(Problem):
    """Sequences, queries, and a cache into which an operator has written the keys and values of all
    of them."""

    def __init__(
        self, write: ModuleType, kind: torch.dtype, heads: tuple[int, int, int], **options: object
    ) -> None:
        super().__init__(1, SEQUENCES, **options)  # type: ignore[arg-type]
        head_dim, num_heads, self.num_kv_heads = heads
        self.q = 3 * self.draw(self.num_rows, num_heads, head_dim)
        slots = torch.cat(self.slots)
        self.tokens = self.draw(2, len(slots), self.num_kv_heads, head_dim)
        shape = kv_cache_shape(
            self.num_blocks, self.num_kv_heads, self.block_size, head_dim + SCALE_BYTES
        )
        # NaN, and scales of NaN, wherever nothing is written.
        self.kv_cache = torch.full(shape, -1, dtype=torch.int8).view(kind)
        write.write_kv_cache(*self.tokens, self.kv_cache, slots)

    def attend(self, operators: ModuleType, *options: float) -> Tensor:
        tables = self.metadata.block_tables, self.metadata.seq_lens, self.metadata.query_start_loc
        return operators.paged_attention(
            self.q, self.kv_cache, *tables, self.q.shape[2] ** -0.5, *options
        )

    def expected(self, exact: bool, *options: float) -> Tensor:
        """In float64, from the keys and values before they were rounded, or after."""
        out, first, token = [], 0, 0
        for query_len, context_len in SEQUENCES:
            end, stop = first + query_len, token + query_len + context_len
            rows = self.tokens[:, token:stop].double()
            if not exact:
                values, scales = quantized_cache.quantize(
                    self.tokens[:, token:stop], self.kv_cache.dtype
                )
                rows = values.double() * scales.double()
            out.append(oracle(self.q[first:end], *rows, self.q.shape[2] ** -0.5, *options))  # type: ignore[arg-type]
            first, token = end, stop
        return torch.cat(out)


@pytest.mark.parametrize(
    "operators", OPERATORS, ids=lambda module: module.__name__.rpartition(".")[2]
)
@pytest.mark.parametrize(
    ("kind", "heads", "dtype"),
    in_turn(KINDS, [(heads,) for heads in HEADS], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_attention(
    operators: ModuleType, kind: torch.dtype, dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    """Over the numbers that the cache holds, as exact as attention over a cache of the model's
    dtype."""
    for block_size, options in ((16, ()), (1, (100,)), (24, (0, 30.0)), (128, (7, 5.0))):
        case = Case(operators, kind, heads, dtype=dtype, block_size=block_size)
        assert (
            relative_error(case.attend(operators, *options), case.expected(False, *options))
            < TOLERANCES[dtype]
        )


@pytest.mark.parametrize(
    ("kind", "bound"), [(torch.int8, 0.06), (torch.float8_e4m3fn, 0.3)], ids=str
)
def test_what_rounding_costs(kind: torch.dtype, bound: float) -> None:
    """Of normal numbers with scores that deviate by 3: bounds on the largest relative error of a
    row, not met by half of them."""
    case = Case(quantized_cache, kind, (64, 9, 3))
    assert bound / 4 < relative_error(case.attend(quantized_cache), case.expected(True)) < bound


# ---------------------------------------------------------------- kernels


@needs_kernels
@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_kernel_writes_the_same_bytes(
    kind: torch.dtype, dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    head_dim, _, num_kv_heads = heads
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 70, 2 * num_kv_heads, head_dim, generator=generator)[:, :, ::2]
    # Some rows are below the smallest scale.
    k = k * 10 ** torch.linspace(-38, 37, 70)[:, None, None]
    k[3], v[5], v[6, :, 1:] = 0, -0.0, 0
    k, v = (x.to(dtype).contiguous() for x in (k, v))
    grid = torch.from_numpy(e4m3_numbers()).float()
    halves = torch.cat([(grid[1:] + grid[:-1]) / 2, torch.arange(126.0) + 0.5])
    for first, last in zip(range(20, 70), range(0, len(halves), head_dim - 1), strict=False):
        # Ties, at a scale of 1.
        some = halves[last : last + head_dim - 1]
        v[first, :, 0], v[first, :, 1 : len(some) + 1] = LARGEST[kind], some.to(dtype)
    slots = torch.randperm(96, generator=generator)[:70]
    slots[9] = -1
    caches = [
        torch.full(
            kv_cache_shape(6, num_kv_heads, 16, head_dim + SCALE_BYTES), 85, dtype=torch.int8
        ).view(kind)
        for _ in range(2)
    ]
    quantized_cache.write_kv_cache(k, v, caches[0], slots)
    native_quantized_cache.write_kv_cache(k, v, caches[1], slots)
    assert torch.equal(*(cache.view(torch.int8) for cache in caches))


@needs_kernels
@pytest.mark.usefixtures("kernels_alone")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_does_not_depend_on_its_company(kind: torch.dtype, dtype: torch.dtype) -> None:
    case = Case(native_quantized_cache, kind, (64, 9, 3), dtype=dtype)
    together, tables = case.attend(native_quantized_cache), case.metadata
    for s, first in enumerate(tables.query_start_loc[:-1].tolist()):
        length = int(tables.seq_lens[s])
        for row in range(first, int(tables.query_start_loc[s + 1]), 7):
            alone = native_quantized_cache.paged_attention(
                case.q[row : row + 1],
                case.kv_cache,
                tables.block_tables[s : s + 1],
                torch.tensor(
                    [length - int(tables.query_start_loc[s + 1]) + row + 1], dtype=torch.int32
                ),
                torch.tensor([0, 1], dtype=torch.int32),
                64**-0.5,
            )
            assert torch.equal(alone[0], together[row])


@needs_kernels
def test_inputs_that_no_kernel_takes_are_left_to_torch() -> None:
    for heads, dtype in (
        ((64, 4, 2), torch.float64),
        ((64, 4, 2), torch.float16),
        ((12, 2, 1), torch.float32),
    ):
        case = Case(native_quantized_cache, torch.int8, heads, dtype=dtype)
        assert torch.equal(case.attend(native_quantized_cache), case.attend(quantized_cache))


@needs_kernels
def test_slots_and_blocks_that_do_not_exist() -> None:
    case = Case(native_quantized_cache, torch.int8, (64, 4, 2))
    with pytest.raises(IndexError, match="slot"):
        native_quantized_cache.write_kv_cache(
            *case.tokens[:, :1], case.kv_cache, torch.tensor([case.num_blocks * 16])
        )
    case.metadata.block_tables[0, 0] = case.num_blocks
    with pytest.raises(IndexError, match="block_tables"):
        case.attend(native_quantized_cache)


@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instructions of x86")
@pytest.mark.parametrize(
    "flags",
    # By day all of this file runs as with AVX2, too.
    [
        "-mno-avx512bf16 -O1",
        pytest.param("-mno-avx512f -O1", marks=pytest.mark.nightly),
        "-march=x86-64 -O1",
    ],
)
def test_older_machines_compute_the_same(flags: str) -> None:
    code = (
        "import pytest, sys; from nanovllm.ops import native; native.is_available() or "
        "sys.exit(9); "
    )
    code += "sys.exit(pytest.main(sys.argv[1:]))"
    chosen = "same_bytes or company or (attention and native and (64 or 80))"
    done = subprocess.run(
        [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", __file__, "-k", chosen],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CXXFLAGS": flags},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr
