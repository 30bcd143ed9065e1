"""The router's server: its servers, its signals, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Any

from nanovllm.data.flags import UsageError
from nanovllm.router.app import create_app
from nanovllm.router.backends import Backend, Backends, Role
from nanovllm.server.access import Access
from nanovllm.server.listen import url_of
from nanovllm.server.signalled import SignalledServer


def backends_of(prefill: Sequence[str], decode: Sequence[str], regular: Sequence[str] = ()) -> list[Backend]:
    """Servers by their URLs.

    Raises:
        UsageError: a text that is no URL of a server, or a URL that is given twice.
    """
    given: dict[Role, Sequence[str]] = {"prefill": prefill, "decode": decode, "regular": regular}
    servers = [Backend(url, role) for role, urls in given.items() for url in urls]
    urls = [server.url for server in servers]
    if twice := [url for url in urls if urls.count(url) > 1]:
        raise UsageError(f"{twice[0]} is named twice: every server has one role")
    return servers


class RouterServer(SignalledServer):
    """The router's server.

    Args:
        backends: the servers behind it.
        listener: a bound socket.
        access: which clients may use the router, and the seconds that running requests get after the first signal.
        name: the served model, for the banner.
    """

    def __init__(self, backends: Backends, listener: socket.socket, access: Access, name: str = "nanovllm") -> None:
        # The servers write access logs of their own.
        settings: dict[str, Any] = {"proxy_headers": False, "access_log": False, "log_level": "warning"}
        app, grace = create_app(backends, access), int(access.shutdown_timeout) + 1
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


def banner(listener: socket.socket, name: str, servers: Sequence[Backend]) -> str:
    """The router's address, and the servers behind it."""
    roles = [server.role for server in servers]
    counts = [f"{roles.count(r)} {r} server{'s' * (roles.count(r) > 1)}" for r in dict.fromkeys(roles)]
    missing = "".join(f"\nStill missing: {server} {server.problem}" for server in servers if server.problem)
    url = url_of(listener)
    return f"\n{name} is routed at {url}/v1, to {' and '.join(counts)}, each with a page: {url}/{missing}\n"
