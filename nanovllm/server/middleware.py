"""Checks before a request reaches the application: its host and origin, its key, and the size of its body."""

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
from nanovllm.server.errors import APIError
from nanovllm.server.json_limits import check_contents
from nanovllm.server.shares import Share, current_share

# The server reads so much of a body that it has refused: most clients listen only after they have sent everything.
MAX_DISCARDED_BYTES = 20 * MAX_BODY_BYTES


def protect(app: Starlette, access: Access) -> None:
    """Put the middleware in front of an application that has all its routes. The last one that is added is asked first."""
    posts = [r.path for r in app.routes if isinstance(r, Route) and "POST" in (r.methods or ())]
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
    """Read the rest of a body and drop it. False if the client has gone, or uvicorn has answered broken HTTP."""
    discarded = 0
    while discarded < MAX_DISCARDED_BYTES:
        received = await receive()
        if received["type"] == "http.disconnect":
            return False
        if not received.get("more_body", False):
            break
        discarded += len(received.get("body", b""))
    return True


async def refuse(error: APIError, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request by its headers. Its body is read first: most clients listen only after they have sent everything, and
    would lose the answer if the connection closed with data unread."""
    if await discard_body(receive):
        await error.response()(scope, receive, send)


class OriginMiddleware:
    """Refuses the requests that a browser sends for a foreign web page: under a foreign host name (DNS rebinding), or with a
    foreign origin. Programs other than browsers send no Origin and no Sec-Fetch-Site.

    Args:
        app: the application behind this.
        access: the host names and origins that may be used.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403, or pass the request on. No route uses WebSocket."""
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            return await refuse(refusal, scope, receive, send)
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> APIError | None:
        headers = Headers(scope=scope)
        host, origin, site = headers.get("host", ""), headers.get("origin"), headers.get("sec-fetch-site", "none")
        # Without any host, as HTTP/1.0 allows, the request is a simple health check: browsers always send one.
        names_none = not {"host", "origin", "sec-fetch-site"} & set(headers.keys())
        if not names_none and not self.access.knows_host(host):
            name = host_name(host) or "NAME"
            message = f"""the Host header {host!r} does not name this server: see --allowed-hosts '["{name}"]'"""
            return APIError(403, message, code="host_not_allowed")
        if self.access.knows_origin(origin):
            return None
        if origin is not None and not is_same_site(origin, host):
            message = f"""pages of {origin} may not use this server: allow them with --allowed-origins '["{origin}"]'"""
        elif site in ("none", "same-origin") or is_link(scope, headers):
            return None
        else:
            message = f"a page of another site (Sec-Fetch-Site: {site}) may not use this server: see --allowed-origins"
        return APIError(403, message, code="origin_not_allowed")


def is_link(scope: Scope, headers: Headers) -> bool:
    """Whether a user follows a link to one of the pages that need no key."""
    document = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return document and scope["method"] == "GET" and scope["path"] in OPEN_PATHS


class APIKeyMiddleware:
    """Refuses requests without one of the keys, except those for `OPEN_PATHS` and `OPEN_FOLDER`.

    Args:
        app: the application behind this.
        keys: the keys; without any, every client may use the server. Of several, each has its share of the waiting places.
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
        index = self._index_of(given[0]) if len(given) == 1 else None
        if index is not None:
            if self._shares:
                current_share.set(self._shares[index])  # for this request's task alone
            return await self.app(scope, receive, send)
        if len(given) > 1:
            message = f"the request has {len(given)} Authorization headers: send one"
            refusal = APIError(400, message, code="invalid_api_key")
        else:
            message = "a valid API key is needed: send the header 'Authorization: Bearer <key>'"
            refusal = APIError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await refuse(refusal, scope, receive, send)

    def _index_of(self, header: bytes) -> int | None:
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # All keys are compared, each in constant time, so that the time does not depend on the keys.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None


class BodyLimitMiddleware:
    """Reads and checks the bodies of POST requests before the application does. It refuses a body as soon as it is too large,
    announced or not, or when all bodies together are, or when its contents would take long to parse. It reads no other bodies;
    the application does not use them.

    Args:
        app: the application behind this.
        paths: the routes that take a body.
        limit: the largest body in bytes.
        held_limit: the most bytes of all unanswered requests together.
    """

    def __init__(
        self, app: ASGIApp, paths: Collection[str], limit: int = MAX_BODY_BYTES, held_limit: int = MAX_HELD_BYTES
    ) -> None:
        self.app, self.paths, self.limit, self.held_limit = app, paths, limit, held_limit
        self._num_held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 400, 413 or 503, or pass the request on with its body."""
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
            check_contents(body)
            await self.app(scope, receive_again, send)
        except APIError as error:
            await error.response()(scope, receive, send)
        finally:
            self._num_held -= len(body)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """A body, which counts as held from now on. None: the client has gone.

        Raises:
            APIError: the body is too large, or all bodies together are.
        """
        too_large = APIError(413, f"the body is larger than the limit of {self.limit} bytes", code="request_too_large")
        announced = dict(scope["headers"]).get(b"content-length", b"")
        if announced.isdigit() and int(announced) > self.limit:
            raise too_large
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
                    raise too_large
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
        error.headers = {"Connection": "close"} | dict(error.headers or {})
        refusal = error.response()
        await send({"type": "http.response.start", "status": refusal.status_code, "headers": refusal.raw_headers})
        await send({"type": "http.response.body", "body": refusal.body, "more_body": True})
        # The answer is sent. If the server closed now, with data unread, the client's system would drop the answer.
        await discard_body(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
