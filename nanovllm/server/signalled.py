"""A web server that says when it listens, and ends with exit code 0 when a signal comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from nanovllm.server.access import HEADER_SECONDS
from nanovllm.server.connections import GuardedProtocol

logger = logging.getLogger("nanovllm.server")


def say(text: str) -> None:
    """Print a line at once. If stdout takes no more (a pipe without a reader, a full disk), serving goes on: this line and all
    later output go to /dev/null."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("stdout cannot be written to, and is not used any more: %s", error.strerror)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class SignalledServer(uvicorn.Server):
    """Uvicorn with our own idea of an end: `on_signal` decides what a signal does. It speaks HTTP/1.1 and no WebSockets.

    Args:
        app: the application.
        banner: printed when the server answers.
        **settings: further ones of uvicorn's.
    """

    def __init__(self, app: ASGIApp, banner: str, **settings: Any) -> None:
        # An idle connection stays open for longer than clients keep one to use it again (5 s in httpx, and so in OpenAI's client):
        # a server that closes it at the same moment loses the request that is on its way.
        settings |= {"http": GuardedProtocol, "ws": "none", "timeout_keep_alive": round(HEADER_SECONDS)}
        super().__init__(uvicorn.Config(app, lifespan="off", **settings))
        self.banner = banner

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        await super().startup(sockets)
        say(self.banner)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn's own version raises the signal again in the end, and the process would not exit with 0."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.on_signal, number)
        yield

    def on_signal(self, number: int) -> None:
        """A SIGINT or SIGTERM has come: end when all responses have ended, at a second SIGINT at once."""
        self.handle_exit(number, None)
