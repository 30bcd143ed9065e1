"""Every operator against the same formula in float64, in every layout the engine uses, and the ways
to do without."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm import ops
from nanovllm.ops import device, native, reference
from nanovllm.ops.native_library import find_compiler
from tests.examples import examples

DTYPES = [torch.float32, torch.bfloat16]
# Of float32 sums, and one bfloat16 rounding.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
EPS = 1e-5

needs_native = pytest.mark.skipif(not native.is_available(), reason="no compiled kernels here")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_matches(actual: Tensor, oracle: Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    assert actual.dtype == dtype
    tolerance = TOLERANCE[dtype] * roundings
    torch.testing.assert_close(actual.double(), oracle, rtol=tolerance, atol=tolerance)


def projection(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> list[Tensor]:
    """q, k and v as the model has them: strided views of one fused projection."""
    fused = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    return list(
        fused.view(tokens, heads + 2 * kv_heads, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    )


# -------------------------------------------------------------------------------------- elementwise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (7, 64), (3, 50), (40, 1024), (0, 32), (5, 3, 64)])
def test_rms_norm(shape, dtype):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    oracle = reference.rms_norm(x.double(), weight.double(), EPS)
    assert_matches(ops.rms_norm(x, weight, EPS), oracle, dtype, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_inside_a_fused_projection(dtype):
    q, k, _ = projection(6, 9, 3, 64, dtype)
    weight = random(64, dtype=dtype, seed=1)
    for heads in (q, k):
        result = ops.rms_norm(heads, weight, EPS)
        assert result.is_contiguous()
        assert_matches(
            result, reference.rms_norm(heads.double(), weight.double(), EPS), dtype, roundings=2
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (33, 72)])
def test_add_rms_norm_adds_in_place(shape, dtype):
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[-1], dtype=dtype, seed=2)
    total = residual + x
    normed, new_residual = ops.add_rms_norm(x, residual, weight, EPS)
    assert new_residual is residual
    assert torch.equal(residual, total)
    assert_matches(
        normed, reference.rms_norm(total.double(), weight.double(), EPS), dtype, roundings=2
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 100, 1536])
def test_silu_and_mul(size, dtype):
    x = random(37, 2 * size, dtype=dtype) * 10
    assert_matches(ops.silu_and_mul(x), reference.silu_and_mul(x.double()), dtype, roundings=2)


def test_silu_and_mul_keeps_what_is_not_a_number():
    x = torch.tensor([[float("nan"), -200.0, 200.0, 1.0, 1.0, 1.0]])
    result = ops.silu_and_mul(x)[0]
    assert result[0].isnan()
    torch.testing.assert_close(result[1:], torch.tensor([0.0, 200.0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_apply_rope_rotates_views_in_place(head_dim, dtype):
    q, k, v = projection(11, 4, 2, head_dim, dtype)
    angles = random(50, head_dim // 2) * 3
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 50, (11,))
    expected = reference.apply_rope(q.double(), k.double(), positions, cos_sin)
    values = v.clone()
    rotated = ops.apply_rope(q, k, positions, cos_sin)
    assert rotated[0] is q and rotated[1] is k
    for actual, oracle in zip(rotated, expected, strict=True):
        assert_matches(actual, oracle, dtype, roundings=2)
    assert torch.equal(v, values)


@needs_native
def test_bfloat16_rounds_where_torch_does():
    x, weight = random(200, 576, dtype=torch.bfloat16), random(576, dtype=torch.bfloat16, seed=1)
    q, k, _ = projection(100, 9, 3, 64, torch.bfloat16)
    cos_sin, positions = random(100, 64), torch.arange(100)
    pairs = [
        (native.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS)),
        (native.silu_and_mul(x), reference.silu_and_mul(x)),
        *zip(
            native.apply_rope(q.clone(), k.clone(), positions, cos_sin),
            reference.apply_rope(q.clone(), k.clone(), positions, cos_sin),
            strict=True,
        ),
    ]
    for actual, expected in pairs:
        assert (
            actual != expected
        ).float().mean() < 1e-4  # a float32 sum may fall on the other side of a tie


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_write_kv_cache_writes_its_slots_and_nothing_else(block_size, dtype):
    tokens, kv_heads, head_dim = 9, 3, 40
    _, k, v = projection(tokens, 6, kv_heads, head_dim, dtype)
    cache = torch.full(
        (64 // block_size, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype
    )
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[4] = -1
    ops.write_kv_cache(k, v, cache, slots)
    by_slot = cache.permute(0, 3, 1, 2, 4).reshape(64, 2, kv_heads, head_dim)
    kept = slots >= 0
    assert torch.equal(by_slot[slots[kept], 0], k[kept])
    assert torch.equal(by_slot[slots[kept], 1], v[kept])
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots[kept]] = False
    assert by_slot[untouched].isnan().all()


# ------------------------------------------------------------------------------------------- linear


@settings(max_examples=examples(40))
@given(
    tokens=st.integers(0, 70),
    inner=st.sampled_from([32, 96, 576]),
    outputs=st.integers(1, 250),
    with_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_linear(tokens, inner, outputs, with_bias, dtype):
    x = random(tokens, inner, dtype=dtype)
    weight = random(outputs, inner, dtype=dtype, seed=1) / inner**0.5
    bias = random(outputs, dtype=dtype, seed=2) if with_bias else None
    oracle = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_matches(ops.linear(x, weight, bias), oracle, dtype)
    assert_matches(ops.linear(x, ops.pack_weight(weight), bias), oracle, dtype)


@settings(max_examples=examples(40))
@given(
    tokens=st.one_of(st.integers(0, 70), st.integers(250, 600)),
    steps=st.sampled_from([1, 2, 9, 11, 18, 48]),
    groups=st.integers(1, 9),
    with_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_linear_with_a_packed_weight(tokens, steps, groups, with_bias, dtype):
    """Whole and partial tiles of tokens, odd numbers of groups, and inner dimensions in one part or
    several."""
    x = random(tokens, 32 * steps, dtype=dtype)
    weight = random(16 * groups, 32 * steps, dtype=dtype, seed=1) / (32 * steps) ** 0.5
    bias = random(16 * groups, dtype=dtype, seed=2) if with_bias else None
    packed = ops.pack_weight(weight)
    oracle = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_matches(ops.linear(x, packed, bias), oracle, dtype)
    assert (packed.ndim == 4) == native.is_available()
    if packed.ndim == 4:
        assert torch.equal(reference.unpack_weight(packed), weight)
        assert_matches(reference.linear(x, packed, bias), oracle, dtype)
        token_ids = torch.tensor([0, 3, 3])
        assert torch.equal(reference.embedding(token_ids, packed), weight[token_ids])
        assert torch.equal(
            ops.linear(x.mT.contiguous().mT, packed, bias), ops.linear(x, packed, bias)
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 96), (50, 96), (64, 40)])
def test_embedding_and_linear_share_a_weight(shape, dtype):
    weight, token_ids = random(*shape, dtype=dtype), torch.tensor([0, 49, 3, 17, 3])
    packed = ops.pack_weight(weight)
    assert torch.equal(ops.embedding(token_ids, packed), weight[token_ids])
    assert torch.equal(ops.embedding(token_ids[:0], packed), weight[:0])


@needs_native
@pytest.mark.parametrize("token", [-1, 64])
def test_a_packed_embedding_has_no_row_for_a_token_beyond_it(token):
    with pytest.raises(IndexError, match="vocabulary of 64"):
        ops.embedding(torch.tensor([3, token]), ops.pack_weight(random(64, 96)))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("shape", [(1, 49152), (40, 1031), (3, 5), (0, 64)])
def test_widened_numbers_stay_the_same(shape, dtype):
    x = random(*shape, dtype=dtype)
    x[:1, 1], x[:1, 2] = float("nan"), float("-inf")
    assert torch.equal(ops.widen(x).view(torch.int32), x.float().view(torch.int32))
    assert (ops.widen(x) is x) == (dtype is torch.float32)
    assert torch.equal(ops.widen(x[1:, 1:4]), x[1:, 1:4].float())


def test_weights_lie_one_behind_the_other_in_large_pages():
    take = device.weight_memory("cpu")
    shapes = [
        ((700, 2000), torch.float32),
        ((3,), torch.bfloat16),
        ((0, 4), torch.float32),
        ((5,), torch.int8),
    ]
    tensors = [take(shape, dtype) for shape, dtype in shapes]
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
    assert take((1 << 29, 5), torch.int8).numel() == 5 << 29, (
        "more than all others: untouched memory costs nothing"
    )
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        begin = tensors[0].data_ptr()
        regions = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
        spans = {
            tuple(int(end, 16) for end in region.split(maxsplit=1)[0].split("-")): region
            for region in regions
        }
        [region] = [region for (first, end), region in spans.items() if first <= begin < end]
        assert " hg" in region[region.index("VmFlags") :], "Linux was not asked for large pages"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
# Shorter than a vector and than a block, ends of blocks, and several blocks.
@pytest.mark.parametrize("width", [1, 7, 16, 300, 512, 513, 3000])
def test_argmax_takes_the_first_of_the_largest(width, dtype):
    x = rows_of_equals(width).to(dtype)
    # The argument must be the first largest of the float32 copy, which the sampler used to make.
    assert ops.argmax(x).tolist() == x.float().argmax(dim=-1).tolist()
    wide = torch.cat([x, torch.full((len(x), 5), float("inf"), dtype=dtype)], dim=1)
    assert ops.argmax(wide[:, :width]).tolist() == ops.argmax(x).tolist(), "rows may lie apart"


@needs_native
def test_argmax_of_bfloat16_is_not_left_to_torch(monkeypatch):
    monkeypatch.setattr(reference, "argmax", None)
    for dtype in DTYPES:
        assert native.argmax(random(3, 100, dtype=dtype)).shape == (3,)


def rows_of_equals(width: int) -> Tensor:
    """Rows in which several columns, the last one among them, have the largest value; rows with
    infinities, zeros of both signs, negative numbers only, and NaN."""
    x = random(40, width, seed=width).round()
    x[1, [width // 3, width // 2, -1]] = 9.0
    x[2] = float("-inf")
    x[3, [width // 2, -1]] = float("nan")
    x[3, 0] = float("inf")
    x[4] = 0.0
    x[4, 0] = -0.0
    x[5] = -x[5].abs() - 1
    x[6, -1] = float("nan")
    x[7, -1] = 9.0
    x[8, width // 2] = float("inf")
    return x


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
# 503 is no multiple of a group: it cannot be packed.
@pytest.mark.parametrize("outputs", [512, 503])
def test_a_tokens_projection_does_not_depend_on_the_batch_or_the_threads(outputs, dtype):
    x, weight = (
        random(600, 576, dtype=dtype),
        ops.pack_weight(random(outputs, 576, dtype=dtype, seed=1)),
    )
    batch = ops.linear(x, weight)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for start, end in [(0, 1), (5, 6), (2, 4), (60, 67), (47, 95), (590, 600), (255, 580)]:
            assert torch.equal(ops.linear(x[start:end], weight), batch[start:end])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", [(5, 40), (5, 576)])
def test_linear_takes_what_the_kernel_does_not(shape):
    """Inner sizes that are no multiple of 32, strided rows, and float64."""
    x, weight = random(shape[0], 2 * shape[1])[:, : shape[1]], random(7, shape[1], seed=1)
    torch.testing.assert_close(ops.linear(x, weight), x @ weight.T)
    torch.testing.assert_close(
        ops.linear(x.double(), weight.double()), x.double() @ weight.double().T
    )


def test_operators_are_differentiable():
    x, weight = random(4, 64).requires_grad_(), random(64, 64, seed=1).requires_grad_()
    scale = torch.ones(64, requires_grad=True)
    ops.silu_and_mul(ops.linear(ops.rms_norm(x, scale, EPS), weight)).sum().backward()
    assert all(tensor.grad is not None for tensor in (x, weight, scale))


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.linear(random(2, 64), random(8, 32)),
        lambda: ops.linear(random(2, 64).bfloat16(), ops.pack_weight(random(16, 32).bfloat16())),
        lambda: ops.rms_norm(random(2, 64), random(32), EPS),
        lambda: ops.apply_rope(
            *projection(3, 2, 1, 64, torch.float32)[:2], torch.arange(2), random(9, 64)
        ),
    ],
)
def test_shapes_that_do_not_agree_are_refused(call):
    with pytest.raises(RuntimeError):
        call()


# ---------------------------------------------------------------------------------------- attention


def paged_batch(
    lengths, query_counts, heads, kv_heads, head_dim, block_size, dtype, *, spare_columns=0
):
    """A batch whose sequences lie in shuffled blocks; every slot that no token was written to is
    NaN."""
    blocks = [-(-length // block_size) for length in lengths]
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(sum(blocks) + 3, generator=generator).int()
    cache = torch.full((len(order), 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    tables = torch.full((len(lengths), max(blocks) + spare_columns), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        table, order = order[: blocks[row]], order[blocks[row] :]
        tables[row, : blocks[row]] = table
        positions = torch.arange(length)
        slots = table[positions // block_size].long() * block_size + positions % block_size
        keys = random(length, kv_heads, head_dim, dtype=dtype, seed=2 * row)
        values = random(length, kv_heads, head_dim, dtype=dtype, seed=2 * row + 1)
        reference.write_kv_cache(keys, values, cache, slots)
    starts = torch.tensor([0, *query_counts]).cumsum(0).int()
    q = projection(int(starts[-1]), heads, kv_heads, head_dim, dtype)[0]
    return q, cache, tables, torch.tensor(lengths, dtype=torch.int32), starts


def check_attention(batch, dtype, sliding_window=0, soft_cap=0.0):
    q, cache, *metadata = batch
    scale = q.shape[-1] ** -0.5
    actual = ops.paged_attention(q, cache, *metadata, scale, sliding_window, soft_cap)
    expected = reference.paged_attention(
        q.double(), cache.double(), *metadata, scale, sliding_window, soft_cap
    )
    assert actual.shape == q.shape
    assert_matches(actual, expected, dtype)


# A whole prompt, a prompt after a prefix hit, a chunk, three speculated tokens, decoding, and
# nobody's turn.
MIXED_LENGTHS = [150, 130, 300, 90, 600, 1, 65, 40]
MIXED_QUERIES = [150, 30, 64, 3, 1, 1, 1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [
        (9, 3, 64, 16),
        (8, 8, 128, 32),
        (4, 1, 80, 1),
        (4, 2, 256, 256),
        (20, 1, 24, 16),
        (2, 2, 8, 7),
    ],
)
def test_paged_attention_of_a_mixed_batch(heads, kv_heads, head_dim, block_size, dtype):
    batch = paged_batch(MIXED_LENGTHS, MIXED_QUERIES, heads, kv_heads, head_dim, block_size, dtype)
    check_attention(batch, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sliding_window", "soft_cap"), [(1, 0.0), (50, 0.0), (300, 0.0), (0, 5.0), (70, 2.0)]
)
def test_paged_attention_with_window_and_soft_cap(sliding_window, soft_cap, dtype):
    batch = paged_batch(MIXED_LENGTHS, MIXED_QUERIES, 9, 3, 64, 16, dtype)
    check_attention(batch, dtype, sliding_window, soft_cap)


@settings(max_examples=25)
@given(data=st.data())
def test_paged_attention_of_any_batch(data):
    sequences = data.draw(
        st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=5)
    )
    lengths = [length for length, _ in sequences]
    queries = [min(length, count) for length, count in sequences]
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (3, 3), (2, 7), (1, 32)]))
    head_dim = data.draw(st.sampled_from([16, 64, 72, 128]))
    block_size = data.draw(st.sampled_from([1, 5, 16, 256]))
    window = data.draw(st.sampled_from([0, 0, 3, 64, 200]))
    dtype = data.draw(st.sampled_from(DTYPES))
    batch = paged_batch(
        lengths, queries, kv_heads * group, kv_heads, head_dim, block_size, dtype, spare_columns=2
    )
    check_attention(batch, dtype, window)


def test_paged_attention_ignores_blocks_that_left_the_window():
    """The manager may give away what no query sees any more: the table's entry then means
    nothing."""
    q, cache, tables, lengths, starts = paged_batch([300], [2], 9, 3, 64, 16, torch.float32)
    expected = reference.paged_attention(q, cache, tables, lengths, starts, 0.125, 40)
    cache[tables[0, : (298 - 40) // 16].long()] = float("nan")
    torch.testing.assert_close(
        ops.paged_attention(q, cache, tables, lengths, starts, 0.125, 40), expected
    )


def test_paged_attention_reads_one_layer_of_a_cache_that_holds_all_layers_of_a_block():
    q, cache, *metadata = paged_batch([70, 20], [1, 20], 9, 3, 64, 16, torch.float32)
    layered = torch.full((cache.shape[0], 4, *cache.shape[1:]), float("nan"))
    layer = layered[:, 2]
    layer.copy_(cache)
    expected = ops.paged_attention(q, cache, *metadata, 0.125)
    assert torch.equal(ops.paged_attention(q, layer, *metadata, 0.125), expected)
    _, k, v = projection(2, 9, 3, 64, torch.float32)
    ops.write_kv_cache(k, v, layer, torch.tensor([17, -1]))
    assert torch.equal(layered[1, 2, :, :, 1], torch.stack((k[0], v[0])))
    assert layered[:, [0, 1, 3]].isnan().all()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequences_attention_does_not_depend_on_the_batch_or_the_threads(dtype):
    q, cache, tables, lengths, starts = paged_batch(
        MIXED_LENGTHS, MIXED_QUERIES, 9, 3, 64, 16, dtype
    )
    batch = ops.paged_attention(q, cache, tables, lengths, starts, 0.125)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for row, (start, end) in enumerate(pairwise(starts.tolist())):
            one = slice(row, row + 1)
            own_start = torch.tensor([0, end - start], dtype=torch.int32)
            alone = ops.paged_attention(
                q[start:end], cache, tables[one], lengths[one], own_start, 0.125
            )
            assert torch.equal(alone, batch[start:end])
    finally:
        torch.set_num_threads(threads)


@needs_native
@settings(max_examples=25)
@given(data=st.data())
def test_a_queries_attention_does_not_depend_on_the_chunk(data):
    """A prompt at once, and in chunks as a budget or a prefix hit cuts it: the same bits."""
    length = data.draw(st.integers(1, 700))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, length), max_size=4))), length]
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (3, 3), (2, 7)]))
    head_dim = data.draw(st.sampled_from([16, 64, 72]))
    window, soft_cap = (
        data.draw(st.sampled_from([0, 0, 3, 100, 300])),
        data.draw(st.sampled_from([0.0, 5.0])),
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    q, cache, tables, *_ = paged_batch(
        [length], [length], kv_heads * group, kv_heads, head_dim, 16, dtype
    )

    def attention(start: int, end: int) -> Tensor:
        lengths, starts = torch.tensor([end]).int(), torch.tensor([0, end - start]).int()
        return ops.paged_attention(
            q[start:end], cache, tables, lengths, starts, 0.125, window, soft_cap
        )

    assert torch.equal(
        torch.cat([attention(start, end) for start, end in pairwise(cuts)]), attention(0, length)
    )


# ---------------------------------------------------------------------------- indices out of bounds


def test_positions_beyond_the_table_are_refused():
    q, k, _ = projection(2, 2, 1, 64, torch.float32)
    with pytest.raises(IndexError):
        ops.apply_rope(q, k, torch.tensor([0, 9]), random(9, 64))


def test_slots_beyond_the_cache_are_refused():
    _, k, v = projection(2, 2, 1, 64, torch.float32)
    with pytest.raises(IndexError):
        ops.write_kv_cache(k, v, torch.zeros(4, 2, 1, 16, 64), torch.tensor([3, 64]))


@needs_native
@pytest.mark.parametrize(
    "fault", ["block", "unset block", "short table", "more queries than tokens"]
)
def test_block_tables_that_point_nowhere_are_refused(fault):
    q, cache, tables, lengths, starts = paged_batch([40, 20], [1, 1], 2, 1, 64, 16, torch.float32)
    if fault == "block":
        tables[0, 1] = len(cache)
    elif fault == "unset block":
        tables[0, 1] = -1
    elif fault == "short table":
        tables = tables[:, :2]
    else:
        lengths[1] = 0
    with pytest.raises(IndexError):
        ops.paged_attention(q, cache, tables, lengths, starts, 0.125)


# ----------------------------------------------------------------------- building and doing without


def run_python(code: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "NANOVLLM_HOME": str(home), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=300
    )


def run_oracle_tests(native_kernels: bool, **environment: str) -> subprocess.CompletedProcess[str]:
    """This file's comparisons with the oracle in a process of their own, which exits with 9 if it
    has not the kernels that it should have. What it compiles is kept in the user's cache."""
    chosen = (
        "(rms_norm or silu or rope or write or linear or embedding or mixed or window) and not any "
        "and not building"
    )
    code = (
        "import pytest, sys; from nanovllm.ops import native; native.is_available() is "
        f"{native_kernels} or sys.exit(9); "
    )
    code += "sys.exit(pytest.main())"
    command = [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


REPORT = """
import logging, torch
logging.basicConfig(level=logging.INFO)
from nanovllm import ops
from nanovllm.ops import native
x, weight = torch.randn(3, 64), torch.randn(5, 64)
torch.testing.assert_close(ops.linear(x, weight), x @ weight.T)
print("native" if native.is_available() else "torch")
"""


def test_building_is_switched_off_by_the_environment(tmp_path):
    result = run_python(REPORT, tmp_path, NANOVLLM_NATIVE="0")
    assert result.stdout == "torch\n"
    assert not list(tmp_path.iterdir())


def test_building_with_a_compiler_that_fails_is_reported_once(tmp_path):
    result = run_python(REPORT, tmp_path, CXX="/bin/false", NANOVLLM_NATIVE="1")
    assert (result.returncode, result.stdout) == (0, "torch\n")
    assert result.stderr.count("no CPU kernels") == 1
    assert "/bin/false" in result.stderr


# Fails as the assembler and the linker do on a full disk.
FULL_DISK = """#!/bin/sh
case "$*" in
*-dM*) exec "{compiler}" "$@" ;;
*{stage}*)
    touch "$TMPDIR/half.s"
    echo "/tmp/x.s: Fatal error: can't write 5 bytes to x.o: 'No space left on device'" >&2
    echo "/tmp/x.s: Fatal error: x.o: No such file or directory" >&2
    exit 1 ;;
esac
"""


@needs_native
@pytest.mark.parametrize("stage", ["-c", "-shared"])
def test_building_on_a_full_disk_names_the_folder_and_leaves_nothing(tmp_path, stage):
    compiler, home = tmp_path / "compiler", tmp_path / "home"
    compiler.write_text(FULL_DISK.format(compiler=find_compiler(), stage=stage))
    compiler.chmod(0o755)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    result = run_python(REPORT, home, CXX=str(compiler), TMPDIR=str(elsewhere))
    assert (result.returncode, result.stdout) == (0, "torch\n")
    [line] = [line for line in result.stderr.splitlines() if not line.startswith("INFO")]
    assert f"{home / 'native'}: No space left on device; set NANOVLLM_HOME to a folder" in line
    assert list((home / "native").iterdir()) == list(elsewhere.iterdir()) == []


# Compiles nothing, and "links" a library that is there already, as soon as the other process has
# come so far, too.
COMPILER = """#!/bin/sh
case "$*" in
*-dM*) exec "{compiler}" "$@" ;;
*-shared*)
    echo >>"{log}"
    until [ "$(wc -l <"{log}")" = 2 ]; do sleep 0.1; done
    exec cp "{library}" library.so ;;
*) touch source.o ;;
esac
"""


@needs_native
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_building_in_two_processes_at_once(tmp_path, compiles):
    variables, log = (
        {**os.environ, "NANOVLLM_HOME": str(tmp_path), "CXXFLAGS": "-O0"},
        tmp_path / "log",
    )
    if not compiles:
        compiler, library = tmp_path / "compiler", native._library()._name
        compiler.write_text(COMPILER.format(compiler=find_compiler(), log=log, library=library))
        compiler.chmod(0o755)
        variables["CXX"] = str(compiler)
    command = [sys.executable, "-c", REPORT]
    builders = [
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [builder.communicate(timeout=300)[0] for builder in builders] == ["native\n"] * 2
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".so"]
    assert compiles or log.read_text() == "\n\n", "each has built, not one"


@needs_native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86 architecture")
@pytest.mark.parametrize(
    "flags",
    [
        "-march=x86-64 -O1",
        pytest.param("-mno-amx-tile -mno-amx-bf16 -O1", marks=pytest.mark.nightly),
    ],
)
def test_building_without_vectors_or_tiles(flags):
    result = run_oracle_tests(True, CXXFLAGS=flags)
    assert result.returncode == 0, result.stdout + result.stderr


THREADS = """
import os, threading, torch
from nanovllm import ops
torch.set_num_threads(3)
x, weight = torch.randn(40, 576), ops.pack_weight(torch.randn(3072, 576))
expected = ops.linear(x, weight)
differences = []

def multiply():
    for _ in range(200):
        if not torch.equal(ops.linear(x, weight), expected):
            differences.append(1)

callers = [threading.Thread(target=multiply) for _ in range(4)]
for caller in callers:
    caller.start()
child = os.fork()  # has none of the threads that share the loops
multiply()
if child == 0:
    os._exit(len(differences) > 0)
for caller in callers:
    caller.join()
_, status = os.waitpid(child, 0)
print(differences, os.waitstatus_to_exitcode(status))
"""


@needs_native
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.started
def test_loops_of_several_threads_and_of_a_forked_child():
    result = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "[] 0\n", result


def test_compiled_products_do_not_pile_up(tmp_path):
    """oneDNN compiles a kernel for every number of rows. Without a bound, 300 of them for two
    matrices take 300 MB."""
    code = """
import psutil, torch
from nanovllm import ops

weights = [torch.zeros(576, width, dtype=torch.bfloat16) for width in (64, 128)]
memory = []
for rows in range(1, 301):
    for weight in weights:
        ops.reference.linear(torch.zeros(rows, weight.shape[1], dtype=torch.bfloat16), weight)
    memory.append(psutil.Process().memory_info().rss)
print(memory[-1] - memory[149])
"""
    result = run_python(code, tmp_path)
    assert int(result.stdout) < 40 * 2**20, (
        f"150 more row counts took {int(result.stdout) / 2**20:.0f} MB"
    )
