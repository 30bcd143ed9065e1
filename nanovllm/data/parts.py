"""Parts that a copy of the package may lack: each is imported when a feature asks for it."""

import contextlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from typing import Any


class MissingPartError(ValueError):
    """A feature was asked for whose files this copy of the package does not have."""


@contextlib.contextmanager
def needed_for(feature: str) -> Iterator[None]:
    """Import a part in this context, for example:

        with needed_for("quantization"):
            from nanovllm.layers.quantization import quantize_layers

    (If it is a module that may be missing, `import nanovllm.ops.native as native`: Python raises
    another error for `from nanovllm.ops import native`.)

    Args:
        feature: what the user asked for, as the error shall call it: "KV transfer".

    Raises:
        MissingPartError: the module's file is not in this copy of the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "nanovllm":
            raise  # a library is missing, not a part of ours
        raise MissingPartError(
            f"{feature} needs {error.name}, which this copy of nanovllm does not have"
        ) from error


def load(entry: str, feature: str) -> Any:
    """Import one name of a module that may be above the caller. Only for modules that put parts
    together: all others are passed what they use, or import it with `needed_for`.

    Args:
        entry: "module:name", such as "nanovllm.kv_transfer.factory:create_worker_connector".
        feature: see `needed_for`.

    Raises:
        MissingPartError: the module's file is not in this copy of the package.
    """
    with needed_for(feature):
        found = pkgutil.resolve_name(entry)
    return found


def is_there(module: str) -> bool:
    """Whether this copy of the package has a module."""
    return importlib.util.find_spec(module) is not None
