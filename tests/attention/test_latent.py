"""Latent attention: against float64, against transformers with every feature, on several ranks, and
YaRN's numbers.

The Triton kernel is tested in tests/attention/interpreted/test_latent.py, tokens of transformers in
test_against_transformers.py."""

from __future__ import annotations

import importlib.util
import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm import LLM
from nanovllm.attention import latent
from nanovllm.attention.backends import get_backend
from nanovllm.attention.base import ForwardContext, forward_context
from nanovllm.attention.latent import (
    LatentShape,
    TorchLatentBackend,
    absorb,
    alike,
    attend_absorbed,
    attend_expanded,
    expand,
    latent_cache_shape,
)
from nanovllm.distributed.groups import Grid, get_tp_group
from nanovllm.lab.cases import latent_case
from nanovllm.lab.course.ranks import run_ranks
from nanovllm.layers.tensor_parallel import parallelize
from nanovllm.models.config import ModelConfig, UnsupportedModelError
from nanovllm.models.llama import rotary_table
from nanovllm.models.loader import load_model
from nanovllm.models.yarn import yarn_frequencies
from nanovllm.ops.attention import attend_dense
from tests.engine.test_features import FEATURES
from tests.examples import examples
from tests.oracle import VARIANTS, greedy, make_checkpoint, reference_model, reference_tokens
from tests.stand_ins import set_constants

DECODES = [(1, 127), (1, 16), (1, 0), (1, 60), (1, 300)]
MIXED = [(40, 0), (2, 70), (1, 33), (0, 5), (5, 20), (1, 0), (50, 70)]
BACKENDS = [TorchLatentBackend()]


def attend_naive(q: Tensor, rows: Tensor, up: Tensor, scale: float) -> Tensor:
    """Ordinary attention of the last tokens of a sequence over expanded keys and values, in float32
    at least."""
    rope = rows.shape[1] - up.shape[2]
    return attend_dense(q, *expand(rows, up, q.shape[2] - rope), scale)


# ---------------------------------------------------------------- the backends


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sequences", [DECODES, MIXED, [(70, 0)], [(3, 200)]], ids=str)
def test_backends_against_float64(backend, dtype, sequences) -> None:
    case = latent_case(1, sequences, dtype=dtype, padding_rows=2)
    error, cache_error = case.errors(backend)
    assert error < case.tolerance and cache_error == 0


@settings(max_examples=examples(40), derandomize=True)
@given(
    sequences=st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 200)), min_size=1, max_size=8
    ).filter(lambda lengths: any(query for query, _ in lengths)),
    num_heads=st.sampled_from([1, 4, 7]),
    sizes=st.sampled_from([(32, 8, 16, 12), (16, 2, 24, 30)]),
    block_size=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 1000),
)
def test_any_batch(sequences, num_heads, sizes, block_size, seed) -> None:
    case = latent_case(seed, sequences, num_heads, *sizes, block_size=block_size)
    for backend in BACKENDS:
        error, cache_error = case.errors(backend)
        assert error < case.tolerance and cache_error == 0


@pytest.mark.parametrize(("query_len", "seq_len"), [(1, 1), (1, 90), (7, 90), (90, 90)])
def test_naive_is_absorbed(query_len: int, seq_len: int) -> None:
    """In float64, three ways of computing differ by nothing but its rounding."""
    torch.manual_seed(0)
    q, rows, up = (
        torch.randn(size, dtype=torch.float64)
        for size in ((query_len, 4, 24), (seq_len, 40), (4, 28, 32))
    )
    naive, *others = (
        way(q, rows, up, 0.2) for way in (attend_naive, attend_absorbed, attend_expanded)
    )
    for other in others:
        torch.testing.assert_close(other, naive, atol=1e-10, rtol=1e-10)


