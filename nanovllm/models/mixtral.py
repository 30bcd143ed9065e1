"""Mixtral (Jiang et al. 2024, arXiv 2401.04088) and Qwen3-MoE: Llama with experts in the place of its MLPs.

Built by notebooks/24_expert_parallel.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import DecoderLayer, LlamaModel
from nanovllm.models.moe import MoE, MoEForCausalLM


class MixtralDecoderLayer(DecoderLayer):
    """Llama's layer; a `MoE` follows attention wherever the configuration says so."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        sparse = config.moe is not None and config.moe.sparse_layers[layer]
        # An MLP that gives way to experts has no channels: they need not be divisible by the number of ranks.
        super().__init__(replace(config, intermediate_size=0) if sparse else config, layer)
        if config.moe is not None and sparse:
            self.mlp = MoE(config.moe, config.hidden_size)  # type: ignore[assignment]  # it was an MLP


class MixtralModel(LlamaModel):
    """Embedding, layers, final norm: Llama's, with the layers above."""

    layer_class = MixtralDecoderLayer


class MixtralForCausalLM(MoEForCausalLM):
    """A decoder-only model over packed tokens, as `LlamaForCausalLM`."""

    model_class = MixtralModel
