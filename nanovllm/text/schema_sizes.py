"""Estimates how short an answer to a prepared JSON schema can be, and finds what masks need."""

from __future__ import annotations

import collections
import json
import math
import re
import warnings
from collections.abc import Iterator

from nanovllm.text.examples import shortest_match
from nanovllm.text.schemas import (
    BY_NAME,
    IN_LISTS,
    JSON_TYPES,
    OF_OBJECTS,
    SAME_VALUE,
    SINGLE,
    Schema,
    as_list,
    has_identifiers,
    pointer,
    pointer_keys,
)

# Characters that a string with a format or an unusual pattern needs, as an estimate.
UNKNOWN_LENGTH = 30
# Patterns for which an example is looked for.
MAX_PATTERNS = 16


def parts_of(
    schema: object, keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    """All schemas in a schema with their keys, the innermost first."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in BY_NAME and isinstance(value, dict):
                for name, part in value.items():
                    yield from parts_of(part, (*keys, key, name))
            elif key in IN_LISTS and isinstance(value, list):
                for i, part in enumerate(value):
                    yield from parts_of(part, (*keys, key, str(i)))
            elif key in SINGLE:
                yield from parts_of(value, (*keys, key))
    yield keys, schema


class Sizes:
    """The number of bytes of the shortest JSON text that satisfies each part of a schema: an
    estimate, infinite if there is no text.

    Args:
        root: a prepared schema.
    """

    def __init__(self, root: Schema) -> None:
        self._has_identifiers = has_identifiers(root)
        self.parts = {pointer(keys): part for keys, part in parts_of(root)}
        self.sizes: dict[str, float] = dict.fromkeys(self.parts, math.inf)
        self._users: dict[str, set[str]] = collections.defaultdict(set)
        waiting = collections.deque(self.parts)
        while waiting:
            place = waiting.popleft()
            size = self._size(place, self.parts[place])
            if size < self.sizes[place]:
                self.sizes[place] = size
                waiting.extend(self._users[place])

    def _look(self, user: str, place: str) -> float:
        self._users[place].add(user)
        return self.sizes.get(place, 1)

    def _size(self, place: str, schema: object) -> float:
        if not isinstance(schema, dict):
            return math.inf if schema is False else 1
        if "const" in schema:
            return len(json.dumps(schema["const"]))
        if "enum" in schema:
            return min(
                (len(json.dumps(value)) for value in as_list(schema["enum"])), default=math.inf
            )
        total = 0.0
        if "$ref" in schema:
            reference = str(schema["$ref"])
            is_local = reference.startswith("#/") or reference == "#"
            known = is_local and not self._has_identifiers
            total += self._look(place, pointer(tuple(pointer_keys(reference)))) if known else 1
        for i in range(len(as_list(schema.get("allOf")))):
            total += self._look(place, f"{place}/allOf/{i}")
        for key in ("anyOf", "oneOf"):
            if key in schema:
                branches = range(len(as_list(schema[key])))
                total += min(
                    (self._look(place, f"{place}/{key}/{i}") for i in branches), default=math.inf
                )
        if "type" in schema or not any(key in schema for key in SAME_VALUE):
            kinds = schema.get("type", JSON_TYPES)
            kinds = [kinds] if isinstance(kinds, str) else kinds
            total += min(
                (self._size_of_type(kind, place, schema) for kind in kinds), default=math.inf
            )
        elif any(key in schema for key in OF_OBJECTS):
            total += self._size_of_type("object", place, schema)
        return max(total, 1)

    def _size_of_type(self, kind: object, place: str, schema: Schema) -> float:
        if kind == "string":
            return 2 + string_length(schema)
        if kind == "array":
            return self._size_of_array(place, schema)
        if kind == "object":
            return self._size_of_object(place, schema)
        return {"null": 4, "boolean": 4}.get(str(kind), 1)

    def _size_of_array(self, place: str, schema: Schema) -> float:
        count = schema.get("minItems", 0)
        total = 2.0
        if not isinstance(count, int):
            return total
        first = len(as_list(schema.get("prefixItems")))
        for i in range(min(count, first)):
            total += 1 + self._look(place, f"{place}/prefixItems/{i}")
        if count > first and "items" in schema:
            total += (count - first) * (1 + self._look(place, f"{place}/items"))
        return total

    def _size_of_object(self, place: str, schema: Schema) -> float:
        total = 2.0
        for name in {name for name in as_list(schema.get("required")) if isinstance(name, str)}:
            total += len(json.dumps(name)) + 2
            own = place + pointer(("properties", name))[1:]
            if own in self.parts:
                total += self._look(place, own)
        return total

    def cost_of_beginning(self) -> int:
        """How many bytes one token can add to the shortest way to the end: it may begin an optional
        part."""
        optional = [
            size
            for place, size in self.sizes.items()
            if size < math.inf and self._is_optional(place.removeprefix("#").split("/"))
        ]
        return int(max(optional, default=0)) + 8

    def _is_optional(self, keys: list[str]) -> bool:
        if keys[-1] in SINGLE:
            return True
        if len(keys) < 3 or keys[-2] not in (*BY_NAME, *IN_LISTS):
            return False
        owner = self.parts.get("#" + "/".join(keys[:-2]))
        required = as_list(owner.get("required")) if isinstance(owner, dict) else []
        return keys[-2] != "allOf" and not (
            keys[-2] == "properties" and pointer_keys("#/" + keys[-1])[0] in required
        )


def examples_of_patterns(schema: object) -> list[str]:
    """Return short strings that match the patterns in a schema, as they are written between the
    quotes of JSON."""
    patterns: list[str] = []
    for _, part in parts_of(schema):
        if isinstance(part, dict):
            if isinstance(part.get("pattern"), str):
                patterns.append(part["pattern"])
            if isinstance(part.get("patternProperties"), dict):
                patterns += part["patternProperties"]
    found = {shortest_match(pattern): None for pattern in patterns[:MAX_PATTERNS]}
    return [json.dumps(example, ensure_ascii=False)[1:-1] for example in found if example]


def string_length(schema: Schema) -> float:
    """Estimate how many characters the shortest string has."""
    length = schema.get("minLength", 0)
    length = length if isinstance(length, int) else 0
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        try:
            with warnings.catch_warnings(action="ignore"):
                parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]
        except re.error:
            return max(length, UNKNOWN_LENGTH)
        shortest: int = parsed.getwidth()[0]
        return max(length, shortest)
    return max(length, UNKNOWN_LENGTH) if "format" in schema else length


def without_parts(schema: Schema, places: set[str]) -> Schema:
    """A schema in which the parts at some places, not the whole, allow nothing."""
    made = _without(schema, places, ())
    assert isinstance(made, dict)
    return made


def _without(schema: object, places: set[str], keys: tuple[str, ...] = ()) -> object:
    """A schema in which the parts at some places allow nothing."""
    if pointer(keys) in places:
        return False
    if not isinstance(schema, dict):
        return schema
    made: Schema = {}
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            made[key] = {
                name: _without(part, places, (*keys, key, name)) for name, part in value.items()
            }
        elif key in IN_LISTS and isinstance(value, list):
            made[key] = [
                _without(part, places, (*keys, key, str(i))) for i, part in enumerate(value)
            ]
        elif key in SINGLE:
            made[key] = _without(value, places, (*keys, key))
        else:
            made[key] = value
    return made


def has_open_objects(schema: object) -> bool:
    """Whether a prepared schema has objects whose names are chosen by the model."""
    return any(isinstance(part, dict) and allows_other_names(part) for _, part in parts_of(schema))


def allows_other_names(schema: Schema) -> bool:
    """Whether the model may choose names of properties of the object that a schema describes."""
    if schema.get("patternProperties"):
        return True
    if "additionalProperties" in schema:
        return schema["additionalProperties"] is not False
    kinds = schema.get("type", "object")
    is_object = kinds == "object" or "object" in as_list(kinds)
    return is_object and not any(key in schema for key in (*SAME_VALUE, "const", "enum"))
