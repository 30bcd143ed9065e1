"""Tests of Triton kernels in Triton's interpreter, each module in a process of its own: see
tests/attention/test_interpreted.py.

By hand: TRITON_INTERPRET=1 python -m pytest tests/attention/interpreted

Two thirds of the interpreter's time do not go into kernels. Each call of a function, `tl.max`
included, looks through all of `triton.language` for what to replace; here it does so once per
launch and knows the names. And each sum and product of integers is computed once more in 64 bits;
here only where offsets are large, and at night."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from nanovllm.ops.support import is_interpreted
from tests.examples import examples

# A wild load of an interpreted kernel takes the whole process along, so the ordinary run must not
# collect them.
collect_ignore_glob = [] if is_interpreted() else ["test_*.py"]

if is_interpreted():
    import triton.language as tl
    from triton.runtime import interpreter

    _builtins = cache(
        lambda package: [
            name for name, value in inspect.getmembers(package) if tl.core.is_builtin(value)
        ]
    )
    _prepared: set[Callable] = set()  # functions that were called since the launch began
    _prepare, _restore = interpreter._patch_lang, interpreter._LangPatchScope.restore

    def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in _builtins(package):
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    def _patch_lang(function: Callable) -> Any:
        if function not in _prepared:
            _prepared.add(function)
            return _prepare(function)

    def restore(scope: Any) -> None:
        _restore(scope)
        _prepared.clear()

    interpreter._patch_builtin, interpreter._patch_lang = _patch_builtin, _patch_lang
    interpreter._LangPatchScope.restore = restore


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
