"""Attention backends over a KV cache in 8 bits (`--kv-cache-dtype`), with a scale for each key and
value of a token and head.

New keys and values are quantized as they are written, and attention reads all of them from the
cache, those of its own chunk too. So a token's value is the same in one chunk or several, after a
prefix-cache hit, a preemption or a KV transfer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, cast

import torch

from nanovllm.attention.base import AttentionBackend
from nanovllm.attention.torch import TorchBackend
from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import MissingPartError, needed_for
from nanovllm.ops import quantized_cache

if TYPE_CHECKING:
    from nanovllm.attention.triton import TritonBackend

FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class QuantizedBackend(TorchBackend):
    """Writes, then attends, with the operators of a module, in a cache of the dtype `kv_dtype`
    whose rows have `scale_bytes` more."""

    scale_bytes = quantized_cache.SCALE_BYTES

    def __init__(self, backend: AttentionBackend, kv_dtype: torch.dtype) -> None:
        self.name = f"{backend.name}, quantized"
        self.kv_dtype = kv_dtype
        self.operators = quantized_cache
        self._compiled: dict[torch.dtype, tuple[int, int]] = {}
        if backend.name == "cpu":
            with contextlib.suppress(MissingPartError), needed_for("compiled operators"):
                import nanovllm.ops.native  # noqa: F401 (which the next module imports)
                from nanovllm.ops import native_quantized_cache

                self.operators = native_quantized_cache
                self._compiled = native_quantized_cache.compiled(kv_dtype)

    def compiled_functions(self, dtype: torch.dtype) -> tuple[int, int] | None:
        """See the base class."""
        return self._compiled.get(dtype)


def create(backend: AttentionBackend, config: EngineConfig, latent: bool) -> AttentionBackend:
    """The backend that computes what `backend` does over a cache in 8 bits.

    Args:
        config: its `kv_cache_dtype` is "int8" or "fp8" (e4m3), perhaps with what vLLM appends to
            it.
        latent: whether the model has latent attention.

    Raises:
        ValueError: the model has latent attention.
    """
    if latent:
        raise ValueError(
            "latent attention has no quantized KV cache: do not set kv_cache_dtype for this model"
        )
    kv_dtype = FORMATS[config.kv_cache_dtype.partition("_")[0]]
    if backend.name == "triton":
        from nanovllm.attention.triton_quantized import QuantizedTritonBackend

        return QuantizedTritonBackend(cast("TritonBackend", backend), kv_dtype)
    return QuantizedBackend(backend, kv_dtype)
