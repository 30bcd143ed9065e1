"""How many examples a costly property is tested with: a third of them, or all where
NANOVLLM_TEST_EXAMPLES is "all"."""

from __future__ import annotations

import os


def examples(number: int) -> int:
    """For `max_examples` of a test whose examples take long."""
    return number if os.environ.get("NANOVLLM_TEST_EXAMPLES") == "all" else number // 3
