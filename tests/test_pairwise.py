"""The sets of features cover every pair that fits, hold no other, and are few."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.pairwise import covering_cases, covering_sets, half_by_day, in_turn, possible_pairs


@pytest.mark.parametrize("conflicts", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 20])
def test_every_pair_that_fits_is_covered_and_no_other(count: int, conflicts: float) -> None:
    draw = random.Random(count)
    features = [f"feature {number}" for number in range(count)]
    refused = {pair for pair in itertools.combinations(features, 2) if draw.random() < conflicts}
    sets = covering_sets(features, lambda a, b: (a, b) not in refused)
    covered = {pair for chosen in sets for pair in itertools.combinations(chosen, 2)}
    assert covered == set(possible_pairs(features, lambda a, b: (a, b) not in refused))
    assert covered.isdisjoint(refused)
    assert all(2 <= len(chosen) <= 4 for chosen in sets)


def test_sets_are_few() -> None:
    features = [f"feature {number}" for number in range(18)]
    assert len(covering_sets(features, lambda a, b: True)) < 40  # of 153 pairs
    assert len(covering_sets(features, lambda a, b: True, size=18)) == 1


@pytest.mark.parametrize("pairs", [None, [("size", "dtype")], []], ids=str)
def test_cases_have_every_pair_of_values(pairs: list[tuple[str, str]] | None) -> None:
    values = {
        "size": [1, 2, 3, 4, 5],
        "dtype": ["a", "b", "c"],
        "window": [None, 7],
        "shape": [[1], [2], [3]],
    }
    cases = covering_cases(values, pairs)
    assert len(cases) < {None: 22, "[]": 8}.get(pairs if pairs is None else str(pairs), 18)  # of 90
    for name, choices in values.items():
        assert all(any(case[name] == choice for case in cases) for choice in choices)
    for a, b in list(itertools.combinations(values, 2)) if pairs is None else pairs:
        for pair in itertools.product(values[a], values[b]):
            assert any((case[a], case[b]) == pair for case in cases)


def test_by_day_each_case_meets_the_last_values_in_turn() -> None:
    sizes, letters, kinds = (1, 2, 3), [("a", "A"), ("b", "B")], ["x", "y", "z"]
    cases = in_turn(sizes, letters, kinds)
    assert [case.values for case in cases] == [
        (s, *letter, k) for s in sizes for letter in letters for k in kinds
    ]
    day = [case.values for case in cases if not case.marks]
    assert [case[:3] for case in day] == [(s, *letter) for s in sizes for letter in letters]
    assert {(case[0], case[3]) for case in day} > {(1, "x"), (1, "z"), (2, "z"), (2, "y")}
    assert {(case[1], case[3]) for case in day} == {
        (letter, kind) for letter in "ab" for kind in kinds
    }
    assert all(
        [mark.name for mark in case.marks] == ["nightly"]
        for case in cases
        if case.values not in day
    )


def test_half_of_all_combinations_have_every_pair_of_values() -> None:
    values = [[1, 2, 3, 4], ["a", "b", "c"], [True, False]]
    cases = half_by_day(*values)
    assert [case.values for case in cases] == list(itertools.product(*values))
    by_day = [case.values for case in cases if not case.marks]
    assert len(by_day) == 12
    for a, b in itertools.combinations(range(3), 2):
        assert {(case[a], case[b]) for case in by_day} == set(
            itertools.product(values[a], values[b])
        )
