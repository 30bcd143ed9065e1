"""Checks settings that users write against their annotations."""

from __future__ import annotations

import functools
import re
import reprlib
import sys
import typing
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]

# What msgspec expects, in words.
WORDS = {"int": "an integer", "float": "a finite number", "bool": "True or False", "str": "a string", "null": "None"}
WORDS |= {"array": "a list", "object": "a dictionary", "|": "or"}
WORDS |= {"<=": "of at most", ">=": "of at least", ">": "above"}


def check_fields(settings: Any) -> None:
    """Check a dataclass's values against its annotations, ranges included, and convert them: integers to floats, tuples to lists.

    Raises:
        ValueError: a value of another type, or out of its range; the message names the field.
    """
    fields = _fields(type(settings))  # type: ignore[arg-type]
    try:
        vars(settings).update(msgspec.convert(vars(settings), fields))
    except msgspec.ValidationError as error:
        expected, place = re.fullmatch(r"(.*?) - at (.*)", str(error)).groups()  # type: ignore[union-attr]
        name = re.search(r"\$\.(\w+)", place)[1]  # type: ignore[index]
        hint = typing.get_type_hints(fields)[name]
        if typing.get_origin(hint) is Literal:
            expected = f"one of {', '.join(typing.get_args(hint))}"
        else:
            found = re.sub(r"Expected |, got .*|`|\.0\b", "", expected.replace("Number out of range", "float"))
            expected = " ".join(WORDS.get(word, word) for word in found.replace("of length", "with a length").split())
        if "[" in place or "key" in place:
            expected = f"valid: each entry {expected}"
        raise ValueError(f"{name} must be {expected}, got {reprlib.repr(getattr(settings, name))}") from None


@functools.cache
def _fields(cls: type) -> Any:
    return TypedDict(cls.__name__, typing.get_type_hints(cls, include_extras=True))  # type: ignore[operator]
