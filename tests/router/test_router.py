"""The router, between a client and servers that do as they are told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as metric_families

from nanovllm.router import backends
from nanovllm.router.backends import Backend
from nanovllm.router.config import RouterConfig
from nanovllm.router.policies import MAX_IMBALANCE
from nanovllm.router.pool import PIECE_BYTES, BackendPool, prefix_names
from nanovllm.router.run import RouterServer, backends_of
from nanovllm.server.access import Access, bind
from tests.stand_ins import set_constants

PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_block_ids": [3, 1],
    "remote_port": 7,
}
PREFILLED = json.dumps({"id": "x", "choices": [], "kv_transfer_params": PARAMS}).encode()
PROMPT = {"prompt": "abc", "max_tokens": 9}
LONG = "once upon a time " * 100


@dataclass
class Exchange:
    """One request to a fake server, and the way to answer it."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def answer(self, content: bytes, status: int = 200, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(content)}", *headers, "", ""]
        self.writer.write("\r\n".join(lines).encode() + content)
        await self.writer.drain()

    async def begin_stream(self) -> None:
        lines = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream; charset=utf-8"]
        self.writer.write("\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode())
        await self.writer.drain()

    async def chunk(self, content: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(content), content))
        await self.writer.drain()

    async def until_gone(self) -> None:
        assert await self.reader.read() == b"", "the router sends nothing more, and closes"


Behaviour = Callable[[Exchange], Awaitable[None]]


class FakeServer:
    """A server on a socket that notes what it is asked, and answers as `act` does."""

    def __init__(
        self, act: Behaviour, kv_role: str | None = None, kv_port: int | None = None
    ) -> None:
        self.act = act
        self.kv: Any = {
            "engines": [{"kv_role": kv_role, "kv_host": "127.0.0.1", "kv_port": kv_port}]
        }
        if kv_role is None:
            self.kv = {"engines": []}
        self.kv_status = 200
        self.seen: list[Exchange] = []
        self.health: Behaviour = lambda exchange: exchange.answer(b"")
        self.port = 0
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[Any]:
        return [exchange.json for exchange in self.seen]

    async def start(self) -> FakeServer:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        self._server.close()
        for writer in list(self._connections):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._server.is_serving():  # it was stopped after it had accepted this connection
            writer.transport.abort()
            return
        self._connections.add(writer)
        try:
            while True:
                await self._exchange(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = [
            (name, value) for name, _, value in (line.partition(": ") for line in head[1:] if line)
        ]
        length = int(
            dict((name.lower(), value) for name, value in headers).get("content-length", 0)
        )
        exchange = Exchange(method, path, headers, await reader.readexactly(length), reader, writer)
        if path == "/health":
            await self.health(exchange)
        elif path == "/kv_transfer":
            await exchange.answer(json.dumps(self.kv).encode(), self.kv_status if self.kv else 404)
        else:
            self.seen.append(exchange)
            await self.act(exchange)


def answering(content: bytes, status: int = 200, *headers: str) -> Behaviour:
    """Always the same answer."""
    return lambda exchange: exchange.answer(content, status, *headers)


async def hang_up(exchange: Exchange) -> None:
    exchange.writer.transport.abort()


async def never(exchange: Exchange) -> None:
    await exchange.until_gone()


async def until(condition: Callable[[], Any]) -> None:
    """Wait for something; for a long time, if need be."""
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Fleet:
    """Fake servers, a router in front of them, and a client of it."""

    prefill: list[FakeServer]
    decode: list[FakeServer]
    backends: list[Backend]
    client: httpx.AsyncClient

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json=PROMPT | body)

    async def metrics(self) -> dict[str, float]:
        """Sums over servers and routes."""
        found: dict[str, float] = {}
        for family in metric_families((await self.client.get("/metrics")).text):
            for sample in family.samples:
                name = sample.name.removeprefix("vllm_router_")
                found[name] = found.get(name, 0) + sample.value
        return found

    @property
    def num_running(self) -> int:
        return sum(backend.num_running for backend in self.backends)


