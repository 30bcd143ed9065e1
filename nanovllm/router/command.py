"""The command `nanovllm router`. Imports nothing heavy before it runs, so that help and mistakes show at once."""

from __future__ import annotations

import argparse
import asyncio
import logging
from dataclasses import dataclass
from typing import Literal

from nanovllm.data.flags import Flags, Seconds, UsageError
from nanovllm.server.access import LIMITS, Access, api_keys

SERVERS = {
    "--prefill": "servers that compute prompts (nanovllm serve --kv-role producer)",
    "--decode": "servers that generate, and answer clients (nanovllm serve --kv-role consumer)",
    "--worker-urls": "servers that do both",
}
KEY_HELP = (
    "the router's own key for its questions to the servers (default: NANOVLLM_API_KEY or VLLM_API_KEY); the router passes "
    "clients' keys on, and the servers check them"
)


@dataclass
class RouterConfig(Flags):
    """How requests are routed: flags of `router` and of `serve --prefill N --decode M`.

    Attributes:
        policy: which server gets a request: each in turn, or the one that has seen its beginning before
        kv_order: prefill_first: a prefill server computes the prompt, then a decode server fetches its KV; decode_first: a decode
            server asks a prefill server for the blocks that it has not cached itself
        kv_direction: with decode_first: the prefill server writes KV into the decode server's blocks while it computes (push), or
            the decode server reads it afterwards (pull); prefill_first always pulls
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `router`."""
    group = parser.add_argument_group("servers", "either some that prefill and some that decode, or some that do both")
    for flag, help in SERVERS.items():
        group.add_argument(flag, nargs="+", action="extend", default=[], metavar="URL", help=help)
    group.add_argument("--api-key", metavar="KEY", help=KEY_HELP)
    group = parser.add_argument_group("router", LIMITS)
    Access.add_arguments(group)
    RouterConfig.add_arguments(group)


def run(arguments: argparse.Namespace) -> None:
    """Route until a signal comes.

    Raises:
        UsageError: flags that do not go together.
    """
    from nanovllm.router.backends import Backends
    from nanovllm.router.run import RouterServer, backends_of

    if arguments.worker_urls and (arguments.prefill or arguments.decode):
        raise UsageError("--worker-urls are servers that do all of it: leave out --prefill and --decode")
    if not arguments.worker_urls and not (arguments.prefill and arguments.decode):
        raise UsageError("name servers: --prefill URL ... and --decode URL ..., or --worker-urls URL ...")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        servers = backends_of(arguments.prefill, arguments.decode, arguments.worker_urls)
    except ValueError as error:
        raise UsageError(str(error)) from error
    config, key = RouterConfig.from_arguments(arguments), next(iter(api_keys([arguments.api_key])), None)
    backends = Backends(servers, key, config.health_check_interval, config.request_timeout)
    listener, access = Access.from_arguments(arguments).listen()
    asyncio.run(RouterServer(backends, listener, config, access).route())
