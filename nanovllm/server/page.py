"""The page that shows an engine at work: its files, and the trace that it draws, from a running engine or from a file."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import nanovllm
from nanovllm.server.access import DEFAULT_ACCESS, Access
from nanovllm.server.middleware import protect
from nanovllm.server.streams import ClosingStream

PACKAGE = pathlib.Path(nanovllm.__file__).parent
# The page itself, and the pictures that it shares with the notebooks. This module does not import `nanovllm.lab.viz`, which needs
# matplotlib.
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


def line_stream(chunks: Any, on_close: Any) -> ClosingStream:
    """A trace for one reader; see `ClosingStream`."""
    return ClosingStream(chunks, on_close, media_type=TRACE_MEDIA_TYPE, headers={"Cache-Control": "no-store"})


def page_routes() -> list[Route]:
    """`/` and the files that it needs, under `/web/`."""
    return [Route("/", file_response, name="page"), Route("/web/{name}", file_response, name="web_file")]


def file_response(request: Request) -> Response:
    """The page, or the file that the path names, from one of `FOLDERS`.

    Raises:
        HTTPException: there is no such file (404).
    """
    name = request.path_params.get("name", "index.html")
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
        access: which clients may see it.
    """

    def chunks() -> Iterator[bytes]:
        yield header
        for i in range(0, len(lines), CHUNK_LINES):
            yield b"".join(line + b"\n" for line in lines[i : i + CHUNK_LINES])

    def trace(request: Request) -> Response:
        return line_stream(chunks(), lambda: None)

    app = Starlette(routes=[*page_routes(), Route("/trace", trace)])
    protect(app, access)
    return app


ENGINE_CHOICE = "Which of the engines that --data-parallel-size gives: 0, 1, ..."
TRACE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The engine's work, one line of JSON per step (see nanovllm/trace/format.py): first the header, then all "
        "steps from now on, until the server ends. Without texts and token ids, unless the server runs with --show-text.",
        "content": {TRACE_MEDIA_TYPE: {"schema": {"type": "string"}}},
    }
}
