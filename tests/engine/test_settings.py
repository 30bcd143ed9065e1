"""Settings: what the user gave, which never changes, and what is decided from it."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.data.config import EngineConfig
from nanovllm.data.resolved_config import ResolvedConfig, resolve


@pytest.mark.parametrize(
    ("options", "model_len", "blocks", "expected"),
    [
        ({}, 256, 100, (256, 256, 2048)),
        ({}, 256, 10, (256, 160, 2048)),
        ({"max_model_len": 100}, 256, 100, (100, 100, 2048)),
        ({"max_num_batched_tokens": 300}, 256, 100, (256, 256, 300)),
        ({"enable_chunked_prefill": False}, 9000, 1000, (9000, 9000, 9000)),
        ({"enable_chunked_prefill": False}, 9000, 500, (9000, 8000, 8000)),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 9000},
            9000,
            500,
            (9000, 8000, 9000),
        ),
    ],
)
def test_sizes_that_are_left_open(
    options: dict[str, Any], model_len: int, blocks: int, expected: tuple[int, int, int]
) -> None:
    found = resolve(EngineConfig(**options), model_max_len=model_len, num_kv_blocks=blocks)
    assert (found.max_model_len, found.max_request_tokens, found.token_budget) == expected
    assert (found.num_kv_blocks, found.num_host_blocks) == (blocks, 0)


@pytest.mark.parametrize(
    ("options", "on_gpu", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"async_scheduling": True}, False, True),
        ({"async_scheduling": False}, True, False),
        ({"pipeline_parallel_size": 2}, True, False),
    ],
)
def test_whether_steps_are_prepared_ahead(
    options: dict[str, Any], on_gpu: bool, expected: bool
) -> None:
    config = EngineConfig(**options)
    found = resolve(config, model_max_len=256, num_kv_blocks=100, on_gpu=on_gpu)
    assert found.async_scheduling is expected


@pytest.mark.parametrize(
    ("options", "num_samples", "decodes"),
    [
        ({}, 256, 256),
        ({"max_num_seqs": 3000}, 2048, 2048),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 20}, 8, 8),
        ({"max_num_seqs": 8, "speculative_config": {"method": "ngram"}}, 72, 72),
        ({"max_num_seqs": 100, "speculative_config": {"method": "ngram"}}, 900, 256),
        ({"max_num_seqs": 400, "speculative_config": {"method": "ngram"}}, 2048, 400),
    ],
)
def test_the_largest_steps(options: dict[str, Any], num_samples: int, decodes: int) -> None:
    found = resolve(EngineConfig(**options), model_max_len=256, num_kv_blocks=100)
    assert (found.max_num_samples, found.max_decodes) == (num_samples, decodes)


@pytest.mark.parametrize("field", dataclasses.fields(EngineConfig), ids=lambda field: field.name)
def test_what_the_user_gave_is_frozen(field: dataclasses.Field[Any]) -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field.name, getattr(config, field.name))


@pytest.mark.parametrize("name", ["kv_transfer", "structured_outputs", "speculative", "anything"])
def test_what_is_parsed_is_frozen_too(name: str) -> None:
    config = EngineConfig(kv_role="kv_both", speculative_config='{"method": "ngram"}')
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, None)
    for parsed in (config.kv_transfer, config.structured_outputs, config.speculative):
        assert parsed is not None
        for field in dataclasses.fields(parsed):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(parsed, field.name, None)


def test_what_was_decided_is_frozen() -> None:
    found = resolve(EngineConfig(), model_max_len=256, num_kv_blocks=100)
    for field in dataclasses.fields(ResolvedConfig):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(found, field.name, None)


def test_a_decision_leaves_no_trace_in_what_was_given() -> None:
    config = EngineConfig(enable_chunked_prefill=False)
    found = resolve(config, model_max_len=4096, num_kv_blocks=100, on_gpu=True)
    assert found.given is config and config == EngineConfig(enable_chunked_prefill=False)
    assert resolve(config, model_max_len=8192, num_kv_blocks=1000).max_request_tokens == 8192


def test_values_in_another_form() -> None:
    config = EngineConfig(
        model=pathlib.Path("folder"),  # type: ignore[arg-type]
        quantization="gptq_marlin",
        max_model_len="auto",  # type: ignore[arg-type]
        speculative_config={"method": "ngram"},  # type: ignore[arg-type]
        swap_space=2,
    )
    assert (config.model, config.quantization, config.max_model_len) == ("folder", "gptq", None)
    assert config.speculative_config == '{"method": "ngram"}'
    assert isinstance(config.swap_space, float)
    for copy in (dataclasses.replace(config), pickle.loads(pickle.dumps(config))):
        assert copy == config and copy.speculative == config.speculative


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
def test_a_changed_copy_is_what_the_user_would_have_given(
    options: dict[str, Any], changes: dict[str, Any]
) -> None:
    config = EngineConfig(**options)
    resolve(config, model_max_len=8192, num_kv_blocks=300, on_gpu=True)
    assert dataclasses.replace(config, **changes) == EngineConfig(**options | changes)


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
    """After an engine has started, the settings are still what the user gave: a copy leaves open
    what they left open, and another engine decides anew."""
    options: dict[str, Any] = {"attention_backend": "torch", "dtype": "float32"}
    llm = LLM(str(tiny_model), enable_chunked_prefill=False, num_kv_blocks=8, **options)
    first = llm.engine.core.resolved
    assert (first.max_model_len, first.max_request_tokens, first.token_budget) == (256, 128, 2048)
    copy = dataclasses.replace(llm.engine.config, num_kv_blocks=200, max_num_seqs=7)
    assert (copy.max_model_len, copy.async_scheduling, copy.max_num_batched_tokens) == (None,) * 3
    second = resolve(copy, model_max_len=256, num_kv_blocks=200)
    assert (second.max_request_tokens, second.max_num_samples) == (256, 7)
    (answer,) = llm.generate("abc", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 2
