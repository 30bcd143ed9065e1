"""Before a request reaches the application: may this client ask, and is the body of a bearable size?"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server.errors import ErrorResponse

MAX_BODY_BYTES = 10 * 2**20
# So much of a body that was refused is read all the same: most clients listen only after they have sent everything.
MAX_DISCARDED_BYTES = 20 * MAX_BODY_BYTES
OPEN_PATHS = frozenset(("/", "/health", "/version", "/metrics", "/docs", "/openapi.json"))
OPEN_FOLDER = "/web/"  # the page's files: it asks for the key itself


class APIKeyMiddleware:
    """Lets only those in who bring one of the keys; what is not in `OPEN_PATHS` or `OPEN_FOLDER` is protected.

    Args:
        app: the application behind this.
        keys: the keys; none means that everybody may come in.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on."""
        path = scope.get("path", "")
        is_open = scope["type"] != "http" or path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
        if is_open or self._is_known(scope):
            return await self.app(scope, receive, send)
        refusal = ErrorResponse(
            401,
            "a valid API key is needed: send the header 'Authorization: Bearer <key>'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        if not self._digests:
            return True
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # All keys are compared, each in constant time: the time it takes says nothing about them.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


class BodyLimitMiddleware:
    """Reads the body before the application does, and refuses it as soon as it is too large, announced or not.

    Args:
        app: the application behind this.
        limit: the largest body in bytes.
    """

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY_BYTES) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413, or pass the request on with its body."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"")
        if announced.isdigit() and int(announced) > self.limit:
            return await self._refuse(receive, send)
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.limit:
                return await self._refuse(receive, send)
        unread: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        await self.app(scope, receive_again, send)

    async def _refuse(self, receive: Receive, send: Send) -> None:
        message = f"the body is larger than the limit of {self.limit} bytes"
        refusal = ErrorResponse(413, message, code="request_too_large", headers={"Connection": "close"})
        await send({"type": "http.response.start", "status": 413, "headers": refusal.raw_headers})
        await send({"type": "http.response.body", "body": refusal.body, "more_body": True})
        # The answer is on its way. Closing now, with data unread, would make the client's system throw it away.
        discarded = 0
        while discarded < MAX_DISCARDED_BYTES:
            received = await receive()
            if received["type"] == "http.disconnect" or not received.get("more_body", False):
                break
            discarded += len(received.get("body", b""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
