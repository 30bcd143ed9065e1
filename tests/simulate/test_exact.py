"""Steps that are made at once are equal to steps made one by one: plans, times, blocks and
counters."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulate.exact import case_of, compare, crowded_case_of

CASES_BY_DAY = 120
# In these, a member's new block takes several blocks from the cached prefix of the next request in
# line, which is then admitted.
UNBLOCKING_CASES = [1556, 1610, 1667, 1699, 2577, 2946]


def test_steps_at_once_are_equal_to_steps_one_by_one() -> None:
    total: Counter[str] = Counter()
    for seed in range(CASES_BY_DAY):
        total += compare(case_of(seed))
    for what in ("length", "abort", "preemptions", "hit tokens", "evictions"):
        assert total[what] > 50, f"the cases have too little of it: {what}"


@pytest.mark.parametrize("seed", UNBLOCKING_CASES)
def test_blocks_of_a_run_let_the_next_request_in(seed: int) -> None:
    compare(crowded_case_of(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("thousand", range(1, 6))
def test_thousands_of_workloads(thousand: int) -> None:
    for seed in range(1000 * thousand, 1000 * (thousand + 1)):
        compare(case_of(seed))
        compare(crowded_case_of(seed))
