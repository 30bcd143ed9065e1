"""The router's server: its servers, its signals, and its end."""

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Mapping, Sequence

from nanovllm.data.flags import UsageError
from nanovllm.router.app import create_app
from nanovllm.router.backends import Backend, Role
from nanovllm.router.config import RouterConfig
from nanovllm.server.access import Access, url_of
from nanovllm.server.metrics import Prefix
from nanovllm.server.signalled import SignalledServer


def backends_of(
    urls: Mapping[Role, Sequence[str]], config: RouterConfig, api_key: str | None = None
) -> list[Backend]:
    """Servers by their URLs.

    Args:
        api_key: the router's own key, for its own questions.

    Raises:
        UsageError: a text that is no URL of a server, or a URL that is given twice.
    """
    servers = [Backend(url, role, config, api_key) for role, given in urls.items() for url in given]
    names = [server.url for server in servers]
    if twice := [url for url in names if names.count(url) > 1]:
        raise UsageError(f"{twice[0]} is listed twice: every server has one role")
    return servers


class RouterServer(SignalledServer):
    """The router's server.

    Args:
        servers: the servers behind it, at least one, all with the same configuration.
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
        """Serve until a signal comes, or one of the works fails, whose error is raised."""
        tasks = [
            asyncio.create_task(work)
            for work in (*(backend.look_after() for backend in self.backends), *works)
        ]
        for task in tasks:
            task.add_done_callback(lambda task: setattr(self, "should_exit", True))
        try:
            # So that the first request finds servers.
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
    """The router's address, and the servers behind it: how many, and where those are that it has
    started."""
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
