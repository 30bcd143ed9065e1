"""What the router adds to a request: the same requests through it, and straight to a server that
has its answers ready."""

import asyncio
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import psutil

from nanovllm.lab.bench.metrics import alternate
from nanovllm.lab.bench.parts import Setting
from nanovllm.lab.bench.report import Row, estimate, goal
from nanovllm.lab.processes import free_port, python_environment

GOAL_SECONDS = 0.002
TIMEOUT_SECONDS = 60.0
RETRIES = 7
NUM_CHUNKS = 16
_PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "bench",
    "remote_block_ids": [1],
    "remote_request_id": "1",
}
_ANSWER = json.dumps(
    {"id": "1", "choices": [{"index": 0, "text": "a"}], "kv_transfer_params": _PARAMS}
).encode()
_PROMPT = "How long does a request take through a router? " * 20


async def _upstream(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """A server (ASGI) that has the answer ready."""
    body = b""
    content = {"more_body": True}
    while content.get("more_body"):
        content = await receive()
        body += content["body"]
    wants_stream = scope["path"].startswith("/v1") and json.loads(body).get("stream")
    kind = b"text/event-stream" if wants_stream else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    answer = (
        json.dumps({"engines": [{"kv_role": "kv_both"}]}).encode()
        if scope["path"] == "/kv_transfer"
        else _ANSWER
    )
    for chunk in [b"data: " + answer + b"\n\n"] * NUM_CHUNKS if wants_stream else []:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await asyncio.sleep(0)
    await send(
        {"type": "http.response.body", "body": b"data: [DONE]\n\n" if wants_stream else answer}
    )


@contextmanager
def _server(module: str, *words: str) -> Iterator[tuple[int, psutil.Process]]:
    """A server in a process of its own, once it answers: its port and the process."""
    port = free_port()
    command = [sys.executable, "-m", module, *words, "--host", "127.0.0.1", "--port", str(port)]
    # Without its banner.
    process = subprocess.Popen(command, env=python_environment(), stdout=subprocess.DEVNULL)
    try:
        # It tries to connect again after half a second, a second, two, ...
        patient = httpx.HTTPTransport(retries=RETRIES)
        with httpx.Client(transport=patient, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
            client.get(f"http://127.0.0.1:{port}/health").raise_for_status()
        yield port, psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def _asking(port: int, **more: Any) -> Callable[[], float]:
    """A function that sends a request, always on the connection that the first one opens, and
    returns seconds until the whole answer is here. (A server closes a connection on which it hears
    nothing for some seconds.)"""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    body = json.dumps({"model": "m", "prompt": _PROMPT, "max_tokens": 16, **more})

    def ask() -> float:
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        took = round(time.perf_counter() - start, 6)
        if response.status != 200 or b'"text"' not in content:
            raise RuntimeError(f"status {response.status}: {content[:200]!r}")
        return took

    return ask


def router(setting: Setting) -> Iterator[Row]:
    """Requests straight to servers that answer at once, and through the router, in turn; and the
    router's processor time per request, which does not depend on other processes. With prefill
    first, both ways ask two servers."""
    rounds = 3 if setting.dry_run else 200 * setting.repeats
    answers = (
        "uvicorn",
        f"{__name__}:_upstream",
        "--lifespan=off",
        "--log-level=warning",
        "--no-access-log",
    )
    with _server(*answers) as (one, _), _server(*answers) as (other, _):
        urls = [f"http://127.0.0.1:{port}" for port in (one, other)]
        with (
            _server("nanovllm", "router", "--worker-urls", urls[0]) as (plain_port, plain),
            _server("nanovllm", "router", "--prefill", urls[0], "--decode", urls[1]) as (
                divided_port,
                divided,
            ),
        ):
            first = _asking(one)
            second = _asking(other)
            stream = f"one server, a stream of {NUM_CHUNKS} chunks"
            ways = {
                "one server": (plain, _asking(one), _asking(plain_port)),
                stream: (plain, _asking(one, stream=True), _asking(plain_port, stream=True)),
                "prefill first, two servers": (
                    divided,
                    lambda: first() + second(),
                    _asking(divided_port),
                ),
            }
            for name, (process, *both) in ways.items():
                for ask in both * 3:  # connections open, and code gets warm
                    ask()
                before = sum(process.cpu_times()[:2])
                times = alternate(dict(enumerate(both)), rounds, warm_up=0)
                yield from compare(
                    name, times[0], times[1], (sum(process.cpu_times()[:2]) - before) / rounds
                )


def compare(
    name: str, direct: Sequence[float], routed: Sequence[float], processor: float
) -> Iterator[Row]:
    """Compare seconds of requests straight to the servers and through the router, pair by pair."""
    straight = 1e3 * np.array(direct)
    through = 1e3 * np.array(routed)
    added = estimate((through - straight).tolist())
    late = float(np.percentile(through - straight, 99))
    yield goal(
        f"latency added by the router, {name}: p50",
        added["median"],
        "ms",
        at_most=1e3 * GOAL_SECONDS,
    )
    yield goal(f"latency added by the router, {name}: p99", late, "ms")
    yield {
        "table": (
            f"Requests of 1 KB to servers that answer immediately, {len(direct)} pairs, medians "
            "and 95 % intervals"
        ),
        "request": name,
        "direct, ms": float(np.median(straight)),
        "routed, ms": float(np.median(through)),
        "added, ms": added,
        "added p99": late,
        "direct p99": float(np.percentile(straight, 99)),
        "routed p99": float(np.percentile(through, 99)),
        "router CPU time, ms": 1e3 * processor,
    }
