"""Latent attention in Triton against float64: any mix of lengths, pages anywhere, NaN in every slot
that nobody wrote."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.attention.triton import MAX_SPLITS, Hardware
from nanovllm.attention.triton_latent import (
    TritonLatentBackend,
    choose_latent_splits,
    choose_latent_tiles,
)
from nanovllm.lab.cases import LatentCase, latent_case
from tests.examples import by_night, examples
from tests.oracle import make_checkpoint, reference_tokens
from tests.pairwise import covering_cases
from tests.stand_ins import set_hardware

KIB = 1024
# Few multiprocessors: few parts, and the interpreter's time goes into kernels and not into empty
# programs.
SMALL = Hardware(4, 227 * KIB)
DECODES = [(1, 127), (1, 16), (1, 0), (1, 60), (1, 300)]
MIXED = [(40, 0), (2, 70), (1, 33), (0, 5), (5, 20), (1, 0)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(case: LatentCase, hardware: Hardware = SMALL) -> None:
    error, cache_error = case.errors(TritonLatentBackend(hardware))
    assert error < case.tolerance
    assert cache_error == 0


def cases(
    num_heads: list[int], block_sizes: list[int], pairs: Collection[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Return cases in which each value and each of these pairs of values occur."""
    choices = {
        "sequences": [DECODES, MIXED, [(70, 0)], [(3, 200)]],
        "dtype": DTYPES,
        "num_heads": num_heads,
        "block_size": block_sizes,
    }
    return covering_cases(choices, pairs)


PAIRS = [("sequences", "dtype"), ("sequences", "block_size")]
# Less than a tile of rows, a tile that is not full, and several tiles; at night each pair.
CASES = [
    *cases([3, 20, 65], [1, 16, 256], []),
    *by_night(cases([3, 20, 65], [1, 16, 256], PAIRS)),
    *by_night(cases([1, 16, 64], [3, 64], PAIRS)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes(case) -> None:
    options = dict(case)
    check(latent_case(1, options.pop("sequences"), options.pop("num_heads"), **options))


@pytest.mark.parametrize("sizes", [(512, 64, 128, 128), (48, 16, 16, 16), (40, 6, 12, 20)], ids=str)
def test_sizes(sizes) -> None:
    """DeepSeek's own, and such as fill no power of two."""
    rank, rope, nope, v = sizes
    check(latent_case(3, [(1, 75), (3, 20)], 2, rank, rope, nope, v, dtype=torch.bfloat16))


@settings(max_examples=examples(9, by_day=2), derandomize=True)
@given(
    sequences=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=5
    ).filter(lambda lengths: any(query for query, _ in lengths)),
    num_heads=st.sampled_from([1, 4, 17]),
    block_size=st.sampled_from([3, 16, 32]),
    padding=st.integers(0, 3),
    processors=st.sampled_from([1, 4, 40]),
    seed=st.integers(0, 1000),
)
def test_any_batch(sequences, num_heads, block_size, padding, processors, seed) -> None:
    case = latent_case(seed, sequences, num_heads, block_size=block_size, padding_rows=padding)
    check(case, Hardware(processors, 227 * KIB))


def test_padding_of_a_captured_batch_becomes_zeros() -> None:
    """Rows that fill a batch up are sequences of one new token without a slot, and of no length."""
    case = latent_case(5, [(1, 20), (1, 70)], padding_rows=3)
    lengths = torch.cat([case.metadata.seq_lens, torch.zeros(3, dtype=torch.int32)])
    tables = torch.cat([case.metadata.block_tables, case.metadata.block_tables[:1].expand(3, -1)])
    starts = torch.arange(6, dtype=torch.int32)
    case.metadata = dataclasses.replace(
        case.metadata, query_start_loc=starts, seq_lens=lengths, block_tables=tables
    )
    for hardware in (SMALL, Hardware(1, 227 * KIB)):  # with parts and without
        arguments = (case.q, case.latent, case.up, case.kv_cache.clone(), case.metadata, case.scale)
        out = TritonLatentBackend(hardware).forward(*arguments)
        assert (out[:2].double() - case.expected).norm() / case.expected.norm() < case.tolerance
        assert (out[2:] == 0).all()


def test_parts_fill_the_gpu() -> None:
    h200 = Hardware(132, 227 * KIB)
    tiles = choose_latent_tiles(16, 576, torch.bfloat16, h200)
    for num_queries in (1, 2, 7, 8, 64, 256, 2048):
        splits = choose_latent_splits(num_queries, 16, tiles, h200)
        assert splits & (splits - 1) == 0 and 1 <= splits <= MAX_SPLITS
        assert num_queries * splits >= 2 * 132 or splits == MAX_SPLITS
    assert choose_latent_splits(2048, 16, tiles, h200) == 1


@pytest.mark.parametrize("shared_memory", [99 * KIB, 163 * KIB, 227 * KIB])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_fit(shared_memory, dtype) -> None:
    is_hopper = shared_memory == 227 * KIB
    for num_heads in (1, 16, 32, 33, 128):
        tiles = choose_latent_tiles(
            num_heads, 576, dtype, Hardware(132, shared_memory, 32, 9 if is_hopper else 8)
        )
        assert (
            tiles.shared_memory(576, dtype.itemsize, num_loaded=1) <= shared_memory
            and tiles.num_stages >= 1
        )
        # A row of the cache is loaded by one program for every 32 heads, or 64 on Hopper.
        share = 64 if is_hopper else 32
        assert dtype == torch.float32 or -(-num_heads // tiles.rows) == -(-num_heads // share)


def test_offsets_need_more_than_31_bits() -> None:
    """The pages lie at the end of a cache of over 2^31 elements, of which only what is used takes
    memory."""
    from nanovllm.ops.device import zeros

    width, block_size, blocks = 576, 16, 2**31 // (576 * 16) + 8
    cache = zeros((blocks, block_size, width), torch.bfloat16, torch.device("cpu"))
    assert cache.numel() > 2**31
    torch.manual_seed(0)
    cache[-3:] = torch.randn(3, block_size, width).bfloat16()
    small = cache[-3:].clone()
    q, lengths = torch.randn(1, 2, width).bfloat16(), torch.tensor([40], dtype=torch.int32)
    high, low = (
        torch.tensor([[first, first + 1, first + 2]], dtype=torch.int32)
        for first in (blocks - 3, 0)
    )
    out = [
        TritonLatentBackend(SMALL).decode(q, *where, lengths, 512, 0.1)
        for where in ((cache, high), (small, low))
    ]
    assert torch.equal(*out) and out[0].abs().max() > 0


@pytest.mark.parametrize(
    ("variant", "options"),
    [("deepseek-v2-dense", {}), ("deepseek-v3", {"max_num_batched_tokens": 12, "max_num_seqs": 4})],
    ids=str,
)
def test_tokens_of_transformers(variant, options, tmp_path, monkeypatch) -> None:
    """The whole engine, with the kernel behind its attention."""
    set_hardware(monkeypatch, Hardware(1, 227 * KIB))
    checkpoint = make_checkpoint(tmp_path, variant)
    draw = random.Random(3)
    shared = [draw.randrange(3, 320) for _ in range(19)]
    prompts = [[draw.randrange(3, 320) for _ in range(length)] for length in (1, 14)] + [
        shared,
        shared[:17],
    ]
    llm = LLM(
        str(checkpoint),
        device="cpu",
        dtype="float32",
        attention_backend="triton",
        check_invariants=True,
        num_kv_blocks=64,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    expected = [reference_tokens(str(checkpoint), prompt, 3) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected
