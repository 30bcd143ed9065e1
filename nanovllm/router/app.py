"""The router's routes, and a request's way: to a prefill server and with what that says to a decode server, or to a decode
server that asks a prefill server itself.

The messages are those of vLLM's NixlConnector and of the proxies that come with it: engines and routers of both kinds
understand one another in `prefill_first`.
"""

from __future__ import annotations

import asyncio
import html
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import nanovllm
from nanovllm.router.backends import FAILURES, REFUSED, Answer, Backend, Backends, Headers, Role, describe
from nanovllm.router.call import NOT_PASSED_ON, Call
from nanovllm.router.config import RouterConfig
from nanovllm.router.metrics import Metrics
from nanovllm.router.policies import POLICIES, RoundRobin
from nanovllm.server.access import DEFAULT_ACCESS, Access
from nanovllm.server.errors import APIError, error_body, install_error_handlers
from nanovllm.server.generation import unless_disconnected
from nanovllm.server.middleware import protect

logger = logging.getLogger("nanovllm.router")

# A request is sent to so many servers of a kind at most: one that kills servers must not kill them all.
MAX_ATTEMPTS = 3


class PrefillAnswer(msgspec.Struct):
    """What matters of a prefill server's answer."""

    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class Transfer:
    """Where a request's KV comes from.

    Attributes:
        params: what a decode server has to know; None: it computes everything itself.
        producer: the prefill server that it will keep busy.
        lease: prefill first: the prefill server that holds the KV until a decode server has read it, and the request's id there.
    """

    params: dict[str, Any] | None = None
    producer: Backend | None = None
    lease: tuple[Backend, str] | None = None


