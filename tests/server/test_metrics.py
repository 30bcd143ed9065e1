"""/metrics, compared with what routers and dashboards of vLLM read."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from nanovllm.assembly.flags import read_flags
from nanovllm.cli.serve import ServeFlags
from nanovllm.data.config import EngineConfig
from nanovllm.router.app import Metrics as RouterMetrics
from nanovllm.router.fleet import processes
from tests.server.test_server_guard import arguments_of
from tests.server_process import ServerProcess, wait_until

# Sources, all of August 2026: llm-d-router, docs/plugin-metric-protocol.md and
# pkg/epp/.../extractor/metrics/factories.go; production-stack,
# src/vllm_router/stats/engine_stats.py and helm/dashboards; AIBrix, pkg/metrics/metrics.go.
LLM_D = {
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
}
PRODUCTION_STACK = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:gpu_prefix_cache_hit_rate": "gauge",
    "vllm:gpu_prefix_cache_hits": "counter",
    "vllm:gpu_prefix_cache_queries": "counter",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:generation_tokens": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_success": "counter",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
}
AIBRIX = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_swapped": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:request_success": "counter",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:external_prefix_cache_queries": "counter",
    "vllm:external_prefix_cache_hits": "counter",
}
# Read by one of them, and not here.
ABSENT = {
    "vllm:lora_requests_info": "there are no adapters",
    "vllm:engine_sleep_state": "the engine does not sleep",
    "vllm:http_requests": "not a metric of vLLM's engine",
    "vllm:num_requests_success": "not a metric of vLLM: it is request_success",
    "vllm:iteration_tokens_total": "steps are in the trace",
    "vllm:time_per_output_token_seconds": "vLLM has removed it: it is inter_token_latency_seconds",
    "vllm:cpu_cache_usage_perc": "vLLM has removed it",
    "vllm:avg_prompt_throughput_toks_per_s": (
        "vLLM has removed it: it is the rate of prompt_tokens_total"
    ),
    "vllm:avg_generation_throughput_toks_per_s": (
        "vLLM has removed it: it is the rate of generation_tokens_total"
    ),
    "vllm:nixl_xfer_time_seconds": "NIXL is one of several transports",
}
TOKEN_SECONDS = [
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
]
FIRST_TOKEN_SECONDS = [
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
]
FIRST_TOKEN_SECONDS += [20, 40, 80, 160, 640, 2560]
REQUEST_SECONDS = [
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
]
TOKENS_UP_TO_256 = [1, 2, 5, 10, 20, 50, 100, 200]
BUCKETS = {
    "vllm:time_to_first_token_seconds": FIRST_TOKEN_SECONDS,
    "vllm:inter_token_latency_seconds": TOKEN_SECONDS,
    "vllm:request_time_per_output_token_seconds": TOKEN_SECONDS,
    "vllm:e2e_request_latency_seconds": REQUEST_SECONDS,
    "vllm:request_queue_time_seconds": REQUEST_SECONDS,
    "vllm:request_prefill_time_seconds": REQUEST_SECONDS,
    "vllm:request_decode_time_seconds": REQUEST_SECONDS,
    "vllm:request_inference_time_seconds": REQUEST_SECONDS,
    "vllm:request_prompt_tokens": TOKENS_UP_TO_256,
    "vllm:request_generation_tokens": TOKENS_UP_TO_256,
    "vllm:request_max_num_generation_tokens": TOKENS_UP_TO_256,
}


def families(server: ServerProcess) -> dict[str, Metric]:
    return {
        family.name: family
        for family in text_string_to_metric_families(server.get("/metrics").text)
    }


def values(server: ServerProcess, name: str) -> dict[str, float]:
    """A sample's value by engine."""
    samples = [
        sample
        for family in families(server).values()
        for sample in family.samples
        if sample.name == name
    ]
    return {sample.labels["engine"]: sample.value for sample in samples}


@pytest.mark.parametrize(
    "wanted", [LLM_D, PRODUCTION_STACK, AIBRIX], ids=["llm-d", "production-stack", "AIBrix"]
)
def test_everything_that_routers_of_vllm_read_is_there(
    server: ServerProcess, wanted: dict[str, str]
) -> None:
    server.complete(max_tokens=2)
    found = families(server)
    assert {name: found[name].type for name in wanted if name in found} == wanted
    assert not ABSENT.keys() & found.keys()
    for name in wanted:
        for sample in found[name].samples:
            assert sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0", sample


def test_histograms_have_the_buckets_of_vllm(server: ServerProcess) -> None:
    found = families(server)
    assert {name for name, family in found.items() if family.type == "histogram"} == BUCKETS.keys()
    for name, bounds in BUCKETS.items():
        samples = [sample for sample in found[name].samples if sample.name == f"{name}_bucket"]
        assert [float(sample.labels["le"]) for sample in samples] == [*bounds, float("inf")], name


