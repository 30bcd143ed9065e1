"""Hundreds of random requests, many of them cut short: afterwards nothing is held, and no memory has been lost."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import random
from typing import Any

import httpx
import psutil

from tests.server_process import ServerProcess, wait_until

# Before this many requests caches and allocators are still filling up.
WARM_UP, SOAK = 200, 500
ALLOWED_GROWTH = 24 * 2**20


def random_body(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 30), "temperature": rng.choice([0, 0.7, 1.5])}
    body |= rng.choice([{}, {"n": 3}, {"logprobs": 2}, {"top_k": 5}, {"stop": ["a", "bc"]}, {"seed": 5}])
    body |= rng.choice([{}, {"echo": True}, {"min_p": 0.1}, {"frequency_penalty": 1.0}, {"ignore_eos": True}])
    text = "".join(rng.choices("abcdefgh ", k=rng.randint(1, 120)))
    return body | {"prompt": rng.choice([text, "shared prefix " * 5 + text, [text, "second"]])}


async def one_request(client: httpx.AsyncClient, rng: random.Random) -> str:
    """Ask for something, and stay to the end or not; says what was done."""
    body, manner = random_body(rng), rng.choice(["whole", "stream", "leave stream", "time out", "wrong"])
    if manner == "whole":
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    elif manner == "wrong":
        response = await client.post("/v1/completions", json=body | {"n": -1})
        assert response.status_code == 400
    elif manner == "time out":
        with contextlib.suppress(httpx.TimeoutException):
            await client.post("/v1/completions", json=body, timeout=rng.uniform(0.001, 0.1))
    else:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            assert response.status_code == 200
            stay = 10**9 if manner == "stream" else rng.randint(0, 5)
            async for _ in response.aiter_lines():
                if (stay := stay - 1) < 0:
                    break
    return manner


async def many_requests(url: str, count: int, rng: random.Random) -> set[str]:
    limit = asyncio.Semaphore(16)

    async def limited() -> str:
        async with limit:
            return await one_request(client, random.Random(rng.random()))

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return set(await asyncio.gather(*(limited() for _ in range(count))))


def test_soak(tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rng = random.Random(0)
    # A pool that is too small for sixteen at once, so that there are preemptions, too.
    with ServerProcess(tiny_model, tmp_path, "--num-kv-blocks", "48", "--check-invariants") as server:
        processes = [psutil.Process(server.process.pid), server.engine]

        def memory() -> list[int]:
            wait_until(server.is_idle)
            return [process.memory_info().rss for process in processes]

        asyncio.run(many_requests(server.url, WARM_UP, rng))
        before = memory()
        manners = asyncio.run(many_requests(server.url, SOAK, rng))
        after = memory()
        assert manners == {"whole", "stream", "leave stream", "time out", "wrong"}
        for old, new in zip(before, after, strict=True):
            assert new - old < ALLOWED_GROWTH, f"memory went from {old} to {new} bytes"
        metrics = server.metrics()
        assert metrics["num_preemptions_total"] > 0
        assert metrics['request_success_total{finished_reason="abort"}'] > 0
        assert server.complete()["choices"]
        assert server.stop() == 0
        assert "Traceback" not in server.text
