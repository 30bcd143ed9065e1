"""Prometheus metrics, under vLLM's names with our prefix, and with its labels: `model_name`, and `engine`, the data rank.

A sequence counts where it is generated. One that was aborted before its first token counts for engine 0.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from nanovllm.data.outputs import CompletionOutput
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.engine.request_stream import EngineObserver, RequestTimes

FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN_BUCKETS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)

# For each metric that is read when it is asked for: its kind, its help, and the attribute that has the value.
Table = dict[str, tuple[type[Any], str, str]]
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
STATS: Table = {
    "num_requests_running": (GAUGE, "Sequences that hold KV blocks", "num_running"),
    "num_requests_waiting": (GAUGE, "Sequences that wait to be admitted", "num_waiting"),
    "num_requests_swapped": (GAUGE, "Sequences that wait in host memory", "num_swapped"),
    "kv_cache_usage_perc": (GAUGE, "Share of the KV blocks that is held; 1 is all", "kv_cache_usage"),
    "num_preemptions": (COUNTER, "Times that a sequence lost its blocks", "num_preemptions"),
    "prefix_cache_queries": (COUNTER, "Tokens looked up in the prefix cache", "num_queried_tokens"),
    "prefix_cache_hits": (COUNTER, "Tokens found in the prefix cache", "num_hit_tokens"),
    "external_prefix_cache_queries": (COUNTER, "Tokens asked for elsewhere", "num_external_queried_tokens"),
    "external_prefix_cache_hits": (COUNTER, "Tokens whose KV came from elsewhere", "num_external_hit_tokens"),
}
SPECULATION: Table = {
    "spec_decode_num_drafts": (COUNTER, "Times that drafts of a sequence were verified", "spec_decoding.num_drafts"),
    "spec_decode_num_draft_tokens": (COUNTER, "Drafted tokens that were verified", "spec_decoding.num_draft_tokens"),
    "spec_decode_num_accepted_tokens": (COUNTER, "Drafted tokens that were right", "spec_decoding.num_accepted_tokens"),
}
REASONS = ("stop", "length", "abort", "error")


class MetricSet(Collector):
    """Metrics in a registry of their own.

    Args:
        prefix: with which all names begin.
        labels: the default labels.
        table: the metrics that are read when they are asked for.
        sources: returns the objects to read, each with the values of its labels.
    """

    def __init__(self, prefix: str, labels: Sequence[str], table: Table, sources: Callable[[], Iterable[Any]]) -> None:
        self.prefix, self.labels, self.table, self.sources = prefix, labels, table, sources
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """One metric per row of the table, with a value for each object."""
        for name, (family, text, attribute) in self.table.items():
            metric = family(self.prefix + name, text, labels=self.labels)
            for labels, source in self.sources():
                metric.add_metric(labels, attrgetter(attribute)(source))
            yield metric

    def add(self, kind: type[Any], name: str, text: str, labels: Sequence[str] | None = None, **settings: Any) -> Any:
        """Add a metric that is counted here."""
        labels = self.labels if labels is None else labels
        return kind(self.prefix + name, text, labels, registry=self.registry, **settings)

    def response(self) -> Response:
        """The text that Prometheus reads."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


class Metrics(MetricSet, EngineObserver):
    """All metrics of one server.

    Args:
        engine: whose requests are counted.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        labels = [(engine.name, str(i)) for i in range(engine.config.data_parallel_size)]
        names, table = ("model_name", "engine"), STATS | (SPECULATION if engine.config.speculative else {})
        super().__init__(
            "nanovllm:", names, table, lambda: zip(labels, engine.stats.engines or [engine.stats], strict=False)
        )

        def each(kind: type[Any], name: str, text: str, **settings: Any) -> list[Any]:
            metric = self.add(kind, name, text, **settings)
            return [metric.labels(*values) for values in labels]

        about = "From a request's arrival to its first token"
        self._time_to_first_token = each(Histogram, "time_to_first_token_seconds", about, buckets=FIRST_TOKEN_BUCKETS)
        about = "Between two tokens of a completion"
        self._inter_token_latency = each(Histogram, "inter_token_latency_seconds", about, buckets=TOKEN_BUCKETS)
        about = "From a request's arrival to its last token"
        self._request_latency = each(Histogram, "e2e_request_latency_seconds", about, buckets=REQUEST_BUCKETS)
        self._prompt_tokens = each(Counter, "prompt_tokens", "Prompt tokens read")
        self._generation_tokens = each(Counter, "generation_tokens", "Tokens generated")
        ended = self.add(Counter, "request_success", "Completions that ended", [*names, "finished_reason"])
        self._ended = [{reason: ended.labels(*values, reason) for reason in REASONS} for values in labels]
        engine.observer = self

    def collect(self) -> Iterable[Metric]:
        """Also the accepted drafts by their place, if the engine drafts."""
        yield from super().collect()
        if SPECULATION.items() <= self.table.items():
            name, labels = "spec_decode_num_accepted_tokens_per_pos", [*self.labels, "position"]
            metric = COUNTER(self.prefix + name, "Drafted tokens that were right, by place", labels=labels)
            for values, stats in self.sources():
                for place, number in enumerate(stats.spec_decoding.num_accepted_tokens_per_pos):
                    metric.add_metric([*values, str(place)], number)
            yield metric

    def tokens(self, times: RequestTimes, piece: CompletionOutput, now: float) -> None:
        """Count the tokens of a completion, or its end."""
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
        """Note how long a request took."""
        self._request_latency[last.engine].observe(now - times.arrival)
