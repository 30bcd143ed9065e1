"""The router's settings, as flags. Imports nothing heavy, so that help and errors appear fast."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nanovllm.assembly.flags import Seconds, parse_numbers
from nanovllm.data.checks import Keywords
from nanovllm.router.policies import Weights


@dataclass
class RouterConfig(Keywords):
    """Routing settings: flags of `router` and of `serve --prefill N --decode M`.

    Attributes:
        policy: how the router chooses a server: random, round_robin, load (the least busy one), or
            prefix_aware (the one that was already sent the prompt's prefix; also called estimated);
            precise would need to know what the servers have cached, which they do not report yet
        routing_weights: with the policy load, prefix_aware or estimated, weights of llm-d's
            scorers, such as prefix:3 kv:2 queue:2, for a server's share of the prompt's pieces, its
            free KV memory, and its queue; the server with the highest sum is chosen
        metrics_interval: with --routing-weights, seconds between two looks of the router at the
            loads of the servers (GET /metrics)
        kv_order: prefill_first: a prefill server computes the prompt, then a decode server fetches
            its KV; decode_first: a decode server requests from a prefill server the blocks that are
            not in its own cache
        kv_direction: with decode_first: the decode server reads KV layer by layer while the prefill
            server computes (push), or all of it afterwards (pull); prefill_first always pulls
        kv_load_failure_policy: if no prefill server is available, a decode server computes the
            prompt (recompute), or the router answers 503 (fail)
        prefill_timeout: maximum time, in seconds, for a prefill
        request_timeout: maximum time, in seconds, for which a server may send nothing during a
            request
        health_check_interval: seconds between health checks of a server
    """

    policy: Literal["random", "round_robin", "load", "prefix_aware", "estimated", "precise"] = (
        "round_robin"
    )
    routing_weights: str | Sequence[str] | None = None
    metrics_interval: Seconds = 0.2
    kv_order: Literal["prefill_first", "decode_first"] = "prefill_first"
    kv_direction: Literal["push", "pull"] = "push"
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    prefill_timeout: Seconds = 600.0
    request_timeout: Seconds = 1800.0
    health_check_interval: Seconds = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy == "precise":
            raise ValueError(
                "policy precise needs events from the servers about what they have cached, which "
                "the router does not receive: use prefix_aware, or precise in nanovllm simulate"
            )
        if self.weights and self.policy in ("random", "round_robin"):
            raise ValueError(
                "--routing-weights needs --policy load, prefix_aware or estimated, got "
                f"{self.policy}"
            )
        if self.metrics_interval != type(self).metrics_interval and not self.weights:
            raise ValueError(
                "--metrics-interval has no effect without --routing-weights: set it, too, or omit "
                "--metrics-interval"
            )

    @property
    def weights(self) -> Weights | None:
        """`routing_weights` as numbers.

        Raises:
            UsageError: see `read_weights`.
        """
        return read_weights(self.routing_weights)


def read_weights(words: str | Sequence[str] | None) -> Weights | None:
    """Read `--routing-weights`: one such as "kv:2", or several. Returns None if there are none.

    Raises:
        UsageError: an unknown scorer, or no positive number.
    """
    kind = "a positive number, such as kv:2"
    weights = parse_numbers("--routing-weights", words, Weights._fields, kind)
    return Weights(**weights) if weights else None
