"""What a request's output must look like: plain data, checked when created."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from nanovllm.data.checks import check_fields
from nanovllm.data.json import JsonObject

KINDS = ("json", "regex", "choice", "grammar", "json_object")
# How JSON is written.
OPTIONS = ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties")


class GrammarError(ValueError):
    """A grammar that cannot be followed.

    Attributes:
        place: the field of the request, and the place in it:
            "structured_outputs.json.properties.age".
        reason: what is wrong there.
    """

    def __init__(self, place: str, reason: str) -> None:
        # a client has chosen the names in a schema
        self.place = place[:300]
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(frozen=True)
class Form:
    """A grammar that has been checked, and what the masks need to know about it.

    Attributes:
        grammar: in the form that llguidance reads.
        cost_of_beginning: how many tokens one token can add to the shortest way to the end, as an
            estimate.
        has_open_objects: JSON whose keys the model may choose; none may come twice in an object.
        examples: short strings that match the regular expressions in the grammar, as they are
            written in the output. A search for a short end tries them: an expression such as
            `.*abc` does not show which bytes complete a match.
        free_text_before: see `StructuredOutputsParams`.
    """

    grammar: str
    cost_of_beginning: int
    has_open_objects: bool = False
    examples: tuple[str, ...] = ()
    free_text_before: str = ""


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """Settings of a server or an `LLM`, under vLLM's names.

    Args:
        backend: "auto" or "guidance": there is one backend, llguidance.
        disable_any_whitespace: JSON has no white space between its parts, whatever a request says.
        disable_additional_properties: accepted, as vLLM does. Objects that name their properties
            never have others here, unless their schema has `additionalProperties`.

    Raises:
        ValueError: a value of another type.
    """

    backend: Literal["auto", "guidance"] = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except ValueError as error:
            raise ValueError(f"structured_outputs_config: {error}") from None

    @classmethod
    def of(cls, given: str | None) -> StructuredOutputsConfig:
        """The settings in a JSON text.

        Raises:
            ValueError: it is no JSON object, or has another field; names the fields that there are.
        """
        try:
            fields = json.loads(given or "{}")
        except ValueError:
            fields = None
        names = ", ".join(cls.__dataclass_fields__)
        if not isinstance(fields, dict):
            raise ValueError(
                f"structured_outputs_config must be a JSON object with some of {names}; got "
                f"{given!r:.100}"
            )
        for name in fields:
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"structured_outputs_config: {name!r:.100} is not one of {names}")
        return cls(**fields)


@dataclass
class StructuredOutputsParams:
    """What the output must match, under vLLM's names: exactly one of `json`, `regex`, `choice`,
    `grammar` and `json_object`.

    Args:
        json: a JSON schema, as a dictionary, as text, or as a class of pydantic. The output is JSON
            that is valid under the schema. An object that names its properties has no others,
            unless its schema has `additionalProperties`.
        regex: a regular expression in the syntax of Rust's `regex`. The whole output matches it.
        choice: the output is one of these strings.
        grammar: a context-free grammar: EBNF as in vLLM and llama.cpp (`root ::= ...`), or
            llguidance's dialect of Lark (`start: ...`).
        json_object: True: the output is a JSON object, without a schema.
        disable_any_whitespace: JSON has no white space between its parts. By default, there may be
            one space or one line break.
        whitespace_pattern: a regular expression of the white space between the parts of JSON,
            instead of that.
        disable_additional_properties: see `StructuredOutputsConfig`.
        place: where errors say that it was given, if a client of a server has given it in another
            field of its request.
        free_text_before: text before the first occurrence of this is not part of the form, so that
            stop strings end it.
        form: the checked grammar, which the front end adds.

    Attributes:
        field: the name of the one that is given.

    Raises:
        ValueError: none of the fields, or several; or a value of another type.
    """

    json: str | JsonObject | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool = False
    place: str = ""
    free_text_before: str = ""
    form: Form | None = None

    def __post_init__(self) -> None:
        if isinstance(self.json, type) and hasattr(self.json, "model_json_schema"):
            self.json = self.json.model_json_schema()
        try:
            check_fields(self)
        except ValueError as error:
            raise ValueError(f"structured_outputs.{error}") from None
        names = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(names) != 1:
            given = ", ".join(names) or "none"
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}; got {given}"
            )
        self.field = names[0]
        self.place = self.place or f"structured_outputs.{self.field}"
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError(
                "structured_outputs.whitespace_pattern must not be set where "
                "disable_any_whitespace is true"
            )

    @classmethod
    def of(cls, given: JsonObject) -> StructuredOutputsParams:
        """The fields of a dictionary.

        Raises:
            ValueError: it has another field; names the fields that there are.
        """
        known = (*KINDS, *OPTIONS)
        if unknown := [name for name in given if name not in known]:
            raise ValueError(
                f"structured_outputs: {str(unknown[0])[:100]!r} is not one of {', '.join(known)}"
            )
        return cls(**given)
