"""Starts an engine's process, and loads the tokenizer while that process loads the model."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.assembly.executor import read_model_config
from nanovllm.assembly.front_end import create_client
from nanovllm.checkpoint.hub import resolve_model
from nanovllm.data.config import EngineConfig
from nanovllm.data.trace_settings import TraceSettings
from nanovllm.engine.errors import EngineStartError
from nanovllm.engine.report_reader import ReportReader
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.engine.client import EngineClient


@dataclass(frozen=True)
class StartedEngine:
    """An engine's process that can take requests.

    Attributes:
        client: the process and its sockets.
        reports: what it reports.
        tokenizer: of its model.
        trace_settings: for each of the engines that data parallelism has, sizes and policies.
    """

    client: EngineClient
    reports: ReportReader
    tokenizer: Tokenizer
    trace_settings: list[TraceSettings]


async def start_engine(config: EngineConfig) -> StartedEngine:
    """Start an engine's process, and wait until it can take requests.

    Raises:
        ValueError: no such model (`ModelNotFoundError`), or settings that do not fit
            (`EngineStartError`).
        EngineDeadError: the process ended while it was starting.
    """
    # Downloaded here, where the user sees the progress and can interrupt it.
    stop = threading.Event()
    try:
        folder = await asyncio.to_thread(resolve_model, config.model, config.revision, stop)
    finally:  # Ctrl-C cancels this task, but not the thread
        stop.set()
    try:
        return await _start(config, folder)
    except ValueError as error:
        raise EngineStartError(str(error)) from error


async def _start(config: EngineConfig, folder: Path) -> StartedEngine:
    # Reject settings that do not fit here, and not after seconds in a process that imports torch
    # first.
    read_model_config(config, folder)
    client = create_client(config, folder)
    reports = ReportReader(client)
    # The tokenizer loads here while the other process imports torch and loads the weights.
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.of, config)
        ready, *_ = await reports.next()
    except BaseException:
        # Not awaited: after Ctrl-C, asyncio would cancel that, too, and leave the process alone.
        reports.close()
        client.shutdown(seconds=0)
        raise
    return StartedEngine(client, reports, tokenizer, ready.trace_settings)
