"""The routes of the server, and its process: its signals and its end."""

import asyncio
import contextlib
import gc
import socket
import time
from functools import partial

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

import nanovllm
from nanovllm.data.json import JsonObject
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.server import protocol, responses
from nanovllm.server.access import Access, ready_message
from nanovllm.server.admission import Admission
from nanovllm.server.chat import ChatEndpoint, ChatGeneration
from nanovllm.server.completions import CompletionEndpoint, CompletionGeneration
from nanovllm.server.errors import APIError, blaming_client, install_error_handlers
from nanovllm.server.generation import Endpoint, check_model, json_response, unless_disconnected
from nanovllm.server.metrics import Metrics, Prefix
from nanovllm.server.middleware import protect
from nanovllm.server.parts import NO_PARTS, ServerParts
from nanovllm.server.signalled import SignalledServer
from nanovllm.server.stats_log import StatsLog

# After the time to drain, requests are aborted and get this time to send their last chunk.
LAST_CHUNK_SECONDS = 5


def create_app(
    engine: AsyncEngine,
    access: Access,
    metrics: Metrics,
    demo: bool = False,
    strict: bool = False,
    parts: ServerParts = NO_PARTS,
) -> FastAPI:
    """The application around a running engine, for clients that have access. See `run_server`."""
    app = FastAPI(
        title="nanovllm",
        version=nanovllm.__version__,
        docs_url=None,
        redoc_url=None,
        responses=responses.ERRORS,
    )
    install_error_handlers(app)
    admission = Admission(engine, len(access.api_keys))
    add_generation_routes(
        app, ChatEndpoint(admission, strict, parts), CompletionEndpoint(admission, strict, parts)
    )
    add_token_routes(app, Endpoint(admission, strict, parts))
    add_information_routes(app, engine, metrics)
    add_description(app)
    parts.add_page(app, engine, demo)
    protect(app, access)
    # The description, which FastAPI makes once, with what it cannot know.
    schemas = app.openapi()["components"]["schemas"]
    for schema in schemas.values():
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {
                "enum": [*engine.config.model_names, None],
                "default": None,
            }
    schemas |= responses.schemas()
    return app


def add_generation_routes(app: FastAPI, chat: ChatEndpoint, completion: CompletionEndpoint) -> None:
    """Chats and completions."""

    @app.post("/v1/chat/completions", responses=responses.documented(200, responses.ChatCompletion))
    async def chat_completions(body: protocol.ChatCompletionRequest, request: Request) -> Response:
        return await answer(request, await chat.submit_request(body))

    @app.post("/v1/completions", responses=responses.documented(200, responses.Completion))
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        return await answer(request, await completion.submit_request(body))


async def answer(request: Request, generation: ChatGeneration | CompletionGeneration) -> Response:
    """Send the answer, whole or as a stream. When the client goes away, the generation ends."""
    warning = generation.body.warning
    if generation.body.stream:
        return responses.ClosingStream(
            generation.events(),
            generation.close,
            headers={"Cache-Control": "no-cache"} | warning,
            media_type="text/event-stream",
        )
    try:
        return json_response(await unless_disconnected(request, generation.complete()), warning)
    finally:
        generation.close()


def add_token_routes(app: FastAPI, endpoint: Endpoint) -> None:
    """Text to token ids and back, in vLLM's shapes."""
    tokenizer = endpoint.engine.tokenizer
    limits = endpoint.engine.limits

    @app.post("/tokenize", responses=responses.documented(200, responses.Tokens))
    async def tokenize(body: protocol.TokenizeRequest) -> Response:
        endpoint.check(body)
        if (body.prompt is None) == (not body.messages):
            raise APIError(400, "either prompt or messages must be given, and not both", "prompt")
        with blaming_client("messages" if body.prompt is None else "prompt"):
            if body.prompt is not None:
                token_ids = await endpoint.engine.encode(
                    body.prompt, body.add_special_tokens is not False
                )
            else:
                with endpoint.admission.place(1):
                    token_ids = await endpoint.encode_chat(body, bool(body.add_special_tokens))
        convert = tokenizer.convert_ids_to_tokens
        longest = limits.max_request_tokens
        strings = await asyncio.to_thread(convert, token_ids) if body.return_token_strs else None
        return json_response(
            responses.Tokens(len(token_ids), longest, token_ids, strings), body.warning
        )

    @app.post("/detokenize")
    async def detokenize(body: protocol.DetokenizeRequest) -> Response:
        endpoint.check(body)
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < limits.vocab_size:
            raise APIError(400, f"tokens must be from 0 to {limits.vocab_size - 1}", "tokens")
        # A million ids take a while, so a thread decodes them. Unlike `decode`, `decode_batch`
        # releases the interpreter lock.
        (text,) = await asyncio.to_thread(
            tokenizer.backend.decode_batch, [body.tokens], skip_special_tokens=False
        )
        return json_response({"prompt": text}, body.warning)


