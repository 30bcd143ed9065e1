"""Errors that callers of an engine may have to handle. This module imports nothing, so commands can
import it."""


class EngineDeadError(RuntimeError):
    """The engine's process has ended; nothing can be generated any more."""


class EngineStartError(ValueError):
    """The engine cannot start with these settings; the message says why."""


class RequestRefusedError(ValueError):
    """The engine could not take a request that had passed the front end's checks."""
