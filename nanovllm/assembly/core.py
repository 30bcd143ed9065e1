"""Chooses between one engine and several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanovllm.assembly.engine import Engine
from nanovllm.assembly.start_log import log_start
from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import load

if TYPE_CHECKING:
    from nanovllm.engine.group import DataParallelCore
    from nanovllm.trace.trace import Trace


def create_core(
    config: EngineConfig, trace: Trace | None = None, blocking: bool = True
) -> Engine | DataParallelCore:
    """Create the engine for these settings: an `Engine` or, with `data_parallel_size`, several
    engines with the same interface.

    Args:
        blocking: see `DataParallelCore`.

    Raises:
        ValueError: settings that do not fit.
        ExecutorError: a process could not start.
    """
    if config.is_divided:
        create: type[DataParallelCore] = load(
            "nanovllm.engine.group:DataParallelCore", "data_parallel_size"
        )
        return create(config, trace, blocking)
    engine = Engine(config, trace)
    log_start(engine.resolved, engine.model_config, engine.executor)
    return engine


def create_trace() -> Trace:
    """Create an empty trace, for the steps of an engine."""
    create: type[Trace] = load("nanovllm.trace.trace:Trace", "a trace")
    return create()
