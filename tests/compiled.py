"""The compiled functions of the CPU: operators, and those for shared memory between processes."""

from __future__ import annotations

import os

import pytest

# For tests of what cannot exist without them. (`make as-PLAIN` runs all other tests without them.)
needs_compiled = pytest.mark.skipif(
    os.environ.get("NANOVLLM_NATIVE") == "0",
    reason="it needs compiled functions, and NANOVLLM_NATIVE=0 is set",
)
