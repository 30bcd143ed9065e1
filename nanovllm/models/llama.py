"""Llama and its relatives (Mistral, Qwen2, Qwen3; the base of Gemma 2): from packed tokens to
hidden states.

Built by notebooks/10_first_tokens.ipynb: edit it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanovllm import ops
from nanovllm.attention.base import (
    AttentionBackend,
    AttentionOptions,
    Rotary,
    attend,
    kv_cache_shape,
)
from nanovllm.layers.basic import (
    Embedding,
    Layer,
    Linear,
    LMHead,
    MergedLinear,
    Packable,
    Place,
    QKVLinear,
    RMSNorm,
)
from nanovllm.models.config import ModelConfig
from nanovllm.models.yarn import yarn_attention_factor, yarn_frequencies


def stretched(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Return the angles for a model with a longer context than it was trained on.

    With `rope_type` "linear" in `config.rope_scaling`, all angles are divided by `factor`. With
    "llama3", a pair's turns within `original_max_position_embeddings` decide: above
    `high_freq_factor` the angle stays, below `low_freq_factor` it is divided by `factor`, and in
    between it is a mean of both, whose weights are linear in the turns."""
    scaling = config.rope_scaling
    factor: float = scaling.get("factor", 1.0)
    if scaling["rope_type"] == "linear":
        return frequencies / factor
    if scaling["rope_type"] == "llama3":
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        length: int = scaling["original_max_position_embeddings"]
        turns = length * frequencies / (2 * math.pi)
        # 1: fast, as it is; 0: slow, divided
        keep: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / factor
    return frequencies


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position for each pair of channels, `[head_dim / 2]` float32 (RoPE, Su et al.
    2021); on the CPU, also where torch's default device is the meta device."""
    if config.rope_scaling["rope_type"] == "yarn":
        return yarn_frequencies(config)
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    return stretched(1.0 / config.rope_theta ** (pairs / config.head_dim), config)


def rotary_table(config: ModelConfig, max_positions: int) -> Tensor:
    """`[max_positions, head_dim]` float32 on the CPU: cosines in the first half, sines in the
    second."""
    # On the CPU even if the model is built on the meta device, for whose `arange` torch imports
    # modules for a second.
    positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, rotary_frequencies(config))
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    if config.rope_scaling["rope_type"] == "yarn":
        table *= yarn_attention_factor(config)
    return table


class AttentionLayer(nn.Module):
    """A layer's attention, which has a KV cache.

    Attributes:
        layer: its number in the model, by which the forward context finds the cache.
    """

    layer: int
    __call__: Callable[..., Tensor]

    def cache_shape(
        self, num_blocks: int, block_size: int, backend: AttentionBackend
    ) -> tuple[int, ...]:
        """Return the shape of this layer's KV cache, for the backend that will use it."""
        raise NotImplementedError


class SelfAttention(AttentionLayer):
    """Projections, rotary positions and a call of the attention backend."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.options: AttentionOptions = {
            "sliding_window": config.layer_windows[layer] if config.layer_windows else 0
        }
        if config.attention_soft_cap:
            self.options["soft_cap"] = config.attention_soft_cap
        self.qkv_proj = QKVLinear(
            config.hidden_size,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            config.qkv_bias,
        )
        self.o_proj = Linear(
            config.num_heads * config.head_dim, config.hidden_size, config.output_bias
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        num_heads = self.qkv_proj.num_heads
        num_kv_heads = self.qkv_proj.num_kv_heads
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        out = attend(q, k, v, self.layer, self.scale, rotary=rotary, **self.options)
        return self.o_proj(out.flatten(1))

    def cache_shape(
        self, num_blocks: int, block_size: int, backend: AttentionBackend
    ) -> tuple[int, ...]:
        """See the base class."""
        width = self.head_dim + backend.scale_bytes
        return kv_cache_shape(num_blocks, self.qkv_proj.num_kv_heads, block_size, width)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(self, hidden: int, intermediate: int, bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = MergedLinear(hidden, [intermediate, intermediate], bias)
        self.down_proj = Linear(intermediate, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.silu_and_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised residual stream."""

    attention_class: type[AttentionLayer] = SelfAttention
    norm_class: type[RMSNorm] = RMSNorm

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self.attention_class(config, layer)
        self.post_attention_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.mlp = self.build_mlp(config, layer)

    def build_mlp(self, config: ModelConfig, layer: int) -> nn.Module:
        """The MLP of a layer; models with experts have other modules here."""
        return MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor, residual: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, rotary)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


