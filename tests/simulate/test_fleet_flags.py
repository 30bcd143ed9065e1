"""Flags of `nanovllm simulate` for fleets that fail, know little, run in lock-step or draft."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.simulate.plan import plan_fleet
from nanovllm.simulate.report import Summary
from nanovllm.simulate.roofline import Roofline
from nanovllm.simulate.settings import FleetConfig
from nanovllm.simulate.simulation import simulate
from nanovllm.simulate.workload import SECOND, Workload

APART: dict[str, object] = {"prefill": 1, "decode": 2}
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
    uneven = run(**SHARED_EXPERTS, expert_imbalance=1.5)
    assert number(uneven, "mean_ttft_ms") > 1.15 * number(even, "mean_ttft_ms")


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
    (simulated,) = plan.create_fleet(Workload([], 16)).engines
    cost = plan.kinds[0].cost
    assert isinstance(cost, Roofline)
    block_bytes = 16 * 32 * 2 * 8 * 128 * 2
    # In a pipeline, each stage takes an equal part of this time.
    seconds = block_bytes / layout.get("tensor_parallel_size", 1)
    seconds /= cost.machine.host_link.bandwidth
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


def test_prefill_engines_do_not_draft_whatever_their_layout() -> None:
    """Drafts shorten outputs; prompts take as long as without."""
    staged = APART | {"prefill_config": '{"pipeline_parallel_size": 2}', "failures": "0@1"}
    plain = run(**staged)
    drafting = run(**staged, spec_acceptance="0.8,0.6,0.4")
    prefill = [each["replicas"][0] for each in (plain, drafting)]  # type: ignore[index]
    for name in ("num_requests", "num_steps"):
        assert prefill[0][name] == prefill[1][name]
    assert number(drafting, "mean_tpot_ms") < 0.7 * number(plain, "mean_tpot_ms")


def test_prefill_and_decode_with_layouts_of_their_own() -> None:
    """Settings that say the same change nothing; others change what their engines do alone."""
    plain = run(**APART)
    same = run(**APART, prefill_config='{"tensor-parallel-size": 1}', decode_config="{}")
    assert same == plain
    wide = run(**APART, prefill_config='{"tensor_parallel_size": 2}')
    assert "engines for prefill: 1 on H100, TP 2, PP 1" in str(wide["setup"])
    assert "engines for decode: 2 on H100, TP 1, PP 1" in str(wide["setup"])
    assert number(wide, "mean_ttft_ms") < 0.8 * number(plain, "mean_ttft_ms")
    assert number(wide, "mean_tpot_ms") == pytest.approx(number(plain, "mean_tpot_ms"), rel=0.02)
    # Four devices instead of three, at the same price per device.
    dollars = [
        number(each, "dollars_per_million_tokens") / number(each, "duration")
        for each in (wide, plain)
    ]
    assert dollars[0] == pytest.approx(dollars[1] * 4 / 3)
    small = run(**APART, decode_config='{"machine": "A100", "max_num_seqs": 4}')
    assert number(small, "mean_tpot_ms") > 1.5 * number(plain, "mean_tpot_ms")
    assert small["num_transferred_bytes"] == plain["num_transferred_bytes"]


def test_transfers_take_the_slower_of_both_links() -> None:
    """Four devices send and one receives, or the other way round: as many bytes, as many at once as
    the single device can."""
    one = run(**APART, request_rate=0.5)
    for wide in ("prefill_config", "decode_config"):
        uneven = run(**APART, request_rate=0.5, **{wide: '{"tensor_parallel_size": 4}'})
        assert uneven["num_transferred_bytes"] == one["num_transferred_bytes"]
        assert number(uneven, "mean_transfer_ms") == pytest.approx(number(one, "mean_transfer_ms"))
    both = run(**APART, request_rate=0.5, tensor_parallel_size=4)
    assert number(both, "mean_transfer_ms") < 0.3 * number(one, "mean_transfer_ms")


def test_experts_over_more_ranks_for_decode_than_for_prefill() -> None:
    """DeepSeek's production layout: 4 nodes for prefill, 18 for decode, 32 redundant experts."""
    summary = simulate(
        {
            "model": "deepseek-v3",
            "machine": "H800",
            "enable_expert_parallel": True,
            "enable_eplb": True,
            "eplb_config": '{"num_redundant_experts": 32}',
            "prefill": 32,
            "prefill_config": '{"data_parallel_size": 32}',
            "decode": 144,
            "decode_config": '{"data_parallel_size": 144, "max_num_seqs": 128}',
            "block_size": 64,
            "num_prompts": 500,
            "request_rate": 400.0,
            "random_input_len": 4000,
            "random_output_len": 20,
        }
    )
    setup = str(summary["setup"])
    assert "engines for prefill: 32 on H800, TP 1, PP 1, DP 32, EP, 32 redundant experts" in setup
    assert "engines for decode: 144 on H800, TP 1, PP 1, DP 144, EP, 32 redundant experts" in setup
    assert summary["outcomes"] == {"length": 500}
    replicas = summary["replicas"]
    assert isinstance(replicas, list) and len(replicas) == 176
    # The steps of a group are steps of all its engines.
    assert len({each["utilization"] for each in replicas[:32] if each["num_steps"]}) <= 3
    assert number(summary, "num_transfers") == 500


