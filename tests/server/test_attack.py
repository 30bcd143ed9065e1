"""Hostile requests of every class: each is refused in OpenAI's shape, no other request is lost, and
nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.attack import Attacker, attacks, send, what_is_wrong
from tests.kv_fleet import KVFleet
from tests.server_process import ServerProcess, wait_until

KEY = "k"
NIGHTLY_PER_CLASS = int(os.environ.get("NANOVLLM_ATTACKS_PER_CLASS", "300"))
CANARY: dict[str, Any] = {"prompt": "the others", "max_tokens": 20, "temperature": 0}


@contextlib.asynccontextmanager
async def others_are_served(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Meanwhile another client generates the same text again and again, whole and as a stream."""
    over = asyncio.Event()

    async def text() -> str:
        response = await client.post("/v1/completions", json=CANARY)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    async def again_and_again() -> int:
        count = 0
        while not over.is_set():
            assert await text() == expected
            count += 1
        return count

    expected = await text()
    task = asyncio.create_task(again_and_again())
    try:
        yield
    finally:
        over.set()
    assert await task > 0


async def attack(
    server: ServerProcess, folder: pathlib.Path, per_class: int, seed: int, key: str
) -> list[str]:
    """Make attacks, eight at a time; what went wrong."""
    host = server.url.removeprefix("http://")
    address, port = host.split(":")
    canary, limit, wrong = folder / "canary", asyncio.Semaphore(8), []
    seen: Counter[tuple[str, int]] = Counter()

    async def one(name: str, each: Any) -> None:
        async with limit:
            try:
                answer = await send(address, int(port), each)
                reason = what_is_wrong(each, answer)
                seen[name, answer.status] += 1
            except Exception as error:
                reason, answer = repr(error), None
            if reason:
                wrong.append(f"{name}: {reason}: {each.data[:600]!r} -> {answer}"[:2000])

    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=120, headers=headers) as client,
        others_are_served(client),
        asyncio.TaskGroup() as group,
    ):
        for name, each in attacks(Attacker(random.Random(seed), host, canary, key), per_class):
            group.create_task(one(name, each))
    assert not canary.exists(), "the server has run what a client sent"
    print("answers by class and status (0: none):", dict(sorted(seen.items())))
    return wrong


def traceback(server: ServerProcess) -> str:
    """The beginning of the first traceback in the server's output; "" if there is none."""
    return "".join(server.text.partition("Traceback")[1:])[:5000]


def check(
    server: ServerProcess, folder: pathlib.Path, per_class: int, seed: int, key: str = KEY
) -> None:
    process = psutil.Process(server.process.pid)
    wrong = asyncio.run(attack(server, folder, per_class, seed, key))
    assert not wrong, f"{len(wrong)} of {per_class} per class:\n" + "\n".join(wrong[:20])
    assert process.is_running() and server.engine.is_running()
    assert not traceback(server)


def test_each_class_once(server: ServerProcess, tmp_path: pathlib.Path) -> None:
    check(server, tmp_path, per_class=6, seed=0)
    wait_until(server.is_idle)


async def idle_client(address: str, port: int) -> None:
    """Connect, send nothing for a while, and leave."""
    _, writer = await asyncio.open_connection(address, port)
    await asyncio.sleep(2)
    writer.close()


async def slow_client(address: str, port: int) -> None:
    """Send a request byte by byte, and leave in the middle."""
    _, writer = await asyncio.open_connection(address, port)
    for byte in b"POST /v1/completions HTTP/1.1\r\nHost: x":
        writer.write(bytes([byte]))
        await asyncio.sleep(0.05)
    writer.close()


async def leaving_client(client: httpx.AsyncClient) -> None:
    """Leave after the first line of a stream."""
    body = {"prompt": "x" * 100, "max_tokens": 100, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code in (200, 429)
        async for _ in response.aiter_lines():
            break


async def greedy_client(client: httpx.AsyncClient, **body: Any) -> None:
    """Ask for much; there may be too many that do."""
    response = await client.post(
        "/v1/completions", json={"prompt": "x" * 200, "max_tokens": 10} | body
    )
    assert response.status_code in (200, 429), response.text


async def flood(server: ServerProcess, size: int) -> None:
    """Clients of every kind at once."""
    address, port = server.url.removeprefix("http://").split(":")
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client,
        others_are_served(client),
        asyncio.TaskGroup() as group,
    ):
        for number in range(size):
            group.create_task(idle_client(address, int(port)))
            group.create_task(slow_client(address, int(port)))
            group.create_task(leaving_client(client))
            group.create_task(greedy_client(client, n=1 if number % 30 else 128))


@pytest.mark.parametrize("size", [40, pytest.param(400, marks=pytest.mark.nightly)])
def test_flood(server: ServerProcess, size: int) -> None:
    """Many connections, slow clients, clients that leave, many sequences, many that wait."""
    process = psutil.Process(server.process.pid)
    server.is_idle()
    before = process.num_fds()
    asyncio.run(flood(server, size))
    wait_until(server.is_idle, 60)
    wait_until(lambda: process.num_fds() <= before, 60, "all connections are closed")
    assert not traceback(server)


@contextlib.contextmanager
def plain(model: pathlib.Path, folder: pathlib.Path) -> Iterator[ServerProcess]:
    with ServerProcess(model, folder, "--check-invariants") as server:
        yield server


@contextlib.contextmanager
def guarded(model: pathlib.Path, folder: pathlib.Path) -> Iterator[ServerProcess]:
    with ServerProcess(model, folder, "--check-invariants", "--api-key", KEY) as server:
        yield server


@contextlib.contextmanager
def traced(model: pathlib.Path, folder: pathlib.Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        model, folder, "--show-text", "--trace", str(folder / "trace.jsonl")
    ) as server:
        yield server


@contextlib.contextmanager
def routed(model: pathlib.Path, folder: pathlib.Path) -> Iterator[ServerProcess]:
    with KVFleet(model, folder, 1, 1, "--check-invariants") as fleet:
        yield fleet


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("start", [plain, guarded, traced, routed])
def test_thousands(
    start: Callable[..., contextlib.AbstractContextManager[ServerProcess]],
    tiny_model: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:
    with start(tiny_model, tmp_path) as server:
        for seed, key in enumerate(["", KEY]):
            check(server, tmp_path, NIGHTLY_PER_CLASS, seed, key)
        idle = server.all_blocks_are_back if isinstance(server, KVFleet) else server.is_idle
        headers = {"Authorization": f"Bearer {KEY}"}
        server.client.headers.update(headers)
        wait_until(idle, 60)
        assert server.stop() == 0
        assert not traceback(server)
