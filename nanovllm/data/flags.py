"""The command line: its parser, its errors, and flags that are declared as fields of a dataclass.
Imports nothing heavy, so that help and mistakes show at once."""

import argparse
import contextlib
import dataclasses
import json
import re
import sys
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn

from msgspec import Meta

from nanovllm.data.checks import Keywords, Positive, check_fields, did_you_mean
from nanovllm.data.json import JsonObject

SHORT_FLAGS = {
    "tensor_parallel_size": ["-tp"],
    "pipeline_parallel_size": ["-pp"],
    "data_parallel_size": ["-dp"],
}


class UsageError(ValueError):
    """The command line asks for something that cannot be done. The command ends with exit code
    2."""


class ServerError(RuntimeError):
    """A server that this command talks to has failed or refuses. The command ends with exit code
    1."""


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
        of the flag adds its values: `--eplb-config.sizes+ 1,2`."""
        known = self._option_string_actions
        respelled: list[str] = []
        objects: dict[str, JsonObject] = {}
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


class Flags(Keywords):
    """Base of dataclasses with flags: the fields that the class's docstring describes as
    attributes, each with its description as help. A field of type `Annotated[..., parse]` reads its
    flag's value with `parse`."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def flags(cls) -> list[dataclasses.Field[object]]:
        """The fields that have a flag."""
        described = cls._descriptions()
        return [f for f in dataclasses.fields(cls) if f.name in described]  # type: ignore[arg-type]

    @classmethod
    def choices(cls) -> dict[str, tuple[str, ...]]:
        """The allowed values of each field that has a closed list of them."""
        hints = typing.get_type_hints(cls)
        return {
            name: typing.get_args(hint)
            for name, hint in hints.items()
            if typing.get_origin(hint) is Literal
        }

    @classmethod
    def _descriptions(cls) -> dict[str, str]:
        """The attributes in the docstring, each with its text on one line."""
        entries = re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)", cls.__doc__ or "", re.MULTILINE)
        return {name: re.sub(r"\s+", " ", text) for name, text in entries}

    @classmethod
    def add_arguments(cls, parser: argparse._ActionsContainer) -> None:
        """Give the parser, or a group of it, a flag for every field."""
        annotated = typing.get_type_hints(cls, include_extras=True)
        hints = typing.get_type_hints(cls)
        choices = cls.choices()
        descriptions = cls._descriptions()
        for f in cls.flags():
            name = f.name
            hint = hints[f.name]
            options: dict[str, Any] = {
                "default": f.default,
                "help": descriptions[name].replace("%", "%%"),
            }
            # For `int | None`.
            plain = [t for t in (str, int, float) if t is hint or t in typing.get_args(hint)]
            is_annotated = typing.get_origin(annotated[name]) is Annotated
            metadata = typing.get_args(annotated[name])[1:] if is_annotated else ()
            kinds = [each for each in metadata if callable(each)] + plain
            if hint in (bool, bool | None):
                options["action"] = argparse.BooleanOptionalAction
            else:
                if f.default not in (None, ()):
                    is_list = isinstance(f.default, tuple)
                    shown = json.dumps(f.default).replace("%", "%%") if is_list else "%(default)s"
                    options["help"] += f" (default: {shown})"
                if name in choices:
                    options["choices"] = choices[name]
                else:
                    options |= {"type": kinds[0], "metavar": name.rsplit("_", 1)[-1].upper()}
                if hint == Sequence[str] and kinds[0] is str:  # the flag may be repeated
                    options |= {"action": "append", "default": []}
                if hint == str | Sequence[str] | None:
                    options["nargs"] = "+"
            parser.add_argument(
                "--" + name.replace("_", "-"), *SHORT_FLAGS.get(name, ()), **options
            )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> typing.Self:
        """The values from a parsed command line.

        Raises:
            UsageError: a value that makes no sense, alone or with another.
        """
        try:
            return cls(**{f.name: getattr(arguments, f.name) for f in cls.flags()})
        except ValueError as error:
            raise UsageError(str(error)) from error

    def words(self) -> list[str]:
        """The fields that are not at their default, as words of a command line."""
        words = []
        for f in self.flags():
            value = getattr(self, f.name)
            flag = f.name.replace("_", "-")
            if value == f.default:
                continue
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{flag}")
            elif isinstance(value, list):
                words += [f"--{flag}", *value]
            else:
                words.append(f"--{flag}={value}")
        return words


def token_count(text: str) -> int:
    """ "8k" -> 8000, "8K" -> 8192, as in vLLM: small letters count in thousands, capitals in 1024s.

    Raises:
        argparse.ArgumentTypeError: not a number; the message shows what one looks like.
    """
    match = re.fullmatch(r"(\d+|\d+\.\d+(?=\D))([kmgt]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"must be a number of tokens: 8192, 8k (8000) or 8K (8192), got {text!r}"
        )
    number, unit = match.groups()
    return round(
        float(number) * (1000.0 if unit.islower() else 1024.0) ** " kmgt".index(unit.lower() or " ")
    )


def json_words(text: str, pattern: str = ".*", what: str = "") -> list[str]:
    """The value of a flag that is a JSON list of strings, all of which match a pattern."""
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(text), list) and all(
            isinstance(word, str) for word in found
        ):
            if wrong := [word for word in found if not re.fullmatch(pattern, word)]:
                raise argparse.ArgumentTypeError(f"must be {what}, got {wrong[0]!r}")
            return found
    raise argparse.ArgumentTypeError(
        f"""must be a JSON list of strings such as '["*"]', got {text!r}"""
    )


# Types of fields that have a flag.
Seconds = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
Tokens = Annotated[Positive | None, token_count]
Words = Annotated[Sequence[str], json_words]
