"""The router's routes, and the path of a request through prefill and decode servers.

    prefill_first   The router sends the request to a prefill server, and its answer, with the
                    request, to a decode server.
    decode_first    The router sends the request, with the address of a prefill server, to a decode
                    server, which requests the KV itself.

In `prefill_first`, the messages are those of vLLM's NixlConnector and its proxies, so that engines
and routers of both projects work together."""

import asyncio
import contextlib
import logging
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import httpcore
import jinja2
import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import nanovllm
from nanovllm.data.json import JsonObject
from nanovllm.router.backends import FAILURES, Backend, describe
from nanovllm.router.call import OF_CONNECTION, Call
from nanovllm.router.pool import BackendPool
from nanovllm.server.access import Access
from nanovllm.server.errors import APIError, install_error_handlers
from nanovllm.server.generation import Result, unless_disconnected
from nanovllm.server.metrics import MetricSet, Prefix
from nanovllm.server.middleware import protect
from nanovllm.server.responses import ClosingStream

logger = logging.getLogger("nanovllm.router")

# The most servers of one role to which the router sends a request: a request that crashes servers
# must not crash all of them.
MAX_ATTEMPTS = 3
OVERVIEW = pathlib.Path(__file__).with_name("overview.html")
# The routes whose requests a prefill server may prepare.
GENERATING = ("/v1/completions", "/v1/chat/completions")

Ask = Callable[[Call, Backend], Awaitable[tuple[int, Result | None]]]


# Metrics under the names of vLLM's router.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480)
LABELS = ("worker", "role")
TABLE = {
    "worker_health": (GaugeMetricFamily, "1 if the server gets requests", "is_healthy"),
    "running_requests": (
        GaugeMetricFamily,
        "Requests that were sent to the server and have not ended",
        "num_running",
    ),
    "processed_requests": (
        CounterMetricFamily,
        "Requests that a server has answered",
        "num_answered",
    ),
    "request_errors": (
        CounterMetricFamily,
        "Requests that a server has failed to answer",
        "num_failures",
    ),
}
TRANSFERS = (
    "Requests whose KV a prefill server was to supply (offered), and those that were computed anew "
    "(recomputed)"
)


class Metrics(MetricSet):
    """All metrics of a router. Each server exports its own metrics at its own address."""

    def __init__(self, servers: Sequence[Backend], prefix: Prefix = "vllm") -> None:
        sources = [((server.url, server.role), server) for server in servers]
        super().__init__(f"{prefix}_router_", LABELS, TABLE, lambda: sources)
        self.requests = self.counter("requests", "Requests that have come", ["route"])
        self.retries = self.counter("retries", "Requests that were sent to another server", [])
        self.transfers = self.counter("kv_transfers", TRANSFERS, ["outcome"])
        self.time_to_headers = self.histogram(
            "generate_duration_seconds",
            "From a request's arrival to the beginning of its answer",
            ["route"],
            BUCKETS,
        )


@dataclass
class Transfer:
    """Where a request's KV comes from.

    Attributes:
        params: parameters for the decode server; empty if it computes the prompt itself.
        server: the prefill server: with prefill first, the one that holds the KV; with decode
            first, the one that will compute the prompt.
    """

    params: JsonObject = field(default_factory=dict)
    server: Backend | None = None


def with_headers(response: Response, answer: httpcore.Response) -> Response:
    """Give a response the headers of a server's answer."""
    headers = [(name.lower(), value) for name, value in answer.headers]
    response.raw_headers = [header for header in headers if header[0] not in OF_CONNECTION]
    return response


