"""Engine processes that go wrong, to be started in place of `run_engine`."""

from __future__ import annotations

from typing import Any

from nanovllm.engine_process import run_engine

REFUSED_PROMPT = [5, 5, 5]
FATAL_PROMPT = [6, 6, 6]


def run_faulty_engine(*arguments: Any) -> None:
    """An engine that refuses one prompt and that another one breaks."""
    from nanovllm.engine import EngineCore

    add_request, step = EngineCore.add_request, EngineCore.step

    def faulty_add(core: EngineCore, request: Any) -> None:
        if request.prompt_token_ids == REFUSED_PROMPT:
            raise ValueError("this prompt is refused")
        add_request(core, request)

    def faulty_step(core: EngineCore) -> Any:
        if any(r.token_ids[:3] == FATAL_PROMPT for r in core.scheduler.requests.values()):
            raise RuntimeError("this prompt is fatal")
        return step(core)

    EngineCore.add_request, EngineCore.step = faulty_add, faulty_step  # type: ignore[method-assign]
    run_engine(*arguments)
