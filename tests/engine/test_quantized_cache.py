"""A KV cache in 8 bits: the tokens of `transformers` with keys and values rounded alike, and the
same ones whatever the engine does."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from nanovllm import LLM
from nanovllm.assembly.memory import num_blocks_that_fit
from nanovllm.data.config import EngineConfig
from nanovllm.ops import native
from tests.engine.test_batch_invariance import POOL, SCENARIOS, generate
from tests.engine.test_batch_invariance import prompts as long_prompts
from tests.engine.test_features import prompts
from tests.ops.test_quantized_cache import nearest
from tests.oracle import greedy, make_checkpoint, reference_model
from tests.pairwise import half_by_day, in_turn

COUNT = 14
KINDS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 120,
    "num_kv_blocks": 128,
    "check_invariants": True,
}


class RoundingCache(DynamicCache):
    """transformers' cache, whose keys and values have been through 8 bits: by numpy, without the
    engine's code."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def rounded(self, x: Tensor) -> Tensor:
        kind, largest = KINDS[self.kind]
        absmax = x.abs().amax(-1, keepdim=True)
        scaled = x * (torch.full_like(absmax, largest) / absmax)
        return torch.from_numpy(nearest(scaled.double().numpy(), kind)).float() * (absmax / largest)

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **options: Any
    ) -> Any:
        return super().update(
            self.rounded(key_states), self.rounded(value_states), *arguments, **options
        )


@torch.inference_mode()
def checked(folder: str, kind: str) -> list[list[int]]:
    """The tokens of a plain engine, each of which transformers would choose, too, over such a
    cache."""
    found = greedy(LLM(folder, kv_cache_dtype=kind, **OPTIONS), prompts(), COUNT)
    for prompt, tokens in zip(prompts(), found, strict=True):
        ids, cache = torch.tensor([prompt + tokens[:-1]]), RoundingCache(kind)
        logits = reference_model(folder)(ids, past_key_values=cache, logits_to_keep=COUNT).logits[0]
        assert tokens == logits.argmax(-1).tolist()
    return found


@pytest.fixture(scope="module")
def expected(tiny_model: pathlib.Path) -> dict[str, list[list[int]]]:
    return {kind: checked(str(tiny_model), kind) for kind in KINDS}


# What the engine does, and with how many ranks.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "torch": {"attention_backend": "torch"},
    "chunks of 1": {"long_prefill_token_threshold": 1},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "whole prompts": {"enable_chunked_prefill": False},
    "no prefix cache": {"enable_prefix_caching": False},
    "recompute": {"num_kv_blocks": 8},
    "swap": {"num_kv_blocks": 8, "preemption_mode": "swap", "swap_space": 0.01},
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 2048},
    "blocks of 64": {"block_size": 64},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "host memory": {"kv_offloading_size": 0.01, "num_kv_blocks": 12},
    "another name": {},
}
NAMES = {"int8": "int8_per_token_head", "fp8": "fp8_e4m3"}  # vLLM's


# By day each engine with one of the kinds, in turn.
@pytest.mark.parametrize(("engine", "kind"), in_turn(ENGINES, KINDS))
def test_tokens(
    engine: str, kind: str, tiny_model: pathlib.Path, expected: dict[str, list[list[int]]]
) -> None:
    name = NAMES[kind] if engine == "another name" else kind
    llm = LLM(str(tiny_model), kv_cache_dtype=name, **(OPTIONS | ENGINES[engine]))
    try:
        for _ in range(2):  # the second run meets what the first one left in the cache
            assert greedy(llm, prompts(), COUNT) == expected[kind]
        stats = llm.engine.core.stats
        assert (stats.num_hit_tokens > 0) == (engine != "no prefix cache")
        assert (stats.num_preemptions > 0) == (engine in ("recompute", "swap", "host memory"))
        assert (stats.num_external_hit_tokens > 0) == (engine == "host memory")
    finally:
        llm.engine.core.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "variant", ["qwen3", "mistral-window", "gemma2", "llama-head-dim", "mixtral"]
)
def test_other_models(variant: str, kind: str, tmp_path: pathlib.Path) -> None:
    """Norms of keys, windows, a cap on scores and heads of 256, heads that fill no vector,
    experts."""
    assert len(checked(str(make_checkpoint(tmp_path, variant)), kind)) == len(prompts())


