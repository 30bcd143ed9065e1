"""Puts the front end of a server together: the engine's process, and the readers of its trace.
Imports no torch."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import load
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.engine.client import EngineClient
    from nanovllm.trace.stream import RequestTexts, StepBroadcast


def create_client(config: EngineConfig, folder: pathlib.Path) -> EngineClient:
    """Start the process of an engine.

    Args:
        folder: the checkpoint.
    """
    create: type[EngineClient] = load("nanovllm.engine.client:EngineClient", "a server")
    with_folder = dataclasses.replace(
        config, model=str(folder), served_model_name=config.model_names
    )
    return create(with_folder, {})


def create_texts(tokenizer: Tokenizer) -> RequestTexts:
    """Create what adds prompts and outputs to the lines of a trace."""
    create: type[RequestTexts] = load("nanovllm.trace.stream:RequestTexts", "show_text")
    return create(tokenizer)


def create_broadcasts(
    settings: Sequence[TraceSettings],
    order: Callable[[int, Literal["watch", "unwatch"]], None],
    request_texts: RequestTexts | None,
) -> list[StepBroadcast]:
    """Create the broadcast of each engine's steps.

    Args:
        settings: of each engine's trace.
        order: gives an engine, by its number, an order.
        request_texts: adds prompts and outputs, if readers may see them.

    Raises:
        MissingPartError: nothing can be watched.
    """
    create: type[StepBroadcast] = load("nanovllm.trace.stream:StepBroadcast", "watching the engine")
    return [create(each, partial(order, i), request_texts) for i, each in enumerate(settings)]
