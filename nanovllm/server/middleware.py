"""Checks before a request reaches the application: its host and origin, its key, and its body's
size and contents."""

import contextlib
import hashlib
import json
from collections.abc import Collection

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server import access as limits
from nanovllm.server.access import ANY, OPEN_FOLDERS, OPEN_PATHS, Access, host_name, is_same_site
from nanovllm.server.admission import current_key
from nanovllm.server.errors import APIError

# The time to parse a number grows with the square of its digits. No field needs more than 64 bits.
MAX_DIGITS = 100
# A refusal names the one of these fields that takes most of the body.
LARGE_FIELDS = "messages", "prompt", "tokens", "logit_bias", "chat_template_kwargs", "metadata"
Fields = msgspec.defstruct("Fields", [(name, msgspec.Raw, msgspec.Raw()) for name in LARGE_FIELDS])
DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"0" * 9)


def protect(app: Starlette, access: Access) -> None:
    """Put the middleware in front of an application that has all its routes. Starlette asks
    the middleware that was added last first, so CORS comes before `Guard`."""
    posts = [r.path for r in app.routes if isinstance(r, Route) and "POST" in (r.methods or ())]
    app.add_middleware(Guard, access=access, paths=frozenset(posts))
    if access.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.allowed_origins,
            allow_methods=access.allowed_methods,
            allow_headers=access.allowed_headers,
            allow_credentials=access.allow_credentials,
        )


def is_link(scope: Scope, headers: Headers) -> bool:
    """Whether a user follows a link to one of the pages that need no key."""
    document = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == (
        "navigate",
        "document",
    )
    return document and scope["method"] == "GET" and scope["path"] in OPEN_PATHS


