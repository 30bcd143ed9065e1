"""Predicts the cost of collectives: a message takes latency + bytes / bandwidth, and an algorithm
is a number of messages.

The model is that of R. Hockney (1994), used for collectives by R. Thakur, R. Rabenseifner and W.
Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).

Built by notebooks/21_process_groups.ipynb: edit it there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul


@dataclass(frozen=True)
class Link:
    """A connection between two ranks.

    Attributes:
        latency: seconds until the first byte of a message arrives.
        bandwidth: bytes per second, in one direction.
        source: where the numbers come from.
    """

    name: str
    latency: float
    bandwidth: float
    source: str = ""

    def message(self, num_bytes: float) -> float:
        """Seconds for one message."""
        return self.latency + num_bytes / self.bandwidth


# Latencies: NCCL src/graph/tuning.cc, ring, LL protocol. TCP: tens of microseconds through two
# kernels, Barroso et al. 2017. Peak bandwidths from data sheets, in one direction. Programs reach
# about 80 % of them.
LINKS = {
    link.name: link
    for link in (
        Link("NVLink 5", 0.6e-6, 900e9, "NVIDIA B200 data sheet: 1.8 TB/s both directions"),
        Link("NVLink 4", 0.6e-6, 450e9, "NVIDIA H100 data sheet: 900 GB/s both directions"),
        Link("PCIe 5.0 x16", 1.0e-6, 64e9, "NVIDIA H100 data sheet: 128 GB/s both directions"),
        Link("PCIe 4.0 x16", 1.0e-6, 32e9, "NVIDIA A100 data sheet: 64 GB/s both directions"),
        Link("InfiniBand NDR", 2.7e-6, 50e9, "NVIDIA ConnectX-7: 400 Gb/s per port"),
        Link("RoCE 100 Gb/s", 2.7e-6, 12.5e9, "RDMA over 100 Gb/s Ethernet, IEEE 802.3ba"),
        Link("TCP 10 Gb/s", 30e-6, 1.25e9, "IEEE 802.3ae"),
    )
}


def ring_all_reduce(link: Link, world_size: int, num_bytes: float) -> float:
    """Reduce-scatter, then all-gather, around a ring: 2 (n - 1) steps with 1/n of the bytes each.
    Fewest bytes, many steps."""
    return 2 * (world_size - 1) * link.message(num_bytes / world_size)


def tree_all_reduce(link: Link, world_size: int, num_bytes: float) -> float:
    """Up a binary tree and down again, with all bytes in each step: few steps, more bytes."""
    return 2 * math.ceil(math.log2(world_size)) * link.message(num_bytes)


def one_shot_all_reduce(link: Link, world_size: int, num_bytes: float) -> float:
    """Every rank reads the data of all others in one step: fewest steps, most bytes."""
    return link.message((world_size - 1) * num_bytes) if world_size > 1 else 0.0


def two_shot_all_reduce(link: Link, world_size: int, num_bytes: float) -> float:
    """Every rank sums one part of all data, then reads the other sums: two steps."""
    return 2 * link.message((world_size - 1) / world_size * num_bytes) if world_size > 1 else 0.0


def ring_all_gather(link: Link, world_size: int, num_bytes: float) -> float:
    """Each rank's `num_bytes` go around a ring in n - 1 steps. A reduce-scatter of
    `world_size * num_bytes` takes as long."""
    return (world_size - 1) * link.message(num_bytes)


ALL_REDUCES = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "one-shot": one_shot_all_reduce,
    "two-shot": two_shot_all_reduce,
}


def best_all_reduce(link: Link, world_size: int, num_bytes: float) -> tuple[str, float]:
    """The name of the fastest algorithm, and its time in seconds."""
    costs = {name: cost(link, world_size, num_bytes) for name, cost in ALL_REDUCES.items()}
    return min(costs.items(), key=lambda pair: pair[1])


def wire_bytes(operation: str, world_size: int, num_bytes: float) -> float:
    """The least number of bytes that a rank must send.

    Args:
        operation: "all_reduce" or "all_gather".
        num_bytes: of the rank's tensor.
    """
    others = world_size - 1
    return num_bytes * {"all_reduce": 2 * others / world_size, "all_gather": others}[operation]


def fit(name: str, sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """Fit latency and bandwidth of `latency + size / bandwidth` to measured times.

    Errors are relative to the time; otherwise only the largest sizes would matter.

    Args:
        sizes: in bytes. If all are equal, the whole time counts as latency.
        seconds: the measured time of each size.
    """
    weights = [time**-2 for time in seconds]
    # Of centred sizes and times, the least squares is a ratio of two sums.
    mean_size = sum(map(mul, weights, sizes)) / sum(weights)
    mean_time = sum(map(mul, weights, seconds)) / sum(weights)
    centred = [size - mean_size for size in sizes]
    spread = sum(w * x * x for w, x in zip(weights, centred, strict=True))
    products = zip(weights, centred, seconds, strict=True)
    per_byte = 0.0
    if min(sizes) < max(sizes):
        per_byte = sum(w * x * (time - mean_time) for w, x, time in products) / spread
    latency = mean_time - per_byte * mean_size
    return Link(name, max(latency, 0.0), 1 / per_byte if per_byte > 0 else math.inf, "measured")
