"""Hundreds of requests through the router, two servers that prefill and two that decode, and one
after another is killed: every answer is right, every other request gets an error, and nothing is
left of anything."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import random
from collections import Counter
from collections.abc import Iterable

import httpx
import msgspec
import psutil
import pytest

from tests.forking import children
from tests.kv_fleet import KVFleet
from tests.server_process import ServerProcess, wait_until
from tests.soak import MemorySamples, rounds, short_and_nightly

pytestmark = pytest.mark.nightly

NUM_PROMPTS, MAX_TOKENS = 30, 10
ROUTER_GROWTH = 5.0  # MB per 1,000 requests, in the nightly form
ORDERS = {
    "prefill first": (200, ("--policy", "prefix_aware")),
    "decode first": (60, ("--kv-order", "decode_first")),
}


def some_prompts(rng: random.Random) -> list[str]:
    """Some of them begin alike."""
    shared = "once upon a time there was a small model that dreamt of being read. "
    texts = ["".join(rng.choices("abcdefgh ", k=rng.randint(20, 100))) for _ in range(NUM_PROMPTS)]
    return [shared * (i % 3) + text for i, text in enumerate(texts)]


async def ask(client: httpx.AsyncClient, prompt: str, rng: random.Random, expected: str) -> str:
    """One request; what became of it: "right", "error" or "left"."""
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    if rng.random() < 0.5:
        response = await client.post("/v1/completions", json=body)
        if response.status_code != 200:
            assert (
                response.status_code in (500, 502, 503, 504) and response.json()["error"]["message"]
            )
            return "error"
        assert response.json()["choices"][0]["text"] == expected
        return "right"
    patience, text = rng.choice([10**6, 10**6, 3]), ""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            return "error"
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = msgspec.json.decode(line.removeprefix("data: "))
            if "error" in event:
                return "error"
            text += event["choices"][0]["text"]
            if (patience := patience - 1) < 0:
                assert expected.startswith(text)
                return "left"
    assert text == expected
    return "right"


def kill_one(fleet: KVFleet, rng: random.Random) -> None:
    """A server, or the engine behind it."""
    for name in rng.sample(fleet.names, len(fleet.names)):
        with contextlib.suppress(psutil.NoSuchProcess):  # killed before, and not started again yet
            server = fleet.server(name)
            rng.choice([server, *children(server)]).kill()
            return


async def soak(
    fleet: KVFleet, count: int, expected: dict[str, str], rng: random.Random
) -> Counter[str]:
    """Many requests, eight at a time; after every fiftieth a server is killed, or its engine."""
    limit, asked = asyncio.Semaphore(8), 0
    results: Counter[str] = Counter()

    async def one(client: httpx.AsyncClient, own: random.Random) -> None:
        nonlocal asked
        async with limit:
            asked += 1
            if asked % 50 == 25:
                kill_one(fleet, rng)
            prompt = own.choice(list(expected))
            results[await ask(client, prompt, own, expected[prompt])] += 1

    async with httpx.AsyncClient(base_url=fleet.url, timeout=120) as client:
        await asyncio.gather(*(one(client, random.Random(rng.random())) for _ in range(count)))
    return results


def segments(processes: Iterable[psutil.Process]) -> set[str]:
    """Memory without a name that these processes map: its number as a file."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has just ended, or is somebody else's
            lines = pathlib.Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            found |= {line.split()[4] for line in lines if "memfd:nanovllm" in line}
    return found


@short_and_nightly
@pytest.mark.parametrize(
    "order", [pytest.param("prefill first", marks=pytest.mark.nightly), "decode first"]
)
def test_soak(
    order: str,
    minutes: float,
    tiny_model: pathlib.Path,
    tmp_path: pathlib.Path,
    server: ServerProcess,
) -> None:
    count, flags = ORDERS[order]
    rng = random.Random(order)
    expected = {
        prompt: server.complete(prompt=prompt, max_tokens=MAX_TOKENS, temperature=0)["choices"][0][
            "text"
        ]
        for prompt in some_prompts(rng)
    }
    with KVFleet(tiny_model, tmp_path, 2, 2, "--check-invariants", *flags) as fleet:
        memory = MemorySamples({"router": psutil.Process(fleet.process.pid)})
        for number in rounds(minutes / len(ORDERS), at_least=4 if minutes else 1):
            results = asyncio.run(soak(fleet, count, expected, rng))
            assert sum(results.values()) == count
            assert results["right"] > count / 2 and results["left"], results
            fleet.wait_until_ready()
            wait_until(fleet.all_blocks_are_back, 90, "all blocks are back")
            memory.take((number + 1) * count)
        if minutes:
            memory.check(ROUTER_GROWTH)
        fetched = sum(
            fleet.metrics(fleet.server_url(f"decode {i}"))["external_prefix_cache_hits_total"]
            for i in (0, 1)
        )
        fleet.complete(prompt="afterwards all is as before, " * 4, max_tokens=3)
        processes = fleet.processes()
        shared = segments(processes)
        assert len(shared) >= 4, "each engine has a cache that others can map"
        assert fleet.stop() == 0, fleet.text
        fleet.wait_until_gone(processes)
    assert fetched > 0, "a decode server that nobody has killed has had KV from elsewhere"
    assert not shared & segments(psutil.process_iter())
