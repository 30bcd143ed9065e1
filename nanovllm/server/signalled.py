"""A web server that prints a line when it listens, and ends with exit code 0 when a signal comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from nanovllm.server.access import HEADER_SECONDS
from nanovllm.server.connections import GuardedProtocol

logger = logging.getLogger("nanovllm.server")


def say(text: str) -> None:
    """Print a line at once. If stdout cannot be written to (a pipe without a reader, a full disk), this line and all later output
    go to /dev/null, and serving goes on."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("stdout cannot be written to, and is not used any more: %s", error.strerror)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class SignalledServer(uvicorn.Server):
    """Uvicorn for HTTP/1.1 without WebSockets. The first signal lets running requests end, a second one does not wait.

    Args:
        app: the application.
        banner: printed when the server answers.
        drain: called with the first signal, if something has to end.
        **settings: further settings of uvicorn.
    """

    def __init__(
        self, app: ASGIApp, banner: str, drain: Callable[[], Awaitable[Any]] | None = None, **settings: Any
    ) -> None:
        # An idle connection stays open for longer than clients keep one to use it again (5 s in httpx, and so in OpenAI's client).
        # A server that closed it at the same moment would lose a request in flight.
        settings |= {"http": GuardedProtocol, "ws": "none", "timeout_keep_alive": round(HEADER_SECONDS)}
        super().__init__(uvicorn.Config(app, lifespan="off", **settings))
        self.banner, self.drain = banner, drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and print the banner."""
        await super().startup(sockets)
        say(self.banner)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals. (Uvicorn's own version raises the signal again at its end, so the exit code would not be 0.)"""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.on_signal, number)
        yield

    def on_signal(self, number: int) -> None:
        """Let running requests end; at a second signal, end the process at once. Processes that it has started notice that."""
        if self.should_exit:
            os._exit(128 + number)
        self.should_exit = True
        if self.drain is not None:
            self._draining = asyncio.ensure_future(self.drain())

    async def on_tick(self, counter: int) -> bool:
        """End the connections of slow clients. Called ten times per second."""
        for connection in list[Any](self.server_state.connections):
            connection.end_if_slow()
        return await super().on_tick(counter)
