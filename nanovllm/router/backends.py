"""The servers behind a router: what they are asked, and how they are.

Requests go out through httpcore, the engine room of httpx: it sends exactly the headers that it is given, and takes half a
millisecond less.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import httpcore
import msgspec

logger = logging.getLogger("nanovllm.router")

Role = Literal["prefill", "decode", "regular"]
Headers = list[tuple[bytes, bytes]]

CONNECT_SECONDS = 5.0
# A health check waits so long for an answer.
HEALTH_SECONDS = 2.5
# A server that is silent for so many health checks in a row is given up, with all requests that wait for it. More than one: if
# this process was stopped, its timers end before it has read the answers.
MAX_SILENT_CHECKS = 2
# After a failure it is seen so soon how the servers are.
LOOK_SECONDS = 0.1
# Servers close idle connections after 5 s (uvicorn): none may be used that is about to be closed.
KEEP_ALIVE_SECONDS = 3.0
# What a request to a server can fail with, whatever it was.
FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, TimeoutError, OSError)
REFUSED = (httpcore.ConnectError, httpcore.ConnectTimeout)


class KVEngine(msgspec.Struct):
    """One of a server's engines, as far as it matters here."""

    kv_role: str = "kv_both"
    kv_host: str | None = None
    kv_port: int | None = None


class KVInformation(msgspec.Struct):
    """Answer to GET /kv_transfer."""

    engines: list[KVEngine]


class Backend:
    """A server.

    Args:
        url: as in http://127.0.0.1:8100.
        role: "prefill", "decode", or "regular" where nothing is divided.
        index: its place among the servers of this role.

    Attributes:
        num_running: requests that have been sent to it and have not ended.
        problem: why it gets no requests; "" if it does.
        kv_addresses: where decode servers may ask its engines for KV.

    Raises:
        ValueError: not such a URL.
    """

    def __init__(self, url: str, role: Role, index: int) -> None:
        self.url, self.role, self.index = url.rstrip("/"), role, index
        parsed = httpcore.URL(self.url)
        if parsed.scheme not in (b"http", b"https") or not parsed.host or parsed.target != b"/":
            raise ValueError(f"{url!r} is not the address of a server: write it as http://127.0.0.1:8100")
        self._origin = parsed
        self.host = parsed.host if parsed.port is None else b"%s:%d" % (parsed.host, parsed.port)
        self.num_running = 0
        self.problem = "has not been reached yet"
        self.kv_addresses: list[tuple[str, int]] = []
        self.silent_checks = 0
        self._waiting: set[asyncio.Timeout] = set()

    def __str__(self) -> str:
        return self.url

    @property
    def is_healthy(self) -> bool:
        """Whether it gets requests."""
        return not self.problem

    def target(self, path: bytes) -> httpcore.URL:
        """The URL of a path, with its query."""
        origin = self._origin
        return httpcore.URL(scheme=origin.scheme, host=origin.host, port=origin.port, target=path)

    @contextlib.asynccontextmanager
    async def patience(self) -> AsyncIterator[None]:
        """Around waiting for this server: ends with a TimeoutError when it is given up."""
        async with asyncio.timeout(None) as scope:
            self._waiting.add(scope)
            try:
                yield
            finally:
                self._waiting.discard(scope)

    def give_up(self) -> None:
        """Whoever waits for this server waits in vain."""
        now = asyncio.get_running_loop().time()
        while self._waiting:
            self._waiting.pop().reschedule(now)


class Answer:
    """A server's answer, whose body is still to come. Whoever has it closes it.

    Attributes:
        backend: the server.
        status: HTTP's.
        headers: as they came.
    """

    def __init__(self, backend: Backend, response: httpcore.Response, busy: Sequence[Backend]) -> None:
        self.backend = backend
        self._busy = busy
        self.status: int = response.status
        self.headers: Headers = response.headers
        self._response = response
        self._chunks = response.aiter_stream()
        self._is_open = True

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events."""
        return any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers
        )

    async def chunk(self) -> bytes | None:
        """What comes next of the body; None at its end.

        Raises:
            FAILURES: it does not come.
        """
        async with self.backend.patience():
            return await anext(self._chunks, None)

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            FAILURES: it does not come.
        """
        chunks = []
        while (chunk := await self.chunk()) is not None:
            chunks.append(chunk)
        await self.aclose()
        return b"".join(chunks)

    async def aclose(self) -> None:
        """Nobody wants the rest; a server that is still at work on it notices."""
        if self._is_open:
            self._is_open = False
            for backend in self._busy:
                backend.num_running -= 1
            await self._response.aclose()


