"""Runs the router: serves clients, watches the servers, and shuts down on a signal."""

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Mapping, Sequence

from nanovllm.data.errors import UsageError
from nanovllm.router.app import create_app
from nanovllm.router.backends import Backend, Role
from nanovllm.router.config import RouterConfig
from nanovllm.server.access import Access, url_of
from nanovllm.server.metrics import Prefix
from nanovllm.server.signalled import SignalledServer


def backends_of(
    urls: Mapping[Role, Sequence[str]], config: RouterConfig, api_key: str | None = None
) -> list[Backend]:
    """Return the servers with these URLs.

    Args:
        api_key: the key for the router's own requests, such as health checks.

    Raises:
        UsageError: a string is not the URL of a server, or a URL is given twice.
    """
    servers = [Backend(url, role, config, api_key) for role, given in urls.items() for url in given]
    names = [server.url for server in servers]
    if twice := [url for url in names if names.count(url) > 1]:
        raise UsageError(f"{twice[0]} is listed twice: every server has one role")
    return servers


class RouterServer(SignalledServer):
    """The HTTP server of a router.

    Args:
        servers: at least one, all with the same configuration.
        listener: a bound socket.
        access: which clients may use the router, and the seconds that running requests get after
            the first signal.
        name: the served model, for the banner.
        metrics_prefix: the first word of the metrics' names.
    """

    def __init__(
        self,
        servers: list[Backend],
        listener: socket.socket,
        access: Access,
        name: str = "nanovllm",
        metrics_prefix: Prefix = "vllm",
    ) -> None:
        # The servers write access logs of their own.
        app = create_app(servers, access, metrics_prefix)
        grace = int(access.shutdown_timeout) + 1
        super().__init__(
            app,
            "",
            timeout_graceful_shutdown=grace,
            access_log=False,
            proxy_headers=False,
            log_level="warning",
        )
        self.backends = servers
        self.listener = listener
        self.name = name

    async def route(self, *works: Coroutine[object, object, None]) -> None:
        """Serve until a signal arrives or one of the coroutines fails; then raise its error.

        Args:
            works: run next to the health checks of the servers, and the looks at their loads.
        """
        watches = [backend.look_after() for backend in self.backends]
        watches += [backend.follow_load() for backend in self.backends if backend.config.weights]
        tasks = [asyncio.create_task(work) for work in (*watches, *works)]
        for task in tasks:
            task.add_done_callback(lambda task: setattr(self, "should_exit", True))
        try:
            # Without this check, the first request would find no healthy server.
            await asyncio.gather(*(backend.check() for backend in self.backends))
            self.banner = banner(self.listener, self.name, self.backends)
            await self.serve([self.listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*(backend.connections.aclose() for backend in self.backends))
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


def banner(listener: socket.socket, name: str, servers: Sequence[Backend]) -> str:
    """Return the text for the start of the router: its address, the number of servers, and the
    addresses of those that it has started."""
    roles = [server.role for server in servers]
    counts = [
        f"{roles.count(r)} {r} server{'s' * (roles.count(r) > 1)}" for r in dict.fromkeys(roles)
    ]
    started = "".join(
        f"\n  {server.name}: {server.url}" for server in servers if server.name != server.url
    )
    missing = "".join(
        f"\nStill missing: {server.url} {server.problem}" for server in servers if server.problem
    )
    url = url_of(listener)
    return (
        f"\n{name} is routed at {url}/v1, to {' and '.join(counts)}, each with a page: "
        f"{url}/{started}{missing}\n"
    )
