"""The connector of an engine that shares no KV with other engines or stores."""

from collections.abc import Callable, Sequence

from nanovllm.data.request import Request


class NoConnector:
    """A KV connector that finds no KV elsewhere, and moves none.

    The scheduler and each rank have a connector. Lecture 31 builds those that move KV;
    `kv.connector` describes their methods.

    Attributes:
        notify: never called, since no transfer ever ends.
    """

    notify: Callable[[], None]
    sources: Sequence[int] = ()
    has_work = has_news = False
    idle_seconds: float | None = None

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """No other engine has KV of this request."""
        return 0, True

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, None]:
        """No other engine reads the blocks of a request that has ended: they can be freed."""
        return False, None

    def choose_victim(
        self, request: Request, num_tokens: int, running: list[Request], manager: object
    ) -> Request:
        """The request to preempt so that `request` can have blocks: the last of the running
        ones."""
        return running[-1]

    def close(self, *arguments: object) -> None:
        """Do nothing, like the other methods that the engine calls."""

    check_request = decline = revoke = build_connector_meta = forget_requests = close
    update_state_after_alloc = update_connector_output = close
    save_kv_layer = save_kv_layers = get_handshake_metadata = close