class Backends:
    """All servers, their connections, and the task that looks after them.

    Args:
        backends: the servers.
        api_key: what the router shows when it asks on its own behalf.
        health_check_interval: seconds between two looks.
        request_timeout: seconds that a server may be silent in the middle of a request.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        api_key: str | None = None,
        health_check_interval: float = 5.0,
        request_timeout: float = 1800.0,
    ) -> None:
        self.all = list(backends)
        self.health_check_interval, self.request_timeout = health_check_interval, request_timeout
        self._own_headers: Headers = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_SECONDS
        )
        self._releases: set[asyncio.Task[None]] = set()
        self._look = asyncio.Event()
        # Told of every server that is ready, again or for the first time.
        self.on_return: Callable[[Backend], None] = lambda backend: None
        # Told after every health check that finds a server given up for its silence.
        self.on_silence: Callable[[Backend], None] = lambda backend: None

    def of(self, role: Role) -> list[Backend]:
        """Those of a role."""
        return [backend for backend in self.all if backend.role == role]

    async def send(
        self,
        backend: Backend,
        method: str,
        path: bytes,
        headers: Headers,
        body: bytes = b"",
        helper: Backend | None = None,
    ) -> Answer:
        """Ask a server.

        Args:
            path: with its query.
            headers: without Host and Content-Length.
            helper: another server that will be at work on this, too.

        Raises:
            FAILURES: there is no answer.
        """
        own = [(b"host", backend.host)]
        if body or method != "GET":
            own.append((b"content-length", b"%d" % len(body)))
        waits = self.request_timeout
        timeouts = {"connect": CONNECT_SECONDS, "read": waits, "write": waits, "pool": CONNECT_SECONDS}
        request = httpcore.Request(
            method, backend.target(path), headers=own + headers, content=body, extensions={"timeout": timeouts}
        )
        busy = [backend] if helper is None else [backend, helper]
        for each in busy:
            each.num_running += 1
        try:
            async with backend.patience():
                return Answer(backend, await self._pool.handle_async_request(request), busy)
        except BaseException:
            for each in busy:
                each.num_running -= 1
            raise

    def note_failure(self, backend: Backend, error: Exception | None) -> None:
        """A request to this server has failed. One that cannot even be reached gets no more until a health check succeeds; of
        all others it is seen soon how they are.

        Args:
            error: one of FAILURES; None if the server has answered that it cannot.
        """
        if error is not None and isinstance(error, REFUSED):
            self._put_down(backend, describe(error))
        self._look.set()

    def _put_down(self, backend: Backend, problem: str) -> None:
        if problem != backend.problem:
            logger.warning("%s gets no requests for now: %s", backend, problem)
        backend.problem = problem

    # ---------------------------------------------------------------- health

    async def look_after(self) -> None:
        """Check the health of all servers, for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), self.health_check_interval)
                await asyncio.sleep(LOOK_SECONDS)  # many failures at once are one reason
            self._look.clear()
            await self.check_all()

    async def check_all(self) -> None:
        """Check all servers now."""
        await asyncio.gather(*map(self.check, self.all))

    async def check(self, backend: Backend) -> None:
        """See how a server is."""
        silent = False
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                problem = await self._problem_of(backend)
        except (TimeoutError, httpcore.ReadTimeout) as error:
            backend.silent_checks += 1
            silent = backend.silent_checks >= MAX_SILENT_CHECKS
            problem = describe(error) if silent else backend.problem
            self._look.set()  # the next check does not wait for the interval
        except FAILURES as error:
            problem, backend.silent_checks = describe(error), 0
        else:
            backend.silent_checks = 0
        if problem:
            self._put_down(backend, problem)
        elif backend.problem:
            logger.info("%s is ready", backend)
            backend.problem = ""
            self.on_return(backend)
        if silent:
            backend.give_up()
            self.on_silence(backend)

    async def _problem_of(self, backend: Backend) -> str:
        status, _ = await self.fetch(backend, b"/health")
        if status != 200:
            return f"answers {status} to GET /health"
        if backend.role == "regular":
            return ""
        status, content = await self.fetch(backend, b"/kv_transfer")
        if status == 404:
            return ""  # vLLM's servers say nothing of it, and can do it all the same (prefill first)
        if status in (401, 403):
            return f"answers {status} to GET /kv_transfer: name its key with --api-key"
        try:
            engines = msgspec.json.decode(content, type=KVInformation).engines
        except msgspec.DecodeError:
            return f"answers {status} to GET /kv_transfer, and nothing that makes sense"
        wanted = {"prefill": "producer", "decode": "consumer"}[backend.role]
        for engine in engines:
            if engine.kv_role not in (f"kv_{wanted}", "kv_both"):
                return f"runs with --kv-role {engine.kv_role}: a {backend.role} server needs {wanted} or both"
        if not engines:
            return f"runs without --kv-role: a {backend.role} server needs {wanted} or both"
        backend.kv_addresses = [(e.kv_host, e.kv_port) for e in engines if e.kv_host and e.kv_port]
        return ""

    def release(self, backend: Backend, remote_request_id: str) -> None:
        """Tell a prefill server, in the background, that no decode server will read the KV that it holds for a request. A server
        that does not hear of it holds the KV until the lease ends."""
        task = asyncio.create_task(self._release(backend, remote_request_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, backend: Backend, remote_request_id: str) -> None:
        body = msgspec.json.encode({"remote_request_id": remote_request_id})
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                status, _ = await self.fetch(backend, b"/kv_transfer/release", body)
            problem = f"answers {status}" if status >= 400 else ""
        except FAILURES as error:
            problem = describe(error)
        if problem:
            logger.info("%s %s, and holds the KV of %s a while longer", backend, problem, remote_request_id)

    async def fetch(self, backend: Backend, path: bytes, body: bytes = b"") -> tuple[int, bytes]:
        """GET, or POST a body of JSON, on the router's own behalf: status and body of the answer.

        Raises:
            FAILURES: there is no answer.
        """
        headers = self._own_headers + ([(b"content-type", b"application/json")] if body else [])
        answer = await self.send(backend, "POST" if body else "GET", path, headers, body)
        try:
            return answer.status, await answer.read()
        finally:
            await answer.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        if self._releases:
            await asyncio.wait(self._releases)
        await self._pool.aclose()


def describe(error: Exception) -> str:
    """What has happened, in words."""
    if isinstance(error, REFUSED):
        words = "cannot be reached"
    elif isinstance(error, TimeoutError | httpcore.TimeoutException):
        words = "does not answer"
    else:
        words = "has cut the connection"
    return f"{words} ({error})" if str(error) else words
