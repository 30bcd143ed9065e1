"""Short strings that match regular expressions.

A grammar tells which byte may come next, and not how many more are needed: after `x`, the
expression `.*abc` allows the same bytes as before. An example shows the way."""

from __future__ import annotations

import re
import string
import warnings
from collections.abc import Callable
from typing import Any

# Part of an expression as Python's parser returns it; its types are private.
Parsed = Any
# Longer repetitions are not written out.
LONGEST_EXAMPLE = 64
# Characters for a class such as `[^x]` or `\w`, the preferred first.
CHARACTERS = (
    string.ascii_lowercase
    + string.digits
    + string.ascii_uppercase
    + " _-.@/:,;+*#=?!&%$(){}[]<>|~^'`"
)
# What JavaScript and Rust allow, and how Python spells it.
SPELLED_OTHERWISE = {r"(\\[dswDSW])-": r"\1\\-", r"\(\?<(?=\w)": "(?P<"}


def shortest_match(pattern: str) -> str | None:
    """Return a short string that matches a regular expression. Conditions such as look-ahead are
    ignored.

    Returns:
        None if Python cannot parse the expression, it has parts that are not known here, or no
        short string matches.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            for written, here in SPELLED_OTHERWISE.items():
                pattern = re.sub(written, here, pattern)
            return _match(re._parser.parse(pattern), {})  # type: ignore[attr-defined]
    except (re.error, LookupError, RecursionError, OverflowError):
        return None


def _match(parsed: Parsed, groups: dict[int, str]) -> str:
    """Return a string that a parsed expression matches.

    Args:
        groups: for each numbered group so far, the string that it has matched; groups of this
            expression are added.

    Raises:
        LookupError: a part is not known here.
        OverflowError: the string would be long.
    """
    return "".join(_match_part(str(kind), value, groups) for kind, value in parsed)


def _match_part(kind: str, value: Parsed, groups: dict[int, str]) -> str:
    match kind:
        case "LITERAL":
            return chr(value)
        case "NOT_LITERAL":
            return _first(lambda character: character != chr(value))
        case "ANY":
            return CHARACTERS[0]
        case "IN":
            return _match_class(value)
        case "BRANCH":
            return min((_match(branch, groups) for branch in value[1]), key=len)
        case "SUBPATTERN":
            number = value[0]
            inner = value[-1]
            groups[number] = _match(inner, groups)
            return groups[number]
        case "GROUPREF":
            return groups[value]
        case "ATOMIC_GROUP":
            return _match(value, groups)
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, _, inner = value
            if least > LONGEST_EXAMPLE:
                raise OverflowError
            return _match(inner, groups) * int(least)
        case "AT" | "ASSERT" | "ASSERT_NOT":
            return ""
        case _:
            raise LookupError(kind)


def _match_class(members: Parsed) -> str:
    """Return a character of a class such as `[a-z_]` or `[^"]`."""
    is_negated = str(members[0][0]) == "NEGATE"

    def belongs(character: str) -> bool:
        return is_negated != any(_is_member(character, str(kind), value) for kind, value in members)

    for kind, value in members:  # letters that are in no list of ours
        if not is_negated and str(kind) in ("LITERAL", "RANGE"):
            first = chr(value if str(kind) == "LITERAL" else value[0])
            return first if not first.isascii() else _first(belongs, default=first)
    return _first(belongs)


def _is_member(character: str, kind: str, value: Parsed) -> bool:
    match kind:
        case "LITERAL":
            return bool(ord(character) == value)
        case "RANGE":
            return bool(value[0] <= ord(character) <= value[1])
        case "CATEGORY":
            has: dict[str, Callable[[str], bool]] = {
                "DIGIT": str.isdigit,
                "SPACE": str.isspace,
                "WORD": lambda c: c.isalnum() or c == "_",
            }
            name = str(value).removeprefix("CATEGORY_").removeprefix("UNI_")
            return has[name.removeprefix("NOT_")](character) != name.startswith("NOT_")
        case "NEGATE":
            return False
        case _:
            raise LookupError(kind)


def _first(belongs: Callable[[str], bool], default: str | None = None) -> str:
    found = next((character for character in CHARACTERS if belongs(character)), default)
    if found is None:
        raise LookupError("no common character")
    return found
