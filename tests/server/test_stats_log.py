"""What the server's log says: about the engine when it has started, and about its work while it is
busy."""

from __future__ import annotations

import logging
import pathlib
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.cli.main import main
from nanovllm.data.config import EngineConfig
from nanovllm.data.outputs import CompletionOutput, EngineStats
from nanovllm.engine.request_times import RequestTimes
from nanovllm.server.metrics import Metrics
from nanovllm.server.stats_log import StatsLog
from tests.server_process import ServerProcess, wait_until

STATS = re.compile(
    r"INFO nanovllm.server: Engine (\d{3}): Avg prompt throughput: (\d+\.\d) tokens/s, "
    r"Avg generation throughput: (\d+\.\d) tokens/s, Running: (\d+) reqs, Waiting: (\d+) reqs, "
    r"KV cache usage: (\d+\.\d)%, Prefix cache hit rate: (\d+\.\d)%"
)


def fake_engine(*each: EngineStats, on_gpu: bool = False) -> Any:
    stats = EngineStats.together(list(each)) if len(each) > 1 else each[0]
    return SimpleNamespace(
        name="tiny",
        config=EngineConfig("tiny", data_parallel_size=len(each)),
        limits=SimpleNamespace(max_model_len=256, on_gpu=on_gpu),
        trace_settings=[],
        stats=stats,
    )


def test_rates_are_those_of_the_interval_and_of_each_engine() -> None:
    metrics = Metrics(fake_engine(EngineStats(), EngineStats()))
    log = StatsLog(metrics, 10)
    start = 1000.0
    for totals in log._totals:
        totals.time = start
    assert log.lines(start + 10) == [], "an idle server is silent"

    metrics.tokens(RequestTimes(0.0, 500), CompletionOutput(0, "a", [1] * 20, engine=1), 1.0)
    busy = EngineStats(
        3, 4, num_swapped=2, kv_cache_usage=0.125, num_queried_tokens=500, num_hit_tokens=125
    )
    metrics.engine.stats = EngineStats.together([EngineStats(), busy])
    assert log.lines(start + 20) == [
        "Engine 001: Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 2.0 "
        "tokens/s, Running: 3 reqs, Waiting: 6 reqs, KV cache usage: 12.5%, Prefix cache hit "
        "rate: 25.0%"
    ]
    # No token in this interval, but a long prompt is computed.
    assert log.lines(start + 30) == [
        "Engine 001: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, "
        "Running: 3 reqs, Waiting: 6 reqs, KV cache usage: 12.5%, Prefix cache hit rate: "
        "25.0%"
    ]
    metrics.tokens(RequestTimes(0.0, 1), CompletionOutput(0, "a", [1], engine=0), 1.0)
    idle = EngineStats(num_queried_tokens=700, num_hit_tokens=325)
    metrics.engine.stats = EngineStats.together([EngineStats(), idle])
    first, second = log.lines(start + 40)
    assert first.startswith(
        "Engine 000: Avg prompt throughput: 0.1 tokens/s, Avg generation throughput: 0.1 tokens/s"
    )
    assert second.endswith(
        "Running: 0 reqs, Waiting: 0 reqs, KV cache usage: 0.0%, Prefix cache hit rate: 100.0%"
    )
    assert [line[:10] for line in log.lines(start + 50)] == ["Engine 000"], (
        "one line says that it is idle now"
    )
    assert log.lines(start + 60) == []


@pytest.mark.parametrize(
    ("on_gpu", "words"), [(True, ", GPU KV cache usage"), (False, ", KV cache")]
)
def test_only_a_gpu_is_named(on_gpu: bool, words: str) -> None:
    metrics = Metrics(fake_engine(EngineStats(num_running=1), on_gpu=on_gpu))
    (line,) = StatsLog(metrics, 10).lines(time.monotonic())
    assert words in line


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_wrong_interval_is_refused_before_the_model_loads(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", text)
    assert main(["serve", "nowhere", "--port", "0"]) == 2
    assert (
        f"VLLM_LOG_STATS_INTERVAL must be a number of seconds above 0 such as 10, got '{text}'"
        in capsys.readouterr().err
    )


def test_a_busy_server_writes_lines_and_an_idle_one_none(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.2")
    with ServerProcess(tiny_model, tmp_path, "-dp", "2", "--num-kv-blocks", "64") as server:
        for rank in range(2):
            assert re.search(
                rf"Engine 00{rank}: model tiny \(LlamaForCausalLM\), dtype float32", server.text
            ), server.text
        assert not STATS.search(server.text)

        def busy_lines() -> list[tuple[str, ...]]:
            server.complete(prompt=["a" * 20, "b" * 20], max_tokens=200, ignore_eos=True)
            return [found for found in STATS.findall(server.text) if float(found[2]) > 0]

        wait_until(lambda: {found[0] for found in busy_lines()} == {"000", "001"})
        wait_until(lambda: STATS.findall(server.text)[-1][2] == "0.0")

        def is_silent() -> bool:
            count = len(STATS.findall(server.text))
            time.sleep(1)
            return len(STATS.findall(server.text)) == count

        wait_until(is_silent, what="silent when idle")


def test_statistics_can_be_switched_off(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.05")
    with ServerProcess(tiny_model, tmp_path, "--disable-log-stats") as server:
        for _ in range(3):
            server.complete(max_tokens=200, ignore_eos=True)
        assert (
            "Avg generation throughput" not in server.text
            and "Engine 000: KV cache of" in server.text
        )


def test_an_engine_says_what_it_is(
    tiny_model: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nanovllm.engine")
    LLM(
        str(tiny_model),
        device="cpu",
        dtype="float32",
        num_kv_blocks=8,
        quantization="w8a8",
        quantize_head=True,
    )
    found = [record.message for record in caplog.records if record.name == "nanovllm.engine"]
    assert (
        found[0]
        == f"Engine 000: model {tiny_model} (LlamaForCausalLM), dtype float32, quantization w8a8 "
        "with a head of 8 bits, device cpu, attention backend cpu"
    )
    assert re.fullmatch(
        r"Engine 000: KV cache of 8 blocks of 16 tokens \(128 tokens, \d+\.\d MiB, float32\), "
        r"context length 256 tokens, of which the KV cache has room for 128",
        found[1],
    )
    caplog.clear()
    options: Any = {
        "attention_backend": "torch",
        "kv_cache_dtype": "int8",
        "tensor_parallel_size": 2,
    }
    llm = LLM(str(tiny_model), device="cpu", dtype="bfloat16", num_kv_blocks=64, **options)
    llm.engine.core.close()
    first, second = (record.message for record in caplog.records if "Engine 000" in record.message)
    assert first.endswith(
        "dtype bfloat16, quantization none, device cpu on 2 ranks, attention backend torch"
    )
    assert "MiB per rank, int8), context length 256 tokens" in second


def test_an_engine_says_nothing_unless_it_is_asked(
    tiny_model: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    LLM(str(tiny_model), device="cpu", num_kv_blocks=64)
    assert "Engine 000" not in "".join(capfd.readouterr())
