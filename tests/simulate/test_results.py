"""The histogram of times between tokens."""

from __future__ import annotations

import random

import pytest

from nanovllm.simulate.results import TokenGaps, bucket_of, lowest_of


def test_buckets_follow_one_another_and_are_narrow() -> None:
    for bucket in range(5000):
        lowest = lowest_of(bucket)
        following = lowest_of(bucket + 1)
        assert bucket_of(lowest) == bucket == bucket_of(following - 1)
        assert following - lowest <= max(1, lowest / 128)


def test_growing_gaps_are_counted_as_if_one_by_one() -> None:
    rng = random.Random(0)
    for _ in range(200):
        at_once = TokenGaps()
        singly = TokenGaps()
        for _ in range(3):
            first = rng.randrange(1, 10 ** rng.randrange(1, 13))
            growth = rng.choice([0, 1, rng.randrange(1, first + 1)])
            num_steps = rng.randrange(300)
            count = rng.randrange(1, 5)
            at_once.add_growing(first, growth, num_steps, count)
            for i in range(num_steps):
                singly.add(first + i * growth, count)
        assert vars(at_once) == vars(singly)


def test_quantiles_and_means() -> None:
    gaps = TokenGaps()
    assert (gaps.quantile(0.5), gaps.mean) == (0.0, 0.0)
    for gap in range(1, 10_001):
        gaps.add(gap)
    assert gaps.mean == 5000.5 and gaps.longest == 10_000
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        assert gaps.quantile(share) == pytest.approx(10_000 * share, rel=0.005)
