"""The parts of `nanovllm bench parallel`."""

from __future__ import annotations

from nanovllm.lab.bench.parallel.all_reduce import all_reduces
from nanovllm.lab.bench.parallel.engines import executor, throughput, weights
from nanovllm.lab.bench.parallel.orders import orders
from nanovllm.lab.bench.parallel.pipeline import pipeline
from nanovllm.lab.bench.parallel.shuffle import experts
from nanovllm.lab.bench.parts import Parts

TITLE = "What parallelism costs"
PARTS: Parts = {
    "orders": ("orders to the ranks", orders),
    "executor": ("executor overhead", executor),
    "all-reduce": ("all-reduce", all_reduces),
    "pipeline": ("pipeline bubble", pipeline),
    "experts": ("expert shuffle", experts),
    "weights": ("weights of a rank", weights),
    "throughput": ("tokens a second", throughput),
}
