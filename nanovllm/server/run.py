"""The server's process: its signals and its end."""

from __future__ import annotations

import asyncio
import gc
import os
import socket

from fastapi import FastAPI

from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.server.access import DEFAULT_ACCESS, Access
from nanovllm.server.app import create_app
from nanovllm.server.listen import ready_message
from nanovllm.server.signalled import SignalledServer

# After the time to drain, requests are aborted and get this time to send their last chunk.
LAST_CHUNK_SECONDS = 5


class Server(SignalledServer):
    """The API's server: the first signal lets running requests finish, a second one does not wait.

    Args:
        app: the application.
        engine: its engine.
        banner: printed when the server answers.
        shutdown_timeout: seconds that running requests get after the first signal.
    """

    def __init__(self, app: FastAPI, engine: AsyncEngine, banner: str, shutdown_timeout: float) -> None:
        grace = int(shutdown_timeout) + LAST_CHUNK_SECONDS
        super().__init__(app, banner, timeout_graceful_shutdown=grace)
        self.engine, self.shutdown_timeout = engine, shutdown_timeout

    def on_signal(self, number: int) -> None:
        """Drain the engine; at a second signal, end at once."""
        if self.should_exit:
            os._exit(128 + number)  # the engine's process notices that its parent has ended
        self.should_exit = True
        self._draining = asyncio.get_running_loop().create_task(self.engine.drain(self.shutdown_timeout))


async def run_server(
    engine: AsyncEngine,
    listener: socket.socket,
    model: str,
    access: Access = DEFAULT_ACCESS,
    shutdown_timeout: float = 30.0,
) -> None:
    """Serve until a signal comes, then let running requests end, and stop the engine.

    Args:
        listener: a bound socket.
        model: the model's name in the API.
        access: which clients may use the server.
        shutdown_timeout: seconds after which requests that still run are aborted.
    """
    try:
        app = create_app(engine, model, access)
        server = Server(app, engine, ready_message(listener, model, access.api_keys), shutdown_timeout)
        # The garbage collector stops the event loop; it need not visit modules, routes and the tokenizer each time.
        gc.freeze()
        await server.serve([listener])
    finally:
        gc.unfreeze()
        await engine.shutdown()
