"""Flags of `nanovllm simulate` for fleets that fail, know little, run in lock-step or draft."""

from __future__ import annotations

import pytest

from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.simulate.plan import plan_fleet
from nanovllm.simulate.report import Summary
from nanovllm.simulate.roofline import Roofline
from nanovllm.simulate.settings import FleetConfig
from nanovllm.simulate.simulation import simulate
from nanovllm.simulate.workload import SECOND, Workload

FEW: dict[str, object] = {"num_prompts": 60, "request_rate": 30.0, "random_output_len": 64}

SHARED_EXPERTS: dict[str, object] = {
    "model": "deepseek-v3",
    "machine": "H200x8",
    "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
    "replicas": 4,
    "data_parallel_size": 4,
}


def run(**settings: object) -> Summary:
    return simulate(FEW | settings)


def number(summary: Summary, name: str) -> float:
    value = summary[name]
    assert isinstance(value, int | float)
    return value


def test_failures_and_a_cold_start() -> None:
    failing = run(replicas=2, failures=["0@0.5"])
    assert failing["outcomes"] == {"length": 54, "failed": 6}
    replaced = run(replicas=2, failures=["0@0.5"], cold_start=0.2)
    assert number(replaced, "mean_tpot_ms") < number(failing, "mean_tpot_ms")
    late = run(replicas=2, failures="1@0", cold_start=1.0)
    assert late["outcomes"] == {"length": 60}
    requests = [each["num_requests"] for each in late["replicas"]]  # type: ignore[attr-defined]
    assert requests[0] > 1.5 * requests[1]


def test_a_router_with_stale_metrics_is_slower() -> None:
    settings = {"replicas": 4, "routing_policy": "load", "request_rate": 120.0}
    sharp = run(**settings)
    stale = run(**settings, metrics_interval=1.0)
    assert number(sharp, "mean_e2el_ms") < number(stale, "mean_e2el_ms")


def test_weights_keep_prefixes_and_balance_load() -> None:
    settings = {
        "replicas": 4,
        "num_kv_blocks": 2401,
        "block_size": 128,
        "num_prompts": 300,
        "request_rate": 45.0,
        "num_prefixes": 60,
        "random_prefix_len": 6016,
        "random_output_len": 400,
        "routing_policy": "precise",
    }
    plain = run(**settings)
    weighted = run(**settings, routing_weights=["prefix:3", "kv:2", "queue:2"])
    blind = run(**settings, routing_weights="queue:1")
    assert number(weighted, "mean_ttft_ms") < 0.8 * number(plain, "mean_ttft_ms")
    assert number(weighted, "mean_ttft_ms") < 0.5 * number(blind, "mean_ttft_ms")
    hit_rates = [number(each, "prefix_cache_hit_rate") for each in (weighted, plain, blind)]
    assert hit_rates == sorted(hit_rates, reverse=True)


def test_lock_step_and_uneven_experts() -> None:
    even = run(**SHARED_EXPERTS)
    uneven = run(**SHARED_EXPERTS, expert_imbalance=0.5)
    assert number(uneven, "mean_tpot_ms") > 1.15 * number(even, "mean_tpot_ms")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_expert_parallel": True},  # the model has no experts
        {"model": "qwen3-30b-a3b"},  # each engine has all experts
        {"routing_policy": "load", "metrics_interval": 0.3},
        {"routing_policy": "precise", "routing_weights": ["prefix:3", "kv:2", "queue:2"]},
        {"async_scheduling": True},
        {"pipeline_parallel_size": 2},
    ],
)
def test_engines_that_share_no_experts_run_their_own_steps(settings: dict[str, object]) -> None:
    apart = run(replicas=4, **settings)
    grouped = run(replicas=4, data_parallel_size=4, **settings)
    assert "DP 4" in str(grouped["setup"])
    assert grouped | {"setup": ""} == apart | {"setup": ""}


def test_engines_that_share_no_experts_fail_together() -> None:
    together = run(replicas=4, data_parallel_size=2, failures="0@0.5")
    both = run(replicas=4, failures=["0@0.5", "1@0.5"])
    assert together | {"setup": ""} == both | {"setup": ""}
    assert together["outcomes"] != {"length": 60}


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_swapped_blocks_take_the_links_of_all_devices_to_host_memory(
    layout: dict[str, int],
) -> None:
    engine = EngineConfig("llama-3.1-8b", num_kv_blocks=500, preemption_mode="swap", **layout)
    plan = plan_fleet(FleetConfig(), engine)
    (simulated,) = plan.create_fleet(Workload("none", [], 16)).engines
    assert isinstance(plan.cost, Roofline)
    block_bytes = 16 * 32 * 2 * 8 * 128 * 2
    # In a pipeline, each stage takes an equal part of this time.
    seconds = block_bytes / layout.get("tensor_parallel_size", 1)
    seconds /= plan.cost.machine.host_link.bandwidth
    assert simulated.copy_time == pytest.approx(seconds * SECOND)


