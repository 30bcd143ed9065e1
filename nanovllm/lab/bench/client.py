"""The client that measures a server: the same one for every engine, over OpenAI's streaming completions.

During a run it only keeps what arrives, with its time, and parses it afterwards: the cores belong to the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from nanovllm.lab.bench.metrics import Timeline
from nanovllm.lab.bench.workloads import BenchRequest, Workload

Chunks = list[tuple[float, bytes]]
T = TypeVar("T")

#: Chunks that every stream has received when the long prompt is sent.
CHUNKS_BEFORE_INTRUDER = 8
TIMEOUT_SECONDS = 600.0


class ServerError(Exception):
    """A server's answer is not what was asked for; the message quotes it."""


@dataclass
class _Stream:
    """A request and what arrived: chunks, each with its time.

    Attributes:
        decoding: is set when the stream has received some chunks, or has ended.
    """

    request: BenchRequest
    start: float = 0.0
    chunks: Chunks = field(default_factory=list)
    decoding: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: httpx.AsyncClient, model_name: str) -> None:
        """Send the request, and receive the answer."""
        body = {
            "model": model_name,
            "prompt": self.request.prompt_token_ids,
            "max_tokens": self.request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            # The text does not say how many tokens it consists of; the usage does.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        self.start = time.perf_counter()
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise ServerError(f"status {response.status_code}: {response.text[:300]}")
                async for data in response.aiter_raw():
                    self.chunks.append((time.perf_counter(), data))
                    if len(self.chunks) == CHUNKS_BEFORE_INTRUDER:
                        self.decoding.set()
        finally:
            self.decoding.set()


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=httpx.Limits(max_connections=None))


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
    streams = [_Stream(request) for request in requests]
    places = asyncio.Semaphore(workload.max_concurrency or len(requests))
    begin = time.perf_counter()

    async def run(stream: _Stream) -> None:
        if workload.intruder_len and stream is streams[-1]:  # it is sent when all others decode
            await asyncio.gather(*(other.decoding.wait() for other in streams[:-1]))
        await asyncio.sleep(max(0.0, begin + stream.request.arrival - time.perf_counter()))
        async with places:
            await stream.run(client, model_name)

    async with _client(url) as client:
        await asyncio.gather(*map(run, streams))
    return [_timeline(stream.start, stream.chunks, stream.request.max_tokens) for stream in streams]


async def keep_busy(
    url: str, model_name: str, requests: Iterator[BenchRequest], num_streams: int, during: Coroutine[Any, Any, T]
) -> tuple[list[Timeline], T]:
    """Keep so many requests in flight, each followed by the next one as soon as it has ended, until `during` is over.
    Requests that are in flight then are cut off.

    Returns:
        The timelines of all requests, in the order in which they were sent, and the result of `during`.
    """
    sent: list[_Stream] = []

    async def stream() -> None:
        for request in requests:
            sent.append(_Stream(request))
            await sent[-1].run(client, model_name)

    try:
        async with _client(url) as client, asyncio.TaskGroup() as group:
            streams = [group.create_task(stream()) for _ in range(num_streams)]
            result = await during
            for task in streams:
                task.cancel()
    except ExceptionGroup as failures:  # of a stream or of `during`, each of which ends the others
        raise failures.exceptions[0] from None
    return [_timeline(0.0, each.chunks) for each in sent], result


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
