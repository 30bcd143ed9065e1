"""nanovllm: a course on LLM inference engines, and the engine that its lectures add up to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.data.sampling_params import SamplingParams
    from nanovllm.engine.llm import LLM

# Threads that wait for each other at the end of a parallel loop spin first, then sleep. On a machine that is busy with
# something else long spinning takes the very time that the late thread needs, and a step takes up to ten times as
# long; with too short a spin every loop of a step begins by waking somebody, which costs a third of the speed of one
# stream. 5000 rounds, some 0.2 ms, outlast the gaps between loops and little else. GNU OpenMP reads this when torch is
# first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Imported on first use: the server's front end needs no torch, and torch takes seconds to import.
    if name == "LLM":
        from nanovllm.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from nanovllm.data.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
