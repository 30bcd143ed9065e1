"""Prometheus metrics, under vLLM's names with our prefix."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanovllm.async_engine import AsyncEngine
from nanovllm.outputs import CompletionOutput
from nanovllm.request_stream import EngineObserver, RequestTimes

FIRST_TOKEN_BUCKETS = (
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
    20,
    40,
    80,
    160,
)
TOKEN_BUCKETS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)


class EngineCollector(Collector):
    """Reads the engine's own counts whenever somebody asks for the metrics."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self.engine = engine
        self.model = model

    def collect(self) -> Iterable[Metric]:
        """One metric a count."""
        stats = self.engine.stats
        gauges = {
            "num_requests_running": ("Sequences that hold KV blocks", stats.num_running),
            "num_requests_waiting": ("Sequences that wait to be admitted", stats.num_waiting),
            "num_requests_swapped": ("Sequences that wait in host memory", stats.num_swapped),
            "kv_cache_usage_perc": ("Share of the KV blocks that is held; 1 is all", stats.kv_cache_usage),
        }
        counters = {
            "num_preemptions": ("Times that a sequence lost its blocks", stats.num_preemptions),
            "prefix_cache_queries": ("Tokens looked up in the prefix cache", stats.num_queried_tokens),
            "prefix_cache_hits": ("Tokens found in the prefix cache", stats.num_hit_tokens),
        }
        for family, counts in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in counts.items():
                metric = family(f"nanovllm:{name}", text, labels=["model_name"])
                metric.add_metric([self.model], value)
                yield metric


class Metrics(EngineObserver):
    """All metrics of one server, in a registry of their own.

    Args:
        engine: whose requests are counted.
        model: the label of every metric.
    """

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, model))
        self._model = model
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", FIRST_TOKEN_BUCKETS
        )
        self._inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a completion", TOKEN_BUCKETS
        )
        self._request_latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token", REQUEST_BUCKETS
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        ended = Counter(
            "nanovllm:request_success",
            "Completions that ended",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._ended = {reason: ended.labels(model, reason) for reason in ("stop", "length", "abort")}
        engine.observer = self

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"nanovllm:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
        return metric.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(f"nanovllm:{name}", text, ["model_name"], registry=self.registry)
        return metric.labels(self._model)

    def tokens(self, times: RequestTimes, piece: CompletionOutput, now: float) -> None:
        """A completion got tokens, or ended."""
        if piece.token_ids:
            self._generation_tokens.inc(len(piece.token_ids))
            if times.first_token is None:
                self._prompt_tokens.inc(times.num_prompt_tokens)
                self._time_to_first_token.observe(now - times.arrival)
            if piece.index in times.last_token:
                self._inter_token_latency.observe(now - times.last_token[piece.index])
        if piece.finish_reason is not None:
            self._ended[piece.finish_reason].inc()

    def finished(self, times: RequestTimes, now: float) -> None:
        """A request has ended with all its completions."""
        self._request_latency.observe(now - times.arrival)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
