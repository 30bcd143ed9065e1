"""What a request's output must look like: plain data, checked when created."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from nanovllm.data.checks import check_fields

KINDS = ("json", "regex", "choice", "grammar", "json_object")


class GrammarError(ValueError):
    """A grammar that cannot be followed.

    Attributes:
        place: the field of the request, and the place in it: "structured_outputs.json.properties.age".
        reason: what is wrong there.
    """

    def __init__(self, place: str, reason: str) -> None:
        self.place, self.reason = place[:300], reason  # a client has chosen the names in a schema

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass
class StructuredOutputsParams:
    """What the output must match, under vLLM's names: exactly one of the fields.

    Args:
        json: a JSON schema, as a dictionary or as text. The output is JSON that is valid under the schema.
        regex: a regular expression in the syntax of Rust's `regex`. The whole output matches it.
        choice: the output is one of these strings.
        grammar: a context-free grammar in llguidance's dialect of Lark.
        json_object: True: the output is a JSON object, without a schema.
        place: where errors say that it was given, if a client of a server has given it in another field of its request.

    Attributes:
        field: the name of the one that is given.

    Raises:
        ValueError: none of the fields, or several; or a value of another type.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    place: str = ""

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except ValueError as error:
            raise ValueError(f"structured_outputs.{error}") from None
        names = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(names) != 1:
            given = ", ".join(names) or "none"
            raise ValueError(f"structured_outputs must have exactly one of {', '.join(KINDS)}; got {given}")
        self.field = names[0]
        self.place = self.place or f"structured_outputs.{self.field}"

    @classmethod
    def of(cls, given: dict[str, Any]) -> StructuredOutputsParams:
        """The fields of a dictionary.

        Raises:
            ValueError: it has another field; names the fields that there are.
        """
        if unknown := [name for name in given if name not in KINDS]:
            raise ValueError(f"structured_outputs: {str(unknown[0])[:100]!r} is not one of {', '.join(KINDS)}")
        return cls(**given)
