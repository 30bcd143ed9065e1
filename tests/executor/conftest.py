"""Ranks that these tests start are forked, not started anew."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def ranks_are_forked(forked: None) -> None:
    """See the fixture `forked`."""
