"""A client's request on its way through the router, and its bodies for a prefill server and for a decode server."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request

from nanovllm.router.backends import Headers

# These concern one connection (RFC 9110, 7.6.1), are written anew, or say from which web page a request comes, which the router
# has checked.
NOT_PASSED_ON = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade "
    b"host content-length expect date server origin sec-fetch-site".split()
)
# What the one token of a prefill does without. Nothing may end it early: only a prompt that has been computed to its end, and
# whose answer goes on, is held for a decode server.
NOT_FOR_PREFILL = frozenset(
    ["stream_options", "min_tokens", "logprobs", "top_logprobs", "stop", "stop_token_ids", "max_completion_tokens"]
)


@dataclass
class Call:
    """A request on its way.

    Attributes:
        path: with its query.
        raw: its body.
        body: the same as an object; empty if it is none, about which a server knows best what to say.
    """

    method: str
    path: bytes
    headers: Headers
    raw: bytes
    body: dict[str, Any] = field(default_factory=dict)

    @classmethod
    async def from_request(cls, request: Request, parse: bool) -> Call:
        """What a client asks."""
        scope, raw = request.scope, await request.body()
        path = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            path += b"?" + scope["query_string"]
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_PASSED_ON]
        call = cls(request.method, path, headers, raw)
        if parse:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                body = msgspec.json.decode(raw)
                call.body = body if isinstance(body, dict) else {}
        return call

    @property
    def speaks_of_kv(self) -> bool:
        """Whether it says where KV comes from or goes to, which is not for clients to say."""
        body = self.body
        if not body:  # the servers' parser takes more than ours: NaN, UTF-16, half of a surrogate pair
            with contextlib.suppress(ValueError, RecursionError):
                body = json.loads(self.raw)
        return isinstance(body, dict) and body.get("kv_transfer_params") is not None

    @property
    def is_one_sequence(self) -> bool:
        """Whether its KV can be handed over: there is one prompt, one answer, and nobody asks what the model thought of the
        prompt, which only who computes it can tell."""
        prompt = self.body.get("prompt")
        several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
        wants_prompt = self.body.get("echo") or self.body.get("prompt_logprobs") is not None
        has_prompt = bool(prompt or self.body.get("messages"))
        return has_prompt and not several and not wants_prompt and self.body.get("n") in (None, 1)

    def for_prefill(self) -> bytes:
        """The body for a prefill server: one token, and hold what was computed."""
        body = {name: value for name, value in self.body.items() if name not in NOT_FOR_PREFILL}
        body |= {"max_tokens": 1, "stream": False, "ignore_eos": True}
        if "max_completion_tokens" in self.body:
            body["max_completion_tokens"] = 1
        body["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        return msgspec.json.encode(body)

    def with_transfer(self, params: dict[str, Any] | None) -> bytes:
        """The body for a decode server: as it came, or with what it has to know about the KV."""
        return self.raw if params is None else msgspec.json.encode(self.body | {"kv_transfer_params": params})
