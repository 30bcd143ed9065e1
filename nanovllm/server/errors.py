"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}, with the status that
fits."""

import contextlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from nanovllm.data.checks import did_you_mean
from nanovllm.data.outputs import RequestFailedError
from nanovllm.data.structured_outputs import GrammarError
from nanovllm.engine.errors import EngineDeadError, RequestRefusedError
from nanovllm.text.chat_template import HelperProcessError
from nanovllm.text.prompts import TooManyTokensError

logger = logging.getLogger("nanovllm.server")

# A message may quote the client's text, which may be megabytes.
LONGEST_MESSAGE = 1000
Fields = Mapping[str, str] | None
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class APIError(HTTPException):
    """An error that a client is told.

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
        headers: Fields = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    def json(self) -> bytes:
        """The error as JSON. Pure ASCII, since a message may quote half of a surrogate pair, which
        is no valid UTF-8."""
        kind = TYPES.get(
            self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error"
        )
        message = (
            self.detail
            if len(self.detail) <= LONGEST_MESSAGE
            else self.detail[:LONGEST_MESSAGE] + "..."
        )
        return json.dumps(
            {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}
        ).encode()

    def response(self) -> Response:
        """The error as an HTTP response."""
        return Response(self.json(), self.status_code, self.headers, "application/json")

    def event(self) -> bytes:
        """The error as an event of a stream that fails half-way."""
        return b"data: " + self.json() + b"\n\n"


# Status and code of the engine's errors.
ENGINE_ERRORS: dict[type[Exception], tuple[int, str | None]] = {
    EngineDeadError: (503, "engine_dead"),
    HelperProcessError: (503, None),
    RequestFailedError: (500, None),
    RequestRefusedError: (400, None),
    GrammarError: (400, None),
}


def as_api_error(error: Exception) -> APIError:
    """What a client is told about any exception."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestValidationError):
        message, param = validation_message(error)
        return APIError(400, message, param)
    if found := ENGINE_ERRORS.get(type(error)):
        status, code = found
        param = error.place if isinstance(error, GrammarError) else None
        return APIError(status, str(error), param, code)
    return APIError(500, "internal error; the server's log has the details")


@contextlib.contextmanager
def blaming_client(prompt: str = "prompt") -> Iterator[None]:
    """Around the checks of a request, where a ValueError says what is wrong with the request.
    Elsewhere it would be a bug.

    Args:
        prompt: the field from which the prompt comes, to be named if it is too long.
    """
    try:
        yield
    except TooManyTokensError as error:
        too_large = prompt if error.field == "prompt" else error.field
        raise APIError(400, str(error), too_large, "context_length_exceeded") from error
    except ValueError as error:
        # "top_p must be ..." and "top_p: ..." name top_p; "prompt token ids must be ..." names
        # prompt.
        field = re.match(r"([\w.]+)(?: token ids)?(?: must |: )", str(error))
        param = error.place if isinstance(error, GrammarError) else field and field[1]
        raise APIError(400, str(error), param) from error


# Types of parts of a message that are no text, as clients of OpenAI's API and of vLLM's send them.
MEDIA = re.compile(r"^(input_)?(image|audio|video|file)(_url|_embeds|_pil)?$")


def validation_message(error: RequestValidationError) -> tuple[str, str | None]:
    """What is wrong with a request's body, from pydantic's list of reasons: (message, param)."""
    first = error.errors()[0]
    if first["type"] == "json_invalid" and len(first["loc"]) == 2:
        # Not in a field that is JSON itself.
        return (
            f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}",
            None,
        )
    if not first["loc"][1:]:
        return "the body must be a JSON object, sent with 'Content-Type: application/json'", None
    # A field that may be of several types has reasons for each of them: name the field, and give
    # them all. But an object whose own "type" is wrong, such as an image, has no better reason.
    top = str(first["loc"][1])
    about = [e for e in error.errors()[:20] if str(e["loc"][1]) == top]
    about = [e for e in about if e["type"] == "literal_error" and e["loc"][-1] == "type"] or about
    reasons = dict.fromkeys(e["msg"] for e in about)
    if MEDIA.search(str(about[0].get("input"))) and about[0]["loc"][-1] == "type":
        reasons = {"models of this server read text only": None}
    levels = zip(*(e["loc"][1:] for e in about), strict=False)
    where = ".".join(
        str(parts[0]) for parts in takewhile(lambda parts: len(set(parts)) == 1, levels)
    )
    # Without classes of ours, such as list[TextPart]
    where = re.sub(r"\.[^.]*[A-Z][^.]*", "", where)
    return f"{where}: {'; or: '.join(reasons)}", top


CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# Routes of OpenAI, vLLM and others that clients ask for and that are not here, and what to do
# instead; the longest names first.
MISSING_ROUTES = {
    "/responses": f"this server has no Responses API: use {CHAT}",
    "/messages": f"this server has no Messages API: use {CHAT}",
    "/embeddings": (
        f"this server generates text and has no embeddings: it has {CHAT} and {COMPLETIONS}"
    ),
    "/chat/completions": (
        f"the route is {CHAT}: give clients the base URL that ends with /v1, once"
    ),
    "/completions": (
        f"the route is {COMPLETIONS}: give clients the base URL that ends with /v1, once"
    ),
    "/models": "the route is /v1/models: give clients the base URL that ends with /v1, once",
}


def route_hint(path: str, routes: Iterable[BaseRoute]) -> str:
    """Return a hint for a client that has asked for a path that is none of the routes; "" if the
    path resembles none."""
    for name, hint in MISSING_ROUTES.items():
        if path.rstrip("/").endswith(name) or f"{name}/" in path:
            return f"; {hint}"
    paths = [route.path for route in routes if isinstance(route, Route) and "{" not in route.path]
    return did_you_mean(path.lower(), paths)


def framework_error(
    request: Request, error: HTTPException, routes: Iterable[BaseRoute]
) -> APIError:
    """Return what a client is told about an error of the web framework."""
    path = request.url.path
    headers = error.headers
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no route {path}{route_hint(path, routes)}"
    elif error.status_code == 405:
        # Static files are answered without this header.
        allowed = sorted((headers or {}).get("Allow", "GET, HEAD").split(", "))
        message = f"{path} does not answer {request.method}: send {allowed[0]}"
        headers = {"Allow": ", ".join(allowed)}
    elif error.status_code == 400:
        message = (
            "the body cannot be read: it must be JSON in UTF-8, nested less deeply than a thousand "
            "levels, and its numbers must be shorter than 4300 digits"
        )
    return APIError(error.status_code, message, headers=headers)


def install_error_handlers(app: Starlette) -> None:
    """Answer every error of the application in OpenAI's shape."""

    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and not isinstance(error, APIError):
            error = framework_error(request, error, app.routes)
        return as_api_error(error).response()

    # Every known kind is named, because errors that only `Exception` matches are logged with a
    # traceback, as bugs.
    for kind in (HTTPException, RequestValidationError, *ENGINE_ERRORS, Exception):
        app.add_exception_handler(kind, on_error)
