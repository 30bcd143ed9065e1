"""Tests of pairs: few sets of features, or few cases of parameters, in which every pair occurs that
can be had together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest

Pair = tuple[str, str]


def possible_pairs(features: Sequence[str], fit: Callable[[str, str], bool]) -> list[Pair]:
    """All pairs of features that fit, in the order of `features`."""
    return [pair for pair in itertools.combinations(features, 2) if fit(*pair)]


def covering_sets(
    features: Sequence[str], fit: Callable[[str, str], bool], size: int = 4
) -> list[tuple[str, ...]]:
    """Sets of features such that each pair that fits is in a set, and that no set has a pair that
    does not fit.

    Each set starts with the first pair that is not covered yet, and takes in the feature that
    covers the most further pairs until none covers any. Sets stay small, because one feature may
    keep another from having an effect: a test of all pairs alone still belongs into the nightly
    run."""
    fitting = possible_pairs(features, fit)
    pending, sets = dict.fromkeys(fitting), []
    order = {feature: number for number, feature in enumerate(features)}

    def pair(a: str, b: str) -> Pair:
        return (a, b) if order[a] < order[b] else (b, a)

    while pending:
        chosen = list(next(iter(pending)))
        while len(chosen) < size:
            gains = {
                feature: sum(pair(feature, other) in pending for other in chosen)
                for feature in features
                if feature not in chosen
                and all(pair(feature, other) in fitting for other in chosen)
            }
            best = max(gains, key=gains.__getitem__, default=None)
            if best is None or not gains[best]:
                break
            chosen.append(best)
        for covered in itertools.combinations(sorted(chosen, key=order.__getitem__), 2):
            pending.pop(covered, None)
        sets.append(tuple(sorted(chosen, key=order.__getitem__)))
    return sets


def covering_cases(
    values: Mapping[str, Sequence[Any]], pairs: Collection[tuple[str, str]] | None = None
) -> list[dict[str, Any]]:
    """Few cases, each with a value of every parameter, in which all pairs of values of two
    parameters occur.

    Args:
        values: by parameter.
        pairs: the parameters whose pairs of values are wanted; all by default.
    """
    wanted = list(itertools.combinations(values, 2)) if pairs is None else list(pairs)
    indices = {name: range(len(choices)) for name, choices in values.items()}
    pending = {(a, i, b, j) for a, b in wanted for i in indices[a] for j in indices[b]}
    # Each value, even one of which no pair is wanted.
    pending |= {(a, i, a, i) for a in values for i in indices[a]}
    draw, cases = random.Random(0), []

    def covered(case: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return pending & {
            (a, case[a], b, case[b]) for a, b in [*wanted, *zip(values, values, strict=True)]
        }

    while pending:
        a, i, b, j = min(pending)
        candidates = [
            {name: draw.choice(indices[name]) for name in values} | {a: i, b: j} for _ in range(100)
        ]
        best = max(candidates, key=lambda case: len(covered(case)))
        pending -= covered(best)
        cases.append({name: values[name][index] for name, index in best.items()})
    return cases


def in_turn(*values: Iterable[Any], one_in: int = 0) -> list[Any]:
    """All cases of the product, for `pytest.mark.parametrize`: by day each combination of all
    parameters but the last with one value of the last, in turn; the others are nightly.

    Args:
        values: by parameter; a tuple among them is a value each of several parameters.
        one_in: of how many cases one is by day; by default as many as the last parameter has
            values.
    """
    numbered = [list(enumerate(choices)) for choices in values]
    cases = []
    for case in itertools.product(*numbered):
        is_by_night = sum(number for number, _ in case) % (one_in or len(numbered[-1]))
        parts = [value if isinstance(value, tuple) else (value,) for _, value in case]
        cases.append(
            pytest.param(
                *itertools.chain(*parts), marks=[pytest.mark.nightly] if is_by_night else []
            )
        )
    return cases


def half_by_day(*values: Sequence[Any]) -> list[Any]:
    """All combinations of the values, as pytest's parameters; every second one only by night. By
    day each value occurs, and of three lists and more each pair of values."""
    return in_turn(*([(value,) for value in choices] for choices in values), one_in=2)
