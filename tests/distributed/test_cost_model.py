"""The cost of collectives: fits and bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.distributed import cost_model


@given(
    st.floats(1e-7, 1e-3),
    st.floats(1e7, 1e12),
    st.sets(st.integers(1, 10**8), min_size=2, max_size=8),
)
def test_a_fit_finds_the_link_behind_exact_times(latency, bandwidth, sizes):
    link = cost_model.Link("any", latency, bandwidth)
    times = [link.message(size) for size in sizes]
    found = cost_model.fit("found", sorted(sizes), [link.message(size) for size in sorted(sizes)])
    for size, seconds in zip(sizes, times, strict=True):
        assert found.message(size) == pytest.approx(seconds, rel=1e-3)


@given(st.integers(2, 64), st.integers(1, 10**9), st.sampled_from(list(cost_model.LINKS.values())))
def test_no_all_reduce_beats_the_bytes_it_has_to_send(world_size, num_bytes, link):
    least = cost_model.wire_bytes("all_reduce", world_size, num_bytes) / link.bandwidth
    for cost in cost_model.ALL_REDUCES.values():
        assert cost(link, world_size, num_bytes) > min(least, num_bytes / link.bandwidth)
    ring = cost_model.ring_all_reduce(link, world_size, num_bytes)
    steps = 2 * (world_size - 1) * link.latency
    assert ring == pytest.approx(steps + least)
    halves = cost_model.ring_all_gather(link, world_size, num_bytes / world_size)
    assert ring == pytest.approx(2 * halves)  # a reduce-scatter and an all-gather
    name, best = cost_model.best_all_reduce(link, world_size, num_bytes)
    assert best == min(
        cost(link, world_size, num_bytes) for cost in cost_model.ALL_REDUCES.values()
    )
    assert cost_model.ALL_REDUCES[name](link, world_size, num_bytes) == best


def test_alone_nothing_costs_anything():
    link = cost_model.LINKS["NVLink 4"]
    costs = [*cost_model.ALL_REDUCES.values(), cost_model.ring_all_gather]
    assert all(cost(link, 1, 1e6) == 0 for cost in costs)
    assert (
        cost_model.wire_bytes("all_reduce", 1, 8) == cost_model.wire_bytes("all_gather", 1, 8) == 0
    )


def test_of_equal_sizes_the_whole_time_is_latency() -> None:
    found = cost_model.fit("found", [200, 200, 200], [0.2, 0.2, 0.2])
    assert found.latency == pytest.approx(0.2)
    assert found.bandwidth == float("inf")
    assert found.message(200) == pytest.approx(0.2)
