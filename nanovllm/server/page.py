"""The page that shows an engine at work: its files, and the trace that it draws, from a running
engine or from a file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from fastapi import FastAPI, Query
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from nanovllm.server.access import Access
from nanovllm.server.errors import blaming_client
from nanovllm.server.middleware import protect
from nanovllm.server.responses import ClosingStream

if TYPE_CHECKING:
    from nanovllm.engine.async_engine import AsyncEngine

HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
NO_STORE = {"Cache-Control": "no-store"}


class TraceLines(Response):
    """Lines of JSON."""

    media_type = "application/x-ndjson"


class PageFiles(StaticFiles):
    """The page, and the pictures that it shares with the notebooks. `nanovllm.lab.viz` is not
    imported: it needs matplotlib."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        """A file, with `HEADERS`."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def page_routes(demo: bool = False) -> list[BaseRoute]:
    """`/` and the files that it needs, under `/web/`. For a demo, `/` leads to `/?demo`, where the
    page sends bursts by itself."""
    files = PageFiles(packages=[("nanovllm.server", "web"), ("nanovllm.trace", "web")])

    async def page(request: Request) -> Response:
        if demo and not request.query_params.keys():
            return RedirectResponse("?demo", headers=HEADERS)
        return await files.get_response("index.html", request.scope)

    return [Route("/", page), Mount("/web", files)]


def add_live_routes(app: FastAPI, engine: AsyncEngine, demo: bool = False) -> None:
    """The page on a running engine, and the trace that it draws."""
    app.router.routes += page_routes(demo)

    @app.get("/trace", response_class=TraceLines)
    async def trace(
        rank: Annotated[
            int, Query(alias="engine", description="index of the engine, if there are several")
        ] = 0,
    ) -> Response:
        """The engine's work, one line of JSON per step (see nanovllm/trace/format.py): first the
        header, then all steps from now on, until the server ends. Without texts and token ids,
        unless the server runs with --show-text."""
        engine.check_alive()
        with blaming_client():
            stream = engine.watch(rank)
        return ClosingStream(
            stream, stream.close, media_type=TraceLines.media_type, headers=NO_STORE
        )


def create_replay(header: bytes, lines: Iterable[bytes], access: Access) -> Starlette:
    """The page on a recorded trace, without an engine.

    Args:
        header: the trace's first line, with its end.
        lines: all others, without their ends.
        access: which clients may see it.
    """
    content = header + b"".join(line + b"\n" for line in lines)

    def trace(request: Request) -> Response:
        return TraceLines(content, headers=NO_STORE)

    app = Starlette(routes=[*page_routes(), Route("/trace", trace)])
    protect(app, access)
    return app
