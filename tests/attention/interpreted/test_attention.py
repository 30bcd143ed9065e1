"""The attention kernels against float64: any mix of lengths, pages anywhere, NaN in every slot that
nobody wrote."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.attention import triton as attention
from nanovllm.attention.triton import Hardware, TritonBackend, choose_splits, choose_tiles
from nanovllm.lab.cases import AttentionCase, attention_case
from nanovllm.ops.device import zeros
from tests.examples import by_night, examples
from tests.pairwise import covering_cases

KIB = 1024
# Few multiprocessors: few parts, and the interpreter's time goes into kernels and not into empty
# programs.
SMALL = Hardware(8, 227 * KIB)

DECODES = [(1, 127), (1, 16), (1, 0), (1, 60), (1, 300)]
MIXED = [(40, 0), (17, 48), (0, 5), (33, 20), (1, 290), (1, 0)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def run(case: AttentionCase, hardware: Hardware = SMALL) -> torch.Tensor:
    return TritonBackend(hardware).forward(
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


def check(case: AttentionCase, hardware: Hardware = SMALL) -> None:
    assert case.error(run(case, hardware)) < case.tolerance
    assert case.cache_error() < case.tolerance


VALUES = {
    "sequences": [DECODES, MIXED, [(70, 0)], [(5, 200)]],
    "dtype": DTYPES,
    "head_dim": [64, 80, 96, 128, 256],
    "heads": [(4, 2), (9, 3), (4, 4), (7, 1), (24, 1), (6, 2)],
    "block_size": [1, 16, 24, 32, 64, 128, 256],
    "sliding_window": [0, 1, 3, 24, 1000],
    "soft_cap": [0.0, 5.0],
    "rotary": [True, False],
}
PAIRS = [
    ("sequences", "dtype"),
    ("head_dim", "dtype"),
    ("sequences", "block_size"),
    ("sequences", "sliding_window"),
    ("sequences", "soft_cap"),
    ("sliding_window", "soft_cap"),
]
# By day each value, and what decides which tokens are seen in pairs; at night each pair.
BY_DAY = covering_cases(VALUES, [("sequences", "soft_cap"), ("sliding_window", "soft_cap")])
CASES = [*BY_DAY, *by_night(covering_cases(VALUES, PAIRS))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_and_options(case) -> None:
    options = dict(case)
    num_heads, num_kv_heads = options.pop("heads")
    check(attention_case(1, options.pop("sequences"), num_heads, num_kv_heads, **options))


def test_a_window_and_a_soft_cap_change_the_result() -> None:
    plain = attention_case(5, DECODES, 4, 2)
    for change in ({"sliding_window": 24}, {"soft_cap": 5.0}):
        assert plain.error(run(dataclasses.replace(plain, **change))) > 0.01


@settings(max_examples=examples(30, by_day=4), derandomize=True)
@given(
    sequences=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=5
    ).filter(lambda lengths: any(query for query, _ in lengths)),
    heads=st.sampled_from([(2, 1), (3, 3), (6, 2), (5, 1)]),
    block_size=st.sampled_from([3, 16, 32]),
    window=st.sampled_from([0, 0, 7, 40]),
    padding=st.integers(0, 3),
    processors=st.sampled_from([1, 4, 40]),
    seed=st.integers(0, 1000),
)
def test_any_batch(sequences, heads, block_size, window, padding, processors, seed) -> None:
    case = attention_case(
        seed,
        sequences,
        *heads,
        block_size=block_size,
        sliding_window=window,
        padding_rows=padding,
        rotary=True,
    )
    check(case, Hardware(processors, 227 * KIB))


@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_padding_of_a_captured_batch_becomes_zeros(soft_cap) -> None:
    """Rows that fill a batch up are sequences of one new token without a slot, and of no length."""
    case = attention_case(6, [(1, 20), (1, 70)], padding_rows=3, soft_cap=soft_cap)
    metadata = case.metadata
    case.metadata = dataclasses.replace(
        metadata,
        query_start_loc=torch.arange(6, dtype=torch.int32),
        seq_lens=torch.cat([metadata.seq_lens, torch.zeros(3, dtype=torch.int32)]),
        block_tables=torch.cat([metadata.block_tables, metadata.block_tables[:1].expand(3, -1)]),
    )
    for hardware in (SMALL, Hardware(1, 227 * KIB)):  # with parts and without
        out = run(dataclasses.replace(case, kv_cache=case.kv_cache.clone()), hardware)
        assert case.error(out) < case.tolerance
        assert (out[2:] == 0).all()


def test_offsets_need_more_than_31_bits() -> None:
    """The pages lie at the end of a cache of over 2^31 elements, of which the operating system
    backs only what is used."""
    case = attention_case(8, [(3, 40), (1, 60)], 2, 1, dtype=torch.float16)
    small = case.kv_cache
    num_blocks = 2**31 // small[0].numel() + 64
    shift = num_blocks - len(small)
    case.kv_cache = zeros((num_blocks, *small.shape[1:]), torch.float16, torch.device("cpu"))
    case.kv_cache[shift:] = small
    case.metadata.block_tables += shift
    case.metadata.slot_mapping += shift * small.shape[3]
    assert case.kv_cache.numel() > 2**31
    assert case.error(run(case)) < case.tolerance


def test_mixed_batches_split_their_long_decodes(monkeypatch) -> None:
    launched = []
    for name in ("decode_attention_kernel", "mixed_attention_kernel"):
        kernel = getattr(attention, name)

        class Watched:
            def __init__(self, kernel, name):
                self.kernel, self.name = kernel, name

            def __getitem__(self, grid):
                launched.append(self.name)
                return self.kernel[grid]

        monkeypatch.setattr(attention, name, Watched(kernel, name))

    def kernels_of(sequences):
        launched.clear()
        check(attention_case(7, sequences, 2, 1))
        return [name.partition("_")[0] for name in launched]

    assert kernels_of([(1, 9), (1, 300)]) == ["decode"]
    assert kernels_of([(9, 0), (1, 9)]) == ["mixed"]
    assert kernels_of([(9, 0), (1, 300)]) == ["decode", "mixed"]
    assert kernels_of([(9, 300)]) == ["mixed"]


def test_parts_fill_the_gpu_and_do_not_depend_on_lengths() -> None:
    h200 = Hardware(132, 227 * KIB)
    for num_seqs in (1, 2, 7, 8, 64, 256, 1024):
        splits = choose_splits(num_seqs, 8, h200)
        assert splits & (splits - 1) == 0 and 1 <= splits <= attention.MAX_SPLITS
        # Two programs for each multiprocessor at least, where the bound allows it.
        assert num_seqs * 8 * splits >= 2 * 132 or splits == attention.MAX_SPLITS
    assert choose_splits(1024, 8, h200) == 1


@pytest.mark.parametrize("shared_memory", [64 * KIB, 99 * KIB, 163 * KIB, 227 * KIB])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_fit(shared_memory, dtype) -> None:
    hardware = Hardware(
        100,
        shared_memory,
        64 if shared_memory == 64 * KIB else 32,
        9 if shared_memory == 227 * KIB else 8,
    )
    for head_dim in (64, 80, 96, 128, 256):
        for max_rows, num_kv_heads in (
            (1, 1),
            (16, 1),
            (17, 8),
            (64, 8),
            (65, 8),
            (10_000, 1),
            (10_000, 16),
        ):
            tiles = choose_tiles(max_rows, head_dim, dtype, hardware, num_kv_heads)
            # Many programs, on Hopper.
            assert (tiles.rows == 256) == (
                max_rows * num_kv_heads > 102_400
                and (head_dim, shared_memory) == (128, 227 * KIB)
                and dtype != torch.float32
            )
            # Blackwell has no such tiles: they would spill there.
            assert (
                choose_tiles(
                    max_rows, head_dim, dtype, hardware._replace(generation=10), num_kv_heads
                ).rows
                <= 128
            )
            channels = 1 << (head_dim - 1).bit_length()
            assert (
                tiles.shared_memory(channels, dtype.itemsize) <= shared_memory
                or hardware.warp_size == 64
            )
            assert tiles.rows >= min(max_rows, 16) and tiles.num_stages >= 1
