"""How many examples a costly property is tested with: a third of them or fewer, or all where
NANOVLLM_TEST_EXAMPLES is "all", as by night."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def all_examples() -> bool:
    """Whether properties are tested as by night."""
    return os.environ.get("NANOVLLM_TEST_EXAMPLES") == "all"


def examples(number: int, by_day: int | None = None) -> int:
    """For `max_examples` of a test whose examples take long.

    Args:
        number: the examples by night.
        by_day: the examples by day; a third of `number` by default.
    """
    if all_examples():
        return number
    return number // 3 if by_day is None else by_day


def by_night(cases: Iterable[Any]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`, marked as nightly.

    A tuple is a value for each of several parameters.
    """
    parts = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*values, marks=pytest.mark.nightly) for values in parts]
