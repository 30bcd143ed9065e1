"""Cells with the tag "gpu" in their metadata are skipped where torch sees no GPU; what they last
put out stays."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark such cells; they are reported as skipped."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in getattr(item, "cell", {}).get("metadata", {}).get("tags", []):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
