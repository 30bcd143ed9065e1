"""The type of an object in a JSON text: a request's body, a configuration file, extra settings."""

from typing import Any

# The values were written elsewhere: the code that reads one checks its type.
JsonObject = dict[str, Any]
