"""nanovllm: a course on LLM inference engines, and the engine that its lectures add up to."""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.data.config import EngineConfig
    from nanovllm.data.sampling_params import SamplingParams
    from nanovllm.engine.async_engine import AsyncEngine
    from nanovllm.engine.llm import LLM

# Our kernels have threads of their own (ops/cpu_threads.h); torch's, which OpenMP starts for the
# few operators that it computes in a step, would spin after each of them, on the processors that
# ours need. OpenMP reads this when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "EngineConfig", "SamplingParams", "__version__"]

# Imported on first use: the server's front end needs no torch, and torch takes seconds to import.
_MODULES = {
    "AsyncEngine": "nanovllm.engine.async_engine",
    "EngineConfig": "nanovllm.data.config",
    "LLM": "nanovllm.engine.llm",
    "SamplingParams": "nanovllm.data.sampling_params",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
