"""Prepares JSON schemas for grammars, so that every answer that ends is valid, and every answer can
end.

llguidance follows a schema literally. Four things are added before it gets one:

* Objects whose properties are named are closed, as in OpenAI's strict mode and in XGrammar: they
  have no other properties, unless the schema has `additionalProperties`.
* Numbers have bounds that every reader of JSON can represent, and nine decimals; so they end.
* Parts that no finite text satisfies, such as a property that requires itself, are never begun.
* Properties that a pattern names one by one (`^(a|b)$`) are properties like others. A grammar would
  offer them again after they were written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from nanovllm.data.json import JsonObject

Schema = JsonObject

# How strings may be spelled. Without "\\/" and "\\u0061", a key has one spelling, so that none
# comes twice.
SPELLING = {"json_allowed_escapes": 'bfnrtu\\"', "json_allow_general_unicode_escapes": False}
# Integers up to here are exact in every reader (RFC 8259, section 6), and this many decimals are
# written.
LARGEST_NUMBER = 2**53 - 1
SMALLEST_STEP = 1e-9
# Keywords that hold schemas: by name, in a list, or one.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("additionalProperties", "items")
# Keywords whose schemas describe the same value as the schema that has them.
SAME_VALUE = ("$ref", "allOf", "anyOf", "oneOf")
OF_OBJECTS = ("properties", "patternProperties", "required", "minProperties", "maxProperties")
# Keywords that say, or may say, which properties an object has besides those in `properties`.
OTHER_NAMES = {
    "additionalProperties",
    "unevaluatedProperties",
    "dependentRequired",
    "dependentSchemas",
    "if",
}
# Keywords that say something about a value.
CONSTRAINTS = {
    "type",
    "const",
    "enum",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "additionalProperties",
    *OF_OBJECTS,
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "multipleOf",
    "exclusiveMinimum",
    "exclusiveMaximum",
}
ANY = "any-json-value"
ANY_REFERENCE = {"$ref": f"#/$defs/{ANY}"}
JSON_TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_WORDS = 32


def any_value(inner: Schema | bool = ANY_REFERENCE) -> Schema:
    """A schema of any JSON value whose numbers are bounded.

    Args:
        inner: the schema of the elements of its arrays, and of the values of its objects. False:
            they are empty.
    """
    number = {
        "type": "number",
        "minimum": -LARGEST_NUMBER,
        "maximum": LARGEST_NUMBER,
        "multipleOf": SMALLEST_STEP,
    }
    return {
        "anyOf": [
            {"type": "null"},
            {"type": "boolean"},
            {"type": "string"},
            number,
            {"type": "array", "items": inner},
            {"type": "object", "additionalProperties": inner},
        ]
    }


def resolve(root: object, reference: object) -> object:
    """The part of a schema that a local reference names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    part = root
    for key in pointer_keys(reference):
        if isinstance(part, dict):
            part = part.get(key)
        elif isinstance(part, list) and key.isdigit() and int(key) < len(part):
            part = part[int(key)]
        else:
            return None
    return part


def pointer_keys(reference: str) -> list[str]:
    """The keys of a local reference: "#/$defs/a~1b" -> ["$defs", "a/b"]."""
    keys = reference.removeprefix("#").split("/")[1:]
    return [key.replace("~1", "/").replace("~0", "~") for key in keys]


def pointer(keys: tuple[str, ...]) -> str:
    """The local reference of keys."""
    return "#" + "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in keys)


