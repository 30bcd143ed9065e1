"""Prometheus metrics under vLLM's names, with its labels (`model_name`, and `engine`, the data
rank) and its buckets.

Routers and dashboards that know vLLM read them as they are; see `tests/server/test_metrics.py` for
what llm-d, production-stack and AIBrix read. A sequence counts for the engine that generates it.
One that was aborted before its first token counts for engine 0."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Literal

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from nanovllm.data.outputs import CompletionOutput, EngineStats
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.engine.request_times import EngineObserver, RequestTimes

Prefix = Literal["vllm", "nanovllm"]

# vLLM's, in seconds.
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)

# For each metric that is read when it is asked for: its kind, its help, and the attribute that has
# the value.
Table = dict[str, tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str]]
GAUGE = GaugeMetricFamily
COUNTER = CounterMetricFamily
STATS: Table = {
    "num_requests_running": (GAUGE, "Sequences that hold KV blocks", "num_running"),
    "num_requests_waiting": (GAUGE, "Sequences that wait to be admitted", "num_waiting"),
    "num_requests_swapped": (GAUGE, "Sequences that wait in host memory", "num_swapped"),
    "kv_cache_usage_perc": (
        GAUGE,
        "Share of the KV blocks that is held; 1 is all",
        "kv_cache_usage",
    ),
    "num_preemptions": (COUNTER, "Times that a sequence lost its blocks", "num_preemptions"),
    "prefix_cache_queries": (COUNTER, "Tokens looked up in the prefix cache", "num_queried_tokens"),
    "prefix_cache_hits": (COUNTER, "Tokens found in the prefix cache", "num_hit_tokens"),
    "external_prefix_cache_queries": (
        COUNTER,
        "Tokens looked up in other engines or stores",
        "num_external_queried_tokens",
    ),
    "external_prefix_cache_hits": (
        COUNTER,
        "Tokens whose KV came from other engines or stores",
        "num_external_hit_tokens",
    ),
}
SPECULATION: Table = {
    "spec_decode_num_drafts": (
        COUNTER,
        "Verifications of drafts, counted per sequence",
        "spec_decoding.num_drafts",
    ),
    "spec_decode_num_draft_tokens": (
        COUNTER,
        "Draft tokens that were verified",
        "spec_decoding.num_draft_tokens",
    ),
    "spec_decode_num_accepted_tokens": (
        COUNTER,
        "Draft tokens that were accepted",
        "spec_decoding.num_accepted_tokens",
    ),
}
# Names that vLLM had before its version 0.9, and that production-stack still reads.
OLD_NAMES: Table = {
    "gpu_cache_usage_perc": (GAUGE, "Old name of kv_cache_usage_perc", "kv_cache_usage"),
    "gpu_prefix_cache_queries": (COUNTER, "Old name of prefix_cache_queries", "num_queried_tokens"),
    "gpu_prefix_cache_hits": (COUNTER, "Old name of prefix_cache_hits", "num_hit_tokens"),
    "gpu_prefix_cache_hit_rate": (GAUGE, "Hits per query since the start", "prefix_cache_hit_rate"),
}
# Histograms over requests that have ended: seconds.
PHASES = {
    "e2e_request_latency_seconds": "From a request's arrival to its last token",
    "request_queue_time_seconds": (
        "From a request's arrival to the first step that computes its prompt"
    ),
    "request_prefill_time_seconds": (
        "From the first step that computes its prompt to its first token"
    ),
    "request_decode_time_seconds": "From its first token to its last one",
    "request_inference_time_seconds": (
        "From the first step that computes its prompt to its last token"
    ),
}
# Histograms over requests that have ended: tokens.
LENGTHS = {
    "request_prompt_tokens": "Tokens of a prompt",
    "request_generation_tokens": "Tokens generated for a completion",
    "request_max_num_generation_tokens": "Tokens of a request's longest completion",
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

    def __init__(
        self,
        prefix: str,
        labels: Sequence[str],
        table: Table,
        sources: Callable[[], Iterable[tuple[Sequence[str], object]]],
    ) -> None:
        self.prefix = prefix
        self.labels = labels
        self.table = table
        self.sources = sources
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """One metric per row of the table, with a value for each object."""
        for name, (family, text, attribute) in self.table.items():
            metric = family(self.prefix + name, text, labels=self.labels)
            for labels, source in self.sources():
                metric.add_metric(labels, attrgetter(attribute)(source))
            yield metric

    def counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        """Add a counter that is counted here."""
        return Counter(self.prefix + name, text, labels, registry=self.registry)

    def histogram(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> Histogram:
        """Add a histogram that is filled here."""
        return Histogram(self.prefix + name, text, labels, registry=self.registry, buckets=buckets)

    def response(self) -> Response:
        """The text that Prometheus reads."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


