"""The command `nanovllm router`: its process, and its end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence

from nanovllm.cli.main import UsageError, keys_of, listen
from nanovllm.router.app import create_app
from nanovllm.router.backends import Backend, Backends
from nanovllm.router.config import RouterConfig, routing
from nanovllm.server.access import DEFAULT_ACCESS, Access
from nanovllm.server.listen import url_of
from nanovllm.server.signalled import SignalledServer


def run(arguments: argparse.Namespace) -> int:
    """Route until a signal comes."""
    if arguments.worker_urls and (arguments.prefill or arguments.decode):
        raise UsageError("--worker-urls are servers that do all of it: leave out --prefill and --decode")
    if not arguments.worker_urls and not (arguments.prefill and arguments.decode):
        raise UsageError("name servers: --prefill URL ... and --decode URL ..., or --worker-urls URL ...")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        servers = backends_of(arguments.prefill, arguments.decode, arguments.worker_urls)
    except ValueError as error:
        raise UsageError(str(error)) from error
    keys = keys_of(arguments, [] if arguments.api_key is None else [arguments.api_key])
    arguments.api_key = keys[0] if keys else None
    listener = listen(arguments)
    asyncio.run(_run(servers, listener, arguments))
    return 0


def backends_of(prefill: Sequence[str], decode: Sequence[str], regular: Sequence[str] = ()) -> list[Backend]:
    """Servers by their URLs.

    Raises:
        ValueError: one that is none, or that is there twice.
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


async def _run(servers: list[Backend], listener: socket.socket, arguments: argparse.Namespace) -> None:
    backends = Backends(servers, arguments.api_key, arguments.health_check_interval, arguments.request_timeout)
    access = Access.from_arguments(arguments, listener)
    server = RouterServer(backends, listener, routing(arguments), arguments.shutdown_timeout, access=access)
    await server.route()


class RouterServer(SignalledServer):
    """The router's server: the first signal lets running requests finish, a second one does not wait.

    Args:
        backends: the servers behind it.
        listener: a bound socket.
        config: how requests are routed.
        shutdown_timeout: seconds that running requests get after the first signal.
        name: what is served, for the banner.
        access: which clients may come in.
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
        super().__init__(
            create_app(backends, config, access),
            "",
            proxy_headers=False,
            access_log=False,  # the servers have their own
            log_level="warning",
            timeout_graceful_shutdown=int(shutdown_timeout) + 1,
        )
        self.backends, self.listener, self.name = backends, listener, name

    async def route(self) -> None:
        """Serve until a signal comes."""
        await self.backends.check_all()  # so that the first request finds servers
        self.banner = banner(self.listener, self.name, self.backends.all)
        looking = asyncio.create_task(self.backends.look_after())
        looking.add_done_callback(lambda task: setattr(self, "should_exit", True))  # it failed, or all is over
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
    """Where the router is, and what is behind it."""
    counts = [
        f"{len(of_role)} {role} server{'s' * (len(of_role) > 1)}"
        for role in ("prefill", "decode", "regular")
        if (of_role := [server for server in servers if server.role == role])
    ]
    missing = "".join(f"\nStill missing: {server} {server.problem}" for server in servers if server.problem)
    url = url_of(listener)
    return f"\n{name} is routed at {url}/v1, to {' and '.join(counts)}, each with a page: {url}/{missing}\n"
