"""Engine processes that go wrong: `FAULTY` and `SLOW` take the place of `EngineClient.program`."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

from nanovllm.engine import client

REFUSED_PROMPT = [5, 5, 5]
FATAL_PROMPT = [6, 6, 6]
HANGING_PROMPT = [7, 7, 7]
# A request that ends only when it is aborted, however late that is: after NUM_PATIENT_TOKENS the
# engine computes no more steps.
PATIENT_PROMPT = [8, 8, 8]
NUM_PATIENT_TOKENS = 10
LOAD_SECONDS = 3
FAULTY, SLOW = (
    "from tests import engine_faults; from nanovllm.engine import client; "
    f"engine_faults.{change}(); client.main()"
    for change in ("make_faulty", "make_slow")
)


def make_faulty() -> None:
    """Let the engine of this process refuse one prompt, break with another one, hang with a third
    one, and wait with a fourth one."""
    from nanovllm.assembly.engine import Engine

    add_request, step = Engine.add_request, Engine.step

    def faulty_add(core: Engine, request: Any) -> None:
        if request.prompt_token_ids == REFUSED_PROMPT:
            raise ValueError("this prompt is refused")
        add_request(core, request)

    def faulty_step(core: Engine) -> Any:
        beginnings = [request.token_ids[:3] for request in core.scheduler.queues.requests.values()]
        if FATAL_PROMPT in beginnings:
            raise RuntimeError("this prompt is fatal")
        if HANGING_PROMPT in beginnings:
            threading.Event().wait()
        patient = [
            request
            for request in core.scheduler.queues.requests.values()
            if request.token_ids[:3] == PATIENT_PROMPT
        ]
        if any(
            len(request.token_ids) >= len(PATIENT_PROMPT) + NUM_PATIENT_TOKENS
            for request in patient
        ):
            time.sleep(0.001)
            return []
        return step(core)

    Engine.add_request, Engine.step = faulty_add, faulty_step  # type: ignore[method-assign]


def make_slow() -> None:
    """Let the engine of this process keep the interpreter to itself while it loads: no other thread
    runs meanwhile."""
    run_engine = client.run_engine

    def run_slowly(*arguments: Any) -> None:
        ctypes.PyDLL(None).sleep(LOAD_SECONDS)
        run_engine(*arguments)

    client.run_engine = run_slowly
