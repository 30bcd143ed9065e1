"""The smallest Triton backend against float64, in the cases of the large one, and in the engine."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM
from nanovllm.attention.triton_simple import SimpleTritonBackend, rows_of_batch
from nanovllm.lab.cases import AttentionCase, attention_case
from nanovllm.ops.device import zeros
from tests.attention.interpreted.test_attention import DECODES, PAIRS
from tests.attention.interpreted.test_attention import VALUES as ALL_VALUES
from tests.attention.interpreted.test_engine import OUTPUT_LEN, prompts
from tests.examples import by_night, examples
from tests.oracle import greedy, make_checkpoint, reference_tokens
from tests.pairwise import covering_cases


def run(case: AttentionCase) -> torch.Tensor:
    """The rotation is not the backend's: `attend` rotates before."""
    return SimpleTritonBackend().forward(
        case.q, case.k, case.v, case.kv_cache, case.metadata, case.scale
    )


def check(case: AttentionCase) -> None:
    assert case.error(run(case)) < case.tolerance
    assert case.cache_error() < case.tolerance


LACKS = {"sliding_window", "soft_cap", "rotary"}
VALUES = {name: values for name, values in ALL_VALUES.items() if name not in LACKS}
# Each query head has a program: few heads.
VALUES["heads"] = [(4, 2), (9, 3), (4, 4), (7, 1)]
BY_DAY = covering_cases(VALUES, [("sequences", "dtype")])
CASES = [
    *BY_DAY,
    *by_night(covering_cases(VALUES, [pair for pair in PAIRS if not LACKS & {*pair}])),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes(case) -> None:
    options = dict(case)
    num_heads, num_kv_heads = options.pop("heads")
    check(attention_case(1, options.pop("sequences"), num_heads, num_kv_heads, **options))


@settings(max_examples=examples(30, by_day=4), derandomize=True)
@given(
    sequences=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 90)), min_size=1, max_size=5
    ).filter(lambda lengths: any(query for query, _ in lengths)),
    heads=st.sampled_from([(2, 1), (3, 3), (6, 2), (5, 1)]),
    block_size=st.sampled_from([3, 16, 32]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_any_batch(sequences, heads, block_size, padding, seed) -> None:
    case = attention_case(seed, sequences, *heads, block_size=block_size, padding_rows=padding)
    out = run(case)
    assert case.error(out) < case.tolerance and case.cache_error() < case.tolerance
    assert not out[len(case.expected) :].any(), "padding sees no key"


def test_each_row_knows_its_sequence_and_its_keys() -> None:
    case = attention_case(1, [(0, 5), (2, 3), (0, 4), (1, 6), (0, 1)], padding_rows=2)
    seq, num_keys = rows_of_batch(case.metadata, 5)
    assert seq[:3].tolist() == [1, 1, 3] and num_keys.tolist() == [4, 5, 7, 0, 0]


def test_queries_keys_and_values_are_views_of_one_projection() -> None:
    case = attention_case(2, DECODES, 4, 2)
    together = torch.cat([case.q, case.k, case.v], dim=1)
    case.q, case.k, case.v = together.split([4, 2, 2], dim=1)
    assert not case.q.is_contiguous()
    check(case)


def test_padding_of_a_batch_becomes_zeros() -> None:
    """A sequence of one new token without a slot, and of no length."""
    case = attention_case(6, [(1, 20)], padding_rows=1)
    case.metadata = dataclasses.replace(
        case.metadata,
        query_start_loc=torch.arange(3, dtype=torch.int32),
        seq_lens=torch.tensor([21, 0], dtype=torch.int32),
        block_tables=case.metadata.block_tables.expand(2, -1),
    )
    out = run(case)
    assert case.error(out) < case.tolerance and (out[1] == 0).all()


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
    assert case.error(run(case)) < case.tolerance


@pytest.mark.parametrize("option", [{"sliding_window": 24}, {"soft_cap": 5.0}], ids=str)
def test_what_the_kernel_lacks_is_refused(option) -> None:
    case = attention_case(5, DECODES, 4, 2)
    with pytest.raises(ValueError, match="sliding windows or soft caps; use 'triton'"):
        SimpleTritonBackend().forward(
            case.q, case.k, case.v, case.kv_cache, case.metadata, case.scale, **option
        )


def llm(checkpoint, **options) -> LLM:
    return LLM(
        str(checkpoint),
        device="cpu",
        dtype="float32",
        attention_backend="triton_simple",
        check_invariants=True,
        **({"num_kv_blocks": 64} | options),
    )


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 12, "max_num_seqs": 4}])
def test_tokens_of_transformers(options, tmp_path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    expected = [reference_tokens(str(checkpoint), prompt, OUTPUT_LEN) for prompt in prompts()]
    engine = llm(checkpoint, **options)
    assert isinstance(engine.engine.core.runner.forward.backend, SimpleTritonBackend)
    assert greedy(engine, prompts(), OUTPUT_LEN) == expected


@pytest.mark.parametrize(
    ("variant", "options", "lacks"),
    [
        ("mistral-window", {}, "sliding windows"),
        ("gemma2", {}, "sliding windows or soft caps"),
        ("deepseek-v2-dense", {}, "latent attention"),
        ("llama", {"kv_cache_dtype": "int8"}, "a quantized KV cache"),
    ],
)
def test_a_model_that_needs_more_is_refused(variant, options, lacks, tmp_path) -> None:
    checkpoint = make_checkpoint(tmp_path, variant)
    with pytest.raises(ValueError, match=f"does not support {lacks}; use 'triton'"):
        llm(checkpoint, **options)
