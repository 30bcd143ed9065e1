"""The client that measures a server: the same one for every engine, over OpenAI's streaming
completions.

During a run it only keeps what arrives, with its time, and parses it afterwards: the cores belong
to the server."""

import asyncio
import contextlib
import json
import time
from collections.abc import Coroutine, Sequence
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
_AS_IT_IS = {"Accept-Encoding": "identity"}


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

    async def run(self, client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
        """Send the request, and receive the answer."""
        body = fields | {
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
    # Every stream has a connection of its own: llama-server closes one after a stream, perhaps when
    # the next has just begun.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=limits)


async def run_workload(
    url: str, fields: dict[str, Any], workload: Workload, requests: Sequence[BenchRequest]
) -> list[Timeline]:
    """Send the requests as the workload says, and return their timelines in their order.

    Args:
        url: of the server, as in "http://127.0.0.1:8000".
        fields: of each request's body: the model's name, and what else the server wants.

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
            await stream.run(client, fields)

    async with _client(url) as client:
        await asyncio.gather(*map(run, streams))
    return [_timeline(stream.start, stream.chunks, stream.request.max_tokens) for stream in streams]


async def watched(url: str, talk: Coroutine[Any, Any, T]) -> T:
    """The result of a talk with a server during which a client reads the server's /trace, as the
    live page does, and throws it away.

    Raises:
        ServerError: the server ends the trace before the talk.
        httpx.HTTPError: there is no trace.
    """
    async with _client(url) as client, client.stream("GET", "/trace", headers=_AS_IT_IS) as stream:
        chunks = stream.raise_for_status().aiter_raw()
        await anext(chunks)  # the header: from here on it is watched

        async def read() -> None:
            async for _ in chunks:
                pass
            raise ServerError("its /trace ended")

        reader = asyncio.create_task(read())
        result = await talk
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader
        return result


def _timeline(start: float, chunks: Chunks, num_tokens: int) -> Timeline:
    """Read server-sent events; an event came with the chunk that completes it."""
    line = Timeline(start)
    buffer = b""
    so_far = 0
    for when, data in chunks:
        *events, buffer = (buffer + data).split(b"\n\n")
        count = max((_completion_tokens(event) for event in events), default=0)
        if count > so_far:
            line.arrivals.append((when, count - so_far))
            so_far = count
    if so_far != num_tokens:
        raise ServerError(f"{so_far} tokens came, {num_tokens} were asked for")
    return line


def _completion_tokens(event: bytes) -> int:
    """Output tokens so far, as an event's usage says, or its timings (llama.cpp); 0 if it says
    nothing."""
    data = event.strip().removeprefix(b"data:").strip()
    if not data or data == b"[DONE]":
        return 0
    content = json.loads(data)
    if "error" in content:
        raise ServerError(str(content["error"])[:300])
    return (content.get("usage") or {}).get("completion_tokens") or content.get("timings", {}).get(
        "predicted_n", 0
    )