@contextlib.asynccontextmanager
async def fleet_of(
    prefill: list[FakeServer],
    decode: list[FakeServer],
    health_check_interval: float = 0.05,
    num_unhealthy: int = 0,
    **config: Any,
) -> AsyncIterator[Fleet]:
    """A router of the servers, which has found out how many get no requests; without any for
    prefill, the others do all of it."""
    for server in prefill + decode:
        await server.start()
    urls = [[server.url for server in servers] for servers in (prefill, decode)]
    settings = RouterConfig(health_check_interval=health_check_interval, **config)
    given: Any = {"prefill": urls[0], "decode": urls[1]} if prefill else {"regular": urls[1]}
    found = backends_of(given, settings, "own-key")
    listener = bind("127.0.0.1", 0)
    router = RouterServer(found, listener, Access(shutdown_timeout=1))
    router.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    running = asyncio.create_task(router.route())
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=30)
    try:
        await until(lambda: router.started)
        # On a busy machine the first health checks may take too long.
        await until(lambda: [b.is_healthy for b in found].count(False) == num_unhealthy)
        yield Fleet(prefill, decode, found, client)
        await until(lambda: not sum(backend.num_running for backend in found))
    finally:
        await client.aclose()
        for server in prefill + decode:
            await server.stop()
        router.should_exit = True
        await running


def producer(act: Behaviour | None = None, port: int = 7) -> FakeServer:
    return FakeServer(act or answering(PREFILLED), "kv_producer", port)


def consumer(act: Behaviour | None = None) -> FakeServer:
    return FakeServer(act or answering(b'{"id": "y"}'), "kv_consumer")


# ---------------------------------------------------------------- the two orders


async def test_prefill_first() -> None:
    answer = b'{"id":"y",  "choices": [] }\n'
    decode = consumer(
        answering(
            answer, 200, "Content-Type: application/json", "X-Kept: 1", "Keep-Alive: timeout=5"
        )
    )
    body = PROMPT | {
        "stream_options": {"include_usage": True},
        "stream": False,
        "min_tokens": 3,
        "max_completion_tokens": 7,
        "temperature": 0.25,
        "stop": ["x"],
        "logprobs": 1,
        "cache_salt": "s",
    }
    headers = {"Authorization": "Bearer secret", "X-Request-Id": "r1", "Connection": "close"}
    async with fleet_of([producer()], [decode]) as fleet:
        response = await fleet.client.post("/v1/completions?x=%2F1", json=body, headers=headers)
        metrics = await fleet.metrics()
    assert (response.status_code, response.content) == (200, answer)
    assert (
        response.headers["content-type"] == "application/json" and response.headers["x-kept"] == "1"
    )
    assert "keep-alive" not in response.headers
    (first,), (second,) = fleet.prefill[0].seen, decode.seen
    assert first.json == {
        "prompt": "abc",
        "max_tokens": 1,
        "stream": False,
        "temperature": 0.25,
        "cache_salt": "s",
        "ignore_eos": True,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    assert second.json == body | {"kv_transfer_params": PARAMS}
    for exchange in (first, second):
        sent = {name.lower(): value for name, value in exchange.headers}
        assert sent["authorization"] == "Bearer secret" and sent["x-request-id"] == "r1"
        assert (exchange.method, exchange.path) == ("POST", "/v1/completions?x=%2F1")
        assert "connection" not in sent and len(sent) == len(exchange.headers)
    assert metrics["kv_transfers_total"] == 1 and metrics["processed_requests_total"] == 2


async def test_decode_first() -> None:
    async with fleet_of(
        [producer(port=7), producer(port=8)], [consumer()], kv_order="decode_first"
    ) as fleet:
        for _ in range(2):
            assert (await fleet.complete(n=2)).json() == {"id": "y"}
    assert not fleet.prefill[0].seen and not fleet.prefill[1].seen, (
        "the decode server asks them itself"
    )
    assert [body["kv_transfer_params"] for body in fleet.decode[0].bodies] == [
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "prefill_addresses": [["127.0.0.1", port]],
            "kv_direction": "push",
        }
        for port in (7, 8)
    ]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"n": 2},
        {"echo": True},
        {"prompt_logprobs": 0},
    ],
)
async def test_what_cannot_be_handed_over_goes_to_decode_as_it_is(body: dict[str, Any]) -> None:
    async with fleet_of([producer()], [consumer()]) as fleet:
        raw = json.dumps(PROMPT | body, indent=3).encode()
        await fleet.client.post("/v1/completions", content=raw)
    assert not fleet.prefill[0].seen and fleet.decode[0].seen[0].body == raw


