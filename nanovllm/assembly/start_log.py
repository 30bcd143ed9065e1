"""Lines in the log about an engine that has started: its model, its device, and the size of its KV
cache."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nanovllm.data.resolved_config import ResolvedConfig
from nanovllm.executor.base import Executor
from nanovllm.models.config import ModelConfig

if TYPE_CHECKING:
    from nanovllm.checkpoint.quantization import QuantizationConfig

logger = logging.getLogger("nanovllm.engine")


def log_start(config: ResolvedConfig, model: ModelConfig, executor: Executor) -> None:
    """Log the engine's model, device and KV cache, if the level of the logger is INFO or lower."""
    if logger.isEnabledFor(logging.INFO):
        for line in describe(config, model, executor):
            logger.info(line)


def describe(config: ResolvedConfig, model: ModelConfig, executor: Executor) -> list[str]:
    """Return the lines about an engine."""
    given = config.given
    num_blocks = config.num_kv_blocks
    rank: dict[str, str] = executor.collective_rpc("describe")[0]
    name = f"Engine {given.data_parallel_rank or 0:03d}"
    ranks = f" on {given.world_size} ranks" if given.world_size > 1 else ""
    num_tokens = num_blocks * given.block_size
    size = in_mebibytes(num_blocks * executor.bytes_per_block) + (" per rank" if ranks else "")
    context = f"context length {config.max_model_len} tokens"
    if config.max_request_tokens < config.max_model_len:
        context += f", of which the KV cache has room for {config.max_request_tokens}"
    return [
        f"{name}: model {given.model_names[0]} ({model.architecture}), "
        f"dtype {rank['dtype']}, quantization {quantization_name(model.quantization)}, "
        f"device {rank['device']}{ranks}, attention backend {rank['attention_backend']}",
        f"{name}: KV cache of {num_blocks} blocks of {given.block_size} tokens "
        f"({num_tokens} tokens, {size}, {rank['kv_dtype']}), {context}",
    ]


def quantization_name(quantization: QuantizationConfig | None) -> str:
    """Return how the weights are quantized, from a `QuantizationConfig` or None."""
    if quantization is None:
        return "none"
    name = quantization.method + " (dequantized)" * quantization.is_dequantized
    return name + " with a head of 8 bits" * quantization.head


def in_mebibytes(num_bytes: int) -> str:
    """Return a size as text, such as "512.0 MiB" or "1.5 GiB"."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
