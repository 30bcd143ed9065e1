"""What the router adds to a request: the same requests through it, and straight to a server that has its answers ready."""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from multiprocessing.process import BaseProcess
from typing import Any, cast

import httpx
import numpy as np
import psutil

from nanovllm.lab.bench.metrics import alternate
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, estimate, goal
from nanovllm.server.access import bind

GOAL_SECONDS = 0.002
START_SECONDS = 60.0
NUM_CHUNKS = 16
_CONTEXT = multiprocessing.get_context("spawn")
_PARAMS = {"do_remote_prefill": True, "remote_engine_id": "bench", "remote_block_ids": [1], "remote_request_id": "1"}
_ANSWER = json.dumps({"id": "1", "choices": [{"index": 0, "text": "a"}], "kv_transfer_params": _PARAMS}).encode()
_PROMPT = "How long does a request take through a router? " * 20


async def _upstream(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """A server (ASGI) that has the answer ready."""
    content = await receive()
    while content.get("more_body"):
        more = await receive()
        content = {"body": content["body"] + more["body"], "more_body": more.get("more_body")}
    wants_stream = scope["path"].startswith("/v1") and json.loads(content["body"]).get("stream")
    kind = b"text/event-stream" if wants_stream else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if scope["path"] == "/kv_transfer":
        body = json.dumps({"engines": [{"kv_role": "kv_both"}]}).encode()
        await send({"type": "http.response.body", "body": body})
        return
    for _ in range(NUM_CHUNKS if wants_stream else 0):
        await send({"type": "http.response.body", "body": b"data: " + _ANSWER + b"\n\n", "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n" if wants_stream else _ANSWER})


def serve_answers(listener: socket.socket) -> None:
    """Serve such answers."""
    import uvicorn

    config = uvicorn.Config(_upstream, lifespan="off", log_level="warning", access_log=False)  # type: ignore[arg-type]
    asyncio.run(uvicorn.Server(config).serve([listener]))


def serve_router(
    listener: socket.socket, prefill: Sequence[str], decode: Sequence[str], regular: Sequence[str]
) -> None:
    """Serve as a router, with the settings of `nanovllm router`."""
    from nanovllm.router.config import RouterConfig
    from nanovllm.router.run import RouterServer, backends_of
    from nanovllm.server.access import Access

    servers = backends_of({"prefill": prefill, "decode": decode, "regular": regular}, RouterConfig())
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # without its banner
        asyncio.run(RouterServer(servers, listener, Access(shutdown_timeout=1.0)).route())


@contextmanager
def _process(function: Any, *arguments: Any) -> Iterator[tuple[int, psutil.Process]]:
    """A server in a process of its own, once it answers: its port and the process."""
    listener = bind("127.0.0.1", 0)
    listener.listen()
    port = listener.getsockname()[1]
    process: BaseProcess = _CONTEXT.Process(target=function, args=(listener, *arguments), daemon=True)
    process.start()
    listener.close()
    try:
        # It waits in the listener's queue until the server takes it.
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=START_SECONDS, trust_env=False).raise_for_status()
        yield port, psutil.Process(process.pid)
    finally:
        process.kill()
        process.join()


class _Client:
    """One connection that stays open."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
        self._connection.connect()
        cast(socket.socket, self._connection.sock).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, **more: Any) -> float:
        """Send a request; returns seconds until the whole answer is here."""
        body = json.dumps({"model": "m", "prompt": _PROMPT, "max_tokens": 16, **more})
        start = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        content = response.read()
        took = round(time.perf_counter() - start, 6)
        if response.status != 200 or b'"text"' not in content:
            raise RuntimeError(f"status {response.status}: {content[:200]!r}")
        return took


def router(setting: Setting) -> Iterator[Row]:
    """Requests straight to servers that answer at once, and through the router, in turn; and the router's processor time per
    request, which does not depend on other processes. With prefill first, both ways ask two servers."""
    rounds = 3 if setting.dry_run else 200 * setting.repeats
    with _process(serve_answers) as (one_port, _), _process(serve_answers) as (other_port, _):
        urls = [f"http://127.0.0.1:{port}" for port in (one_port, other_port)]
        with (
            _process(serve_router, [], [], urls[:1]) as (plain_port, plain),
            _process(serve_router, urls[:1], urls[1:], []) as (divided_port, divided),
        ):
            one, other, routed, routed_twice = map(_Client, (one_port, other_port, plain_port, divided_port))
            stream = f"one server, a stream of {NUM_CHUNKS} chunks"
            ways: dict[str, tuple[psutil.Process, Callable[[], float], Callable[[], float]]] = {
                "one server": (plain, one.ask, routed.ask),
                stream: (plain, lambda: one.ask(stream=True), lambda: routed.ask(stream=True)),
                "prefill first, two servers": (divided, lambda: one.ask() + other.ask(), routed_twice.ask),
            }
            for name, (process, *both) in ways.items():
                for ask in both * 3:  # connections open, and code gets warm
                    ask()
                before = sum(process.cpu_times()[:2])
                times = alternate(dict(enumerate(both)), rounds, warm_up=0)
                yield from compare(name, times[0], times[1], (sum(process.cpu_times()[:2]) - before) / rounds)


def compare(name: str, direct: Sequence[float], routed: Sequence[float], processor: float) -> Iterator[Row]:
    """Compare seconds of requests straight to the servers and through the router, pair by pair."""
    straight, through = 1e3 * np.array(direct), 1e3 * np.array(routed)
    added = estimate((through - straight).tolist())
    late = float(np.percentile(through - straight, 99))
    yield goal(f"router added to a request, {name}: p50", added["median"], "ms", at_most=1e3 * GOAL_SECONDS)
    yield goal(f"router added to a request, {name}: p99", late, "ms")
    yield {
        "table": f"Requests of 1 KB to servers that have the answer ready, {len(direct)} pairs, medians and 95 % intervals",
        "asked": name,
        "straight, ms": float(np.median(straight)),
        "routed, ms": float(np.median(through)),
        "added, ms": added,
        "added p99": late,
        "straight p99": float(np.percentile(straight, 99)),
        "routed p99": float(np.percentile(through, 99)),
        "processor, ms": 1e3 * processor,
    }
