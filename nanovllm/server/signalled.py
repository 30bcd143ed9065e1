"""A web server that says when it listens, and ends with exit code 0 when a signal comes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn


class SignalledServer(uvicorn.Server):
    """Uvicorn with our own idea of an end: `on_signal` decides what a signal does.

    Args:
        config: uvicorn's settings, the application among them.
        banner: printed when the server answers.
    """

    def __init__(self, config: uvicorn.Config, banner: str) -> None:
        super().__init__(config)
        self.banner = banner

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        await super().startup(sockets)
        print(self.banner, flush=True)

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
