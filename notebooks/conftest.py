"""Cells with the tag "gpu" in their metadata are skipped where torch sees no GPU; what they last
put out stays. Stored traces are not compared, as pictures are not: another machine compresses them
into other bytes."""

from __future__ import annotations

import pytest
import torch
from nbval.plugin import IPyNbFile

from nanovllm.lab import stored


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark such cells, which are reported as skipped; name the types that nbval must not
    compare."""
    for file in {item.parent for item in items if isinstance(item.parent, IPyNbFile)}:
        file.skip_compare = (*file.skip_compare, stored.TRACE, stored.RANKS)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in getattr(item, "cell", {}).get("metadata", {}).get("tags", []):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