def test_rounding_changes_tokens(
    tiny_model: pathlib.Path, expected: dict[str, list[list[int]]]
) -> None:
    """Or else the tests above would prove nothing."""
    assert (
        expected["fp8"]
        != greedy(LLM(str(tiny_model), **OPTIONS), prompts(), COUNT)
        != expected["int8"]
    )


# ---------------------------------------------------------------- to the last bit


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("long"), "llama-long"))


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, long_model: str) -> tuple[str, str, dict[int, Any]]:
    """What each prompt yields in an engine that has computed nothing else."""
    kind, dtype = request.param
    values: dict[int, Any] = {}
    for index in range(len(long_prompts())):
        values |= generate(long_model, dtype, [[index]], kv_cache_dtype=kind)[1]
    return kind, dtype, values


# By day each kind in every second scenario: the tokens above have been in all.
IN_COMPANY = half_by_day(
    [("int8", "bfloat16"), ("fp8", "float32")],
    [name for name in SCENARIOS if name != "async scheduling"],
)


@pytest.mark.skipif(
    not native.is_available(), reason="torch's products depend on the number of rows"
)
@pytest.mark.parametrize(("alone", "scenario"), IN_COMPANY, indirect=["alone"], ids=str)
def test_values_are_those_of_a_request_alone(
    scenario: str, long_model: str, alone: tuple[str, str, dict[int, Any]]
) -> None:
    kind, dtype, values = alone
    every = list(range(len(values)))
    llm, found = generate(
        long_model, dtype, [every, every[::-1]], kv_cache_dtype=kind, **SCENARIOS[scenario]
    )
    assert found == values
    assert llm.engine.core.runner.kv_caches[0].dtype == KINDS[kind][0]
    assert (llm.engine.core.stats.num_preemptions > 0) == ("pool" in SCENARIOS[scenario])
    assert POOL > 1024


# ---------------------------------------------------------------- memory, and what is refused


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_memory_holds_more_blocks(kind: str, tiny_model: pathlib.Path) -> None:
    """A token of a head takes 16 numbers here: 32 bytes in bfloat16, and 20 with a scale."""
    cores = [
        LLM(
            str(tiny_model), dtype="bfloat16", kv_cache_memory="1MiB", kv_cache_dtype=each
        ).engine.core
        for each in ("auto", kind)
    ]
    runners = [core.runner for core in cores]
    counts = [num_blocks_that_fit(core.runner, core.config, core.model_config) for core in cores]
    sizes = [sum(cache[0].nbytes for cache in runner.kv_caches) for runner in runners]
    assert [runner.bytes_per_block for runner in runners] == sizes
    assert sizes == [3 * 2 * 2 * 16 * row for row in (32, 20)] and counts == [
        2**20 // size for size in sizes
    ]
    assert [len(runner.kv_caches[0]) for runner in runners] == counts


def test_what_is_refused(tmp_path: pathlib.Path, tiny_model: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"latent attention .*do not set kv_cache_dtype"):
        LLM(
            str(make_checkpoint(tmp_path, "deepseek-v2-dense")),
            kv_cache_dtype="int8",
            num_kv_blocks=8,
        )
    with pytest.raises(ValueError, match=r"kv_connector blend cannot rotate .*quantized keys"):
        LLM(
            str(tiny_model),
            kv_cache_dtype="fp8",
            num_kv_blocks=64,
            kv_role="both",
            kv_connector="blend",
        )
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of .*int8.*fp8"):
        EngineConfig(kv_cache_dtype="int4")
