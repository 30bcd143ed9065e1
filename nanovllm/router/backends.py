"""The servers behind a router: the connections to them, and their health.

Requests go out through httpcore, the layer below httpx: it sends exactly the given headers, and takes half a millisecond less.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import httpcore
import msgspec

from nanovllm.data.flags import UsageError
from nanovllm.router.call import Call, Headers
from nanovllm.router.config import RouterConfig

logger = logging.getLogger("nanovllm.router")

Role = Literal["prefill", "decode", "regular"]

CONNECT_SECONDS = 5.0
# The timeout of a health check.
HEALTH_SECONDS = 2.5
# After so many health checks in a row without an answer the router gives a server up, with all requests that wait for it. More than
# one: after this process was stopped, its timers end before it has read the answers.
MAX_SILENT_CHECKS = 2
# So soon after a failed request the router checks all servers.
LOOK_SECONDS = 0.1
# Servers close idle connections after 5 s (uvicorn). The router must not use one that is about to be closed.
KEEP_ALIVE_SECONDS = 3.0
# All errors of a request to a server.
FAILURES = (
    *(httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException),
    *(TimeoutError, OSError, msgspec.DecodeError),
)
REFUSED = (httpcore.ConnectError, httpcore.ConnectTimeout)


class KVEngine(msgspec.Struct):
    """One of a server's engines."""

    kv_role: str = "kv_both"
    kv_host: str | None = None
    kv_port: int | None = None


class KVInformation(msgspec.Struct):
    """The answer to GET /kv_transfer."""

    engines: list[KVEngine]


class Backend:
    """A server.

    Args:
        url: such as http://127.0.0.1:8100.
        role: "regular": the server does both prefill and decode.

    Attributes:
        num_running, num_answered, num_failures: requests that the router has sent to it and that have not ended, that it has
            answered, and that it has failed to answer.
        problem: why it gets no requests; "" if it does.
        kv_addresses: where decode servers may ask its engines for KV.
        turn: the number of the last request that it was chosen for.
        sent: names of the pieces of text that it was sent since it started, the latest last.

    Raises:
        UsageError: not such a URL.
    """

    def __init__(self, url: str, role: Role) -> None:
        self.url, self.role = url.rstrip("/"), role
        self._origin = origin = httpcore.URL(self.url)
        if origin.scheme not in (b"http", b"https") or not origin.host or origin.target != b"/":
            raise UsageError(f"{url!r} is not the address of a server: write it as http://127.0.0.1:8100")
        self.host = origin.host if origin.port is None else b"%s:%d" % (origin.host, origin.port)
        self.problem = "has not been reached yet"
        self.kv_addresses: list[tuple[str, int]] = []
        self.num_running = self.num_answered = self.num_failures = self.silent_checks = self.turn = 0
        self.sent: OrderedDict[bytes, None] = OrderedDict()
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
        """Around waiting for this server: raises TimeoutError when the router gives the server up."""
        async with asyncio.timeout(None) as scope:
            self._waiting.add(scope)
            try:
                yield
            finally:
                self._waiting.discard(scope)

    def give_up(self) -> None:
        """End all waiting for this server."""
        now = asyncio.get_running_loop().time()
        while self._waiting:
            self._waiting.pop().reschedule(now)


class Answer:
    """A server's answer, whose body is still to come. The caller closes it.

    Args:
        busy: the servers that work on it, the one that answers first.
    """

    def __init__(self, response: httpcore.Response, busy: Sequence[Backend]) -> None:
        self.backend, self._busy = busy[0], busy
        self.status: int = response.status
        self.headers: Headers = [(name.lower(), value) for name, value in response.headers]
        self._response, self._chunks = response, response.aiter_stream()

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events."""
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers)

    async def chunk(self) -> bytes | None:
        """The next part of the body; None at its end.

        Raises:
            FAILURES: it does not come.
        """
        async with self.backend.patience():
            return await anext(self._chunks, None)

    async def read(self) -> bytes:
        """The whole body, after which the answer is closed.

        Raises:
            FAILURES: it does not come.
        """
        try:
            chunks = []
            while (chunk := await self.chunk()) is not None:
                chunks.append(chunk)
            return b"".join(chunks)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End the answer. A server that still works on it notices."""
        busy, self._busy = self._busy, ()
        for backend in busy:
            backend.num_running -= 1
        if busy:
            await self._response.aclose()


