"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): Llama with bounded scores and logits, and twice as
many norms.

`llama.py` covers what the configuration expresses: heads of any size, the factor on the scores and
their bound (soft cap), a window for every second layer. This module has the layers that compute
differently."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm import ops
from nanovllm.attention.base import Rotary
from nanovllm.layers.basic import RMSNorm
from nanovllm.models.config import ModelConfig
from nanovllm.models.llama import MLP, DecoderLayer, LlamaForCausalLM


class Gemma2RMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), all in float32: in bfloat16, 1 + weight would lose most of a small
    weight."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x.float(), 1.0 + self.weight.float(), self.eps).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual.add_(x)
        return self(residual), residual


class Gemma2MLP(MLP):
    """GeGLU (Shazeer 2020): down(gelu(gate(x)) * up(x)), with gelu in its tanh approximation."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)


class Gemma2DecoderLayer(DecoderLayer):
    """Attention and MLP, each on the normalised residual stream, and each normalised again before
    it is added."""

    norm_class = Gemma2RMSNorm

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.pre_feedforward_layernorm = Gemma2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = Gemma2RMSNorm(config.hidden_size, config.rms_norm_eps)

    def build_mlp(self, config: ModelConfig, layer: int) -> MLP:
        return Gemma2MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, rotary))
        x, residual = self.pre_feedforward_layernorm.add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Gemma2ForCausalLM(LlamaForCausalLM):
    """A decoder-only model over packed tokens, as `LlamaForCausalLM`."""

    scales_embedding = True
    layer_class = Gemma2DecoderLayer

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[num_rows, hidden_size]` to `[num_rows, vocab_size]`, within `± logit_soft_cap` if there
        is one."""
        logits = super().compute_logits(hidden)
        cap = self.config.logit_soft_cap
        return cap * torch.tanh(logits / cap) if cap else logits
