"""The bottleneck that a summary names: more of it helps, and more of the others does not."""

from __future__ import annotations

import pytest

from nanovllm.data.errors import UsageError
from nanovllm.simulate.report import Summary
from nanovllm.simulate.simulation import simulate

MANY: dict[str, object] = {"num_prompts": 150, "request_rate": 40.0}
SHARED_PREFIXES: dict[str, object] = {
    "num_prompts": 150,
    "request_rate": 3.0,
    "num_prefixes": 20,
    "random_prefix_len": 30_000,
    "random_input_len": 100,
    "num_kv_blocks": 8000,
}
LONG = MANY | {"random_input_len": 2000}


def ttft(summary: Summary) -> float:
    value = summary["mean_ttft_ms"]
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize(
    ("name", "settings", "more", "others"),
    [
        (
            "KV memory",
            LONG | {"num_kv_blocks": 700},
            {"num_kv_blocks": 1400},
            {"max_num_seqs": 512},
        ),
        (
            "max_num_seqs",
            MANY | {"max_num_seqs": 4},
            {"max_num_seqs": 8},
            {"num_kv_blocks": 58_412, "max_num_batched_tokens": 16_384},
        ),
        (
            "mlp (FLOPs)",
            LONG | {"random_output_len": 8},
            {"machine": "B200"},
            {"max_num_seqs": 512, "num_kv_blocks": 58_412},
        ),
        ("prefill: mlp (FLOPs)", LONG | {"prefill": 1, "decode": 1}, {"prefill": 2}, {"decode": 2}),
        (
            "decode: max_num_seqs",
            MANY | {"prefill": 2, "decode": 1, "decode_config": '{"max_num_seqs": 4}'},
            {"decode_config": '{"max_num_seqs": 8}'},
            {"prefill": 4},
        ),
        (
            "store",
            SHARED_PREFIXES | {"kv_store_size": 1000.0, "kv_store_bandwidth": 1.0},
            {"kv_store_bandwidth": 2.0},
            {"machine": "H200", "max_num_seqs": 512},
        ),
        (
            "host link",
            SHARED_PREFIXES | {"kv_offloading_size": 200.0, "kv_offloading_bandwidth": 2.0},
            {"kv_offloading_bandwidth": 4.0},
            {"machine": "H200", "max_num_seqs": 512},
        ),
        (
            "KV link",  # 12.5 GB/s, for the prompts of 16 devices
            LONG
            | {"num_prompts": 300, "request_rate": 100.0, "random_output_len": 2}
            | {"prefill": 2, "prefill_config": '{"tensor_parallel_size": 8}'}
            | {"decode": 1, "decode_config": '{"machine": "L40S"}'},
            {"decode": 2},
            {"prefill": 4},
        ),
    ],
)
def test_more_of_the_bottleneck_helps(
    name: str, settings: dict[str, object], more: dict[str, object], others: dict[str, object]
) -> None:
    plain = simulate(settings)
    assert plain["bottleneck"] == name
    assert ttft(simulate(settings | more)) < 0.7 * ttft(plain)
    for setting, value in others.items():
        assert ttft(simulate(settings | {setting: value})) > 0.85 * ttft(plain), setting


def test_without_requests_that_wait_the_step_counts() -> None:
    assert simulate({"num_prompts": 20, "request_rate": 1.0})["bottleneck"] == "mlp (bytes)"
    apart = {"num_prompts": 20, "request_rate": 1.0, "prefill": 1, "decode": 1}
    assert simulate(apart)["bottleneck"] == "decode: mlp (bytes)"


def test_nothing_limits_a_fleet_that_has_computed_nothing() -> None:
    with pytest.raises(UsageError, match="has no room"):
        simulate(MANY | {"kv_store_size": 1e-9})
    rejected = simulate({"num_prompts": 2, "random_input_len": 100_000, "max_model_len": 2048})
    assert rejected["outcomes"] == {"rejected": 2}
    assert rejected["bottleneck"] == "none"
