"""Measured step times as a cost: interpolation between sizes, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from nanovllm.data.config import EngineConfig
from nanovllm.data.errors import UsageError
from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.measured import HeadCost, MeasuredCost, num_pairs, read_cost, write_cost
from nanovllm.simulate.plan import plan_fleet
from nanovllm.simulate.settings import FleetConfig
from nanovllm.simulate.simulation import simulate
from nanovllm.simulate.workload import SECOND

COST = MeasuredCost(
    model="by hand",
    machine="none",
    on_gpu=False,
    num_kv_blocks=10,
    block_size=16,
    kv_bytes_per_token=1.0,
    max_model_len=256,
    knots=[1, 3, 5],
    row_seconds=[0.010, 0.020, 0.024],
    per_sample=0.0,
    per_context=0.0,
    per_pair=0.0,
)


@pytest.mark.parametrize(
    ("num_tokens", "milliseconds"),
    [(1, 10), (2, 15), (3, 20), (4, 22), (5, 24), (6, 26), (105, 224)],
)
def test_between_and_beyond_the_knots(num_tokens: int, milliseconds: float) -> None:
    for work in (StepWork(num_tokens, 77, (), num_tokens), StepWork(0, 0, [(0, num_tokens)], 0)):
        assert COST.step(work) == pytest.approx(milliseconds * SECOND / 1000)


def test_two_knots_are_a_line() -> None:
    line = msgspec.structs.replace(COST, knots=[1, 11], row_seconds=[0.01, 0.02])
    assert line.decode(6)[0] == pytest.approx(0.015 * SECOND)
    assert line.decode(21)[0] == pytest.approx(0.03 * SECOND)


def test_each_price_is_paid_for_what_it_is_the_price_of() -> None:
    prices = {"per_sample": 1.0, "per_context": 0.25, "per_pair": 0.5, "per_prompt": 4.0}
    work = StepWork(2, 40, [(3, 2), (0, 1)], 3)
    counts = {"per_sample": 3, "per_context": 40, "per_pair": num_pairs(work), "per_prompt": 2}
    assert num_pairs(work) == (4 + 5) + 1
    for name, price in prices.items():
        cost = msgspec.structs.replace(COST, **{name: price})
        assert cost.step(work) - COST.step(work) == pytest.approx(counts[name] * price * SECOND)


def test_a_step_of_decodes_is_affine_in_its_context() -> None:
    cost = msgspec.structs.replace(COST, per_sample=0.001, per_context=0.0003)
    base, per_token = cost.decode(4)
    for context in (4, 1000, 10**6):
        assert cost.step(StepWork(4, context, (), 4)) == base + per_token * context


def test_the_last_stage_takes_longer_by_the_head_and_a_share_of_the_step() -> None:
    head = HeadCost(fixed=0.001, per_sample=0.0005, share=0.1)
    cost = msgspec.structs.replace(COST, pipeline_parallel_size=2, head_cost=head)
    decodes = StepWork(3, 30, (), 3)
    assert cost.head(decodes) == pytest.approx((0.1 * 0.020 + 0.001 + 3 * 0.0005) * SECOND)
    no_sample = StepWork(0, 0, [(0, 5)], 0)
    assert cost.head(no_sample) == pytest.approx(0.1 * 0.024 * SECOND)
    longer = msgspec.structs.replace(cost, head_cost=HeadCost(fixed=1.0))
    assert longer.head(decodes) == cost.step(decodes), "no more than the step"
    assert COST.head(decodes) == 0


FEW: dict[str, object] = {
    "num_prompts": 40,
    "request_rate": 10.0,
    "random_input_len": 160,
    "random_output_len": 20,
}


@pytest.fixture
def machine(tmp_path: Path) -> str:
    path = tmp_path / "this.json"
    cost = msgspec.structs.replace(
        COST, num_kv_blocks=200, kv_bytes_per_token=10_000.0, max_model_len=1024
    )
    write_cost(cost, path)
    return str(path)


def on_two_ranks(machine: str, name: str) -> None:
    """The machine was measured with two ranks."""
    path = Path(machine)
    head = HeadCost() if name == "pipeline_parallel_size" else None
    write_cost(msgspec.structs.replace(read_cost(path), head_cost=head, **{name: 2}), path)


def test_engines_that_fail_together_have_a_measured_machine_each(machine: str) -> None:
    fleet = {**FEW, "machine": machine, "replicas": 4}
    apart = simulate(fleet)
    grouped = simulate({**fleet, "data_parallel_size": 2})
    assert "DP 2" in str(grouped["setup"])
    assert grouped | {"setup": ""} == apart | {"setup": ""}


@pytest.mark.parametrize("layout", [None, "tensor_parallel_size", "pipeline_parallel_size"])
def test_transfers_between_measured_engines_take_the_links_of_all_ranks(
    machine: str, layout: str | None
) -> None:
    if layout is not None:
        on_two_ranks(machine, layout)
    fleet = {**FEW, "machine": machine, "prefill": 2, "decode": 2, "request_rate": 0.001}
    with pytest.raises(UsageError, match="links that move KV: set --kv-transfer-bandwidth"):
        simulate(fleet)
    found = simulate({**fleet, "kv_transfer_bandwidth": 0.001, "kv_transfer_latency": 7.0})
    assert found["num_transfers"] == 40
    # Ten blocks of 16 tokens: 1 MB/s for the 10 kB per token of each rank.
    assert found["mean_transfer_ms"] == pytest.approx(7 + 160 * 10)


def test_measured_engines_of_two_layouts(machine: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    write_cost(msgspec.structs.replace(read_cost(Path(machine)), tensor_parallel_size=2), other)
    fleet = {**FEW, "machine": machine, "prefill": 1, "decode": 1, "kv_transfer_bandwidth": 1.0}
    found = simulate({**fleet, "decode_config": json.dumps({"machine": str(other)})})
    assert "TP 1" in str(found["setup"])
    assert "TP 2" in str(found["setup"])
    with pytest.raises(UsageError, match=r"different models, by hand and llama-3.1-8b: set --mod"):
        simulate({**fleet, "decode_config": '{"machine": "H100"}'})


@pytest.mark.parametrize(
    "tiers", [{"kv_offloading_size": 1.0}, {"kv_store_size": 1.0}, {"preemption_mode": "swap"}]
)
def test_measured_engines_load_kv_from_host_memory(machine: str, tiers: dict[str, object]) -> None:
    """Ten prefixes of 20 blocks each do not fit in 40 blocks."""
    fleet = {**FEW, "machine": machine, "num_kv_blocks": 64, "request_rate": 100.0, **tiers}
    fleet |= {"random_prefix_len": 320, "num_prefixes": 10, "random_output_len": 200}
    if "preemption_mode" not in tiers:
        with pytest.raises(UsageError, match="links that move KV: set --kv-offloading-bandwidth"):
            simulate(fleet)
    quick, slow = (simulate({**fleet, "kv_offloading_bandwidth": each}) for each in (1e3, 0.002))
    assert quick["completed"] == slow["completed"] == 40
    assert quick["duration"] < 0.9 * slow["duration"]


@pytest.mark.parametrize("layout", [None, "tensor_parallel_size", "pipeline_parallel_size"])
def test_host_memory_and_links_of_measured_ranks(machine: str, layout: str | None) -> None:
    if layout is not None:
        on_two_ranks(machine, layout)
    engine = EngineConfig("by hand", kv_offloading_size=0.01)
    config = FleetConfig(machine=machine, kv_offloading_bandwidth=2.0)
    (kind,) = plan_fleet(config, engine).kinds
    num_ranks = 1 if layout is None else 2
    assert kind.kv_bytes_per_token == num_ranks * 10_000
    assert kind.num_host_blocks == int(0.01 * 2**30 / (16 * 10_000 * num_ranks))
    assert kind.host_link.bandwidth == 2e9


@pytest.mark.parametrize(
    "idle", [{"expert_imbalance": 2.0}, {"enable_eplb": True, "enable_expert_parallel": True}]
)
def test_a_measured_machine_has_its_experts(machine: str, idle: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="has no effect with --machine"):
        simulate({**FEW, "machine": machine, **idle})


def test_a_measured_pipeline_cannot_plan_ahead(tmp_path: Path) -> None:
    path = tmp_path / "this.json"
    cost = msgspec.structs.replace(COST, pipeline_parallel_size=2, head_cost=HeadCost())
    write_cost(cost, path)
    with pytest.raises(UsageError, match="async_scheduling needs pipeline_parallel_size 1"):
        simulate({"machine": str(path), "async_scheduling": True, "num_prompts": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_kv_blocks", 0),
        ("kv_bytes_per_token", 1e308),
        ("kv_bytes_per_token", 0.0),
        ("knots", []),
        ("knots", [1]),
        ("knots", [1, 5, 3]),
        ("knots", [1, 1, 3]),
        ("row_seconds", [0.01, 0.02]),
        ("row_seconds", [-0.01, 0.02, 0.03]),
        ("row_seconds", [1e308] * 3),
        ("per_context", 1e308),
        ("per_sample", -1.0),
        ("idle_seconds", [0.1]),
        ("head_cost", {"share": 1e308}),
        ("error", 1e308),
    ],
)
def test_damage_of_a_file_is_reported_in_a_line(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "this.json"
    path.write_text(json.dumps(msgspec.to_builtins(COST) | {name: value}))
    with pytest.raises(UsageError, match="no file of --calibrate") as caught:
        read_cost(path)
    assert "\n" not in str(caught.value)