# What `LlamaModel.forward` calls one after another: `(x, residual, rotary)` to the next two.
LayerCall = Callable[[Tensor, Tensor, Rotary], tuple[Tensor, Tensor]]


class LlamaModel(nn.Module):
    """Embedding, layers and final norm. `family` names their classes.

    Attributes:
        layer_calls: what `forward` calls between embedding and norm: the layers, or calls that
            stand for them.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self, config: ModelConfig, max_positions: int, family: type[LlamaForCausalLM]
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        factor = hidden**0.5 if family.scales_embedding else None
        self.embed_tokens = Embedding(config.vocab_size, hidden, factor)
        self.layers = nn.ModuleList(
            family.layer_class(config, layer) for layer in range(config.num_layers)
        )
        self.layer_calls: list[LayerCall] = list(self.layers)
        self.norm = family.layer_class.norm_class(hidden, config.rms_norm_eps)
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", rotary_table(config, max_positions), persistent=False)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        residual = torch.zeros_like(x)
        rotary = Rotary(positions, self.cos_sin)
        for call in self.layer_calls:
            x, residual = call(x, residual, rotary)
        return self.norm.add(x, residual)[0]


class LlamaForCausalLM(nn.Module):
    """A decoder-only model over packed tokens.

    It is independent of requests and blocks: the forward context supplies what attention needs
    beyond q, k and v.

    Args:
        config: the model's shape.
        max_positions: length of the rotary table: the longest sequence in tokens.

    Attributes:
        is_tied: embedding and output head are one matrix.
        unused: names in the checkpoint, and beginnings of names, that this model does not need.
    """

    scales_embedding = False
    layer_class: type[DecoderLayer] = DecoderLayer

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, max_positions, type(self))
        self.lm_head = LMHead(config.vocab_size, config.hidden_size)
        self.is_tied = config.tie_word_embeddings
        self.unused = ["lm_head"] if self.is_tied else []
        self.tie_weights()

    def tie_weights(self) -> None:
        """Use the output head's matrix as embedding, if the checkpoint has one matrix for both."""
        if self.is_tied:
            self.model.embed_tokens.weight = self.lm_head.weight

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states `[num_tokens, hidden_size]` of packed tokens.

        Args:
            input_ids, positions: `[num_tokens]` int64; positions count within each sequence.
        """
        return self.model(input_ids, positions)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[num_rows, hidden_size]` to `[num_rows, vocab_size]`, in the model's dtype. Pass only
        the rows that are needed."""
        return self.lm_head(hidden)

    def checkpoint_places(self) -> dict[str, list[Place]]:
        """Where each of the checkpoint's tensors belongs, by name."""
        found: dict[str, list[Place]] = {}
        for path, module in self.named_modules():
            is_embedding = (
                path == "lm_head"
                and self.is_tied
                and module.weight is self.model.embed_tokens.weight
            )
            if isinstance(module, Layer) and not is_embedding:
                for name, place in module.places(path):
                    found.setdefault(name, []).append(place)
        return found

    def checkpoint_name(self, name: str) -> str | None:
        """The name in `checkpoint_places` of a tensor in the file; None for one that the model does
        not need: rotary buffers, a tied output head."""
        is_unused = name.endswith("rotary_emb.inv_freq") or any(
            f"{name}.".startswith(f"{unused}.") for unused in self.unused
        )
        return None if is_unused else name

    @property
    def attention_layers(self) -> dict[int, AttentionLayer]:
        """The attention of each layer that this model has, by the layer's number."""
        found = [module for module in self.modules() if isinstance(module, AttentionLayer)]
        return {module.layer: module for module in found}

    def pack_weights(self) -> None:
        """Rearrange the matrices so that this machine multiplies fastest. Afterwards nothing can be
        loaded, since a packed matrix has no rows to copy to."""
        for module in self.modules():
            if isinstance(module, Packable) and module.packable:
                module.pack()
        self.tie_weights()
