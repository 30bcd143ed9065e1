"""Runs tests of the engine in a browser, without pytest."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import itertools
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

# Calls that a failed assertion may repeat to show both sides: they change nothing.
HARMLESS = {"list", "dict", "set", "tuple", "sorted", "len", "sum", "min", "max"}


@contextlib.contextmanager
def raises(kind: type[BaseException], match: str = "") -> Iterator[None]:
    """Stand in for `pytest.raises`."""
    try:
        yield
    except kind as error:
        assert re.search(match, str(error)), f"it says {str(error)!r}, and not {match!r}"
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def parametrize(names: Any, values: Any, ids: Any = None) -> Callable[[Any], Any]:
    """Stand in for `pytest.mark.parametrize`."""
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

    def decorate(test: Any) -> Any:
        rows = [dict(zip(split, row if len(split) > 1 else [row], strict=True)) for row in values]
        test.parameters = [*getattr(test, "parameters", []), rows]
        return test

    return decorate


def stand_in_for_pytest() -> ModuleType:
    """Return a module with the names of pytest that tests in the archive use."""
    module: Any = ModuleType("pytest")
    module.raises = raises
    module.mark = SimpleNamespace(parametrize=parametrize)
    return module  # type: ignore[no-any-return]


def check(
    tests: list[str], choices: Collection[str], describe: Callable[[BaseException], dict[str, Any]]
) -> list[Any]:
    """Run tests.

    Args:
        tests: their names, as `tests.core.test_scheduler:test_name`.
        choices: those of them that describe the engine's own rule, which others may replace.
        describe: returns what is to be shown of an exception.

    Returns:
        For each test, its name as a sentence, "passed", "choice", and what `describe` returned.
    """
    sys.modules.setdefault("pytest", stand_in_for_pytest())
    results = []
    for name in tests:
        module, _, member = name.partition(":")
        test = getattr(importlib.import_module(module), member)
        result: dict[str, Any] = {
            "name": name,
            "sentence": member.removeprefix("test_").replace("_", " "),
            "choice": name in choices,
        }
        try:
            for case in itertools.product(*getattr(test, "parameters", [])):
                test(**{key: value for part in case for key, value in part.items()})
        except Exception as error:
            result |= {"passed": False, **describe(error), "why": explain(error)}
        else:
            result["passed"] = True
        results.append(result)
    return results


def explain(error: BaseException, everywhere: bool = False) -> list[str]:
    """Return the line of the test that failed, and both sides of its comparison, if they can be
    computed again without changing anything.

    Args:
        everywhere: also explain a line that is not in a test.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    frames = [each for each in frames if everywhere or _is_test(each[0])]
    if not frames:
        return []
    frame, number = frames[-1]
    text = linecache.getlines(frame.f_code.co_filename)
    statement = _assertion(text, number)
    if statement is None:
        return [text[number - 1].strip()] if text else []
    return [f"assert {ast.unparse(statement.test)}", *_sides(statement.test, frame)]


def _assertion(text: list[str], number: int) -> ast.Assert | None:
    """Return the assertion to which a line of a module belongs."""
    try:
        tree = ast.parse("".join(text))
    except SyntaxError:
        return None  # no module, such as text that the reader has typed
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    return next((each for each in found if each.lineno <= number <= (each.end_lineno or 0)), None)


def _is_test(frame: FrameType) -> bool:
    return "/tests/" in frame.f_code.co_filename


def _sides(test: ast.expr, frame: FrameType) -> list[str]:
    """Return the values of the first comparison that does not hold."""
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    for part in parts:
        if not isinstance(part, ast.Compare) or not isinstance(part.ops[0], ast.Eq | ast.Is):
            continue
        if len(part.ops) != 1:
            continue
        calls = [node.func for node in ast.walk(part) if isinstance(node, ast.Call)]
        if all(isinstance(call, ast.Name) and call.id in HARMLESS for call in calls):
            names = {**vars(builtins), **frame.f_globals, **frame.f_locals}
            if not eval(ast.unparse(part), names):
                left = repr(eval(ast.unparse(part.left), names))
                right = repr(eval(ast.unparse(part.comparators[0]), names))
                return [f"found    {left[:300]}", f"expected {right[:300]}"]
    return []
