"""What a server lets in: host names and web pages, keys, bodies, connections that send nothing, and
each key's share of the queue."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from nanovllm.assembly.flags import Parser, read_flags
from nanovllm.cli.doors import load_command
from nanovllm.cli.main import main
from nanovllm.data.config import EngineConfig
from nanovllm.router.fleet import processes
from nanovllm.server import access, signalled
from nanovllm.server.access import Access, api_keys
from nanovllm.server.middleware import Guard, protect
from nanovllm.server.signalled import SignalledServer
from tests.server_process import ServerProcess
from tests.stand_ins import set_constants

LOCAL = Access(allowed_hosts=frozenset(["localhost", "127.0.0.1", "[::1]"]))


def guarded_app(access: Access) -> Starlette:
    """Has a route of each kind; a POST is answered with the length of its body."""

    async def get(request: Request) -> Response:
        return PlainTextResponse("text")

    async def post(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    paths = ("/", "/health", "/trace")
    routes = [
        *(Route(path, get) for path in paths),
        Route("/v1/completions", post, methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    protect(app, access)
    return app


def client_of(access: Access, base: str = "http://127.0.0.1:8000") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(guarded_app(access)), base_url=base)


def arguments_of(command: str, *words: str) -> argparse.Namespace:
    """A command line as `main` parses it."""
    parser = Parser()
    load_command(command).add_arguments(parser)
    return parser.parse_args(words)


# ---------------------------------------------------------------- host names and origins


@pytest.mark.parametrize(
    ("host", "headers", "code"),
    [
        ("127.0.0.1:8000", {}, None),
        ("localhost:8000", {}, None),
        ("LOCALHOST", {}, None),
        ("[::1]:8000", {}, None),
        (
            "127.0.0.1:8000",
            {"Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"},
            None,
        ),
        ("localhost:8000", {"Origin": "http://localhost:8000"}, None),
        ("localhost:8000", {"Origin": "https://localhost:8000"}, None),  # a proxy has ended TLS
        ("localhost:443", {"Origin": "https://localhost"}, None),
        ("localhost", {"Origin": "http://localhost:80"}, None),
        ("localhost.", {}, None),
        ("localhost:443", {"Origin": "https://localhost:8000"}, "origin_not_allowed"),
        ("evil.com", {}, "host_not_allowed"),
        ("evil.com:8000", {"Origin": "http://evil.com:8000"}, "host_not_allowed"),
        ("localhost.evil.com", {}, "host_not_allowed"),
        ("evil.com#@localhost", {}, "host_not_allowed"),
        ("127.0.0.1:8000", {"Origin": "http://evil.com"}, "origin_not_allowed"),
        ("127.0.0.1:8000", {"Origin": "http://127.0.0.1:9000"}, "origin_not_allowed"),
        ("127.0.0.1:8000", {"Origin": "http://localhost:8000"}, "origin_not_allowed"),
        ("127.0.0.1:8000", {"Origin": "null"}, "origin_not_allowed"),
        ("127.0.0.1:8000", {"Sec-Fetch-Site": "cross-site"}, "origin_not_allowed"),
        (
            "127.0.0.1:8000",
            {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
            "origin_not_allowed",
        ),
    ],
)
async def test_a_local_server_answers_no_web_page_but_its_own(
    host: str, headers: dict[str, str], code: str | None
) -> None:
    async with client_of(LOCAL) as client:
        for method, path in (("POST", "/v1/completions"), ("GET", "/trace"), ("GET", "/health")):
            response = await client.request(method, path, headers={"Host": host} | headers)
            if code is None:
                assert response.status_code == 200
                continue
            error = response.json()["error"]
            assert response.status_code == 403 and error["code"] == code
            assert (
                "--allowed-hosts" if code == "host_not_allowed" else "--allowed-origins"
            ) in error["message"]


@pytest.mark.parametrize(
    ("header", "status"), [(None, 200), (b"origin", 403), (b"sec-fetch-site", 403)]
)
async def test_only_a_program_may_name_no_host(header: bytes | None, status: int) -> None:
    """As HTTP/1.0 allows, and simple health checks do."""
    scope = post_scope("/health") | {"headers": [(header, b"cross-site")] if header else []}
    exchange = Exchange(
        Guard(PlainTextResponse("ok"), Access(allowed_hosts=frozenset(["a"]))), scope
    )
    exchange.pieces.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    await exchange.task
    assert exchange.status == status


async def test_a_link_from_elsewhere_leads_to_the_page_and_not_to_the_trace() -> None:
    link = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    }
    async with client_of(LOCAL) as client:
        assert (await client.get("/", headers=link)).status_code == 200
        assert (
            await client.get("/", headers=link | {"Sec-Fetch-Dest": "iframe"})
        ).status_code == 403
        assert (await client.get("/trace", headers=link)).status_code == 403
        assert (await client.post("/v1/completions", headers=link)).status_code == 403


async def test_pages_of_allowed_origins_get_what_cors_needs() -> None:
    origin = "https://chat.example.com"
    access = Access(("key",), LOCAL.allowed_hosts, (origin,), allowed_methods=("POST",))
    page = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    async with client_of(access) as client:
        preflight = await client.options("/v1/completions", headers=page | asks)  # never has a key
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        assert preflight.headers["access-control-allow-methods"] == "POST"
        assert "access-control-allow-credentials" not in preflight.headers
        answer = await client.post(
            "/v1/completions", headers=page | {"Authorization": "Bearer key"}
        )
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == origin
        refusal = await client.post("/v1/completions", headers=page)
        assert (
            refusal.status_code == 401 and refusal.headers["access-control-allow-origin"] == origin
        )
        other = await client.post("/v1/completions", headers=page | {"Origin": "https://evil.com"})
        assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
    async with client_of(LOCAL) as client:
        assert (await client.options("/v1/completions", headers=page | asks)).status_code == 403


@pytest.mark.parametrize(
    ("words", "accepted", "refused"),
    [
        (
            ["--host", "127.0.0.1"],
            ["localhost:1", "127.0.0.1", "[::1]:80"],
            ["evil.com", "", "10.0.0.1"],
        ),
        (["--host", "127.0.0.2"], ["127.0.0.2:5"], ["127.0.0.3"]),
        (["--allowed-hosts", '["LLM.example"]'], ["llm.example:80", "localhost"], ["example"]),
        (["--allowed-hosts", '["*"]'], ["evil.com", ""], []),
        (["--host", "0.0.0.0"], ["evil.com", "10.0.0.1:8000"], []),
        (["--host", "0.0.0.0", "--allowed-hosts", '["a"]'], ["a:8000"], ["localhost", "127.0.0.1"]),
    ],
)
def test_which_hosts_a_command_line_lets_in(
    words: list[str], accepted: list[str], refused: list[str]
) -> None:
    for command in ("serve", "router", "replay"):
        arguments = arguments_of(
            command, *words, "--port", "0", *(["trace"] if command == "replay" else [])
        )
        listener, access = read_flags(Access, arguments).listen()
        listener.close()
        assert all(map(access.knows_host, accepted)) and not any(map(access.knows_host, refused))
        assert not access.allowed_origins


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--allowed-hosts", "example.com"], "must be a JSON list of strings"),
        (
            ["--allowed-hosts", '["http://example.com"]'],
            "without scheme and port, got 'http://example.com'",
        ),
        (["--allowed-hosts", '["example.com:80"]'], "without scheme and port"),
        (
            ["--allowed-origins", '["https://example.com/"]'],
            "without a path, got 'https://example.com/'",
        ),
        (["--allowed-methods", "[1]"], "must be a JSON list of strings"),
    ],
)
def test_a_bad_list_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *words])
    error = capsys.readouterr().err
    assert words[0] in error and message in error


async def test_websockets_are_refused() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await guarded_app(Access())(
        {"type": "websocket", "path": "/trace", "headers": []}, never_called, send
    )
    assert [message["type"] for message in sent] == ["websocket.close"]


async def never_called(*arguments: Any) -> Any:
    raise AssertionError("this must not be called")


def test_a_rebound_name_reaches_nothing_on_a_real_server(server: ServerProcess) -> None:
    port = server.url.rpartition(":")[2]
    evil = {"Host": f"evil.com:{port}", "Origin": f"http://evil.com:{port}"}
    body = {"prompt": "abc", "max_tokens": 1}
    for headers in (evil, {"Origin": evil["Origin"]}, {"Sec-Fetch-Site": "cross-site"}):
        assert server.post("/v1/completions", body, headers=headers).status_code == 403
        with server.client.stream(
            "GET", "/trace", headers=headers
        ) as response:  # it would never end
            assert response.status_code == 403
    for name in ("127.0.0.1", "localhost"):
        own = {
            "Host": f"{name}:{port}",
            "Origin": f"http://{name}:{port}",
            "Sec-Fetch-Site": "same-origin",
        }
        assert server.post("/v1/completions", body, headers=own).status_code == 200


# ---------------------------------------------------------------- keys


async def test_two_authorization_headers_are_refused() -> None:
    async with client_of(Access(("first", "second"))) as client:
        headers = [("Authorization", "Bearer wrong"), ("Authorization", "Bearer first")]
        for given in (headers, headers[::-1]):
            response = await client.post("/v1/completions", headers=given)
            assert response.status_code == 400
            assert "2 Authorization headers" in response.json()["error"]["message"]
        assert (await client.post("/v1/completions", headers=headers[1:])).status_code == 200


def test_where_keys_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NANOVLLM_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert api_keys() == []
    monkeypatch.setenv("VLLM_API_KEY", "of vllm\n")
    assert api_keys() == ["of vllm"]
    monkeypatch.setenv("NANOVLLM_API_KEY", "one, two ")
    assert api_keys() == ["one", "two"]
    assert api_keys(["given"]) == ["given"]
    for given in ([""], [" "], ["a,b"]):
        with pytest.raises(ValueError, match="--api-key must not"):
            api_keys(given)
    monkeypatch.setenv("NANOVLLM_API_KEY", "one,,two")
    with pytest.raises(ValueError, match="NANOVLLM_API_KEY must not be empty"):
        api_keys()


def test_no_key_is_on_the_command_line_of_a_fleets_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_API_KEY", "stale")
    arguments = arguments_of("serve", "--prefill", "1", "--decode", "1", "--device", "cpu")
    arguments.api_key = ["sesame", "open"]
    started = processes(read_flags(EngineConfig, arguments), arguments)
    assert len(started) == 2
    for process in started:
        assert not any("sesame" in word or "api-key" in word for word in process.words)
        assert process.environment["NANOVLLM_API_KEY"] == "sesame,open"


# ---------------------------------------------------------------- bodies


def post_scope(path: str = "/v1/completions", *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": path, "headers": [(b"host", b"x"), *headers]}


class Exchange:
    """One request to an ASGI application, whose body is sent piece by piece."""

    def __init__(self, app: Any, scope: dict[str, Any]) -> None:
        self.pieces: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: list[Any] = []
        self.task = asyncio.create_task(app(scope, self.pieces.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def send(self, body: bytes, more_body: bool = True) -> None:
        self.pieces.put_nowait({"type": "http.request", "body": body, "more_body": more_body})
        while not self.pieces.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None


async def test_nothing_is_read_of_a_body_for_a_route_without_one() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = post_scope("/health", (b"content-length", b"10000000")) | {
        "query_string": b"",
        "root_path": "",
    }
    await guarded_app(Access(("key",)))(scope, never_called, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 405


@pytest.mark.parametrize("path", ["/trace", "/v1/completions", "/v1/nothing"])
@pytest.mark.parametrize("is_broken", [False, True])
async def test_without_a_key_a_body_is_discarded_before_the_refusal(
    path: str, is_broken: bool
) -> None:
    """The client reads the refusal only then; and broken HTTP, which uvicorn answers, is not
    answered twice."""
    exchange = Exchange(
        guarded_app(Access(("key",))), post_scope(path) | {"query_string": b"", "root_path": ""}
    )
    await exchange.send(b"x" * 100)
    assert exchange.status is None
    if is_broken:
        exchange.pieces.put_nowait({"type": "http.disconnect"})
        await exchange.task
        assert exchange.status is None
    else:
        await exchange.send(b"x" * 100, more_body=False)
        await exchange.task
        assert exchange.status == 401


async def test_all_bodies_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    set_constants(monkeypatch, access, MAX_BODY_BYTES=100, MAX_HELD_BYTES=250)
    over = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await over.wait()
        await PlainTextResponse(str(len((await receive())["body"])))(scope, receive, send)

    app = Guard(slow, Access(), ["/v1/completions"])
    first, second, third = (Exchange(app, post_scope()) for _ in range(3))
    for exchange in (first, second):
        await exchange.send(b"x" * 100, more_body=False)
    await third.send(b"x" * 40)
    assert third.status is None
    await third.send(b"x" * 40)
    await third.send(b"x" * 40, more_body=False)
    assert third.status == 503 and (b"retry-after", b"1") in third.sent[0]["headers"]
    too_large = Exchange(app, post_scope())
    await too_large.send(b"x" * 30)
    too_large.pieces.put_nowait({"type": "http.disconnect"})  # gone in the middle
    over.set()
    await asyncio.gather(first.task, second.task, third.task, too_large.task)
    assert first.sent[1]["body"] == b"100" and first.status == second.status == 200
    again = Exchange(app, post_scope())
    await again.send(b"x" * 100, more_body=False)
    await again.task
    assert again.status == 200 and app._num_held == 0


# ---------------------------------------------------------------- connections


@contextlib.asynccontextmanager
async def listening(
    header_seconds: float = 60, body_seconds: float = 60, app: Any = None, **changes: Any
) -> AsyncIterator[tuple[SignalledServer, Callable[[], Any]]]:
    """A server with these deadlines, and other changes of its protocol; and a function that
    connects to it: (reader, writer)."""
    changes |= {"header_seconds": header_seconds, "body_seconds": body_seconds}
    server = SignalledServer(app or guarded_app(Access()), "", log_level="error")
    server.config.http = type("Changed", (signalled.GuardedProtocol,), changes)  # type: ignore[assignment]
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    listener = access.bind("127.0.0.1", 0)
    address = listener.getsockname()
    running = asyncio.create_task(server.serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server, lambda: asyncio.open_connection(*address)
    finally:
        server.should_exit = True
        await running


START = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def hurry(server: SignalledServer) -> None:
    """Shorten the deadlines, once everything is there that must not miss them."""
    server.config.http.header_seconds = server.config.http.body_seconds = 0.3  # type: ignore[union-attr]


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """What comes before the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):  # the server has not read all that was sent
        while piece := await asyncio.wait_for(reader.read(2**16), 30):
            found += piece
    return found


