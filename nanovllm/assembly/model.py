"""Loads a model, ready to run: device, dtype, attention backend and weights."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from nanovllm.attention.backends import get_backend
from nanovllm.attention.base import AttentionBackend
from nanovllm.data.config import EngineConfig
from nanovllm.data.parts import MissingPartError, load
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.loader import load_model
from nanovllm.ops.device import choose_device, choose_dtype, out_of_memory

if TYPE_CHECKING:
    from nanovllm.models.eagle import EagleModel


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, and what it was loaded with.

    Attributes:
        config: the engine's settings.
        model_config: the model's shape.
        folder: the checkpoint.
        layer_transforms: what gives this rank its part of each layer, of any model.
    """

    config: EngineConfig
    model_config: ModelConfig
    folder: pathlib.Path
    layer_transforms: Sequence[Callable[[nn.Module], None]]
    model: LlamaForCausalLM
    backend: AttentionBackend
    device: torch.device
    dtype: torch.dtype

    @property
    def max_positions(self) -> int:
        """The longest sequence."""
        return self.config.max_model_len or self.model_config.max_position_embeddings

    def prepare(self, model: LlamaForCausalLM | EagleModel) -> None:
        """Pack the weights of this model, or of another one that drafts for it, and fuse its
        layers into one call if the compiled operators are there."""
        model.pack_weights()
        if not self.config.enforce_eager:
            with contextlib.suppress(MissingPartError):
                load("nanovllm.models.fused:fuse_layers", "compiled operators")(model)


def load_for_running(
    config: EngineConfig, model_config: ModelConfig, folder: pathlib.Path
) -> LoadedModel:
    """Load a model.

    Raises:
        ValueError: this machine does not support the device, dtype or backend, or the weights do
            not fit in the GPU's memory.
    """
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    backend = create_backend(config, model_config, device)
    layer_transforms = [
        *_transform("nanovllm.layers.tensor_parallel:parallelize", config, "tensor_parallel_size")
    ]
    transforms = [
        *layer_transforms,
        *_transform(
            "nanovllm.distributed.pipeline_parallel:keep_stage", config, "pipeline_parallel_size"
        ),
    ]
    with out_of_memory(
        "the weights", "use --dtype auto (16 bits a weight), a smaller model or --device cpu"
    ):
        model = load_model(
            folder,
            model_config,
            dtype,
            device,
            max_positions=config.max_model_len or model_config.max_position_embeddings,
            load_format=config.load_format,
            seed=config.seed,
            transforms=transforms,
        )
        loaded = LoadedModel(
            config=config,
            model_config=model_config,
            folder=folder,
            layer_transforms=layer_transforms,
            model=model,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        loaded.prepare(model)
    return loaded


def _transform(entry: str, config: EngineConfig, setting: str) -> list[Callable[..., None]]:
    """Return a function that changes a model for its rank, which changes nothing in a group of one;
    none if this copy of the package has none and needs none."""
    try:
        return [load(entry, setting)]
    except MissingPartError:
        if vars(config)[setting] > 1:
            raise
        return []


def create_backend(
    config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> AttentionBackend:
    """Choose the implementation of attention."""
    is_latent = model_config.kv_lora_rank > 0
    extras = {
        "sliding windows": any(model_config.layer_windows),
        "soft caps": model_config.attention_soft_cap > 0,
        "a quantized KV cache": config.kv_cache_dtype != "auto",
    }
    backend = get_backend(
        config.attention_backend,
        device,
        model_config.head_dim,
        latent=is_latent,
        extras=[name for name, is_wanted in extras.items() if is_wanted],
    )
    if config.kv_cache_dtype == "auto":
        return backend
    quantize = load("nanovllm.attention.quantized:create", "kv_cache_dtype")
    return cast("AttentionBackend", quantize(backend, config, is_latent))
