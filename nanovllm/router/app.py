"""The router's routes, and the path of a request: to a prefill server, and with its answer to a decode server; or to a decode
server that asks a prefill server itself.

The messages are those of vLLM's NixlConnector and of the proxies that come with it, so in `prefill_first` engines and routers
of both kinds understand one another.
"""

from __future__ import annotations

import asyncio
import html
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import nanovllm
from nanovllm.router.backends import FAILURES, REFUSED, Answer, Backend, Backends, describe
from nanovllm.router.call import NOT_PASSED_ON, Call
from nanovllm.router.policies import choose
from nanovllm.server.access import Access
from nanovllm.server.errors import APIError, install_error_handlers
from nanovllm.server.generation import unless_disconnected
from nanovllm.server.metrics import MetricSet
from nanovllm.server.middleware import protect
from nanovllm.server.streams import ClosingStream

logger = logging.getLogger("nanovllm.router")

# The router sends a request to at most so many servers of a kind: a request that kills servers must not kill them all.
MAX_ATTEMPTS = 3
# The routes whose requests a prefill server may prepare.
GENERATING = ("/v1/completions", "/v1/chat/completions")


# Metrics, named like those of vLLM's router, with our prefix.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480)
LABELS = ("worker", "role")
TABLE = {
    "worker_health": (GaugeMetricFamily, "1 if the server gets requests", "is_healthy"),
    "running_requests": (GaugeMetricFamily, "Requests that were sent to the server and have not ended", "num_running"),
    "processed_requests": (CounterMetricFamily, "Requests that a server has answered", "num_answered"),
    "request_errors": (CounterMetricFamily, "Requests that a server has failed to answer", "num_failures"),
}
TRANSFERS = "Requests whose KV a prefill server was to supply (offered), and those that were computed anew (recomputed)"


class Metrics(MetricSet):
    """All metrics of a router, in a registry of their own."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        sources = [((backend.url, backend.role), backend) for backend in backends]
        super().__init__("nanovllm_router_", LABELS, TABLE, lambda: sources)
        self.requests = self.add(Counter, "requests", "Requests that have come", ["route"])
        self.retries = self.add(Counter, "retries", "Requests that were sent to another server", [])
        self.transfers = self.add(Counter, "kv_transfers", TRANSFERS, ["outcome"])
        name, about = "generate_duration_seconds", "From a request's arrival to the beginning of its answer"
        self.time_to_headers = self.add(Histogram, name, about, ["route"], buckets=BUCKETS)


class PrefillAnswer(msgspec.Struct):
    """The part of a prefill server's answer that the router reads."""

    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class Transfer:
    """Where a request's KV comes from.

    Attributes:
        params: parameters for the decode server; empty: it computes everything itself.
        server: prefill first: the prefill server that holds the KV until a decode server has read it; decode first: the one that
            will be busy with the request.
    """

    params: dict[str, Any] = field(default_factory=dict)
    server: Backend | None = None


def with_headers(response: Response, answer: Answer, *own: tuple[bytes, bytes]) -> Response:
    """A response with the headers of a server's answer."""
    response.raw_headers = [header for header in answer.headers if header[0] not in NOT_PASSED_ON] + list(own)
    return response


def whole(answer: Answer, content: bytes) -> Response:
    """A server's answer that has been read, for the client."""
    return with_headers(Response(content, answer.status), answer, (b"content-length", b"%d" % len(content)))


async def events(answer: Answer, first: bytes | None) -> AsyncIterator[bytes]:
    """A stream of events, in whole lines as they come. If the connection is cut, the stream ends with an error.

    Args:
        first: the part that has been read already.
    """
    chunk, rest = first, b""
    try:
        while chunk is not None:
            lines, newline, rest = (rest + chunk).rpartition(b"\n")
            if newline:
                yield lines + newline
            chunk = await answer.chunk()
    except FAILURES as error:
        logger.warning("%s %s in the middle of a stream", answer.backend, describe(error))
        message = f"the server that was at work on this {describe(error)}"
        # The empty line ends an event of which only a part has come.
        yield b"\n" + APIError(503, message, code="backend_lost").event() + b"data: [DONE]\n\n"
    else:
        if rest:
            yield rest


