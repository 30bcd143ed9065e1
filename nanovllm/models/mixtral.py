"""Mixtral (Jiang et al. 2024, arXiv 2401.04088) and Qwen3-MoE: Llama with experts in place of its MLPs.

Built by notebooks/24_expert_parallel.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

from torch import nn

from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import DecoderLayer, LlamaModel
from nanovllm.models.moe import MoE, MoEForCausalLM


class MixtralDecoderLayer(DecoderLayer):
    """Llama's layer, with a `MoE` as `mlp` in the layers that the configuration names."""

    def build_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        sparse = config.moe is not None and config.moe.sparse_layers[layer]
        return MoE(config.moe, config.hidden_size) if config.moe and sparse else super().build_mlp(config, layer)


class MixtralModel(LlamaModel):
    """Llama's model, made of the layers above."""

    layer_class = MixtralDecoderLayer


class MixtralForCausalLM(MoEForCausalLM):
    """A decoder-only model over packed tokens, as `LlamaForCausalLM`."""

    model_class = MixtralModel