class Preparation:
    """Prepares one schema.

    Args:
        root: the whole schema. It is not changed.
        knows_pattern: whether the regex engine can parse a pattern.
        words_of: all strings that match a pattern, if there are at most `MAX_WORDS`; else None.
        lenient: ignore patterns that the regex engine cannot parse.
        nesting: how deep the arrays and objects of a value may be nested about which the schema
            says nothing. None: as deep as they like, by a definition that refers to itself.
    """

    def __init__(
        self,
        root: Schema,
        knows_pattern: Callable[[str], bool],
        words_of: Callable[[str], list[str] | None],
        lenient: bool = False,
        nesting: int | None = None,
    ) -> None:
        self.root = root
        self._knows_pattern = knows_pattern
        self._words_of = words_of
        self._lenient = lenient
        self._nesting = nesting
        # A schema with an identifier begins a new document, in which references mean something
        # else.
        self._any: Schema | bool = True if has_identifiers(root) else ANY_REFERENCE
        self._definitions: Schema = {}
        self._open_names: dict[str, str] = {}

    def result(self) -> Schema:
        """The prepared schema."""
        prepared = self._prepare(self.root, closes=True)
        assert isinstance(prepared, dict)
        if f"#/$defs/{ANY}" in json.dumps([prepared, self._definitions]):
            self._define_any_value()
        if self._definitions and isinstance(prepared.get("$defs", {}), dict):
            prepared["$defs"] = {**prepared.get("$defs", {}), **self._definitions}
        return prepared

    def _define_any_value(self) -> None:
        """Define what `ANY_REFERENCE` means."""
        if self._nesting is None:
            self._definitions[ANY] = any_value()
            return
        inner: Schema | bool = False
        for depth in range(1, self._nesting):
            name = f"{ANY}-{depth}"
            self._definitions[name] = any_value(inner)
            inner = {"$ref": f"#/$defs/{name}"}
        self._definitions[ANY] = any_value(inner)

    def _prepare(self, schema: object, closes: bool) -> object:
        """Prepare a part.

        Args:
            closes: whether its objects are closed here. If not, it describes a value together with
                other schemas.
        """
        if schema is True and closes:
            return self._any
        if not isinstance(schema, dict):
            return schema
        is_mixture = closes and self._is_mixture(schema)
        made: Schema = {}
        for key, value in schema.items():
            is_open_part = key in SAME_VALUE and (is_mixture or not closes)
            if key == "$ref" and is_open_part:
                made[key] = self._open_copy(value)
            elif key in BY_NAME and isinstance(value, dict):
                # A property that matches a pattern as well is described by both.
                may_overlap = (
                    key in ("properties", "patternProperties") and "patternProperties" in schema
                )
                made[key] = {
                    name: self._prepare(part, closes=not may_overlap)
                    for name, part in value.items()
                }
            elif key in IN_LISTS and isinstance(value, list):
                made[key] = [self._prepare(part, closes=not is_open_part) for part in value]
            elif key in SINGLE:
                made[key] = self._prepare(value, closes=True)
            else:
                made[key] = value
        self._leave_out_unknown_pattern(made)
        self._name_words_of_patterns(made)
        if is_mixture:
            self._close_mixture(schema, made)
        elif closes:
            close(made, self._any)
            if self._any is not True and made.keys() <= ANNOTATIONS:
                made |= ANY_REFERENCE
            elif self._any is not True:
                describe_unnamed_parts(made)
        bound_numbers(made)
        required = made.get("required")
        if isinstance(required, list) and made.get("minProperties", math.inf) <= len(
            {*map(str, required)}
        ):
            del made["minProperties"]
        return made

    def _is_mixture(self, schema: Schema) -> bool:
        """Whether several schemas describe the same value."""
        used = [key for key in SAME_VALUE if key in schema]
        parts = schema.get("allOf")
        has_own = bool(CONSTRAINTS & schema.keys())
        return len(used) + (bool(used) and has_own) > 1 or (
            isinstance(parts, list) and len(parts) > 1
        )

    def _open_copy(self, reference: object) -> object:
        """A reference to the same schema, without the closing: the schema that refers to it says
        more about the same object."""
        target = resolve(self.root, reference)
        if not isinstance(reference, str) or not isinstance(target, dict):
            return reference
        name = self._open_names.setdefault(reference, f"open-{len(self._open_names)}")
        if name not in self._definitions:
            self._definitions[name] = {}  # it may refer to itself
            self._definitions[name] = self._prepare(target, closes=False)
        return pointer(("$defs", name))

    def _close_mixture(self, schema: Schema, made: Schema) -> None:
        """Close an object that several schemas describe: it has the properties that one of them
        names."""
        names: dict[str, None] = {}
        if self._collect_names(schema, names, set()) and names:
            own = made.get("properties", {})
            made["properties"] = {**own, **{name: True for name in names if name not in own}}
            made["additionalProperties"] = False

    def _collect_names(self, schema: object, names: dict[str, None], seen: set[int]) -> bool:
        """Add the properties that a schema names, in its order; False if it says itself which
        others there are."""
        if not isinstance(schema, dict) or id(schema) in seen:
            return True
        seen.add(id(schema))
        if "patternProperties" in schema or schema.keys() & OTHER_NAMES:
            return False
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            return False
        names.update(dict.fromkeys(properties))
        names.update(dict.fromkeys(map(str, required)))
        parts = [part for key in ("allOf", "anyOf", "oneOf") for part in as_list(schema.get(key))]
        if "$ref" in schema:
            target = resolve(self.root, schema["$ref"])
            if not isinstance(target, dict):
                return False
            parts.append(target)
        return all([self._collect_names(part, names, seen) for part in parts])

    def _leave_out_unknown_pattern(self, made: Schema) -> None:
        """Leave out patterns that the regex engine cannot parse, if that is wanted. An object whose
        names have such a pattern is open."""
        if not self._lenient:
            return
        pattern = made.get("pattern")
        if isinstance(pattern, str) and not self._knows_pattern(pattern):
            del made["pattern"]
        by_pattern = made.get("patternProperties")
        if isinstance(by_pattern, dict):
            known = {key: part for key, part in by_pattern.items() if self._knows_pattern(key)}
            if len(known) < len(by_pattern):
                made["patternProperties"] = known
                made["additionalProperties"] = {**ANY_REFERENCE}

    def _name_words_of_patterns(self, made: Schema) -> None:
        """Turn patterns that match a few names into these names."""
        by_pattern = made.get("patternProperties")
        own = made.get("properties", {})
        if not isinstance(by_pattern, dict) or not isinstance(own, dict):
            return
        rest = {}
        own = {**own}
        for key, part in by_pattern.items():
            words = self._words_of(key)
            if words is None:
                rest[key] = part
                continue
            for word in words:
                own[word] = {"allOf": [own[word], part]} if word in own else part
        made["patternProperties"] = rest
        made["properties"] = own
        if not rest:
            del made["patternProperties"]


