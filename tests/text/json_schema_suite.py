"""The JSON Schema Test Suite, draft 2020-12:
https://github.com/json-schema-org/JSON-Schema-Test-Suite, as jsonschema 4.26.0 has it.

`json_schema_test_suite.json` holds a group per line: its name, a schema, and tests (name, instance,
whether that is valid). Copyright (c) 2012 Julian Berman, MIT License."""

from __future__ import annotations

import json
import pathlib
from typing import Any

Group = tuple[str, Any, list[tuple[str, Any, bool]]]

GROUPS: list[Group] = json.loads(
    (pathlib.Path(__file__).parent / "json_schema_test_suite.json").read_text("utf-8")
)

# How many of the 368 schemas are followed, and why instances that are valid cannot be written. The
# suite treats `format` as a note, and llguidance as a rule. It writes properties in the schema's
# order, and integers without a decimal point.
NUM_FOLLOWED = 163
NEVER_WRITTEN = {
    "a format that is wrong": ["is only an annotation by default"],
    "properties in another order": [
        "allOf: allOf: allOf",
        "base schema: valid",
        "different property order",
    ],
    "an integer with a decimal point": [
        "float zero",
        "float one",
        "float -2.0",
        "float is valid",
        "[0.0]",
        "[1.0]",
        "zero fractional part",
    ],
}