def test_production_stack_finds_its_old_names_equal_to_the_new_ones(server: ServerProcess) -> None:
    for _ in range(2):
        server.complete(prompt="o" * 64, max_tokens=1)
    old_queries, old_hits = (
        values(server, f"vllm:gpu_prefix_cache_{what}_total")["0"] for what in ("queries", "hits")
    )
    assert (old_queries, old_hits) == tuple(
        values(server, f"vllm:prefix_cache_{what}_total")["0"] for what in ("queries", "hits")
    )
    assert values(server, "vllm:gpu_prefix_cache_hit_rate")["0"] == pytest.approx(
        old_hits / old_queries
    )
    assert 0 < old_hits < old_queries


def test_phases_add_up(server: ServerProcess) -> None:
    names = [name for name in BUCKETS if name.endswith("seconds")] + [
        "vllm:request_generation_tokens"
    ]

    def sums() -> dict[str, float]:
        return {name: values(server, f"{name}_sum")["0"] for name in names}

    def counts() -> dict[str, float]:
        return {name: values(server, f"{name}_count")["0"] for name in names}

    sums_before, counts_before = sums(), counts()
    server.complete(prompt="p" * 100, max_tokens=9, ignore_eos=True)
    grown = {
        name.removeprefix("vllm:"): value - sums_before[name] for name, value in sums().items()
    }
    times = {
        name.removeprefix("vllm:"): value - counts_before[name] for name, value in counts().items()
    }
    assert times.pop("inter_token_latency_seconds") == 8
    assert set(times.values()) == {1}, times
    queue, prefill = grown["request_queue_time_seconds"], grown["request_prefill_time_seconds"]
    decode, inference = (
        grown["request_decode_time_seconds"],
        grown["request_inference_time_seconds"],
    )
    assert min(queue, prefill, decode) > 0
    assert grown["time_to_first_token_seconds"] == pytest.approx(queue + prefill)
    assert inference == pytest.approx(prefill + decode)
    assert grown["e2e_request_latency_seconds"] == pytest.approx(queue + inference)
    assert grown["inter_token_latency_seconds"] == pytest.approx(decode)
    assert grown["request_time_per_output_token_seconds"] == pytest.approx(decode / 8)
    assert grown["request_generation_tokens"] == 9


def test_a_request_of_one_token_has_no_time_per_further_token(server: ServerProcess) -> None:
    name = "vllm:request_time_per_output_token_seconds_count"
    before = values(server, name)["0"]
    server.complete(max_tokens=1)
    assert values(server, name)["0"] == before
    server.complete(max_tokens=2, n=3, ignore_eos=True)
    assert values(server, name)["0"] == before + 3, "each of the completions has one"


def test_waiting_counts_as_queue_time(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With one running slot, the second request waits for as long as the first one runs."""
    with ServerProcess(tiny_model, tmp_path, "--max-num-seqs", "1") as server:
        server.complete(max_tokens=100, n=2, ignore_eos=True)
        assert values(server, "vllm:request_queue_time_seconds_count") == {"0": 1}
        first = server.metrics()
        answers = [
            server.post(
                "/v1/completions",
                {"prompt": ["a" * 40, "b" * 40], "max_tokens": 100, "ignore_eos": True},
            )
        ]
        assert answers[0].status_code == 200
        last = server.metrics()
        grown = {name: last[name] - first[name] for name in last if name.endswith("_seconds_sum")}
        # The first prompt's inference is the second one's queue.
        assert (
            grown["request_queue_time_seconds_sum"]
            > 0.3 * grown["request_inference_time_seconds_sum"]
        )


def test_each_engine_has_its_cache_and_its_requests(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    options = (
        "-dp",
        "2",
        "--num-kv-blocks",
        "24",
        "--block-size",
        "32",
        "--metrics-prefix",
        "nanovllm",
    )
    with ServerProcess(tiny_model, tmp_path, *options) as server:
        found = families(server)
        assert {name.partition(":")[0] for name in found} == {"nanovllm"}
        caches: list[Any] = [
            sample.labels for sample in found["nanovllm:cache_config_info"].samples
        ]
        assert [labels.pop("engine") for labels in caches] == ["0", "1"]
        expected = {
            "block_size": "32",
            "num_gpu_blocks": "24",
            "enable_prefix_caching": "True",
            "cache_dtype": "auto",
        }
        assert caches == [expected | {"model_name": "tiny"}] * 2
        server.complete(prompt=["a", "b"], max_tokens=3, ignore_eos=True)
        wait_until(lambda: server.is_idle())
        for name in (
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
        ):
            assert values(server, f"nanovllm:{name}_count") == {"0": 1, "1": 1}, name


@pytest.mark.parametrize(
    "words", [(), ("--metrics-prefix", "nanovllm")], ids=["default", "nanovllm"]
)
def test_a_fleets_router_and_servers_have_the_same_prefix(words: tuple[str, ...]) -> None:
    arguments = arguments_of("serve", "--prefill", "1", "--decode", "1", "--device", "cpu", *words)
    prefix = words[-1] if words else "vllm"
    for process in processes(read_flags(EngineConfig, arguments), arguments):
        own = arguments_of("serve", *process.words)
        assert read_flags(ServeFlags, own).metrics_prefix == prefix
    router = RouterMetrics([], arguments.metrics_prefix)
    assert f"{prefix}_router_retries_total 0.0" in bytes(router.response().body).decode()
    assert arguments_of("router", "--worker-urls", "http://a", *words).metrics_prefix == prefix
