"""Tests of Triton kernels in Triton's interpreter, each module in a process of its own: see
tests/attention/test_interpreted.py.

By hand: TRITON_INTERPRET=1 python -m pytest tests/attention/interpreted

The interpreter computes each sum and product of integers once more in 64 bits; here only where
offsets are large, and at night."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from nanovllm.ops.support import is_interpreted
from tests.examples import examples

# A wild load of an interpreted kernel takes the whole process along, so the ordinary run must not
# collect them.
collect_ignore_glob = [] if is_interpreted() else ["test_*.py"]


@pytest.fixture(autouse=True)
def overflow(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether the interpreter looks for sums and products beyond 32 bits."""
    from triton.runtime.interpreter import interpreter_builder

    options = interpreter_builder.options
    is_night = examples(3) == 3 or request.node.get_closest_marker("nightly") is not None
    looks = is_night or "_31" in request.node.name
    interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=looks)
    yield
    interpreter_builder.options = options
