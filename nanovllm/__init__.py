"""nanovllm: a course on LLM inference engines, and the engine that its lectures add up to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.data.sampling_params import SamplingParams
    from nanovllm.engine.llm import LLM

# At the end of a parallel loop, GNU OpenMP's threads spin while they wait for each other, then sleep. If another process keeps
# a core busy, long spinning takes the time that the late thread needs, and a step takes up to ten times as long. If the spin
# is too short, every loop begins by waking sleeping threads, which costs one stream a third of its speed. 5000 rounds (about
# 0.2 ms) outlast the gaps between loops and little else. OpenMP reads this when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Imported on first use: the server's front end needs no torch, and torch takes seconds to import.
    if name == "LLM":
        from nanovllm.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from nanovllm.data.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
