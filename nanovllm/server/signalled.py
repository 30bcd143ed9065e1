"""A web server that prints a line when it listens, ends slow clients' connections, and ends with
exit code 0 when a signal comes."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from nanovllm.server.access import BODY_SECONDS, HEADER_SECONDS, MAX_CONNECTIONS, RESERVED_FILES
from nanovllm.server.errors import APIError

logger = logging.getLogger("nanovllm.server")


def say(text: str) -> None:
    """Print a line at once. If stdout cannot be written to (a pipe without a reader, a full disk),
    this line and all later output go to /dev/null, and serving goes on."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("stdout cannot be written to and is no longer used: %s", error.strerror)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def max_connections() -> int:
    """As many as the process may open files, less some that it needs for other things."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        MAX_CONNECTIONS
        if files == resource.RLIM_INFINITY
        else min(files - RESERVED_FILES, MAX_CONNECTIONS)
    )


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which has a timeout only for the pause between two requests, with
    deadlines for a request.

    Attributes:
        header_seconds: for a request's headers, from the connection's beginning or from the last
            answer.
        body_seconds: from the headers to the body's end. A byte that arrives extends neither
            deadline.
    """

    header_seconds = HEADER_SECONDS
    body_seconds = BODY_SECONDS

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # What the client has to send ("headers", "body" or nothing), and since when.
        self._awaited = ""
        self._since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request. With one connection too many, the server closes the one
        whose client has kept it waiting for longest; if it waits for no client, it refuses the new
        connection."""
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            slow = [
                each
                for each in self.connections
                if isinstance(each, GuardedProtocol)
                and each._awaited
                and not each.transport.is_closing()
            ]
            if not slow:
                return self._answer(
                    APIError(
                        503,
                        "the server has no room for another connection",
                        headers={"Retry-After": "1"},
                    )
                )
            min(slow, key=lambda each: each._since).transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        awaited = {h11.IDLE: "headers", h11.SEND_BODY: "body"}.get(self.conn.their_state, "")
        if awaited != self._awaited:
            self._awaited = awaited
            self._since = self.loop.time()

    def end_if_slow(self) -> None:
        """End the connection if its client is too slow; answer it if it has sent a part of a
        request."""
        seconds = self.header_seconds if self._awaited == "headers" else self.body_seconds
        if (
            not self._awaited
            or self.loop.time() < self._since + seconds
            or self.transport.is_closing()
        ):
            return
        has_begun = {
            "headers": self.conn.trailing_data[0],
            "body": self.conn.our_state is h11.SEND_RESPONSE,
        }
        if has_begun[self._awaited]:
            self._answer(
                APIError(
                    408,
                    f"the request's {self._awaited} did not arrive within {seconds:g} seconds",
                    code="request_timeout",
                )
            )
        else:
            self.transport.abort()

    def _answer(self, error: APIError) -> None:
        """Send a response past the application, and close the connection."""
        if self._awaited == "body":
            # The application reads no more, and its own response is dropped.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        status = response.status_code
        head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class SignalledServer(uvicorn.Server):
    """Uvicorn for HTTP/1.1 without WebSockets. The first signal lets running requests end, a second
    one does not wait.

    Args:
        app: the application.
        banner: printed when the server answers.
        drain: called with the first signal, if something has to end.
        timeout_graceful_shutdown: seconds that running requests get after the first signal; None:
            any number.
        access_log, proxy_headers, log_level: as in `uvicorn.Config`.
    """

    def __init__(
        self,
        app: ASGIApp,
        banner: str,
        drain: Callable[[], Awaitable[object]] | None = None,
        *,
        timeout_graceful_shutdown: int | None = None,
        access_log: bool = True,
        proxy_headers: bool = True,
        log_level: str | None = None,
    ) -> None:
        # An idle connection stays open for longer than clients keep one to use it again (5 s in
        # httpx, and so in OpenAI's client). A server that closed it at the same moment would lose a
        # request in flight.
        config = uvicorn.Config(
            app,
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            timeout_keep_alive=round(HEADER_SECONDS),
            timeout_graceful_shutdown=timeout_graceful_shutdown,
            access_log=access_log,
            proxy_headers=proxy_headers,
            log_level=log_level,
        )
        super().__init__(config)
        self.banner = banner
        self.drain = drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and print the banner."""
        await super().startup(sockets)
        say(self.banner)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals. (Uvicorn's own version raises the signal again at its end, so the exit
        code would not be 0.)"""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.on_signal, number)
        yield

    def on_signal(self, number: int) -> None:
        """Let running requests end; at a second signal, end the process at once. Processes that it
        has started notice that."""
        if self.should_exit:
            os._exit(128 + number)
        self.should_exit = True
        if self.drain is not None:
            self._draining = asyncio.ensure_future(self.drain())

    async def on_tick(self, counter: int) -> bool:
        """End the connections of slow clients. Called ten times per second."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, GuardedProtocol):
                connection.end_if_slow()
        return await super().on_tick(counter)