def test_long_contexts_are_expanded_for_some_heads_at_a_time(monkeypatch) -> None:
    torch.manual_seed(0)
    q, rows, up = (
        torch.randn(size, dtype=torch.float64) for size in ((30, 5, 24), (90, 40), (5, 28, 32))
    )
    expanded, whole = [], latent.expand
    set_constants(monkeypatch, latent, EXPANDED_AT_ONCE=2 * 90 * (16 + 8 + 12) + 1)
    monkeypatch.setattr(
        latent, "expand", lambda rows, up, nope: expanded.append(len(up)) or whole(rows, up, nope)
    )
    torch.testing.assert_close(attend_expanded(q, rows, up, 0.2), attend_naive(q, rows, up, 0.2))
    assert expanded == [2, 2, 1]


def test_the_way_that_takes_fewer_operations() -> None:
    """DeepSeek-V3's sizes: a whole prompt expands, a decode does not, and between them the context
    decides."""
    shape = LatentShape(num_heads=128, nope=128, rope=64, v=128, rank=512)
    assert shape.prefers_naive(4096, 4096) and shape.prefers_naive(512, 32768)
    assert not shape.prefers_naive(1, 1) and not shape.prefers_naive(1, 10**6)
    assert not shape.prefers_naive(64, 8192)
    # Counted by hand, in products of two numbers per head.
    for sizes in (shape, LatentShape(num_heads=1, nope=2, rope=1, v=3, rank=4)):
        up, wide = sizes.rank * (sizes.nope + sizes.v), 2 * sizes.rank + sizes.rope
        for query_len, seq_len in ((2, 3), (3, 3), (160, 8192), (180, 8192), (100, 200)):
            pairs = sum(seq_len - i for i in range(query_len))
            naive = seq_len * up + pairs * (sizes.nope + sizes.rope + sizes.v)
            assert sizes.prefers_naive(query_len, seq_len) == (
                naive < query_len * up + pairs * wide
            )


def test_absorbing_leaves_the_rotated_channels() -> None:
    q, up = torch.randn(3, 4, 24), torch.randn(4, 28, 32)
    assert torch.equal(absorb(q, up, 8)[:, :, 32:], q[:, :, 16:])


@given(st.lists(st.integers(1, 2000), max_size=40), st.integers(100, 5000))
def test_groups_of_alike_lengths(lengths: list[int], most: int) -> None:
    groups = alike(lengths, most)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest, shortest = max(lengths[i] for i in group), min(lengths[i] for i in group)
        assert longest <= 1.5 * shortest + 16
        assert len(group) == 1 or longest * len(group) <= most


def test_backends_by_name() -> None:
    device = torch.device("cpu")
    for name in ("auto", "torch", "cpu"):
        assert isinstance(get_backend(name, device, latent=True), TorchLatentBackend)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton on this platform")
def test_the_kernels_are_among_those_that_are_compiled_for_absent_gpus() -> None:
    from nanovllm.lab import kernel_launches
    from nanovllm.lab.kernel_compiler import TARGETS, record_launches

    launches = record_launches(
        lambda: kernel_launches.launch_latent_attention("bfloat16", TARGETS["sm_90"])
    )
    names = {launch.function.__name__ for launch in launches}
    assert names == {"write_kv_kernel", "latent_attention_kernel", "combine_kernel"}
    decodes = [
        launch.constants
        for launch in launches
        if launch.function.__name__ == "latent_attention_kernel"
    ]
    for rope, rank in kernel_launches.LATENT_SIZES:
        heads = {
            constants["NUM_HEADS"]
            for constants in decodes
            if (constants["ROPE"], constants["HEAD_DIM"]) == (rope, rank)
        }
        assert heads == set(kernel_launches.LATENT_HEADS)
    assert {constants["NUM_SPLITS"] for constants in decodes} >= {4, 8, 16, 32, 64}


def test_a_dummy_step_sees_nothing() -> None:
    """What a rank computes that takes part in a step of others: one token, written nowhere, of a
    sequence of none."""
    case = latent_case(0, [(1, 0)])
    case.metadata.seq_lens.zero_()
    case.metadata.slot_mapping.fill_(-1)
    for backend in BACKENDS:
        cache = case.kv_cache.clone()
        out = backend.forward(case.q, case.latent, case.up, cache, case.metadata, case.scale)
        assert out.shape == (1, 4, 12) and (out == 0).all() and cache.isnan().all()


# ---------------------------------------------------------------- the engine

