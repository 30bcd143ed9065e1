"""The page that shows an engine at work: its files, and the trace that it draws, from a running engine or from a file."""

from __future__ import annotations

import pathlib
import re
from collections.abc import AsyncIterable, Callable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import nanovllm
from nanovllm.server.access import DEFAULT_ACCESS, Access
from nanovllm.server.middleware import protect
from nanovllm.server.signalled import SignalledServer

PACKAGE = pathlib.Path(nanovllm.__file__).parent
# The page itself, and the pictures that it shares with the notebooks. (`nanovllm.lab.viz` is not imported: it needs matplotlib.)
FOLDERS = (PACKAGE / "server" / "web", PACKAGE / "trace" / "web")
MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
TRACE_MEDIA_TYPE = "application/x-ndjson"
CHUNK_LINES = 500


class LineStream(StreamingResponse):
    """A trace on its way to one reader. `on_close` is called whatever happens, even if the reader leaves before the first
    line."""

    def __init__(self, chunks: AsyncIterable[bytes] | Iterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(chunks, media_type=TRACE_MEDIA_TYPE, headers={"Cache-Control": "no-store"})
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


def page_routes() -> list[Route]:
    """`/` and the files that it needs, under `/web/`."""
    return [Route("/", page, name="page"), Route("/web/{name}", web_file, name="web_file")]


def page(request: Request) -> Response:
    """The page."""
    return file_response("index.html")


def web_file(request: Request) -> Response:
    """A script, a style sheet or data."""
    return file_response(request.path_params["name"])


def file_response(name: str) -> Response:
    """The file of this name, from one of `FOLDERS`.

    Raises:
        HTTPException: there is none (404).
    """
    if re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII) and (suffix := pathlib.PurePath(name).suffix) in MEDIA_TYPES:
        for folder in FOLDERS:
            if (folder / name).is_file():
                return Response((folder / name).read_bytes(), media_type=MEDIA_TYPES[suffix], headers=HEADERS)
    raise HTTPException(404, f"there is no file {name!r} here")


def create_replay(header: bytes, lines: list[bytes], access: Access = DEFAULT_ACCESS) -> Starlette:
    """The page on a recorded trace, without an engine.

    Args:
        header: the trace's first line, with its end.
        lines: all others, without their ends.
        access: which clients may come in.
    """

    def chunks() -> Iterator[bytes]:
        yield header
        for i in range(0, len(lines), CHUNK_LINES):
            yield b"".join(line + b"\n" for line in lines[i : i + CHUNK_LINES])

    def trace(request: Request) -> Response:
        return LineStream(chunks(), lambda: None)

    app = Starlette(routes=[*page_routes(), Route("/trace", trace)])
    protect(app, access)
    return app


class ReplayServer(SignalledServer):
    """Shows the page until a signal comes.

    Args:
        app: the application.
        banner: printed when a browser can come.
    """

    def __init__(self, app: Starlette, banner: str) -> None:
        super().__init__(app, banner, log_level="warning", timeout_graceful_shutdown=1)


ENGINE_CHOICE = "Which of the engines that --data-parallel-size gives: 0, 1, ..."
TRACE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "What the engine does, a line of JSON a step (see nanovllm/trace/format.py): first the header, then all "
        "steps from now on, until the server ends. Nobody's text or token ids, unless the server runs with --show-text.",
        "content": {TRACE_MEDIA_TYPE: {"schema": {"type": "string"}}},
    }
}