def add_information_routes(app: FastAPI, engine: AsyncEngine, metrics: Metrics) -> None:
    """The model, the KV that others can fetch, the version, health and metrics. As in /tokenize,
    `max_model_len` counts what a request can have: the context length, or the KV pool if that is
    smaller."""
    entries = {
        name: {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "nanovllm",
            "root": engine.config.model,
            "parent": None,
            "max_model_len": engine.limits.max_request_tokens,
        }
        for name in engine.config.model_names
    }

    @app.get("/v1/models")
    async def models() -> JsonObject:
        return {"object": "list", "data": list(entries.values())}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> JsonObject:
        check_model(engine, name)
        return entries[name]

    @app.get("/kv_transfer")
    async def kv_transfer() -> JsonObject:
        """For each engine that shares KV, its id, its role, and its address for other engines."""
        return {"engines": engine.limits.kv_transfer}

    @app.post("/kv_transfer/release", status_code=204)
    async def release_kv(body: protocol.KVReleaseRequest) -> Response:
        """Free the KV blocks of a prefilled prompt that no decode server will read."""
        engine.release_kv(body.remote_request_id)
        return Response(status_code=204)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": nanovllm.__version__}

    @app.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:
        engine.check_alive()
        return PlainTextResponse("")

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus_metrics() -> Response:
        return metrics.response()


def add_description(app: FastAPI) -> None:
    """Swagger UI. FastAPI's own page loads it from a CDN, and stays blank without a network."""
    app.mount("/docs/files", StaticFiles(packages=[("fastapi_offline", "static")]))

    @app.get("/docs", include_in_schema=False)
    async def description() -> Response:
        # Relative, for proxies that add a prefix.
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=app.title,
            swagger_js_url="docs/files/swagger-ui-bundle.js",
            swagger_css_url="docs/files/swagger-ui.css",
            swagger_favicon_url="docs/files/favicon.png",
        )


async def run_server(
    engine: AsyncEngine,
    listener: socket.socket,
    access: Access,
    demo: bool = False,
    strict: bool = False,
    metrics_prefix: Prefix = "vllm",
    log_seconds: float = 0.0,
    parts: ServerParts = NO_PARTS,
) -> None:
    """Serve until a signal comes, then let running requests end, and stop the engine.

    Args:
        listener: a bound socket.
        access: which clients may use the server, and the seconds after which requests that still
            run are aborted.
        demo: whether the page sends bursts of requests as soon as it is opened.
        strict: whether requests with unknown fields are refused.
        metrics_prefix: the first word of the metrics' names.
        log_seconds: between two lines of statistics in the log; 0: none.
        parts: what the server has besides text generation.
    """
    try:
        metrics = Metrics(engine, metrics_prefix)
        app = create_app(engine, access, metrics, demo=demo, strict=strict, parts=parts)
        grace = int(access.shutdown_timeout) + LAST_CHUNK_SECONDS
        banner = ready_message(listener, engine.name, access.api_keys)
        drain = partial(engine.drain, access.shutdown_timeout)
        server = SignalledServer(app, banner, drain, timeout_graceful_shutdown=grace)
        # The garbage collector stops the event loop; it need not visit modules, routes and the
        # tokenizer each time.
        gc.freeze()
        async with contextlib.AsyncExitStack() as stack:
            if log_seconds:
                log = asyncio.create_task(StatsLog(metrics, log_seconds).run())
                stack.callback(log.cancel)
            await server.serve([listener])
    finally:
        gc.unfreeze()
        await engine.shutdown()