def test_drafts_of_engines_that_share_experts() -> None:
    plain = run(**SHARED_EXPERTS)
    drafting = run(**SHARED_EXPERTS, spec_acceptance="0.8,0.6")
    assert number(drafting, "mean_tpot_ms") < 0.8 * number(plain, "mean_tpot_ms")


def test_requests_that_verify_drafts_decode() -> None:
    """30,000 tokens in, 400 out: most of a step's time goes to the KV of its requests."""
    long: dict[str, object] = {
        "num_prompts": 40,
        "request_rate": 0.7,
        "random_input_len": 30_000,
        "random_output_len": 400,
        "num_kv_blocks": 30_000,  # nothing is preempted
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
        ({"expert_imbalance": 1.5}, "--expert-imbalance needs ranks that share experts"),
        (
            {"replicas": 2, "data_parallel_size": 2, "expert_imbalance": 1.5},
            "--expert-imbalance needs ranks that share experts",
        ),
        (
            {"model": "qwen3-30b-a3b", "data_parallel_size": 2, "replicas": 2}
            | {"expert_imbalance": 1.5},
            "--expert-imbalance needs ranks that share experts",
        ),
        (
            SHARED_EXPERTS | {"expert_imbalance": 8.1},
            "--expert-imbalance must be at most 8 with 8 ranks",
        ),
        (
            SHARED_EXPERTS | {"replicas": 32, "data_parallel_size": 32, "expert_imbalance": 33},
            "--expert-imbalance must be at most 32 with 64 ranks",
        ),
        ({"expert_imbalance": 0.5}, "expert_imbalance must be a finite number of at least 1"),
        ({"prefill_config": "{}"}, "--prefill-config has no effect without --prefill"),
        (APART | {"prefill_config": "tp=2"}, r"--prefill-config must be JSON such as .*got 'tp=2'"),
        (APART | {"decode_config": '{"block_size": 8}'}, "cannot have block_size, .* --block-size"),
        (
            APART | {"decode_config": '{"tensor_parallel": 2}'},
            r"--decode-config: no setting 'tensor_parallel'.*tensor_parallel_size",
        ),
        (
            APART | {"decode_config": '{"tensor_parallel_size": 3}'},
            "--decode-config: 32 attention heads, .* cannot be divided among 3 ranks",
        ),
        (
            APART | {"decode_config": '{"tensor_parallel_size": "two"}'},
            "--decode-config: tensor_parallel_size must be an integer",
        ),
        (
            APART | {"decode_config": '{"data_parallel_size": 3}'},
            "--decode must be a multiple of --data-parallel-size 3, got 2",
        ),
        (
            APART | {"prefill_config": '{"tensor_parallel_size": 2}', "kv_store_size": 10.0},
            "--kv-store-size needs prefill and decode engines with the same",
        ),
        (
            APART | {"decode_config": '{"enable_prefix_caching": false}', "kv_store_size": 10.0},
            "--kv-store-size needs --enable-prefix-caching",
        ),
        (
            {"model": "deepseek-v3", "machine": "H200", "enable_expert_parallel": True}
            | {"replicas": 12, "data_parallel_size": 12},
            "experts",
        ),
        ({"pipeline_parallel_size": 2, "spec_acceptance": "0.5"}, "--spec-acceptance cannot be"),
        (
            {"enable_eplb": True, "enable_expert_parallel": True},
            "--enable-eplb has no effect: llama-3.1-8b has no experts",
        ),
        (
            APART | {"model": "llama-3.1-70b", "prefill_config": '{"tensor_parallel_size": 4}'},
            "decode engines: llama-3.1-70b does not fit on H100: 65.6 GB per device",
        ),
        (
            APART
            | {"model": "llama-3.1-70b", "tensor_parallel_size": 4}
            | {"prefill_config": '{"tensor_parallel_size": 1}'},
            "--prefill-config: llama-3.1-70b does not fit on H100: 65.6 GB per device",
        ),
        (
            APART | {"decode_config": '{"pipeline_parallel_size": 2}', "spec_acceptance": "0.5"},
            "--decode-config: --spec-acceptance cannot be",
        ),
        ({"enable_eplb": True}, "enable_eplb moves whole experts between ranks"),
        (SHARED_EXPERTS | {"enable_eplb": True, "eplb_config": "{"}, "--eplb-config takes a JSON"),
    ],
)
def test_mistakes(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(**settings)


def test_the_link_between_engines_can_be_set() -> None:
    engine = EngineConfig("llama-3.1-8b", tensor_parallel_size=2)
    apart = FleetConfig(prefill=1, decode=1)
    usual = plan_fleet(apart, engine).kinds[0].kv_link
    own = '{"kv_transfer_bandwidth": 3.0}'
    given = replace(apart, kv_transfer_bandwidth=5.0, kv_transfer_latency=2.0, prefill_config=own)
    prefill, decode = (kind.kv_link for kind in plan_fleet(given, engine).kinds)
    assert (prefill.bandwidth, decode.bandwidth) == (2 * 3e9, 2 * 5e9)
    assert prefill.latency == decode.latency == 0.002
    assert usual.latency < 0.001
    assert usual.bandwidth > 2 * 20e9
    fleet = {"prefill": 1, "decode": 1, "request_rate": 1.0}
    quick, slow = (run(**fleet, kv_transfer_bandwidth=each) for each in (100.0, 1.0))
    assert 5 * number(quick, "mean_transfer_ms") < number(slow, "mean_transfer_ms")
