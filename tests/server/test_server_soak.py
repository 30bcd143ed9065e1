"""Hundreds of random requests, many of them cut short: afterwards nothing is held, and memory has
stopped growing."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import random
from typing import Any

import httpx
import psutil

from tests.server_process import ServerProcess, wait_until
from tests.soak import MemorySamples, rounds, short_and_nightly

ROUND, ROUNDS = 60, 7
# MB per 1,000 requests. In the short form, caches and allocators still fill up when it ends.
SHORT_GROWTH, NIGHTLY_GROWTH = 50, 2


def random_body(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": rng.randint(1, 30),
        "temperature": rng.choice([0, 0.7, 1.5]),
    }
    body |= rng.choice(
        [{}, {"n": 3}, {"logprobs": 2}, {"top_k": 5}, {"stop": ["a", "bc"]}, {"seed": 5}]
    )
    body |= rng.choice(
        [{}, {"echo": True}, {"min_p": 0.1}, {"frequency_penalty": 1.0}, {"ignore_eos": True}]
    )
    text = "".join(rng.choices("abcdefgh ", k=rng.randint(1, 120)))
    return body | {"prompt": rng.choice([text, "shared prefix " * 5 + text, [text, "second"]])}


async def one_request(client: httpx.AsyncClient, rng: random.Random) -> str:
    """Ask for something, and stay to the end or not; says what was done."""
    body, manner = (
        random_body(rng),
        rng.choice(["whole", "stream", "leave stream", "time out", "wrong"]),
    )
    if manner == "whole":
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    elif manner == "wrong":
        response = await client.post("/v1/completions", json=body | {"n": -1})
        assert response.status_code == 400
    elif manner == "time out":
        with contextlib.suppress(httpx.TimeoutException):
            await client.post("/v1/completions", json=body, timeout=rng.uniform(0.001, 0.1))
    else:
        async with client.stream(
            "POST", "/v1/completions", json=body | {"stream": True}
        ) as response:
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


@short_and_nightly
def test_soak(minutes: float, tiny_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rng, manners = random.Random(0), set()
    # A pool that is too small for sixteen at once, so that there are preemptions, too. And
    # bfloat16, for which torch compiles a kernel for every length of a prompt.
    options = "--num-kv-blocks", "48", "--check-invariants", "--dtype", "bfloat16"
    with ServerProcess(tiny_model, tmp_path, *options) as server:
        memory = MemorySamples(
            {"front end": psutil.Process(server.process.pid), "engine": server.engine}
        )
        for number in rounds(minutes, ROUNDS):
            manners |= asyncio.run(many_requests(server.url, ROUND, rng))
            wait_until(server.is_idle, 60)
            memory.take((number + 1) * ROUND)
        memory.check(NIGHTLY_GROWTH if minutes else SHORT_GROWTH)
        assert manners == {"whole", "stream", "leave stream", "time out", "wrong"}
        metrics = server.metrics()
        assert metrics["num_preemptions_total"] > 0
        assert metrics['request_success_total{finished_reason="abort"}'] > 0
        assert server.complete()["choices"]
        assert server.stop() == 0
        assert "Traceback" not in server.text
