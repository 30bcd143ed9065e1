"""A client's request in the router, and the requests that it becomes for a prefill and a decode
server."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec
from starlette.requests import Request

from nanovllm.data.json import JsonObject
from nanovllm.server.errors import APIError

# Headers that concern one connection (RFC 9110, 7.6.1), or that each server writes itself.
OF_CONNECTION = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    b" transfer-encoding upgrade date server".split()
)
# Request headers that the router does not forward: it writes them itself, or has already checked
# them (the web page from which the request comes).
NOT_PASSED_ON = OF_CONNECTION.union(b"host content-length expect origin sec-fetch-site".split())
# Fields to remove for a prefill, which samples one token. None of them may end the request: a
# prefill server holds the KV only of a complete prompt whose output continues elsewhere.
NOT_FOR_PREFILL = frozenset(
    [
        "stream_options",
        "min_tokens",
        "logprobs",
        "top_logprobs",
        "stop",
        "stop_token_ids",
        "max_completion_tokens",
    ]
)


@dataclass
class Call:
    """A request to a server.

    Attributes:
        path: the path with the query string.
        headers: without Host and Content-Length.
        body: the content as a JSON object; empty if it is not one, in which case the server
            rejects it.
    """

    method: str
    path: bytes
    headers: list[tuple[bytes, bytes]]
    content: bytes = b""
    body: JsonObject = field(default_factory=dict)

    @classmethod
    async def from_request(cls, request: Request, parse: bool) -> Call:
        """Read a client's request, without the headers that the router does not forward.

        Args:
            parse: whether to parse the body.

        Raises:
            APIError: the body is not valid JSON.
        """
        scope = request.scope
        content = await request.body()
        path = b"?".join(filter(None, (scope["raw_path"], scope["query_string"])))
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_PASSED_ON]
        try:
            body = msgspec.json.decode(content) if parse else {}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise APIError(400, f"the body is not valid JSON in UTF-8: {error}") from error
        return cls(request.method, path, headers, content, body if isinstance(body, dict) else {})

    @property
    def is_one_sequence(self) -> bool:
        """True if a decode server can continue with its KV: it has one prompt, one output, and no
        log-probabilities of the prompt, which only the server that computes the prompt knows."""
        prompt = self.body.get("prompt")
        several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
        wants_prompt = self.body.get("echo") or self.body.get("prompt_logprobs") is not None
        has_prompt = bool(prompt or self.body.get("messages"))
        return has_prompt and not several and not wants_prompt and self.body.get("n") in (None, 1)

    def for_prefill(self) -> Call:
        """Return the request to a prefill server: sample one token, and hold the prompt's KV."""
        body = {name: value for name, value in self.body.items() if name not in NOT_FOR_PREFILL}
        body |= {
            "max_tokens": 1,
            "stream": False,
            "ignore_eos": True,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        # The router reads the answer.
        headers = [header for header in self.headers if header[0] != b"accept-encoding"]
        return replace(self, headers=headers, content=msgspec.json.encode(body))

    def with_transfer(self, params: JsonObject) -> Call:
        """Return the request to a decode server: with the parameters of a KV transfer, or, without
        parameters, the client's bytes as they are."""
        if not params:
            return self
        return replace(
            self, content=msgspec.json.encode(self.body | {"kv_transfer_params": params})
        )