CHOSEN = (
    "no prefix cache",
    "whole prompts",
    "chunks of 7",
    "budget of 12",
    "static",
    "recompute",
    "swap",
    "blocks of 4",
    "cpu backend",
    "async scheduling",
    "n",
    "reverse",
)


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    shared = [draw.randrange(3, 320) for _ in range(37)]
    alone = [[draw.randrange(3, 320) for _ in range(length)] for length in (1, 5, 16, 33, 70)]
    return [
        *alone,
        *(shared + [draw.randrange(3, 320) for _ in range(length)] for length in (1, 12, 27)),
        shared,
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("latent"), "deepseek-v3"))


@pytest.fixture(scope="module")
def expected(checkpoint) -> list[list[int]]:
    return [reference_tokens(checkpoint, prompt, 14) for prompt in prompts()]


@pytest.mark.parametrize("feature", CHOSEN)
def test_features_change_no_token(feature: str, checkpoint: str, expected: list[list[int]]) -> None:
    options: dict[str, Any] = {"attention_backend": "torch", "block_size": 16} | FEATURES[feature]
    n, reverse = options.pop("n", 1), options.pop("reverse", False)
    options["num_kv_blocks"] = options.pop("pool", 2048) // options["block_size"]
    llm = LLM(checkpoint, dtype="float32", max_model_len=120, check_invariants=True, **options)
    order = -1 if reverse else 1
    for _ in range(2):  # the second run meets what the first one left in the cache
        tokens = greedy(llm, prompts()[::order], 14, **({"n": n} if n > 1 else {}))[::order]
        assert tokens == expected
    stats = llm.engine.core.stats
    assert (stats.num_hit_tokens > 0) == (feature != "no prefix cache")
    assert (stats.num_preemptions > 0) == (feature in ("recompute", "swap"))


def test_the_cache_is_as_small_as_promised(checkpoint: str) -> None:
    """32 + 8 numbers a token and layer, where four heads of keys and values would take 4 * (24 +
    12)."""
    llm = LLM(checkpoint, dtype="float32", num_kv_blocks=8, block_size=16)
    runner = llm.engine.core.executor.runner
    assert [tuple(cache.shape) for cache in runner.kv_caches] == [(8, 16, 40)] * 3
    assert runner.bytes_per_block == 3 * 16 * 40 * 4 == runner.kv_caches[0][0].nbytes * 3


# ---------------------------------------------------------------- ranks


def forward_on_a_rank(
    folder: str, tokens: list[int]
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...], dict[str, int]]:
    """(logits, cache of the last layer, shape of a rank's up-projection, calls of collectives) of
    one prompt."""
    config = ModelConfig.from_pretrained(folder)
    model = load_model(folder, config, torch.float32, max_positions=64, transforms=[parallelize])
    case = latent_case(0, [(len(tokens), 0)])  # for its metadata
    metadata = case.metadata
    shape = latent_cache_shape(len(case.kv_cache), 16, config.latent_width)
    for attention in model.attention_layers.values():
        assert attention.cache_shape(len(case.kv_cache), 16, TorchLatentBackend()) == shape
    caches = [torch.zeros(shape) for _ in range(config.num_layers)]
    get_tp_group().calls.clear()
    with (
        torch.inference_mode(),
        forward_context(ForwardContext(TorchLatentBackend(), caches, metadata)),
    ):
        logits = model.compute_logits(model(torch.tensor(tokens), torch.arange(len(tokens))))
    up = model.model.layers[0].self_attn.kv_b_proj.weight
    return logits, caches[-1], tuple(up.shape), dict(get_tp_group().calls)


