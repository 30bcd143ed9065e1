"""Before a request reaches the application: which page sends it, who sends it, and how large may its body be?"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server.access import (
    MAX_BODY_BYTES,
    MAX_HELD_BYTES,
    OPEN_FOLDER,
    OPEN_PATHS,
    Access,
    host_name,
    is_same_site,
)
from nanovllm.server.errors import APIError, ErrorResponse
from nanovllm.server.json_limits import JSONLimitMiddleware
from nanovllm.server.shares import Share, current_share

# So much of a body that was refused is read all the same: most clients listen only after they have sent everything.
MAX_DISCARDED_BYTES = 20 * MAX_BODY_BYTES


def protect(app: Starlette, access: Access) -> None:
    """Put the middleware in front of an application that has all its routes. The last one added is asked first."""
    posts = [r.path for r in app.routes if isinstance(r, Route) and "POST" in (r.methods or ())]
    app.add_middleware(JSONLimitMiddleware)
    app.add_middleware(BodyLimitMiddleware, paths=frozenset(posts))
    app.add_middleware(APIKeyMiddleware, keys=access.api_keys)
    app.add_middleware(OriginMiddleware, access=access)
    if access.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.allowed_origins,
            allow_credentials=access.allow_credentials,
            allow_methods=access.allowed_methods,
            allow_headers=access.allowed_headers,
        )


async def discard_body(receive: Receive) -> bool:
    """Read what is left of a body, and keep nothing of it. False if the client has gone, or uvicorn has answered broken HTTP."""
    discarded = 0
    while discarded < MAX_DISCARDED_BYTES:
        received = await receive()
        if received["type"] == "http.disconnect":
            return False
        if not received.get("more_body", False):
            break
        discarded += len(received.get("body", b""))
    return True


async def refuse(response: ErrorResponse, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request by its headers. Its body is read first: most clients listen only after they have sent everything, and
    would lose the answer if the connection closed with data unread."""
    if await discard_body(receive):
        await response(scope, receive, send)


class OriginMiddleware:
    """Refuses what a browser sends for a web page from elsewhere: under a foreign host name (DNS rebinding), or with a foreign
    origin. Programs other than browsers send no Origin and no Sec-Fetch-Site.

    Args:
        app: the application behind this.
        access: the host names and origins that are let in.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403, or pass the request on. No route speaks WebSocket."""
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            return await refuse(refusal, scope, receive, send)
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ErrorResponse | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.access.knows_host(host) and not is_plain_http_1_0(headers):
            name = host_name(host) or "NAME"
            message = f"""the Host header {host!r} does not name this server: see --allowed-hosts '["{name}"]'"""
            return ErrorResponse(403, message, code="host_not_allowed")
        if self.access.knows_origin(origin):
            return None
        if origin is not None and not is_same_site(origin, host):
            message = f"""pages of {origin} may not use this server: allow them with --allowed-origins '["{origin}"]'"""
            return ErrorResponse(403, message, code="origin_not_allowed")
        site = headers.get("sec-fetch-site", "none")
        if site in ("none", "same-origin") or is_link(scope, headers):
            return None
        message = f"a page of another site (Sec-Fetch-Site: {site}) may not use this server: see --allowed-origins"
        return ErrorResponse(403, message, code="origin_not_allowed")


def is_plain_http_1_0(headers: Headers) -> bool:
    """Whether a request names no host, as HTTP/1.0 allows and simple health checks do. No browser sends one."""
    return not {"host", "origin", "sec-fetch-site"} & set(headers.keys())


def is_link(scope: Scope, headers: Headers) -> bool:
    """Whether a user follows a link to one of the pages that need no key."""
    document = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return document and scope["method"] == "GET" and scope["path"] in OPEN_PATHS


class APIKeyMiddleware:
    """Lets only those in who bring one of the keys; what is not in `OPEN_PATHS` or `OPEN_FOLDER` is protected.

    Args:
        app: the application behind this.
        keys: the keys; none means that everybody may come in. Of several, each has its share of the waiting places.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._shares = [Share(len(keys)) for _ in keys] if len(keys) > 1 else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 400 or 401, or pass the request on."""
        path = scope.get("path", "")
        is_open = scope["type"] != "http" or path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
        if is_open or not self._digests:
            return await self.app(scope, receive, send)
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) > 1:
            message = f"the request has {len(given)} Authorization headers: send one"
            refusal = ErrorResponse(400, message, code="invalid_api_key")
            return await refuse(refusal, scope, receive, send)
        index = self._index_of(given[0] if given else b"")
        if index is None:
            refusal = ErrorResponse(
                401,
                "a valid API key is needed: send the header 'Authorization: Bearer <key>'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            return await refuse(refusal, scope, receive, send)
        if self._shares:
            current_share.set(self._shares[index])  # for this request's task alone
        await self.app(scope, receive, send)

    def _index_of(self, header: bytes) -> int | None:
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # All keys are compared, each in constant time: the time it takes says nothing about them.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None


class BodyLimitMiddleware:
    """Reads the bodies of POST requests before the application does. It refuses one as soon as it is too large, announced or not,
    or when the bodies that it holds for all requests are. It reads no other bodies, and the application has no use for them.

    Args:
        app: the application behind this.
        paths: the routes that take a body.
        limit: the largest body in bytes.
        held_limit: the most bytes of all requests that have not been answered.
    """

    def __init__(
        self, app: ASGIApp, paths: Collection[str], limit: int = MAX_BODY_BYTES, held_limit: int = MAX_HELD_BYTES
    ) -> None:
        self.app, self.paths = app, paths
        self.limit, self.held_limit = limit, held_limit
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413 or 503, or pass the request on with its body."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self.paths:
            return await self.app(scope, receive, send)
        try:
            body = await self._read(scope, receive)
        except APIError as error:
            return await self._refuse(error, receive, send)
        if body is None:
            return
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        try:
            await self.app(scope, receive_again, send)
        finally:
            self._num_held -= len(body)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """A body, which counts as held from now on. None: the client has gone.

        Raises:
            APIError: the body is too large, or there is no room for it.
        """
        too_large = f"the body is larger than the limit of {self.limit} bytes"
        announced = dict(scope["headers"]).get(b"content-length", b"")
        if announced.isdigit() and int(announced) > self.limit:
            raise APIError(413, too_large, code="request_too_large")
        chunks: list[bytes] = []
        size, is_whole = 0, False
        try:
            while not is_whole:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                self._num_held += len(chunks[-1])
                if size > self.limit:
                    raise APIError(413, too_large, code="request_too_large")
                if self._num_held > self.held_limit:
                    full = f"the bodies of all requests at this moment have over {self.held_limit} bytes"
                    raise APIError(503, full, code="server_overloaded", headers={"Retry-After": "1"})
                is_whole = not message.get("more_body", False)
            return b"".join(chunks)
        finally:
            if not is_whole:
                chunks.clear()  # the error's traceback refers to them
                self._num_held -= size

    async def _refuse(self, error: APIError, receive: Receive, send: Send) -> None:
        headers = {"Connection": "close"} | dict(error.headers or {})
        refusal = ErrorResponse(error.status_code, error.detail, error.param, error.code, headers)
        await send({"type": "http.response.start", "status": refusal.status_code, "headers": refusal.raw_headers})
        await send({"type": "http.response.body", "body": refusal.body, "more_body": True})
        # The answer is on its way. Closing now, with data unread, would make the client's system throw it away.
        await discard_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
