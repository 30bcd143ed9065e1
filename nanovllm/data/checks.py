"""Checks settings that users write against their annotations."""

import dataclasses
import difflib
import functools
import re
import reprlib
import sys
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, TypedDict

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
# Sizes of memory, whose number of bytes is finite.
Gibibytes = Annotated[float, Meta(ge=0, le=1e9)]

# What msgspec expects, in words.
WORDS = {
    "int": "an integer",
    "float": "a finite number",
    "bool": "True or False",
    "str": "a string",
    "null": "None",
}
WORDS |= {"array": "a list", "object": "a dictionary", "|": "or"}
WORDS |= {"<=": "of at most", ">=": "of at least", ">": "above"}


def set_fields(settings: object, **values: object) -> None:
    """Replace values of a dataclass while it is created, in its `__post_init__`. For a frozen one,
    this is the only way to store a value in another form than it was given in."""
    vars(settings).update(values)


def check_fields(settings: object) -> None:
    """Check a dataclass's values against its annotations, ranges included, and convert them:
    integers to floats, tuples to lists.

    Raises:
        ValueError: a value of another type, or out of its range; the message names the field.
    """
    fields = _fields(type(settings))  # type: ignore[arg-type]
    try:
        set_fields(settings, **msgspec.convert(vars(settings), fields))
    except msgspec.ValidationError as error:
        expected, place = re.fullmatch(r"(.*?) - at (.*)", str(error)).groups()  # type: ignore[union-attr]
        name = re.search(r"\$\.(\w+)", place)[1]  # type: ignore[index]
        hint = typing.get_type_hints(fields)[name]
        allowed = next(
            (h for h in (hint, *typing.get_args(hint)) if typing.get_origin(h) is Literal), None
        )
        if allowed is not None:
            expected = f"one of {', '.join(typing.get_args(allowed))}"
        else:
            found = re.sub(
                r"Expected |, got .*|`|\.0\b", "", expected.replace("Number out of range", "float")
            )
            expected = " ".join(
                WORDS.get(word, word)
                for word in found.replace("of length", "with a length").split()
            )
        if "[" in place or "key" in place:
            expected = f"valid: each entry {expected}"
        raise ValueError(
            f"{name} must be {expected}, got {reprlib.repr(getattr(settings, name))}"
        ) from None


def users_mistake(error: BaseException) -> str | None:
    """Return what the user can change if an engine fails with this error while it starts; None for
    an error of the engine itself."""
    if isinstance(error, MemoryError):
        return (
            f"there is not enough memory ({error}): lower num_kv_blocks, swap_space, max_num_seqs "
            "or max_num_batched_tokens, whichever is large"
        )
    is_lost_peer = isinstance(error, ConnectionError)
    return str(error) if isinstance(error, ValueError | OSError) and not is_lost_peer else None


def did_you_mean(word: str, known: Iterable[str], written: Mapping[str, str] | None = None) -> str:
    """The end of a message about an unknown word: "; did you mean port?", or "" if no known word
    resembles it.

    Args:
        written: how a known word is to be written, unless as it is.
    """
    for similar in difflib.get_close_matches(word[:100], known, 5):
        if _is_like(word[:100], similar):
            return f"; did you mean {(written or {}).get(similar, similar)}?"
    return ""


def _is_like(word: str, known: str) -> bool:
    """Whether the parts in which two words differ resemble each other: `max-log-len` is no misspelt
    `max-model-len`, although most of its letters are the same."""
    parts = re.findall(r"[a-z0-9]+", word.lower())
    known_parts = re.findall(r"[a-z0-9]+", known.lower())
    rest = "".join(part for part in parts if part not in known_parts)
    known_rest = "".join(part for part in known_parts if part not in parts)
    is_prefix = rest.startswith(known_rest) or known_rest.startswith(rest)
    return is_prefix or difflib.SequenceMatcher(a=rest, b=known_rest).ratio() >= 0.65


def check_keywords(
    name: str, options: Iterable[str], cls: type, written: Mapping[str, str] | None = None
) -> None:
    """Refuse keyword arguments of `name` that are no fields of the dataclass `cls`.

    Args:
        written: words that belong elsewhere, and how they are written there.

    Raises:
        TypeError: names the first one, and a similar one.
    """
    fields = [field.name for field in dataclasses.fields(cls)]
    for option in options:
        if option not in fields:
            hint = did_you_mean(option, [*fields, *(written or ())], written)
            raise TypeError(f"{name}() has no argument {option!r}{hint}")


class Keywords:
    """Base of dataclasses that users create with keywords. Raises a TypeError for an unknown one
    (`check_keywords`), and a ValueError for a wrong value (`check_fields`)."""

    def __new__(cls, *args: object, **options: object) -> typing.Self:
        if options:
            check_keywords(cls.__name__, options, cls)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)


def check_pipeline_parallel(num_layers: int, stages: int) -> None:
    """Check that a model can be divided into so many stages, before anything is loaded.

    Raises:
        ValueError: it cannot; the message names the numbers that fit.
    """
    if not 1 <= stages <= num_layers:
        raise ValueError(
            f"{num_layers} layers cannot be divided among {stages} stages, each of which needs "
            f"one; pipeline_parallel_size may be 1 to {num_layers}"
        )


@functools.cache
def _fields(cls: type) -> type:
    fields: type = TypedDict(cls.__name__, typing.get_type_hints(cls, include_extras=True))  # type: ignore
    return fields
