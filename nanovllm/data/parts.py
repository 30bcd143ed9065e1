"""Parts that a copy of the package may lack: each is imported when a feature asks for it."""

import importlib.util
import pkgutil
from typing import Any


class MissingPartError(ValueError):
    """A feature was asked for whose files this copy of the package does not have."""


def load(entry: str, feature: str) -> Any:
    """Import one name of a module.

    Args:
        entry: "module:name", such as "nanovllm.kv_transfer.factory:create_worker_connector".
        feature: what the user asked for, as the error shall call it: "KV transfer".

    Raises:
        MissingPartError: the module's file is not in this copy of the package.
    """
    try:
        return pkgutil.resolve_name(entry)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "nanovllm":
            raise  # a library is missing, not a part of ours
        raise MissingPartError(
            f"{feature} needs {error.name}, which this copy of nanovllm does not have"
        ) from error


def is_there(module: str) -> bool:
    """Whether this copy of the package has a module."""
    return importlib.util.find_spec(module) is not None
