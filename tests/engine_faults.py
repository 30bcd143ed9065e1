"""Engine processes that go wrong, to be started in place of `run_engine`."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from nanovllm.engine.process import run_engine

REFUSED_PROMPT = [5, 5, 5]
FATAL_PROMPT = [6, 6, 6]
HANGING_PROMPT = [7, 7, 7]
LOAD_SECONDS = 3


def run_faulty_engine(*arguments: Any) -> None:
    """An engine that refuses one prompt, that another one breaks, and that a third one hangs."""
    from nanovllm.engine.core import EngineCore

    add_request, step = EngineCore.add_request, EngineCore.step

    def faulty_add(core: EngineCore, request: Any) -> None:
        if request.prompt_token_ids == REFUSED_PROMPT:
            raise ValueError("this prompt is refused")
        add_request(core, request)

    def faulty_step(core: EngineCore) -> Any:
        beginnings = [request.token_ids[:3] for request in core.scheduler.requests.values()]
        if FATAL_PROMPT in beginnings:
            raise RuntimeError("this prompt is fatal")
        if HANGING_PROMPT in beginnings:
            threading.Event().wait()
        return step(core)

    EngineCore.add_request, EngineCore.step = faulty_add, faulty_step  # type: ignore[method-assign]
    run_engine(*arguments)


def run_slow_engine(*arguments: Any) -> None:
    """An engine that keeps the interpreter to itself while it loads: no other thread of its process runs meanwhile."""
    ctypes.PyDLL(None).sleep(LOAD_SECONDS)
    run_engine(*arguments)