@pytest.mark.parametrize("prompt", ["a", [1, 2], ["a"], [[1, 2]]])
async def test_one_prompt_however_written_is_handed_over(prompt: Any) -> None:
    async with fleet_of([producer()], [consumer()]) as fleet:
        await fleet.complete(prompt=prompt)
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        await fleet.client.post("/v1/chat/completions", json=chat)
    assert [body["kv_transfer_params"] for body in fleet.decode[0].bodies] == [PARAMS, PARAMS]
    assert "prompt" not in fleet.prefill[0].bodies[1]


async def test_a_prefill_server_that_holds_nothing() -> None:
    async with fleet_of(
        [producer(answering(b'{"kv_transfer_params": null}'))], [consumer()]
    ) as fleet:
        await fleet.complete()
    assert fleet.decode[0].bodies == [PROMPT]


async def test_servers_that_do_all_of_it_get_the_bytes_of_the_client() -> None:
    servers = [FakeServer(answering(b"%d" % i)) for i in range(3)]
    async with fleet_of([], servers) as fleet:
        answers = [(await fleet.complete()).text for _ in range(6)]
    assert answers == ["0", "1", "2", "0", "1", "2"]
    assert all(exchange.json == PROMPT for server in servers for exchange in server.seen)


async def test_clients_do_not_say_where_kv_comes_from() -> None:
    async with fleet_of([producer()], [consumer()]) as fleet:
        response = await fleet.complete(kv_transfer_params=PARAMS)
        assert (
            response.status_code == 400
            and response.json()["error"]["param"] == "kv_transfer_params"
        )
    assert not fleet.prefill[0].seen and not fleet.decode[0].seen


# ---------------------------------------------------------------- streams


