"""Parts of a server besides text generation: tool calls, KV transfer and the page. A door passes
those that it has; see `nanovllm.cli.doors`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import Response

from nanovllm.data.json import JsonObject
from nanovllm.data.sampling_params import SamplingParams
from nanovllm.engine.async_engine import AsyncEngine
from nanovllm.server.errors import APIError
from nanovllm.server.protocol import ChatBody, ChatCompletionRequest
from nanovllm.server.responses import TextReader

if TYPE_CHECKING:
    from nanovllm.text.forms import Forms


class Tools:
    """Tool calls. This base class has none: it rejects requests that need them.

    Args:
        reason: why there are none, for clients.
    """

    def __init__(self, reason: str = "this server has no tool calls") -> None:
        self.reason = reason

    def described(
        self, messages: list[JsonObject], body: ChatBody, templates: dict[str, str]
    ) -> JsonObject:
        """Tell the model of the tools, of its own calls, and of their results; returns arguments
        for `Tokenizer.apply_chat_template`.

        Args:
            messages: as templates expect them.
            templates: the model's chat templates.

        Raises:
            ValueError: there are no tools, or a result belongs to no call.
        """
        raise ValueError(self.reason)

    def constrained(
        self, params: SamplingParams, body: ChatCompletionRequest, forms: Forms | None
    ) -> SamplingParams:
        """Return sampling parameters that hold an answer to the form of calls, and to
        `tool_choice`.

        Raises:
            ValueError: there are no tools, or the request is wrong.
        """
        raise ValueError(self.reason)

    def create_reader(self, is_named: bool) -> TextReader:
        """Create what divides one answer into text and calls.

        Args:
            is_named: the client has named the function.
        """
        raise ValueError(self.reason)


def check_no_transfer(kv_transfer_params: object, kv_role: str) -> None:
    """Reject the KV transfer parameters of a request."""
    raise ValueError("kv_transfer_params: this server has no KV transfer")


def add_no_page(
    app: FastAPI, engine: AsyncEngine, demo: bool, reason: str = "this server has no page"
) -> None:
    """Answer with the reason where the page and its trace would be."""

    @app.get("/", include_in_schema=False)
    @app.get("/trace", include_in_schema=False)
    async def missing() -> Response:
        raise APIError(501, reason)


@dataclass(frozen=True)
class ServerParts:
    """The parts of a server. By default, there are none.

    Attributes:
        tools: tool calls.
        check_transfer: checks the KV transfer parameters of a request for an engine of this
            `kv_role`; raises ValueError.
        add_page: adds the page that shows the engine at work, and the trace that it draws. If its
            last argument is true, the page sends bursts of requests as soon as it is opened.
    """

    tools: Tools = field(default_factory=Tools)
    check_transfer: Callable[[object, str], None] = check_no_transfer
    add_page: Callable[[FastAPI, AsyncEngine, bool], None] = add_no_page


NO_PARTS = ServerParts()
