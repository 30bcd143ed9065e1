"""Errors that end a command with a message, and without a traceback."""


class UsageError(ValueError):
    """The command line asks for something that cannot be done. The command ends with exit code
    2."""


class ServerError(RuntimeError):
    """A server that this command talks to has failed or refuses. The command ends with exit code
    1."""
