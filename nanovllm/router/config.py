"""How a router routes, and its flags. Imports nothing heavy, so that help and mistakes show at once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from nanovllm.server.access import LIMITS
from nanovllm.server.commandline import add_address_arguments, add_shutdown_argument
from nanovllm.server.options import add_options, option, positive_seconds


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


SERVERS = {
    "--prefill": "servers that compute prompts (nanovllm serve --kv-role producer)",
    "--decode": "servers that generate, and answer clients (nanovllm serve --kv-role consumer)",
    "--worker-urls": "servers that do both",
}
KEY_HELP = (
    "the router's own key for its questions to the servers (default: NANOVLLM_API_KEY or VLLM_API_KEY); the router passes "
    "clients' keys on, and the servers check them"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `router`."""
    group = parser.add_argument_group("servers", "either some that prefill and some that decode, or some that do both")
    for flag, help in SERVERS.items():
        group.add_argument(flag, nargs="+", action="extend", default=[], metavar="URL", help=help)
    group.add_argument("--api-key", metavar="KEY", help=KEY_HELP)
    help = "seconds between two health checks (default: %(default)s)"
    group.add_argument("--health-check-interval", type=positive_seconds, default=5.0, metavar="SECONDS", help=help)
    group = parser.add_argument_group("router", LIMITS)
    add_address_arguments(group)
    add_shutdown_argument(group)
    add_options(RouterConfig, group)


def run(arguments: argparse.Namespace) -> None:
    """Route until a signal comes."""
    from nanovllm.router.run import run_router

    run_router(arguments)
