"""Prometheus metrics, under vLLM's names with our prefix, and with its labels: `model_name`, and `engine`, the data rank.

A sequence counts where it is generated. One that was aborted before its first token, which nobody knows the place of any
more, counts as engine 0's.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanovllm.data.outputs import CompletionOutput
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.engine.request_stream import EngineObserver, RequestTimes

FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN_BUCKETS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)


LABELS = ["model_name", "engine"]


class EngineCollector(Collector):
    """Reads the engine's own counts whenever somebody asks for the metrics."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self.engine = engine
        self.model = model

    def collect(self) -> Iterable[Metric]:
        """One metric a count, with a value for each engine."""
        stats = self.engine.stats
        gauges = {
            "num_requests_running": ("Sequences that hold KV blocks", "num_running"),
            "num_requests_waiting": ("Sequences that wait to be admitted", "num_waiting"),
            "num_requests_swapped": ("Sequences that wait in host memory", "num_swapped"),
            "kv_cache_usage_perc": ("Share of the KV blocks that is held; 1 is all", "kv_cache_usage"),
        }
        counters = {
            "num_preemptions": ("Times that a sequence lost its blocks", "num_preemptions"),
            "prefix_cache_queries": ("Tokens looked up in the prefix cache", "num_queried_tokens"),
            "prefix_cache_hits": ("Tokens found in the prefix cache", "num_hit_tokens"),
            "external_prefix_cache_queries": (
                "Prompt tokens whose KV was asked for elsewhere",
                "num_external_queried_tokens",
            ),
            "external_prefix_cache_hits": ("Prompt tokens whose KV has come from elsewhere", "num_external_hit_tokens"),
        }
        for family, counts in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, attribute) in counts.items():
                metric = family(f"nanovllm:{name}", text, labels=LABELS)
                for i, each in enumerate(stats.engines or [stats]):
                    metric.add_metric([self.model, str(i)], getattr(each, attribute))
                yield metric


class Metrics(EngineObserver):
    """All metrics of one server, in a registry of their own.

    Args:
        engine: whose requests are counted.
        model: its name, in the labels of every metric.
    """

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, model))
        self._labels = [(model, str(i)) for i in range(engine.config.data_parallel_size)]
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
            "nanovllm:request_success", "Completions that ended", [*LABELS, "finished_reason"], registry=self.registry
        )
        reasons = ("stop", "length", "abort")
        self._ended = [{reason: ended.labels(*labels, reason) for reason in reasons} for labels in self._labels]
        engine.observer = self

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> list[Histogram]:
        metric = Histogram(f"nanovllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return [metric.labels(*labels) for labels in self._labels]

    def _counter(self, name: str, text: str) -> list[Counter]:
        metric = Counter(f"nanovllm:{name}", text, LABELS, registry=self.registry)
        return [metric.labels(*labels) for labels in self._labels]

    def tokens(self, times: RequestTimes, piece: CompletionOutput, now: float) -> None:
        """A completion got tokens, or ended."""
        engine = piece.engine
        if piece.token_ids:
            self._generation_tokens[engine].inc(len(piece.token_ids))
            if times.first_token is None:
                self._prompt_tokens[engine].inc(times.num_prompt_tokens)
                self._time_to_first_token[engine].observe(now - times.arrival)
            if piece.index in times.last_token:
                self._inter_token_latency[engine].observe(now - times.last_token[piece.index])
        if piece.finish_reason is not None:
            self._ended[engine][piece.finish_reason].inc()

    def finished(self, times: RequestTimes, last: CompletionOutput, now: float) -> None:
        """A request has ended with all its completions."""
        self._request_latency[last.engine].observe(now - times.arrival)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
