"""The router's own Prometheus metrics, named like those of vLLM's router, with our prefix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanovllm.router.backends import Backend

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480)
LABELS = ("worker", "role")


class BackendCollector(Collector):
    """Reads how the servers are whenever somebody asks for the metrics."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = backends

    def collect(self) -> Iterable[Metric]:
        """One metric a count, with a value for each server."""
        gauges = {
            "worker_health": ("1 if the server gets requests", "is_healthy"),
            "running_requests": ("Requests that were sent to the server and have not ended", "num_running"),
        }
        for name, (text, attribute) in gauges.items():
            metric = GaugeMetricFamily(f"nanovllm_router_{name}", text, labels=LABELS)
            for backend in self.backends:
                metric.add_metric([backend.url, backend.role], getattr(backend, attribute))
            yield metric


class Metrics:
    """All metrics of a router, in a registry of their own."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(BackendCollector(backends))
        self.requests = self._counter("requests", "Requests that have come", "route")
        self.processed = self._counter("processed_requests", "Requests that a server has answered", *LABELS)
        self.failures = self._counter("request_errors", "Requests that a server has failed to answer", *LABELS)
        self.retries = self._counter("retries", "Requests that were sent to another server")
        self.transfers = self._counter(
            "kv_transfers",
            "Requests whose KV was to come from a prefill server (offered), and those that were computed anew (recomputed)",
            "outcome",
        )
        for backend in backends:  # 0 is news, too
            for counter in (self.processed, self.failures):
                counter.labels(backend.url, backend.role)
        self.time_to_headers = Histogram(
            "nanovllm_router_generate_duration_seconds",
            "From a request's arrival to the beginning of its answer",
            ["route"],
            buckets=BUCKETS,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"nanovllm_router_{name}", text, labels, registry=self.registry)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)
