"""The client that measures a server: the same one for every engine, over OpenAI's streaming completions.

What arrives is only noted, with its time, and read after the run: both cores belong to the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import httpx

from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.workloads import BenchRequest, Workload

Chunks = list[tuple[float, bytes]]
T = TypeVar("T")

#: What every stream has received when the long prompt arrives.
CHUNKS_BEFORE_INTRUDER = 8
TIMEOUT_SECONDS = 600.0


class ServerError(Exception):
    """A server answered something else than tokens; the message quotes it."""


async def run_workload(
    url: str, model_name: str, workload: Workload, requests: Sequence[BenchRequest]
) -> list[Timeline]:
    """Send the requests as the workload says, and return their timelines in their order.

    Args:
        url: of the server, as in "http://127.0.0.1:8000".
        model_name: as the server calls its model.

    Raises:
        ServerError: an answer that is not what was asked for.
        httpx.HTTPError: the connection failed.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=limits) as client:
        session = _Session(client, model_name)
        if workload.intruder_len:
            answers = await _with_intruder(session, requests)
        else:
            answers = await _clients(session, requests, workload.max_concurrency)
    return [
        _timeline(start, chunks, request.max_tokens) for (start, chunks), request in zip(answers, requests, strict=True)
    ]


async def keep_busy(
    url: str, model_name: str, requests: Iterator[BenchRequest], num_streams: int, during: Coroutine[Any, Any, T]
) -> tuple[list[Timeline], T]:
    """Have so many requests under way, each followed by the next one as soon as it has ended, until `during` is over.
    Those that are under way then are cut off.

    Returns:
        The timelines of all requests, in the order in which they were sent, and what came of `during`.
    """
    answers: list[Chunks] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=limits) as client:
        session = _Session(client, model_name)

        async def stream() -> None:
            for request in requests:
                answers.append([])
                await session.stream(request, chunks=answers[-1])

        over = asyncio.create_task(during)
        streams = [asyncio.create_task(stream()) for _ in range(num_streams)]
        try:
            done, _ = await asyncio.wait([over, *streams], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {over}:  # a stream that has ended has failed
                task.result()
            result = over.result()
        finally:
            for task in (over, *streams):
                task.cancel()
            await asyncio.gather(over, *streams, return_exceptions=True)
    return [_timeline(0.0, chunks) for chunks in answers], result


class _Session:
    """A connection to one server, and what it is asked for."""

    def __init__(self, client: httpx.AsyncClient, model_name: str) -> None:
        self.client = client
        self.model_name = model_name

    async def stream(
        self, request: BenchRequest, decoding: asyncio.Event | None = None, chunks: Chunks | None = None
    ) -> tuple[float, Chunks]:
        """Send a request; returns when it was sent, and what came when.

        Args:
            decoding: is set when the stream is well under way, or has ended.
            chunks: where to note what comes, for those who may not see the end.
        """
        chunks = [] if chunks is None else chunks
        start = time.perf_counter()
        body = _body(self.model_name, request)
        try:
            async with self.client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise ServerError(f"status {response.status_code}: {response.text[:300]}")
                async for data in response.aiter_raw():
                    chunks.append((time.perf_counter(), data))
                    if decoding is not None and len(chunks) == CHUNKS_BEFORE_INTRUDER:
                        decoding.set()
        finally:
            if decoding is not None:
                decoding.set()
        return start, chunks


def _body(model_name: str, request: BenchRequest) -> dict[str, Any]:
    return {
        "model": model_name,
        "prompt": request.prompt_token_ids,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        # Text does not tell how many tokens it is made of; the usage does.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


async def _clients(
    session: _Session, requests: Sequence[BenchRequest], max_concurrency: int | None
) -> list[tuple[float, Chunks]]:
    """Every request at its time of arrival, but never more than `max_concurrency` at once."""
    places = asyncio.Semaphore(max_concurrency or len(requests))
    start = time.perf_counter()

    async def send(request: BenchRequest) -> tuple[float, Chunks]:
        await asyncio.sleep(max(0.0, start + request.arrival - time.perf_counter()))
        async with places:
            return await session.stream(request)

    return await asyncio.gather(*(send(request) for request in requests))


async def _with_intruder(session: _Session, requests: Sequence[BenchRequest]) -> list[tuple[float, Chunks]]:
    """All but the last at once, and the last as soon as all of them decode."""
    *streams, intruder = requests
    decoding = [asyncio.Event() for _ in streams]
    tasks = [
        asyncio.create_task(session.stream(request, event)) for request, event in zip(streams, decoding, strict=True)
    ]
    for event in decoding:
        await event.wait()
    tasks.append(asyncio.create_task(session.stream(intruder)))
    return await asyncio.gather(*tasks)


def _timeline(start: float, chunks: Chunks, num_tokens: int | None = None) -> Timeline:
    """Read server-sent events; an event came with the chunk that completes it. Without `num_tokens` they may break off."""
    line, buffer, so_far = Timeline(start), b"", 0
    for when, data in chunks:
        *events, buffer = (buffer + data).split(b"\n\n")
        count = max((_completion_tokens(event) for event in events), default=0)
        if count > so_far:
            line.arrivals.append((when, count - so_far))
            so_far = count
    if num_tokens not in (None, so_far):
        raise ServerError(f"{so_far} tokens came, {num_tokens} were asked for")
    return line


def _completion_tokens(event: bytes) -> int:
    """Output tokens so far, as an event's usage says; 0 if it says nothing."""
    data = event.strip().removeprefix(b"data:").strip()
    if not data or data == b"[DONE]":
        return 0
    content = json.loads(data)
    if "error" in content:
        raise ServerError(str(content["error"])[:300])
    return (content.get("usage") or {}).get("completion_tokens", 0)
