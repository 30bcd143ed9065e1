"""How a router routes, as flags. Imports nothing heavy, so that help and mistakes show at once."""

from dataclasses import dataclass
from typing import Literal

from nanovllm.data.flags import Flags, Seconds


@dataclass
class RouterConfig(Flags):
    """How requests are routed: flags of `router` and of `serve --prefill N --decode M`.

    Attributes:
        policy: which server gets a request: each in turn, or the one that has seen its beginning before
        kv_order: prefill_first: a prefill server computes the prompt, then a decode server fetches its KV; decode_first: a decode
            server asks a prefill server for the blocks that it has not cached itself
        kv_direction: with decode_first: the decode server reads KV layer by layer while the prefill server computes (push), or all
            at once afterwards (pull); prefill_first always pulls
        kv_load_failure_policy: what becomes of a request when no prefill server is available: a decode server computes its prompt,
            or the router answers 503
        prefill_timeout: seconds after which a prefill server is too late
        request_timeout: seconds that a server may be silent in the middle of a request
        health_check_interval: seconds between two health checks of a server
    """

    policy: Literal["round_robin", "prefix_aware"] = "round_robin"
    kv_order: Literal["prefill_first", "decode_first"] = "prefill_first"
    kv_direction: Literal["push", "pull"] = "push"
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    prefill_timeout: Seconds = 600.0
    request_timeout: Seconds = 1800.0
    health_check_interval: Seconds = 5.0
