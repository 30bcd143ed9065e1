"""Settings: what the user gave, what the engine fills in, and copies of both."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.data.config import EngineConfig

FILLED_IN = ("max_model_len", "async_scheduling", "token_budget", "max_request_tokens")


def filled_in(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in FILLED_IN}


def settled(*sizes: Any, **options: Any) -> EngineConfig:
    config = EngineConfig(**options)
    config.settle(*sizes)
    return config


@pytest.mark.parametrize(
    "options",
    [{}, {"max_model_len": 1000}, {"enable_chunked_prefill": False}, {"async_scheduling": False}],
)
@pytest.mark.parametrize("sizes", [(4096, 100, False), (4096, 1000, True)])
def test_a_copy_of_settled_settings_is_settled(
    options: dict[str, Any], sizes: tuple[int, int, bool]
) -> None:
    config = settled(*sizes, **options)
    for copy in (
        dataclasses.replace(config),
        dataclasses.replace(dataclasses.replace(config, model="other")),
        pickle.loads(pickle.dumps(config)),
    ):
        assert filled_in(copy) == filled_in(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_model_len": 320},
        {"enable_chunked_prefill": False},
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 512},
        {"max_model_len": None},
    ],
)
@pytest.mark.parametrize("options", [{}, {"max_model_len": 2000}])
def test_a_changed_copy_is_what_the_user_would_have_got(
    options: dict[str, Any], changes: dict[str, Any]
) -> None:
    sizes = 8192, 300, True
    copy = dataclasses.replace(settled(*sizes, **options), **changes)
    assert filled_in(copy) == filled_in(settled(*sizes, **options | changes))


def test_settings_may_be_settled_again() -> None:
    """For another model, as if they had never been settled."""
    config = settled(4096, 100, True)
    config.settle(8192, 1000)
    assert filled_in(config) == filled_in(settled(8192, 1000))


def test_a_copy_keeps_the_engines_name() -> None:
    config = EngineConfig(kv_role="kv_both")
    assert config.kv_transfer is not None and config.kv_transfer.engine_id
    copy = dataclasses.replace(config, model="other")
    assert (
        copy.kv_transfer is not None and copy.kv_transfer.engine_id == config.kv_transfer.engine_id
    )
    rank = dataclasses.replace(config, data_parallel_size=2, data_parallel_rank=1)
    assert (
        rank.kv_transfer is not None
        and rank.kv_transfer.engine_id == f"{config.kv_transfer.engine_id}-1"
    )
    other = EngineConfig(kv_role="kv_both")
    assert (
        other.kv_transfer is not None
        and other.kv_transfer.engine_id != config.kv_transfer.engine_id
    )
    given = dataclasses.replace(config, kv_transfer_config='{"engine_id": "mine"}')
    assert given.kv_transfer is not None and given.kv_transfer.engine_id == "mine"


def test_an_engines_settings_can_be_copied_for_another_engine(tiny_model: pathlib.Path) -> None:
    options: dict[str, Any] = {"attention_backend": "torch", "dtype": "float32", "num_kv_blocks": 8}
    llm = LLM(str(tiny_model), enable_chunked_prefill=False, **options)
    copy = dataclasses.replace(llm.engine.config, seed=1)
    assert filled_in(copy) == filled_in(llm.engine.config)
    assert copy.max_request_tokens == 128 and copy.token_budget == 2048
    (answer,) = llm.generate("abc", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 2
