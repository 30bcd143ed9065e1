"""The router's own Prometheus metrics, named like those of vLLM's router, with our prefix."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from nanovllm.router.backends import Backend
from nanovllm.server.metrics import MetricSet

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480)
LABELS = ("worker", "role")
TABLE = {
    "worker_health": (GaugeMetricFamily, "1 if the server gets requests", "is_healthy"),
    "running_requests": (GaugeMetricFamily, "Requests that were sent to the server and have not ended", "num_running"),
    "processed_requests": (CounterMetricFamily, "Requests that a server has answered", "num_answered"),
    "request_errors": (CounterMetricFamily, "Requests that a server has failed to answer", "num_failures"),
}
TRANSFERS = (
    "Requests whose KV was to come from a prefill server (offered), and those that were computed anew (recomputed)"
)


class Metrics(MetricSet):
    """All metrics of a router, in a registry of their own."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        sources = [((backend.url, backend.role), backend) for backend in backends]
        super().__init__("nanovllm_router_", LABELS, TABLE, lambda: sources)
        self.requests = self.add(Counter, "requests", "Requests that have come", ["route"])
        self.retries = self.add(Counter, "retries", "Requests that were sent to another server", [])
        self.transfers = self.add(Counter, "kv_transfers", TRANSFERS, ["outcome"])
        name, about = "generate_duration_seconds", "From a request's arrival to the beginning of its answer"
        self.time_to_headers = self.add(Histogram, name, about, ["route"], buckets=BUCKETS)
