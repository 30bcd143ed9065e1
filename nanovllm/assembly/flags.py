"""The command line: its parser, and flags that are declared as fields of a dataclass. Imports
nothing heavy, so that help and mistakes show at once."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Protocol, TypeVar

from msgspec import Meta

from nanovllm.data.checks import did_you_mean
from nanovllm.data.errors import UsageError
from nanovllm.data.json import JsonObject


class DataclassInstance(Protocol):
    """An instance of any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


T = TypeVar("T", bound=DataclassInstance)

SHORT_FLAGS = {
    "tensor_parallel_size": ["-tp"],
    "pipeline_parallel_size": ["-pp"],
    "data_parallel_size": ["-dp"],
}


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, without the usage, whose forty flags would hide it."""

    def __init__(self, **kwargs: Any) -> None:
        # An abbreviation would change its meaning, or become ambiguous, with the next flag.
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse unknown words here: argparse would hand a command's to the parser above, whose
        help does not explain them."""
        words = sys.argv[1:] if args is None else args
        found, unknown = super().parse_known_args(self._respelled(words), namespace)
        assert found is not None, "argparse makes a namespace"
        if unknown:
            shown = (
                flag
                for action in self._actions
                if action.help != argparse.SUPPRESS
                for flag in action.option_strings
            )
            hint = did_you_mean(unknown[0].partition("=")[0], shown)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def _respelled(self, words: Sequence[str]) -> list[str]:
        """The words with flags as vLLM's command line accepts them, too: `--block_size` for
        `--block-size`, and `--speculative-config.method ngram` for
        `--speculative-config '{"method": "ngram"}'`. A key with a plus is a list, to which each use
        of the flag adds its values: `--eplb-config.sizes+ 1,2`. A flag in parts and as a whole is a
        mistake."""
        known = self._option_string_actions
        respelled: list[str] = []
        objects: dict[str, JsonObject] = {}
        wholes: set[str] = set()
        rest = iter(words)
        for word in rest:
            if word == "--":
                respelled += [word, *rest]
                break
            flag, equals, value = word.partition("=")
            flag, *path = flag.split(".")
            if flag.startswith("--"):
                flag = flag.replace("_", "-")
            if not word.startswith("-") or flag not in known:
                respelled.append(word)
            elif not path:
                wholes.add(flag)
                respelled.append(f"{flag}{equals}{value}")
            else:
                target = objects.setdefault(flag, {})
                for key in path[:-1]:
                    target = target.setdefault(key, {})
                text = value if equals else next(rest, "")
                key = path[-1]
                if key.endswith("+"):
                    target.setdefault(key[:-1], []).extend(
                        _json_or_text(each) for each in text.split(",")
                    )
                else:
                    target[key] = _json_or_text(text)
        for flag in sorted(wholes & objects.keys()):
            self.error(f"{flag} is set as a whole and in parts ({flag}.*): use one of them")
        return [*(f"{flag}={json.dumps(value)}" for flag, value in objects.items()), *respelled]

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with 2."""
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]))
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _json_or_text(value: str) -> object:
    """The value that the text has as JSON, or else the text itself."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def flags_of(settings: type[DataclassInstance]) -> list[dataclasses.Field[object]]:
    """Return the fields of a dataclass that have a flag: those that its docstring describes as
    attributes."""
    described = _descriptions(settings)
    return [field for field in dataclasses.fields(settings) if field.name in described]


def choices_of(settings: type[DataclassInstance]) -> dict[str, tuple[str, ...]]:
    """Return the allowed values of each field that has a closed list of them."""
    hints = _hints(settings)
    return {
        name: typing.get_args(hint)
        for name, hint in hints.items()
        if typing.get_origin(hint) is Literal
    }


@cache
def _hints(settings: type[DataclassInstance], include_extras: bool = False) -> dict[str, Any]:
    """The types of all fields. Groups of flags share a class, and reading its types takes long."""
    return typing.get_type_hints(settings, include_extras=include_extras)


@cache
def _descriptions(settings: type[DataclassInstance]) -> dict[str, str]:
    """The attributes in the docstring, each with its text on one line."""
    # Python 3.13 and later take a docstring's indentation away.
    text = inspect.cleandoc(settings.__doc__ or "")
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", text, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}


