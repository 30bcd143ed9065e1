"""What the router adds to a request: the same ones through it, and straight to a server that has its answers ready."""

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
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, cast

import numpy as np
import psutil

from nanovllm.lab.bench.parallel.findings import Finding, Found, estimate, in_turn, number
from nanovllm.lab.bench.parallel.setting import Setting
from nanovllm.lab.bench.report import Table
from nanovllm.lab.bench.watch import Estimate
from nanovllm.server.listen import bind

GOAL_SECONDS = 0.002
START_SECONDS = 60.0
NUM_CHUNKS = 16
_CONTEXT = multiprocessing.get_context("spawn")
_PARAMS = {"do_remote_prefill": True, "remote_engine_id": "bench", "remote_block_ids": [1], "remote_request_id": "1"}
_ANSWER = json.dumps({"id": "1", "choices": [{"index": 0, "text": "a"}], "kv_transfer_params": _PARAMS}).encode()
_PROMPT = "What does it cost to be asked by somebody else? " * 20

#: One pair: seconds straight to the servers, and through the router.
Pairs = dict[str, list[tuple[float, float]]]


async def _upstream(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """A server (ASGI) that knows the answer."""
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
    """Be such a server."""
    import uvicorn

    config = uvicorn.Config(_upstream, lifespan="off", log_level="warning", access_log=False)  # type: ignore[arg-type]
    asyncio.run(uvicorn.Server(config).serve([listener]))


def serve_router(
    listener: socket.socket, prefill: Sequence[str], decode: Sequence[str], regular: Sequence[str]
) -> None:
    """Be a router, with the settings of `nanovllm router`."""
    from nanovllm.router.backends import Backends
    from nanovllm.router.config import RouterConfig
    from nanovllm.router.run import RouterServer, backends_of

    servers = Backends(backends_of(prefill, decode, regular))
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # its banner is for people
        asyncio.run(RouterServer(servers, listener, RouterConfig(), shutdown_timeout=1.0).route())


@dataclass(frozen=True)
class _Server:
    port: int
    process: psutil.Process

    @property
    def processor_seconds(self) -> float:
        """Of all that it has done."""
        used = self.process.cpu_times()
        return used.user + used.system


@contextmanager
def _process(function: Any, *arguments: Any) -> Iterator[_Server]:
    """A server in a process of its own, when it answers."""
    listener = bind("127.0.0.1", 0)
    listener.listen()
    port = listener.getsockname()[1]
    process: BaseProcess = _CONTEXT.Process(target=function, args=(listener, *arguments), daemon=True)
    process.start()
    listener.close()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
        connection.request("GET", "/health")  # it waits in the queue until somebody takes it
        assert connection.getresponse().status == 200, "a server that is ready"
        connection.close()
        yield _Server(port, psutil.Process(process.pid))
    finally:
        process.kill()
        process.join()


class _Client:
    """One connection that stays open."""

    def __init__(self, server: _Server) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=START_SECONDS)
        self._connection.connect()
        cast(socket.socket, self._connection.sock).setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, **more: Any) -> float:
        """Seconds until the whole answer is here."""
        body = json.dumps({"model": "m", "prompt": _PROMPT, "max_tokens": 16, **more})
        start = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        content = response.read()
        took = round(time.perf_counter() - start, 6)
        if response.status != 200 or b'"text"' not in content:
            raise RuntimeError(f"status {response.status}: {content[:200]!r}")
        return took


def time_router(rounds: int) -> tuple[Pairs, dict[str, float]]:
    """Requests in both ways, in turn, by what is asked; and the router's processor time of one, which does not depend on who
    else computes. With prefill first, two servers are asked in any case."""
    with _process(serve_answers) as first, _process(serve_answers) as second:
        urls = [f"http://127.0.0.1:{server.port}" for server in (first, second)]
        with (
            _process(serve_router, [], [], urls[:1]) as plain,
            _process(serve_router, urls[:1], urls[1:], []) as divided,
        ):
            one, other, routed, routed_twice = map(_Client, (first, second, plain, divided))
            stream = f"one server, a stream of {NUM_CHUNKS} chunks"
            ways: dict[str, tuple[_Server, Callable[[], float], Callable[[], float]]] = {
                "one server": (plain, one.ask, routed.ask),
                stream: (plain, lambda: one.ask(stream=True), lambda: routed.ask(stream=True)),
                "prefill first, two servers": (divided, lambda: one.ask() + other.ask(), routed_twice.ask),
            }
            pairs: Pairs = {}
            processor = {}
            for name, (server, direct, through) in ways.items():
                for function in (direct, through) * 3:  # connections open, and code gets warm
                    function()
                before = server.processor_seconds
                pairs[name] = [_pair(direct, through, turn) for turn in range(rounds)]
                processor[name] = (server.processor_seconds - before) / rounds
            return pairs, processor


def _pair(direct: Callable[[], float], routed: Callable[[], float], turn: int) -> tuple[float, float]:
    works = {"direct": direct, "routed": routed}
    took = {name: works[name]() for name in in_turn(list(works), turn)}
    return took["direct"], took["routed"]


def router(setting: Setting) -> Found:
    """Servers that answer at once: what is left is the router."""
    return report_router(*time_router(3 if setting.dry_run else 200 * setting.repeats))


def report_router(pairs: Pairs, processor: dict[str, float]) -> Found:
    """What pairs say, and the processor's time; see `time_router`."""
    found, rows = Found(data={"seconds": pairs, "processor_seconds": processor}), []
    for name, both in pairs.items():
        direct, routed = (np.array([pair[i] for pair in both]) for i in (0, 1))
        added = Estimate.of((routed - direct).tolist())
        late, direct_late, routed_late = (
            1e3 * float(np.percentile(times, 99)) for times in (routed - direct, direct, routed)
        )
        figure = f"router added to a request, {name}"
        found.findings.append(Finding.at_most(f"{figure}: p50", 1e3 * added.ratio, " ms", 1e3 * GOAL_SECONDS))
        found.findings.append(Finding(f"{figure}: p99", late, " ms"))
        cells = [number(1e3 * float(np.median(times))) for times in (direct, routed)]
        numbers = (late, direct_late, routed_late, 1e3 * processor[name])
        rows.append([name, *cells, estimate(added, 1e3), *map(number, numbers)])
    columns = ["asked", "straight, ms", "routed, ms", "added, ms", "p99", "straight p99", "routed p99", "processor, ms"]
    title = f"Requests of 1 KB to servers that have the answer ready, {len(both)} pairs, medians and 95 % intervals"
    found.tables.append(Table(title, columns, rows, num_labels=1))
    return found