def test_the_time_of_swaps_depends_on_the_link() -> None:
    crowded = {"preemption_mode": "swap", "num_kv_blocks": 400, "random_input_len": 2000}
    usual = run(**crowded)
    assert number(usual, "num_preemptions") > 0
    quick, slow = (run(**crowded, kv_offloading_bandwidth=speed) for speed in (1e6, 0.1))
    assert number(quick, "mean_tpot_ms") < number(usual, "mean_tpot_ms")
    assert 1.4 * number(usual, "mean_tpot_ms") < number(slow, "mean_tpot_ms")


def test_accepted_drafts_save_steps() -> None:
    plain = run()
    drafting = run(spec_acceptance="0.8,0.6,0.4")
    slow = run(spec_acceptance="0.8,0.6,0.4", draft_time=1.0)
    assert number(drafting, "mean_tpot_ms") < 0.7 * number(plain, "mean_tpot_ms")
    assert number(drafting, "mean_tpot_ms") < number(slow, "mean_tpot_ms")


def test_drafts_on_decode_engines_and_in_fleets_that_fail() -> None:
    drafts = {"spec_acceptance": "0.8,0.6,0.4"}
    apart = {"prefill": 1, "decode": 2}
    plain = run(**apart)
    drafting = run(**apart, **drafts)
    assert drafting["outcomes"] == {"length": 60}
    assert drafting["num_transfers"] == plain["num_transfers"] == 60
    assert number(drafting, "mean_tpot_ms") < 0.6 * number(plain, "mean_tpot_ms")
    failing = {"replicas": 2, "failures": ["0@0.5"], "cold_start": 0.2}
    survived = run(**failing, **drafts)
    assert number(survived, "mean_tpot_ms") < 0.8 * number(run(**failing), "mean_tpot_ms")
    outcomes = survived["outcomes"]
    assert isinstance(outcomes, dict) and 0 < outcomes["failed"] < outcomes["length"]


def test_requests_that_verify_drafts_decode() -> None:
    """30,000 tokens in, 400 out: most of a step's time goes to the KV of its requests."""
    long: dict[str, object] = {
        "num_prompts": 40,
        "request_rate": 0.7,
        "random_input_len": 30_000,
        "random_output_len": 400,
    }
    plain = simulate(long)
    drafting = simulate({**long, "spec_acceptance": "0.8,0.6,0.4"})
    assert plain["bottleneck"] == drafting["bottleneck"] == "attention (bytes)"
    drafts = number(drafting, "spec_decode_num_draft_tokens")
    accepted = number(drafting, "spec_decode_num_accepted_tokens")
    assert accepted / drafts == pytest.approx(0.6, abs=0.03)
    for summary, num_accepted in ((plain, 0.0), (drafting, accepted)):
        (replica,) = summary["replicas"]  # type: ignore[attr-defined]
        num_decodes = replica["mean_num_decodes"] * replica["num_steps"]
        # All tokens but the first of each request.
        assert num_decodes + num_accepted == pytest.approx(40 * 399)
    assert not any(name.startswith("spec_decode") for name in plain)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"failures": ["1@3"]}, "--failures must be an engine from 0 to 0"),
        ({"failures": ["0"]}, "such as 0@60, got '0'"),
        ({"prefill": 1, "decode": 1, "failures": ["2@1"]}, "an engine from 0 to 1"),
        ({"prefill": 2, "decode": 1, "data_parallel_size": 2}, "--decode must be a multiple of"),
        ({"spec_acceptance": "0.3,0.5"}, "do not increase"),
        ({"spec_acceptance": "x"}, "such as 0.8,0.6,0.4, got 'x'"),
        ({"replicas": 3, "data_parallel_size": 2}, "multiple of --data-parallel-size 2, got 3"),
        (SHARED_EXPERTS | {"async_scheduling": True}, "cannot be combined with --async-scheduling"),
        ({"expert_imbalance": 0.5}, "--expert-imbalance needs engines that share experts"),
        (
            {"replicas": 2, "data_parallel_size": 2, "expert_imbalance": 0.5},
            "--expert-imbalance needs engines that share experts",
        ),
        (
            {"model": "qwen3-30b-a3b", "data_parallel_size": 2, "replicas": 2}
            | {"expert_imbalance": 0.5},
            "--expert-imbalance needs engines that share experts",
        ),
    ],
)
def test_mistakes(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(**settings)