# By day each model, and each number of ranks, once.
@pytest.mark.parametrize(
    ("variant", "tp"),
    [
        ("deepseek-v2-dense-yarn", 4),
        ("deepseek-v3", 2),
        pytest.param("deepseek-v2-dense-yarn", 2, marks=pytest.mark.nightly),
        pytest.param("deepseek-v3", 4, marks=pytest.mark.nightly),
    ],
)
def test_ranks_share_heads_and_repeat_the_cache(variant: str, tp: int, tmp_path) -> None:
    folder = str(make_checkpoint(tmp_path, variant))
    tokens = prompts()[4][:40]
    with torch.inference_mode():
        expected = reference_model(folder)(torch.tensor([tokens])).logits[0]
    results = run_ranks(forward_on_a_rank, Grid(tensor=tp), folder, tokens)
    for logits, cache, up_shape, calls in results:
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-4)
        assert torch.equal(cache, results[0][1])  # bit for bit
        assert up_shape == (4 // tp * 28, 32)
        # Two a layer, one for the embedding: attention's latent costs none.
        assert calls == {"all_reduce": 7, "all_gather": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        *(
            pytest.param({f"{kind}_parallel_size": 2}, marks=pytest.mark.nightly)
            for kind in ("tensor", "pipeline")
        ),
    ],
    ids=str,
)
def test_the_engine_over_ranks(options, checkpoint: str, expected: list[list[int]]) -> None:
    llm = LLM(
        checkpoint,
        dtype="float32",
        max_model_len=120,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        num_kv_blocks=64,
        check_invariants=True,
        **options,
    )
    try:
        assert greedy(llm, prompts(), 14) == expected
    finally:
        llm.engine.core.close()


# ---------------------------------------------------------------- configuration, YaRN


def config_of(variant: str, folder) -> dict[str, Any]:
    return json.loads((make_checkpoint(folder, variant) / "config.json").read_text())


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("deepseek")])
def test_rotary_tables_are_those_of_transformers(variant: str, tmp_path) -> None:
    folder = make_checkpoint(tmp_path, variant)
    table = rotary_table(ModelConfig.from_pretrained(folder), 100)
    theirs = reference_model(str(folder)).model.rotary_emb(torch.zeros(1), torch.arange(100)[None])
    if torch.is_tensor(theirs):  # V2: complex numbers
        expected = torch.cat([theirs[0].real, theirs[0].imag], dim=1)
    else:
        expected = torch.cat([part[0].chunk(2, dim=1)[0] for part in theirs], dim=1)
    torch.testing.assert_close(table, expected, atol=2e-6, rtol=2e-6)


def test_yarn_matters(tmp_path) -> None:
    """The tests against transformers would pass without YaRN if it changed nothing."""
    raw = config_of("deepseek-v2-dense-yarn", tmp_path)
    plain = dict(raw["rope_parameters"], rope_type="default")
    stretched, ordinary = (
        ModelConfig.from_dict(raw | {"rope_parameters": r}) for r in (raw["rope_parameters"], plain)
    )
    assert (rotary_table(stretched, 50) - rotary_table(ordinary, 50)).abs().max() > 0.1
    slow, fast = (
        yarn_frequencies(stretched),
        yarn_frequencies(ModelConfig.from_dict(raw | {"max_position_embeddings": 9})),
    )
    assert torch.equal(slow, fast)  # it depends on the original context alone


def test_deepseek_v3_as_on_the_hub() -> None:
    """The keys of its published config.json, as far as they are about attention."""
    raw = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    }
    config = ModelConfig.from_dict(raw)
    assert config.kv_elements_per_token == 61 * 576 and config.latent_width == 576
    assert (config.head_dim, config.num_kv_heads, config.q_lora_rank, config.rope_interleave) == (
        64,
        1,
        1536,
        True,
    )
    assert rotary_table(config, 4).shape == (4, 64)
    with pytest.raises(
        UnsupportedModelError, match=r"'longrope' is not supported; supported are default, yarn"
    ):
        ModelConfig.from_dict(raw | {"rope_scaling": {"type": "longrope"}})


def test_layers_that_predict_further_tokens_are_left_out(tmp_path) -> None:
    folder = make_checkpoint(tmp_path, "deepseek-v3-dense")
    model = load_model(folder, ModelConfig.from_pretrained(folder), torch.float32)
    assert model.checkpoint_name("model.layers.3.eh_proj.weight") is None
    places = model.checkpoint_places()
    assert model.checkpoint_name("model.layers.2.self_attn.kv_b_proj.weight") in places
    assert model.checkpoint_name("model.layers.2.eh_proj.weight") not in {None, *places}
