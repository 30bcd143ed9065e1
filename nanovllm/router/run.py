"""The router's process, from its command line to its end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence

from nanovllm.router.app import create_app
from nanovllm.router.backends import Backend, Backends
from nanovllm.router.config import RouterConfig
from nanovllm.server.access import DEFAULT_ACCESS, Access
from nanovllm.server.commandline import UsageError, keys_of, listen
from nanovllm.server.listen import url_of
from nanovllm.server.options import options_of
from nanovllm.server.signalled import SignalledServer


def run_router(arguments: argparse.Namespace) -> None:
    """The command `nanovllm router`: route until a signal comes."""
    if arguments.worker_urls and (arguments.prefill or arguments.decode):
        raise UsageError("--worker-urls are servers that do all of it: leave out --prefill and --decode")
    if not arguments.worker_urls and not (arguments.prefill and arguments.decode):
        raise UsageError("name servers: --prefill URL ... and --decode URL ..., or --worker-urls URL ...")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        servers = backends_of(arguments.prefill, arguments.decode, arguments.worker_urls)
    except ValueError as error:
        raise UsageError(str(error)) from error
    config, key = options_of(RouterConfig, arguments), next(iter(keys_of([arguments.api_key])), None)
    backends = Backends(servers, key, arguments.health_check_interval, config.request_timeout)
    listener = listen(arguments)
    access = Access.from_arguments(arguments, listener)
    asyncio.run(RouterServer(backends, listener, config, arguments.shutdown_timeout, access=access).route())


def backends_of(prefill: Sequence[str], decode: Sequence[str], regular: Sequence[str] = ()) -> list[Backend]:
    """Servers by their URLs.

    Raises:
        ValueError: a text that is no URL of a server, or a URL that is given twice.
    """
    servers = [
        *(Backend(url, "prefill", i) for i, url in enumerate(prefill)),
        *(Backend(url, "decode", i) for i, url in enumerate(decode)),
        *(Backend(url, "regular", i) for i, url in enumerate(regular)),
    ]
    urls = [server.url for server in servers]
    if twice := [url for url in urls if urls.count(url) > 1]:
        raise ValueError(f"{twice[0]} is named twice: every server has one role")
    return servers


class RouterServer(SignalledServer):
    """The router's server: the first signal lets running requests finish, a second one ends them.

    Args:
        backends: the servers behind it.
        listener: a bound socket.
        config: how requests are routed.
        shutdown_timeout: seconds that running requests get after the first signal.
        name: the served model, for the banner.
        access: which clients may use the router.
    """

    def __init__(
        self,
        backends: Backends,
        listener: socket.socket,
        config: RouterConfig,
        shutdown_timeout: float,
        name: str = "nanovllm",
        access: Access = DEFAULT_ACCESS,
    ) -> None:
        # The servers write access logs of their own.
        settings = {"proxy_headers": False, "access_log": False, "log_level": "warning"}
        app, grace = create_app(backends, config, access), int(shutdown_timeout) + 1
        super().__init__(app, "", timeout_graceful_shutdown=grace, **settings)
        self.backends, self.listener, self.name = backends, listener, name

    async def route(self) -> None:
        """Serve until a signal comes."""
        await self.backends.check_all()  # so that the first request finds servers
        self.banner = banner(self.listener, self.name, self.backends.all)
        looking = asyncio.create_task(self.backends.look_after())
        looking.add_done_callback(lambda task: setattr(self, "should_exit", True))  # it has failed, or the router ends
        try:
            await self.serve([self.listener])
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
            await self.backends.aclose()

    def on_signal(self, number: int) -> None:
        """End when all responses have ended; at a second signal, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


def banner(listener: socket.socket, name: str, servers: Sequence[Backend]) -> str:
    """The router's address, and the servers behind it."""
    roles = [server.role for server in servers]
    counts = [f"{roles.count(r)} {r} server{'s' * (roles.count(r) > 1)}" for r in dict.fromkeys(roles)]
    missing = "".join(f"\nStill missing: {server} {server.problem}" for server in servers if server.problem)
    url = url_of(listener)
    return f"\n{name} is routed at {url}/v1, to {' and '.join(counts)}, each with a page: {url}/{missing}\n"
