"""How a router routes, as flags. Imports nothing heavy, so that help and mistakes show at once."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.server.options import option, positive_seconds


@dataclass
class RouterConfig:
    """How requests are routed: flags of `router` and of `serve --prefill N --decode M`."""

    policy: str = option(
        "round_robin",
        "which server gets a request: each in turn, or the one that has seen its beginning before (default: %(default)s)",
        choices=("round_robin", "prefix_aware"),
    )
    kv_order: str = option(
        "prefill_first",
        "prefill_first: a prefill server computes the prompt, then a decode server fetches its KV; decode_first: a "
        "decode server asks a prefill server for the blocks that it has not cached itself (default: %(default)s)",
        choices=("prefill_first", "decode_first"),
    )
    kv_direction: str = option(
        "push",
        "with decode_first: the prefill server writes KV into the decode server's blocks while it computes (push), or the "
        "decode server reads it afterwards (pull); prefill_first always pulls (default: %(default)s)",
        choices=("push", "pull"),
    )
    kv_load_failure_policy: str = option(
        "recompute",
        "what becomes of a request when no prefill server is available: a decode server computes its prompt, or the "
        "router answers 503 (default: %(default)s)",
        choices=("recompute", "fail"),
    )
    prefill_timeout: float = option(
        600.0, "when a prefill server is too late (default: %(default)s)", type=positive_seconds, metavar="SECONDS"
    )
    request_timeout: float = option(
        1800.0,
        "how long a server may be silent in the middle of a request (default: %(default)s)",
        type=positive_seconds,
        metavar="SECONDS",
    )