def as_list(value: object) -> list[object]:
    """The value, if it is a list; else an empty list."""
    return value if isinstance(value, list) else []


def close(made: Schema, any_value: Schema | bool) -> None:
    """Close an object whose properties are named, unless the schema describes others.

    Args:
        any_value: the schema of a property that is required and has none.
    """
    names = made.get("properties")
    by_pattern = made.get("patternProperties")
    if not isinstance(names, dict) and not isinstance(by_pattern, dict):
        return
    if made.keys() & OTHER_NAMES:
        return
    if isinstance(names, dict) and not by_pattern:
        unnamed = [
            name
            for name in as_list(made.get("required"))
            if isinstance(name, str) and name not in names
        ]
        made["properties"] = {**names, **dict.fromkeys(unnamed, any_value)}
    made["additionalProperties"] = False


ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$schema",
    "$id",
    "$defs",
    "definitions",
    "x-guidance",
}


def has_identifiers(schema: object, is_root: bool = True) -> bool:
    """Whether a part of a schema, or the schema itself, can be referred to by an identifier instead
    of its place."""
    if isinstance(schema, list):
        return any(has_identifiers(part, is_root=False) for part in schema)
    if not isinstance(schema, dict):
        return False
    if "$anchor" in schema or "$dynamicAnchor" in schema or ("$id" in schema and not is_root):
        return True
    return any(has_identifiers(part, is_root=False) for part in schema.values())


def describe_unnamed_parts(made: Schema) -> None:
    """Say that other properties and items are any value, so that their numbers are bounded, too."""
    kinds = made.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if any(key in made for key in (*SAME_VALUE, "const", "enum")):
        return
    is_object = kinds is None or "object" in as_list(kinds)
    if is_object and not {"additionalProperties", "unevaluatedProperties"} & made.keys():
        made["additionalProperties"] = {**ANY_REFERENCE}
    is_array = kinds is None or "array" in as_list(kinds)
    if is_array and not {"items", "unevaluatedItems", "additionalItems"} & made.keys():
        made["items"] = {**ANY_REFERENCE}


def is_number(value: object) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def bound_numbers(made: Schema) -> None:
    """Add bounds to a schema of numbers that has none."""
    kinds = made.get("type", JSON_TYPES if made and not made.keys() <= ANNOTATIONS else ())
    kinds = (
        [kinds]
        if isinstance(kinds, str)
        else as_list(kinds) or list(kinds if isinstance(kinds, tuple) else ())
    )
    if "type" not in made and any(key in made for key in SAME_VALUE):
        return
    if (
        "const" in made
        or "enum" in made
        or not {"number", "integer"} & {kind for kind in kinds if isinstance(kind, str)}
    ):
        return
    low = [made[key] for key in ("minimum", "exclusiveMinimum") if key in made]
    high = [made[key] for key in ("maximum", "exclusiveMaximum") if key in made]
    if not all(map(is_number, low + high)):
        return
    if not low and all(value > -LARGEST_NUMBER for value in high):
        made["minimum"] = -LARGEST_NUMBER
    if not high and all(value < LARGEST_NUMBER for value in low):
        made["maximum"] = LARGEST_NUMBER
    if "number" in kinds and "multipleOf" not in made:
        made["multipleOf"] = SMALLEST_STEP
