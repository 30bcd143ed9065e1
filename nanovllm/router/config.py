"""How a router routes, and its flags. Imports nothing heavy, so that help and mistakes show at once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from nanovllm.cli.main import add_address_arguments, positive_seconds, seconds
from nanovllm.server.access import LIMITS


@dataclass
class RouterConfig:
    """How requests are routed.

    Attributes:
        kv_order: "prefill_first": a prefill server computes the prompt, and a decode server fetches its KV. "decode_first": a
            decode server gets the request at once, and asks a prefill server for what it has not cached itself.
        kv_direction: decode first: the prefill server writes ("push") or the decode server reads ("pull").
        kv_load_failure_policy: what becomes of a request for which no prefill server can be had: a decode server computes all
            of it ("recompute"), or it is answered with 503 ("fail").
        policy: a name in `POLICIES`.
        prefill_timeout: seconds after which a prefill server is too late.
    """

    kv_order: str = "prefill_first"
    kv_direction: str = "push"
    kv_load_failure_policy: str = "recompute"
    policy: str = "round_robin"
    prefill_timeout: float = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `router`."""
    servers = parser.add_argument_group(
        "servers", "either some that prefill and some that decode, or some that do both"
    )
    for flag, text in (
        ("--prefill", "servers that compute prompts (nanovllm serve --kv-role producer)"),
        ("--decode", "servers that generate, and answer clients (nanovllm serve --kv-role consumer)"),
        ("--worker-urls", "servers that do all of it"),
    ):
        servers.add_argument(flag, nargs="+", action="extend", default=[], metavar="URL", help=text)
    servers.add_argument(
        "--api-key",
        metavar="KEY",
        help="what the router shows the servers when it asks for itself (default: NANOVLLM_API_KEY or VLLM_API_KEY); clients' "
        "keys are passed on, and the servers check them",
    )
    servers.add_argument(
        "--health-check-interval",
        type=positive_seconds,
        default=5.0,
        metavar="SECONDS",
        help="how often to look how the servers are (default: %(default)s)",
    )
    group = parser.add_argument_group("router", LIMITS)
    add_address_arguments(group)
    group.add_argument(
        "--shutdown-timeout",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may go on after the first signal (default: %(default)s)",
    )
    add_routing_arguments(group)


def add_routing_arguments(parser: argparse._ActionsContainer) -> None:
    """How requests are routed: `router` has these flags, and `serve --prefill N --decode M`."""
    defaults = RouterConfig()
    parser.add_argument(
        "--policy",
        choices=["round_robin", "prefix_aware"],
        default=defaults.policy,
        help="who gets a request: each server in turn, or the one that has seen its beginning before (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-order",
        choices=["prefill_first", "decode_first"],
        default=defaults.kv_order,
        help="prefill_first: a prefill server computes the prompt, then a decode server fetches its KV; decode_first: a "
        "decode server asks a prefill server for what it has not cached itself (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-direction",
        choices=["push", "pull"],
        default=defaults.kv_direction,
        help="with decode_first: the prefill server writes KV into the decode server's blocks while it computes (push), or the "
        "decode server reads it afterwards (pull); prefill_first always pulls (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-load-failure-policy",
        choices=["recompute", "fail"],
        default=defaults.kv_load_failure_policy,
        help="what becomes of a request for which no prefill server can be had: a decode server computes its prompt, or "
        "it is answered with 503 (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill-timeout",
        type=positive_seconds,
        default=defaults.prefill_timeout,
        metavar="SECONDS",
        help="when a prefill server is too late (default: %(default)s)",
    )
    parser.add_argument(
        "--request-timeout",
        type=positive_seconds,
        default=1800.0,
        metavar="SECONDS",
        help="how long a server may be silent in the middle of a request (default: %(default)s)",
    )


def routing(arguments: argparse.Namespace) -> RouterConfig:
    """What `add_routing_arguments` has asked for."""
    return RouterConfig(
        arguments.kv_order,
        arguments.kv_direction,
        arguments.kv_load_failure_policy,
        arguments.policy,
        arguments.prefill_timeout,
    )
