"""Scores of a reader's rule against vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def score(contest: str, report: Callable[[Any], None]) -> dict[str, Any]:
    """Return the scores of the rule that is in place."""
    raise NotImplementedError(contest)
