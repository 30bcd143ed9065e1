"""The command `nanovllm router`. Imports nothing heavy before it runs, so that help and mistakes
show at once."""

import argparse
import asyncio
import logging

from nanovllm.assembly.flags import add_flags, read_flags
from nanovllm.data.errors import UsageError
from nanovllm.router.config import RouterConfig
from nanovllm.server.access import LIMITS, Access, api_keys

SERVERS = {
    "--prefill": "servers that compute prompts (nanovllm serve --kv-role producer)",
    "--decode": "servers that decode and answer clients (nanovllm serve --kv-role consumer)",
    "--worker-urls": "servers that do both",
}
KEY_HELP = (
    "the router's own key for its requests to the servers (default: NANOVLLM_API_KEY or "
    "VLLM_API_KEY); the router forwards clients' keys, and the servers check them"
)
METRICS_HELP = "the first word of the names at /metrics (default: %(default)s)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `router`."""
    group = parser.add_argument_group(
        "servers", "either prefill and decode servers, or servers that do both"
    )
    for flag, help in SERVERS.items():
        group.add_argument(flag, nargs="+", action="extend", default=[], metavar="URL", help=help)
    group.add_argument("--api-key", metavar="KEY", help=KEY_HELP)
    group = parser.add_argument_group("router", LIMITS)
    group.add_argument(
        "--metrics-prefix", choices=("vllm", "nanovllm"), default="vllm", help=METRICS_HELP
    )
    add_flags(Access, group)
    add_flags(RouterConfig, group)


def run(arguments: argparse.Namespace) -> None:
    """Route until a signal comes.

    Raises:
        UsageError: flags that do not go together.
    """
    from nanovllm.router.run import RouterServer, backends_of

    prefill = arguments.prefill
    decode = arguments.decode
    regular = arguments.worker_urls
    if bool(prefill) != bool(decode) or bool(prefill) == bool(regular):
        raise UsageError(
            "name servers: either --prefill URL ... and --decode URL ..., or --worker-urls URL ..."
        )
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    config = read_flags(RouterConfig, arguments)
    key = next(iter(api_keys([arguments.api_key])), None)
    servers = backends_of({"prefill": prefill, "decode": decode, "regular": regular}, config, key)
    listener, access = read_flags(Access, arguments).listen()
    router = RouterServer(servers, listener, access, metrics_prefix=arguments.metrics_prefix)
    asyncio.run(router.route())
