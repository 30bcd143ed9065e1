"""Tests of pairs of features: few sets of features, in which every pair occurs that can be had together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

Pair = tuple[str, str]


def possible_pairs(features: Sequence[str], fit: Callable[[str, str], bool]) -> list[Pair]:
    """All pairs of features that fit, in the order of `features`."""
    return [pair for pair in itertools.combinations(features, 2) if fit(*pair)]


def covering_sets(features: Sequence[str], fit: Callable[[str, str], bool], size: int = 4) -> list[tuple[str, ...]]:
    """Sets of features such that each pair that fits is in a set, and that no set has a pair that does not fit.

    Each set starts with the first pair that is not covered yet, and takes in the feature that covers the most further
    pairs until none covers any. Sets stay small, because one feature may keep another from having an effect: a test of
    all pairs alone still belongs into the nightly run.
    """
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
                if feature not in chosen and all(pair(feature, other) in fitting for other in chosen)
            }
            best = max(gains, key=gains.__getitem__, default=None)
            if best is None or not gains[best]:
                break
            chosen.append(best)
        for covered in itertools.combinations(sorted(chosen, key=order.__getitem__), 2):
            pending.pop(covered, None)
        sets.append(tuple(sorted(chosen, key=order.__getitem__)))
    return sets