async def test_a_stream_is_passed_on_byte_for_byte_and_at_once() -> None:
    seen = asyncio.Event()
    pieces = [
        b'data: {"a": "\xc3\xa9"}\n\n',
        b": comment\r\n\r\ndata: 2\n",
        b"\n",
        b"data: [DONE]\n\n",
    ]

    async def act(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(pieces[0])
        await seen.wait()
        for piece in pieces[1:]:
            await exchange.chunk(piece)
        await exchange.chunk(b"")

    async with fleet_of([producer()], [consumer(act)]) as fleet:
        received = b""
        async with fleet.client.stream(
            "POST", "/v1/completions", json=PROMPT | {"stream": True}
        ) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            async for chunk in response.aiter_raw():
                received += chunk
                if received == pieces[0]:
                    seen.set()
    assert received == b"".join(pieces)
    assert (
        fleet.prefill[0].bodies[0]["stream"] is False
        and fleet.decode[0].bodies[0]["stream"] is True
    )


async def test_a_stream_that_is_cut_off_ends_with_an_error() -> None:
    async def act(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(b'data: {"n": 1}\n\ndata: {"n"')
        exchange.writer.close()

    async with fleet_of([producer()], [consumer(act)]) as fleet:
        response = await fleet.complete(stream=True)
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events[0] == '{"n": 1}' and events[-1] == "[DONE]" and len(events) == 3
    error = json.loads(events[1])["error"]
    assert error["type"] == "server_error" and "cut the connection" in error["message"]


# ---------------------------------------------------------------- faults of prefill servers


BROKEN: dict[str, Behaviour] = {
    "hangs up": hang_up,
    "answers 500": answering(b"{}", 500),
    "is late": never,
    "makes no sense": answering(b"[nonsense"),
}


@pytest.mark.parametrize("fault", BROKEN)
async def test_a_broken_prefill_server_is_replaced(fault: str) -> None:
    servers = [producer(BROKEN[fault]), producer()]
    # Long enough for the second server, on a machine that stands still for a while, too.
    async with fleet_of(servers, [consumer()], prefill_timeout=5.0) as fleet:
        assert (await fleet.complete()).status_code == 200
    assert fleet.decode[0].bodies == [PROMPT | {"kv_transfer_params": PARAMS}]


@pytest.mark.parametrize("order", ["prefill_first", "decode_first"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_without_any_prefill_server(policy: str, order: str) -> None:
    async with fleet_of(
        [producer(), producer()], [consumer()], kv_load_failure_policy=policy, kv_order=order
    ) as fleet:
        for server in fleet.prefill:
            await server.stop()
        await until(lambda: not any(b.is_healthy for b in fleet.backends[:2]))
        response = await fleet.complete()
        health = await fleet.client.get("/health")
    if policy == "recompute":
        assert (response.status_code, fleet.decode[0].bodies) == (200, [PROMPT])
        assert health.status_code == 200
    else:
        assert response.status_code == health.status_code == 503 and not fleet.decode[0].seen
        error = response.json()["error"]
        assert error["code"] == "backend_lost" and all(
            server.url in error["message"] for server in fleet.prefill
        )


async def test_a_prefill_server_that_dies_unnoticed() -> None:
    async with fleet_of(
        [producer(), producer()], [consumer()], health_check_interval=1000
    ) as fleet:
        await fleet.prefill[0].stop()
        for _ in range(2):
            assert (await fleet.complete()).status_code == 200
        assert [b.is_healthy for b in fleet.backends[:2]] == [False, True]
    assert len(fleet.prefill[1].seen) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
async def test_a_refusal_is_passed_on(status: int) -> None:
    refusal = answering(
        b'{"error": "no"}', status, "Retry-After: 1", "Content-Type: application/json"
    )
    async with fleet_of([producer(refusal)], [consumer(refusal)]) as fleet:
        first = await fleet.complete()
        second = await fleet.complete(n=2)
    assert len(fleet.decode[0].seen) == 1
    for response in (first, second):
        assert (response.status_code, response.text) == (status, '{"error": "no"}')
        assert response.headers["retry-after"] == "1"


# ---------------------------------------------------------------- faults of decode servers


async def test_a_decode_server_that_cannot_be_reached_is_replaced() -> None:
    async with fleet_of(
        [producer()], [consumer(), consumer()], health_check_interval=1000
    ) as fleet:
        await fleet.decode[0].stop()
        assert (await fleet.complete()).status_code == 200
        assert (await fleet.metrics())["retries_total"] == 1
    assert fleet.decode[1].bodies == [PROMPT | {"kv_transfer_params": PARAMS}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["at once", "in the answer"])
async def test_a_decode_server_that_is_lost_before_it_has_said_anything(
    fault: str, stream: bool
) -> None:
    async def act(exchange: Exchange) -> None:
        if fault == "in the answer":
            if stream:
                await exchange.begin_stream()
            else:
                exchange.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{")
                await exchange.writer.drain()
        exchange.writer.close()

    async with fleet_of([producer()], [consumer(act), consumer()]) as fleet:
        response = await fleet.complete(stream=stream)
    assert (response.status_code, response.json()) == (200, {"id": "y"})
    assert len(fleet.prefill[0].seen) == 2, "nobody knows whether the KV is still held"


async def test_a_request_that_kills_servers_does_not_kill_them_all() -> None:
    servers = [FakeServer(hang_up) for _ in range(5)]
    async with fleet_of([], servers) as fleet:
        response = await fleet.complete()
    assert response.status_code == 503 and response.json()["error"]["code"] == "backend_lost"
    assert [len(server.seen) for server in servers] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("status", [500, 503])
async def test_a_server_whose_engine_is_dead_is_replaced(status: int) -> None:
    servers = [FakeServer(answering(b'{"error": 1}', status)), FakeServer(answering(b"2"))]
    async with fleet_of([], servers) as fleet:
        assert (await fleet.complete()).text == "2"
        await servers[1].stop()
        await until(lambda: not fleet.backends[1].is_healthy)
        response = await fleet.complete()
    assert (response.status_code, response.text) == (status, '{"error": 1}'), "there is no other"


async def test_when_all_are_down_and_up_again() -> None:
    server = FakeServer(answering(b"1"))
    async with fleet_of([], [server]) as fleet:
        await server.stop()
        response = await fleet.complete()
        assert response.status_code == 503 and server.url in response.json()["error"]["message"]
        assert (await fleet.client.get("/health")).status_code == 503
        await server.start()
        await until(lambda: fleet.backends[0].is_healthy)
        assert (await fleet.complete()).text == "1"
        assert (await fleet.client.get("/health")).status_code == 200


async def test_a_server_that_hangs_is_given_up_with_those_who_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived: list[Exchange] = []

    async def act(exchange: Exchange) -> None:
        if exchange.json.get("stream"):
            await exchange.begin_stream()
            await exchange.chunk(b"data: 1\n\n")
        arrived.append(exchange)
        if len(arrived) == 2:
            set_constants(monkeypatch, backends, HEALTH_SECONDS=0.1)
            server.health = never
        await exchange.until_gone()

    server = FakeServer(act)
    async with fleet_of([], [server]) as fleet:
        stream, whole = await asyncio.gather(fleet.complete(stream=True), fleet.complete())
    assert stream.text.startswith("data: 1\n\n") and "does not answer" in stream.text
    assert whole.status_code == 503


@pytest.mark.parametrize("turns", range(4))
async def test_checks_end_even_if_a_request_fails_at_that_moment(turns: int) -> None:
    """`asyncio.wait_for` forgets a cancellation if what it waits for has just happened."""
    settings = RouterConfig(health_check_interval=0.1)
    backend = Backend("http://127.0.0.1:9", "regular", settings)
    checks = asyncio.create_task(backend.look_after())
    await asyncio.sleep(0)
    backend.note_failure()
    for _ in range(turns):
        await asyncio.sleep(0)
    checks.cancel()
    done, _ = await asyncio.wait([checks], timeout=5)
    checks.cancel()
    assert done and checks.cancelled()


async def test_servers_with_the_wrong_role_get_no_requests() -> None:
    plain, vllms = FakeServer(answering(b"1")), producer()
    vllms.kv = None
    servers = [consumer(), vllms, plain]
    async with fleet_of(servers, [consumer()], num_unhealthy=2) as fleet:
        for _ in range(3):
            await fleet.complete()
        assert (
            "--kv-role none: a prefill server needs" in fleet.backends[2].problem and not plain.seen
        )
        assert "--kv-role kv_consumer: a prefill server needs" in fleet.backends[0].problem
    assert not fleet.prefill[0].seen and len(fleet.prefill[1].seen) == 3


async def test_decode_first_needs_servers_that_say_where_they_can_be_asked() -> None:
    vllms = producer()
    vllms.kv = None
    async with fleet_of([vllms], [consumer()], num_unhealthy=1, kv_order="decode_first") as fleet:
        assert (await fleet.complete()).status_code == 200
        assert "answers 404 to GET /kv_transfer" in fleet.backends[0].problem
    assert fleet.decode[0].bodies == [PROMPT]


# ---------------------------------------------------------------- KV that no decode server reads


HELD = PARAMS | {"remote_request_id": "held-1"}


def holder() -> FakeServer:
    """A prefill server that holds KV until it is told to release it."""

    async def act(exchange: Exchange) -> None:
        is_release = exchange.path == "/kv_transfer/release"
        await exchange.answer(
            b"" if is_release else json.dumps({"kv_transfer_params": HELD}).encode()
        )

    return producer(act)


def releases(server: FakeServer) -> list[Any]:
    return [exchange.json for exchange in server.seen if exchange.path == "/kv_transfer/release"]


@pytest.mark.parametrize("status", [200, 400, 404, 429, 500, 503])
async def test_a_prefill_server_hears_that_its_kv_is_not_wanted(status: int) -> None:
    async with fleet_of([producer(), holder()], [consumer(answering(b"{}", status))]) as fleet:
        for _ in range(2):
            assert (await fleet.complete()).status_code == status
        held = [] if status == 200 else [{"remote_request_id": "held-1"}]
        await until(lambda: releases(fleet.prefill[1]) == held)
    assert not releases(fleet.prefill[0]), "it holds nothing"
    assert all(
        dict(e.headers)["authorization"] == "Bearer own-key" for e in fleet.prefill[1].seen[1:]
    )


async def test_kv_is_released_when_no_decode_server_can_be_reached() -> None:
    async with fleet_of([holder()], [consumer(), consumer()], health_check_interval=1000) as fleet:
        for server in fleet.decode:
            await server.stop()
        assert (await fleet.complete()).status_code == 503
        await until(lambda: len(releases(fleet.prefill[0])) == 2)
    assert len(fleet.prefill[0].seen) == 4, "each decode server was offered KV of its own"


async def test_kv_of_a_failed_attempt_is_released() -> None:
    async with fleet_of([holder()], [consumer(hang_up), consumer()]) as fleet:
        assert (await fleet.complete()).status_code == 200
        await until(lambda: len(fleet.prefill[0].seen) == 3)
    assert len(releases(fleet.prefill[0])) == 1, "the second attempt has KV of its own"


async def test_kv_is_released_when_the_client_leaves() -> None:
    async with fleet_of([holder()], [consumer(never)]) as fleet:
        request = asyncio.create_task(fleet.complete())
        await until(lambda: fleet.decode[0].seen)
        request.cancel()
        await until(lambda: len(releases(fleet.prefill[0])) == 1)


async def test_a_prefill_server_that_cannot_release() -> None:
    async def act(exchange: Exchange) -> None:
        if exchange.path == "/kv_transfer/release":
            return await hang_up(exchange)
        await exchange.answer(json.dumps({"kv_transfer_params": HELD}).encode())

    async with fleet_of([producer(act)], [consumer(answering(b"no", 400))]) as fleet:
        for _ in range(2):
            assert (await fleet.complete()).text == "no"
        await until(lambda: len(releases(fleet.prefill[0])) >= 2)


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_client_that_leaves_ends_the_work(where: str, stream: bool) -> None:
    gone = asyncio.Event()

    async def act(exchange: Exchange) -> None:
        if where == "decode" and stream:
            await exchange.begin_stream()
            await exchange.chunk(b"data: 1\n\n")
        await exchange.until_gone()
        gone.set()

    slow_prefill, slow_decode = (act, None) if where == "prefill" else (None, act)
    async with fleet_of([producer(slow_prefill)], [consumer(slow_decode)]) as fleet:
        request = asyncio.create_task(fleet.complete(stream=stream))
        server = fleet.prefill[0] if where == "prefill" else fleet.decode[0]
        await until(lambda: server.seen)
        request.cancel()
        await asyncio.wait([request])
        async with asyncio.timeout(30):
            await gone.wait()
        await until(lambda: fleet.num_running == 0)
        assert (await fleet.metrics())["request_errors_total"] == 0, "that was nobody's fault"


# ---------------------------------------------------------------- other routes


async def test_other_routes() -> None:
    async with fleet_of([producer()], [consumer(answering(b"[1]"))]) as fleet:
        get, post = fleet.client.get, fleet.client.post
        assert (await get("/v1/models")).text == (await get("/v1/models/a/b")).text == "[1]"
        assert (
            (await post("/tokenize", content=b"{bad")).text
            == (await post("/detokenize")).text
            == "[1]"
        )
        assert (await get("/version")).json().keys() == {"version"}
        assert (await get("/nowhere")).json()["error"]["type"] == "not_found_error"
        misspelt = (await post("/v1/chat/completion", json={})).json()["error"]
        assert misspelt["message"] == (
            "there is no route /v1/chat/completion; did you mean /v1/chat/completions?"
        )
        for path, allowed in (("/v1/completions", "POST"), ("/metrics", "GET, HEAD")):
            refused = await fleet.client.request("PUT", path)
            assert refused.status_code == 405 and refused.headers["allow"] == allowed
            assert refused.json()["error"]["message"].endswith(f"send {allowed[:4].rstrip(',')}")
        too_large = await post("/v1/completions", content=b" " * (11 * 2**20))
        assert too_large.status_code == 413
        metrics, text = await fleet.metrics(), (await get("/metrics")).text
    assert [e.path for e in fleet.decode[0].seen] == [
        "/v1/models",
        "/v1/models/a/b",
        "/tokenize",
        "/detokenize",
    ]
    assert fleet.decode[0].seen[2].body == b"{bad" and not fleet.prefill[0].seen
    assert metrics["worker_health"] == 2 and metrics["requests_total"] == 4
    assert "a/b" not in text, "clients could make up names without end"


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"{}", b"3"])
async def test_a_body_that_is_no_request_is_left_to_a_server(body: bytes) -> None:
    refusal = answering(b'{"error": "what?"}', 400)
    async with fleet_of([producer(refusal)], [consumer(refusal)], policy="prefix_aware") as fleet:
        assert (
            await fleet.client.post("/v1/completions", content=body)
        ).text == '{"error": "what?"}'
    assert not fleet.prefill[0].seen and fleet.decode[0].seen[0].body == body


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 5000, b'{"prompt": NaN}'])
async def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    async with fleet_of([producer()], [consumer()]) as fleet:
        response = await fleet.client.post("/v1/completions", content=body)
    assert response.status_code == 400 and "not valid JSON" in response.json()["error"]["message"]
    assert not fleet.prefill[0].seen and not fleet.decode[0].seen


async def test_the_routers_page_lists_its_servers_and_how_they_are() -> None:
    async with fleet_of([producer()], [consumer()], health_check_interval=60) as fleet:
        await fleet.complete()
        fleet.backends[1].problem = "refuses <connections>"
        page = (await fleet.client.get("/")).text
    rows = re.findall(r"<tr><td>(.*)</td></tr>", page)
    assert [re.sub("<.*?>", " ", row).split()[0] for row in rows] == ["prefill", "decode"]
    for row, server, state in zip(
        rows, [*fleet.prefill, *fleet.decode], ["ready", "refuses &lt;connections&gt;"], strict=True
    ):
        assert (
            f'<a href="{server.url}/">' in row
            and f">{state}</span>" in row
            and row.endswith("<td>0</td><td>1</td><td>0")
        )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-8-sig"])
async def test_clients_do_not_say_where_kv_comes_from_however_they_write_it(encoding: str) -> None:
    body = '{"prompt": "a", "user": NaN, "kv_transfer_params": {"do_remote_prefill": true}}'
    async with fleet_of([producer()], [consumer()]) as fleet:
        response = await fleet.client.post("/v1/completions", content=body.encode(encoding))
    assert response.status_code == 400 and "not valid JSON" in response.json()["error"]["message"]
    assert not fleet.prefill[0].seen and not fleet.decode[0].seen


async def test_the_router_checks_from_which_page_a_request_comes_and_the_servers_need_not() -> None:
    server = FakeServer(answering(b"1"))
    async with fleet_of([], [server]) as fleet:
        own = {"Origin": str(fleet.client.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
        for headers, status in ((own, 200), (own | {"Origin": "http://evil.com"}, 403)):
            assert (
                await fleet.client.post("/v1/completions", json=PROMPT, headers=headers)
            ).status_code == status
        assert (
            await fleet.client.get("/", headers={"Sec-Fetch-Site": "cross-site"})
        ).status_code == 403
    (passed_on,) = server.seen
    assert not {"origin", "sec-fetch-site"} & {name.lower() for name, _ in passed_on.headers}


async def test_a_server_that_wants_a_key() -> None:
    server = producer()
    server.kv_status = 401
    async with fleet_of(
        [server], [consumer()], num_unhealthy=1, kv_load_failure_policy="fail"
    ) as fleet:
        message = (await fleet.complete()).json()["error"]["message"]
    assert "answers 401 to GET /kv_transfer: name its key with --api-key" in message


async def test_the_router_shows_its_own_key_only_on_its_own_behalf() -> None:
    asked = []

    async def note(exchange: Exchange) -> None:
        asked.append(dict(exchange.headers))
        await exchange.answer(b"")

    server = FakeServer(answering(b"1"))
    server.health = note
    async with fleet_of([], [server]) as fleet:
        await fleet.complete()
    assert asked[0]["authorization"] == "Bearer own-key"
    assert "authorization" not in dict(server.seen[0].headers)


# ---------------------------------------------------------------- policies


async def test_prefix_aware_keeps_prefixes_together() -> None:
    servers = [consumer(), consumer()]
    async with fleet_of([producer(), producer()], servers, policy="prefix_aware") as fleet:
        for turn in range(4):
            for story in ("a", "b"):
                await fleet.complete(prompt=story + LONG + f"turn {turn}")
    for server in [*fleet.prefill, *fleet.decode]:
        assert len(server.seen) == 4 and len({body["prompt"][0] for body in server.bodies}) == 1


async def test_a_server_that_has_been_away_has_forgotten() -> None:
    servers = [FakeServer(answering(b"0")), FakeServer(answering(b"1"))]
    async with fleet_of([], servers, policy="prefix_aware") as fleet:
        assert (await fleet.complete(prompt=LONG)).text == "0"
        await servers[0].stop()
        assert (await fleet.complete(prompt=LONG)).text == "1"
        await servers[0].start()
        await until(lambda: fleet.backends[0].is_healthy)
        assert (await fleet.complete(prompt=LONG)).text == "1"


def pool_of(loads: list[int], policy: str, capacity: int = 10) -> BackendPool:
    urls = [f"http://127.0.0.1:{8000 + i}" for i in range(len(loads))]
    servers = backends_of({"regular": urls}, RouterConfig())
    for server, load in zip(servers, loads, strict=True):
        server.problem = ""
        server.num_running = load
    return BackendPool(servers, policy, capacity)


@given(st.integers(1, 8), st.data())
def test_round_robin_is_fair(size: int, data: st.DataObject) -> None:
    pool = pool_of([0] * size, "round_robin")
    for _ in range(data.draw(st.integers(0, 5))):
        away = data.draw(st.lists(st.sampled_from(pool.servers), max_size=size - 1, unique_by=id))
        assert pool.choose({}, away) not in [None, *away]
    chosen = [pool.choose({}) for _ in range(3 * size)]
    assert all(chosen.count(server) == 3 for server in pool.servers)
    assert pool.choose({}, pool.servers) is None


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.lists(st.sampled_from("abc"), max_size=20),
)
def test_prefix_aware_weighs_prefixes_against_load(loads: list[int], stories: list[str]) -> None:
    pool = pool_of(loads, "prefix_aware")
    for story in stories:
        body = {"prompt": story * 4 * PIECE_BYTES}
        chosen = pool.choose(body)
        assert chosen and chosen.num_running <= min(loads) + MAX_IMBALANCE
        assert len(pool.state.sent.where) <= 10 * len(loads)
        again = pool.choose({"prompt": body["prompt"] + " and more"})
        assert again is chosen, "it has just seen the longest part of this"
        short = pool.choose({"prompt": story})
        assert short and short.num_running == min(loads), "without a prefix only the load counts"


@given(
    st.text("ab\u00e9", max_size=30),
    st.text("ab\u00e9", max_size=30),
    st.text("ab\u00e9", max_size=30),
)
def test_names_of_pieces_tell_prefixes(start: str, one: str, other: str) -> None:
    texts = [(start + end) * 40 + end for end in (one, other)]
    names = [prefix_names({"prompt": text}) for text in texts]
    raw = [
        json.dumps([None, None, None, text], ensure_ascii=False, separators=(",", ":")).encode()
        for text in texts
    ]
    same = next(
        (i for i, (x, y) in enumerate(zip(*raw, strict=False)) if x != y), min(map(len, raw))
    )
    agreeing = [x == y for x, y in zip(*names, strict=False)]
    assert agreeing == [i < same // PIECE_BYTES for i in range(len(agreeing))]
    assert list(map(len, names)) == [len(text) // PIECE_BYTES for text in raw]
    for other_field in ({"cache_salt": "s"}, {"tools": [{}]}):
        assert not set(names[0]) & set(prefix_names({"prompt": texts[0]} | other_field))


def test_long_prompts_are_looked_at_only_in_their_beginning() -> None:
    names = prefix_names({"prompt": list(range(10**6))})
    assert len(names) == 64 and names == prefix_names({"prompt": list(range(10**5))})


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name servers"),
        (["--prefill", "http://a:1"], "name servers"),
        (["--worker-urls", "http://a:1", "--decode", "http://a:2"], "either --prefill"),
        (["--worker-urls", "a:1"], "'a:1' is not the address of a server"),
        (["--worker-urls", "http://a:1/v1"], "is not the address of a server"),
        (["--prefill", "http://a:1", "--decode", "http://a:1/"], "listed twice"),
        (
            ["--worker-urls", "http://a:1", "--prefill-timeout", "0"],
            "prefill_timeout must be a finite number above 0",
        ),
        (["--worker-urls", "http://a:1", "--policy", "best"], "invalid choice"),
        (["--worker-urls", "http://a:1", "--policy", "precise"], "use prefix_aware"),
    ],
)
def test_mistakes_on_the_command_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from nanovllm.cli.main import main

    with contextlib.suppress(SystemExit):
        assert main(["router", *words]) == 2
    assert message in capsys.readouterr().err


async def test_the_command(tmp_path: Any) -> None:
    server = await FakeServer(answering(b"1")).start()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        down = f"http://127.0.0.1:{closed.getsockname()[1]}"
    output = tmp_path / "output.txt"
    command = [
        sys.executable,
        "-m",
        "nanovllm",
        "router",
        "--port",
        "0",
        "--worker-urls",
        server.url,
        down,
    ]
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        await until(
            lambda: "/v1, to 2 regular servers" in output.read_text() or process.poll() is not None
        )
        text = output.read_text()
        assert f"Still missing: {down} cannot be reached" in text
        (url,) = re.findall(r"routed at (\S+)/v1", text)
        async with httpx.AsyncClient() as client:
            assert (await client.post(f"{url}/v1/completions", json=PROMPT)).text == "1"
        process.terminate()
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        await server.stop()
