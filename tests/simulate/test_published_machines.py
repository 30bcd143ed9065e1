"""Published throughputs and transfer times of machines that nanovllm was not measured on, predicted
from machines.toml."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanovllm.simulate.cost import StepWork
from nanovllm.simulate.machines import find_machine
from nanovllm.simulate.models import Layout, find_model
from nanovllm.simulate.roofline import Roofline
from nanovllm.simulate.workload import SECOND

# MIT ORCD, amd-benchmarks, amd-cloud/results/atom.md, 2026-08: output tokens per second of ATOM on
# MI355X, by the number of simultaneous requests of up to 1,024 tokens and outputs of as many.
# Weights and KV in FP8.
ATOM = {
    ("qwen3-8b", 1): {1: 159.3, 32: 4_028.9, 128: 11_110.8, 256: 14_962.7},
    ("llama-3.1-70b", 8): {1: 101.1, 32: 2_432.4, 128: 6_412.5, 256: 9_342.4},
}
# The mean of lengths that are drawn from 0.8 to 1 of 1,024 tokens.
LENGTH = 922

# kvcache-ai.github.io/Mooncake/performance/vllm-v1-support-benchmark: milliseconds to move the KV
# of a prompt of Qwen3-8B between two vLLM engines, each with eight ports of 200 Gb/s, as A100 has.
MOONCAKE = {2048: 2.51, 4096: 4.75, 8192: 8.84, 16_384: 16.43, 32_768: 31.65}


def throughput(cost: Roofline, num_requests: int) -> float:
    """Return the output tokens per second of this number of requests, each of which is followed by
    another one, whose prompt is computed in a step of its own."""
    context = LENGTH + LENGTH // 2
    decode = cost.step(StepWork(num_requests, num_requests * context, (), num_requests))
    prefill = cost.step(StepWork(0, 0, [(0, LENGTH)], 1))
    return num_requests * LENGTH * SECOND / (LENGTH * decode + num_requests * prefill)


@pytest.mark.parametrize(("name", "size"), ATOM)
def test_serving_on_mi355x_is_predicted_within_a_quarter(name: str, size: int) -> None:
    model = replace(find_model(name, kv_cache_dtype="fp8"), bytes_per_weight=1)
    cost = Roofline(model, find_machine("MI355X"), Layout(tensor_parallel_size=size))
    published = ATOM[name, size]
    predicted = [throughput(cost, count) for count in published]
    assert predicted == pytest.approx(list(published.values()), rel=0.25)


def test_collectives_in_a_mesh_use_the_links_to_all_ranks() -> None:
    """rccl-tests of MIT ORCD on MI355X, 2026-10-01: bus bandwidth of all-reduces of 8 GiB."""
    machine = find_machine("MI355X")
    for num_devices, measured in {2: 59.4e9, 4: 168.5e9, 8: 393.1e9}.items():
        assert machine.link(num_devices).bandwidth == pytest.approx(measured, rel=0.06)
    assert machine.pair_link(8).bandwidth == machine.link(2).bandwidth
    assert machine.link(9) == machine.pair_link(9) == machine.network_link
    switched = find_machine("H100")
    assert switched.link(2).bandwidth == switched.link(8).bandwidth


def test_serving_on_h20_is_fitted() -> None:
    """LMSYS and Ant Group, 2025-09-26, DeepSeek-R1: 16.5k input tokens per second of a node, TP 8,
    prompts of 4,096 tokens; 714 and 675 output tokens per second of a GPU with 48 and 32 requests,
    16 GPUs that share experts, two positions per step, of which 1.8 to 1.9 are kept. Outputs have
    1,536 tokens."""
    model = find_model("deepseek-v3")
    machine = find_machine("H20")
    node = Roofline(model, machine, Layout(tensor_parallel_size=8))
    prompts = [(0, 4096)] * 4
    rate = 4 * 4096 * SECOND / node.step(StepWork(0, 0, prompts, len(prompts)))
    assert rate == pytest.approx(16_500, rel=0.12)
    layout = Layout(data_parallel_size=16, enable_expert_parallel=True)
    decode = Roofline(model, machine, layout)
    for num_requests, published in {48: 714, 32: 675}.items():
        rows = 2 * num_requests
        step = decode.step(StepWork(rows, rows * (4096 + 768), (), rows))
        assert num_requests * 1.85 * SECOND / step == pytest.approx(published, rel=0.05)


def test_transfers_of_kv_reach_the_share_that_mooncake_does() -> None:
    """Two times differ by the bytes and the reached bandwidth. What all have in common is 0.5 ms,
    Mooncake's own time per request, which --kv-transfer-latency adds."""
    link = find_machine("A100").network_link
    per_token = find_model("qwen3-8b").kv_bytes_per_token()
    predicted = {count: count * per_token / (8 * link.bandwidth) for count in MOONCAKE}
    for count, milliseconds in MOONCAKE.items():
        assert 1e3 * predicted[count] + 0.5 == pytest.approx(milliseconds, rel=0.12)
    longest, shortest = max(MOONCAKE), min(MOONCAKE)
    moved = (MOONCAKE[longest] - MOONCAKE[shortest]) / 1e3
    assert predicted[longest] - predicted[shortest] == pytest.approx(moved, rel=0.05)