def test_small_packets_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the system holds the end of an answer back until the client has acknowledged its
    beginning: 40 ms."""
    accepted: list[socket.socket] = []
    made = signalled.GuardedProtocol.connection_made

    def note(self: signalled.GuardedProtocol, transport: Any) -> None:
        accepted.append(transport.get_extra_info("socket"))
        made(self, transport)

    async def ask() -> int:
        async with listening(connection_made=note) as (_, connect):
            reader, writer = await connect()
            writer.write(WHOLE)
            assert (await reader.readline()).startswith(b"HTTP/1.1")
            option = accepted[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            return option

    assert asyncio.run(ask())


def test_an_idle_connection_stays_open_for_longer_than_clients_keep_it() -> None:
    """Else a request that a client sends at the moment in which the server closes the connection is
    lost."""
    with httpx.Client() as client:
        pool = client._transport._pool  # type: ignore[attr-defined]
        assert (
            SignalledServer(never_called, "").config.timeout_keep_alive
            >= 2 * pool._keepalive_expiry
        )


async def test_connections_that_send_nothing_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as (server, connect):
        idle = [await connect() for _ in range(100)]
        served, to_served = await connect()
        to_served.write(WHOLE)
        assert (await served.readline()).startswith(b"HTTP/1.1 200")
        hurry(server)
        assert await asyncio.gather(*(until_closed(reader) for reader, _ in idle)) == [b""] * 100
        await until_closed(served)
        while server.server_state.connections:
            await asyncio.sleep(0.01)
        for _, writer in [*idle, (served, to_served)]:
            writer.close()


@pytest.mark.parametrize(
    ("begin", "drip", "what"),
    [(b"GET / HTTP/1.1\r\n", b"a: b\r\n", b"headers"), (START, b"x", b"body")],
)
async def test_a_request_that_drips_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, begin: bytes, drip: bytes, what: bytes
) -> None:
    async with listening() as (server, connect):
        reader, writer = await connect()
        writer.write(begin)
        while not any(map(has_begun, server.server_state.connections)):
            await asyncio.sleep(0.01)
        hurry(server)
        answer = asyncio.create_task(until_closed(reader))
        while not answer.done():
            writer.write(drip)
            await asyncio.sleep(0.02)
        assert (await answer).startswith(b"HTTP/1.1 408")
        error = json.loads((await answer).partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "request_timeout" and what.decode() in error["message"]
        writer.close()
        while server.server_state.connections or server.server_state.tasks:
            await asyncio.sleep(0.01)


async def test_a_body_that_goes_on_after_its_refusal_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening(body_seconds=0.3) as (server, connect):
        reader, writer = await connect()
        writer.write(b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
        answer = asyncio.create_task(until_closed(reader))
        while not answer.done():
            writer.write(b"x" * 1000)
            await asyncio.sleep(0.02)
        writer.close()
        while server.server_state.connections:
            await asyncio.sleep(0.01)


async def test_a_slow_answer_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        hurry(server)
        await asyncio.sleep(1)
        await PlainTextResponse("text")(scope, receive, send)

    async with listening(app=slow) as (server, connect):
        reader, writer = await connect()
        writer.write(WHOLE)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_connection_too_many_ends_the_one_that_keeps_the_server_waiting_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await over.wait()
        await PlainTextResponse("text")(scope, receive, send)

    monkeypatch.setattr(signalled, "max_connections", lambda: 3)
    async with listening(app=slow) as (server, connect):
        waited_for, busy = [], []
        for begin in (b"", START):  # nothing at all, or a body that does not come
            waited_for.append(await connect())
            waited_for[-1][1].write(begin)
            while len(server.server_state.connections) < len(waited_for):
                await asyncio.sleep(0.01)
        for _ in range(3):
            busy.append(await connect())
            busy[-1][1].write(WHOLE)
            while sum(map(is_busy, server.server_state.connections)) < len(busy):
                await asyncio.sleep(0.01)
        assert [await until_closed(reader) for reader, _ in waited_for] == [b"", b""]
        refused, _ = await connect()
        assert (await until_closed(refused)).startswith(b"HTTP/1.1 503")
        over.set()
        for reader, writer in busy:
            assert b"200" in await reader.readuntil(b"\r\n\r\ntext")
            writer.close()


def has_begun(connection: Any) -> bool:
    """Whether a part of a request has arrived."""
    return connection.cycle is not None or bool(connection.conn.trailing_data[0])


def is_busy(connection: Any) -> bool:
    """Whether it has a whole request that is not answered."""
    return connection.cycle is not None and not connection.cycle.more_body
