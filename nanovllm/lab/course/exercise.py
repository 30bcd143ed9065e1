"""Exercises of a lecture: a checker that explains the first mistake, and hints on demand.

An unsolved stub raises NotImplementedError. The checker reports this without failing, so that a
lecture runs from top to bottom before its exercises are solved."""

import copy
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class _Array(Protocol):
    """A tensor or an array of numpy's."""

    shape: Sequence[int]
    tolist: Callable[[], object]


Case = tuple[Any, Any] | Callable[[Any], object]


class Exercise:
    """A titled set of cases with hints that are shown one at a time.

    Args:
        title: what the reports call the exercise.
        cases: pairs ``(arguments, expected)``, where a tuple of arguments is spread and anything
            else is the only argument, and where an expected exception class means "must raise it";
            or functions that take what the learner wrote and assert something about it, with the
            explanation as the assertion's message.
        hints: from the gentlest to the one that gives most away.
    """

    def __init__(self, title: str, cases: Sequence[Case], hints: Sequence[str] = ()) -> None:
        self.title = title
        self.cases = cases
        self.hints = hints
        self._shown = 0

    def check(self, function: Callable[..., Any]) -> bool:
        """Try a learner's function (or class) on the cases and print the first thing that is wrong.

        Returns:
            True if every case is right. False, after a report, if one is wrong or the stub is not
            solved yet.
        """
        for number, case in enumerate(self.cases, start=1):
            try:
                case(function) if callable(case) else _compare(function, *case)
                continue
            except NotImplementedError:
                print(f"{self.title}: not solved yet.")
                return False
            except AssertionError as error:
                complaint = str(error) or f"an assertion of {_name(case, 'the case')} does not hold"
            except Exception as error:
                complaint = f"it raised {_describe(error)}"
            print(f"{self.title}: case {number} of {len(self.cases)} is wrong.\n  {complaint}")
            return False
        print(f"{self.title}: right, all {len(self.cases)} cases.")
        return True

    def hint(self) -> None:
        """Print the next hint, or that there are no more."""
        if self._shown == len(self.hints):
            print(f"{self.title}: no more hints; the solution is below.")
            return
        self._shown += 1
        print(f"Hint {self._shown} of {len(self.hints)}: {self.hints[self._shown - 1]}")


def _compare(function: Callable[..., Any], arguments: Any, expected: Any) -> None:
    """Call the function; an `AssertionError` says what it does instead of what is expected."""
    arguments = arguments if isinstance(arguments, tuple) else (arguments,)
    call = f"{_name(function, 'it')}({', '.join(map(repr, arguments))})"
    must_raise = isinstance(expected, type) and issubclass(expected, Exception)
    try:
        # A copy, because a function that changes its arguments must not spoil the case for the next
        # try.
        result = function(*copy.deepcopy(arguments))
    except NotImplementedError:
        raise
    except Exception as error:
        is_right = must_raise and isinstance(error, expected)
        found = f"raised {_describe(error)}"
    else:
        is_right = not must_raise and _same(result, expected)
        found = f"returned {result!r}"
        found += " (is a `return` missing?)" if result is None and not must_raise else ""
    if not is_right:
        wanted = f"raise {expected.__name__}" if must_raise else f"return {expected!r}"
        raise AssertionError(f"{call} should {wanted}; it {found}")


def _name(function: object, otherwise: str) -> str:
    """The name of a function or class. A partial has none."""
    return str(getattr(function, "__name__", otherwise))


def _describe(error: Exception) -> str:
    line = traceback.extract_tb(error.__traceback__)[-1].lineno
    return f"{type(error).__name__}: {error} (line {line})"


def _same(result: Any, expected: Any) -> bool:
    """Equality that forgives rounding, and that compares tensors and arrays by shape and
    elements."""
    if isinstance(expected, _Array) and isinstance(result, _Array):
        return tuple(result.shape) == tuple(expected.shape) and _same(
            result.tolist(), expected.tolist()
        )
    if isinstance(expected, float) and isinstance(result, int | float):
        return (
            math.isclose(result, expected, rel_tol=1e-5, abs_tol=1e-6)
            or result != result != expected != expected
        )
    if isinstance(expected, list | tuple) and type(result) is type(expected):
        return len(result) == len(expected) and all(map(_same, result, expected))
    if isinstance(expected, dict) and isinstance(result, dict):
        return result.keys() == expected.keys() and all(
            _same(result[key], expected[key]) for key in expected
        )
    return bool(result == expected)