class Backends:
    """All servers, their connections, and the task that checks their health.

    Args:
        backends: the servers.
        config: how requests are routed.
        api_key: the router's own key, for its own questions.
    """

    def __init__(self, backends: Sequence[Backend], config: RouterConfig, api_key: str | None = None) -> None:
        self.all, self.config = list(backends), config
        self._timeouts = {"connect": CONNECT_SECONDS, "pool": CONNECT_SECONDS}
        self._timeouts |= {"read": config.request_timeout, "write": config.request_timeout}
        self._own_headers: Headers = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_SECONDS
        )
        self._releases: set[asyncio.Task[None]] = set()
        self._look = asyncio.Event()
        # Called after every health check in which the router gives a server up for its silence.
        self.on_silence: Callable[[Backend], None] = lambda backend: None

    def of(self, role: Role) -> list[Backend]:
        """The servers of a role."""
        return [backend for backend in self.all if backend.role == role]

    async def send(self, call: Call, *busy: Backend) -> Answer:
        """Send a request to the first of these servers; the others will be busy with it, too.

        Raises:
            FAILURES: there is no answer.
        """
        backend, headers = busy[0], [(b"host", busy[0].host)]
        if call.content or call.method != "GET":
            headers.append((b"content-length", b"%d" % len(call.content)))
        headers += call.headers
        extensions = {"timeout": self._timeouts}
        url, content = backend.target(call.path), call.content
        request = httpcore.Request(call.method, url, headers=headers, content=content, extensions=extensions)
        for each in busy:
            each.num_running += 1
        try:
            async with backend.patience():
                return Answer(await self._pool.handle_async_request(request), busy)
        except BaseException:
            for each in busy:
                each.num_running -= 1
            raise

    def note_failure(self, backend: Backend, error: Exception | None) -> None:
        """Note that a request to this server has failed. A server that refuses connections gets no more requests until a health
        check succeeds; the health of all others is checked soon.

        Args:
            error: one of FAILURES; None if the server has answered with an error.
        """
        backend.num_failures += 1
        if isinstance(error, REFUSED):
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
                await asyncio.wait_for(self._look.wait(), self.config.health_check_interval)
                await asyncio.sleep(LOOK_SECONDS)  # many failures at once have one cause
            self._look.clear()
            await self.check_all()

    async def check_all(self) -> None:
        """Check all servers now."""
        await asyncio.gather(*map(self.check, self.all))

    async def check(self, backend: Backend) -> None:
        """Check the health of a server."""
        silent_checks, backend.silent_checks = backend.silent_checks, 0
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                problem = await self._problem_of(backend)
        except (TimeoutError, httpcore.ReadTimeout) as error:
            backend.silent_checks = silent_checks + 1
            problem = describe(error) if backend.silent_checks >= MAX_SILENT_CHECKS else backend.problem
            self._look.set()  # the next check does not wait for the interval
        except FAILURES as error:
            problem = describe(error)
        if problem:
            self._put_down(backend, problem)
        elif backend.problem:
            logger.info("%s is ready", backend)
            backend.problem = ""
            backend.sent.clear()  # it may have been restarted, with an empty cache
        if backend.silent_checks >= MAX_SILENT_CHECKS:
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
            return ""  # vLLM's servers do not have this route, and can transfer KV all the same (prefill first)
        if status != 200:
            hint = ": name its key with --api-key" if status in (401, 403) else ""
            return f"answers {status} to GET /kv_transfer{hint}"
        engines = msgspec.json.decode(content, type=KVInformation).engines
        wanted = {"prefill": "producer", "decode": "consumer"}[backend.role]
        wrong = [engine.kv_role for engine in engines if engine.kv_role not in (f"kv_{wanted}", "kv_both")]
        if wrong or not engines:
            given = f"with --kv-role {wrong[0]}" if wrong else "without --kv-role"
            return f"runs {given}: a {backend.role} server needs {wanted} or both"
        backend.kv_addresses = [(e.kv_host, e.kv_port) for e in engines if e.kv_host and e.kv_port]
        return ""

    def release(self, backend: Backend, remote_request_id: str) -> None:
        """Tell a prefill server, in the background, that no decode server will read the KV that it holds for a request. Without
        this message the server holds the KV until the lease ends."""
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
        """GET, or POST a body of JSON, with the router's own key: status and body of the answer.

        Raises:
            FAILURES: there is no answer.
        """
        kind = [(b"content-type", b"application/json")] if body else []
        answer = await self.send(Call("POST" if body else "GET", path, self._own_headers + kind, body), backend)
        return answer.status, await answer.read()

    async def aclose(self) -> None:
        """Close all connections."""
        if self._releases:
            await asyncio.wait(self._releases)
        await self._pool.aclose()


def describe(error: Exception) -> str:
    """An error of a request to a server, in words."""
    words = "has cut the connection"
    if isinstance(error, REFUSED):
        words = "cannot be reached"
    elif isinstance(error, TimeoutError | httpcore.TimeoutException):
        words = "does not answer"
    elif isinstance(error, msgspec.DecodeError):
        words = "answers what makes no sense"
    return f"{words} ({error})" if str(error) else words
