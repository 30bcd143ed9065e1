"""Flags that are declared as fields of a dataclass, the types of their values, and their errors. Imports nothing heavy."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

Options = TypeVar("Options")


class UsageError(ValueError):
    """The command line asks for something that cannot be done. The command ends with exit code 2."""


def option(default: Any, help: str, **argument: Any) -> Any:
    """A dataclass field with a flag; `argument` goes to `ArgumentParser.add_argument`."""
    return dataclasses.field(default=default, metadata={"help": help} | argument)


def add_options(cls: type[Any], parser: argparse._ActionsContainer) -> None:
    """Add the flags of a dataclass to a parser."""
    for f in dataclasses.fields(cls):
        if f.metadata:
            parser.add_argument("--" + f.name.replace("_", "-"), default=f.default, **f.metadata)


def options_of(cls: type[Options], arguments: argparse.Namespace) -> Options:
    """The dataclass with the values from a parsed command line."""
    flags = [f.name for f in dataclasses.fields(cls) if f.metadata]  # type: ignore[arg-type]
    return cls(**{name: getattr(arguments, name) for name in flags})


def _number(kind: Callable[[str], Any], what: str, is_allowed: Callable[[Any], bool]) -> Callable[[str], Any]:
    """The `type` of a flag whose value is a number."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if is_allowed(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")

    return parse


port = _number(int, "a number from 0 to 65535", lambda value: 0 <= value <= 65535)
count = _number(int, "a number of servers", lambda value: value >= 0)
seconds = _number(float, "a number of seconds, 0 or more", lambda value: 0 <= value < math.inf)
positive_seconds = _number(float, "above 0 seconds", lambda value: 0 < value < math.inf)


def words(text: str, pattern: str = ".*", what: str = "") -> list[str]:
    """The value of a flag that is a JSON list of strings, all of which match a pattern."""
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(text), list) and all(isinstance(word, str) for word in found):
            if wrong := [word for word in found if not re.fullmatch(pattern, word)]:
                raise argparse.ArgumentTypeError(f"must be {what}, got {wrong[0]!r}")
            return found
    raise argparse.ArgumentTypeError(f"""must be a JSON list of strings such as '["*"]', got {text!r}""")