class PassedOn(StreamingResponse):
    """A server's answer, as it is and as it comes."""

    def __init__(self, answer: Answer, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(chunks, answer.status)
        self.raw_headers = passed_headers(answer)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._answer.aclose()


def passed_headers(answer: Answer) -> Headers:
    """An answer's headers, for the client."""
    lower = [(name.lower(), value) for name, value in answer.headers]
    return [(name, value) for name, value in lower if name not in NOT_PASSED_ON]


def whole(answer: Answer, content: bytes) -> Response:
    """A server's answer, whole."""
    response = Response(content, answer.status)
    response.raw_headers = [*passed_headers(answer), (b"content-length", b"%d" % len(content))]
    return response


async def events(answer: Answer, first: bytes | None) -> AsyncIterator[bytes]:
    """A stream of events as it comes, in whole lines; if it is cut off, it ends with an error.

    Args:
        first: what has been read of it already.
    """
    chunk, rest = first, b""
    try:
        while chunk is not None:
            lines, newline, rest = (rest + chunk).rpartition(b"\n")
            if newline:
                yield lines + newline
            chunk = await answer.chunk()
    except FAILURES as error:
        message = f"the server that was at work on this {describe(error)}"
        logger.warning("%s %s in the middle of a stream", answer.backend, describe(error))
        # The empty line ends an event of which only a part has come.
        yield b"\ndata: " + msgspec.json.encode(error_body(503, message, None, "backend_lost")) + b"\n\n"
        yield b"data: [DONE]\n\n"
    else:
        if rest:
            yield rest


class RouterApp:
    """Takes requests to servers.

    Args:
        backends: the servers: prefill and decode, or all of them regular.
        config: how.
    """

    def __init__(self, backends: Backends, config: RouterConfig) -> None:
        self.backends, self.config = backends, config
        self.metrics = Metrics(backends.all)
        self.prefill = backends.of("prefill")
        # Those that answer clients.
        self.decode = backends.of("decode") or backends.of("regular")
        policy = POLICIES[config.policy]
        self._policies: dict[Role, RoundRobin] = {
            "prefill": policy(len(self.prefill)),
            self.decode[0].role: policy(len(self.decode)),
        }
        backends.on_return = lambda backend: self._policies[backend.role].forget(backend.index)

    # ---------------------------------------------------------------- generation

    async def generate(self, request: Request) -> Response:
        """POST /v1/completions and /v1/chat/completions."""
        arrival, route = time.monotonic(), request.url.path
        self.metrics.requests.labels(route).inc()
        call = await Call.from_request(request, parse=True)
        if call.speaks_of_kv:
            message = "kv_transfer_params must be left out: the router fills it in"
            raise APIError(400, message, "kv_transfer_params")
        response = await unless_disconnected(request, self._generate(call))
        self.metrics.time_to_headers.labels(route).observe(time.monotonic() - arrival)
        return response

    async def _generate(self, call: Call) -> Response:
        """Prefill and decode. A decode server that is lost before it has said anything is replaced."""
        tried: list[Backend] = []
        transfer: Transfer | Response | None = None
        response: Response | None = None
        try:
            while True:
                if tried:
                    self.metrics.retries.inc()
                backend = self._choose(self.decode, call, tried)  # first: without one, compute nothing
                tried.append(backend)
                transfer = transfer or await self._transfer(call)
                if isinstance(transfer, Response):
                    return transfer
                is_last = len(tried) == MAX_ATTEMPTS
                try:
                    response = await self._ask(backend, call, transfer)
                    if response.status_code != 503 or is_last or not self._candidates(self.decode, tried):
                        return response
                    self._note_failure(backend, None)
                except FAILURES as error:
                    self._note_failure(backend, error)
                    if is_last:
                        message = f"{backend} {describe(error)}, and so did {MAX_ATTEMPTS - 1} before it"
                        raise APIError(503, message, code="backend_lost") from error
                    if isinstance(error, REFUSED):
                        continue
                # Nobody knows whether the KV is still held: begin from the beginning.
                self._release(transfer)
                transfer = None
        finally:
            if response is None or response.status_code >= 400:
                self._release(transfer)

    def _release(self, transfer: Transfer | Response | None) -> None:
        """Have a prefill server free the KV that it holds for a request, since no decode server has answered the request. An
        engine that has claimed the KV may still read it."""
        if isinstance(transfer, Transfer) and transfer.lease is not None:
            self.backends.release(*transfer.lease)

    async def _ask(self, backend: Backend, call: Call, transfer: Transfer) -> Response:
        """A decode server's answer, or the beginning of its stream.

        Raises:
            FAILURES: there is none.
        """
        body = call.with_transfer(transfer.params)
        answer = await self.backends.send(backend, call.method, call.path, call.headers, body, transfer.producer)
        try:
            self.metrics.processed.labels(backend.url, backend.role).inc()
            if answer.is_stream:
                return PassedOn(answer, events(answer, await answer.chunk()))
            return whole(answer, await answer.read())
        except BaseException:
            await answer.aclose()
            raise

    # ---------------------------------------------------------------- where the KV comes from

    async def _transfer(self, call: Call) -> Transfer | Response:
        """What a decode server has to know, or what a prefill server has to say to the client."""
        if not self.prefill or not call.body:
            return Transfer()
        if self.config.kv_order == "decode_first":
            transfer: Transfer | Response | None = self._from_address(call)
        elif not call.is_one_sequence:
            return Transfer()
        else:
            transfer = await self._from_prefill(call)
        found = transfer is not None
        self.metrics.transfers.labels("offered" if found else "recomputed").inc()
        if transfer is None and self.config.kv_load_failure_policy == "fail":
            raise APIError(503, f"no prefill server can be had: {problems(self.prefill)}", code="backend_lost")
        return transfer or Transfer()

    def _from_address(self, call: Call) -> Transfer | None:
        """A prefill server, for a decode server to ask."""
        known = [backend for backend in self._candidates(self.prefill, []) if backend.kv_addresses]
        if not known:
            return None
        producer = self._policies["prefill"].choose(known, call.body)
        params: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False}
        params |= {"prefill_addresses": producer.kv_addresses, "kv_direction": self.config.kv_direction}
        return Transfer(params, producer)

    async def _from_prefill(self, call: Call) -> Transfer | Response | None:
        """Let a prefill server compute the prompt; what it says of the KV, or its refusal."""
        tried: list[Backend] = []
        body = call.for_prefill()
        headers = [header for header in call.headers if header[0] != b"accept-encoding"]  # it is read here
        while len(tried) < MAX_ATTEMPTS and (candidates := self._candidates(self.prefill, tried)):
            backend = self._policies["prefill"].choose(candidates, call.body)
            tried.append(backend)
            try:
                async with asyncio.timeout(self.config.prefill_timeout):
                    answer = await self.backends.send(backend, "POST", call.path, headers, body)
                    try:
                        content = await answer.read()
                    finally:
                        await answer.aclose()
                self.metrics.processed.labels(backend.url, backend.role).inc()
                if answer.status < 400:
                    params = msgspec.json.decode(content, type=PrefillAnswer).kv_transfer_params
                    request_id = (params or {}).get("remote_request_id")
                    return Transfer(params, lease=(backend, request_id) if request_id else None)
                if answer.status < 500:
                    return whole(answer, content)
                self._note_failure(backend, None)
            except (*FAILURES, msgspec.DecodeError) as error:
                self._note_failure(backend, error)
        return None

    # ---------------------------------------------------------------- who is there

    @staticmethod
    def _candidates(servers: Sequence[Backend], tried: Sequence[Backend]) -> list[Backend]:
        return [backend for backend in servers if backend.is_healthy and backend not in tried]

    def _choose(self, servers: Sequence[Backend], call: Call, tried: Sequence[Backend]) -> Backend:
        """Who gets the request; one that has failed once gets it again if there is nobody else.

        Raises:
            APIError: all are down.
        """
        candidates = self._candidates(servers, tried) or self._candidates(servers, [])
        if not candidates:
            raise APIError(503, f"no server can be reached: {problems(servers)}", code="backend_lost")
        return self._policies[candidates[0].role].choose(candidates, call.body)

    def _note_failure(self, backend: Backend, error: Exception | None) -> None:
        self.metrics.failures.labels(backend.url, backend.role).inc()
        self.backends.note_failure(backend, error)

    # ---------------------------------------------------------------- other routes

    async def forward(self, request: Request) -> Response:
        """Whatever any server can answer."""
        # Not what clients make up: every label is kept for ever.
        self.metrics.requests.labels("/v1/models" if request.path_params else request.url.path).inc()
        call = await Call.from_request(request, parse=False)
        return await unless_disconnected(request, self._generate(call))

    async def overview(self, request: Request) -> Response:
        """GET /: the servers, each with a page of its own that shows it at work."""
        servers = [*self.prefill, *self.decode]
        lines = "".join(
            f'<li>{server.role} {server.index}: <a href="{html.escape(server.url)}/">{server}</a> {html.escape(server.problem)}</li>'
            for server in servers
        )
        return HTMLResponse(f"<!doctype html><title>nanovllm router</title><h1>nanovllm router</h1><ul>{lines}</ul>")

    async def health(self, request: Request) -> Response:
        """GET /health."""
        for servers in (self.decode, self.prefill):
            is_needed = servers is self.decode or self.config.kv_load_failure_policy == "fail"
            if servers and is_needed and not self._candidates(servers, []):
                raise APIError(503, f"no server can be reached: {problems(servers)}", code="backend_lost")
        return PlainTextResponse("")

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": nanovllm.__version__})

    async def render_metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def problems(servers: Sequence[Backend]) -> str:
    """What is wrong with servers, for a message."""
    return "; ".join(f"{backend} {backend.problem or 'has failed to answer this'}" for backend in servers)


def create_app(backends: Backends, config: RouterConfig, access: Access = DEFAULT_ACCESS) -> Starlette:
    """The application. It answers while `backends.look_after()` runs.

    Args:
        backends: the servers.
        config: how requests are routed.
        access: which clients may come in. Without keys, those of the clients are for the servers to check.
    """
    router = RouterApp(backends, config)
    routes = [
        Route("/v1/completions", router.generate, methods=["POST"]),
        Route("/v1/chat/completions", router.generate, methods=["POST"]),
        Route("/v1/models", router.forward),
        Route("/v1/models/{name:path}", router.forward),
        Route("/tokenize", router.forward, methods=["POST"]),
        Route("/detokenize", router.forward, methods=["POST"]),
        Route("/", router.overview),
        Route("/health", router.health),
        Route("/version", router.version),
        Route("/metrics", router.render_metrics),
    ]
    app = Starlette(routes=routes)
    install_error_handlers(app)
    protect(app, access)
    return app
