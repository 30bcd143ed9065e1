"""Llama and its relatives (Mistral, Qwen2, Qwen3; the base of Gemma 2): packed tokens in, hidden states out.

Built by notebooks/10_first_tokens.ipynb: edit it there, then run `python -m nanovllm.course build`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm import ops
from nanovllm.attention.base import Rotary, attend
from nanovllm.models.config import ModelConfig


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Angle a position for each pair of channels, `[head_dim / 2]` float32 (RoPE, Su et al. 2021).

    "linear" scaling divides all of them, as if positions were closer together; "llama3" divides only the slow ones
    (wavelength over `original_max_position_embeddings / low_freq_factor`), with a smooth transition.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling: dict[str, Any] = config.rope_scaling
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    if scaling["rope_type"] == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast, as it is; 0: slow, divided
        return keep * frequencies + (1 - keep) * frequencies / scaling["factor"]
    return frequencies


def rotary_table(config: ModelConfig, max_positions: int) -> Tensor:
    """`[max_positions, head_dim]` float32 on the CPU: cosines in the first half, sines in the second."""
    # Even where models are built on the meta device, whose `arange` takes torch a second to import.
    positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, rotary_frequencies(config))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class Linear(nn.Module):
    """y = x Wᵀ + b over packed tokens, `[num_tokens, in_features]` to `[num_tokens, out_features]`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """A row of the matrix for every token, `[num_tokens]` to `[num_tokens, hidden_size]`."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return ops.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019); with a residual, the sum of both is normalised."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(normalised sum, sum): one pass over memory where two operations would take three."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Projections, rotary positions, and a call to whoever computes attention."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.window = config.layer_windows[layer] if config.layer_windows else 0
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.soft_cap = config.attention_soft_cap
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, width, config.qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(q, k, v, self.layer, self.scale, self.window, self.soft_cap, rotary)
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.silu_and_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, residual: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, rotary)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    """Embedding, layers, final norm."""

    embedding_class: type[Embedding] = Embedding
    layer_class: type[nn.Module] = DecoderLayer
    norm_class: type[RMSNorm] = RMSNorm

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.embed_tokens = self.embedding_class(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.layer_class(config, layer) for layer in range(config.num_layers))
        self.norm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", rotary_table(config, max_positions), persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        residual = torch.zeros_like(x)
        rotary = Rotary(positions, self.cos_sin)
        for layer in self.layers:
            x, residual = layer(x, residual, rotary)
        return self.norm.add(x, residual)[0]


# Where a checkpoint's matrix stands in a fused one: part i of the matrix on the right.
FUSED = {
    "self_attn.q_proj": ("self_attn.qkv_proj", 0),
    "self_attn.k_proj": ("self_attn.qkv_proj", 1),
    "self_attn.v_proj": ("self_attn.qkv_proj", 2),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
}


class LlamaForCausalLM(nn.Module):
    """A decoder-only model over packed tokens.

    It knows neither requests nor blocks: what attention needs beyond q, k and v comes with the forward context.

    Args:
        config: the model's shape.
        max_positions: length of the rotary table: the longest sequence that will come.
    """

    model_class: type[LlamaModel] = LlamaModel

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        self.model = self.model_class(config, max_positions)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.tie_weights()

    def tie_weights(self) -> None:
        """Let the output head be the embedding matrix."""
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states `[num_tokens, hidden_size]` of packed tokens.

        Args:
            input_ids, positions: `[num_tokens]` int64; positions count within each token's own sequence.
        """
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[num_rows, hidden_size]` to `[num_rows, vocab_size]`, in the model's dtype: ask only for rows you need."""
        return self.lm_head(hidden)

    def checkpoint_view(self, name: str) -> Tensor | None:
        """The memory in which a checkpoint's tensor belongs: a parameter, or some rows of a fused one.

        Returns:
            None for a tensor that this model does not keep (rotary buffers; an output head that is tied).

        Raises:
            KeyError: a name that does not belong to this architecture.
        """
        if name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and self.config.tie_word_embeddings
        ):
            return None
        prefix, _, kind = name.rpartition(".")  # kind: weight or bias
        try:
            for part, (fused, index) in FUSED.items():
                if prefix.endswith(part):
                    rows = self._fused_rows(fused)
                    whole = self.get_parameter(f"{prefix[: -len(part)]}{fused}.{kind}")
                    return whole[sum(rows[:index]) : sum(rows[: index + 1])]
            return self.get_parameter(name)
        except AttributeError as error:
            raise KeyError(f"this {self.config.architecture} has no place for {name!r}") from error

    def _fused_rows(self, fused: str) -> list[int]:
        config = self.config
        if fused == "mlp.gate_up_proj":
            return [config.intermediate_size] * 2
        return [
            heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        ]

    def pack_weights(self) -> None:
        """Put the matrices in the order in which this machine multiplies fastest. Nothing can be loaded afterwards:
        rows are no longer rows."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.weight = nn.Parameter(ops.pack_weight(module.weight), requires_grad=False)
        if self.config.tie_word_embeddings:
            self.model.embed_tokens.weight = self.lm_head.weight