def add_flags(
    settings: type[DataclassInstance],
    parser: argparse._ActionsContainer,
    names: Collection[str] | None = None,
    helps: Mapping[str, str] | None = None,
) -> None:
    """Give the parser, or a group of it, a flag for every field that has one. Its help is the
    field's description in the docstring. A field of type `Annotated[..., parse]` reads its flag's
    value with `parse`, which raises a ValueError for a wrong one.

    Args:
        names: of the fields, if not all of them are wanted.
        helps: by field, another help than its description.
    """
    annotated = _hints(settings, include_extras=True)
    hints = _hints(settings)
    choices = choices_of(settings)
    descriptions = {**_descriptions(settings), **(helps or {})}
    for field in flags_of(settings):
        name = field.name
        if names is not None and name not in names:
            continue
        hint = hints[name]
        options: dict[str, Any] = {
            "default": field.default,
            "help": descriptions[name].replace("%", "%%"),
        }
        # For `int | None`.
        plain = [t for t in (str, int, float) if t is hint or t in typing.get_args(hint)]
        is_annotated = typing.get_origin(annotated[name]) is Annotated
        metadata = typing.get_args(annotated[name])[1:] if is_annotated else ()
        kinds = [_argument_type(each) for each in metadata if callable(each)] + plain
        if hint in (bool, bool | None):
            options["action"] = argparse.BooleanOptionalAction
            if field.default is not None and "(default:" not in options["help"]:
                options["help"] += f" (default: {'on' if field.default else 'off'})"
        else:
            if field.default not in (None, ()):
                is_list = isinstance(field.default, tuple)
                shown = json.dumps(field.default).replace("%", "%%") if is_list else "%(default)s"
                options["help"] += f" (default: {shown})"
            if name in choices:
                options["choices"] = choices[name]
            else:
                options |= {"type": kinds[0], "metavar": name.rsplit("_", 1)[-1].upper()}
            if hint == Sequence[str] and kinds[0] is str:  # the flag may be repeated
                options |= {"action": "append", "default": []}
            if hint == str | Sequence[str] | None:
                options["nargs"] = "+"
        parser.add_argument("--" + name.replace("_", "-"), *SHORT_FLAGS.get(name, ()), **options)


def _argument_type(parse: Callable[[str], object]) -> Callable[[str], object]:
    """The function as argparse wants it: argparse does not show the message of a ValueError."""

    def read(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def read_flags(settings: type[T], arguments: argparse.Namespace) -> T:
    """Create the settings from a parsed command line.

    Raises:
        UsageError: a value that makes no sense, alone or with another.
    """
    try:
        return settings(**{f.name: getattr(arguments, f.name) for f in flags_of(settings)})
    except ValueError as error:
        raise UsageError(str(error)) from error


def words_of(settings: DataclassInstance) -> list[str]:
    """Return the fields that are not at their default, as words of a command line."""
    words = []
    for field in flags_of(type(settings)):
        value = getattr(settings, field.name)
        flag = field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *value]
        else:
            words.append(f"--{flag}={value}")
    return words


def parse_numbers(
    flag: str, words: str | Sequence[str] | None, names: Iterable[str], kind: str
) -> dict[str, float]:
    """Read positive numbers with names, one or several, such as "ttft:200".

    Args:
        kind: of number, with an example, for the message.

    Raises:
        UsageError: something else; lists the names.
    """
    numbers = {}
    for word in [words] if isinstance(words, str) else words or []:
        name, _, number = word.partition(":")
        try:
            numbers[name] = float(number)
        except ValueError:
            numbers[name] = 0.0
        if name not in names or not 0 < numbers[name] < float("inf"):
            raise UsageError(
                f"{flag} must be a name of {', '.join(names)} and {kind}, got {word!r}"
            )
    return numbers


def json_words(text: str, pattern: str = ".*", what: str = "") -> list[str]:
    """The value of a flag that is a JSON list of strings, all of which match a pattern.

    Raises:
        ValueError: it is none; the message shows what one looks like.
    """
    found = _json_or_text(text)
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise ValueError(f"""must be a JSON list of strings such as '["*"]', got {text!r}""")
    if wrong := [word for word in found if not re.fullmatch(pattern, word)]:
        raise ValueError(f"must be {what}, got {wrong[0]!r}")
    return found


# Types of fields that have a flag.
Seconds = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Words = Annotated[Sequence[str], json_words]