async def events(
    server: Backend, chunk: bytes | None, chunks: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """Yield a stream of events, in whole lines. If the connection breaks, the last event is an
    error.

    Args:
        chunk: the first chunk, if any.
        chunks: the other chunks.
    """
    rest = b""
    try:
        while chunk is not None:
            lines, newline, rest = (rest + chunk).rpartition(b"\n")
            yield lines + newline
            chunk = await anext(chunks, None)
        yield rest
    except FAILURES as error:
        problem = server.problem or describe(error)
        logger.warning("%s %s in the middle of a stream", server.url, problem)
        message = f"the server that handled this request {problem}"
        # The empty line ends an incomplete event.
        yield b"\n" + APIError(503, message, code="backend_lost").event() + b"data: [DONE]\n\n"


class RouterApp:
    """Forwards requests to servers.

    Args:
        servers: prefill and decode servers, or regular servers only; all with the same
            configuration.
        metrics_prefix: the first word of the metrics' names.
    """

    def __init__(self, servers: Sequence[Backend], metrics_prefix: Prefix = "vllm") -> None:
        self.config = servers[0].config
        self.metrics = Metrics(servers, metrics_prefix)
        create_pool = partial(BackendPool, policy=self.config.policy, weights=self.config.weights)
        self.prefill = create_pool([s for s in servers if s.role == "prefill"])
        # The servers that answer clients.
        self.decode = create_pool([s for s in servers if s.role != "prefill"])
        self.is_decode_first = self.config.kv_order == "decode_first"

    # ---------------------------------------------------------------- generation

    async def answer(self, request: Request) -> Response:
        """Forward a request to a server, and return its answer."""
        # A model's name in the path must not become a label: labels are
        # never freed, and clients can send any number of names.
        arrival = time.monotonic()
        route = "/v1/models" if request.path_params else request.url.path
        self.metrics.requests.labels(route).inc()
        call = await Call.from_request(request, parse=route in GENERATING)
        if call.body.get("kv_transfer_params") is not None:
            raise APIError(
                400, "kv_transfer_params must not be set: the router sets it", "kv_transfer_params"
            )
        response = await unless_disconnected(
            request, self._first_of(self.decode, call, self._decode)
        )
        if route in GENERATING:
            self.metrics.time_to_headers.labels(route).observe(time.monotonic() - arrival)
        return response

    async def _first_of(self, pool: BackendPool, call: Call, ask: Ask[Result]) -> Result:
        """Try up to `MAX_ATTEMPTS` servers one after another, and return the first answer with a
        status below 500. If there is none, return the last answer.

        Args:
            ask: returns the status and the result of a server's answer, or raises one of
                `FAILURES`.

        Raises:
            APIError: no server has answered.
        """
        tried: list[Backend] = []
        result = None
        while len(tried) < MAX_ATTEMPTS and (server := pool.choose(call.body, tried)):
            self.metrics.retries.inc(bool(tried))
            tried.append(server)
            try:
                status, result = await ask(call, server)
                if status < 500 and result is not None:
                    return result
                server.note_failure()
            except FAILURES as error:
                server.note_failure(error)
        if result is None:
            raise unavailable(pool.servers)
        return result

    async def _decode(self, call: Call, server: Backend) -> tuple[int, Response]:
        """Return a decode server's answer, which may be a stream; or the error with which a prefill
        server has rejected the request."""
        transfer = await self._transfer(call)
        if isinstance(transfer, Response):
            return transfer.status_code, transfer
        status = 503
        try:
            response = await self._ask(call.with_transfer(transfer.params), server, transfer.server)
            status = response.status_code
        finally:
            # No decode server will read the KV, unless its engine has claimed it already.
            if status >= 400 and transfer.server and "remote_request_id" in transfer.params:
                await transfer.server.release(transfer.params["remote_request_id"])
        return status, response

    async def _ask(self, call: Call, server: Backend, helper: Backend | None) -> Response:
        """Return a decode server's answer, which may be a stream. With decode first, `helper` is
        the prefill server, which counts as busy until the answer ends."""
        async with contextlib.AsyncExitStack() as stack:
            if helper and self.is_decode_first:
                stack.enter_context(helper.at_work())
            answer = await stack.enter_async_context(server.ask(call))
            server.num_answered += 1
            response = with_headers(Response(status_code=answer.status), answer)
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                response.body = await answer.aread()
                return response
            chunks = answer.aiter_stream()
            pieces = events(server, await anext(chunks, None), chunks)
            return with_headers(
                ClosingStream(pieces, stack.pop_all().aclose, status_code=answer.status), answer
            )

    # ---------------------------------------------------------------- where the KV comes from

    async def _transfer(self, call: Call) -> Transfer | Response:
        """Return the parameters for a decode server, or a prefill server's error."""
        if (
            not self.prefill.servers
            or not call.body
            or not (self.is_decode_first or call.is_one_sequence)
        ):
            return Transfer()
        ask: Ask[Transfer | Response] = self._address if self.is_decode_first else self._prefill
        try:
            transfer: Transfer | Response = await self._first_of(self.prefill, call, ask)
        except APIError:
            self.metrics.transfers.labels("recomputed").inc()
            if self.config.kv_load_failure_policy == "fail":
                raise
            return Transfer()
        self.metrics.transfers.labels("offered").inc()
        return transfer

    async def _address(self, call: Call, server: Backend) -> tuple[int, Transfer | Response | None]:
        """Return the address of a prefill server, from which a decode server requests KV."""
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "prefill_addresses": server.kv_addresses,
            "kv_direction": self.config.kv_direction,
        }
        return 200, Transfer(params, server)

    async def _prefill(self, call: Call, server: Backend) -> tuple[int, Transfer | Response | None]:
        """Have a prefill server compute the prompt; returns its KV parameters, or its error."""
        async with (
            asyncio.timeout(self.config.prefill_timeout),
            server.ask(call.for_prefill()) as answer,
        ):
            content = await answer.aread()
        server.num_answered += 1
        if answer.status < 400:
            params = msgspec.json.decode(content, type=JsonObject).get("kv_transfer_params")
            return answer.status, Transfer(params or {}, server)
        return answer.status, (
            with_headers(Response(content, answer.status), answer) if answer.status < 500 else None
        )

    # ---------------------------------------------------------------- other routes

    async def overview(self, request: Request) -> Response:
        """GET /: a page with links to the servers' own pages."""
        page = jinja2.Template(OVERVIEW.read_text(), autoescape=True)
        return HTMLResponse(page.render(servers=[*self.prefill.servers, *self.decode.servers]))

    async def health(self, request: Request) -> Response:
        """GET /health."""
        needs_prefill = self.prefill.servers and self.config.kv_load_failure_policy == "fail"
        for pool in (self.decode, self.prefill) if needs_prefill else (self.decode,):
            if not pool.is_healthy:
                raise unavailable(pool.servers)
        return PlainTextResponse("")


