"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, with the status that fits."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from nanovllm.engine.request_stream import RequestFailedError, RequestRefusedError

logger = logging.getLogger("nanovllm.server")

# A message may quote what the client sent, which may be megabytes.
LONGEST_MESSAGE = 1000


class APIError(HTTPException):
    """Something to tell the client.

    Args:
        status: the HTTP status.
        message: what is wrong, and what would be right.
        param: the field that is wrong.
        code: a word for programs, such as "model_not_found".
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code


class ErrorResponse(JSONResponse):
    """An error as JSON. Pure ASCII, since a message may quote half of a surrogate pair, which is no valid UTF-8."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(error_body(status, message, param, code), status, headers)

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON object of an error; also what a stream sends when it fails half-way."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    if len(message) > LONGEST_MESSAGE:
        message = message[:LONGEST_MESSAGE] + "..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, str, str | None, str | None]:
    """Status, message, param and code for any exception."""
    from nanovllm.engine.async_engine import EngineDeadError  # here: `nanovllm replay` has no engine

    if isinstance(error, APIError):
        return error.status_code, str(error.detail), error.param, error.code
    if isinstance(error, RequestRefusedError):
        return 400, str(error), None, None
    if isinstance(error, RequestFailedError):
        return 500, str(error), None, None
    if isinstance(error, EngineDeadError):
        return 503, str(error), None, "engine_dead"
    return 500, "internal error; the server's log has the details", None, None


@contextlib.contextmanager
def blaming_client() -> Iterator[None]:
    """Around the checks of a request, where a ValueError says what is wrong with it. Anywhere else it is a bug here."""
    try:
        yield
    except ValueError as error:
        raise APIError(400, str(error), field_named_in(str(error))) from error


def field_named_in(message: str) -> str | None:
    """ "top_p must be ..." -> "top_p"; "prompt token ids must be ..." -> "prompt"."""
    subject, must, _ = message.partition(" must ")
    name = subject.removesuffix(" token ids")
    return name if must and name.isidentifier() else None


def validation_message(error: RequestValidationError) -> tuple[str, str | None]:
    """What is wrong with a request's body, from pydantic's list of reasons: (message, param)."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}", None
    path = [str(part) for part in first["loc"][1:]]
    if not path:
        return "the body must be a JSON object, sent with 'Content-Type: application/json'", None
    # A field that may be of several types has reasons for each of them: name the field, and give them all.
    top = path[0]
    about = [e for e in error.errors()[:20] if str(e["loc"][1]) == top]
    reasons = dict.fromkeys(e["msg"] for e in about)
    paths = [e["loc"][1:] for e in about]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    where = ".".join(str(parts[0]) for parts in shared)
    return f"{where}: {'; or: '.join(reasons)}", top


def install_error_handlers(app: Starlette) -> None:
    """Let every error of the application leave in OpenAI's shape."""
    from nanovllm.engine.async_engine import EngineDeadError

    async def on_http_error(request: Request, error: Exception) -> ErrorResponse:
        assert isinstance(error, HTTPException)
        if isinstance(error, APIError):
            return ErrorResponse(*describe(error), error.headers)
        message = {
            404: f"there is no route {request.url.path}",
            405: f"{request.url.path} does not answer {request.method}",
            400: "the body cannot be read: it must be JSON in UTF-8, nested less deeply than a thousand levels, and its "
            "numbers must be shorter than 4300 digits",
        }.get(error.status_code, str(error.detail))
        return ErrorResponse(error.status_code, message, headers=error.headers)

    async def on_validation_error(request: Request, error: Exception) -> ErrorResponse:
        assert isinstance(error, RequestValidationError)
        return ErrorResponse(400, *validation_message(error))

    async def on_error(request: Request, error: Exception) -> ErrorResponse:
        return ErrorResponse(*describe(error))

    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    # Named, for what only `Exception` stands for is logged with a traceback, as a bug.
    for kind in (EngineDeadError, RequestFailedError, RequestRefusedError, Exception):
        app.add_exception_handler(kind, on_error)
