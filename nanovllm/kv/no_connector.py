"""The runner's half of a KV connector, in an engine that shares no KV."""

from collections.abc import Callable


class NoConnector:
    """Moves no KV. `kv.connector` describes the methods; lecture 31 builds halves that move KV.

    Attributes:
        notify: never called, since no transfer ever ends.
    """

    notify: Callable[[], None]

    def get_handshake_metadata(self) -> None:
        """Other engines cannot reach this rank."""

    def save_kv_layers(self) -> None:
        """Save nothing."""

    def forget_requests(self) -> None:
        """Stop nothing."""

    def close(self) -> None:
        """End nothing."""