def unavailable(servers: Sequence[Backend]) -> APIError:
    """Return an error with the problem of each server."""
    problems = "; ".join(
        f"{server.url} {server.problem or 'has failed to answer this'}" for server in servers
    )
    return APIError(503, f"no server can be reached: {problems}", code="backend_lost")


def create_app(
    servers: Sequence[Backend], access: Access, metrics_prefix: Prefix = "vllm"
) -> Starlette:
    """Create the router's application. It works only while the `Backend.look_after` tasks of the
    servers run.

    Args:
        access: which clients may use the router. If it has no keys, the servers check the clients'
            keys.
        metrics_prefix: see `RouterApp`.
    """
    router = RouterApp(servers, metrics_prefix)
    routes = [
        Route(path, router.answer, methods=["POST"])
        for path in (*GENERATING, "/tokenize", "/detokenize")
    ]
    gets: dict[str, Callable[..., object]] = {
        "/v1/models": router.answer,
        "/v1/models/{name:path}": router.answer,
        "/": router.overview,
        "/health": router.health,
        "/version": JSONResponse({"version": nanovllm.__version__}),
        "/metrics": lambda request: router.metrics.response(),
    }
    app = Starlette(
        routes=routes + [Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()]
    )
    install_error_handlers(app)
    protect(app, access)
    return app