class Guard:
    """Refuses requests by their headers and by their body, before the application sees them.

    - Those that a browser sends for a foreign web page: under a foreign host name (DNS rebinding),
      or with a foreign origin. Programs other than browsers send no Origin and no Sec-Fetch-Site.
    - Those without one of the keys, except for `OPEN_PATHS` and `OPEN_FOLDERS`. Which key a request
      has is noted in `current_key`, for `Admission`.
    - Those whose body is too large, or would take long to parse, or for which all bodies together
      are too large. Only the bodies of POST requests to `paths` are read; the application does not
      use others.

    Args:
        app: the application behind this.
        access: the names, origins and keys that may be used.
        paths: the routes that take a body.
    """

    def __init__(self, app: ASGIApp, access: Access, paths: Collection[str] = ()) -> None:
        self.app = app
        self.access = access
        self.paths = paths
        # Digests, so that the time of a search tells nothing of a key.
        self._keys = {hashlib.sha256(key.encode()).digest() for key in access.api_keys}
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 400, 401, 403, 413 or 503, or pass the request on with its body."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        refusal = self._check_origin(scope) or self._check_key(scope)
        if refusal is None and not (scope["method"] == "POST" and scope["path"] in self.paths):
            return await self.app(scope, receive, send)
        unread: list[Message] = []

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        chunks: list[bytes] = []
        try:
            await self._read(scope, receive, chunks, refusal)
            body = b"".join(chunks)
            chunks[:] = [body]  # `finally` counts what is in `chunks`
            check_contents(body)
            unread.append({"type": "http.request", "body": body, "more_body": False})
            await self.app(scope, receive_again, send)
        except APIError as error:
            await error.response()(scope, receive, send)
        except ClientDisconnect:
            pass  # the client has gone, or uvicorn has answered broken HTTP
        finally:
            self._num_held -= sum(map(len, chunks))

    def _check_origin(self, scope: Scope) -> APIError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        origin = headers.get("origin")
        site = headers.get("sec-fetch-site", "none")
        # Without any host, as HTTP/1.0 allows, the request is a simple health check: browsers
        # always send one.
        if {"host", "origin", "sec-fetch-site"} & set(
            headers.keys()
        ) and not self.access.knows_host(host):
            name = host_name(host) or "NAME"
            message = (
                f"""the Host header {host!r} is not allowed: see --allowed-hosts '["{name}"]'"""
            )
            return APIError(403, message, code="host_not_allowed")
        if {ANY, origin} & {*self.access.allowed_origins}:
            return None
        if origin is not None and not is_same_site(origin, host):
            message = (
                f"pages from {origin} are not allowed to use this server: "
                f"""allow them with --allowed-origins '["{origin}"]'"""
            )
        elif site in ("none", "same-origin") or is_link(scope, headers):
            return None
        else:
            message = (
                f"a page of another site (Sec-Fetch-Site: {site}) is not allowed to use this "
                "server: see --allowed-origins"
            )
        return APIError(403, message, code="origin_not_allowed")

    def _check_key(self, scope: Scope) -> APIError | None:
        if not self._keys or scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_FOLDERS):
            return None
        given = Headers(scope=scope).getlist("authorization")
        if len(given) > 1:
            message = f"the request has {len(given)} Authorization headers: send one"
            return APIError(400, message, code="invalid_api_key")
        scheme, _, key = "".join(given).partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        if scheme.lower() != "bearer" or digest not in self._keys:
            message = "a valid API key is required: send the header 'Authorization: Bearer <key>'"
            return APIError(
                401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        current_key.set(digest)  # for this request's task alone
        return None

    async def _read(
        self, scope: Scope, receive: Receive, chunks: list[bytes], refusal: APIError | None
    ) -> None:
        """Read a body to its end, into `chunks`, which count as held from now on. Drop the
        body of a refused request: most clients listen only after they have sent everything, and
        would lose the answer if the connection closed with data unread. The deadline for a body
        closes connections that never stop sending.

        Raises:
            APIError: the request is refused already, or the body is too large, or all bodies
                together are.
            ClientDisconnect: the client has gone.
        """
        size = 0
        async for chunk in Request(scope, receive).stream():
            size += len(chunk)
            if refusal is None:
                chunks.append(chunk)
                self._num_held += len(chunk)
                if size > limits.MAX_BODY_BYTES:
                    refusal = APIError(
                        413,
                        f"the body exceeds {limits.MAX_BODY_BYTES} bytes",
                        code="request_too_large",
                    )
                elif self._num_held > limits.MAX_HELD_BYTES:
                    refusal = APIError(
                        503,
                        "the bodies of all requests at this moment have over "
                        f"{limits.MAX_HELD_BYTES} bytes",
                        code="server_overloaded",
                        headers={"Retry-After": "1"},
                    )
            if refusal is not None:
                self._num_held -= sum(map(len, chunks))
                chunks.clear()
        if refusal is not None:
            raise refusal


def check_contents(body: bytes) -> None:
    """Refuse a JSON body that would take long to parse: a parser needs longer for a megabyte of
    empty lists than for a megabyte of text. Parser and validation hold the interpreter lock from
    beginning to end, so a thread would not keep the event loop free. Counting what is in the body
    takes milliseconds.

    Raises:
        APIError: names the limit, and the field that takes most of the body.
    """
    if len(body) <= limits.MAX_NODES:
        return
    if not json.detect_encoding(body).startswith("utf-8"):
        raise APIError(400, "the body must be JSON in UTF-8")
    # Without escaped backslashes and quotes, each quote begins or ends a string.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_nodes = plain.count(b'"') // 2
    if num_nodes <= limits.MAX_NODES:
        plain = b"".join(plain.split(b'"')[::2])  # what is outside of strings
        num_nodes += plain.count(b"[") + plain.count(b"{")
    if num_nodes > limits.MAX_NODES:
        limit = f"at most {limits.MAX_NODES} strings, lists and objects"
    elif plain.count(b",") > limits.MAX_VALUES:
        limit = f"at most {limits.MAX_VALUES} values"
    elif b"0" * (MAX_DIGITS + 1) in plain.translate(DIGITS_TO_ZERO):
        limit = f"numbers of at most {MAX_DIGITS} digits"
    else:
        return
    largest = None
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        fields = msgspec.json.decode(body, type=Fields)
        sizes = {name: len(memoryview(getattr(fields, name))) for name in LARGE_FIELDS}
        largest = next((name for name, size in sizes.items() if size > len(body) / 2), None)
    raise APIError(
        400,
        f"the body must have {limit}" + (f"; {largest} is too large" if largest else ""),
        largest,
    )
