"""Paged attention on the CPU: compiled loops that read the pages in place."""

from __future__ import annotations

from nanovllm import ops
from nanovllm.attention.torch import TorchBackend


class CpuBackend(TorchBackend):
    """Gathers nothing: a decode step reads every cached key and value once. Without a C++ compiler, the operators fall
    back to plain torch."""

    name = "cpu"
    operators = ops