def one_two_five(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 and so on, up to `most`: vLLM's buckets for numbers of tokens."""
    found = [digit * 10**exponent for exponent in range(len(str(most))) for digit in (1, 2, 5)]
    return [value for value in found if value <= most]


class Metrics(MetricSet, EngineObserver):
    """All metrics of one server.

    Args:
        engine: whose requests are counted.
        prefix: the first word of all names.
    """

    def __init__(self, engine: AsyncEngine, prefix: Prefix = "vllm") -> None:
        self.engine = engine
        self.values = [(engine.name, str(i)) for i in range(engine.config.data_parallel_size)]
        names = ("model_name", "engine")
        table = STATS | OLD_NAMES | (SPECULATION if engine.config.speculative else {})
        super().__init__(f"{prefix}:", names, table, self.engine_stats)

        self._time_to_first_token = self._histograms(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token",
            FIRST_TOKEN_BUCKETS,
        )
        self._inter_token_latency = self._histograms(
            "inter_token_latency_seconds", "Between two tokens of a completion", TOKEN_BUCKETS
        )
        self._time_per_token = self._histograms(
            "request_time_per_output_token_seconds",
            "Mean over the tokens of a completion but the first",
            TOKEN_BUCKETS,
        )
        self._phases = {
            name: self._histograms(name, about, REQUEST_BUCKETS) for name, about in PHASES.items()
        }
        buckets = one_two_five(engine.limits.max_model_len)
        self._lengths = {
            name: self._histograms(name, about, buckets) for name, about in LENGTHS.items()
        }
        self._prompt_tokens = self._counters("prompt_tokens", "Prompt tokens processed")
        self._generation_tokens = self._counters("generation_tokens", "Tokens generated")
        ended = self.counter(
            "request_success", "Completions that ended", [*names, "finished_reason"]
        )
        self._ended = [
            {reason: ended.labels(*values, reason) for reason in REASONS} for values in self.values
        ]
        engine.observer = self

    def _counters(self, name: str, text: str) -> list[Counter]:
        """Add a counter; returns the part of it that each engine has."""
        metric = self.counter(name, text, self.labels)
        return [metric.labels(*values) for values in self.values]

    def _histograms(self, name: str, text: str, buckets: Sequence[float]) -> list[Histogram]:
        """Add a histogram; returns the part of it that each engine has."""
        metric = self.histogram(name, text, self.labels, buckets)
        return [metric.labels(*values) for values in self.values]

    def engine_stats(self) -> Iterable[tuple[tuple[str, str], EngineStats]]:
        """The statistics of each engine, with the values of its labels."""
        stats = self.engine.stats
        return zip(self.values, stats.engines or [stats], strict=False)

    def collect(self) -> Iterable[Metric]:
        """Also the sizes of the KV caches and, if the engine drafts, the accepted drafts by their
        place."""
        yield from super().collect()
        yield self._cache_config()
        if SPECULATION.items() <= self.table.items():
            metric = COUNTER(
                self.prefix + "spec_decode_num_accepted_tokens_per_pos",
                "Drafted tokens that were right, by place",
                labels=[*self.labels, "position"],
            )
            for values, stats in self.engine_stats():
                for place, number in enumerate(stats.spec_decoding.num_accepted_tokens_per_pos):
                    metric.add_metric([*values, str(place)], number)
            yield metric

    def _cache_config(self) -> Metric:
        """The settings of each engine's KV cache, as labels of a metric that is always 1."""
        metric = GAUGE(
            self.prefix + "cache_config_info",
            "The KV cache",
            labels=[
                *self.labels,
                "block_size",
                "num_gpu_blocks",
                "cache_dtype",
                "enable_prefix_caching",
            ],
        )
        for values, settings in zip(self.values, self.engine.trace_settings, strict=False):
            metric.add_metric(
                [
                    *values,
                    str(settings.block_size),
                    str(settings.num_blocks),
                    self.engine.config.kv_cache_dtype,
                    str(settings.enable_prefix_caching),
                ],
                1,
            )
        return metric

    def total(self, name: str, index: int) -> float:
        """Return the value of one of the counters, for one of the engines."""
        labels = dict(zip(self.labels, self.values[index], strict=True))
        return self.registry.get_sample_value(f"{self.prefix}{name}_total", labels) or 0.0

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
        """Note the phases of a request that it has been through, and its lengths."""
        durations = {"e2e_request_latency_seconds": now - times.arrival}
        if times.scheduled is not None:
            durations["request_queue_time_seconds"] = times.scheduled - times.arrival
        if times.scheduled is not None and times.first_token is not None:
            last_token = max(times.last_token.values())
            durations["request_prefill_time_seconds"] = times.first_token - times.scheduled
            durations["request_decode_time_seconds"] = last_token - times.first_token
            durations["request_inference_time_seconds"] = last_token - times.scheduled
        for name, seconds in durations.items():
            self._phases[name][last.engine].observe(seconds)
        self._lengths["request_prompt_tokens"][last.engine].observe(times.num_prompt_tokens)
        longest = max(times.num_tokens.values(), default=0)
        self._lengths["request_max_num_generation_tokens"][last.engine].observe(longest)
        for index, count in times.num_tokens.items():
            self._lengths["request_generation_tokens"][last.engine].observe(count)
            if count > 1 and times.first_token is not None:
                decode_time = times.last_token[index] - times.first_token
                self._time_per_token[last.engine].observe(decode_time / (count - 1))