class RouterApp:
    """Takes requests to servers.

    Args:
        backends: the servers: prefill and decode, or all of them regular.
    """

    def __init__(self, backends: Backends) -> None:
        self.backends, self.config = backends, backends.config
        self.metrics = Metrics(backends.all)
        self.prefill = backends.of("prefill")
        # The servers that answer clients.
        self.decode = backends.of("decode") or backends.of("regular")

    # ---------------------------------------------------------------- generation

    async def answer(self, request: Request) -> Response:
        """A request that servers answer."""
        # The path of one model is no label: clients could make up any number, and each is kept for ever.
        arrival, route = time.monotonic(), "/v1/models" if request.path_params else request.url.path
        self.metrics.requests.labels(route).inc()
        call = await Call.from_request(request, parse=route in GENERATING)
        if route in GENERATING and call.has_kv_params:
            message = "kv_transfer_params must be left out: the router fills it in"
            raise APIError(400, message, "kv_transfer_params")
        response = await unless_disconnected(request, self._answer(call))
        if route in GENERATING:
            self.metrics.time_to_headers.labels(route).observe(time.monotonic() - arrival)
        return response

    async def _answer(self, call: Call) -> Response:
        """Prefill and decode. A decode server that fails before its answer has begun is replaced."""
        tried: list[Backend] = []
        transfer: Transfer | Response | None = None
        response: Response | None = None
        try:
            while True:
                # Chosen before the prefill, which is in vain without a decode server. One that has failed is asked again if there
                # is no other.
                candidates = healthy(self.decode, tried) or self._check_some(self.decode)
                backend = choose(self.config.policy, candidates, call.body)
                self.metrics.retries.inc(bool(tried))
                tried.append(backend)
                transfer = transfer or await self._transfer(call)
                if isinstance(transfer, Response):
                    return transfer
                is_last = len(tried) == MAX_ATTEMPTS
                try:
                    response = await self._ask(backend, call, transfer)
                    if response.status_code != 503 or is_last or not healthy(self.decode, tried):
                        return response
                    self.backends.note_failure(backend, None)
                except FAILURES as error:
                    self.backends.note_failure(backend, error)
                    if is_last:
                        message = f"{backend} {describe(error)}, and so did {MAX_ATTEMPTS - 1} before it"
                        raise APIError(503, message, code="backend_lost") from error
                    if isinstance(error, REFUSED):
                        continue
                # The prefill server may have freed the KV by now: prefill again.
                self._release(transfer)
                transfer = None
        finally:
            if response is None or response.status_code >= 400:
                self._release(transfer)

    def _release(self, transfer: Transfer | Response | None) -> None:
        """Have a prefill server free the KV of a request that no decode server has answered. An engine that has claimed the KV
        may still read it."""
        if isinstance(transfer, Transfer) and transfer.server and "remote_request_id" in transfer.params:
            self.backends.release(transfer.server, transfer.params["remote_request_id"])

    async def _ask(self, backend: Backend, call: Call, transfer: Transfer) -> Response:
        """A decode server's answer, or the beginning of its stream.

        Raises:
            FAILURES: there is no answer.
        """
        helpers = [transfer.server] if transfer.server and self.config.kv_order == "decode_first" else []
        answer = await self.backends.send(call.with_transfer(transfer.params), backend, *helpers)
        backend.num_answered += 1
        if not answer.is_stream:
            return whole(answer, await answer.read())
        try:
            chunks = events(answer, await answer.chunk())
            return with_headers(ClosingStream(chunks, answer.aclose, status_code=answer.status), answer)
        except BaseException:
            await answer.aclose()
            raise

    # ---------------------------------------------------------------- where the KV comes from

    async def _transfer(self, call: Call) -> Transfer | Response:
        """Parameters for a decode server, or a prefill server's refusal."""
        decode_first = self.config.kv_order == "decode_first"
        if not self.prefill or not call.body or not (decode_first or call.is_one_sequence):
            return Transfer()
        transfer = self._from_address(call) if decode_first else await self._from_prefill(call)
        self.metrics.transfers.labels("offered" if transfer else "recomputed").inc()
        if transfer is None and self.config.kv_load_failure_policy == "fail":
            raise APIError(503, f"no prefill server can be had: {problems(self.prefill)}", code="backend_lost")
        return transfer or Transfer()

    def _from_address(self, call: Call) -> Transfer | None:
        """The address of a prefill server, for a decode server to ask."""
        known = [backend for backend in healthy(self.prefill) if backend.kv_addresses]
        if not known:
            return None
        producer = choose(self.config.policy, known, call.body)
        params: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False}
        params |= {"prefill_addresses": producer.kv_addresses, "kv_direction": self.config.kv_direction}
        return Transfer(params, producer)

    async def _from_prefill(self, call: Call) -> Transfer | Response | None:
        """Let a prefill server compute the prompt: its KV parameters, or its refusal."""
        tried: list[Backend] = []
        prefill_call = call.for_prefill()
        while len(tried) < MAX_ATTEMPTS and (candidates := healthy(self.prefill, tried)):
            backend = choose(self.config.policy, candidates, call.body)
            tried.append(backend)
            try:
                async with asyncio.timeout(self.config.prefill_timeout):
                    answer = await self.backends.send(prefill_call, backend)
                    content = await answer.read()
                backend.num_answered += 1
                if answer.status < 400:
                    return Transfer(msgspec.json.decode(content, type=PrefillAnswer).kv_transfer_params or {}, backend)
                if answer.status < 500:
                    return whole(answer, content)
                self.backends.note_failure(backend, None)
            except FAILURES as error:
                self.backends.note_failure(backend, error)
        return None

    def _check_some(self, servers: Sequence[Backend]) -> list[Backend]:
        """The healthy servers among these.

        Raises:
            APIError: there are none.
        """
        if not (candidates := healthy(servers)):
            raise APIError(503, f"no server can be reached: {problems(servers)}", code="backend_lost")
        return candidates

    # ---------------------------------------------------------------- other routes

    async def overview(self, request: Request) -> Response:
        """GET /: links to the servers, each of which has a page that shows it at work."""
        lines = "".join(
            f'<li>{server.role}: <a href="{html.escape(server.url)}/">{server}</a> {html.escape(server.problem)}</li>'
            for server in [*self.prefill, *self.decode]
        )
        return HTMLResponse(f"<!doctype html><title>nanovllm router</title><h1>nanovllm router</h1><ul>{lines}</ul>")

    async def health(self, request: Request) -> Response:
        """GET /health."""
        self._check_some(self.decode)
        if self.prefill and self.config.kv_load_failure_policy == "fail":
            self._check_some(self.prefill)
        return PlainTextResponse("")

    async def render_metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def healthy(servers: Sequence[Backend], tried: Sequence[Backend] = ()) -> list[Backend]:
    """The servers that can get a request, without those that were tried."""
    return [backend for backend in servers if backend.is_healthy and backend not in tried]


def problems(servers: Sequence[Backend]) -> str:
    """Why servers get no requests, for a message."""
    return "; ".join(f"{backend} {backend.problem or 'has failed to answer this'}" for backend in servers)


def create_app(backends: Backends, access: Access) -> Starlette:
    """The application. It answers while `backends.look_after()` runs.

    Args:
        access: which clients may use the router. Without keys, the servers check those of the clients.
    """
    router = RouterApp(backends)
    routes = [Route(path, router.answer, methods=["POST"]) for path in (*GENERATING, "/tokenize", "/detokenize")]
    gets: dict[str, Any] = {
        "/v1/models": router.answer,
        "/v1/models/{name:path}": router.answer,
        "/": router.overview,
        "/health": router.health,
        "/version": JSONResponse({"version": nanovllm.__version__}),
        "/metrics": router.render_metrics,
    }
    app = Starlette(routes=routes + [Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()])
    install_error_handlers(app)
    protect(app, access)
    return app
