"""Llama and its relatives (Mistral, Qwen2, Qwen3; the base of Gemma 2): packed tokens in, hidden states out.

Built by notebooks/10_first_tokens.ipynb: edit it there, then run `python -m nanovllm.lab.course build`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice, product
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from nanovllm import ops
from nanovllm.attention.base import Rotary, attend
from nanovllm.distributed.groups import get_pp_group
from nanovllm.distributed.pipeline_parallel import IntermediateTensors, if_here, is_elsewhere, layers_here
from nanovllm.layers.basic import Layer, Linear, Place, RMSNorm
from nanovllm.layers.tensor_parallel import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
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


class SelfAttention(nn.Module):
    """Projections, rotary positions, and a call to whoever computes attention: all for the heads of this rank."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.window = config.layer_windows[layer] if config.layer_windows else 0
        self.scale = config.attention_scale or config.head_dim**-0.5
        self.soft_cap = config.attention_soft_cap
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads, config.qkv_bias
        )
        self.o_proj = RowParallelLinear(config.num_heads * config.head_dim, config.hidden_size, config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(q, k, v, self.layer, self.scale, self.window, self.soft_cap, rotary)
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [config.intermediate_size] * 2, config.mlp_bias
        )
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, config.mlp_bias)

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
    """Embedding, layers, final norm; in a pipeline, those that this rank's stage has."""

    embedding_class: type[VocabParallelEmbedding] = VocabParallelEmbedding
    layer_class: type[nn.Module] = DecoderLayer
    norm_class: type[RMSNorm] = RMSNorm
    rotary_table = staticmethod(rotary_table)

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.stage, self.here = get_pp_group(), layers_here(config.num_layers)
        # The last stage needs the embedding if the output head is the same matrix.
        embeds = self.stage.is_first or (self.stage.is_last and config.tie_word_embeddings)
        self.embed_tokens = if_here(embeds, self.embedding_class, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            if_here(layer in self.here, self.layer_class, config, layer) for layer in range(config.num_layers)
        )
        self.norm = if_here(self.stage.is_last, self.norm_class, config.hidden_size, config.rms_norm_eps)
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", self.rotary_table(config, max_positions), persistent=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, received: IntermediateTensors | None = None
    ) -> Tensor | IntermediateTensors:
        if received is None:
            x = self.embed_tokens(input_ids)
            residual = torch.zeros_like(x)
        else:
            x, residual = received.hidden, received.residual
        rotary = Rotary(positions, self.cos_sin)
        for layer in islice(self.layers, self.here.start, self.here.stop):
            x, residual = layer(x, residual, rotary)
        if not self.stage.is_last:
            return IntermediateTensors(x, residual)
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
    fused: ClassVar[dict[str, tuple[str, int]]] = FUSED

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        self.model = self.model_class(config, max_positions)
        self.lm_head = if_here(self.model.stage.is_last, ParallelLMHead, config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.tie_weights()

    def tie_weights(self) -> None:
        """Let the output head be the embedding matrix, where there is a head."""
        if self.model.stage.is_last:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids: Tensor, positions: Tensor, received: IntermediateTensors | None = None
    ) -> Tensor | IntermediateTensors:
        """Hidden states `[num_tokens, hidden_size]` of packed tokens; or, if another stage of a pipeline goes on, what that
        one receives.

        Args:
            input_ids, positions: `[num_tokens]` int64; positions count within each token's own sequence.
            received: what the stage before has computed; None on the first one.
        """
        return self.model(input_ids, positions, received)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[num_rows, hidden_size]` to `[num_rows, vocab_size]`, in the model's dtype: ask only for rows you need."""
        return self.lm_head(hidden)

    def checkpoint_place(self, name: str) -> Place | None:
        """Where a checkpoint's tensor belongs: in a parameter, or in some rows of a fused one.

        Returns:
            None for a tensor that this model does not keep (rotary buffers; an output head that is tied), or another
            stage of the pipeline does.

        Raises:
            KeyError: a name that does not belong to this architecture.
        """
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.config.tie_word_embeddings):
            return None
        if is_elsewhere(self, name):
            return None
        prefix, _, kind = name.rpartition(".")  # kind: weight or bias
        part = 0
        for unfused, (fused, index) in self.fused.items():
            if prefix.endswith(unfused):
                prefix, part = prefix.removesuffix(unfused) + fused, index
        try:
            return cast(Layer, self.get_submodule(prefix)).place(kind, part)
        except AttributeError as error:
            raise KeyError(f"this {self.config.architecture} has no place for {name!r}") from error

    def checkpoint_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and whole shapes of a checkpoint's tensors: all that `checkpoint_place` has a place for."""
        for path, module in self.named_modules():
            if not isinstance(module, Layer):
                continue
            fused = [path.removesuffix(whole) + part for part, (whole, _) in self.fused.items() if path.endswith(whole)]
            for prefix, (kind, _) in product(fused or [path], module.named_parameters()):
                if (place := self.checkpoint_place(f"{prefix}.{kind}")) is not None:
                    yield f"{prefix}.{kind}", place.whole_shape

    def checkpoint_parts(self, name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        """A checkpoint's tensor as `checkpoint_place` knows it: here, as it is; elsewhere, cut into several."""
        yield name, tensor

    def pack_weights(self) -> None:
        """Put the matrices in the order in which this machine multiplies fastest. Nothing can be loaded afterwards:
        rows are no longer rows."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.weight = nn.Parameter(ops.pack_weight(module.weight), requires_grad=False)
        if self.config.tie_word_embeddings and self.model.stage.is_last:
            self.model.embed_tokens.weight = self.lm_head.weight
