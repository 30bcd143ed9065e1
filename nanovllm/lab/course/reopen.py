"""Grow a class over several cells of a lecture."""

from __future__ import annotations

import abc
import dataclasses
import types
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Class = TypeVar("Class", bound=type)

Item = TypeVar("Item")


class _Empty(abc.ABC, Generic[Item]):
    annotated: int


# The names that the interpreter, `abc` and `typing` write into every class body.
_BOOKKEEPING = {*vars(_Empty), "__annotations_cache__"} - {"__doc__"}


def extend(cls: Class) -> Class:
    """Continue a class: ``@extend`` above ``class A(A): ...`` puts the new members into A itself.

    Objects made before the cell ran have the new members too, and a member of the same name is replaced. The
    build folds all cells of the class into one ordinary class.

    Returns:
        A itself, so that the name stays bound to the one class.

    Raises:
        TypeError: where the built class would behave differently: the class does not reopen a class of its own
            name, a member uses ``super()`` without arguments or ``__class__``, the body has ``__slots__``, or it
            adds a field to a dataclass.
    """
    if len(cls.__bases__) != 1 or cls.__bases__[0].__name__ != cls.__name__:
        raise TypeError(f"@extend continues a class: write `class {cls.__name__}({cls.__name__}):`")
    (original,) = cls.__bases__
    _refuse_fields(cls, original)
    members = {name: value for name, value in vars(cls).items() if name not in _BOOKKEEPING}
    if members.get("__doc__") is None:
        members.pop("__doc__", None)
    for name, value in members.items():
        for function in _functions(value):
            if "__class__" in function.__code__.co_freevars:
                raise TypeError(
                    f"{cls.__name__}.{name} uses super() without arguments, which looks for the wrong class in "
                    f"an @extend body: name the base class, or write the method where the class is first defined"
                )
    for name, value in members.items():
        setattr(original, name, _adopt(original, name, value))
    abc.update_abstractmethods(original)
    return original  # type: ignore[return-value]


def _refuse_fields(cls: type, original: type) -> None:
    if "__slots__" in vars(cls):
        raise TypeError(f"{cls.__name__}: __slots__ cannot be added to a class that exists")
    if not dataclasses.is_dataclass(original):
        return
    for name, annotation in vars(cls).get("__annotations__", {}).items():
        if "ClassVar" not in str(annotation):
            raise TypeError(
                f"{cls.__name__}.{name}: @dataclass has already run, so a field cannot be added; "
                f"write it where the class is first defined"
            )


def _adopt(original: type, name: str, value: Any) -> Any:
    """`value` as a member of `original`: functions get its qualified name, and accessors complete a property."""
    for function in _functions(value, closures=False):
        if function.__qualname__.rpartition(".")[0].rpartition(".")[2] == original.__name__:
            function.__qualname__ = f"{original.__qualname__}.{function.__name__}"
            function.__module__ = original.__module__
    earlier = vars(original).get(name)
    if type(value) is property and type(earlier) is property:
        return property(value.fget or earlier.fget, value.fset or earlier.fset, value.fdel or earlier.fdel)
    return value


def _functions(value: Any, closures: bool = True) -> Iterator[types.FunctionType]:
    """The plain functions inside a member: under static and class methods, properties and decorators."""
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, types.FunctionType):
            yield item
            pending.append(getattr(item, "__wrapped__", None))
            if closures:
                pending += _closed_over(item)
        elif isinstance(item, staticmethod | classmethod):
            pending.append(item.__func__)
        elif isinstance(item, property):
            pending += [item.fget, item.fset, item.fdel]
        elif not isinstance(item, type):  # functools.cache, cached_property, partialmethod and their like
            inside = getattr(item, "__dict__", {})
            pending += [inside.get("__wrapped__"), inside.get("func")]


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    """What a decorator's wrapper remembers: the function that it wraps is among it."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that its scope has not bound yet
            continue
