"""The server's process: its signals and its end."""

from __future__ import annotations

import gc
import socket
from functools import partial

from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.server.access import DEFAULT_ACCESS, Access
from nanovllm.server.app import create_app
from nanovllm.server.listen import ready_message
from nanovllm.server.signalled import SignalledServer

# After the time to drain, requests are aborted and get this time to send their last chunk.
LAST_CHUNK_SECONDS = 5


async def run_server(engine: AsyncEngine, listener: socket.socket, model: str, access: Access = DEFAULT_ACCESS) -> None:
    """Serve until a signal comes, then let running requests end, and stop the engine.

    Args:
        listener: a bound socket.
        model: the model's name in the API.
        access: which clients may use the server, and the seconds after which requests that still run are aborted.
    """
    try:
        app, grace = create_app(engine, model, access), int(access.shutdown_timeout) + LAST_CHUNK_SECONDS
        banner = ready_message(listener, model, access.api_keys)
        drain = partial(engine.drain, access.shutdown_timeout)
        server = SignalledServer(app, banner, drain, timeout_graceful_shutdown=grace)
        # The garbage collector stops the event loop; it need not visit modules, routes and the tokenizer each time.
        gc.freeze()
        await server.serve([listener])
    finally:
        gc.unfreeze()
        await engine.shutdown()
