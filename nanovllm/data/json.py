"""The type of an object in a JSON text: a request's body, a configuration file, extra settings."""

from typing import Any

# Its values come from outside this program: the code that reads a value checks its type.
JsonObject = dict[str, Any]
