"""Steps that are made at once are equal to steps made one by one: plans, times, blocks and
counters."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulate.exact import case_of, compare

CASES_BY_DAY = 120


def test_steps_at_once_are_equal_to_steps_one_by_one() -> None:
    total: Counter[str] = Counter()
    for seed in range(CASES_BY_DAY):
        total += compare(case_of(seed))
    for what in ("length", "abort", "preemptions", "hit tokens", "evictions"):
        assert total[what] > 50, f"the cases have too little of it: {what}"


@pytest.mark.nightly
@pytest.mark.parametrize("thousand", range(1, 6))
def test_thousands_of_workloads(thousand: int) -> None:
    for seed in range(1000 * thousand, 1000 * (thousand + 1)):
        compare(case_of(seed))
