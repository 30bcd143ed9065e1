"""Grow a class over several cells of a lecture."""

import abc
import dataclasses
import gc
import types
from typing import Generic, TypeVar

Class = TypeVar("Class", bound=type)

Item = TypeVar("Item")


class _Empty(abc.ABC, Generic[Item]):
    annotated: int


# The names that the interpreter, `abc` and `typing` write into every class body.
_BOOKKEEPING = {*vars(_Empty), "__annotations_cache__"} - {"__doc__"}


def extend(cls: Class) -> Class:
    """Continue a class: ``@extend`` above ``class A(A): ...`` puts the new members into A itself.

    Objects made before the cell ran have the new members too, and a member of the same name is
    replaced. The build folds all cells of the class into one ordinary class.

    Returns:
        A itself, so that the name stays bound to the one class.

    Raises:
        TypeError: where the built class would behave differently: the class does not reopen a class
            of its own name, a member uses
            ``super()`` without arguments or ``__class__``, the body has ``__slots__``, or it adds a
            field to a dataclass that has not got it.
    """
    name = cls.__name__
    if len(cls.__bases__) != 1 or cls.__bases__[0].__name__ != name:
        raise TypeError(f"@extend continues a class: write `class {name}({name}):`")
    (original,) = cls.__bases__
    members = {name: value for name, value in vars(cls).items() if name not in _BOOKKEEPING}
    if members.get("__doc__") is None:
        members.pop("__doc__", None)
    if members.pop("__slots__", ()):
        # Those of a `msgspec.Struct` are empty if it only repeats fields.
        raise TypeError(f"{name}: __slots__ cannot be added to a class that exists")
    known = (
        [field.name for field in dataclasses.fields(original)]
        if dataclasses.is_dataclass(original)
        else None
    )
    for field, annotation in (
        vars(cls).get("__annotations__", {}).items() if known is not None else ()
    ):
        if known is not None and field in known:  # the built class has it: the cell only shows it
            members.pop(field, None)
        elif "ClassVar" not in str(annotation):
            raise TypeError(
                f"{name}.{field}: @dataclass has already run, so a field cannot be added; "
                "write it where the class is first defined"
            )
    # The compiler gives methods that use super() or __class__ a cell that holds their class.
    if any(isinstance(holder, types.CellType) for holder in gc.get_referrers(cls)):
        raise TypeError(
            f"{name}: a method uses super() without arguments, which looks for the wrong class in "
            "an @extend body: name the base class, or write the method where the class is first "
            "defined"
        )
    for member, value in members.items():
        setattr(original, member, value)
    abc.update_abstractmethods(original)
    return original  # type: ignore[return-value]
