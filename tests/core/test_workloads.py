"""Every plan, output and counter of hundreds of random workloads is the stored one."""

from __future__ import annotations

import pytest

from tests.core.workloads import NUM_WORKLOADS, differences, stored


@pytest.mark.parametrize(
    "seeds",
    [range(100), pytest.param(range(100, NUM_WORKLOADS), marks=pytest.mark.nightly)],
    ids=str,
)
def test_plans_are_the_stored_ones(seeds: range) -> None:
    """`python -m tests.core.workloads --store` stores others, if plans are meant to change."""
    assert list(differences(seeds)) == []


def test_workloads_differ() -> None:
    assert len(set(stored())) == NUM_WORKLOADS
